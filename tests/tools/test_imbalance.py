"""Rare classes, as `tools/imbalance.py` makes and measures them."""

import csv
import sys
from pathlib import Path

import torch

from vbcaps.data import load_dataset

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import imbalance as tool
import rare_table as tables


def test_the_training_set_has_a_rare_class_and_the_test_set_has_none():
    whole = load_dataset("sample")
    part = tool.part_of(whole, {0: 100, 6: 2})
    assert torch.bincount(part.train.labels).tolist() == [100, 2]
    assert part.classes == (whole.classes[0], whole.classes[6])
    assert torch.equal(part.train.images[100:], whole.train.images[whole.train.labels == 6][:2])
    per_class = torch.bincount(whole.test.labels)
    assert torch.bincount(part.test.labels).tolist() == [per_class[0], per_class[6]]


def test_a_row_has_the_errors_of_rare_and_common_classes(tmp_path):
    words = ["--base", "default", "--images", "100", "--epochs", "1", "--seeds", "1", "--settings", "as they are"]
    tool.main([*words, "--device", "cpu", "--csv", str(tmp_path / "rows.csv")])
    with open(tmp_path / "rows.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    assert (row["common_classes"], row["common"]) == ("T-shirt/top", "100")
    assert (row["rare_classes"], row["rare"]) == ("Shirt", "2")
    errors = float(row["common_error"]) + float(row["rare_error"])
    assert abs(float(row["balanced_accuracy"]) - (1 - errors / 2)) < 2e-4


def test_the_table_has_a_row_for_each_setting_of_a_problem():
    def row(setting, accuracy, **problem):
        same = dict(
            base="fashion_laptop", epochs="8", common_classes="Coat", rare_classes="Shirt", common="500", rare="10"
        )
        measures = dict.fromkeys(("macro_auc", "macro_f1", "common_error", "rare_error"), "0.25")
        return same | problem | measures | dict(setting=setting, balanced_accuracy=accuracy, commit="abc")

    rows = [
        row("as they are", "0.7"),
        row("--balance 1", "0.9"),
        row("as they are", "0.8"),
        row("as they are", "1", rare="5"),
    ]
    introduction, first, second = tables.on_rare_classes(rows)
    assert "imbalance.csv" in introduction
    assert first.startswith("### Shirt with 10 images, Coat with 500: fashion_laptop, 8 epochs")
    assert [line.split(" | ")[1] for line in first.splitlines()[4:]] == ["75.00 ± 7.07", "90.00"]
    assert "### Shirt with 5 images" in second
    assert tables.on_rare_classes([]) == []

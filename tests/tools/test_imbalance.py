"""Rare classes, as `tools/imbalance.py` makes and measures them."""

import csv
import sys
from pathlib import Path

import torch

from vbcaps.data import load_dataset

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import imbalance as tool


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

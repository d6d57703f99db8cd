"""Fit or judge the temperature of each network in the package: rows of results/temperatures.csv.

python tools/temperatures.py [NAME...] [--data-folder FOLDER] [--write]

Most shipped networks have seen all training images. Their temperature is fitted on one half of the test images and
judged on the other, and the other way round; both rows are recorded, and the weights file gets that of the first half.
A network that had a held-out share keeps the temperature that training fitted there, which is judged on all test
images. Of many test images 20,000 are looked at. `tools/densities.py` comes after a new temperature: the scores of
familiar images, which it writes, depend on it.
"""

import argparse
import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import vbcaps
from vbcaps.training.environment import commit
from vbcaps.training.evaluate import Scorer
from vbcaps.training.files import write
from vbcaps.training.loop import prepare
from vbcaps.uncertainty import brier, ece, fit_temperature, nll
from vbcaps.uncertainty.density import Density
from vbcaps.weights.file import pack_weights, read_weights
from vbcaps.weights.find import weights_file

MOST = 20_000  # test images that are looked at; affNIST has 320,000
ROOT = Path(__file__).parents[1]
TABLE = ROOT / "results" / "temperatures.csv"
HEAD = (
    "network", "fitted_on", "judged_on", "images", "temperature", "error", "ece_before", "ece", "adaptive_ece",
    "nll_before", "nll", "brier_before", "brier", "source", "commit",
)  # fmt: skip


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="networks; by default all that are trained")
    parser.add_argument("--data-folder", metavar="FOLDER", help="folder of the datasets")
    parser.add_argument("--write", action="store_true", help="write weights files and the table, not only print")
    arguments = parser.parse_args(words)
    for name in arguments.names or vbcaps.list_models():
        rows = judge(name, arguments.data_folder)
        for row in rows:
            print(*(f"{key}={row[key]}" for key in ("network", "judged_on", "temperature", "ece_before", "ece", "nll")))
        if arguments.write:
            if not vbcaps.load(name).recipe.validation:
                put_into(weights_file(name), float(str(rows[0]["temperature"])))
            record(TABLE, rows)


def judge(name: str, data_folder: str | None) -> list[dict[str, object]]:
    """Return a row for each half of the test images on which a temperature is fitted, or one for that of the file."""
    model = vbcaps.load(name)
    data = prepare(model.recipe, data_folder, torch.device("cpu"))
    order = torch.randperm(len(data.test.labels), generator=torch.Generator().manual_seed(0))
    test = data.test.take(order[:MOST].sort().values)
    score = Scorer(model.net, test.images, model.view, model.num_classes)  # of the images as they are, unlike predict
    logits = score().clamp_min(1e-38).log()  # but for a constant of each image
    first = torch.randperm(len(logits), generator=torch.Generator().manual_seed(1)) < len(logits) // 2
    error = float((logits.argmax(1) != test.labels).double().mean())
    if abs(error - model.about["test_error"]) > 3e-3:
        raise ValueError(
            f"{name} has {error:.4f} on these test images, and {model.about['test_error']:.4f} was recorded"
        )
    ways: list[tuple[str, str, Tensor, float]] = []  # fitted on, judged on, which images these are, temperature
    if model.recipe.validation:
        ways.append(("held-out images", "all test images", torch.ones_like(first), model.temperature))
    else:
        for half, fitted in (("first", first), ("second", ~first)):
            t = round(fit_temperature(logits[fitted], test.labels[fitted]), 4)
            ways.append((f"{half} half of the test images", "the other half", ~fitted, t))
    rows = []
    for fitted_on, judged_on, judged, t in ways:
        z, y = logits[judged], test.labels[judged]
        before, after = z.softmax(1), (z / t).softmax(1)
        measured = dict(
            temperature=t, error=float((z.argmax(1) != y).double().mean()),
            ece_before=ece(before, y), ece=ece(after, y), adaptive_ece=ece(after, y, adaptive=True),
            nll_before=nll(before, y), nll=nll(after, y), brier_before=brier(before, y), brier=brier(after, y),
        )  # fmt: skip
        rows.append(
            dict(network=name, fitted_on=fitted_on, judged_on=judged_on, images=len(y))
            | {key: f"{value:.5g}" for key, value in measured.items()}
            | dict(source=data.source, commit=commit())
        )
    return rows


def put_into(
    path: Path,
    temperature: float | None = None,
    densities: Mapping[str, Density] | None = None,
    familiar: dict[str, Any] | None = None,
) -> None:
    """Write a temperature, densities or the scores of familiar images into a file; its tensors stay the same bits."""
    kept = read_weights(path)
    net = vbcaps.load(path).net
    about = kept.about
    if temperature is not None:
        about = about | dict(temperature=temperature, temperature_from="half of the test images")
    if familiar is not None:
        about = about | dict(familiar=familiar)
    inside = kept.densities if densities is None else densities
    write(path, pack_weights(net, kept.recipe, kept.classes, kept.view, about, inside))


def record(table: Path, rows: list[dict[str, object]]) -> None:
    """Put rows into the table, in place of those of the same network."""
    kept: list[dict[str, object]] = []
    if table.exists():
        with open(table, newline="") as file:
            kept = [row for row in csv.DictReader(file) if row["network"] != rows[0]["network"]]
    with open(table, "w", newline="") as file:
        writer = csv.DictWriter(file, HEAD, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted([*kept, *rows], key=lambda row: (str(row["network"]), str(row["fitted_on"]))))


if __name__ == "__main__":
    main()

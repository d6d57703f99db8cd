"""What do class weights and balanced sampling give where classes are rare? Rows for results/imbalance.csv.

python tools/imbalance.py [--base fashion_laptop] [--common-classes 0] [--rare-classes 6] [--images 3000] [--ratio 50]
                          [--epochs 8] [--seeds 5]

The training set keeps ``--images`` images of each common class, and ``--ratio`` times fewer of each rare one. Every
setting trains on it with each seed, from the same weights and for the same number of steps, and all test images of
these classes are tested with the last weights: nothing is chosen. A row has the test error over the rare classes, and
over the common ones; in the test set all are of one size.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from vae import KEPT, append

from vbcaps.data import Dataset, load_dataset
from vbcaps.training.environment import environment
from vbcaps.training.loop import fit, pick_device
from vbcaps.training.recipes import recipe

RESULTS = Path(__file__).parents[1] / "results"
SETTINGS: dict[str, dict[str, Any]] = {
    "as they are": {},
    "--class-weights balanced": dict(class_weights="balanced"),
    "--balance 0.5": dict(balance=0.5),
    "--balance 1": dict(balance=1.0),
}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="fashion_laptop", help="the recipe")
    parser.add_argument("--common-classes", type=int, nargs="+", default=[0], help="by number")
    parser.add_argument("--rare-classes", type=int, nargs="+", default=[6], help="by number")
    parser.add_argument("--images", type=int, default=3000, help="training images of each common class")
    parser.add_argument("--ratio", type=int, default=50, help="how many times fewer those of a rare class are")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS))
    parser.add_argument("--data-folder")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--csv", type=Path, default=RESULTS / "imbalance.csv", help="the file to which rows are added")
    arguments = parser.parse_args(words)
    about = environment(pick_device(arguments.device), 1)
    base = recipe(arguments.base, epochs=arguments.epochs, validation=0.0, test=True)
    whole = load_dataset(base.dataset, arguments.data_folder)
    fewer = arguments.images // arguments.ratio
    sizes = dict.fromkeys(arguments.common_classes, arguments.images) | dict.fromkeys(arguments.rare_classes, fewer)
    data = part_of(whole, sizes)
    problem = dict(base=arguments.base, epochs=arguments.epochs)
    problem |= {
        f"{which}_classes": names(whole, getattr(arguments, f"{which}_classes")) for which in ("common", "rare")
    }
    problem |= dict(common=arguments.images, rare=fewer)
    for seed in range(arguments.seeds):
        for name in arguments.settings:
            begun = time.time()
            with tempfile.TemporaryDirectory() as folder:
                one = base.with_fields(seed=seed, **SETTINGS[name])
                result = fit(one, Path(folder) / "run", data=data, device=arguments.device).result
            assert result is not None
            assert result.test is not None
            test = result.test
            row = problem | dict(setting=name, seed=seed, balanced_accuracy=f"{test.balanced_accuracy:.4f}")
            row |= dict(macro_f1=f"{test.macro_f1:.4f}", macro_auc=f"{test.macro_auc:.4f}")
            for which, classes in (("common", arguments.common_classes), ("rare", arguments.rare_classes)):
                errors = [test.per_class[list(sizes).index(c)]["error"] for c in classes]
                row[f"{which}_error"] = f"{statistics.mean(errors):.4f}"
            row |= dict(seconds=f"{time.time() - begun:.0f}") | {key: about[key] for key in KEPT}
            append(arguments.csv, row)


def part_of(data: Dataset, sizes: dict[int, int]) -> Dataset:
    """Return the first training images of some classes, as many as ``sizes`` says, and all their test images."""
    train, test = data.train, data.test
    kept = torch.cat([(train.labels == c).nonzero()[:size, 0] for c, size in sizes.items()])
    tested = torch.cat([(test.labels == c).nonzero()[:, 0] for c in sizes])
    number = torch.zeros(len(data.classes), dtype=torch.int64)
    number[list(sizes)] = torch.arange(len(sizes))
    some = [split.take(index) for split, index in ((train, kept), (test, tested))]
    train, test = (split._replace(labels=number[split.labels]) for split in some)
    return Dataset(f"a part of {data.name}", train, test, tuple(data.classes[c] for c in sizes), data.source)


def names(data: Dataset, classes: Sequence[int]) -> str:
    return ", ".join(data.classes[c] for c in classes)


if __name__ == "__main__":
    main()

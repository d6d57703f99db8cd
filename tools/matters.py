"""Make the tables of docs/matters.md from the recorded runs of the series `matters`: does routing matter?

python tools/matters.py [--scale laptop] [--write]

A row is a dataset, a column a kind of routing, a cell the mean and standard deviation of the test error over all
recorded seeds. Below, two kinds are paired by seed: the mean difference, every difference, and the p of a permutation
test that changes the signs of the differences in all ways.
"""

import argparse
import statistics
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

from cells import table
from series import RESULTS, Job, by_recipe, key, matters

from vbcaps.training.recipe import Recipe
from vbcaps.training.recipes import experiment_of
from vbcaps.training.runfolder import read_result

PAGE = Path(__file__).parents[1] / "docs" / "matters.md"
BEGIN, END = "<!-- results: made by tools/matters.py -->", "<!-- end of results -->"
KINDS = "settled", "uniform", "CNN", "EM", "Algorithm 1", "Dynamic"  # in the order of the series
PAIRS = ("settled", "uniform"), ("settled", "Algorithm 1"), ("settled", "EM"), ("settled", "CNN"), ("uniform", "CNN")
SEEDS = range(10)


def errors(recorded: dict[Recipe, Path], base: str, fields: dict[str, Any]) -> dict[int, float]:
    """Return the test errors of a setting in percent, by seed."""
    found = {}
    for seed in SEEDS:
        folder = recorded.get(key(Job(base, fields, seed).recipe))
        test = None if folder is None else read_result(folder)["test"]
        if test is not None:
            found[seed] = 100 * test["error"]
    return found


def by_dataset(scale: str, recorded: dict[Recipe, Path]) -> dict[str, dict[str, dict[int, float]]]:
    """Return the errors of every dataset and kind."""
    settings = matters(scale)
    datasets = len(settings) // len(KINDS)
    rows: dict[str, dict[str, dict[int, float]]] = {}
    for number, (base, fields) in enumerate(settings):
        label = experiment_of(settings[number % datasets][0]).label
        rows.setdefault(label, {})[KINDS[number // datasets]] = errors(recorded, base, fields)
    return rows


def cell(found: dict[int, float]) -> str:
    """Return mean, standard deviation and number of the errors of one kind."""
    values = list(found.values())
    if not values:
        return ""
    if len(values) == 1:
        return f"{values[0]:.2f} (1)"
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f} ({len(values)})"


def permutation_p(differences: Sequence[float]) -> float:
    """Return the share of all choices of signs whose mean is at least as far from 0.

    >>> permutation_p([1.0, 1.0, 1.0])
    0.25
    """
    own = abs(sum(differences))
    sums = [abs(sum(s * d for s, d in zip(signs, differences, strict=True))) for signs in _signs(len(differences))]
    return sum(one >= own * (1 - 1e-9) for one in sums) / len(sums)


def _signs(count: int) -> list[tuple[int, ...]]:
    return list(product((1, -1), repeat=count))


def pages_tables(scale: str, results: Path = RESULTS) -> str:
    """Return both tables as Markdown."""
    rows = by_dataset(scale, by_recipe(results))
    rows = {dataset: kinds for dataset, kinds in rows.items() if any(kinds.values())}
    first = table(" | ".join(("dataset", *KINDS)), [[name, *map(cell, kinds.values())] for name, kinds in rows.items()])
    paired = []
    for name, kinds in rows.items():
        for one, other in PAIRS:
            both = sorted(kinds[one].keys() & kinds[other].keys())
            if len(both) > 1:
                gaps = [kinds[one][seed] - kinds[other][seed] for seed in both]
                each = ", ".join(f"{gap:+.2f}" for gap in gaps)
                mean = f"{statistics.mean(gaps):+.2f}"
                paired.append([name, f"{one} - {other}", mean, each, f"{permutation_p(gaps):.2f}"])
    return f"{first}\n\n{table('dataset | difference | mean | by seed | p', paired)}"


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=("laptop", "fast"), default="laptop", help="which twins of the recipes")
    parser.add_argument("--write", action="store_true", help="write docs/matters.md, not only print")
    arguments = parser.parse_args(words)
    made = pages_tables(arguments.scale)
    print(made)
    if arguments.write:
        before, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n{made}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()

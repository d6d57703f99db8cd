"""Make tables of choices that were compared on a held-out share of the training set (choices.csv, viewpoints.csv)."""

import csv
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from cells import low_to_high, spread, table

from vbcaps.removed import REMOVED

HELD_OUT_HEAD = "choice | error after the last epoch | least | training error | epochs | held out | splits | commit"
HELD_OUT = """\
## Choices, compared on what was held out of the training set

Made by `tools/choices.py`, rows in [`choices.csv`](choices.csv). Of smallNORB whole toys are held out. Only rows of
the same epochs and splits compare: some toys are much harder than others. Mean ± standard deviation over the splits,
one run each. The least error is that of the best epoch, which nobody could have chosen; the training error is of images
as they were trained on, blanked and blended. "Earlier version" marks a choice of a field that only the commit of that
row has.
"""
# errors in % on what is familiar, at which choices are compared on what is novel
LEVELS = {"smallnorb": (12, 10, 8, 6), "affnist": (1.6, 1.2, 1, 0.8)}
NOVEL_HEAD = "choice | {} | novel (familiar) in the last epoch | epochs, of | held out | splits | commit"
NOVEL = """\
## Novel viewpoints, compared on toys held out of the training set

Made by `tools/viewpoints.py`, rows in [`viewpoints.csv`](viewpoints.csv): a network is trained on some toys at
familiar viewpoints, and tested on the others after each epoch. A cell "novel (familiar 8)" is the error on novel
viewpoints in % where the error on familiar ones first falls to 8%, between two epochs on a straight line. Mean ±
standard deviation over the splits; empty where one of them does not get there. For affNIST a network is trained on some
digits as they are, and tested on affine maps of the others.
"""


def read_rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def by_choice(rows: list[dict[str, str]], base: str) -> dict[tuple[str, str, str], list[dict[str, str]]]:
    """Return the rows of a base by (held, epochs, choice), then by split; the last of equal rows counts."""
    alike: dict[tuple[str, str, str], dict[int, dict[str, str]]] = {}
    for row in rows:
        if row["base"] == base:
            alike.setdefault((row["held"], row["epochs"], row["choice"]), {})[int(row["split"])] = row
    return {key: [runs[split] for split in sorted(runs)] for key, runs in alike.items()}


def bases(rows: list[dict[str, str]]) -> list[str]:
    return list(dict.fromkeys(row["base"] for row in rows))


def held_out(choices: list[dict[str, str]]) -> list[str]:
    """Return a heading and a table for each recipe that was changed; of equal epochs and splits the best is first."""
    made = []
    for base in bases(choices):
        found = sorted(
            by_choice(choices, base).items(),
            key=lambda one: (one[0][0], int(one[0][1]), splits(one[1]), statistics.mean(column(one[1], "last"))),
        )
        made.append(f"### {base}\n\n{table(HELD_OUT_HEAD, [held_out_row(*key, runs) for key, runs in found])}\n")
    return [HELD_OUT, *made] if made else []


def held_out_row(held: str, epochs: str, choice: str, runs: list[dict[str, str]]) -> list[str]:
    errors = [spread(column(runs, key)) for key in ("last", "least", "train_error")]
    commits = ", ".join(dict.fromkeys(run["commit"] for run in runs))
    failed = ", failed" if any(run["note"] for run in runs) else ""
    return [named(choice) + failed, *errors, epochs, f"{100 * float(held):g}%", splits(runs), commits]


def named(choice: str) -> str:
    """Return the first cell of a choice's row."""
    fields = {word.partition("=")[0] for word in choice.split()}
    return (f"`{choice}`" if choice else "as it is") + (", earlier version" if fields & REMOVED.keys() else "")


def splits(runs: list[dict[str, str]]) -> str:
    return ", ".join(run["split"] for run in runs)


def column(rows: list[dict[str, str]], key: str) -> list[float]:
    return [float(row[key]) for row in rows]


def on_novel_views(rows: list[dict[str, str]]) -> list[str]:
    """Return a heading and a table for each recipe for novel viewpoints, in the order of the choices."""
    made = []
    for base in bases(rows):
        levels = LEVELS[base.partition("_")[0]]
        head = NOVEL_HEAD.format(" | ".join(f"novel (familiar {level})" for level in levels))
        cells = [novel_row(levels, *key, runs) for key, runs in by_choice(rows, base).items()]
        made.append(f"### {base}, on what is novel\n\n{table(head, cells)}\n")
    return [NOVEL, *made] if made else []


def novel_row(levels: Sequence[float], held: str, epochs: str, choice: str, runs: list[dict[str, str]]) -> list[str]:
    curves = [[[float(error) for error in run[key].split()] for key in ("familiar", "novel")] for run in runs]
    cells = []
    for level in levels:
        errors = [novel_at(level, *curve) for curve in curves]
        cells.append("" if any(map(math.isnan, errors)) else spread([error / 100 for error in errors]))
    ends = [spread([curve[which][-1] / 100 for curve in curves if curve[which]]) for which in (1, 0)]
    done = low_to_high({len(familiar) for familiar, _ in curves})
    commits = ", ".join(dict.fromkeys(run["commit"] for run in runs))
    share = f"{100 * float(held):g}%"
    return [named(choice), *cells, f"{ends[0]} ({ends[1]})", f"{done}, {epochs}", share, splits(runs), commits]


def novel_at(level: float, familiar: Sequence[float], novel: Sequence[float]) -> float:
    """Return the error on novel views where that on familiar ones first falls to ``level``; nan where it never does."""
    for k, error in enumerate(familiar):
        if error <= level:
            if k == 0:
                return novel[0]
            part = (familiar[k - 1] - level) / (familiar[k - 1] - error)
            return novel[k - 1] * (1 - part) + novel[k] * part
    return math.nan

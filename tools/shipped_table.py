"""The table of results/README.md on the densities of the shipped networks: from results/shipped.csv alone."""

import statistics
from pathlib import Path

from cells import table
from held_out import read_rows

from vbcaps.figures.trust import NAMES
from vbcaps.figures.uncertainty import said


def on_shipped(table_file: Path) -> list[str]:
    """Return the section on densities of the shipped networks: the pair for the choice, then all other pairs."""
    if not table_file.exists():
        return []
    rows = read_rows(table_file)
    scores = list(dict.fromkeys(row["score"] for row in rows))
    cells: list[list[str]] = []
    for test, after in (("choice", ", training images"), ("strangers", "")):
        some = [row for row in rows if row["test"] == test]
        for network, against in dict.fromkeys((row["network"], row["against"]) for row in some):
            found = {
                row["score"]: row["value"] for row in some if (row["network"], row["against"]) == (network, against)
            }
            values = [f"{100 * float(found[score]):.1f}" if score in found else "" for score in scores]
            cells.append([f"`{network}`", NAMES[against] + after, *values])
        means = over_networks(rows, test)
        cells.append(["mean of the networks", test, *(f"{100 * means[score]:.1f}" for score in scores)])
    best = chosen_density(rows)
    told = f"""\
AUROC in % with which scores tell other images from those of a shipped VB network's dataset. Densities are fitted on
4,000 training images. First the pair for the choice: 1,000 other training images against 1,000 training images of
another dataset. The weights files of VB networks have the one with the best mean there, the {said(best)};
but for `fashion_laptop`, which has the class evidence: this was chosen for its recipe, over five seeds. Then 2,000 test
images against 2,000 of each other dataset, measured once. One seed: the networks are those in the package. Made by
`python tools/shipped.py --write`."""
    head = " | ".join(["network", "against", *(said(score) for score in scores)])
    return [f"## Strangers, shipped networks\n\n{told}\n\n{table(head, cells)}\n"]


def over_networks(rows: list[dict[str, str]], test: str) -> dict[str, float]:
    """Return the mean over networks of each score, of a network's mean over its pairs."""
    by_network: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if row["test"] == test:
            by_network.setdefault(row["score"], {}).setdefault(row["network"], []).append(float(row["value"]))
    return {score: statistics.mean(map(statistics.mean, found.values())) for score, found in by_network.items()}


def chosen_density(rows: list[dict[str, str]]) -> str:
    """Return the density with the best mean over networks on the pair for the choice."""
    means = over_networks(rows, "choice")
    return max((score for score in means if score.startswith("density ")), key=means.__getitem__)

"""From MNIST to affNIST: recorded runs beside the numbers that the paper prints in its figure."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from vbcaps.figures.records import MissingRecords, Record, of_today, read_records
from vbcaps.figures.run import BLUE, GREY, ORANGE, label_axes, new_figure, save

PALE, BLACK = "#cbd5e0", "#1a202c"


class Bar(NamedTuple):
    """One network: its errors in %, and whose number that is."""

    name: str
    affnist: float
    mnist: float
    whose: str  # literature, paper, ours, cnn


# Test accuracies in %, as the paper prints them: MNIST, affNIST.
LITERATURE = {
    "Dynamic (Sabour et al. 2017)": (99.2, 79.0),
    "HitNet (Deliège et al. 2019)": (99.6, 83.03),
    "CNN (Hinton et al. 2018)": (99.2, 85.9),
    "LadderCaps (Jeong et al. 2019)": (99.3, 87.8),
    "GCaps (Lenssen et al. 2018)": (98.42, 89.1),
    "SparseCaps (Rawlinson et al. 2018), unsupervised": (99.0, 90.1),
    "Attn-Routing (Choi et al. 2019)": (99.46, 91.6),
    "SCAE (Kosiorek et al. 2019), unsupervised": (98.5, 92.2),
    "EM-Routing (Hinton et al. 2018)": (99.2, 93.1),
}
PAPER = {"VB-Routing, the paper, matched on MNIST": (99.2, 96.9), "VB-Routing, the paper": (99.7, 98.1)}
OURS = {
    "affnist_matched": "VB-Routing, ours, matched on MNIST",
    "affnist": "VB-Routing, ours",
    "affnist_matched_cnn": "CNN of the same size, ours, matched on MNIST",
    "affnist_cnn": "CNN of the same size, ours",
}
COLOURS = dict(literature=PALE, paper=GREY, ours=BLUE, cnn=ORANGE)
LABELS = dict(
    literature="literature, as the paper prints it", paper="the paper's VB routing",
    ours="our VB routing, on regenerated images", cnn="our CNN, on regenerated images",
)  # fmt: skip


def affnist(results: Path, out: Path) -> list[Path]:
    """Draw the error on affNIST of each network, with its error on MNIST, the worst at the top."""
    rows = bars(read_records(results))
    figure = new_figure(8.8, 0.33 * len(rows) + 1.0)
    from matplotlib.patches import Patch  # after new_figure, which says what to do where matplotlib is missing

    axes = figure.subplots()
    beside = axes.get_yaxis_transform()  # x in shares of the axes, y in data
    for y, bar in enumerate(rows):
        hatch, bold = ("///" if bar.whose == "cnn" else None), ("bold" if bar.whose in ("ours", "cnn") else "normal")
        axes.barh(y, bar.affnist, color=COLOURS[bar.whose], height=0.72, hatch=hatch, edgecolor="white", lw=0)
        axes.text(bar.affnist + 0.2, y, number(bar.affnist), va="center", fontsize=9, color=BLACK, fontweight=bold)
        axes.text(1.08, y, number(bar.mnist), va="center", ha="right", fontsize=9, color=GREY, transform=beside)
    axes.text(1.08, -0.85, "on MNIST (%)", va="center", ha="right", fontsize=9, color=GREY, transform=beside)
    axes.set_yticks(range(len(rows)), [bar.name for bar in rows], fontsize=9)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    label_axes(axes, "", "test error on affNIST (%)", "")
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, max(bar.affnist for bar in rows) + 1.5)
    axes.set_xticks(range(0, int(axes.get_xlim()[1]) + 1, 5))
    shown = [Patch(fc=COLOURS[whose], hatch="///" if whose == "cnn" else None, ec="white", lw=0) for whose in LABELS]
    axes.legend(shown, list(LABELS.values()), loc="lower right", frameon=False, fontsize=9)
    return [save(figure, out / "affnist.png")]


def number(error: float) -> str:
    """Return an error in % with at most two digits after the point, as the numbers in the literature have."""
    return f"{error:.2f}".rstrip("0").rstrip(".")


def bars(records: Iterable[Record]) -> list[Bar]:
    """Return the printed numbers and the recorded ones, each of the latest run of its recipe, by their error."""
    printed = [
        Bar(name, 100 - there, 100 - mnist, whose)
        for numbers, whose in ((LITERATURE, "literature"), (PAPER, "paper"))
        for name, (mnist, there) in numbers.items()
    ]
    return sorted([*printed, *ours(records)], key=lambda bar: -bar.affnist)


def ours(records: Iterable[Record]) -> list[Bar]:
    """Return a bar for each recipe that was run: as it is today, else as it was last. It is the mean over seeds."""
    records, made = list(records), []
    for parent, name in OURS.items():
        runs = [one for one in records if one.recipe.name in (parent, f"{parent}_fast") and one.error() is not None]
        runs = [one for one in runs if of_today(one.recipe)] or runs[-1:]
        if runs:
            mean = {of: sum(one.error(of) or 0.0 for one in runs) / len(runs) for of in ("test", "familiar")}
            made.append(Bar(name, mean["test"], mean["familiar"], "cnn" if parent.endswith("cnn") else "ours"))
    if not made:
        raise MissingRecords(
            "results/ has no run on affNIST: `vbcaps train affnist_fast` makes one, and scripts/record puts it there"
        )
    return made

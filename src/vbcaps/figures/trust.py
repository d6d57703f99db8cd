"""How far uncertainty can be trusted: what tools/uncertainty.py recorded, and its figures.

Which score stands for a kind of network was chosen on one pair of datasets alone (the rows ``choice``).
"""

import csv
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, NamedTuple

from vbcaps.disk import TABLE as MOST
from vbcaps.disk import read_bytes
from vbcaps.figures.records import MissingRecords
from vbcaps.figures.run import BLUE, GREEN, GREY, ORANGE, RED, label_axes, new_figure, save
from vbcaps.figures.uncertainty import said
from vbcaps.training.runfolder import lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TABLE, CURVES = "uncertainty.csv", "uncertainty_curves.csv"
NAMES = {
    "fashion": "Fashion-MNIST", "fashion-mnist": "Fashion-MNIST", "mnist": "MNIST", "smallnorb": "smallNORB",
    "svhn": "SVHN", "cifar10": "CIFAR-10",
}  # fmt: skip
KINDS = {"": "VB", "_em": "EM", "_dynamic": "Dynamic", "_cnn": "CNN"}  # by the ending of the recipe's name
PLAIN = ("max_softmax", "entropy", "energy")  # scores of logits, which every network has
COLOURS = {"": BLUE, "_em": ORANGE, "_dynamic": GREEN, "_cnn": RED}


class Measure(NamedTuple):
    """One row of the table."""

    recipe: str
    viewpoint: str
    seeds: str  # "0", or "0+1+2" for an ensemble
    test: str
    against: str
    score: str
    measure: str
    value: float


class Measures:
    """The table, with the questions that figures and tables ask."""

    def __init__(self, rows: Iterable[Measure], scale: str = "laptop"):
        self.rows, self.scale = [row for row in rows if row.recipe.endswith(f"_{scale}")], scale
        self.found: dict[tuple[object, ...], list[float]] = {}
        for row in self.rows:
            members = row.seeds.count("+") + 1
            key = (row.recipe, row.viewpoint, row.test, row.against, row.score, row.measure, members)
            self.found.setdefault(key, []).append(row.value)

    def values(
        self,
        dataset: str,
        kind: str,
        *,
        test: str,
        measure: str,
        score: str = "",
        against: str = "",
        ensemble: int = 1,
        viewpoint: str = "",
    ) -> list[float]:
        """Return a value for each seed, or for each ensemble of so many members."""
        key = (f"{dataset}{kind}_{self.scale}", viewpoint, test, against, score, measure, ensemble)
        return self.found.get(key, [])

    def scores(self, kind: str, ensemble: int = 1) -> list[str]:
        """Return the names of all scores that were measured on the pair for choices."""
        found = {
            row.score: None
            for row in self.rows
            if row.test == "choice" and row.recipe == f"fashion{kind}_{self.scale}"
            and row.seeds.count("+") + 1 == ensemble
        }  # fmt: skip
        return list(found)

    def best(self, kind: str, wanted: Callable[[str], bool] = lambda score: True, ensemble: int = 1) -> str | None:
        """Return the score with the highest mean AUROC on the pair for choices, among those that are wanted."""
        found = {
            score: statistics.mean(values)
            for score in self.scores(kind, ensemble)
            if wanted(score)
            and (
                values := self.values(
                    "fashion", kind, test="choice", measure="auroc", score=score, against="cifar10", ensemble=ensemble
                )
            )
        }
        return max(found, key=found.__getitem__) if found else None

    def strangers(self, kind: str, score: str, ensemble: int = 1) -> dict[tuple[str, str], list[float]]:
        """Return the AUROC of a score for each pair of datasets, one for each seed."""
        pairs = {
            (row.recipe, row.against): None for row in self.rows if row.test == "strangers" and row.measure == "auroc"
        }
        found = {}
        for recipe, against in pairs:
            dataset = recipe.removesuffix(f"_{self.scale}")
            if dataset in NAMES:  # the recipe of VB, which each dataset has
                values = self.values(
                    dataset, kind, test="strangers", measure="auroc", score=score, against=against, ensemble=ensemble
                )
                if values:
                    found[dataset, against] = values
        return found


def of_posterior(score: str) -> bool:
    """Return whether a score comes from the posterior of capsules alone."""
    return score not in PLAIN and "logits" not in score and "features" not in score and score != "disagreement"


def read_measures(results: Path, scale: str = "laptop") -> Measures:
    path = results / TABLE
    if not path.exists():
        raise MissingRecords(
            f"{path} is missing: `python tools/series.py uncertainty` makes the runs, and `python tools/uncertainty.py "
            "RUN... --write` measures them"
        )
    with lines(read_bytes(path, MOST)) as file:
        fields = Measure._fields[:-1]
        rows = [
            Measure(**{field: row[field] for field in fields}, value=float(row["value"]))
            for row in csv.DictReader(file)
        ]
    return Measures(rows, scale)


def mean(values: Iterable[float]) -> float:
    return statistics.mean(values)


# --- strangers -------------------------------------------------------------------------------------------------------

Choice = tuple[str, str, str, int]  # label, kind, score, members


def compared(measures: Measures) -> list[Choice]:
    """Return the scores that the figure and the table compare: label, kind of network, score, members."""
    rows: list[Choice] = []
    for kind, name in KINDS.items():
        rows.append((f"{name}, maximum softmax", kind, "max_softmax", 1))
        if (best := measures.best(kind)) is not None and kind:
            rows.append((f"{name}, {said(best)}", kind, best, 1))
        if not kind and (best := measures.best(kind, of_posterior)) is not None:
            rows.append((f"{name}, {said(best)}", kind, best, 1))
    for kind, name in KINDS.items():
        for members in (5, 3):
            if (best := measures.best(kind, ensemble=members)) is not None:
                rows.append((f"{members} x {name}, {said(best)}", kind, best, members))
                break
    return rows


def strangers(results: Path, out: Path) -> list[Path]:
    """Draw how well scores tell strangers, a panel for each kind of network: each pair of datasets, and their mean.

    A marker is the mean over seeds, the line through it goes from the least to the greatest, on an axis that is
    logarithmic in 1 - AUROC. What has not run is said where its marker would be.
    """
    measures = read_measures(results)
    chosen = [one for one in dict.fromkeys(compared(measures)) if measures.strangers(*one[1:])]
    if not chosen:
        raise MissingRecords(f"{results / TABLE} has no strangers: measure more runs with tools/uncertainty.py")
    pairs = list(measures.strangers("", "max_softmax"))
    kinds = list(dict.fromkeys(kind for _, kind, _, _ in chosen))
    figure = new_figure(2.3 + 2.6 * len(kinds), 1.5 + 0.44 * (len(pairs) + 1))
    panels = figure.subplots(1, len(kinds), sharex=True, sharey=True, squeeze=False)[0]
    for axes, kind in zip(panels, kinds, strict=True):
        own = [one for one in chosen if one[1] == kind]
        for k, (label, _, score, members) in enumerate(own):
            _of_pairs(
                axes, measures.strangers(kind, score, members), pairs, k - (len(own) - 1) / 2, kind, score, members
            )
            axes.lines[-1].set_label(fill(label.partition(", ")[2] if members == 1 else label, 26))
        label_axes(axes, KINDS[kind], "", "")
        axes.grid(visible=False, axis="y")
        for y in borders(pairs):
            axes.axhline(y, color="#cbd5e0", lw=0.8)
        axes.axhline(len(pairs) - 0.5, color=GREY, lw=1.2)
        axes.axvline(0.5, color=GREY, lw=0.8, ls=":")
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.09), frameon=False, fontsize=8, handletextpad=0.2)
    ends = [0.2, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, BEST]
    panels[0].set_xscale("log")
    panels[0].set_xticks([1 - end for end in ends], [f"{end:g}".removeprefix("0") for end in ends[:-1]] + ["1*"])
    panels[0].set_xticks([], minor=True)
    panels[0].set_xlim(max(0.7, panels[0].get_xlim()[1]), 0.8 * (1 - BEST))
    labels = [f"{NAMES[familiar]} / {NAMES[strange]}" for familiar, strange in pairs] + ["mean of the pairs"]
    panels[0].set_yticks(range(len(labels)), labels)
    panels[0].set_ylim(len(labels) - 0.3, -0.55)
    for axes in panels:
        axes.tick_params(axis="y", length=0)
        axes.tick_params(axis="x", labelsize=8)
    below = f"AUROC, small networks, familiar / strange; marker: mean over seeds, line: their range; *: {BEST} or more"
    figure.supxlabel(below, fontsize=9, color=GREY)
    return [save(figure, out / "strangers.png")]


BEST = 0.995  # AUROC at the right edge: a better one is drawn there


def _of_pairs(
    axes: "Axes", found: dict[tuple[str, str], list[float]], pairs: list[tuple[str, str]], lane: float, kind: str,
    score: str, members: int,
) -> None:  # fmt: skip
    """Draw one score in its lane of each pair's row, and its mean in the last one, with its number."""
    colour, filled = COLOURS[kind], members == 1 and score != "max_softmax"
    places = [(edge(mean(found[pair])), y + 0.24 * lane) for y, pair in enumerate(pairs) if pair in found]
    for y, pair in enumerate(pairs):
        if pair in found:
            ends = [edge(min(found[pair])), edge(max(found[pair]))]
            axes.plot(ends, [y + 0.24 * lane] * 2, color=colour, lw=1.2, alpha=0.7)
        else:
            _say(axes, "not run", y + 0.24 * lane, colour)
    if len(found) == len(pairs):
        over_pairs = mean(mean(found[pair]) for pair in pairs)
        places.append((edge(over_pairs), len(pairs) + 0.1 + 0.36 * lane))
        axes.annotate(f"{over_pairs:.3f}".removeprefix("0"), places[-1], (7, 0), textcoords="offset points",
                      va="center", fontsize=8, color=colour)  # fmt: skip
    else:
        _say(axes, "no mean", len(pairs) + 0.1 + 0.36 * lane, colour)
    axes.plot(
        *zip(*places, strict=True), ls="", marker="^" if members > 1 else "D" if filled else "o", ms=5.5, mew=1.2,
        color=colour, mfc=colour if filled else "white", clip_on=False, zorder=3,
    )  # fmt: skip


def _say(axes: "Axes", text: str, y: float, colour: str) -> None:
    place = axes.get_yaxis_transform()  # x in shares of the axes, y in data
    axes.text(0.03, y, text, va="center", fontsize=7, color=colour, style="italic", transform=place)


def edge(auroc: float) -> float:
    """Return 1 - AUROC, at least that of the right edge."""
    return 1 - min(auroc, BEST)


def borders(pairs: list[tuple[str, str]]) -> list[float]:
    """Return the heights between pairs whose familiar datasets differ."""
    return [y + 0.5 for y in range(len(pairs) - 1) if pairs[y][0] != pairs[y + 1][0]]


# --- damage ----------------------------------------------------------------------------------------------------------

DAMAGE = {
    "rotate": "turned, by degrees", "blur": "blurred, sd in pixels", "noise": "noise, sd (pixels from 0 to 1)",
    "occlude": "hidden, share of the area",
}  # fmt: skip


def damaged(results: Path, out: Path) -> list[Path]:
    """Draw how well scores tell damaged images of Fashion-MNIST from undamaged ones, and below it the error on them.

    Lines are means over seeds, bands go from the least to the greatest.
    """
    measures = read_measures(results)
    best = measures.best("", of_posterior)
    if best is None:
        raise MissingRecords(f"{results / TABLE} has no VB network of Fashion-MNIST: measure one")
    lines = [("VB", "", "max_softmax"), ("VB", "", best), ("CNN", "_cnn", "max_softmax")]
    if (of_cnn := measures.best("_cnn")) is not None and of_cnn != "max_softmax":
        lines.append(("CNN", "_cnn", of_cnn))
    figure = new_figure(12.0, 5.2)
    grid = figure.subplots(2, len(DAMAGE), sharey="row", sharex="col", height_ratios=[1.35, 1])
    for (upper, lower), (what, title) in zip(grid.T, DAMAGE.items(), strict=True):
        every = sorted({float(row.against.split()[1]) for row in measures.rows if row.against.startswith(f"{what} ")})
        levels = [0.0, *(level for level in every if level)]
        for lane, (name, kind, score) in enumerate(lines):
            found = {0: [0.5]} | _by_level(measures, kind, what, levels, "auroc", score)
            _line(upper, found, kind, score == "max_softmax", f"{name}, {said(score)}", 0.05 * (lane - 1.5))
        for name, kind in (("VB", ""), ("CNN", "_cnn")):
            found = _by_level(measures, kind, what, levels, "error")
            _line(lower, {x: [100 * y for y in values] for x, values in found.items()}, kind, False, name)
        label_axes(upper, "", "", "AUROC against undamaged" if what == "rotate" else "")
        label_axes(lower, "", title, "test error (%)" if what == "rotate" else "")
        lower.set_xticks(range(len(levels)), [f"{level:g}" for level in levels], fontsize=9)
    grid[0, 0].set_ylim(top=1.01)
    grid[1, 0].set_ylim(0, 100)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, frameon=False, fontsize=9)
    return [save(figure, out / "damage.png")]


def _by_level(
    measures: Measures, kind: str, what: str, levels: list[float], measure: str, score: str = ""
) -> dict[int, list[float]]:
    """Return the values of all seeds by the place of their level; undamaged images are under "rotate 0"."""
    found = {
        x: measures.values(
            "fashion", kind, test="damage", measure=measure, score=score,
            against=f"{what} {level:g}" if level else "rotate 0",
        )
        for x, level in enumerate(levels)
    }  # fmt: skip
    return {x: values for x, values in found.items() if values}


def _line(axes: "Axes", found: dict[int, list[float]], kind: str, plain: bool, label: str, shift: float = 0) -> None:
    """Draw the mean at each level with a band over seeds: dashed and open for softmax, VB's round, CNN's square."""
    if not found:
        return
    x, colour = [place + shift for place in found], COLOURS[kind]
    axes.fill_between(x, list(map(min, found.values())), list(map(max, found.values())), color=colour, alpha=0.18, lw=0)
    axes.plot(
        x, list(map(mean, found.values())), "--" if plain else "-", color=colour, marker="s" if kind else "o", ms=4.5,
        mfc="white" if plain else colour, label=label,
    )  # fmt: skip


# --- calibration -----------------------------------------------------------------------------------------------------

STYLES = {"": ("-", "o"), "_em": ("--", "s"), "_dynamic": ("-.", "^"), "_cnn": (":", "D")}
FEW = 50  # images of all seeds together, below which a bin has no point


def calibration(results: Path, out: Path) -> list[Path]:
    """Draw reliability diagrams of Fashion-MNIST before and after the temperature, and risk-coverage curves.

    Below a diagram stands how many images, of all seeds together, are in each bin.
    """
    path = results / CURVES
    if not path.exists():
        raise MissingRecords(f"{path} is missing: tools/uncertainty.py writes it")
    with lines(read_bytes(path, MOST)) as file:
        rows = [row for row in csv.DictReader(file) if not row["viewpoint"] and "+" not in row["seeds"]]
    figure = new_figure(12.0, 4.9)
    grid = figure.add_gridspec(2, 3, height_ratios=[3, 1])
    titles = {"softmax": "before the temperature", "softmax with temperature": "after it"}
    for column, (score, title) in enumerate(titles.items()):
        upper = figure.add_subplot(grid[0, column])
        lower = figure.add_subplot(grid[1, column], sharex=upper)
        upper.plot([0, 100], [0, 100], color=GREY, lw=0.8)
        for kind, name in KINDS.items():
            points = over_seeds(rows, f"fashion{kind}_laptop", "reliability", score)
            _curve(upper, [(x, y) for x, y, images in points if images >= FEW], kind, name, marks=True)
            _curve(lower, [(x, images / 100) for x, _, images in points], kind, name, marks=True)
        label_axes(upper, title, "", "" if column else "right answers (%)")
        label_axes(lower, "", "probability of the answer (%)", "" if column else "images")
        upper.tick_params(labelbottom=False)
        upper.set_xlim(25, 101)
        upper.set_ylim(20, 101)
        lower.set_yscale("log")
        lower.set_yticks([1, 100, 10_000], ["1", "100", "10,000"])
        lower.set_yticks([], minor=True)
        lower.axhline(FEW, color=GREY, lw=0.8, ls=":")
    right = figure.add_subplot(grid[:, 2])
    for kind, name in KINDS.items():
        points = over_seeds(rows, f"fashion{kind}_laptop", "risk-coverage", "max_softmax")
        _curve(right, [(x, y) for x, y, _ in points], kind, name, marks=False)
    label_axes(right, "risk and coverage, by maximum softmax", "images answered (%)", "error (%)")
    right.set_ylim(bottom=0)
    right.set_xlim(0, 101)
    seeds = len({row["seeds"] for row in rows if row["recipe"] == "fashion_laptop"})
    figure.legend(
        *right.get_legend_handles_labels(), loc="outside upper center", ncols=4, frameon=False,
        title=f"Fashion-MNIST, small networks, {seeds} seed{'s' if seeds > 1 else ''} together; bins of fewer than "
        f"{FEW} images have no point", title_fontsize=9,
    )  # fmt: skip
    return [save(figure, out / "calibration.png")]


def _curve(axes: "Axes", points: list[tuple[float, float]], kind: str, name: str, marks: bool) -> None:
    style, marker = STYLES[kind]
    if points:
        x, y = zip(*[(100 * x, 100 * y) for x, y in points], strict=True)
        axes.plot(x, y, style, color=COLOURS[kind], lw=1.7, marker=marker if marks else None, ms=4, label=name)


def over_seeds(rows: list[dict[str, str]], recipe: str, curve: str, score: str) -> list[tuple[float, float, int]]:
    """Return a curve as x, y and images, x and y the mean over the images of all seeds; empty bins are left out."""
    curves: dict[str, list[tuple[float, float, int]]] = {}
    for row in rows:
        if (row["recipe"], row["curve"], row["score"]) == (recipe, curve, score):
            curves.setdefault(row["seeds"], []).append((float(row["x"]), float(row["y"]), int(row["images"])))
    points = []
    for same in zip(*curves.values(), strict=True):
        images = sum(n for _, _, n in same)
        if images:
            points.append((sum(x * n for x, _, n in same) / images, sum(y * n for _, y, n in same) / images, images))
    return points

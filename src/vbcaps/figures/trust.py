"""How far uncertainty can be trusted: what tools/uncertainty.py recorded, and its figures.

Which score stands for a kind of network was chosen on one pair of datasets alone (the rows ``choice``).
"""

import csv
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

from vbcaps.figures.records import MissingRecords
from vbcaps.figures.run import BLUE, GREEN, GREY, ORANGE, RED, label_axes, new_figure, save

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
    with open(path, newline="") as file:
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


def said(score: str) -> str:
    """Return the name of a score in words."""
    words = {
        "max_softmax": "maximum softmax", "class_caps.kappa": "class evidence", "class_caps.m": "class poses",
        "logits+class_caps.m+conv_caps1.m+conv_caps2.m": "logits and the poses of all layers",
    }  # fmt: skip
    tail = ", per class" if score.endswith(", per class") else ""
    name = score.removesuffix(tail)
    if name.startswith("density "):
        of = name.removeprefix("density ")
        return f"density of {words.get(of, of)}{tail}"
    return words.get(name, name.replace("_", " "))


def strangers(results: Path, out: Path) -> list[Path]:
    """Draw how well scores tell strangers: AUROC for each pair of datasets, and the mean over pairs."""
    measures = read_measures(results)
    chosen = [one for one in compared(measures) if measures.strangers(*one[1:])]
    if not chosen:
        raise MissingRecords(f"{results / TABLE} has no strangers: measure more runs with tools/uncertainty.py")
    pairs = list(measures.strangers("", "max_softmax"))
    figure = new_figure(10.0, 0.8 + 0.42 * (len(pairs) + 1) + 0.24 * len(chosen))
    axes = figure.subplots()
    labels = [f"{NAMES[familiar]} / {NAMES[strange]}" for familiar, strange in pairs] + ["mean of the pairs"]
    for (label, kind, score, members), marker in zip(chosen, "oDsPv^X*<>hd8p", strict=False):
        found = measures.strangers(kind, score, members)
        points = [mean(found[pair]) if pair in found else float("nan") for pair in pairs]
        whole = all(pair in found for pair in pairs)
        points.append(mean(points) if whole else float("nan"))
        plain = score == "max_softmax"
        axes.plot(
            points, range(len(points)), ls="", marker=marker, ms=8 if len(points) else 6, color=COLOURS[kind],
            mfc="none" if plain or members > 1 else COLOURS[kind], label=label, alpha=0.9,
        )  # fmt: skip
    axes.axhline(len(pairs) - 0.5, color=GREY, lw=0.8)
    axes.axvline(0.5, color=GREY, lw=0.8, ls=":")
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    label_axes(axes, "Strangers told from familiar images (familiar / strange)", "AUROC", "")
    figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=9)
    return [save(figure, out / "strangers.png")]


# --- damage ----------------------------------------------------------------------------------------------------------

DAMAGE = {"rotate": "turned, degrees", "blur": "blurred, pixels", "noise": "noise", "occlude": "hidden share"}


def damaged(results: Path, out: Path) -> list[Path]:
    """Draw the error on damaged images of Fashion-MNIST, and how well scores tell these from undamaged ones."""
    measures = read_measures(results)
    best = measures.best("", of_posterior)
    if best is None:
        raise MissingRecords(f"{results / TABLE} has no VB network of Fashion-MNIST: measure one")
    figure = new_figure(12.0, 3.3)
    lines = [
        ("VB, maximum softmax", "", "max_softmax", BLUE, "--"), (f"VB, {said(best)}", "", best, BLUE, "-"),
        ("CNN, maximum softmax", "_cnn", "max_softmax", RED, "--"),
    ]  # fmt: skip
    if (of_cnn := measures.best("_cnn")) is not None:
        lines.append((f"CNN, {said(of_cnn)}", "_cnn", of_cnn, RED, "-"))
    panels = figure.subplots(1, len(DAMAGE), sharey=True)
    for axes, (what, title) in zip(panels, DAMAGE.items(), strict=True):
        levels = sorted({float(row.against.split()[1]) for row in measures.rows if row.against.startswith(f"{what} ")})
        for label, kind, score, colour, style in lines:
            points = [
                (level, mean(values))
                for level in levels
                if (
                    values := measures.values(
                        "fashion", kind, test="damage", measure="auroc", score=score, against=f"{what} {level:g}"
                    )
                )
            ]
            axes.plot(*zip(*[(0.0, 0.5), *points], strict=True), style, color=colour, marker="o", ms=3, label=label)
        errors = [
            (level, mean(values))
            for level in levels
            if (values := measures.values("fashion", "", test="damage", measure="error", against=f"{what} {level:g}"))
        ]
        unhurt = measures.values("fashion", "", test="damage", measure="error", against="rotate 0")
        errors = sorted({(0.0, mean(unhurt)), *errors}) if unhurt else errors
        axes.plot(*zip(*errors, strict=True), ":", color=GREY, lw=2, label="error of VB")
        label_axes(axes, title, "", "AUROC against undamaged; error" if axes is panels[0] else "")
        axes.set_ylim(0, 1.02)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    return [save(figure, out / "damage.png")]


# --- calibration -----------------------------------------------------------------------------------------------------


def calibration(results: Path, out: Path) -> list[Path]:
    """Draw reliability diagrams of Fashion-MNIST before and after the temperature, and risk-coverage curves."""
    path = results / CURVES
    if not path.exists():
        raise MissingRecords(f"{path} is missing: tools/uncertainty.py writes it")
    with open(path, newline="") as file:
        rows = [row for row in csv.DictReader(file) if not row["viewpoint"] and "+" not in row["seeds"]]
    figure = new_figure(12.0, 3.4)
    panels = figure.subplots(1, 3)
    for axes, score in zip(panels, ("softmax", "softmax with temperature"), strict=False):
        axes.plot([0, 1], [0, 1], color=GREY, lw=0.8, ls=":")
        for kind, name in KINDS.items():
            if points := over_seeds(rows, f"fashion{kind}_laptop", "reliability", score):
                axes.plot(*zip(*points, strict=True), color=COLOURS[kind], marker="o", ms=3.5, label=name)
        label_axes(axes, score, "probability of the answer", "share of right answers")
        axes.set_xlim(0.2, 1.01)
        axes.set_ylim(0.2, 1.01)
    for kind, name in KINDS.items():
        if points := over_seeds(rows, f"fashion{kind}_laptop", "risk-coverage", "max_softmax"):
            percent = [(x, 100 * y) for x, y in points]
            panels[2].plot(*zip(*percent, strict=True), color=COLOURS[kind], label=name)
    label_axes(panels[2], "risk and coverage, by maximum softmax", "share of images answered", "error, %")
    panels[2].set_ylim(bottom=0)
    panels[0].legend(frameon=False, fontsize=9)
    return [save(figure, out / "calibration.png")]


def over_seeds(rows: list[dict[str, str]], recipe: str, curve: str, score: str) -> list[tuple[float, float]]:
    """Return a curve as x and y, each the mean over the images of all seeds; points of less than 20 images are left
    out."""
    curves: dict[str, list[tuple[float, float, int]]] = {}
    for row in rows:
        if (row["recipe"], row["curve"], row["score"]) == (recipe, curve, score):
            curves.setdefault(row["seeds"], []).append((float(row["x"]), float(row["y"]), int(row["images"])))
    points = []
    for same in zip(*curves.values(), strict=True):
        images = sum(n for _, _, n in same)
        if images >= 20:
            points.append((sum(x * n for x, _, n in same) / images, sum(y * n for _, y, n in same) / images))
    return points

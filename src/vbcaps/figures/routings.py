"""VB routing beside EM routing in the same network: the error by epoch (the paper's Figure 3), and by iterations.

VB is solid and blue, EM is dashed and orange, also where only the greys are left.
"""

import csv
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vbcaps.data import FACTS
from vbcaps.disk import TABLE, read_bytes
from vbcaps.figures.records import (
    MissingRecords,
    Record,
    errors_of,
    missing,
    of_today,
    read_records,
    scale,
    settings,
    shared,
)
from vbcaps.figures.run import BLUE, GREY, ORANGE, label_axes, new_figure, save
from vbcaps.training.recipe import Recipe
from vbcaps.training.runfolder import lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DATASETS = {name: FACTS[name].title for name in ("smallnorb", "fashion-mnist", "svhn", "cifar10")}
NAMES = {"vb": "VB", "em": "EM"}
STYLES: dict[str, dict[str, Any]] = dict(
    vb=dict(color=BLUE, linestyle="-", marker="o"), em=dict(color=ORANGE, linestyle="--", marker="s")
)
Pair = dict[str, list[Record]]  # the runs of VB and of EM with the same settings
WHAT = {"validation_error": "validation error (%, log)", "train_error": "training error (%, log)"}
SIZES = {"laptop": "small networks", "full": "full size"}


# --- by epoch --------------------------------------------------------------------------------------------------------


def curves(results: Path, out: Path) -> list[Path]:
    """Draw the error of VB and EM by epoch on the four datasets: a row for laptop recipes, one for those of GPUs.

    The line is the mean over seeds, the band goes from the least to the greatest. Where the runs held no images out,
    the row shows the error on their training images, which are changed at random. Beside each panel stand the test
    errors at the end, on the same logarithmic axis, a marker for each seed.
    """
    pairs = pairs_by_dataset(read_records(results))
    scales = [one for one in SIZES if any(where == one for where, _ in pairs)]
    figure = new_figure(12.5, 0.6 + 3.0 * len(scales))
    grid = figure.subplots(len(scales), 2 * len(DATASETS), squeeze=False, width_ratios=[5, 1] * len(DATASETS))
    for row, size in zip(grid, scales, strict=True):
        for axes, beside, (dataset, name) in zip(row[::2], row[1::2], DATASETS.items(), strict=True):
            pair = pairs.get((size, dataset))
            if pair is None:
                axes.axis("off")
                beside.axis("off")
                axes.text(0.5, 0.5, f"{name}:\nnot run yet", ha="center", color=GREY, transform=axes.transAxes)
                continue
            column = _panel(axes, beside, pair)
            first = not any(one.get_ylabel() for one in row)
            label_axes(axes, name, "epoch", f"{SIZES[size]}\n{WHAT[column]}" if first else "")
    drawn = next(axes for axes in grid.flat if axes.lines)
    figure.legend(handles=drawn.lines[:2], loc="outside upper center", ncols=2, frameon=False, fontsize=10)
    return [save(figure, out / "curves.png")]


def pairs_by_dataset(records: Iterable[Record]) -> dict[tuple[str, str], Pair]:
    """Return the runs of VB and EM for each scale and dataset.

    Their settings must be the same but for the routing. Where several settings have runs of both, recipes of today come
    first, then the longest training, then the latest folder.
    """
    records = list(records)
    chosen: dict[tuple[str, str], Pair] = {}
    for pair in sorted(pairs(record for record in records if record.metrics), key=lambda pair: rank(pair, records)):
        recipe = pair["vb"][0].recipe
        chosen[scale(recipe), recipe.dataset] = pair
    if not chosen:
        raise MissingRecords(missing("curves"))
    return chosen


def classifies(recipe: Recipe) -> bool:
    """Return whether a recipe is one of VB or EM for Table 1: no own images, no novel viewpoints."""
    plain = recipe.data is None and recipe.viewpoint is None and recipe.dataset in DATASETS
    return plain and recipe.network == "caps" and recipe.routing in NAMES


def pairs(records: Iterable[Record], *free: str) -> list[Pair]:
    """Return finished runs of VB and EM whose settings differ in the routing, its own fields and ``free`` alone."""
    by_settings: dict[Recipe, list[Record]] = {}
    for record in records:
        if classifies(record.recipe) and record.result is not None:
            by_settings.setdefault(settings(record.recipe, *free), []).append(record)
    vb, em = ([key for key in by_settings if key.routing == routing] for routing in NAMES)
    same = ((one, other) for one in vb for other in em if shared(one) == shared(other))
    return [dict(vb=by_settings[one], em=by_settings[other]) for one, other in same]


def rank(pair: Pair, records: Sequence[Record]) -> tuple[int, int, int]:
    today = sum(of_today(some[0].recipe) for some in pair.values())
    return today, pair["vb"][0].recipe.epochs, records.index(pair["vb"][-1])


def _panel(axes: "Axes", beside: "Axes", pair: Pair) -> str:
    """Draw the errors by epoch, and beside them those of the test; return the column of ``metrics.csv``."""
    held_out = all(record.curve("validation_error") for some in pair.values() for record in some)
    column = "validation_error" if held_out else "train_error"
    for k, routing in enumerate(NAMES):
        band = spread_by_key([record.curve(column) for record in pair[routing]])
        draw_band(axes, band, routing, marks=len(band) <= 20)
        errors = errors_of(pair[routing])
        style = STYLES[routing] | dict(linestyle="none", ms=4.5, mfc="none", mew=1.2)
        beside.plot([k + 0.1 * (n - (len(errors) - 1) / 2) for n in range(len(errors))], errors, **style)
    axes.locator_params(axis="x", integer=True)
    limits = [*axes.get_ylim(), *(beside.get_ylim() if beside.lines else ())]
    for one in (axes, beside):
        one.set_ylim(0.95 * max(min(limits), 0.01), 1.05 * max(limits))
        _logarithmic(one)
        one.grid(color="#e2e8f0", lw=0.8)
    beside.set_title("test", fontsize=9, color=GREY)
    beside.set_xticks(range(len(NAMES)), list(NAMES.values()), fontsize=8)
    beside.set_xlim(-0.6, len(NAMES) - 0.4)
    beside.tick_params(axis="y", length=0, labelleft=False)
    beside.spines[["top", "right", "left"]].set_visible(False)
    beside.set_axisbelow(True)
    _say_seeds(axes, pair, 0.95)
    return column


def _say_seeds(axes: "Axes", pair: Pair, y: float) -> None:
    counts = {routing: len({record.recipe.seed for record in pair[routing]}) for routing in NAMES}
    seeds = ", ".join(f"{NAMES[routing]} {count}" for routing, count in counts.items())
    axes.text(0.97, y, f"seeds: {seeds}", ha="right", va="center", fontsize=8, color=GREY, transform=axes.transAxes)


def _logarithmic(axes: "Axes") -> None:
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    some = (1, 2, 5, 10, 20, 50, 100) if high > 10 * low else (1, 1.5, 2, 3, 4, 6, 8, 10, 15, 20, 30, 40, 60, 80, 100)
    ticks = [tick for tick in some if low < tick < high]
    axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_yticks([], minor=True)


# --- by iterations ---------------------------------------------------------------------------------------------------


def iterations(results: Path, out: Path) -> list[Path]:
    """Draw the test error and the time of a training step for 1 to 5 routing iterations, VB and EM.

    Where several settings were compared, as two learning rates, each has a panel of errors. An error's band goes from
    the lowest seed to the highest, one of times over the middle four fifths of the steps.
    """
    compared, times = pairs_by_iterations(read_records(results)), step_times(results)
    figure = new_figure(4.0 * (len(compared) + 1), 4.0)
    *left, right = figure.subplots(1, len(compared) + 1)
    for axes, pair in zip(left, compared, strict=True):
        for routing in NAMES:
            draw_band(axes, errors_by_iterations(pair[routing]), routing)
        label_axes(axes, f"learning rate {pair['vb'][0].recipe.lr:g}", "routing iterations", "test error (%)")
        _say_seeds(axes, pair, 0.04)
        if absent := not_run(pair, times["vb"]):
            axes.text(0.03, 0.96, absent, va="top", fontsize=8, color=GREY, style="italic", transform=axes.transAxes)
    lowest, highest = (end(axes.get_ylim()[k] for axes in left) for k, end in enumerate((min, max)))
    for axes in left:
        axes.set_ylim(lowest, highest)
        if highest > 3 * lowest:
            axes.set_ylim(0.9 * max(lowest, 0.1), 1.1 * highest)
            axes.set_ylabel("test error (%, log)")
            _logarithmic(axes)
    for routing, rows in times.items():
        draw_band(right, {iters: (row["ms"], row["low"], row["high"]) for iters, row in rows.items()}, routing)
    about = next(iter(times["vb"].values()))
    step = f"time of a step, {about['batch']:.0f} images"
    label_axes(right, step, "routing iterations", "processor time (ms), one thread")
    right.set_ylim(bottom=0)
    note = dict(ha="right", va="center", fontsize=8, color=GREY, transform=right.transAxes)
    right.text(0.97, 0.04, "band: middle 80% of the steps", **note)
    for axes in (*left, right):
        axes.set_xticks(sorted(times["vb"]))
        axes.set_xlim(0.75, max(times["vb"]) + 0.25)
    recipe = compared[0]["vb"][0].recipe
    epochs = f"{recipe.epochs} epoch{'s' if recipe.epochs > 1 else ''}"
    figure.legend(
        handles=right.lines[:2], loc="outside upper center", ncols=2, frameon=False, title_fontsize=10,
        title=f"{DATASETS[recipe.dataset]}, {SIZES[scale(recipe)]}, {epochs}; errors: mean and range of the seeds",
    )  # fmt: skip
    return [save(figure, out / "iterations.png")]


def errors_by_iterations(runs: Iterable[Record]) -> "Band":
    """Return mean, least and greatest test error by iterations."""
    return spread_by_key([{one.recipe.iters: error} for one in runs if (error := one.error()) is not None])


def not_run(pair: Pair, iterations: Iterable[int]) -> str:
    """Return which iterations have no tested run, in words; empty where all have one."""
    found = {NAMES[routing]: {one.recipe.iters for one in pair[routing]} for routing in NAMES}
    absent = {name: [str(iters) for iters in iterations if iters not in some] for name, some in found.items()}
    said = ", ".join(f"{name} {' '.join(some)}" for name, some in absent.items() if some)
    return f"not run: {said}" if said else ""


def pairs_by_iterations(records: Iterable[Record]) -> list[Pair]:
    """Return the tested runs of VB and EM for each setting of which there are several iterations.

    Settings with the most different iterations come first, then those with the highest learning rate.
    """
    tested = [one for one in records if one.recipe.dataset == "fashion-mnist" and one.error() is not None]

    def least(pair: Pair) -> int:
        return min(len({record.recipe.iters for record in some}) for some in pair.values())

    compared = [pair for pair in pairs(tested, "iters") if least(pair) > 1]
    if not compared:
        raise MissingRecords(missing("iterations"))
    return sorted(compared, key=lambda pair: (-least(pair), -pair["vb"][0].recipe.lr))


def step_times(results: Path) -> dict[str, dict[int, dict[str, Any]]]:
    """Return the rows of ``step_times.csv`` by routing and iterations."""
    path = results / "step_times.csv"
    if not path.exists():
        raise MissingRecords(f"there is no {path}: `python tools/step_times.py` makes it")
    with lines(read_bytes(path, TABLE)) as file:
        rows = list(csv.DictReader(file))
    numbers = ("ms", "low", "high", "batch")
    times: dict[str, dict[int, dict[str, Any]]] = {routing: {} for routing in NAMES}
    for row in rows:
        times[row["routing"]][int(row["iters"])] = row | {k: float(row[k]) for k in numbers}
    return times


# --- lines with bands ------------------------------------------------------------------------------------------------

Band = dict[int, tuple[float, float, float]]  # mean, least and greatest by epoch or by iterations


def spread_by_key(runs: Sequence[Mapping[int, float]]) -> Band:
    """Return mean, least and greatest of the runs at each epoch (or number of iterations) that any of them has."""
    by_key: dict[int, list[float]] = {}
    for run in runs:
        for key, value in run.items():
            by_key.setdefault(key, []).append(value)
    return {key: (statistics.mean(by_key[key]), min(by_key[key]), max(by_key[key])) for key in sorted(by_key)}


def draw_band(axes: "Axes", band: Band, routing: str, marks: bool = True) -> None:
    """Draw the mean as a line, and shade from the least to the greatest."""
    mean, low, high = zip(*band.values(), strict=True)
    style = STYLES[routing] | ({} if marks else dict(marker="none"))
    axes.fill_between(list(band), low, high, color=style["color"], alpha=0.18, lw=0)
    axes.plot(list(band), mean, lw=1.6, ms=4.5, label=NAMES[routing], **style)

"""How much the error depends on the priors (the paper's section on sensitivity): alpha0 against Psi_0, and learned."""

import statistics
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vbcaps.figures.records import MissingRecords, Record, errors_of, found, missing, read_records, scale, settings
from vbcaps.figures.run import BLUE, GREY, RED, label_axes, new_figure, save
from vbcaps.training.recipe import Recipe

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLACK, PALE = "#1a202c", "#a0aec0"
COEFFICIENTS = (0.01, 0.1, 1.0, 10.0)  # of both priors, in the paper
Grid = dict[tuple[float, float], list[Record]]  # runs by alpha0 and psi0


def priors(results: Path, out: Path) -> list[Path]:
    """Draw the test error for each pair of alpha0 and Psi_0, and beside it that of a learned alpha0.

    A cell is the mean over seeds, with their standard deviation; the default priors have a dotted frame.
    """
    grid, learned = runs_by_prior(read_records(results))
    figure = new_figure(9.0, 3.9)
    left, right = figure.subplots(1, 2, width_ratios=[1.45, 1])
    _heat_map(left, grid)
    recipe = next(iter(grid.values()))[0].recipe
    epochs = f"{recipe.epochs} epoch{'s' if recipe.epochs > 1 else ''}"
    size = ", small networks" if scale(recipe) == "laptop" else ""
    left.set_title(f"test error (%), Fashion-MNIST, {epochs}{size}", fontsize=11, color=GREY, loc="left")
    every = [record for some in grid.values() for record in some]
    _fixed_and_learned(right, grid.get((1.0, 1.0), []), learned, errors_of([*every, *learned]))
    return [save(figure, out / "priors.png")]


def runs_by_prior(records: Iterable[Record]) -> tuple[Grid, list[Record]]:
    """Return the runs by alpha0 and psi0, failed ones too, and those with a learned alpha0.

    Of all settings these are the ones with the most pairs of priors.
    """
    by_settings: dict[Recipe, tuple[Grid, list[Record]]] = {}
    for record in found(records, is_compared, "priors"):
        recipe = record.recipe
        grid, learned = by_settings.setdefault(settings(recipe, "alpha0", "psi0", "learn"), ({}, []))
        if recipe.learn:
            learned.append(record)
        else:
            grid.setdefault((recipe.alpha0, recipe.psi0), []).append(record)
    grid, learned = max(by_settings.values(), key=lambda one: (len(one[0]), len(one[1])))
    if not grid or (len(grid) == 1 and not learned):
        raise MissingRecords(missing("priors"))
    return grid, learned


def is_compared(recipe: Recipe) -> bool:
    vb = recipe.network == "caps" and recipe.routing == "vb" and recipe.learn in ((), ("alpha0",))
    return vb and recipe.dataset == "fashion-mnist" and recipe.data is None


def _heat_map(axes: "Axes", grid: Grid) -> None:
    from matplotlib.patches import Rectangle

    alphas, psis = (sorted({*COEFFICIENTS, *(pair[k] for pair in grid)}) for k in (0, 1))
    means = np.full((len(alphas), len(psis)), np.nan)
    for (alpha, psi), some in grid.items():
        if errors_of(some):
            means[alphas.index(alpha), psis.index(psi)] = statistics.mean(errors_of(some))
    low, high = np.nanmin(means), np.nanmax(means)
    margin = 0.3 * (high - low) or 1.0
    axes.imshow(means, cmap="Blues", vmin=low - margin, vmax=high + margin, aspect="auto")
    for alpha, psi in product(alphas, psis):
        y, x, some = alphas.index(alpha), psis.index(psi), grid.get((alpha, psi), [])
        failed = sum(record.result is None for record in some)
        text = (cell(errors_of(some)) + (f"\n{failed} failed" if failed else "")) if some else "not run"
        dark = means[y, x] > (low + high) / 2
        axes.text(
            x, y, text, ha="center", va="center", color=RED if failed else "white" if dark else BLACK if some else PALE
        )
    axes.set_xticks(range(len(psis)), [f"{psi:g}" for psi in psis])
    axes.set_yticks(range(len(alphas)), [f"{alpha:g}" for alpha in alphas])
    axes.set_xlabel(r"scale of $\Psi_0$", color=GREY)
    axes.set_ylabel(r"$\alpha_0$", color=GREY)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    if (1.0, 1.0) in grid:
        corner = psis.index(1.0) - 0.47, alphas.index(1.0) - 0.46
        axes.add_patch(Rectangle(corner, 0.94, 0.92, fill=False, ec=BLACK, lw=1.4, ls=":"))


def cell(some: list[float], between: str = "\n") -> str:
    """Return the mean with two digits, and the standard deviation where there are several runs."""
    if len(some) < 2:
        return f"{some[0]:.2f}" if some else ""
    return f"{statistics.mean(some):.2f}{between}± {statistics.stdev(some):.2f}"


def _fixed_and_learned(axes: "Axes", fixed: list[Record], learned: list[Record], all_errors: list[float]) -> None:
    """Draw the error of each run and their means, on a scale as long as the range of all priors' errors."""
    names = []
    for x, (name, some) in enumerate((("fixed at 1", errors_of(fixed)), ("learned", errors_of(learned)))):
        names.append(f"{name}\n{cell(some, ' ')}")
        axes.plot([x] * len(some), some, marker="oD"[x], ls="none", ms=6, color=BLUE, alpha=0.6, mew=0)
        if len(some) > 1:
            axes.plot([x - 0.16, x + 0.16], [statistics.mean(some)] * 2, color=BLUE, lw=2)
    label_axes(axes, r"$\alpha_0$ fixed and learned", "", "test error (%)")
    axes.set_xticks([0, 1], names)
    axes.set_xlim(-0.6, 1.6)
    low, high = min(all_errors), max(all_errors)
    margin = 0.1 * (high - low) or 1.0
    axes.set_ylim(low - margin, high + margin)
    axes.grid(visible=False, axis="x")

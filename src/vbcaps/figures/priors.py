"""How much the error depends on the priors (the paper's section on sensitivity): alpha0 against Psi_0, and learned."""

import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vbcaps.figures.records import MissingRecords, Record, errors_of, found, missing, read_records, scale, settings
from vbcaps.figures.run import BLUE, GREY, RED, label_axes, new_figure, save
from vbcaps.training.recipe import Recipe

if TYPE_CHECKING:
    from matplotlib.axes import Axes

BLACK = "#1a202c"
SHADES = ("#63b3ed", "#3182ce", BLUE, "#1a365d")  # of alpha0, the lowest first
COEFFICIENTS = (0.01, 0.1, 1.0, 10.0)  # of both priors, in the paper
Grid = dict[tuple[float, float], list[Record]]  # runs by alpha0 and psi0


def priors(results: Path, out: Path) -> list[Path]:
    """Draw the test error for each pair of alpha0 and Psi_0, and of a learned alpha0: as a map, and as lines.

    A cell is the mean over seeds, with their standard deviation; the default priors have a dotted frame. A line is the
    mean for one alpha0, its markers are the runs.
    """
    grid, learned = runs_by_prior(read_records(results))
    figure = new_figure(10.5, 4.6)
    left, right = figure.subplots(1, 2, width_ratios=[1.25, 1])
    _heat_map(left, grid, learned)
    _lines(right, grid, learned)
    recipe = next(iter(grid.values()))[0].recipe
    epochs = f"{recipe.epochs} epoch{'s' if recipe.epochs > 1 else ''}"
    size = "small networks, " if scale(recipe) == "laptop" else ""
    most = max(len({one.recipe.seed for one in some}) for some in (*grid.values(), learned))
    seeds = f"mean ± standard deviation of up to {most} seeds" if most > 1 else "one seed"
    title = f"test error (%), Fashion-MNIST,\n{size}{epochs}, {seeds}"
    left.set_title(title, fontsize=10, color=GREY, loc="left")
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


def _heat_map(axes: "Axes", grid: Grid, learned: list[Record]) -> None:
    """Draw a cell for each pair of priors, the lowest alpha0 at the top, and below them the learned ones."""
    from matplotlib.patches import Rectangle

    alphas, psis = (sorted({*COEFFICIENTS, *(pair[k] for pair in grid)}) for k in (0, 1))
    of_learned = {psi: [one for one in learned if one.recipe.psi0 == psi] for psi in psis}
    cells = {(y, x): grid.get((alpha, psi), []) for y, alpha in enumerate(alphas) for x, psi in enumerate(psis)}
    cells |= {(len(alphas), x): some for x, some in enumerate(of_learned.values()) if some}
    means = np.full((len(alphas) + 1, len(psis)), np.nan)
    for place, some in cells.items():
        if errors_of(some):
            means[place] = statistics.mean(errors_of(some))
    low, high = np.nanmin(means), np.nanmax(means)
    margin = 0.3 * (high - low) or 1.0
    axes.imshow(means, cmap="Blues", vmin=low - margin, vmax=high + margin, aspect="auto")
    for (y, x), some in cells.items():
        failed = sum(record.result is None for record in some)
        text = (cell(errors_of(some)) + (f"\n{failed} failed" if failed else "")) if some else "not run"
        dark = means[y, x] > (low + high) / 2
        colour = RED if failed else "white" if dark else BLACK if some else GREY
        axes.text(x, y, text, ha="center", va="center", color=colour, style="normal" if some else "italic")
    for x in range(1, len(psis)):
        axes.axvline(x - 0.5, color="white", lw=1.5)
    for y in range(1, len(alphas) + 1):
        axes.axhline(y - 0.5, color="white", lw=7 if y == len(alphas) else 1.5)
    axes.set_xticks(range(len(psis)), [f"{psi:g}" for psi in psis])
    axes.set_yticks(range(len(alphas) + 1), [*(f"{alpha:g}" for alpha in alphas), "learned"])
    axes.set_xlabel(r"scale of $\Psi_0$", color=GREY)
    axes.set_ylabel(r"$\alpha_0$", color=GREY)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    if (1.0, 1.0) in grid:
        corner = psis.index(1.0) - 0.47, alphas.index(1.0) - 0.44
        axes.add_patch(Rectangle(corner, 0.94, 0.88, fill=False, ec=BLACK, lw=1.4, ls=":"))


def cell(some: list[float], between: str = "\n") -> str:
    """Return the mean with two digits, and the standard deviation where there are several runs."""
    if len(some) < 2:
        return f"{some[0]:.2f}" if some else ""
    return f"{statistics.mean(some):.2f}{between}± {statistics.stdev(some):.2f}"


def _lines(axes: "Axes", grid: Grid, learned: list[Record]) -> None:
    """Draw the error by Psi_0, a line for each alpha0, and the learned one at its Psi_0; lines are side by side."""
    alphas, psis = (sorted({*COEFFICIENTS, *(pair[k] for pair in grid)}) for k in (0, 1))
    of_alpha: dict[str, Grid] = {
        f"{alpha:g}": {pair: grid[pair] for pair in grid if pair[0] == alpha} for alpha in alphas
    }
    for one in learned:
        of_alpha.setdefault("learned", {}).setdefault((0.0, one.recipe.psi0), []).append(one)
    for k, (name, pairs) in enumerate(of_alpha.items()):
        shift = 0.07 * (k - (len(of_alpha) - 1) / 2)
        errors = {psis.index(psi): errors_of(some) for (_, psi), some in pairs.items() if errors_of(some)}
        if not errors:
            continue
        means = [statistics.mean(errors[x]) if x in errors else np.nan for x in range(len(psis))]  # a gap: not run
        colour = RED if name == "learned" else SHADES[k % len(SHADES)]
        marker = "D" if name == "learned" else "osv^"[k % 4]
        axes.plot(np.arange(len(psis)) + shift, means, color=colour, lw=1.4, marker=marker, ms=5.5, label=name)
        for x, some in errors.items():
            axes.plot([x + shift] * 2, [min(some), max(some)], color=colour, lw=1.2)
    label_axes(axes, "", r"scale of $\Psi_0$", "test error (%)")
    axes.set_title("mean, and lowest to highest seed", fontsize=10, color=GREY, loc="left")
    axes.set_xticks(range(len(psis)), [f"{psi:g}" for psi in psis])
    axes.set_xlim(-0.4, len(psis) - 0.6)
    axes.legend(frameon=False, fontsize=9, title=r"$\alpha_0$", loc="best")

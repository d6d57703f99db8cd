"""A picture of what a network's capsules do: votes by rank, sharpness by layer, error by iterations."""

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING

from vbcaps.figures.run import BLUE, GREY, ORANGE, check_format, label_axes, new_figure, save
from vbcaps.health import Health
from vbcaps.health.findings import findings

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PALE = "#cbd5e0"
RANKS = 12  # places of the ranking that have a bar


def overview(found: Health, name: str, path: str | Path) -> Path:
    """Draw the votes of the answer against those of the other classes, routing by layer, and error by iterations.

    Args:
        found: what `vbcaps.health.health` measured.
        name: of the network, for the title.
        path: the file to write, PNG, PDF or SVG by its suffix.

    Returns:
        The path.
    """
    path = check_format(Path(path))
    figure = new_figure(10.0, 3.9)
    votes, layers, iterations = figure.subplots(1, 3)
    title = textwrap.fill(f"{name}: {findings(found)[0]}", 120)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left", parse_math=False)
    draw_votes(votes, found)
    draw_layers(layers, found)
    draw_iterations(iterations, found)
    return save(figure, path)


def draw_votes(axes: "Axes", found: Health) -> None:
    """Draw the share of votes of each place in the ranking, the answer in blue."""
    shares = [100 * one for one in found.votes_by_rank[:RANKS]]
    ranks = range(1, len(shares) + 1)
    axes.bar(ranks, shares, color=[BLUE, *[PALE] * (len(shares) - 1)], edgecolor=GREY, linewidth=0.6)
    axes.axhline(100 / len(found.votes_by_rank), color=ORANGE, ls="--", lw=1.4, label="an even share")
    axes.set_ylim(0, 1.2 * max(shares))
    axes.legend(frameon=False, loc="upper right", fontsize=9)
    axes.set_xticks(ranks)
    label_axes(axes, "votes of each class", "place in the ranking (1: the answer)", "% of votes")


def draw_layers(axes: "Axes", found: Health) -> None:
    """Draw how sharp routing is in each layer, and how much of this the image decides."""
    routed = [one for one in found.layers if one.sharpness is not None]
    of_image = [100 * min(one.information_share or 0.0, one.sharpness or 0.0) for one in routed]
    alike = [100 * (one.sharpness or 0.0) - part for one, part in zip(routed, of_image, strict=True)]
    places = range(len(routed))
    axes.bar(places, of_image, color=BLUE, edgecolor=GREY, linewidth=0.6, label="decided by the image")
    axes.bar(places, alike, bottom=of_image, color=PALE, edgecolor=GREY, linewidth=0.6, hatch="///",
             label="alike in every image")  # fmt: skip
    axes.set_xticks(places, [one.name for one in routed])
    axes.set_ylim(0, 125)  # with room for the legend
    axes.set_yticks(range(0, 101, 20))
    for place, one in zip(places, routed, strict=True):
        sharpness = 100 * (one.sharpness or 0.0)
        axes.annotate(f"{sharpness:.0f}" if sharpness >= 10 else f"{sharpness:.1f}", (place, sharpness), (0, 2),
                      textcoords="offset points", ha="center", fontsize=9)  # fmt: skip
    axes.legend(frameon=False, loc="upper left", fontsize=9)
    label_axes(axes, "how sharp routing is", "", "% (0: uniform, 100: one parent)")


def draw_iterations(axes: "Axes", found: Health) -> None:
    """Draw the error, or without labels the share of other answers, by the number of iterations at test time."""
    known = found.error is not None
    points = [(one.iters, 100 * ((one.error or 0.0) if known else 1 - one.same)) for one in found.at_iterations]
    if not points:
        axes.set_axis_off()
        return
    places = range(len(points))
    axes.plot(places, [error for _, error in points], color=BLUE, marker="o", ms=4, lw=1.4)
    trained = [(k, error) for k, (iters, error) in enumerate(points) if iters == found.iters]
    axes.plot(
        *zip(*trained, strict=True), color=ORANGE, marker="o", ms=10, mfc="none", mew=2, ls="", label="as trained"
    )
    axes.set_xticks(places, [str(iters) for iters, _ in points])
    axes.set_ylim(0, 100)
    axes.legend(frameon=False, fontsize=9)
    what = "wrong answers" if known else "answers that change"
    label_axes(axes, what, "iterations at test time", "% of images")

"""How votes gather around class capsules in training (the paper's last two figures), from a run's ``votes.npz``.

Axes of its distances: e epoch, s the class that is shown, t iteration, j class capsule, i child.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vbcaps.disk import opened
from vbcaps.figures.records import MissingRecords, missing, read_records
from vbcaps.figures.run import BLUE, GREY, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLACK = "#1a202c"
BINS, SHOWN = 28, 0.95  # bins, and the share of all distances that they cover
MOST = 24  # ridges in a panel; of more epochs, as many are shown, evenly spaced


def votes(results: Path, out: Path) -> list[Path]:
    """Draw, for each class that was measured, histograms of the votes' squared distance to each class capsule.

    A row is an iteration, a column a class capsule, a ridge an epoch; training goes upwards. The tick in a ridge is the
    median, the number in a panel that of the last epoch.
    """
    runs = [record for record in read_records(results) if (record.folder / "votes.npz").exists()]
    if not runs:
        raise MissingRecords(missing("votes"))
    kept = np.load(opened(runs[-1].folder / "votes.npz"))
    classes, epochs = [str(name) for name in kept["classes"]], kept["epochs"]
    drawn = []
    for s, shown in enumerate(map(str, kept["shown"])):
        title = (
            f"mean votes of {kept['images'][s]:,} {shown} images: squared distance to the mean of each class capsule"
        )
        some = evenly(len(epochs))
        figure = _of_class(kept["distances"][some, s], epochs[some].tolist(), classes, shown, title)
        drawn.append(save(figure, out / f"votes-{shown}.png"))
    return drawn


def evenly(count: int) -> list[int]:
    """Return the numbers of the epochs that are shown: of ``count`` all, or as many as there is room for."""
    return sorted(set(np.linspace(0, count - 1, min(count, MOST)).round().astype(int).tolist()))


def _of_class(distances: np.ndarray, epochs: list[int], classes: list[str], shown: str, title: str) -> "Figure":
    """Draw the votes of the images of one class, from distances ``e t j i``; all panels have the same axes."""
    iterations = distances.shape[1]
    edges = np.linspace(0, np.quantile(distances, SHOWN), BINS + 1)
    figure = new_figure(1.9 * len(classes) + 0.9, (0.8 + 0.17 * len(epochs)) * iterations + 0.9)
    grid = figure.subplots(iterations, len(classes), sharex=True, sharey=True, squeeze=False)
    order = sorted(range(len(classes)), key=lambda j: classes[j])
    for t, row in enumerate(grid):
        for axes, j in zip(row, order, strict=True):
            target = classes[j] == shown
            _ridges(axes, distances[:, t, j], edges, epochs, BLUE if target else GREY)
            if t == 0:
                weight = "bold" if target else "normal"
                axes.set_title(classes[j], fontsize=11, color=BLUE if target else GREY, fontweight=weight)
            if t == iterations - 1:
                axes.set_xlabel(r"$\|\bar V_{j|i} - \bar M_j\|^2$", color=GREY)
        row[0].set_ylabel(f"iteration {t + 1}\nepoch", color=GREY, fontsize=10)
    beyond = 100 * (distances > edges[-1]).mean()
    figure.suptitle(
        f"{title}\n(tick: median; {beyond:.0f}% of all distances lie beyond the right edge)", fontsize=11, color=GREY
    )
    return figure


def _ridges(axes: "Axes", distances: np.ndarray, edges: np.ndarray, epochs: list[int], colour: str) -> None:
    """Draw a histogram of the distances ``e i`` for each epoch, one above the other, and a tick at the median."""
    counts = np.stack([np.histogram(of_epoch, edges)[0] for of_epoch in distances])
    heights = 0.92 * counts / max(counts.max(), 1)
    medians = np.median(distances, axis=1)
    for k in range(len(epochs)):
        shade = 0.25 + 0.5 * k / max(len(epochs) - 1, 1)
        axes.stairs(k + heights[k], edges, baseline=k, fill=True, color=_pale(colour, shade))
        axes.stairs(k + heights[k], edges, baseline=None, color=colour, lw=0.7)
        axes.plot(medians[k], k + 0.12, marker="|", ms=7, mew=2, color=BLACK, zorder=5, clip_on=False)
    axes.text(
        0.98, 1.0, f"median {medians[-1]:.2f}", ha="right", va="top", fontsize=8, color=GREY, transform=axes.transAxes
    )  # fmt: skip
    step = max(len(epochs) // 6, 1)
    axes.set_yticks(range(0, len(epochs), step), [str(epoch) for epoch in epochs[::step]])
    axes.set_ylim(-0.1, len(epochs) + 0.6)
    axes.set_xlim(edges[0], edges[-1])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.tick_params(axis="x", labelsize=8)


def _pale(colour: str, share: float) -> tuple[float, ...]:
    """Return the colour mixed with white, of which ``1 - share`` is taken."""
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    return tuple(1 - share * (1 - part) for part in parts)

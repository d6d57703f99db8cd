"""How votes gather around class capsules in training (the paper's last two figures), from a run's ``votes.npz``.

Axes of its distances: e epoch, s the class that is shown, t iteration, j class capsule, i child.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from vbcaps.figures.records import MissingRecords, missing, read_records
from vbcaps.figures.run import BLUE, GREY, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLACK = "#1a202c"
BINS = 28
MOST = 24  # ridges in a panel; of more epochs, as many are shown, evenly spaced


def votes(results: Path, out: Path) -> list[Path]:
    """Draw, for each class that was measured, histograms of the votes' squared distance to each class capsule.

    A row is an iteration, a column a class capsule, a ridge an epoch; training goes upwards. The tick in a ridge is the
    median, the number in a panel that of the last epoch.
    """
    runs = [record for record in read_records(results) if (record.folder / "votes.npz").exists()]
    if not runs:
        raise MissingRecords(missing("votes"))
    kept = np.load(runs[-1].folder / "votes.npz")
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
    """Draw the votes of the images of one class, from distances ``e t j i``."""
    iterations = distances.shape[1]
    figure = new_figure(1.9 * len(classes) + 0.9, 1.85 * iterations + 0.9)
    grid = figure.subplots(iterations, len(classes), sharex="row", sharey=True, squeeze=False)
    order = sorted(range(len(classes)), key=lambda j: classes[j])
    for t, row in enumerate(grid):
        edges = np.linspace(0, np.quantile(distances[:, t], 0.96), BINS + 1)
        for axes, j in zip(row, order, strict=True):
            target = classes[j] == shown
            _ridges(axes, distances[:, t, j], edges, epochs, BLUE if target else GREY)
            if t == 0:
                weight = "bold" if target else "normal"
                axes.set_title(classes[j], fontsize=11, color=BLUE if target else GREY, fontweight=weight)
            if t == iterations - 1:
                axes.set_xlabel(r"$\|\bar V_{j|i} - \bar M_j\|^2$", color=GREY)
        row[0].set_ylabel("epoch", color=GREY, fontsize=9)
        name = f"iteration {t + 1}"
        row[0].text(-0.34, 0.5, name, rotation=90, va="center", ha="center", color=GREY, transform=row[0].transAxes)
    figure.suptitle(title, fontsize=11, color=GREY)
    return figure


def _ridges(axes: "Axes", distances: np.ndarray, edges: np.ndarray, epochs: list[int], colour: str) -> None:
    """Draw a histogram of the distances ``e i`` for each epoch, shifted upwards by one, and a tick at the median.

    The earlier ones stand in front.
    """
    counts = np.stack([np.histogram(of_epoch, edges)[0] for of_epoch in distances])
    heights = 1.5 * counts / max(counts.max(), 1)
    x = np.repeat(edges, 2)[1:-1]
    medians = np.median(distances, axis=1)
    for k in reversed(range(len(epochs))):
        shade = 0.2 + 0.5 * k / max(len(epochs) - 1, 1)
        y = k + np.repeat(heights[k], 2)
        axes.fill_between(x, k, y, color=_pale(colour, shade), lw=0)
        axes.plot(x, np.where(y > k, y, np.nan), color=colour, lw=0.7)
        axes.axhline(k, color=colour, lw=0.3)
        axes.plot(medians[k], k, marker="|", ms=6, mew=1.8, color=BLACK, zorder=len(epochs) + 5, clip_on=False)
    axes.text(
        0.98, 0.98, f"median {medians[-1]:.2f}", ha="right", va="top", fontsize=8, color=GREY, transform=axes.transAxes
    )  # fmt: skip
    step = max(len(epochs) // 6, 1)
    axes.set_yticks(range(0, len(epochs), step), [str(epoch) for epoch in epochs[::step]])
    axes.set_ylim(-0.15, len(epochs) + 0.9)
    axes.set_xlim(edges[0], edges[-1])
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.tick_params(axis="x", labelsize=8)


def _pale(colour: str, share: float) -> tuple[float, ...]:
    """Return the colour mixed with white, of which ``1 - share`` is taken; opaque, so that ridges hide those behind."""
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    return tuple(1 - share * (1 - part) for part in parts)

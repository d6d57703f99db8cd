"""Pictures of a run, drawn from its recorded files: learning curves, the confusion matrix, a grid of predictions.

Drawing needs matplotlib (``pip install vbcaps[plot]``); without it every function raises ``NoMatplotlib``.
"""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vbcaps.disk import replace
from vbcaps.training.runfolder import read_metrics, read_result

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, RED, GREY = "#2b6cb0", "#dd6b20", "#2f855a", "#c53030", "#4a5568"
FORMATS = (".png", ".pdf", ".svg")
MOST_CELLS = 20  # greatest number of classes at which a cell of the confusion matrix has room for its number


class NoMatplotlib(ImportError):
    """Raised where a picture is asked for and matplotlib is not installed."""


def of_run(folder: Path) -> list[Path]:
    """Draw learning curves from ``metrics.csv`` and, if the run was tested, the confusion matrix in ``result.json``."""
    drawn = [curves([folder], folder / "curves.png")]
    test = read_result(folder).get("test")
    return [*drawn, confusion(test, folder / "confusion.png")] if test else drawn


def curves(folders: Sequence[Path], path: Path) -> Path:
    """Draw loss and error over epochs from each folder's ``metrics.csv``, with one thin line per run."""
    figure = new_figure(9.0, 3.4)
    loss_axes, error_axes = figure.subplots(1, 2)
    named: set[str] = set()
    for folder in folders:
        rows = read_metrics(folder)
        for axes, column, label, colour in (
            (loss_axes, "loss", "training", ORANGE),
            (error_axes, "train_error", "training", ORANGE),
            (error_axes, "validation_error", "validation", BLUE),
        ):
            points = [(epoch, y) for row in rows if (y := row.get(column)) is not None and (epoch := row["epoch"])]
            if points:
                scale = 1.0 if column == "loss" else 100.0
                epochs, values = np.array(points).T
                new = label if column not in named else None
                axes.plot(epochs, values * scale, color=colour, lw=1.4, marker="o", ms=2.5, label=new)
                named.add(column)
    label_axes(loss_axes, "loss", "epoch", "")
    label_axes(error_axes, "error", "epoch", "%")
    for axes, columns in ((loss_axes, {"loss"}), (error_axes, {"train_error", "validation_error"})):
        if not named & columns:
            _say(axes, "nothing was recorded")
            continue
        axes.locator_params(axis="x", integer=True)
        if axes is error_axes:
            axes.set_ylim(bottom=0)
            axes.legend(frameon=False)
    return save(figure, path)


def confusion(evaluation: dict[str, Any], path: Path) -> Path:
    """Draw the confusion matrix of a recorded evaluation: a row per true class, shaded by share, numbered by count."""
    counts, names = np.array(evaluation["confusion"]), [str(row["name"]) for row in evaluation["per_class"]]
    k = len(names)
    if counts.shape != (k, k):
        raise ValueError(f"confusion must be {k} by {k} for {k} classes, got {counts.shape}")
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    side = min(3.0 + 0.42 * k, 14.0)
    figure = new_figure(side, side)
    axes = figure.subplots()
    axes.imshow(share, cmap="Blues", vmin=0, vmax=1)
    axes.set_xticks(range(k), names, rotation=45, ha="right", rotation_mode="anchor", parse_math=False)
    axes.set_yticks(range(k), names, parse_math=False)
    if k <= MOST_CELLS:
        for row, column in np.argwhere(counts > 0):
            colour = "white" if share[row, column] > 0.5 else GREY
            axes.text(column, row, counts[row, column], ha="center", va="center", color=colour, fontsize=8)
    title = f"{100 * evaluation['error']:.2f}% error on {evaluation.get('count', counts.sum())} images"
    label_axes(axes, title, "predicted", "true class")
    axes.grid(False)
    axes.tick_params(length=0)
    return save(figure, path)


def predictions(
    images: np.ndarray,
    probabilities: np.ndarray,
    classes: Sequence[str],
    path: Path,
    labels: Sequence[Sequence[int]] | None = None,
    *,
    objects: int = 1,
) -> Path:
    """Draw a grid of images ``n c h w`` (0..255) with their classes and probabilities; ``labels`` mark errors red.

    Args:
        images: the images.
        probabilities: of each class, ``n c``.
        classes: the names of the classes.
        path: the file to write.
        labels: the classes of the objects in each image, one or more.
        objects: how many classes are the answer.
    """
    if len(images) == 0 or probabilities.shape != (len(images), len(classes)):
        raise ValueError(
            f"probabilities must be (n, classes) = ({len(images)}, {len(classes)}) with n at least 1, "
            f"got {probabilities.shape}"
        )
    columns = min(len(images), 6)
    rows = -(-len(images) // columns)
    figure = new_figure(1.7 * columns if len(images) > 1 else 3.0, 2.0 * rows if len(images) > 1 else 3.2)
    grid = list(figure.subplots(rows, columns, squeeze=False).flat)
    for axes in grid:
        axes.axis("off")
    for axes, image, probability, k in zip(grid, images, probabilities, range(len(images)), strict=False):
        best = (-probability).argsort(kind="stable")[:objects].tolist()
        axes.imshow(picture_of(image), interpolation="nearest", cmap="gray", vmin=0, vmax=255)
        sure = " ".join(f"{100 * probability[j]:.0f}%" for j in best)
        title, colour = f"{' + '.join(classes[j] for j in best)}\n{sure}", GREY
        if labels is not None:
            right = set(best) == set(labels[k])
            colour = GREEN if right else RED
            title += "" if right else f", is {' + '.join(classes[j] for j in labels[k])}"
        axes.set_title(title, color=colour, fontsize=8, parse_math=False)
    return save(figure, path)


def picture_of(image: np.ndarray) -> np.ndarray:
    """Return ``c h w`` in matplotlib's layout: in colour if there are three channels, two side by side, and more than
    three as their mean."""
    if len(image) > 3:
        return image.mean(0)
    return image.transpose(1, 2, 0) if len(image) == 3 else np.concatenate(list(image), axis=1)


def new_figure(width: float, height: float, dpi: int = 150) -> "Figure":
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NoMatplotlib("pictures need matplotlib: pip install 'vbcaps[plot]'") from error
    figure = Figure(figsize=(width, height), dpi=dpi, layout="constrained")
    figure.get_layout_engine().set(w_pad=0.06, h_pad=0.06)  # type: ignore[union-attr,call-arg]
    FigureCanvasAgg(figure)  # a separate figure shares no state with the caller's plots and needs no window system
    return figure


def label_axes(axes: "Axes", title: str, x: str, y: str) -> None:
    axes.set_title(title, fontsize=11, color=GREY, loc="left")
    axes.set_xlabel(x, color=GREY)
    axes.set_ylabel(y, color=GREY)
    axes.grid(color="#e2e8f0", lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _say(axes: "Axes", text: str) -> None:
    axes.text(0.5, 0.5, text, ha="center", va="center", color=GREY, transform=axes.transAxes)
    axes.set_xticks([])
    axes.set_yticks([])


def check_format(path: Path) -> Path:
    """Return a path whose suffix names a format that `save` writes; any other suffix is an error."""
    if path.suffix.lower() not in FORMATS:
        raise ValueError(f"the picture's name must end in {', '.join(FORMATS[:-1])} or {FORMATS[-1]}, got {path}")
    return path


def save(figure: Any, path: Path) -> Path:
    """Draw in memory and write the file in one step, so that a picture is never half written.

    The format is that of the suffix if it is one of ``FORMATS``, else PNG.
    """
    from matplotlib import rc_context

    suffix, drawn = path.suffix.lower(), io.BytesIO()
    with rc_context({"pdf.fonttype": 42}):  # TrueType, as publishers ask; matplotlib's Type 3 is refused by some
        figure.savefig(drawn, format=suffix[1:] if suffix in FORMATS else "png")
    path.parent.mkdir(parents=True, exist_ok=True)
    replace(path, drawn.getvalue())
    return path

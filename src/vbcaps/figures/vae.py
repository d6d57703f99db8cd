"""Pictures of a Capsule-VAE: images beside their reconstructions, samples, and the effect of each pose entry.

Axes: n image, j class, k value, d pose entry, c channel, y x row and column.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from vbcaps.figures.run import GREY, RED, new_figure, picture_of, save
from vbcaps.weights.decode import checked_entry, class_number, vae_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from vbcaps.weights.model import Model

SPREAD = (-3.0, -2.0, -1.0, 0.0, 1.0, 2.0, 3.0)  # standard deviations by which an entry is moved
MOST = 20  # images in a row of reconstructions


def reconstructions(model: "Model", images: Any, path: Path) -> Path:
    """Draw images, and below each its reconstruction, ``MOST`` in a row.

    Args:
        model: a trained Capsule-VAE.
        images: whatever ``model.predict`` takes.
        path: the PNG file to write.
    """
    vae_of(model)
    pixels = model.read(images)
    seen, decoded = model.view.test(pixels).clamp(0, 1), model.reconstruct(pixels)
    rows = [part for pair in zip(seen.split(MOST), decoded.split(MOST), strict=True) for part in pair]
    axes = _draw(rows, min(len(pixels), MOST), names=["image", "decoded"] * (len(rows) // 2))
    return save(axes.figure, Path(path))


def samples(model: "Model", path: Path, count: int = 12, source: str = "class", seed: int = 0) -> Path:
    """Draw ``count`` samples of every class, a row for each.

    Args:
        model: a trained Capsule-VAE.
        path: the PNG file to write.
        count: samples of each class.
        source: where the codes come from, see ``Model.sample``.
        seed: seed of the draws; class j has seed + j.
    """
    rows = [model.sample(j, count, source=source, seed=seed + j) for j in range(model.num_classes)]
    axes = _draw(rows, count, names=model.classes)
    return save(axes.figure, Path(path))


def entries(
    model: "Model",
    image: Any,
    path: Path,
    entry: int | None = None,
    values: Sequence[float] | None = None,
    label: int | str | None = None,
) -> Path:
    """Draw an image with entries of its pose moved: a row for each entry, a column for each value.

    Args:
        model: a trained Capsule-VAE.
        image: one image, whatever ``model.predict`` takes.
        path: the PNG file to write.
        entry: the only entry to move; without it all are, in a row each.
        values: numbers added to an entry; without them ``SPREAD`` times the standard deviation of that entry among the
            training images of the class.
        label: the class whose capsule is decoded, see ``Model.tweak``.
    """
    vae = vae_of(model)
    moved = list(range(vae.code_size)) if entry is None else [checked_entry(vae, entry)]
    if values is None:
        deviations = deviations_of(model, image, label)
        steps = [[k * deviations[d] for k in SPREAD] for d in moved]
        names = [f"{k:+.2g} sd" if k else "as it is" for k in SPREAD]
    else:
        steps, names = [list(values)] * len(moved), [f"{v:+.3g}" for v in values]
    rows = [model.tweak(image, d, step, label=label) for d, step in zip(moved, steps, strict=True)]
    axes = _draw(rows, len(names), least=0.62, above=0.25, names=[f"entry {d}" for d in moved])
    _name_columns(axes, names, rows)
    return save(axes.figure, Path(path))


def deviations_of(model: "Model", image: Any, label: int | str | None = None) -> list[float]:
    """Return the standard deviation of each pose entry among the training images of the image's class, ``d``."""
    vae = vae_of(model)
    j = int(model.predict(image)[0].argmax()) if label is None else class_number(model, label)
    return [float(sd) for sd in vae.code_root[j].norm(dim=1)]


def overview(model: "Model", images: Any, path: Path, seed: int = 0, labels: Sequence[int] | None = None) -> Path:
    """Draw reconstructions, samples, and the effect of each pose entry on the last image, in one picture.

    Args:
        model: a trained Capsule-VAE.
        images: whatever ``model.predict`` takes, some ten of them.
        path: the PNG file to write.
        seed: seed of the samples, see `samples`.
        labels: the true classes. Below an image that is taken for another class stands which: what is decoded is that
            class's capsule.
    """
    pixels = model.read(images)
    pairs = [model.view.test(pixels).clamp(0, 1), model.reconstruct(pixels)]
    drawn = [model.sample(j, len(pixels), seed=seed + j) for j in range(model.num_classes)]
    moved = [
        model.tweak(pixels[-1:], d, [k * deviation for k in SPREAD])
        for d, deviation in enumerate(deviations_of(model, pixels[-1:]))
    ]
    read = model.predict(pixels).argmax(1).tolist()
    below = ["" if labels is None or j == labels[n] else f"read as {model.classes[j]}" for n, j in enumerate(read)]
    side, top, gap = 0.46, 0.45, 0.5  # inches: a tile on the left, the title, and the space between the two parts
    margin, entry_names = _width_of(["decoded", *model.classes]), _width_of(["entry 15"])
    height = top + side * (len(pairs) + len(drawn)) + gap + 0.08
    small = (height - top - 0.08) / len(moved)  # a tile on the right
    left, right = side * len(pixels), small * len(SPREAD)
    figure = _figure(margin + left + 0.15 + entry_names + right + 0.08, height)
    first = _axes(figure, margin, top, left, side * len(pairs))
    second = _axes(figure, margin, top + side * len(pairs) + gap, left, side * len(drawn))
    third = _axes(figure, margin + left + 0.15 + entry_names, top, right, small * len(moved))
    for axes, rows, names, title in (
        (first, pairs, ["image", "decoded"], "test images"), (second, drawn, model.classes, "samples of each class"),
        (third, moved, [f"entry {d}" for d in range(len(moved))], "one pose entry moved"),
    ):  # fmt: skip
        _show(axes, rows, len(rows[0]))
        _name_rows(axes, names, rows)
        axes.set_title(title, fontsize=9, color=GREY, loc="left", pad=16 if axes is third else 5)
    _name_columns(third, [f"{k:+.0f} sd" if k else "as it is" for k in SPREAD], moved)
    width = picture_of(pairs[0][0].numpy()).shape[1] + 1
    for n, text in enumerate(below):
        first.text(width * (n + 0.5), 1.02 * first.get_ylim()[0], text, ha="center", va="top", fontsize=7,
                   color=RED, parse_math=False)  # fmt: skip
    return save(figure, Path(path))


def _figure(width: float, height: float) -> "Figure":
    """Return a figure in which axes are placed by hand, in inches."""
    figure = new_figure(width, height)
    figure.set_layout_engine("none")
    return figure


def _axes(figure: "Figure", left: float, top: float, width: float, height: float) -> "Axes":
    """Add axes at a place that is given in inches from the upper left corner."""
    whole, high = figure.get_size_inches()
    return figure.add_axes((left / whole, 1 - (top + height) / high, width / whole, height / high))


def _width_of(names: Sequence[str]) -> float:
    """Return room for the longest name beside a row, in inches."""
    return 0.15 + 0.058 * max(map(len, names))


def _draw(
    rows: Sequence[Tensor], columns: int, names: Sequence[str], least: float = 0.55, above: float = 0.06
) -> "Axes":
    """Draw rows of images ``n c y x`` with values from 0 to 1 in a figure of their own, with no room left over."""
    height, width = picture_of(rows[0][0].numpy()).shape[:2]
    side = max(least, 3.0 / max(columns, 4))
    margin, across, down = _width_of(names), side * columns * width / height, side * len(rows)
    figure = _figure(margin + across + 0.08, above + down + 0.06)
    axes = _axes(figure, margin, above, across, down)
    _show(axes, rows, columns)
    _name_rows(axes, names, rows)
    return axes


def _show(axes: "Axes", rows: Sequence[Tensor], columns: int) -> None:
    """Draw rows of images in one pair of axes, with thin gaps between images."""
    tiles = [[picture_of(image.numpy()) for image in row] for row in rows]
    height, width = tiles[0][0].shape[:2]
    colours = tiles[0][0].shape[2:]
    sheet = np.ones((len(rows) * (height + 1) - 1, columns * (width + 1) - 1, *colours), dtype=np.float32)
    for r, row in enumerate(tiles):
        for k, tile in enumerate(row):
            y, x = r * (height + 1), k * (width + 1)
            sheet[y : y + height, x : x + width] = tile
    axes.imshow(sheet, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    axes.set_xticks([])
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)


def _name_columns(axes: "Axes", names: Sequence[str], rows: Sequence[Tensor]) -> None:
    width = picture_of(rows[0][0].numpy()).shape[1] + 1
    axes.set_xticks([width * (k + 0.5) for k in range(len(names))], names, fontsize=7, color=GREY)
    axes.xaxis.tick_top()


def _name_rows(axes: "Axes", names: Sequence[str], rows: Sequence[Tensor]) -> None:
    height = rows[0].shape[2] + 1
    places = [height * (r + 0.5) for r in range(len(names))]
    axes.set_yticks(places, names, fontsize=7, color=GREY, parse_math=False)

"""A picture of capsules: an image, the parts of it that class capsules took, and the pose of the winner.

Axes: n image, l parent position, i child slot, j parent type, c child; y x row and column of a map of capsules, t its
types.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from vbcaps.figures.run import BLUE, GREY, ORANGE, new_figure, picture_of, save
from vbcaps.routing import Posterior
from vbcaps.vae import capsules_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from vbcaps.layers import LayerTrace
    from vbcaps.models import NetworkTrace
    from vbcaps.weights.model import Model

ROWS = 3  # number of classes shown, best first


def shares_of_children(layer: "LayerTrace", of_parents: Tensor, iteration: int = -1) -> Tensor:
    """Divide what each parent holds among its children, in proportion to the weight of their votes.

    A parent's pose is the mean of its votes, weighted by $R_{ij} = a_i r_{ij}$; so child i has the share
    $R_{ij} / \\sum_i R_{ij}$ in it.

    Args:
        layer: how a layer of capsules routed one image.
        of_parents: the amount that each parent holds, ``l j``, or ``j`` for class capsules.
        iteration: the iteration whose responsibilities count.

    Returns:
        The amount that each child holds, ``c``; the sum over children is the sum over parents.
    """
    L, I = layer.fields.child.shape
    r = layer.iterations[iteration].r[0].reshape(L, I, -1)
    R = layer.activations[0].reshape(L, I, 1) * r  # l i j
    shares = R / R.sum(1, keepdim=True).clamp_min(1e-12)
    held = (shares * of_parents.reshape(L, 1, -1)).sum(2)  # l i
    children = int(layer.fields.child.max()) + 1
    return held.new_zeros(children).index_add(0, layer.fields.child.flatten(), held.flatten())


def parts_of_class(trace: "NetworkTrace", j: int, iteration: int = -1) -> Tensor:
    """Return the parts of the image that a class capsule was made of, ``y x`` over the map of primary capsules.

    The class capsule's pose is followed down through all layers: each parent is divided among its children.

    Args:
        trace: how a network routed one image.
        j: the class.
        iteration: the iteration of the class layer; the layers below it count after their last.
    """
    class_layer = trace.layers["class_caps"]
    types = class_layer.parents.poses.shape[1]
    held = torch.eye(types, device=class_layer.parents.poses.device)[j]
    held = shares_of_children(class_layer, held, iteration)
    for name in ("conv_caps2", "conv_caps1"):
        layer = trace.layers[name]
        held = shares_of_children(layer, held.reshape(layer.fields.child.shape[0], -1))
    y, x, t = trace.layers["conv_caps1"].children.activations.shape[1:]
    seen = held.new_zeros(y * x * t)
    seen[: len(held)] = held  # children after the last field are in no field
    return seen.reshape(y, x, t).sum(2)


def capsules(model: "Model", image: object, path: str | Path, *, truth: str | None = None) -> Path:
    """Draw how a capsule network came to its answer for one image.

    The image is on the left. In the middle are, for the most probable classes, the parts of the image that the class
    capsule took after each routing iteration. On the right is the pose of the winner, with the standard deviation of
    each entry if the routing is VB.

    Args:
        model: a trained capsule network.
        image: anything that ``model.predict`` takes, one image.
        path: the PNG file to write.
        truth: the right class, for the title.

    Returns:
        The path.
    """
    pixels = model.read(image)
    net = capsules_of(model.net)
    if len(pixels) != 1 or net is None:
        raise ValueError("capsules are drawn of one image, and of a network that has capsules")
    probabilities = model.predict(pixels)[0]
    was = model.training
    model.eval()
    x = model.view.test(pixels.to(next(model.parameters()).device))
    with torch.no_grad():
        trace = net.trace(x)
    model.train(was)
    best = probabilities.argsort(descending=True)[:ROWS].tolist()
    iterations = len(trace.layers["class_caps"].iterations)
    figure = new_figure(2.1 * (iterations + 1) + 2.9, 2.0 * len(best) + 0.5)
    grid = figure.add_gridspec(len(best), iterations + 2, width_ratios=[1.15, *[1] * iterations, 1.45])
    picture = x[0].cpu().numpy()  # what the network sees, from black to white
    picture = 255 * (picture - picture.min()) / max(float(picture.max() - picture.min()), 1e-9)
    axes = figure.add_subplot(grid[:, 0])
    axes.imshow(picture_of(picture.astype(np.uint8)), cmap="gray", interpolation="nearest")
    axes.axis("off")
    axes.set_title("image" if truth is None else f"image: {truth}", fontsize=10, color=GREY, parse_math=False)
    grey = picture.mean(0)
    for row, j in enumerate(best):
        for t in range(iterations):
            axes = figure.add_subplot(grid[row, t + 1])
            _heat(axes, grey, parts_of_class(trace, j, t).cpu().numpy())
            if row == 0:
                axes.set_title(f"iteration {t + 1}", fontsize=10, color=GREY)
            if t == 0:
                label = f"{model.classes[j]}\n{100 * probabilities[j]:.1f}%"
                axes.set_ylabel(label, fontsize=10, color=ORANGE if row == 0 else GREY, parse_math=False)
    _pose(figure.add_subplot(grid[:, -1]), trace, best[0])
    return save(figure, Path(path))


def _heat(axes: "Axes", grey: np.ndarray, parts: np.ndarray) -> None:
    """Draw the image dimly, and over it the parts as a heat map."""
    height, width = grey.shape
    axes.imshow(grey, cmap="gray", alpha=0.55, interpolation="nearest", extent=(0, width, height, 0))
    axes.imshow(parts, cmap="inferno", alpha=0.6, interpolation="bilinear", extent=(0, width, height, 0), vmin=0)
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)


def _pose(axes: "Axes", trace: "NetworkTrace", j: int) -> None:
    """Draw the 4x4 pose of class j and, if there is a posterior, the standard deviation of each entry."""
    q = trace.layers["class_caps"].iterations[-1]
    side = trace.output.poses.shape[-1]
    mean = q.m[0, j].reshape(side, side).cpu().numpy()
    most = float(np.abs(mean).max()) or 1.0
    axes.imshow(mean, cmap="RdBu_r", vmin=-1.6 * most, vmax=1.6 * most)
    deviation = q.variance()[0, j].sqrt().reshape(side, side).cpu().numpy() if isinstance(q, Posterior) else None
    for y in range(side):
        for x in range(side):
            text = f"{mean[y, x]:.2f}" + ("" if deviation is None else f"\n±{deviation[y, x]:.2f}")
            axes.text(x, y, text, ha="center", va="center", fontsize=8, color="#1a202c")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.spines[:].set_visible(False)
    symbol = r"$m \pm \sigma$" if deviation is not None else "$m$"
    axes.set_title(f"pose {symbol}", fontsize=10, color=BLUE)

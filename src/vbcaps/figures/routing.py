r"""A picture of the routing of one image: the parts that classes took, the cloud of votes for one class, and its pose.

Axes: n image, j class, d pose entry, t iteration, i child, b of two principal components; y x row and column.
"""

import textwrap
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vbcaps.figures.run import BLUE, GREY, ORANGE, check_format, new_figure, picture_of, save
from vbcaps.inference import evaluating, exact_convolutions
from vbcaps.layers import RoutingResult
from vbcaps.models import CapsNet, NetworkTrace
from vbcaps.routing import Mixture, Posterior
from vbcaps.trace import Cloud, cloud_of, frame_of_parts, parts_of
from vbcaps.vae import capsules_of
from vbcaps.weights.decode import class_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from vbcaps.weights.model import Model

SHOWN = 3  # classes whose parts are drawn, best first
INK, PALE = "#1a202c", "#cbd5e0"
LIGHT = 0.05  # a vote that is lighter than this share of the heaviest may lie outside the axes
LARGEST = 60.0  # area of the circle of the heaviest vote, in square points
CIRCLE = np.linspace(0, 2 * np.pi, 100)
TEXT: dict[str, Any] = dict(fontsize=8, color=INK, math_fontfamily="stix")


def routing(
    model: "Model", image: Any, path: str | Path, *, truth: str | None = None, label: int | str | None = None
) -> Path:
    r"""Draw how a capsule network came to its answer for one image, in the width of a page.

    There is a row for each iteration. It has the parts of the image that the most probable classes took (of a network
    that names several objects, the class capsules of these objects), and the votes
    for one class in two principal components: a vote is a circle whose area is proportional to $R_{ij}$, and around
    their mean $m_j$ lie the ellipse of two standard deviations of the votes (VB and EM) and, filled, that of the mean
    (VB). On the left are the image and the pose of this class, with the standard deviation of each entry.

    Args:
        model: a trained capsule network or Capsule-VAE.
        image: one image, whatever ``model.predict`` takes.
        path: the file to write, PNG, PDF or SVG by its suffix.
        truth: the right class, for the title.
        label: the class whose votes and pose are drawn, its name or number; without it the one that is predicted.

    Returns:
        The path.
    """
    path = check_format(Path(path))
    net = capsules_of(model.net)
    if net is None:
        raise ValueError(
            f"{model.name} is a CNN, which has no routing: draw a capsule network or a Capsule-VAE, as fashion_laptop"
        )
    chosen = None if label is None else class_number(model, label)
    steps = int(net.class_caps.routing.iters)  # type: ignore[arg-type]
    figure: Any = new_figure(7.0, 1.15 * max(steps, 2) + 1.0, 300)  # inches; 7 is the width of a page with two columns
    pixels = model.read(image)
    if len(pixels) != 1:
        raise ValueError(f"routing is drawn of one image, got {len(pixels)}: give one of them")
    probabilities = model.predict(pixels)[0]
    trace = trace_of(model, net, pixels)
    shown = probabilities.argsort(descending=True).tolist()
    if chosen is not None:
        shown = [chosen, *(j for j in shown if j != chosen)]
    shown = shown[: SHOWN if model.recipe.objects == 1 else model.recipe.objects]

    left, right = figure.subfigures(1, 2, width_ratios=[1.45, len(shown) + 2])
    _left(left, model, trace, pixels, shown[0], truth)
    axes = right.subplots(steps, len(shown) + 1, squeeze=False, width_ratios=[*[1] * len(shown), 1.3])
    heat = _parts(axes[:, :-1], net, trace, seen_by(model, pixels).mean(0), shown)
    bar = right.colorbar(heat, ax=axes[:, :-1], location="bottom", shrink=0.5, aspect=40, pad=0.02)
    bar.set_label("share of the class capsule's pose (%)", fontsize=6.5, color=GREY, labelpad=1)
    bar.ax.tick_params(labelsize=6, color=GREY, labelcolor=GREY, length=2)
    bar.outline.set_visible(False)
    for column, j in enumerate(shown):
        title = f"{_name(model, j)}\n{100 * probabilities[j]:.1f}%"
        axes[0, column].set_title(title, **TEXT | dict(color=ORANGE if column == 0 else INK), parse_math=False)
    for t, q in enumerate(trace.layers["class_caps"].iterations):
        axes[t, 0].set_ylabel(f"iteration {t + 1}{_bound(trace, q)}", **TEXT)
    _clouds(axes[:, -1], cloud_of(trace, "class_caps", 0, shown[0]))
    axes[0, -1].set_title(f"votes for\n{_name(model, shown[0])}", **TEXT | dict(color=ORANGE), parse_math=False)
    legend = figure.legend(
        *axes[0, -1].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=7, frameon=False,
        labelcolor=INK, handletextpad=0.4, columnspacing=1.6,
    )  # fmt: skip
    legend.legend_handles[0].set_sizes([18.0])
    for text in legend.get_texts():
        text.set_math_fontfamily("stix")
    return save(figure, path)


@torch.no_grad()
def trace_of(model: "Model", net: CapsNet, pixels: torch.Tensor) -> NetworkTrace:
    """Return how a network routes one image, as ``model.predict`` lets it run."""
    weight = next(net.parameters())
    with evaluating(model), exact_convolutions():
        return net.trace(model.view.test(pixels.to(weight.device)).to(weight.dtype))


def seen_by(model: "Model", pixels: torch.Tensor) -> np.ndarray:
    """Return the crop of an image that the network sees, before it is standardised, ``c y x`` in 0..1."""
    return replace(model.view, standardise="none").test(pixels)[0].cpu().numpy()


def _name(model: "Model", j: int) -> str:
    """Return the name of a class in lines that are no wider than a panel."""
    return textwrap.fill(model.classes[j], 17)


def _bound(trace: NetworkTrace, q: RoutingResult) -> str:
    if not isinstance(q, Posterior):
        return ""
    layer = trace.layers["class_caps"]
    bound = float(q.elbo(layer.activations, layer.votes).total)
    return rf"{chr(10)}$\mathcal{{L}}_\mathrm{{ELBO}}={bound:.0f}$"


def _left(figure: Any, model: "Model", trace: NetworkTrace, pixels: torch.Tensor, j: int, truth: str | None) -> None:
    """Draw the image, and below it the pose of class j."""
    image, pose = figure.subplots(2, 1, height_ratios=[1, 1.15])
    image.imshow(picture_of(seen_by(model, pixels)), cmap="gray", vmin=0, vmax=1, interpolation="nearest")
    image.axis("off")
    title = "image" if truth is None else textwrap.fill(f"image: {truth}", 24)
    image.set_title(title, **TEXT, parse_math=False)
    _pose(pose, trace, j)


def _parts(axes: np.ndarray, net: CapsNet, trace: NetworkTrace, grey: np.ndarray, shown: list[int]) -> Any:
    """Draw the parts that each class took at each iteration as heat maps of one scale, with outlines of the image."""
    parts = np.array([[parts_of(trace, "class_caps", 0, j, t).cpu().numpy() for j in shown] for t in range(len(axes))])
    height, width = grey.shape
    top, left, bottom, right = frame_of_parts(net)
    from matplotlib.patheffects import withStroke

    for at in np.ndindex(axes.shape):
        one: Any = axes[at]
        heat = one.imshow(
            100 * parts[at], cmap="OrRd", vmin=0, vmax=100 * parts.max(), extent=(left, right, bottom, top)
        )
        if grey.min() < grey.max():
            middles = np.arange(width) + 0.5, np.arange(height) + 0.5
            outline = one.contour(*middles, grey, levels=[grey.mean()], colors=[INK], linewidths=0.6)
            outline.set_path_effects([withStroke(linewidth=1.5, foreground="white", alpha=0.7)])  # seen on dark, too
        one.set(xlim=(0, width), ylim=(height, 0), xticks=[], yticks=[])
        one.spines[:].set(color=PALE, lw=0.6)
    return heat


def _clouds(axes: np.ndarray, cloud: Cloud) -> None:
    """Draw the votes at each iteration, in the same axes."""
    votes, weight, mean = (x.cpu().numpy() for x in (cloud.votes, cloud.weight, cloud.mean))
    rings = [_ellipses(mean, x) for x in (cloud.spread, cloud.spread_of_mean)]  # t b 100 each, or none
    heavy = votes[weight.max(0) > LIGHT * weight.max()]
    low, high = _limits([heavy, mean, *(x.swapaxes(1, 2).reshape(-1, 2) for x in rings if x is not None)])
    for t, one in enumerate(axes):
        area = LARGEST * weight[t] / weight.max()
        one.scatter(*votes.T, s=area, color=BLUE, alpha=0.4, lw=0, label=r"vote $v_{j|i}$, area $\propto R_{ij}$")
        one.plot(*mean[t], "+", color=INK, ms=5, mew=0.9, zorder=3, label="pose $m_j$")
        if rings[0] is not None:
            spread = r"$E[\Lambda_j]^{-1}$" if rings[1] is not None else r"$\sigma_j^2$"
            one.plot(*rings[0][t], color=INK, lw=0.9, label=rf"$2\sigma$ of the votes: {spread}")
        if rings[1] is not None:
            label = r"$2\sigma$ of $\mu_j$: $(\kappa_j E[\Lambda_j])^{-1}$"
            one.fill(*rings[1][t], fc=ORANGE, ec=INK, alpha=0.75, lw=0.5, label=label)
        one.set(xlim=(low[0], high[0]), ylim=(low[1], high[1]))
        one.set_box_aspect((high[1] - low[1]) / (high[0] - low[0]))
        one.tick_params(labelsize=6, color=GREY, labelcolor=GREY, length=2, labelbottom=t == len(axes) - 1)
        one.locator_params(nbins=4)
        one.spines[["top", "right"]].set_visible(False)
        one.spines[:].set(color=GREY, lw=0.6)
    for b, name in enumerate((axes[-1].set_xlabel, axes[-1].set_ylabel)):
        name(f"PC {b + 1} ({100 * cloud.explained[b]:.0f}%)", fontsize=6.5, color=GREY, labelpad=1)


def _ellipses(mean: np.ndarray, covariance: torch.Tensor | None) -> np.ndarray | None:
    """Return the outline of two standard deviations about each mean, ``t b`` and the points of a circle."""
    if covariance is None:
        return None
    root = np.linalg.cholesky(covariance.cpu().numpy())
    return mean[..., None] + 2 * root @ np.stack([np.cos(CIRCLE), np.sin(CIRCLE)])


def _limits(points: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return limits around all points, with a scale common to both axes, at most half as high as wide."""
    every = np.concatenate(points)
    low, high = every.min(0), every.max(0)
    half = 1.15 * (high - low) / 2
    half = np.maximum(half, [0.95 * half.max(), 0.8 * half.max()])
    return (low + high) / 2 - half, (low + high) / 2 + half


def _pose(axes: "Axes", trace: NetworkTrace, j: int) -> None:
    """Draw the pose matrix of class j, with the standard deviation of each entry if the routing has one."""
    q = trace.layers["class_caps"].iterations[-1]
    side = trace.output.poses.shape[-1]
    mean = q.m[0, j].reshape(side, side).cpu().numpy()
    variance = q.variance() if isinstance(q, Posterior) else q.var if isinstance(q, Mixture) else None
    deviation = None if variance is None else variance[0, j].sqrt().reshape(side, side).cpu().numpy()
    most = float(np.abs(mean).max()) or 1.0
    axes.imshow(mean, cmap="RdBu_r", vmin=-1.6 * most, vmax=1.6 * most)
    for y, x in np.ndindex(side, side):
        text = f"{mean[y, x]:.2f}".replace("-0.00", "0.00").replace("-", "\N{MINUS SIGN}")
        text += "" if deviation is None else f"\n±{deviation[y, x]:.2f}"
        axes.text(x, y, text, ha="center", va="center", fontsize=6, color=INK)
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    axes.set_title(r"pose $m_j$" if deviation is None else r"pose $m_j \pm \sigma_j$", **TEXT)

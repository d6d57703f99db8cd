"""Pictures of how far a network's probabilities and scores of uncertainty can be trusted; they take arrays.

Axes: b bin, n image.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vbcaps.figures.run import BLUE, GREEN, GREY, ORANGE, RED, label_axes, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Bins = tuple[Any, Any, Any]  # mean confidence, accuracy and number of images of each bin, as `uncertainty.reliability`
Curve = tuple[Any, Any]  # coverage and risk, rising coverage, as `uncertainty.risk_coverage`
COLOURS = (BLUE, ORANGE, GREEN, "#805ad5", "#00838f", "#b83280", "#975a16", GREY)
STYLES = ("-", "--", "-.", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 1)), (0, (9, 3)))
POINTS = 400  # of a curve
SETTLED = 0.05  # share of images below which a curve may leave the picture: few images decide there


def reliability_diagram(bins: Mapping[str, Bins], path: Path) -> Path:
    """Draw accuracy and mean confidence, with the gap between them, above the number of images of each bin.

    Args:
        bins: one diagram for each title. Bins are equally wide, from 0 to 1; an empty one has no bar.
        path: the PNG file.
    """
    figure = new_figure(3.6 * len(bins), 4.4)
    _reliability(figure, figure.add_gridspec(2, len(bins), height_ratios=(3, 1)), bins)
    return save(figure, path)


def risk_coverage_curves(curves: Mapping[str, Curve], path: Path) -> Path:
    """Draw the error among the images that are answered, the most certain first, for each score.

    Args:
        curves: at least one, by its name in the legend; all are of the same images, so that they end in the same error.
        path: the PNG file.
    """
    figure = new_figure(7.0, 4.4)
    _risks(figure.subplots(), curves)
    return save(figure, path)


def overview(bins: Mapping[str, Bins], curves: Mapping[str, Curve], path: Path) -> Path:
    """Draw reliability diagrams, and risk-coverage curves beside them."""
    figure = new_figure(3.6 * len(bins) + 6.5, 4.4)
    grid = figure.add_gridspec(2, len(bins) + 1, height_ratios=(3, 1), width_ratios=[*[1] * len(bins), 1.3])
    _reliability(figure, grid, bins)
    _risks(figure.add_subplot(grid[:, len(bins)]), curves)
    return save(figure, path)


WORDS = dict(
    max_softmax="maximum softmax", precision="agreement of votes", pose_entropy="entropy of the pose",
    class_entropy="entropy of the class shares", kl="divergence from the prior", votes="votes of the answer",
    alpha="share of the answer", epistemic="variance of the pose's mean", elbo="ELBO of the class layer",
    disagreement="disagreement",
)  # fmt: skip
FEATURES = {
    "class_caps.kappa": "class evidence",
    "class_caps.m": "class poses",
    "conv_caps1.kappa": "ConvCaps1's evidence",
    "conv_caps1.m": "ConvCaps1's poses",
    "conv_caps2.m": "ConvCaps2's poses",
    "class_caps.m+class_caps.kappa+class_caps.precision": "ClassCaps' posterior",
    "conv_caps1.m+conv_caps1.kappa+conv_caps1.precision": "ConvCaps1's posterior",
    "conv_caps1.m+conv_caps1.precision": "ConvCaps1's poses and precisions",
    "logits+class_caps.m+conv_caps1.m+conv_caps2.m": "logits and the poses of all layers",
}


def said(score: str) -> str:
    """Return the name of a score as a figure says it; of a density also the features that it is of.

    >>> said("max_softmax"), said("density.class_caps.kappa")
    ('maximum softmax', 'density of class evidence')
    >>> said("density class_caps.m, per class"), said("energy")
    ('density of class poses, per class', 'energy')
    """
    for beginning in ("density.", "density "):
        if score.startswith(beginning):
            features, *tail = score.removeprefix(beginning).split(", ")
            words = FEATURES.get(features) or features.replace("+", " + ")
            return ", ".join([f"density of {words}", *tail])
    return WORDS.get(score, score.replace("_", " "))


def _reliability(figure: "Figure", grid: Any, bins: Mapping[str, Bins]) -> None:
    most = max(int(np.asarray(images).max()) for _, _, images in bins.values())
    for column, (title, one) in enumerate(bins.items()):
        upper, lower = (figure.add_subplot(grid[row, column]) for row in (0, 1))
        confidence, accuracy, images = (np.asarray(x, dtype=float) for x in one)
        _bars(upper, confidence, accuracy, images, title)
        _counts(lower, confidence, accuracy, images)
        lower.set_ylim(0.7, 30 * most)  # with room for the legend
        upper.tick_params(labelbottom=False)
        if column:
            for axes in (upper, lower):
                axes.set_ylabel("")
        else:
            upper.legend(edgecolor="none", loc="upper left", fontsize=8)


def _bars(axes: "Axes", confidence: np.ndarray, accuracy: np.ndarray, images: np.ndarray, title: str) -> None:
    """Draw the accuracy of each bin as a bar, the mean confidence as a dash, and the gap between them as a line."""
    used, width = images > 0, 1 / len(images)
    centre = (np.flatnonzero(used) + 0.5) * width
    sure, right = confidence[used], accuracy[used]
    axes.bar(centre, right, 0.92 * width, color="#bee3f8", edgecolor=BLUE, lw=1, label="accuracy")
    axes.vlines(centre, np.minimum(sure, right), np.maximum(sure, right), color=RED, lw=1.5)
    axes.plot(centre, sure, ls="", marker="_", ms=150 * width, mew=2.2, color=RED, label="mean confidence")
    axes.plot([0, 1], [0, 1], color=GREY, lw=1, ls="--")
    label_axes(axes, title, "", "accuracy")
    error = (np.abs(confidence - accuracy) * images).sum() / max(images.sum(), 1)
    box = dict(facecolor="white", edgecolor="none", alpha=0.85, pad=2)
    axes.text(0.97, 0.04, f"ECE {100 * error:.2f}%", ha="right", transform=axes.transAxes, color=GREY, bbox=box)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1.01)


def _counts(axes: "Axes", confidence: np.ndarray, accuracy: np.ndarray, images: np.ndarray) -> None:
    """Draw the number of images of each bin, and where mean confidence and accuracy lie."""
    width = 1 / len(images)
    axes.bar((np.arange(len(images)) + 0.5) * width, images, 0.92 * width, color="#a0aec0")
    total = max(images.sum(), 1)
    axes.axvline((accuracy * images).sum() / total, color=BLUE, lw=1.3, label="accuracy")
    axes.axvline((confidence * images).sum() / total, color=RED, lw=1.3, ls="--", label="mean confidence")
    axes.set_yscale("log")
    label_axes(axes, "", "confidence", "images")
    axes.legend(edgecolor="none", loc="upper left", fontsize=7, ncols=2)
    axes.set_xlim(0, 1)


def _risks(axes: "Axes", curves: Mapping[str, Curve]) -> None:
    """Draw the curves, that of a score that knows every error, and that of one that knows nothing."""
    top = 0.0
    for k, (name, curve) in enumerate(curves.items()):
        coverage, risk = (np.asarray(x, dtype=float) for x in curve)
        style = STYLES[k % len(STYLES)]
        label = f"{said(name)}  {100 * risk.mean():.2f}%"
        axes.plot(*_thinned(coverage, risk), ls=style, color=COLOURS[k % len(COLOURS)], lw=1.5, label=label)
        top = max(top, float(risk[coverage >= SETTLED].max()))
    best = np.maximum(coverage - (1 - risk[-1]), 0) / coverage
    label = f"every error last  {100 * best.mean():.2f}%"
    axes.plot(*_thinned(coverage, best), "--", color=GREY, lw=1, label=label, zorder=1)
    axes.axhline(100 * risk[-1], color=GREY, lw=1, ls=":", label=f"at random  {100 * risk[-1]:.2f}%", zorder=1)
    label_axes(axes, "error of the most certain images", "answered, %", "error, %")
    axes.set_xlim(0, 100)
    axes.set_ylim(0, max(108 * top, 0.1))
    legend = axes.legend(
        frameon=False, fontsize=8, title="mean over all shares", loc="upper left", alignment="left",
        bbox_to_anchor=(1.0, 1.0),
    )  # fmt: skip
    legend.get_title().set_fontsize(8)


def _thinned(coverage: np.ndarray, risk: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    some = np.unique(np.linspace(0, len(risk) - 1, min(POINTS, len(risk))).round().astype(int))
    return 100 * coverage[some], 100 * risk[some]

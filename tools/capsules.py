"""Draw the pictures of `docs/capsules.md`, each for light and for dark pages, as SVG.

python tools/capsules.py [NAME ...] [--out docs/pictures]

Without names all are drawn: map, votes, routing, agreement, jumble, sandal and noise. Four come from the small exact
example in `scene.py`, and three from networks of the package and its test images; nothing else is needed.
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from clothes import LEVELS, noisy_clothes, sandal_map, sandal_votes
from matplotlib import rc_context
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Ellipse, PathPatch, Rectangle
from matplotlib.path import Path as Outline
from scene import WHOLES, Part, Routed, house_and_boat, jumbled_house, route, turned, votes, whole

FONTS = "-apple-system, BlinkMacSystemFont, 'Segoe UI', Helvetica, Arial, 'DejaVu Sans', sans-serif"
WIDTH = 7.6  # inches, at 96 pixels each the width of the site's text


class Theme(NamedTuple):
    """The colours of a picture. The first whole or class is orange and the second is blue, in every picture."""

    suffix: str
    paper: str
    ink: str
    grey: str
    faint: str
    wholes: tuple[str, str]
    map: list[str]  # from nothing to much


LIGHT = Theme("", "#ffffff", "#1f2937", "#64748b", "#e2e8f0", ("#dd6b20", "#2b6cb0"), ["#f8fafc", "#f6ad6b", "#b83f0a"])
DARK = Theme(
    "-dark", "#131416", "#e5e7eb", "#94a3b8", "#2d333b", ("#ff9a4d", "#6cb2f7"), ["#1b1d21", "#a8521a", "#ffc58f"]
)

SHAPES: dict[str, list[tuple[float, float]]] = {
    "triangle": [(-1.05, -0.5), (1.05, -0.5), (0, 0.65)],
    "wall": [(-0.8, -0.9), (0.8, -0.9), (0.8, 0.9), (-0.8, 0.9)],
    "bar": [(-0.17, -0.48), (0.17, -0.48), (0.17, 0.48), (-0.17, 0.48)],
    "hull": [(-1.5, 0.3), (1.5, 0.3), (1.05, -0.3), (-1.05, -0.3)],
    "disc": [(0.24 * math.cos(a), 0.24 * math.sin(a)) for a in np.linspace(0, 2 * math.pi, 40)],
}


def outline(part: Part) -> Outline:
    """Return the outline of a part where it stands."""
    points = [turned(x, y, part.angle) for x, y in SHAPES[part.shape]]
    points = [(x + part.at[0], y + part.at[1]) for x, y in points]
    return Outline([*points, points[0]], closed=True)


def draw_parts(axes: Any, theme: Theme, parts: list[Part], colours: list[str] | None = None) -> None:
    """Draw the parts of a scene in the plane."""
    order = sorted(range(len(parts)), key=lambda i: ["wall", "hull", "bar", "disc", "triangle"].index(parts[i].shape))
    for z, i in enumerate(order):
        edge = theme.grey if colours is None else colours[i]
        axes.add_patch(PathPatch(outline(parts[i]), fc=theme.faint, ec=edge, lw=1.1, alpha=0.9, zorder=1 + 0.01 * z))


def bare(axes: Any, theme: Theme, title: str = "", colour: str | None = None) -> None:
    """Leave nothing of the axes but a pale frame and a title."""
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set(color=theme.faint, lw=0.8)
    axes.set_title(title, color=colour or theme.ink, fontsize=9, pad=5)


def plane(axes: Any, theme: Theme, title: str = "", colour: str | None = None) -> None:
    """Set the axes to the plane of the scene."""
    bare(axes, theme, title, colour)
    axes.set(xlim=(0.4, 8.6), ylim=(0.35, 4.15), aspect="equal")


def ellipse(axes: Any, mean: Any, covariance: np.ndarray, colour: str) -> None:
    """Draw two standard deviations about a mean in the plane."""
    values, vectors = np.linalg.eigh(covariance)
    width, height = 4 * np.sqrt(values)
    angle = math.degrees(math.atan2(vectors[1, 0], vectors[0, 0]))
    axes.add_patch(Ellipse(mean, width, height, angle=angle, fc=colour, ec="none", alpha=0.16, zorder=2))
    axes.add_patch(Ellipse(mean, width, height, angle=angle, fc="none", ec=colour, lw=1.2, zorder=4))
    axes.plot(*mean, "+", color=colour, ms=7, mew=1.4, zorder=5)


def draw_map(theme: Theme) -> Figure:
    """Draw an image, a map of activations of one type of capsule, and the pose of its most active capsule."""
    image, activations, pose, at = sandal_map()
    figure = new(theme, 2.35)
    left, middle, right = figure.subplots(1, 3, width_ratios=[1, 1, 1.25])
    left.imshow(image, cmap="gray", vmin=0, vmax=1)
    bare(left, theme, "the image")
    middle.imshow(activations, cmap=blend(theme.map), vmin=0, vmax=1)
    bare(middle, theme, "one type of capsule: activations")
    middle.add_patch(Rectangle((at[1] - 0.5, at[0] - 0.5), 1, 1, fc="none", ec=theme.ink, lw=1.6))
    most = float(np.abs(pose).max())
    right.imshow(pose, cmap=blend([theme.wholes[1], theme.paper, theme.wholes[0]]), vmin=-most, vmax=most)
    bare(right, theme, f"the capsule in the frame: activation {activations[at]:.2f}\nand this pose")
    for y, x in np.ndindex(pose.shape):
        number = f"{pose[y, x]:.1f}".replace("-0.0", "0.0").replace("-", "\N{MINUS SIGN}")
        colour = theme.paper if abs(pose[y, x]) > 0.7 * most else theme.ink
        right.text(x, y, number, ha="center", va="center", color=colour, fontsize=8)
    return figure


def draw_votes(theme: Theme) -> Figure:
    """Draw a house and a boat, and where each part says that each of them is."""
    parts = house_and_boat()
    V = votes(parts).numpy()
    figure = new(theme, 1.98)
    for j, axes in enumerate(figure.subplots(1, 2)):
        colour = theme.wholes[j]
        plane(
            axes,
            theme,
            f"\N{LEFT DOUBLE QUOTATION MARK}If I belong to a {WHOLES[j]}, it is there.\N{RIGHT DOUBLE QUOTATION MARK}",
            colour,
        )
        draw_parts(axes, theme, parts)
        arrows(axes, parts, V[:, j], colour)
    return figure


def arrows(axes: Any, parts: list[Part], V: np.ndarray, colour: str) -> None:
    """Draw a line from each part to its vote."""
    for part, vote in zip(parts, V, strict=True):
        axes.annotate(
            "", vote[:2], part.at, arrowprops=dict(arrowstyle="-", color=colour, lw=1.0, alpha=0.75), zorder=3
        )
        axes.plot(*vote[:2], "o", color=colour, ms=5.5, mec=axes.get_facecolor(), mew=0.8, zorder=5)


def draw_routing(theme: Theme) -> Figure:
    """Draw votes, posterior and responsibilities after three iterations."""
    parts = house_and_boat()
    V, routed = votes(parts).numpy(), route(parts)
    figure = new(theme, 2.9)
    grid = figure.subplots(2, 3, height_ratios=[1.35, 1])
    for t, (above, below) in enumerate(grid.T):
        q = routed.iterations[t]
        plane(above, theme, f"iteration {t + 1}")
        for j, colour in enumerate(theme.wholes):
            share = q.r[0, 0, :, j].numpy()
            above.scatter(*V[:, j, :2].T, s=46 * share, color=colour, alpha=0.75, lw=0, zorder=3)
            ellipse(above, q.m[0, 0, j, :2].numpy(), np.diag(q.variance()[0, 0, j, :2].numpy()), colour)
        shares(below, theme, parts, q.r[0, 0].numpy(), first=t == 0)
    return figure


def shares(axes: Any, theme: Theme, parts: list[Part], r: np.ndarray, first: bool) -> None:
    """Draw how each part divides itself between the wholes, with the part below its bar."""
    low = np.zeros(len(parts))
    for j, colour in enumerate(theme.wholes):
        axes.bar(range(len(parts)), r[:, j], 0.62, low, color=colour, alpha=0.85, lw=0)
        low = low + r[:, j]
    axes.set(xlim=(-0.6, len(parts) - 0.4), ylim=(-0.42, 1), yticks=[0, 0.5, 1] if first else [], xticks=[])
    axes.spines[:].set_visible(False)
    axes.tick_params(colors=theme.grey, labelsize=7.5, length=0)
    if first:
        axes.set_ylabel("share of each part", color=theme.grey, fontsize=8, y=0.66)
        axes.set_yticks([0, 0.5, 1], ["0", "\N{VULGAR FRACTION ONE HALF}", "1"])
    for i, part in enumerate(parts):
        size = 0.26 if part.shape in ("triangle", "wall", "hull") else 0.42
        path = outline(Part(part.shape, (0.0, 0.0), part.angle))
        points = np.asarray(path.vertices) * [size, 0.42 * size] + [i, -0.24]
        axes.add_patch(PathPatch(Outline(points, closed=True), fc=theme.faint, ec=theme.grey, lw=0.8))


def draw_agreement(theme: Theme) -> Figure:
    """Draw how the spread of the votes falls and the bound rises."""
    routed = route(house_and_boat(), iters=5)
    figure = new(theme, 1.98)
    left, right = figure.subplots(1, 2)
    steps = range(1, 6)
    for j, name in enumerate(WHOLES):
        spread = [float(q.variance()[0, 0, j, :2].sqrt().mean()) for q in routed.iterations]
        left.plot(steps, spread, "o-", color=theme.wholes[j], ms=4, lw=1.6, zorder=3 - j)
        left.text(0.97, 0.9 - 0.13 * j, name, transform=left.transAxes, color=theme.wholes[j], fontsize=9, ha="right")
    right.plot(steps, routed.bounds, "o-", color=theme.ink, ms=4, lw=1.6)
    chart(left, theme, "spread of the votes", "iteration")
    left.set(ylim=(0, None), xlim=(0.4, 5.2))
    chart(right, theme, "evidence lower bound", "iteration")
    for axes in (left, right):
        axes.set_xticks(list(steps))
    return figure


def draw_jumble(theme: Theme) -> Figure:
    """Draw a house and the same parts in disorder, with the votes for a house and their posterior."""
    figure = new(theme, 1.98)
    for axes, parts in zip(
        figure.subplots(1, 2), (whole("house", (4.5, 1.9), 0, seed=2), jumbled_house()), strict=True
    ):
        routed = route(parts)
        q, colour = routed.iterations[-1], theme.wholes[0]
        plane(axes, theme)
        draw_parts(axes, theme, parts)
        arrows(axes, parts, votes(parts)[:, 0].numpy(), colour)
        ellipse(axes, q.m[0, 0, 0, :2].numpy(), np.diag(q.variance()[0, 0, 0, :2].numpy()), colour)
        axes.set_title(said(routed), color=theme.ink, fontsize=9, pad=5)
    return figure


def said(routed: Routed) -> str:
    """Return what routing says of the house: the spread of its votes and its activation."""
    spread = float(routed.iterations[-1].variance()[0, 0, 0, :2].sqrt().mean())
    return f"house: spread {spread:.2f}, activation {float(routed.logits[0].sigmoid()):.2f}"


def draw_sandal(theme: Theme) -> Figure:
    """Draw the votes of a trained network for two classes in both iterations."""
    image, clouds = sandal_votes()
    figure = new(theme, 3.6)
    grid = figure.subplots(2, 3, width_ratios=[0.75, 1, 1])
    for axes in grid[:, 0]:
        axes.axis("off")
    grid[0, 0].imshow(image, cmap="gray", vmin=0, vmax=1)
    for row, ((name, probability, cloud), colour) in enumerate(zip(clouds, theme.wholes, strict=True)):
        assert cloud.spread is not None
        points, weight, spread = cloud.votes.numpy(), cloud.weight.numpy(), cloud.spread.numpy()
        most = max(float(one.weight.max()) for _, _, one in clouds)
        heavy = weight.max(0) > 0.05 * weight.max()
        half = np.maximum(1.1 * np.abs(points[heavy]).max(0), 3 * spread[:, [0, 1], [0, 1]].max(0) ** 0.5)
        for t, axes in enumerate(grid[row, 1:]):
            seen = weight[t] > 0.003 * most
            axes.scatter(
                *points[seen].T, s=70 * weight[t, seen] / most, color=colour, alpha=0.45, lw=0, rasterized=True
            )
            ellipse(axes, cloud.mean[t].numpy(), spread[t], colour)
            bare(axes, theme, f"iteration {t + 1}" if row == 0 else "")
            axes.set(xlim=(-half[0], half[0]), ylim=(-half[1], half[1]))
            note: dict[str, Any] = dict(color=theme.grey, fontsize=7.5, ha="right", va="top")
            axes.text(0.97, 0.94, f"takes {weight[t].sum():.1f}", transform=axes.transAxes, **note)
        grid[row, 1].set_ylabel(f"votes for\n{name}, {100 * probability:.0f}%", color=colour, fontsize=8.5)
    return figure


def draw_noise(theme: Theme) -> Figure:
    """Draw how the posterior of the answer widens while noise is added, with the error."""
    images, entropies, errors = noisy_clothes()
    figure = new(theme, 2.9)
    halves: Any = figure.subfigures(2, 1, height_ratios=[1, 2.1])
    top, bottom = halves
    for one in halves:
        one.set_facecolor(theme.paper)
    for axes, image, level in zip(top.subplots(1, len(LEVELS)), images, LEVELS, strict=True):
        axes.imshow(image, cmap="gray", vmin=0, vmax=1)
        axes.axis("off")
        axes.set_title(f"noise {level}", color=theme.grey, fontsize=8, pad=3)
    left, right = bottom.subplots(1, 2)
    low, middle, high = np.quantile(entropies, [0.25, 0.5, 0.75], axis=1)
    left.fill_between(LEVELS, low, high, color=theme.wholes[0], alpha=0.2, lw=0)
    left.plot(LEVELS, middle, "o-", color=theme.wholes[0], ms=4, lw=1.6)
    right.plot(LEVELS, 100 * np.array(errors), "o-", color=theme.wholes[1], ms=4, lw=1.6)
    chart(left, theme, "entropy of the winner's posterior (nats)", "noise")
    chart(right, theme, "wrong answers (%)", "noise")
    right.set_ylim(bottom=0)
    return figure


def chart(axes: Any, theme: Theme, title: str, x: str) -> None:
    """Style a chart with two axes."""
    axes.set_title(title, color=theme.ink, fontsize=9, loc="left", pad=5)
    axes.set_xlabel(x, color=theme.grey, fontsize=8)
    axes.tick_params(colors=theme.grey, labelsize=7.5, length=0)
    axes.grid(axis="y", color=theme.faint, lw=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(theme.faint)


def new(theme: Theme, height: float) -> Figure:
    """Return an empty figure in the colours of a theme."""
    figure = Figure(figsize=(WIDTH, height), layout="constrained", facecolor=theme.paper)
    figure.get_layout_engine().set(w_pad=0.05, h_pad=0.05, wspace=0.04, hspace=0.04)  # type: ignore[union-attr,call-arg]
    return figure


PICTURES: dict[str, Callable[[Theme], Figure]] = dict(
    map=draw_map, votes=draw_votes, routing=draw_routing, agreement=draw_agreement, jumble=draw_jumble,
    sandal=draw_sandal, noise=draw_noise,
)  # fmt: skip


def blend(colours: list[str]) -> LinearSegmentedColormap:
    """Return a colour map through these colours."""
    return LinearSegmentedColormap.from_list("", colours)


def save(figure: Figure, path: Path) -> None:
    """Write an SVG whose letters are text in the fonts of the site; the same picture has the same bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": path.stem}):
        figure.savefig(path, dpi=200, metadata={"Date": None})
    text = path.read_text().replace("'DejaVu Sans', 'Bitstream Vera Sans'", FONTS + ", 'Bitstream Vera Sans'")
    path.write_text("\n".join(line.rstrip() for line in text.split("\n")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", metavar="NAME", nargs="*", choices=[[], *PICTURES], help="which pictures; else all")
    parser.add_argument("--out", type=Path, default=Path("docs/pictures"), help="the folder of the pictures")
    arguments = parser.parse_args()
    for name in arguments.names or PICTURES:
        for theme in (LIGHT, DARK):
            path = arguments.out / f"{name}{theme.suffix}.svg"
            with rc_context({"axes.facecolor": theme.paper}):
                save(PICTURES[name](theme), path)
            print(path)


if __name__ == "__main__":
    main()

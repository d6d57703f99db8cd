"""A small exact example of routing: the parts of a house and of a sailing boat vote for both.

A part is a shape with a place and an angle. For each whole that it may belong to, it knows where in this whole it
sits, so its own pose says where the whole would be: its vote. A vote has four numbers, the place x and y and the
direction cos and sin. `route` hands the votes to the library's `vb_routing`. `capsules.py` draws the example.

Axes: i part, j whole, d the four numbers of a vote.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from vbcaps import Prior
from vbcaps.routing import Posterior, vb_routing

WHOLES = ("house", "boat")
# Where a part sits in the frame of each whole. A house has no hull and a boat no wall; they have a place nevertheless,
# as every capsule votes for every parent.
PLACES: dict[str, tuple[tuple[float, float], tuple[float, float]]] = {
    "triangle": ((0.0, 1.4), (0.0, 0.8)),
    "wall": ((0.0, 0.0), (-1.5, 0.5)),
    "bar": ((-0.35, -0.42), (0.0, 0.0)),
    "disc": ((0.4, 0.25), (-0.75, -0.75)),
    "hull": ((1.6, -1.0), (0.0, -0.75)),
}
PARTS = dict(house=("triangle", "wall", "bar", "disc"), boat=("triangle", "hull", "bar", "disc"))
CENTRE = (4.5, 2.2)  # of the scene, where the prior expects every whole


class Part(NamedTuple):
    """A shape at a place, turned by an angle."""

    shape: str
    at: tuple[float, float]
    angle: float


class Routed(NamedTuple):
    """What routing made of the votes: the logit of each whole, the posterior after each iteration, and its bound."""

    logits: Tensor  # j
    iterations: list[Posterior]
    bounds: list[float]


def turned(x: float, y: float, angle: float) -> tuple[float, float]:
    """Return a point turned about the origin."""
    return x * math.cos(angle) - y * math.sin(angle), x * math.sin(angle) + y * math.cos(angle)


def whole(name: str, at: tuple[float, float], degrees: float, seed: int) -> list[Part]:
    """Return the parts of a house or boat at a place, each a little off, as a network's poses are."""
    noise = torch.Generator().manual_seed(seed)
    parts = []
    for shape in PARTS[name]:
        x, y = turned(*PLACES[shape][WHOLES.index(name)], math.radians(degrees))
        off = (0.08 * torch.randn(3, generator=noise, dtype=torch.float64)).tolist()
        parts.append(Part(shape, (at[0] + x + off[0], at[1] + y + off[1]), math.radians(degrees) + off[2]))
    return parts


def house_and_boat() -> list[Part]:
    """Return the scene of the example, a house beside a boat that heels."""
    return whole("house", (2.5, 1.75), 0, seed=2) + whole("boat", (6.5, 2.15), -14, seed=5)


def jumbled_house() -> list[Part]:
    """Return the parts of a house, each somewhere else and turned."""
    return [
        Part("triangle", (3.6, 1.0), math.radians(200)),
        Part("wall", (5.3, 2.5), math.radians(25)),
        Part("bar", (4.4, 3.3), math.radians(80)),
        Part("disc", (6.4, 1.1), math.radians(-60)),
    ]


def votes(parts: list[Part]) -> Tensor:
    """Return where each part says that each whole is, ``i j d``."""
    rows = []
    for shape, (x, y), angle in parts:
        offsets = [turned(*place, angle) for place in PLACES[shape]]
        rows.append([(x - dx, y - dy, math.cos(angle), math.sin(angle)) for dx, dy in offsets])
    return torch.tensor(rows, dtype=torch.float64)


def route(parts: list[Part], iters: int = 4, activation: str = "released") -> Routed:
    """Route the parts to a house and a boat by Variational Bayes.

    The released rule gives useful activations with offsets that nobody has trained.
    """
    V = votes(parts)[None, None]
    a, child = V.new_ones(1, 1, len(parts)), torch.arange(len(parts))[None]
    m0 = torch.tensor([*CENTRE, 1.0, 0.0], dtype=torch.float64)
    prior = Prior(m0=m0, kappa0=0.1, Psi0=4.0, dim=4, dtype=torch.float64)
    iterations: list[Posterior] = []
    logits, _ = vb_routing(a, V, child, prior, iters=iters, activation=activation, history=iterations)
    return Routed(logits[0, 0], iterations, [float(q.elbo(a, V).total) for q in iterations])

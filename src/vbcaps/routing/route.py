"""From poses to parents: the one place that chooses between the reference and its fast twins.

Axes: n image, c child, l parent position, i child slot, j parent type, p q r rows and
columns of a pose, g row of weights.
"""

import functools
import importlib.util
from collections.abc import Callable

import torch
from torch import Tensor, nn

from vbcaps.routing.dynamic import Agreement
from vbcaps.routing.em import Mixture
from vbcaps.routing.fields import Fields
from vbcaps.routing.vb import Posterior

BACKENDS = ("auto", "reference", "triton")


def route(
    routing: nn.Module,
    a: Tensor,
    pose: Tensor,
    W: Tensor,
    fields: Fields,
    place: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Posterior | Mixture | Agreement]:
    """Route children with activations ``a: n c`` and ``pose: n c p q`` by ``routing``; its ``(logit, q)``.

    Slot i votes with the weights of row ``i mod g`` of ``W: g j q r``. ``place: i 2`` is added to the first two
    entries of the right-hand column of each vote.
    """
    if backend == "triton" or (backend == "auto" and can_fuse(routing, a, pose, W, fields)):
        fused: Callable = routing.fused  # type: ignore[assignment]
        return fused(a, pose, W, fields, place)
    child = fields.child
    slots = child.flatten()
    V = votes(pose.index_select(1, slots).unflatten(1, child.shape), W.repeat(child.shape[1] // len(W), 1, 1, 1))
    if place is not None:
        V = V + at_right_hand_column(place, pose.shape[-1])[:, None]
    return routing(a.index_select(1, slots).unflatten(1, child.shape), V, child, a.shape[1])


def can_fuse(routing: nn.Module, a: Tensor, pose: Tensor, W: Tensor, fields: Fields) -> bool:
    """Whether the Triton kernels cover this call: CUDA, float32, 4x4 poses, and a routing that has them."""
    return (
        a.is_cuda
        and getattr(routing, "fusable", False)
        and pose.shape[-2:] == (4, 4)
        and a.dtype == pose.dtype == W.dtype == torch.float32
        and len(a) * fields.child.numel() * W.shape[1] < 2**31  # offsets are 32 bits
        and not torch.compiler.is_exporting()
        and has_triton()
    )


@functools.cache
def has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def votes(pose: Tensor, W: Tensor) -> Tensor:
    """V = M W: ``n l i p q``, ``i j q r`` to ``n l i j (p r)``.

    In memory the votes of a parent lie together, ``n l j i d``: the order in which every pass of routing is a matrix
    product (benchmarks/layouts.py).
    """
    V = torch.einsum("nlipq,ijqr->nljipr", pose, W)
    return V.flatten(4).transpose(2, 3)


def at_right_hand_column(place: Tensor, p: int) -> Tensor:
    """``i 2`` to ``i (p r)``: zero but for the first two entries of the right-hand column."""
    column = torch.eye(p * p, dtype=place.dtype, device=place.device)[[p - 1, (2 * p - 1) % (p * p)]]
    return place @ column

"""From poses to votes.

Axes: n image, c child, l parent position, i child slot, j parent type, p q r rows and columns of a pose, g row of
weights.
"""

import torch
from torch import Tensor

from vbcaps.routing.fields import Fields


def in_fields(
    a: Tensor, pose: Tensor, W: Tensor, fields: Fields, coordinates: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the inputs of the reference: the children in all slots, and their votes.

    Args:
        a: activations of the children, ``n c``.
        pose: poses of the children, ``n c p q``.
        W: transformations, ``g j q r``; slot i votes with row ``i mod g``.
        fields: which child sits in which slot.
        coordinates: added to the first two entries of the right-hand column of each vote, ``i 2``.

    Returns:
        Activations of the child in each slot, ``n l i``, and its votes, ``n l i j (p r)``.
    """
    child = fields.child
    M = pose.index_select(1, child.flatten()).unflatten(1, child.shape)  # n l i p q
    V = votes(M, W.repeat(child.shape[1] // len(W), 1, 1, 1))
    if coordinates is not None:
        V = V + at_right_hand_column(coordinates, pose.shape[-1])[:, None]
    return a.index_select(1, child.flatten()).unflatten(1, child.shape), V


def votes(pose: Tensor, W: Tensor) -> Tensor:
    """Return V = M W: ``n l i p q`` and ``i j q r`` to ``n l i j (p r)``.

    In memory the votes of a parent lie together, ``n l j i d``: the order in which every pass of routing is a matrix
    product (benchmarks/layouts.py).
    """
    V = torch.einsum("nlipq,ijqr->nljipr", pose, W)
    return V.flatten(4).transpose(2, 3)


def at_right_hand_column(coordinates: Tensor, p: int) -> Tensor:
    """Return ``i 2`` as ``i (p r)``: zero but for the first two entries of the right-hand column."""
    column = torch.eye(p * p, dtype=coordinates.dtype, device=coordinates.device)[[p - 1, (2 * p - 1) % (p * p)]]
    return coordinates @ column

"""Receptive fields: which child sits where, and which parents compete for it.

Axes: n image, l parent position, i child slot in a receptive field, j parent type.
"""

import torch
from torch import Tensor


def field_children(
    height: int, width: int, types: int, kernel: tuple[int, int], stride: tuple[int, int], device: torch.device
) -> Tensor:
    """``child[l, i]``: the lower capsule in slot i of field l, for a map of (height, width, types) capsules.

    Capsules, slots and fields are all counted row by row, column by column, type by type.
    """
    rows = torch.arange(0, height - kernel[0] + 1, stride[0], device=device)
    cols = torch.arange(0, width - kernel[1] + 1, stride[1], device=device)
    y = rows[:, None] + torch.arange(kernel[0], device=device)  # position, tap
    x = cols[:, None] + torch.arange(kernel[1], device=device)
    cell = y[:, None, :, None] * width + x[None, :, None, :]  # row col tap_y tap_x
    child = cell[..., None] * types + torch.arange(types, device=device)
    return child.reshape(len(rows) * len(cols), -1)  # l i


def softmax_over_parents(ln_p: Tensor, child: Tensor, children: int) -> Tensor:
    """``r[n, l, i, j]``: softmax of ``ln_p`` over every parent, of any type *and position*, that sees the child.

    Normalising over types within each field instead would let a child seen by nine fields count nine times
    (DESIGN choice 1; the paper: "normalise over capsules j in L_j").
    """
    n, slots = ln_p.shape[0], child.numel()
    index = child.reshape(1, slots).expand(n, slots)
    # Types first, then positions: only one number per slot is scattered.
    best = ln_p.detach().amax(-1).flatten(1)  # n (l i)
    top = best.new_full((n, children), -torch.inf).scatter_reduce(1, index, best, "amax")
    top = top.gather(1, index).view(n, *child.shape, 1)
    p = (ln_p - top).exp()
    total = p.new_zeros(n, children).scatter_add(1, index, p.sum(-1).flatten(1))
    return p / total.gather(1, index).view(n, *child.shape, 1)


def check_iters(iters: int) -> None:
    if isinstance(iters, bool) or not isinstance(iters, int) or iters < 1:
        raise ValueError(f"iters must be a whole number of at least 1, got {iters!r}")


def check_routing_inputs(a: Tensor, V: Tensor, child: Tensor, children: int | None, iters: int) -> int:
    """Errors that name the argument, what came and what is allowed. The number of lower capsules."""
    check_iters(iters)
    if V.ndim != 5 or 0 in V.shape:
        raise ValueError(f"V must have shape (n, l, i, j, d) with no empty axis, got {tuple(V.shape)}")
    if a.shape != V.shape[:3]:
        raise ValueError(f"a must have shape (n, l, i) = {tuple(V.shape[:3])} to go with V, got {tuple(a.shape)}")
    if child.shape != V.shape[1:3]:
        raise ValueError(f"child must have shape (l, i) = {tuple(V.shape[1:3])} to go with V, got {tuple(child.shape)}")
    if child.dtype != torch.int64:
        raise TypeError(f"child must be a tensor of int64 (long), got {child.dtype}")
    if not a.is_floating_point() or a.dtype != V.dtype:
        raise TypeError(f"a and V must be floating point of one dtype, got {a.dtype} and {V.dtype}")
    if children is not None:
        return children
    low, high = int(child.min()), int(child.max())
    if low < 0:
        raise ValueError(f"child must number the lower capsules from 0, got {low}")
    return high + 1

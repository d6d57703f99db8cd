"""Receptive fields: the children in each field, and the parents that compete for each child.

Axes: n image, l parent position, i child slot in a receptive field, j parent type.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")


class Fields(NamedTuple):
    """The receptive fields of a layer over its children c. Slots are numbered ``l I + i``.

    Args:
        child: which child sits in slot i of field l, ``l i``.
        parents: the slots that hold child c, then -1, ``c s``.
        seen: how many slots hold child c, ``c``.
        types: how many types of child there are at one position.
    """

    child: Tensor
    parents: Tensor
    seen: Tensor
    types: int


def kept(make: Callable[P, T]) -> Callable[P, T]:
    """Cache the results of ``make`` by its arguments, except while a compiler traces."""
    make_once = functools.lru_cache(maxsize=64)(make)

    @functools.wraps(make)
    def get(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_compiling():
            return make(*args, **kwargs)
        with torch.inference_mode(False):
            return make_once(*args, **kwargs)  # type: ignore[arg-type]

    return get


@kept
def conv_fields(
    height: int, width: int, types: int, kernel: tuple[int, int], stride: tuple[int, int], device: torch.device
) -> Fields:
    """Return the fields of a convolution over a map of capsules.

    Capsules, slots and fields are all counted row by row, column by column, type by type.

    Args:
        height, width, types: of the map; padding is part of it.
        kernel, stride: of the convolution, (rows, columns).
        device: where the index tensors are to be.

    Example:
        >>> conv_fields(3, 4, 1, (2, 2), (1, 2), torch.device("cpu")).child
        tensor([[ 0,  1,  4,  5],
                [ 2,  3,  6,  7],
                [ 4,  5,  8,  9],
                [ 6,  7, 10, 11]])
    """
    rows, y, tap_y, field_y = _along(height, kernel[0], stride[0], device)
    cols, x, tap_x, field_x = _along(width, kernel[1], stride[1], device)
    t = torch.arange(types, device=device)
    cell = y[:, None, :, None] * width + x[None, :, None, :]  # row col tap_y tap_x
    child = (cell[..., None] * types + t).reshape(rows * cols, -1)
    # The same seen from a child: y x t, and its parents' rows and columns.
    field = field_y[:, None, None, :, None] * cols + field_x[None, :, None, None, :]
    tap = tap_y[:, None, None, :, None] * kernel[1] + tap_x[None, :, None, None, :]
    slot = field * child.shape[1] + tap * types + t[None, None, :, None, None]
    inside = (field_y >= 0)[:, None, None, :, None] & (field_x >= 0)[None, :, None, None, :]
    parents = torch.where(inside, slot, -1).reshape(height * width * types, -1).sort(1, descending=True).values
    return Fields(child, parents.int(), (parents >= 0).sum(1).int(), types)


@kept
def coordinates(height: int, width: int, types: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return row and column of each capsule's centre as a share of the map, ``(h w c) 2``."""
    y = (torch.arange(height, dtype=dtype, device=device) + 0.5) / height
    x = (torch.arange(width, dtype=dtype, device=device) + 0.5) / width
    grid = torch.stack(torch.meshgrid(y, x, indexing="ij"), -1)
    return grid[:, :, None].expand(-1, -1, types, -1).reshape(-1, 2).contiguous()


def _along(size: int, kernel: int, stride: int, device: torch.device) -> tuple[int, Tensor, Tensor, Tensor]:
    """Return, along one axis, the number of fields and what each sees, and what sees each position.

    Returns:
        How many fields there are; the position of each tap of each field; and for each position its taps and fields,
        -1 where there are fewer.
    """
    fields = (size - kernel) // stride + 1
    taps = torch.arange(fields, device=device)[:, None] * stride + torch.arange(kernel, device=device)
    position = torch.arange(size, device=device)[:, None]
    most = min(-(-kernel // stride), fields)  # fields that can see one position
    field = (position // stride).clamp_max(fields - 1) - torch.arange(most, device=device)
    tap = position - field * stride
    return fields, taps, tap, torch.where((field >= 0) & (tap < kernel), field, -1)


def softmax_over_parents(ln_p: Tensor, child: Tensor, children: int) -> Tensor:
    """Return the softmax over every parent, of any type *and position*, that sees a child.

    Normalising over types within each field instead would let a child seen by nine fields count nine times (the paper:
    "normalise over capsules j in L_j").

    Args:
        ln_p: what a softmax takes, ``n l i j``.
        child: which child sits in slot i of field l, ``l i``.
        children: how many children there are.

    Returns:
        Responsibilities, ``n l i j``; those of a child sum to 1.

    Example:
        >>> child = torch.tensor([[0, 1], [1, 2]])  # two fields share child 1
        >>> softmax_over_parents(torch.zeros(1, 2, 2, 1), child, 3).squeeze()
        tensor([[1.0000, 0.5000],
                [0.5000, 1.0000]])
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
    """Raise an error that names a wrong argument, its value and the allowed values; return the number of children."""
    check_iters(iters)
    if V.ndim != 5 or 0 in V.shape[1:]:
        raise ValueError(f"V must have shape (n, l, i, j, d) with no empty axis but n, got {tuple(V.shape)}")
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

r"""What a trace of routing shows: the parts of the image that a parent took, its votes, and the pixels it can see.

`CapsNet.trace` and `CapsHead.trace` return the trace; the pictures and the explorer in the browser draw what these
functions return.

Axes: n image, l parent position, i child slot in a receptive field, j parent type, c child, d pose entry, t iteration;
y x row and column of a map of capsules, b of two principal components.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from vbcaps.layers import LayerTrace, RoutingResult
from vbcaps.models import CapsNet, ConvStem, NetworkTrace
from vbcaps.routing import Mixture, Posterior

LAYERS = ("conv_caps1", "conv_caps2", "class_caps")


def shares_of_children(layer: LayerTrace, of_parents: Tensor, iteration: int = -1) -> Tensor:
    """Divide what each parent holds among its children, in proportion to the weight of their votes.

    A parent's pose is the mean of its votes, weighted by $R_{ij} = a_i r_{ij}$; so child i has the share
    $R_{ij} / \\sum_i R_{ij}$ in it.

    Args:
        layer: how a layer of capsules routed one image.
        of_parents: the amount that each parent holds, ``l j``, or ``j`` for class capsules.
        iteration: the iteration whose responsibilities count.

    Returns:
        The amount that each child of the map holds, ``c``; the sum over children is the sum over parents.
    """
    L, I = layer.fields.child.shape
    r = layer.iterations[iteration].r[0].reshape(L, I, -1)
    R = layer.activations[0].reshape(L, I, 1) * r  # l i j
    shares = R / R.sum(1, keepdim=True).clamp_min(torch.finfo(R.dtype).tiny)
    held = (shares * of_parents.reshape(L, 1, -1)).sum(2)  # l i
    y, x, types = layer.children.activations.shape[1:]
    top, left = layer.padding
    of_all = held.new_zeros((y + 2 * top) * (x + 2 * left) * types)
    of_all = of_all.index_add(0, layer.fields.child.flatten(), held.flatten())
    return of_all.reshape(y + 2 * top, x + 2 * left, types)[top : top + y, left : left + x].flatten()


def parts_of(trace: NetworkTrace, layer: str, position: int, type: int, iteration: int = -1) -> Tensor:
    """Return the parts of the image that a parent was made of, ``y x`` over the map of primary capsules.

    The parent's pose is followed down through all layers: each parent is divided among its children.

    Args:
        trace: how a network routed one image.
        layer: the layer of the parent, one of ``trace.layers``.
        position: the parent's position l; 0 for a class capsule.
        type: the parent's type j; for a class capsule its class.
        iteration: the iteration of this layer; the layers below it count after their last.
    """
    check_parent(trace, layer, position, type)
    top = trace.layers[layer]
    L, J = top.fields.child.shape[0], types_of(top)
    held = top.votes.new_zeros(L, J)
    held[position, type] = 1
    held = shares_of_children(top, held, iteration)
    names = list(trace.layers)
    for name in reversed(names[: names.index(layer)]):
        below = trace.layers[name]
        held = shares_of_children(below, held.reshape(below.fields.child.shape[0], -1))
    return held.reshape(trace.layers[names[0]].children.activations.shape[1:]).sum(2)


class Cloud(NamedTuple):
    r"""The votes for one parent, seen in the plane in which they differ most.

    The plane is spanned by the first two principal components of the votes, weighted by $R_{ij} = a_i r_{ij}$ of the
    last iteration; it is one plane for all iterations.

    Args:
        votes: $V_{j|i}$, ``i b``.
        weight: $R_{ij}$ by iteration, ``t i``.
        mean: the parent's mean $m_j$ by iteration, ``t b``.
        spread: the covariance that the routing gives its votes, $E[\Lambda_j]^{-1}$ or EM's variance, ``t b b``; None
            for Dynamic routing, which has none.
        spread_of_mean: the covariance of the mean, $(\kappa_j E[\Lambda_j])^{-1}$, ``t b b``; None but for VB.
        explained: the shares of the votes' variance along both axes, ``b``.
    """

    votes: Tensor
    weight: Tensor
    mean: Tensor
    spread: Tensor | None
    spread_of_mean: Tensor | None
    explained: Tensor


def cloud_of(trace: NetworkTrace, layer: str, position: int, type: int) -> Cloud:
    """Return the votes for one parent in two principal components, in float64; the arguments are those of `parts_of`.

    Example:
        >>> net = CapsNet((8, 4, 4, 4), num_classes=3).eval()
        >>> with torch.no_grad():
        ...     cloud = cloud_of(net.trace(torch.randn(1, 2, 32, 32)), "class_caps", 0, type=1)
        >>> cloud.votes.shape, cloud.weight.shape, cloud.spread.shape
        (torch.Size([64, 2]), torch.Size([3, 64]), torch.Size([3, 2, 2]))
    """
    check_parent(trace, layer, position, type)
    one = trace.layers[layer]
    L, I = one.fields.child.shape
    V = one.votes[0].reshape(L, I, types_of(one), -1)[position, :, type].double()  # i d
    a = one.activations[0].reshape(L, I)[position].double()
    weight = torch.stack([a * q.r[0].reshape(L, I, -1)[position, :, type].double() for q in one.iterations])  # t i
    share = weight[-1] / weight[-1].sum().clamp_min(1e-300) + 1e-9  # all alike where no vote has weight
    share = share / share.sum()
    centre = share @ V
    X = V - centre
    values, vectors = torch.linalg.eigh(X.T @ (share[:, None] * X))
    plane = vectors[:, -2:].flip(1)  # d b
    # An eigenvector has no sign of its own: a fixed one keeps the picture still while the image changes a little.
    plane = plane * plane.gather(0, plane.abs().argmax(0, keepdim=True)).sign()
    parents = [of_parent(q, position, type, L) for q in one.iterations]
    means = torch.stack([m for m, _, _ in parents])
    spread, of_mean = [], []
    for _, covariance, kappa in parents:
        if covariance is not None:
            spread.append(plane.T @ covariance @ plane)
        if covariance is not None and kappa is not None:
            of_mean.append(plane.T @ covariance @ plane / kappa)
    return Cloud(
        X @ plane,
        weight,
        (means - centre) @ plane,
        torch.stack(spread) if spread else None,
        torch.stack(of_mean) if of_mean else None,
        values.flip(0)[:2].clamp_min(0) / values.clamp_min(0).sum().clamp_min(1e-300),
    )


def of_parent(
    q: RoutingResult, position: int, type: int, positions: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return one parent's mean ``d``, the covariance of its votes ``d d`` and its kappa, None where it has none."""

    def one(x: Tensor, axes: int) -> Tensor:  # axes: those of an entry of x, after n l j or n j
        return x[0].reshape(positions, -1, *x.shape[x.ndim - axes :])[position, type].double()

    mean = one(q.m, 1)
    if isinstance(q, Posterior):
        precision = one(q.nu, 0) * (one(q.psi, 2) if q.full else one(q.psi, 1).diag())
        return mean, torch.linalg.inv(precision), one(q.kappa, 0)
    return mean, one(q.var, 1).diag() if isinstance(q, Mixture) else None, None


class Box(NamedTuple):
    """A rectangle of pixels: its first row and column, and the row and column after its last."""

    top: int
    left: int
    bottom: int
    right: int


def receptive_field(net: CapsNet, layer: str, position: int) -> Box:
    """Return the pixels of the input that reach a parent through convolutions and votes.

    Through the competition for a child, responsibilities depend on further pixels, in this layer and in those below.

    Args:
        net: the network.
        layer: the layer of the parent, one of ``LAYERS``.
        position: the parent's position l, counted row by row.

    Example:
        >>> net = CapsNet((8, 4, 4, 4), num_classes=3, image_size=32)
        >>> receptive_field(net, "conv_caps1", 0), receptive_field(net, "class_caps", 0)
        (Box(top=0, left=0, bottom=17, right=17), Box(top=0, left=0, bottom=32, right=32))
    """
    sizes = map_sizes(net, layer)
    y, x = sizes[-1]
    if not 0 <= position < y * x:
        raise ValueError(f"position must lie from 0 to {y * x - 1} in {layer}, got {position}")
    if layer == "class_caps":
        return Box(0, 0, *net.image_size)
    first, last = [position // x, position % x], [position // x, position % x]
    for (kernel, stride, padding), size in zip(reversed(windows(net, layer)), reversed(sizes[:-1]), strict=True):
        first = [max(k * stride - padding, 0) for k in first]
        last = [min(k * stride - padding + kernel, most) - 1 for k, most in zip(last, size, strict=True)]
    return Box(*first, *(k + 1 for k in last))


def windows(net: CapsNet, layer: str) -> list[tuple[int, int, int]]:
    """Return (kernel, stride, padding) of every layer from the image to a layer of capsules.

    The shortcuts of residual blocks and the primary capsules, which see one position each, are left out.
    """
    if layer not in LAYERS:
        raise ValueError(f"layer must be one of {LAYERS}, got {layer!r}")
    stem = net.stem
    if isinstance(stem, ConvStem):
        found: list[Any] = [stem.conv1[0], stem.conv2[0], stem.conv3[0]]
    else:
        found = [one[0] for block in stem.blocks for one in (block.conv1, block.conv2)]  # type: ignore[index]
    found += [getattr(net, name) for name in LAYERS[: LAYERS.index(layer) + 1] if name != "class_caps"]
    return [(one.kernel_size[0], one.stride[0], one.padding[0]) for one in found]


def map_sizes(net: CapsNet, layer: str) -> list[tuple[int, int]]:
    """Return the rows and columns of the image, of each map on the way to a layer, and of the layer's own map."""
    sizes = [net.image_size]
    for kernel, stride, padding in windows(net, layer):
        y, x = sizes[-1]
        sizes.append(((y + 2 * padding - kernel) // stride + 1, (x + 2 * padding - kernel) // stride + 1))
    return [*sizes, (1, 1)] if layer == "class_caps" else sizes


def frame_of_parts(net: CapsNet) -> tuple[float, float, float, float]:
    """Return where the map of `parts_of` lies on the image: its top, left, bottom and right, in pixels.

    A cell is as wide as the stem's stride, and its middle is that of the pixels that its capsule sees.

    Example:
        >>> frame_of_parts(CapsNet((8, 4, 4, 4), num_classes=3, image_size=32))  # 14 cells of 2 pixels
        (1.5, 1.5, 29.5, 29.5)
    """
    middle, step = 0.5, 1  # of the first cell, and from cell to cell
    for kernel, stride, padding in windows(net, "conv_caps1")[:-1]:
        middle += ((kernel - 1) / 2 - padding) * step
        step *= stride
    first = middle - step / 2
    y, x = map_sizes(net, "conv_caps1")[-2]
    return first, first, first + step * y, first + step * x


def types_of(layer: LayerTrace) -> int:
    """Return how many types of parent a layer has; of class capsules, how many classes."""
    return layer.votes.shape[-2]


def check_parent(trace: NetworkTrace, layer: str, position: int, type: int) -> None:
    """Raise an error that says which parents there are, unless a trace of one image has this one."""
    if layer not in trace.layers:
        raise ValueError(f"layer must be one of {tuple(trace.layers)}, got {layer!r}")
    one = trace.layers[layer]
    if len(one.votes) != 1:
        raise ValueError(f"the trace must be of one image, got {len(one.votes)}: trace images one by one")
    for name, value, count in (("position", position, len(one.fields.child)), ("type", type, types_of(one))):
        if not 0 <= value < count:
            raise ValueError(f"{name} must lie from 0 to {count - 1} in {layer}, got {value}")

"""Capsule layers: each takes and returns `Capsules`, so layers can be stacked in ``nn.Sequential``.

Axes: n image, h w row and column, c child type, j parent type, p p pose matrix; within routing l parent position,
i child slot in a receptive field, d pose entry.
"""

import inspect
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vbcaps.kernels import BACKENDS, convolve, parents, primary, route
from vbcaps.kernels.triton import constant
from vbcaps.norm import BatchNorm
from vbcaps.routing import ROUTINGS, Agreement, Mixture, Posterior
from vbcaps.routing.fields import Fields, conv_fields, coordinates
from vbcaps.routing.votes import in_fields

INITS = ("glorot", "identity")
HALVES = (torch.float16, torch.bfloat16)
RoutingResult = Posterior | Mixture | Agreement


class Capsules(NamedTuple):
    """A map of capsules, which every capsule layer takes and returns, and which a network returns.

    The capsules of a map have the leading axes ``n h w j``; class capsules have no position and only ``n j``.
    Layers read only activations and poses; logits and posterior are further results.

    Args:
        activations: the probability of each capsule's entity, in (0, 1), ``n h w j``.
        poses: the pose matrix of each capsule, ``n h w j p p``.
        logits: the activations after BatchNorm and before the sigmoid, ``n h w j``.
        posterior: the routing's result for each capsule, with the axes ``n l j``, l = (h w), or ``n j`` for classes: a
            `Posterior` (VB), a `Mixture` (EM) or an `Agreement` (Dynamic).

    Example:
        >>> caps = Capsules(torch.rand(2, 6, 6, 8), torch.randn(2, 6, 6, 8, 4, 4))
        >>> ConvCaps(8, 16, kernel_size=3)(caps).poses.shape
        torch.Size([2, 4, 4, 16, 4, 4])
    """

    activations: Tensor
    poses: Tensor
    logits: Tensor = None  # type: ignore[assignment]  # None only where somebody made the capsules by hand
    posterior: RoutingResult | None = None


class PrimaryCaps(nn.Module):
    """Turn a map of features into a map of capsules with a 1x1 convolution.

    Args:
        in_channels: channels of the feature map.
        out_caps: types of capsule at each position.
        pose_size: p, poses are p x p matrices.
        norm_pose: normalise the poses of each type with BatchNorm (as in the released code).
        backend: ``"auto"`` normalises by kernels where there are some; ``"reference"`` by PyTorch alone, which allows
            second derivatives.

    Shape:
        - Input: features ``n in_channels h w``.
        - Output: `Capsules` with activations and logits ``n h w out_caps``, poses ``n h w out_caps p p``.

    Example:
        >>> primary = PrimaryCaps(in_channels=64, out_caps=16)
        >>> caps = primary(torch.randn(2, 64, 14, 14))
        >>> caps.activations.shape, caps.poses.shape
        (torch.Size([2, 14, 14, 16]), torch.Size([2, 14, 14, 16, 4, 4]))
    """

    def __init__(
        self, in_channels: int, out_caps: int, *, pose_size: int = 4, norm_pose: bool = True, backend: str = "auto"
    ):
        super().__init__()
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")
        self.backend = backend
        check_counts(in_channels=in_channels, out_caps=out_caps, pose_size=pose_size)
        self.in_channels, self.out_caps, self.pose_size = in_channels, out_caps, pose_size
        self.conv = nn.Conv2d(in_channels, out_caps * (pose_size * pose_size + 1), 1, bias=False)
        nn.init.xavier_uniform_(self.conv.weight)
        self.norm_a = BatchNorm(out_caps)
        self.norm_pose = BatchNorm(out_caps) if norm_pose else None

    def forward(self, x: Tensor) -> Capsules:  # n in_channels h w
        if not isinstance(x, Tensor):
            raise TypeError(f"PrimaryCaps takes a feature map (n, channels, h, w), got {type(x).__name__}")
        if x.ndim != 4 or x.shape[1] != self.in_channels:
            raise ValueError(f"x must have shape (n, {self.in_channels}, h, w), got {tuple(x.shape)}")
        check_dtype("x", x, self.conv.weight)
        a, logit, pose = primary(convolve(self.conv, x), self.out_caps, self.norm_a, self.norm_pose, self.backend)
        return Capsules(a, pose, logit)


class LayerTrace(NamedTuple):
    """The steps of a layer's routing, as `ConvCaps.trace` returns them.

    For a `ClassCaps` layer, votes, activations and iterations have no axis l.

    Args:
        children: the input of the layer.
        parents: its output, posterior included.
        fields: the receptive fields; ``fields.child[l, i]`` is the number of the child in slot i of field l. Children
            are counted row by row, column by column, type by type, over the padded map.
        activations: of the child in each slot, ``n l i``.
        votes: for each parent, ``n l i j d``.
        iterations: the routing's result after each iteration, with the responsibilities ``r`` that it used:
            `Posterior` (VB), `Mixture` (EM) or `Agreement` (Dynamic). The last is ``parents.posterior``.
        padding: rows and columns of children that were added on each side of the map.
    """

    children: Capsules
    parents: Capsules
    fields: Fields
    activations: Tensor
    votes: Tensor
    iterations: tuple[RoutingResult, ...]
    padding: tuple[int, int] = (0, 0)


class Children(NamedTuple):
    """The input of routing: the children, numbered ``c``, their transformations and the receptive fields."""

    a: Tensor  # n c
    pose: Tensor  # n c p p
    W: Tensor  # g j p p   transformations; slot i of a field has those of row i mod g
    fields: Fields
    coordinates: Tensor | None  # i 2   added to the votes of slot i
    size: tuple[int, int]  # rows and columns of parents


class ConvCaps(nn.Module):
    r"""Convolutional capsules: each parent routes over the children in its receptive field.

    Activations in [0, 1] and poses of up to 1e9 have finite outputs and gradients; larger ones overflow float32.

    Args:
        in_caps: types of child capsules.
        out_caps: types of parent capsules.
        kernel_size, stride, padding: a number or (rows, columns), as in ``nn.Conv2d``. Padding adds children that are
            off.
        pose_size: p, poses are p x p matrices.
        routing: ``"vb"``, ``"em"`` or ``"dynamic"``.
        routing_options: keywords of `VBRouting`, `EMRouting` or `DynamicRouting`, as ``dict(iters=2)``.
        init: how the transformations start, one of the paper's two ways: ``"glorot"``, uniform in
            $\pm\sqrt{6 / (k^2 p^2 (c_i + d_j))}$ times ``gain``; or ``"identity"``, the identity with
            uniform(0, ``noise``) beside the diagonal. A small gain makes votes that differ little, so that a child is
            shared out among its parents before it is assigned to one.
        gain, noise: see ``init``.
        norm_pose: normalise the posterior means of each type with BatchNorm without affine (as in the released code).
        norm_logit: normalise the logits of each type with BatchNorm without affine (as in the released code).
        backend: ``"auto"`` takes the fused kernels if they cover the call. Every other name of
            `vbcaps.kernels.BACKENDS` takes this backend or raises an error; ``"reference"`` is the readable code.

    Shape:
        - Input: `Capsules` with activations ``n h w in_caps`` and poses ``n h w in_caps p p``.
        - Output: `Capsules` with activations and logits ``n h' w' out_caps``, poses ``n h' w' out_caps p p`` and the
          posterior of every parent, ``n l j`` with l = (h' w'); h' and w' are those of ``nn.Conv2d``.

    Example:
        >>> layer = ConvCaps(16, 32, kernel_size=3, stride=2, routing="vb", routing_options=dict(iters=3))
        >>> caps = layer(Capsules(torch.rand(2, 14, 14, 16), torch.randn(2, 14, 14, 16, 4, 4)))
        >>> caps.activations.shape, caps.posterior.m.shape
        (torch.Size([2, 6, 6, 32]), torch.Size([2, 36, 32, 16]))
    """

    def __init__(
        self,
        in_caps: int,
        out_caps: int,
        kernel_size: int | tuple[int, int] = 3,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        *,
        pose_size: int = 4,
        routing: str = "vb",
        routing_options: Mapping[str, Any] | None = None,
        init: str = "glorot",
        gain: float = 1.0,
        noise: float = 0.01,
        norm_pose: bool = True,
        norm_logit: bool = True,
        backend: str = "auto",
    ):
        super().__init__()
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")
        self.backend = backend
        check_counts(in_caps=in_caps, out_caps=out_caps, pose_size=pose_size)
        self.in_caps, self.out_caps, self.pose_size = in_caps, out_caps, pose_size
        self.kernel_size = _pair("kernel_size", kernel_size, 1)
        self.stride = _pair("stride", stride, 1)
        self.padding = _pair("padding", padding, 0)
        if self.padding[0] >= self.kernel_size[0] or self.padding[1] >= self.kernel_size[1]:
            raise ValueError(
                f"padding must be below kernel_size {self.kernel_size}, got {self.padding}: a field would be empty"
            )
        self.weight = nn.Parameter(torch.empty(*self.kernel_size, in_caps, out_caps, pose_size, pose_size))
        self.init, self.gain, self.noise = init, gain, noise
        self.reset_parameters()
        self.routing = make_routing(routing, out_caps, pose_size * pose_size, routing_options)
        self.routing.normalised = norm_logit  # type: ignore[assignment]
        self.norm_a = BatchNorm(out_caps) if norm_logit else None
        self.norm_pose = BatchNorm(out_caps) if norm_pose else None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the transformations anew, as ``init`` says."""
        if self.init == "glorot":
            fan = math.prod(self.kernel_size) * self.pose_size**2 * (self.in_caps + self.out_caps)
            if not 0 < self.gain < math.inf:
                raise ValueError(f"gain must be a number above 0, got {self.gain}")
            self.weight.uniform_(-math.sqrt(6 / fan), math.sqrt(6 / fan)).mul_(self.gain)
        elif self.init == "identity":
            if not 0 <= self.noise < math.inf:
                raise ValueError(f"noise must be a number of at least 0, got {self.noise}")
            eye = torch.eye(self.pose_size, dtype=self.weight.dtype, device=self.weight.device)
            self.weight.uniform_(0, self.noise).mul_(1 - eye).add_(eye)
        else:
            raise ValueError(f"init must be one of {INITS}, got {self.init!r}")

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns of parents over a map of ``height`` x ``width`` children."""
        size = (height + 2 * self.padding[0], width + 2 * self.padding[1])
        if size[0] < self.kernel_size[0] or size[1] < self.kernel_size[1]:
            raise ValueError(
                f"a map of {height} x {width} capsules (padding {self.padding}) is too small for kernel_size "
                f"{self.kernel_size}"
            )
        rows, columns = (
            (length - kernel) // step + 1
            for length, kernel, step in zip(size, self.kernel_size, self.stride, strict=True)
        )
        return rows, columns

    def forward(self, caps: Capsules, posterior: bool = True) -> Capsules:
        """Route ``caps`` to parents. ``posterior=False`` leaves the posterior out, which spares a GPU some copies."""
        self.check(caps)
        with without_autocast(caps.activations.device):
            a, pose, W, fields, coordinates, size = self.children_of(caps)
            logit, m, q = route(self.routing, a, pose, W, fields, coordinates, self.backend, posterior)
            return self.parents_of(logit, m, q, size, self.backend)

    def trace(self, caps: Capsules) -> LayerTrace:
        """Route ``caps`` by the readable reference, and keep every step of it.

        As in ``forward``, BatchNorm in training normalises by the batch and updates its running statistics.

        Example:
            >>> layer = ConvCaps(4, 8, kernel_size=3).eval()
            >>> caps = Capsules(torch.rand(2, 5, 5, 4), torch.randn(2, 5, 5, 4, 4, 4))
            >>> trace = layer.trace(caps)
            >>> trace.votes.shape, len(trace.iterations)
            (torch.Size([2, 9, 36, 8, 16]), 3)
            >>> bounds = [q.elbo(trace.activations, trace.votes).total for q in trace.iterations]
            >>> bool((bounds[2] > bounds[1]).all())
            True
        """
        self.check(caps)
        with without_autocast(caps.activations.device):
            a, pose, W, fields, coordinates, size = self.children_of(caps)
            activations, votes = in_fields(a, pose, W, fields, coordinates)
            history: list[RoutingResult] = []
            logit, q = self.routing(activations, votes, fields.child, a.shape[1], history)
            found = self.parents_of(logit, q.m.unflatten(-1, pose.shape[-2:]), q, size, "reference")
        return LayerTrace(caps, found, fields, activations, votes, tuple(history), self.padding)

    def children_of(self, caps: Capsules) -> Children:
        """Number the children of the map, padded, and lay a field for each parent over them."""
        a, pose = at_least_float32(caps.activations), at_least_float32(caps.poses)
        size = self.output_size(a.shape[1], a.shape[2])
        if any(self.padding):
            top, left = self.padding
            a = F.pad(a, (0, 0, left, left, top, top))
            pose = F.pad(pose, (0, 0, 0, 0, 0, 0, left, left, top, top))
        fields = conv_fields(a.shape[1], a.shape[2], self.in_caps, self.kernel_size, self.stride, a.device)
        return Children(a.flatten(1), pose.flatten(1, 3), self.weight.flatten(0, 2), fields, None, size)

    def parents_of(
        self, logit: Tensor, m: Tensor, q: RoutingResult | None, size: tuple[int, int], backend: str
    ) -> Capsules:
        """Normalise the routing's result, ``n l j`` and ``n l j p p``, and return it as a map."""
        a, logit, pose = (x.unflatten(1, size) for x in parents(logit, m, self.norm_a, self.norm_pose, backend))
        return Capsules(a, pose, logit, q)

    def check(self, caps: Capsules) -> None:
        """Raise an error that names what is wrong with the children."""
        if not isinstance(caps, Capsules):
            raise TypeError(f"a capsule layer takes Capsules(activations, poses), got {type(caps).__name__}")
        a, pose, p = caps.activations, caps.poses, self.pose_size
        if a.ndim != 4 or a.shape[-1] != self.in_caps:
            raise ValueError(f"activations must have shape (n, h, w, {self.in_caps}), got {tuple(a.shape)}")
        if pose.shape != (*a.shape, p, p):
            raise ValueError(
                f"poses must have shape {(*a.shape, p, p)} to go with the activations, got {tuple(pose.shape)}"
            )
        if 0 in a.shape[1:]:
            raise ValueError(f"there are no capsules: activations have the shape {tuple(a.shape)}")
        if not a.is_floating_point() or not pose.is_floating_point():
            raise TypeError(f"activations and poses must be floating point, got {a.dtype} and {pose.dtype}")
        check_routable(self.weight)
        if not at_least_float32(a).dtype == at_least_float32(pose).dtype == self.weight.dtype:
            raise TypeError(
                f"activations and poses are {a.dtype} and {pose.dtype}, the weights {self.weight.dtype}: all must be "
                "float32, or all float64; for less use torch.autocast"
            )

    def extra_repr(self) -> str:
        return (
            f"{self.in_caps}, {self.out_caps}, kernel_size={self.kernel_size}, stride={self.stride}, "
            f"padding={self.padding}, pose_size={self.pose_size}, init={self.init!r}"
        )


class ClassCaps(ConvCaps):
    """One capsule for each class over the whole map; all positions share their transformations.

    Each child's position is added to its votes, since shared transformations would lose it (coordinate addition): row
    and column of its centre, as shares of the map from 0 to 1, go to the first two entries of the right-hand column.

    Args:
        in_caps: types of child capsules.
        num_classes: how many classes there are.
        logit_scale: learn a factor ``scale`` on the class logits, which starts at 1. BatchNorm without affine keeps
            logits near unit size, so a cross entropy on the logits needs the factor to become sure.
        logit_bias: learn a term for each class that is added to its logit, and starts at this number. BatchNorm without
            affine keeps the mean of the logits at 0, which is wrong for a sigmoid of classes that are mostly not there.
        options: see `ConvCaps`.

    Shape:
        - Input: `Capsules` with activations ``n h w in_caps`` and poses ``n h w in_caps p p``, any h and w.
        - Output: `Capsules` without position: activations and logits ``n num_classes``, poses ``n num_classes p p``,
          the posterior with the axes ``n j`` and its responsibilities ``n i j``.

    Example:
        >>> net = nn.Sequential(PrimaryCaps(64, 16), ConvCaps(16, 32, 3, 2), ClassCaps(32, 10))
        >>> out = net(torch.randn(2, 64, 14, 14))
        >>> loss = F.cross_entropy(out.logits, torch.tensor([3, 7]))
        >>> out.poses.shape
        torch.Size([2, 10, 4, 4])
    """

    def __init__(
        self,
        in_caps: int,
        num_classes: int,
        *,
        logit_scale: bool = True,
        logit_bias: float | None = None,
        **options: Any,
    ):
        check_counts(num_classes=num_classes)
        super().__init__(in_caps, num_classes, 1, **options)
        self.num_classes = num_classes
        self.scale = nn.Parameter(torch.ones(())) if logit_scale else None
        self.bias = None if logit_bias is None else nn.Parameter(torch.full((num_classes,), float(logit_bias)))

    def trace(self, caps: Capsules) -> LayerTrace:
        """Route ``caps`` by the readable reference, and keep every step of it, without the axis l.

        Example:
            >>> trace = ClassCaps(4, 10).eval().trace(Capsules(torch.rand(2, 3, 3, 4), torch.randn(2, 3, 3, 4, 4, 4)))
            >>> trace.votes.shape, trace.iterations[-1].r.shape
            (torch.Size([2, 36, 10, 16]), torch.Size([2, 36, 10]))
        """
        trace = super().trace(caps)
        iterations = tuple(map(without_position, trace.iterations))
        return trace._replace(activations=trace.activations[:, 0], votes=trace.votes[:, 0], iterations=iterations)

    def children_of(self, caps: Capsules) -> Children:
        """Number all children of the map, and lay one field over them."""
        a, pose = at_least_float32(caps.activations), at_least_float32(caps.poses)
        h, w = a.shape[1:3]
        fields = conv_fields(h, w, self.in_caps, (h, w), (1, 1), a.device)
        where = coordinates(h, w, self.in_caps, pose.dtype, a.device)
        return Children(a.flatten(1), pose.flatten(1, 3), self.weight.flatten(0, 2), fields, where, (1, 1))

    def parents_of(
        self, logit: Tensor, m: Tensor, q: RoutingResult | None, size: tuple[int, int], backend: str
    ) -> Capsules:
        """Normalise the routing's result, and drop the axis of its only position."""
        caps = super().parents_of(logit, m, q, size, backend)
        logits = caps.logits[:, 0, 0] if self.scale is None else caps.logits[:, 0, 0] * self.scale
        logits = logits if self.bias is None else logits + self.bias
        return Capsules(logits.sigmoid(), caps.poses[:, 0, 0], logits, None if q is None else without_position(q))

    def extra_repr(self) -> str:
        return (
            f"{self.in_caps}, {self.num_classes}, pose_size={self.pose_size}, init={self.init!r}, "
            f"logit_scale={self.scale is not None}"
        )


def without_position(q: RoutingResult) -> RoutingResult:
    """Drop the axis l of a routing's result, ``n 1 j`` to ``n j``."""
    fields: Any = (x[:, 0] if isinstance(x, Tensor) and x.ndim else x for x in q)  # numbers have no axes
    return type(q)(*fields)


def make_routing(name: str, types: int, dim: int, options: Mapping[str, Any] | None) -> nn.Module:
    if name not in ROUTINGS:
        raise ValueError(f"routing must be one of {tuple(ROUTINGS)}, got {name!r}")
    try:
        return ROUTINGS[name](types, dim, **(options or {}))
    except TypeError as error:
        allowed = [k for k, p in inspect.signature(ROUTINGS[name]).parameters.items() if p.kind is p.KEYWORD_ONLY]
        raise TypeError(f"routing_options of routing={name!r} may be {allowed}: {error}") from error


def without_autocast(device: torch.device) -> AbstractContextManager:
    """Routing's sums of squares do not survive 8 bits; a device like "meta" has no autocast."""
    return torch.autocast(device.type, enabled=False) if has_autocast(device.type) else nullcontext()


@constant  # torch.compile of PyTorch 2.11 cannot trace the question
def has_autocast(kind: str) -> bool:
    """Return whether this kind of device has autocast."""
    return torch.amp.is_autocast_available(kind)


def at_least_float32(x: Tensor) -> Tensor:
    """Return x in float32 if autocast made other layers give it in 16 bits, else unchanged."""
    return x.float() if x.dtype in HALVES else x


def check_routable(weight: Tensor) -> None:
    """Raise an error that says what to do if the weights were converted to 16 bits, which routing does not survive."""
    if weight.dtype in HALVES:
        raise TypeError(
            f"the weights are {weight.dtype}, and routing needs float32: keep the network in float32 (net.float()), "
            f"and run it under torch.autocast({weight.device.type!r}, dtype={weight.dtype}), which takes 16 bits where "
            "they are enough"
        )


def check_dtype(name: str, x: Tensor, weight: Tensor) -> None:
    """Raise an error unless ``x`` has the dtype of the weights; under autocast both may have 32 or 16 bits."""
    cast = (torch.float32, *HALVES)
    device = x.device.type
    if x.dtype == weight.dtype or not x.is_floating_point():
        return
    known = torch.amp.is_autocast_available(device)
    if known and torch.is_autocast_enabled(device) and x.dtype in cast and weight.dtype in cast:
        return
    to = dict(zip((torch.float32, torch.float64), ("float", "double"), strict=True)).get(weight.dtype, "float")
    raise TypeError(f"{name} must be {weight.dtype} as the weights are, got {x.dtype}: give {name}.{to}()")


def check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {count!r}")


def _pair(name: str, value: int | tuple[int, int], least: int) -> tuple[int, int]:
    pair = tuple(value) if isinstance(value, tuple | list) else (value, value)
    if len(pair) != 2 or not all(isinstance(v, int) and not isinstance(v, bool) and v >= least for v in pair):
        raise ValueError(f"{name} must be a whole number of at least {least}, or a pair of them, got {value!r}")
    return pair[0], pair[1]

"""Capsule layers. A map of capsules is a pair: activations ``n h w c`` and poses ``n h w c p p``, c types.

Axes: n image, l parent position, i child slot in a receptive field, j parent type, p q pose row and column.
"""

import inspect
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vbcaps.kernels import BACKENDS, RunningStatistics, batch_norm, by_type, lay_capsules, route
from vbcaps.routing import ROUTINGS, Agreement, Mixture, Posterior
from vbcaps.routing.fields import Fields, conv_fields, places

INITS = ("glorot", "identity")


class Capsules(NamedTuple):
    """What a capsule layer, or a network, gives. A network has no ``h w``: its capsules are its classes."""

    logits: Tensor  # n h w j        after BatchNorm, before the sigmoid
    activations: Tensor  # n h w j   in (0, 1)
    poses: Tensor  # n h w j p p
    posterior: Posterior | Mixture | Agreement | None = None  # axes n l j, l = (h w)


class BatchNorm(nn.BatchNorm1d):
    """BatchNorm without affine: ``n c`` or ``n c d``, one mean and variance for each type c.

    A training batch with one value per type (one image, one position) has no spread to normalise by: it is
    normalised by the running statistics, which it leaves alone.
    """

    def __init__(self, types: int):
        super().__init__(types, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        single = self.training and x.numel() == self.num_features
        if single:
            return F.batch_norm(x, self.running_mean, self.running_var, training=False, eps=self.eps)
        if not self.training:
            return super().forward(x)
        running = RunningStatistics(self.running_mean, self.running_var, self.num_batches_tracked)  # type: ignore[arg-type]
        return batch_norm(x, running, self.momentum, self.eps)  # type: ignore[arg-type]


class PrimaryCaps(nn.Module):
    """Filters to capsules: a 1x1 convolution gives each position ``caps`` poses and activations."""

    def __init__(self, channels: int, caps: int, *, pose: int = 4, norm_pose: bool = True):
        super().__init__()
        check_counts(channels=channels, caps=caps, pose=pose)
        self.caps, self.pose = caps, pose
        self.conv = nn.Conv2d(channels, caps * (pose * pose + 1), 1, bias=False)
        nn.init.xavier_uniform_(self.conv.weight)
        self.norm_a = BatchNorm(caps)
        self.norm_pose = BatchNorm(caps) if norm_pose else None

    def forward(self, x: Tensor) -> Capsules:  # n channels h w
        if x.ndim != 4 or x.shape[1] != self.conv.in_channels:
            raise ValueError(f"x must have shape (n, {self.conv.in_channels}, h, w), got {tuple(x.shape)}")
        c, p = self.caps, self.pose
        x = self.conv(x)  # n (c p p) + c h w
        n, _, h, w = x.shape
        pose, logit = x.split([c * p * p, c], dim=1)
        logit = self.norm_a(logit.flatten(2)).reshape(n, c, h, w).permute(0, 2, 3, 1)
        if self.norm_pose is not None:
            pose = self.norm_pose(pose.reshape(n, c, -1))
        pose = pose.reshape(n, c, p, p, h, w).permute(0, 4, 5, 1, 2, 3)
        return Capsules(logit, lay_capsules(logit.sigmoid()), lay_capsules(pose))


class ConvCaps(nn.Module):
    """Convolutional capsules: each parent routes over the children in its receptive field.

    Activations in [0, 1] and poses of up to 1e9 have finite outputs and gradients; larger ones overflow float32.

    Arguments:
        in_caps, out_caps: how many types of child and parent capsules.
        kernel, stride, padding: a number or (rows, columns), as in ``nn.Conv2d``. Padding adds children that are off.
        pose: poses are ``pose x pose`` matrices.
        routing: ``"vb"``, ``"em"`` or ``"dynamic"``; ``routing_options`` go to ``VBRouting``, ``EMRouting`` or
            ``DynamicRouting`` as keywords.
        init: of the transformations, the paper's two ways: ``"glorot"``, uniform in +-sqrt(6 / (k^2 p^2 (c_i + d_j)))
            times ``gain``; or ``"identity"`` with uniform(0, ``noise``) beside the diagonal. A small gain makes votes
            that differ little, so that a child is shared out among its parents before it is assigned to one.
        norm_pose: BatchNorm, one per type and without affine, on the posterior means (as in the released code).
        backend: ``"auto"`` takes the fused kernels where they cover the call: Triton's on a GPU, on a CPU those in C++
            where a compiler is found (the first call then waits some seconds for it, once for each machine).
            ``"reference"``, ``"triton"`` and ``"cpu"`` insist.
    """

    def __init__(
        self,
        in_caps: int,
        out_caps: int,
        kernel: int | tuple[int, int] = 3,
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        *,
        pose: int = 4,
        routing: str = "vb",
        routing_options: Mapping[str, Any] | None = None,
        init: str = "glorot",
        gain: float = 1.0,
        noise: float = 0.01,
        norm_pose: bool = True,
        backend: str = "auto",
    ):
        super().__init__()
        if backend not in BACKENDS:
            raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")
        self.backend = backend
        check_counts(in_caps=in_caps, out_caps=out_caps, pose=pose)
        self.in_caps, self.out_caps, self.pose = in_caps, out_caps, pose
        self.kernel = _pair("kernel", kernel, 1)
        self.stride = _pair("stride", stride, 1)
        self.padding = _pair("padding", padding, 0)
        if self.padding[0] >= self.kernel[0] or self.padding[1] >= self.kernel[1]:
            raise ValueError(f"padding must be below kernel {self.kernel}, got {self.padding}: a field would be empty")
        self.weight = nn.Parameter(torch.empty(*self.kernel, in_caps, out_caps, pose, pose))
        self.init, self.gain, self.noise = init, gain, noise
        self.reset_parameters()
        self.routing = make_routing(routing, out_caps, pose * pose, routing_options)
        self.norm_a = BatchNorm(out_caps)
        self.norm_pose = BatchNorm(out_caps) if norm_pose else None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        if self.init == "glorot":
            fan = math.prod(self.kernel) * self.pose**2 * (self.in_caps + self.out_caps)
            if not 0 < self.gain < math.inf:
                raise ValueError(f"gain must be a number above 0, got {self.gain}")
            self.weight.uniform_(-math.sqrt(6 / fan), math.sqrt(6 / fan)).mul_(self.gain)
        elif self.init == "identity":
            if not 0 <= self.noise < math.inf:
                raise ValueError(f"noise must be a number of at least 0, got {self.noise}")
            eye = torch.eye(self.pose, dtype=self.weight.dtype, device=self.weight.device)
            self.weight.uniform_(0, self.noise).mul_(1 - eye).add_(eye)
        else:
            raise ValueError(f"init must be one of {INITS}, got {self.init!r}")

    def output_size(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of parents over a map of children; an error where it is too small for the kernel."""
        size = (height + 2 * self.padding[0], width + 2 * self.padding[1])
        if size[0] < self.kernel[0] or size[1] < self.kernel[1]:
            raise ValueError(
                f"a map of {height} x {width} capsules (padding {self.padding}) is too small for kernel {self.kernel}"
            )
        return (size[0] - self.kernel[0]) // self.stride[0] + 1, (size[1] - self.kernel[1]) // self.stride[1] + 1

    def forward(self, a: Tensor, pose: Tensor, posterior: bool = True) -> Capsules:  # n h w c, n h w c p p
        """``posterior=False`` leaves it out: on a GPU it is copies that not everyone needs."""
        _check_capsules(a, pose, self.in_caps, self.pose)
        rows, cols = self.output_size(a.shape[1], a.shape[2])
        with without_autocast(a.device):
            a, pose = at_least_float32(a), at_least_float32(pose)
            if any(self.padding):
                top, left = self.padding
                a = F.pad(a, (0, 0, left, left, top, top))
                pose = F.pad(pose, (0, 0, 0, 0, 0, 0, left, left, top, top))
            fields = conv_fields(a.shape[1], a.shape[2], self.in_caps, self.kernel, self.stride, a.device)
            return self.route(a, pose, fields, None, (rows, cols), posterior)

    def route(
        self, a: Tensor, pose: Tensor, fields: Fields, place: Tensor | None, size: tuple[int, int], posterior: bool
    ) -> Capsules:
        n, p = a.shape[0], self.pose
        if not a.dtype == pose.dtype == self.weight.dtype:
            raise TypeError(
                f"a and pose are {a.dtype} and {pose.dtype}, the weights {self.weight.dtype}: all must be float32, or "
                "all float64; for less use torch.autocast"
            )
        a, pose, W = a.reshape(n, -1), pose.reshape(n, -1, p, p), self.weight.flatten(0, 2)
        logit, m, q = route(self.routing, a, pose, W, fields, place, self.backend, posterior)
        logit = by_type(self.norm_a, logit).unflatten(1, size)
        m = m if self.norm_pose is None else by_type(self.norm_pose, m)
        return Capsules(logit, logit.sigmoid(), m.unflatten(1, size), q)

    def extra_repr(self) -> str:
        return (
            f"{self.in_caps}, {self.out_caps}, kernel={self.kernel}, stride={self.stride}, padding={self.padding}, "
            f"pose={self.pose}, init={self.init!r}"
        )


class ClassCaps(ConvCaps):
    """One capsule per class over the whole map, transformations shared by all positions.

    So that sharing does not lose where a child was, its position is added to its votes (coordinate addition): row and
    column of its centre, as a share of the map from 0 to 1, to the first two entries of the right-hand column.
    """

    def __init__(self, in_caps: int, classes: int, **options: Any):
        super().__init__(in_caps, classes, 1, **options)

    def forward(self, a: Tensor, pose: Tensor, posterior: bool = True) -> Capsules:  # n h w c, n h w c p p
        _check_capsules(a, pose, self.in_caps, self.pose)
        h, w = a.shape[1:3]
        with without_autocast(a.device):
            a, pose = at_least_float32(a), at_least_float32(pose)
            fields = conv_fields(h, w, self.in_caps, (h, w), (1, 1), a.device)  # one, that sees every child
            return self.route(a, pose, fields, places(h, w, self.in_caps, pose.dtype, a.device), (1, 1), posterior)


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
    known = torch.amp.is_autocast_available(device.type)
    return torch.autocast(device.type, enabled=False) if known else nullcontext()


def at_least_float32(x: Tensor) -> Tensor:
    """Under autocast, what comes from other layers."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _check_capsules(a: Tensor, pose: Tensor, types: int, p: int) -> None:
    if a.ndim != 4 or a.shape[-1] != types:
        raise ValueError(f"a must have shape (n, h, w, {types}), got {tuple(a.shape)}")
    if pose.shape != (*a.shape, p, p):
        raise ValueError(f"pose must have shape {(*a.shape, p, p)} to go with a, got {tuple(pose.shape)}")
    if a.numel() == 0:
        raise ValueError(f"there are no capsules in a: its shape is {tuple(a.shape)}")
    if not a.is_floating_point() or not pose.is_floating_point():
        raise TypeError(f"a and pose must be floating point, got {a.dtype} and {pose.dtype}")


def check_counts(**counts: int) -> None:
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {count!r}")


def _pair(name: str, value: int | tuple[int, int], least: int) -> tuple[int, int]:
    pair = tuple(value) if isinstance(value, tuple | list) else (value, value)
    if len(pair) != 2 or not all(isinstance(v, int) and not isinstance(v, bool) and v >= least for v in pair):
        raise ValueError(f"{name} must be a whole number of at least {least}, or a pair of them, got {value!r}")
    return pair[0], pair[1]

"""The paper's networks {F, d1, d2, d3, d4}, and a plain CNN to compare them with.

Axes: n image, j class, p p pose matrix.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch.nn.functional as F
from torch import Tensor, nn

from vbcaps.kernels import convolve
from vbcaps.layers import (
    Capsules,
    ClassCaps,
    ConvCaps,
    LayerTrace,
    PrimaryCaps,
    check_counts,
    check_dtype,
    check_routable,
)
from vbcaps.norm import BatchNorm2d

Value = TypeVar("Value")
STEMS = ("conv", "residual")
IMAGE_SIZES = range(20, 257)


class CapsNet(nn.Module):
    """The paper's capsule network {F, d1, d2, d3, classes}.

    Args:
        arch: filters of the stem, then types of PrimaryCaps and of the two ConvCaps.
        in_channels: channels of the images.
        num_classes: how many classes there are.
        image_size: a number or (height, width), from 20 to 256.
        routing: ``"vb"``, ``"em"`` or ``"dynamic"``.
        stem: ``"conv"``, a 5x5 convolution of stride 2 and two of 3x3; or ``"residual"``, four residual blocks.
        routing_options: keywords for the routing of each capsule layer, as ``dict(iters=2)``.
        pose_size: p, poses are p x p matrices.
        init, gain, noise, norm_pose, backend: see `ConvCaps`.
        logit_scale: learn a factor on the class logits, see `ClassCaps`.
        logit_bias: learn terms of the class logits that start at this number, see `ClassCaps`.
        norm_logit: normalise the class logits by BatchNorm; those of the other layers always are.

    Shape:
        - Input: standardised images ``n in_channels height width``.
        - Output: `Capsules` of the classes: logits and activations ``n num_classes``, poses ``n num_classes p p``, the
          posterior with the axes ``n j``.

    Example:
        >>> import torch
        >>> net = CapsNet((64, 16, 16, 16), in_channels=2, num_classes=5, image_size=32)  # the best one for smallNORB
        >>> out = net(torch.randn(8, 2, 32, 32))
        >>> loss = F.cross_entropy(out.logits, torch.randint(5, (8,)))
        >>> out.poses.shape
        torch.Size([8, 5, 4, 4])
    """

    def __init__(
        self,
        arch: Sequence[int] = (64, 16, 16, 16),
        in_channels: int = 2,
        num_classes: int = 5,
        image_size: int | tuple[int, int] = 32,
        routing: str = "vb",
        stem: str = "conv",
        *,
        routing_options: Mapping[str, Any] | None = None,
        pose_size: int = 4,
        init: str = "glorot",
        gain: float = 1.0,
        noise: float = 0.01,
        norm_pose: bool = True,
        logit_scale: bool = True,
        logit_bias: float | None = None,
        norm_logit: bool = True,
        backend: str = "auto",
    ):
        super().__init__()
        self.arch, self.image_size = check_network(arch, in_channels, num_classes, image_size, stem)
        self.in_channels, self.num_classes = in_channels, num_classes

        _, d1, d2, d3 = self.arch
        options: dict[str, Any] = dict(
            pose_size=pose_size,
            routing=routing,
            routing_options=routing_options,
            init=init,
            gain=gain,
            noise=noise,
            norm_pose=norm_pose,
            backend=backend,
        )
        self.stem = make_stem(stem, in_channels, self.arch[0])
        self.primary_caps = PrimaryCaps(
            self.stem.channels, d1, pose_size=pose_size, norm_pose=norm_pose, backend=backend
        )
        self.conv_caps1 = ConvCaps(d1, d2, 3, stride=2, **options)
        self.conv_caps2 = ConvCaps(d2, d3, 3, stride=1, **options)
        of_logits: dict[str, Any] = dict(logit_scale=logit_scale, logit_bias=logit_bias, norm_logit=norm_logit)
        self.class_caps = ClassCaps(d3, num_classes, **of_logits, **options)
        self.register_load_state_dict_pre_hook(_rename_keys)

    def forward(self, x: Tensor) -> Capsules:  # n in_channels height width
        self.check(x)
        caps = self.primary_caps(self.stem(x))
        caps = self.conv_caps1(caps, posterior=False)
        caps = self.conv_caps2(caps, posterior=False)
        return self.class_caps(caps)

    def check(self, x: Tensor) -> None:
        """Raise an error that names what is wrong with the images, or with the dtype of the weights."""
        check_routable(self.primary_caps.conv.weight)
        check_images(x, (self.in_channels, *self.image_size), self.primary_caps.conv.weight)

    def trace(self, x: Tensor) -> "NetworkTrace":
        """Classify images by the readable reference, and keep what every layer did.

        Args:
            x: standardised images ``n in_channels height width``.

        Example:
            >>> import torch
            >>> net = CapsNet((8, 4, 4, 4), num_classes=3).eval()
            >>> trace = net.trace(torch.randn(2, 2, 32, 32))
            >>> for name, layer in trace.layers.items():
            ...     print(name, tuple(layer.votes.shape), tuple(layer.iterations[-1].r.shape))
            conv_caps1 (2, 36, 36, 4, 16) (2, 36, 36, 4)
            conv_caps2 (2, 16, 36, 4, 16) (2, 16, 36, 4)
            class_caps (2, 64, 3, 16) (2, 64, 3)
        """
        self.check(x)
        features = self.stem(x)
        caps, layers = self.primary_caps(features), {}
        for name in ("conv_caps1", "conv_caps2", "class_caps"):
            layers[name] = getattr(self, name).trace(caps)
            caps = layers[name].parents
        return NetworkTrace(features, layers, caps)


class NetworkTrace(NamedTuple):
    """The steps by which a network came to its answer, as `CapsNet.trace` returns them.

    Args:
        features: the output of the stem, ``n channels h w``.
        layers: by the names ``conv_caps1``, ``conv_caps2`` and ``class_caps``, each with its input (``children``) and
            output (``parents``); the children of the first are the primary capsules.
        output: the network's answer, as ``forward`` gives it.
    """

    features: Tensor
    layers: dict[str, LayerTrace]
    output: Capsules


def current_names(tensors: Mapping[str, Value]) -> dict[str, Value]:
    """Rename the parameters of a state dict that an earlier version wrote to their present names.

    The factor on the class logits was ``scale`` of the network; it is ``class_caps.scale``. Names may have any prefix
    and any ending, as ``optimiser.scale.exp_avg``.
    """
    return {re.sub(r"(?<!class_caps\.)\bscale\b", "class_caps.scale", name): x for name, x in tensors.items()}


def _rename_keys(net: nn.Module, tensors: dict[str, Tensor], *_: Any) -> None:
    """Let ``load_state_dict`` read the state dict of an earlier version."""
    renamed = current_names(tensors)
    tensors.clear()
    tensors.update(renamed)


class Scores(NamedTuple):
    """The output of a `ConvNet`: the part of `Capsules` that every classifier has, ``n num_classes`` each."""

    logits: Tensor
    activations: Tensor


class ConvNet(nn.Module):
    """A plain CNN in the shape of `CapsNet`: the same stem, the same fields, and filters instead of capsules.

    After the stem come convolutions of 1x1, 3x3 of stride 2 and 3x3, each with BatchNorm and ReLU, then the mean over
    positions and a linear classifier.

    Args:
        arch: filters of the stem, then of the three convolutions.
        in_channels, num_classes, image_size, stem: see `CapsNet`.

    Shape:
        - Input: standardised images ``n in_channels height width``.
        - Output: `Scores`, logits and activations (their sigmoid) ``n num_classes``.

    Example:
        >>> import torch
        >>> net = ConvNet((64, 64, 72, 72), in_channels=1, num_classes=10, image_size=40)
        >>> sum(p.numel() for p in net.parameters())  # about as many as CapsNet((64, 16, 16, 16), 1, 10)
        169082
        >>> net(torch.randn(8, 1, 40, 40)).logits.shape
        torch.Size([8, 10])
    """

    def __init__(
        self,
        arch: Sequence[int] = (64, 64, 72, 72),
        in_channels: int = 2,
        num_classes: int = 5,
        image_size: int | tuple[int, int] = 32,
        stem: str = "conv",
    ):
        super().__init__()
        self.arch, self.image_size = check_network(arch, in_channels, num_classes, image_size, stem)
        self.in_channels, self.num_classes = in_channels, num_classes
        _, d1, d2, d3 = self.arch
        self.stem = make_stem(stem, in_channels, self.arch[0])
        self.conv1 = NormedConv(self.stem.channels, d1, 1)
        self.conv2 = NormedConv(d1, d2, 3, stride=2)
        self.conv3 = NormedConv(d2, d3, 3)
        self.head = nn.Linear(d3, num_classes)

    def forward(self, x: Tensor) -> Scores:  # n in_channels height width
        logits = self.head(self.features(x))
        return Scores(logits, logits.sigmoid())

    def features(self, x: Tensor) -> Tensor:
        """Return what the linear classifier reads, the mean of the last filters over positions, ``n d3``."""
        check_images(x, (self.in_channels, *self.image_size), self.head.weight)
        x = self.stem(x)
        for conv in (self.conv1, self.conv2, self.conv3):
            x = F.relu(conv(x))
        return x.mean((2, 3))


def check_network(
    arch: Sequence[int], in_channels: int, num_classes: int, image_size: int | tuple[int, int], stem: str
) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Check the arguments of a network; return ``arch`` and (height, width) as tuples."""
    if not isinstance(arch, tuple | list) or len(arch) != 4 or not all(isinstance(k, int) and k >= 1 for k in arch):
        raise ValueError(f"arch must be four positive numbers (F, d1, d2, d3), got {arch!r}")
    check_counts(in_channels=in_channels, num_classes=num_classes)
    if stem not in STEMS:
        raise ValueError(f"stem must be one of {STEMS}, got {stem!r}")
    size = tuple(image_size) if isinstance(image_size, tuple | list) else (image_size, image_size)
    if len(size) != 2 or not all(isinstance(s, int) and s in IMAGE_SIZES for s in size):
        raise ValueError(f"image_size must be a number or (height, width) from 20 to 256, got {image_size!r}")
    return tuple(arch), size


def check_images(x: Tensor, expected: tuple[int, ...], weight: Tensor) -> None:  # n channels height width, of one image
    if x.ndim != 4 or x.shape[1:] != expected:
        raise ValueError(f"images must have shape (n, {', '.join(map(str, expected))}), got {tuple(x.shape)}")
    if not x.is_floating_point():
        raise TypeError(f"images must be floating point, standardised, got {x.dtype}; `View.test` makes them so")
    check_dtype("images", x, weight)


def make_stem(stem: str, in_channels: int, filters: int) -> "ConvStem | ResidualStem":
    return ConvStem(in_channels, filters) if stem == "conv" else ResidualStem(in_channels, filters)


class NormedConv(nn.Sequential):
    """A convolution and its BatchNorm."""

    def __init__(self, channels: int, filters: int, kernel: int, stride: int = 1, padding: int = 0):
        conv = nn.Conv2d(channels, filters, kernel, stride, padding, bias=False)
        nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
        super().__init__(conv, BatchNorm2d(filters))

    def forward(self, x: Tensor) -> Tensor:
        conv, norm = self
        assert isinstance(conv, nn.Conv2d)
        return norm(convolve(conv, x))


class ConvStem(nn.Module):
    """5x5 of stride 2, then two padded 3x3, each with BatchNorm and ReLU: 32x32 becomes 14x14."""

    def __init__(self, in_channels: int, filters: int):
        super().__init__()
        self.channels = filters
        self.conv1 = NormedConv(in_channels, filters, 5, stride=2)
        self.conv2 = NormedConv(filters, filters, 3, padding=1)
        self.conv3 = NormedConv(filters, filters, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        for conv in (self.conv1, self.conv2, self.conv3):
            x = F.relu(conv(x))
        return x


class ResidualStem(nn.Module):
    """Four residual blocks of two 3x3 layers: F, F, 2F, 2F filters, the third of stride 2. 32x32 becomes 16x16.

    The paper gives the number of blocks and layers; widths and strides are ours.
    """

    def __init__(self, in_channels: int, filters: int):
        super().__init__()
        self.channels = 2 * filters
        self.blocks = nn.Sequential(
            ResidualBlock(in_channels, filters),
            ResidualBlock(filters, filters),
            ResidualBlock(filters, 2 * filters, stride=2),
            ResidualBlock(2 * filters, 2 * filters),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class ResidualBlock(nn.Module):
    def __init__(self, channels: int, filters: int, stride: int = 1):
        super().__init__()
        self.conv1 = NormedConv(channels, filters, 3, stride, padding=1)
        self.conv2 = NormedConv(filters, filters, 3, padding=1)
        same = channels == filters and stride == 1
        self.shortcut = nn.Identity() if same else NormedConv(channels, filters, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv2(F.relu(self.conv1(x))) + self.shortcut(x))

"""The paper's networks {F, d1, d2, d3, d4}, a plain CNN to compare them with, and the Capsule-VAE.

Axes: n image, j class, d pose entry, p p pose matrix.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vbcaps.layers import Capsules, ClassCaps, ConvCaps, LayerTrace, PrimaryCaps, check_counts
from vbcaps.norm import BatchNorm2d
from vbcaps.routing import Posterior

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
        norm_logit: normalise the class logits by BatchNorm; those of the other layers always are.

    Shape:
        - Input: standardised images ``n in_channels height width``.
        - Output: `Capsules` of the classes: logits and activations ``n num_classes``, poses ``n num_classes p p``, the
          posterior with the axes ``n j``.

    Example:
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
        self.primary_caps = PrimaryCaps(self.stem.channels, d1, pose_size=pose_size, norm_pose=norm_pose)
        self.conv_caps1 = ConvCaps(d1, d2, 3, stride=2, **options)
        self.conv_caps2 = ConvCaps(d2, d3, 3, stride=1, **options)
        self.class_caps = ClassCaps(d3, num_classes, logit_scale=logit_scale, norm_logit=norm_logit, **options)
        self.register_load_state_dict_pre_hook(_rename_keys)

    def forward(self, x: Tensor) -> Capsules:  # n in_channels height width
        check_images(x, (self.in_channels, *self.image_size))
        caps = self.primary_caps(self.stem(x))
        caps = self.conv_caps1(caps, posterior=False)
        caps = self.conv_caps2(caps, posterior=False)
        return self.class_caps(caps)

    def trace(self, x: Tensor) -> "NetworkTrace":
        """Classify images by the readable reference, and keep what every layer did.

        Args:
            x: standardised images ``n in_channels height width``.

        Example:
            >>> net = CapsNet((8, 4, 4, 4), num_classes=3).eval()
            >>> trace = net.trace(torch.randn(2, 2, 32, 32))
            >>> for name, layer in trace.layers.items():
            ...     print(name, tuple(layer.votes.shape), tuple(layer.iterations[-1].r.shape))
            conv_caps1 (2, 36, 36, 4, 16) (2, 36, 36, 4)
            conv_caps2 (2, 16, 36, 4, 16) (2, 16, 36, 4)
            class_caps (2, 64, 3, 16) (2, 64, 3)
        """
        check_images(x, (self.in_channels, *self.image_size))
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


def current_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
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
        self.conv1 = _conv(self.stem.channels, d1, 1)
        self.conv2 = _conv(d1, d2, 3, stride=2)
        self.conv3 = _conv(d2, d3, 3)
        self.head = nn.Linear(d3, num_classes)

    def forward(self, x: Tensor) -> Scores:  # n in_channels height width
        logits = self.head(self.features(x))
        return Scores(logits, logits.sigmoid())

    def features(self, x: Tensor) -> Tensor:
        """Return what the linear classifier reads, the mean of the last filters over positions, ``n d3``."""
        check_images(x, (self.in_channels, *self.image_size))
        x = self.stem(x)
        for conv in (self.conv1, self.conv2, self.conv3):
            x = F.relu(conv(x))
        return x.mean((2, 3))


Network = CapsNet | ConvNet  # what a recipe trains


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


def check_images(x: Tensor, expected: tuple[int, ...]) -> None:  # n channels height width, and of one image
    empty = not torch.compiler.is_compiling() and len(x) == 0
    if x.ndim != 4 or x.shape[1:] != expected or empty:
        raise ValueError(f"images must have shape (n, {', '.join(map(str, expected))}), got {tuple(x.shape)}")
    if not x.is_floating_point():
        raise TypeError(f"images must be floating point, standardised, got {x.dtype}; `View.test` makes them so")


def make_stem(stem: str, in_channels: int, filters: int) -> "ConvStem | ResidualStem":
    return ConvStem(in_channels, filters) if stem == "conv" else ResidualStem(in_channels, filters)


def _conv(channels: int, filters: int, kernel: int, stride: int = 1, padding: int = 0) -> nn.Sequential:
    conv = nn.Conv2d(channels, filters, kernel, stride, padding, bias=False)
    nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    return nn.Sequential(conv, BatchNorm2d(filters))


class ConvStem(nn.Module):
    """5x5 of stride 2, then two padded 3x3, each with BatchNorm and ReLU: 32x32 becomes 14x14."""

    def __init__(self, in_channels: int, filters: int):
        super().__init__()
        self.channels = filters
        self.conv1 = _conv(in_channels, filters, 5, stride=2)
        self.conv2 = _conv(filters, filters, 3, padding=1)
        self.conv3 = _conv(filters, filters, 3, padding=1)

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
        self.conv1 = _conv(channels, filters, 3, stride, padding=1)
        self.conv2 = _conv(filters, filters, 3, padding=1)
        same = channels == filters and stride == 1
        self.shortcut = nn.Identity() if same else _conv(channels, filters, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv2(F.relu(self.conv1(x))) + self.shortcut(x))


class Reconstruction(NamedTuple):
    """The output of a `CapsVAE`: the network's capsules, and one class capsule decoded.

    Args:
        activations, poses, logits, posterior: of every class, see `Capsules`.
        images: the decoded images, ``n channels height width``.
        label: the class whose capsule was decoded, ``n``.
        code: the sample that was decoded, ``n d``.
        mean: the capsule's posterior mean, ``n d``.
        var: its variance, 1 / diag(E[Lambda]), ``n d``.
    """

    activations: Tensor
    poses: Tensor
    logits: Tensor
    posterior: Posterior
    images: Tensor
    label: Tensor
    code: Tensor
    mean: Tensor
    var: Tensor


SAMPLINGS = ("shortcut", "posterior")


class CapsVAE(nn.Module):
    r"""A Capsule-VAE: the class capsule's posterior is the latent code.

    In ``eval`` mode the code is the posterior mean $m_j$, in training a sample.

    Args:
        args, options: those of `CapsNet`; the routing must be ``"vb"``.
        sampling: how the code is drawn in training, one of the paper's two ways. ``"posterior"`` draws $\Lambda_j$ and
            then $\mu_j$ from the Gaussian-Gamma (Gaussian-Wishart) posterior; ``"shortcut"`` takes
            $m_j + \epsilon / \sqrt{\operatorname{diag} E[\Lambda_j]}$.
        filters: width of the decoder.

    Shape:
        - Input: images ``n in_channels height width`` and, where given, labels ``n``.
        - Output: `Reconstruction`.

    Example:
        >>> from vbcaps.losses import total_loss, vae_loss
        >>> vae = CapsVAE((32, 8, 8, 8), in_channels=1, num_classes=10, image_size=28)
        >>> images, labels = torch.rand(4, 1, 28, 28), torch.tensor([3, 1, 4, 1])
        >>> out = vae(images, labels)
        >>> loss = total_loss(F.cross_entropy(out.logits, labels), vae_loss(images, out))
        >>> vae.eval().tweak(images, dim=3, values=[-1.0, 0.0, 1.0]).shape
        torch.Size([3, 4, 1, 28, 28])
    """

    def __init__(self, *args: Any, sampling: str = "shortcut", filters: int = 64, **options: Any):
        super().__init__()
        if sampling not in SAMPLINGS:
            raise ValueError(f"sampling must be one of {SAMPLINGS}, got {sampling!r}")
        self.sampling = sampling
        self.net = CapsNet(*args, **options)
        routing = options.get("routing", args[4] if len(args) > 4 else "vb")
        if routing != "vb":
            raise ValueError(f"routing must be 'vb', whose posterior a CapsVAE samples from, got {routing!r}")
        self.decoder = Decoder(self.net, filters)

    def forward(self, x: Tensor, label: Tensor | None = None) -> Reconstruction:
        """Decode the capsule of ``label``, ``n`` of int64; without it that of the predicted class."""
        caps = self.net(x)
        label = caps.logits.argmax(1) if label is None else label
        if label.shape != x.shape[:1] or label.dtype != torch.int64:
            raise ValueError(f"label must be (n,) = ({len(x)},) of int64, got {tuple(label.shape)} of {label.dtype}")
        if not torch.compiler.is_compiling() and not 0 <= int(label.min()) <= int(label.max()) < self.net.num_classes:
            raise ValueError(
                f"label must lie from 0 to {self.net.num_classes - 1}, got {int(label.min())} to {int(label.max())}"
            )
        q, rows = caps.posterior, torch.arange(len(label), device=label.device)
        mean, var = q.m[rows, label], q.variance()[rows, label]
        code = mean
        if self.training and self.sampling == "posterior":
            code = q.sample()[0][rows, label]
        elif self.training:
            code = mean + torch.randn_like(mean) * var.sqrt()
        images = self.decoder(code, label)
        return Reconstruction(caps.activations, caps.poses, caps.logits, q, images, label, code, mean, var)

    def tweak(self, x: Tensor, dim: int, values: Sequence[float] | Tensor, label: Tensor | None = None) -> Tensor:
        """Decode ``x`` with one pose entry moved.

        Args:
            x: images ``n in_channels height width``.
            dim: the pose entry, from 0 to p p - 1.
            values: k numbers that are added to the posterior mean of that entry.
            label: as in ``forward``.

        Returns:
            Images ``k n in_channels height width``.
        """
        size = self.net.class_caps.pose_size**2
        if not 0 <= dim < size:
            raise ValueError(f"dim must be a pose entry from 0 to {size - 1}, got {dim}")
        out = self(x, label)
        shift = torch.eye(size, dtype=out.mean.dtype, device=out.mean.device)[dim]
        return torch.stack([self.decoder(out.mean + float(v) * shift, out.label) for v in values])


class Decoder(nn.Module):
    """Decode a class capsule to an image of the network's size by five transposed convolutions; others are masked."""

    def __init__(self, net: CapsNet, filters: int):
        super().__init__()
        if filters < 4:
            raise ValueError(f"filters must be at least 4, got {filters}")
        self.num_classes, self.image_size = net.num_classes, net.image_size
        first = (-(-net.image_size[0] // 16), -(-net.image_size[1] // 16))  # four doublings reach the image
        widths = (net.num_classes * net.class_caps.pose_size**2, filters, filters, filters // 2, filters // 4)
        self.deconv1 = nn.Sequential(nn.ConvTranspose2d(widths[0], widths[1], first), nn.ReLU())
        self.deconv2, self.deconv3, self.deconv4 = (
            nn.Sequential(nn.ConvTranspose2d(widths[k], widths[k + 1], 4, 2, 1), nn.ReLU()) for k in (1, 2, 3)
        )
        self.deconv5 = nn.ConvTranspose2d(widths[4], net.in_channels, 4, 2, 1)

    def forward(self, code: Tensor, label: Tensor) -> Tensor:  # n d, n
        mask = F.one_hot(label, self.num_classes).to(code.dtype)
        x = (mask[:, :, None] * code[:, None]).flatten(1)[..., None, None]  # n (j d) 1 1
        for deconv in (self.deconv1, self.deconv2, self.deconv3, self.deconv4, self.deconv5):
            x = deconv(x)
        return x[:, :, : self.image_size[0], : self.image_size[1]]

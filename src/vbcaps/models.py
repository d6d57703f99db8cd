"""The paper's networks {F, d1, d2, d3, d4}, a plain CNN to hold beside them, and the Capsule-VAE.

Axes: n image, j class, d pose entry, p p pose matrix.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vbcaps.layers import Capsules, ClassCaps, ConvCaps, PrimaryCaps, check_counts
from vbcaps.routing import Posterior

STEMS = ("conv", "residual")
IMAGE_SIZES = range(20, 257)


class CapsNet(nn.Module):
    """The paper's capsule network {F, d1, d2, d3, classes}.

    ``CapsNet(arch=(64, 16, 16, 16), in_channels=2, classes=5)`` is its best one for smallNORB.

    Arguments:
        arch: filters of the stem, then types of PrimaryCaps and of the two ConvCaps.
        in_channels, classes: of the images.
        image_size: a number or (height, width), from 20 to 256.
        routing: ``"vb"``, ``"em"`` or ``"dynamic"``, with ``routing_options`` for each capsule layer.
        stem: ``"conv"``, a 5x5 convolution of stride 2 and two of 3x3; or ``"residual"``, four residual blocks.
        pose: poses are ``pose x pose`` matrices.
        init, gain, noise, norm_pose, backend: see ``ConvCaps``.
        logit_scale: learn a factor on the class logits. BatchNorm without affine keeps them near unit size, so a
            loss on the logits needs it (``losses.nll_loss``).
    """

    def __init__(
        self,
        arch: Sequence[int] = (64, 16, 16, 16),
        in_channels: int = 2,
        classes: int = 5,
        image_size: int | tuple[int, int] = 32,
        routing: str = "vb",
        stem: str = "conv",
        *,
        routing_options: Mapping[str, Any] | None = None,
        pose: int = 4,
        init: str = "glorot",
        gain: float = 1.0,
        noise: float = 0.01,
        norm_pose: bool = True,
        logit_scale: bool = False,
        backend: str = "auto",
    ):
        super().__init__()
        self.arch, self.image_size = check_network(arch, in_channels, classes, image_size, stem)
        self.in_channels, self.classes = in_channels, classes

        _, d1, d2, d3 = self.arch
        options: dict[str, Any] = dict(
            pose=pose,
            routing=routing,
            routing_options=routing_options,
            init=init,
            gain=gain,
            noise=noise,
            norm_pose=norm_pose,
            backend=backend,
        )
        self.stem = make_stem(stem, in_channels, self.arch[0])
        self.primary_caps = PrimaryCaps(self.stem.channels, d1, pose=pose, norm_pose=norm_pose)
        self.conv_caps1 = ConvCaps(d1, d2, 3, stride=2, **options)
        self.conv_caps2 = ConvCaps(d2, d3, 3, stride=1, **options)
        self.class_caps = ClassCaps(d3, classes, **options)
        self.scale = nn.Parameter(torch.ones(())) if logit_scale else None

    def forward(self, x: Tensor) -> Capsules:  # n in_channels height width
        """``.logits`` and ``.activations`` as ``n classes``, ``.poses`` as ``n classes p p``, ``.posterior``."""
        check_images(x, (self.in_channels, *self.image_size))
        caps = self.primary_caps(self.stem(x))
        caps = self.conv_caps1(caps.activations, caps.poses, posterior=False)
        caps = self.conv_caps2(caps.activations, caps.poses, posterior=False)
        caps = self.class_caps(caps.activations, caps.poses)
        logits = caps.logits.flatten(1)
        logits = logits if self.scale is None else logits * self.scale
        return Capsules(logits, logits.sigmoid(), caps.poses.flatten(1, 3), caps.posterior)


class Scores(NamedTuple):
    """What a ``ConvNet`` gives: of ``Capsules`` the part that every classifier has."""

    logits: Tensor  # n classes
    activations: Tensor  # n classes   their sigmoid


class ConvNet(nn.Module):
    """A plain CNN in the shape of ``CapsNet``: the same stem, the same fields, and filters in place of capsules.

    ``ConvNet((64, 64, 72, 72), in_channels=1, classes=10, image_size=40)`` learns 169K numbers, as many as the capsule
    network {64,16,16,16,10}. After the stem come convolutions of 1x1, 3x3 of stride 2 and 3x3, each with BatchNorm and
    ReLU, then the mean over positions and a linear classifier. To be trained by ``nll_loss(on="logits")``.

    Arguments:
        arch: filters of the stem, then of the three convolutions.
        in_channels, classes, image_size, stem: see ``CapsNet``.
    """

    def __init__(
        self,
        arch: Sequence[int] = (64, 64, 72, 72),
        in_channels: int = 2,
        classes: int = 5,
        image_size: int | tuple[int, int] = 32,
        stem: str = "conv",
    ):
        super().__init__()
        self.arch, self.image_size = check_network(arch, in_channels, classes, image_size, stem)
        self.in_channels, self.classes = in_channels, classes
        _, d1, d2, d3 = self.arch
        self.stem = make_stem(stem, in_channels, self.arch[0])
        self.conv1 = _conv(self.stem.channels, d1, 1)
        self.conv2 = _conv(d1, d2, 3, stride=2)
        self.conv3 = _conv(d2, d3, 3)
        self.head = nn.Linear(d3, classes)

    def forward(self, x: Tensor) -> Scores:  # n in_channels height width
        check_images(x, (self.in_channels, *self.image_size))
        x = self.stem(x)
        for conv in (self.conv1, self.conv2, self.conv3):
            x = F.relu(conv(x))
        logits = self.head(x.mean((2, 3)))
        return Scores(logits, logits.sigmoid())


Network = CapsNet | ConvNet  # what a recipe trains


def check_network(
    arch: Sequence[int], in_channels: int, classes: int, image_size: int | tuple[int, int], stem: str
) -> tuple[tuple[int, ...], tuple[int, int]]:
    """Hold the arguments of a network to what they may be; ``arch`` and (height, width) as tuples."""
    if not isinstance(arch, tuple | list) or len(arch) != 4 or not all(isinstance(k, int) and k >= 1 for k in arch):
        raise ValueError(f"arch must be four positive numbers (F, d1, d2, d3), got {arch!r}")
    check_counts(in_channels=in_channels, classes=classes)
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
    return nn.Sequential(conv, nn.BatchNorm2d(filters))


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
    """What a ``CapsVAE`` gives: the network's capsules, and one class capsule decoded."""

    logits: Tensor  # n classes
    activations: Tensor  # n classes
    poses: Tensor  # n classes p p
    posterior: Posterior
    images: Tensor  # n channels height width
    label: Tensor  # n     the class whose capsule was decoded
    code: Tensor  # n d    the sample that was decoded
    mean: Tensor  # n d    m_j of that class
    var: Tensor  # n d     sigma_j^2 = 1 / diag(E[Lambda_j])


SAMPLINGS = ("shortcut", "posterior")


class CapsVAE(nn.Module):
    """A Capsule-VAE: the class capsule's posterior is the latent code.

    ``sampling`` of the code while training, the paper's two ways: ``"posterior"`` draws Lambda_j and then mu_j from the
    Gaussian-Wishart (Gaussian-Gamma) posterior; ``"shortcut"`` takes ``m_j + eps / sqrt(diag E[Lambda_j])``. In
    ``eval`` mode the code is ``m_j``. All other arguments are those of ``CapsNet``; the routing must be ``"vb"``.
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
        """Decode the capsule of ``label`` (``n``, long) where given, of the predicted class where not."""
        caps = self.net(x)
        label = caps.logits.argmax(1) if label is None else label
        if label.shape != x.shape[:1] or label.dtype != torch.int64:
            raise ValueError(f"label must be (n,) = ({len(x)},) of int64, got {tuple(label.shape)} of {label.dtype}")
        if not torch.compiler.is_compiling() and not 0 <= int(label.min()) <= int(label.max()) < self.net.classes:
            raise ValueError(
                f"label must lie from 0 to {self.net.classes - 1}, got {int(label.min())} to {int(label.max())}"
            )
        q = of_class(caps.posterior, label)
        mean, var = q.m[:, 0, 0], q.variance()[:, 0, 0]
        code = mean
        if self.training:
            code = (
                q.sample()[0][:, 0, 0] if self.sampling == "posterior" else mean + torch.randn_like(mean) * var.sqrt()
            )
        images = self.decoder(code, label)
        return Reconstruction(caps.logits, caps.activations, caps.poses, caps.posterior, images, label, code, mean, var)

    def tweak(self, x: Tensor, dim: int, values: Sequence[float] | Tensor, label: Tensor | None = None) -> Tensor:
        """Images ``k n channels height width``: what x decodes to when pose entry ``dim`` is moved by each value."""
        size = self.net.class_caps.pose**2
        if not 0 <= dim < size:
            raise ValueError(f"dim must be a pose entry from 0 to {size - 1}, got {dim}")
        out = self(x, label)
        shift = torch.eye(size, dtype=out.mean.dtype, device=out.mean.device)[dim]
        return torch.stack([self.decoder(out.mean + float(v) * shift, out.label) for v in values])


def of_class(q: Posterior, label: Tensor) -> Posterior:
    """The posterior of one class capsule per image: ``n 1 1``, ``n 1 1 d``, ``n 1 1 d e``, and r as ``n 1 i 1``."""
    rows = torch.arange(len(label), device=label.device)
    of_j = {name: getattr(q, name)[rows, :, label][:, :, None] for name in ("alpha", "m", "kappa", "psi", "nu")}
    return Posterior(**of_j, r=q.r[rows, :, :, label][..., None])


class Decoder(nn.Module):
    """Five transposed convolutions from a class capsule (the others masked) to an image of the network's size."""

    def __init__(self, net: CapsNet, filters: int):
        super().__init__()
        if filters < 4:
            raise ValueError(f"filters must be at least 4, got {filters}")
        self.classes, self.image_size = net.classes, net.image_size
        first = (-(-net.image_size[0] // 16), -(-net.image_size[1] // 16))  # four doublings reach the image
        widths = (net.classes * net.class_caps.pose**2, filters, filters, filters // 2, filters // 4)
        self.deconv1 = nn.Sequential(nn.ConvTranspose2d(widths[0], widths[1], first), nn.ReLU())
        self.deconv2, self.deconv3, self.deconv4 = (
            nn.Sequential(nn.ConvTranspose2d(widths[k], widths[k + 1], 4, 2, 1), nn.ReLU()) for k in (1, 2, 3)
        )
        self.deconv5 = nn.ConvTranspose2d(widths[4], net.in_channels, 4, 2, 1)

    def forward(self, code: Tensor, label: Tensor) -> Tensor:  # n d, n
        mask = F.one_hot(label, self.classes).to(code.dtype)
        x = (mask[:, :, None] * code[:, None]).flatten(1)[..., None, None]  # n (classes d) 1 1
        for deconv in (self.deconv1, self.deconv2, self.deconv3, self.deconv4, self.deconv5):
            x = deconv(x)
        return x[:, :, : self.image_size[0], : self.image_size[1]]

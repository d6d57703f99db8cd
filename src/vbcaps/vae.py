"""The Capsule-VAE: a capsule network whose class capsule is decoded to an image.

Axes: n image, j class, d pose entry.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vbcaps.distributions import normal_from_uniform, sample_gaussian_gamma
from vbcaps.models import CapsNet, ConvNet
from vbcaps.routing import Posterior

SAMPLINGS = ("shortcut", "posterior")
SOURCES = ("class", "prior")


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
        >>> vae.sample(torch.tensor([7, 7])).shape
        torch.Size([2, 1, 28, 28])
    """

    code_mean: Tensor
    code_root: Tensor

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
        # The codes of each class as a Gaussian, which `fit_codes` sets; until then it is the prior N(0, I).
        j, d = self.net.num_classes, self.code_size
        self.register_buffer("code_mean", torch.zeros(j, d))
        self.register_buffer("code_root", torch.eye(d).repeat(j, 1, 1))

    @property
    def in_channels(self) -> int:
        """Return the number of channels of the images."""
        return self.net.in_channels

    @property
    def num_classes(self) -> int:
        """Return the number of classes."""
        return self.net.num_classes

    @property
    def code_size(self) -> int:
        """Return the number of entries of a code, those of a pose."""
        return self.net.class_caps.pose_size**2

    @property
    def draws(self) -> int:
        """Return how many uniform numbers ``forward`` needs for the code of one image."""
        return self.code_size * (2 if self.sampling == "posterior" else 1)

    def forward(self, x: Tensor, label: Tensor | None = None, u: Tensor | None = None) -> Reconstruction:
        """Classify images, and decode a class capsule of each.

        Args:
            x: images ``n in_channels height width``.
            label: the class whose capsule is decoded, ``n`` of int64; without it the predicted class.
            u: in training, uniform random numbers in [0, 1) that decide the samples, ``n draws``; without them torch's
                random numbers.
        """
        caps = self.net(x)
        if label is None:
            label = caps.logits.argmax(1)
        else:
            self.check_label(label, len(x))
        q, rows = caps.posterior, torch.arange(len(label), device=label.device)
        mean, var = q.m[rows, label], q.variance()[rows, label]
        code = self.draw(q, rows, label, u) if self.training else mean
        images = self.decoder(code, label)
        return Reconstruction(caps.activations, caps.poses, caps.logits, q, images, label, code, mean, var)

    def draw(self, q: Posterior, rows: Tensor, label: Tensor, u: Tensor | None) -> Tensor:
        """Draw the code of each image, ``n d``, in the way that ``sampling`` names."""
        if u is not None and u.shape != (len(label), self.draws):
            raise ValueError(f"u must be (n, draws) = ({len(label)}, {self.draws}), got {tuple(u.shape)}")
        m = q.m[rows, label]
        if self.sampling == "shortcut":
            noise = torch.randn_like(m) if u is None else normal_from_uniform(u).to(m.dtype)
            return m + noise * q.variance()[rows, label].sqrt()
        if u is None:
            return q.sample()[0][rows, label]
        if q.full:
            raise ValueError("u decides samples of a diagonal precision only: give precision='gamma', or no u")
        mu, _ = sample_gaussian_gamma(m, q.kappa[rows, label], q.psi[rows, label], q.nu[rows, label], u)
        return mu

    def check_label(self, label: Tensor, count: int) -> None:
        """Raise an error if ``label`` does not name a class for each of ``count`` images."""
        if label.shape != (count,) or label.dtype != torch.int64:
            raise ValueError(f"label must be (n,) = ({count},) of int64, got {tuple(label.shape)} of {label.dtype}")
        # A compiled or captured step must not wait for the device.
        hidden = torch.compiler.is_compiling() or (label.is_cuda and torch.cuda.is_current_stream_capturing())
        if not hidden and count and not 0 <= int(label.min()) <= int(label.max()) < self.num_classes:
            raise ValueError(
                f"label must lie from 0 to {self.num_classes - 1}, got {int(label.min())} to {int(label.max())}"
            )

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
        if not 0 <= dim < self.code_size:
            raise ValueError(f"dim must be a pose entry from 0 to {self.code_size - 1}, got {dim}")
        out = self(x, label)
        shift = torch.eye(self.code_size, dtype=out.mean.dtype, device=out.mean.device)[dim]
        return torch.stack([self.decoder(out.mean + float(v) * shift, out.label) for v in values])

    def sample(self, label: Tensor, source: str = "class", generator: torch.Generator | None = None) -> Tensor:
        """Decode codes that no image had.

        Args:
            label: the class of each sample, ``n`` of int64.
            source: ``"class"``: the Gaussian of the codes of the training images of that class, see `fit_codes`.
                ``"prior"``: the paper's prior N(0, I).
            generator: torch's generator of random numbers on the CPU; without it the global one.

        Returns:
            Images ``n in_channels height width``.
        """
        if source not in SOURCES:
            raise ValueError(f"source must be one of {SOURCES}, got {source!r}")
        self.check_label(label, len(label))
        noise = torch.randn(len(label), self.code_size, generator=generator).to(self.code_mean)
        if source == "class":
            noise = self.code_mean[label] + (self.code_root[label] @ noise[..., None])[..., 0]
        return self.decoder(noise, label)

    @torch.no_grad()
    def fit_codes(self, codes: Tensor, labels: Tensor) -> None:
        """Set the Gaussian of each class to mean and covariance of these codes.

        Args:
            codes: posterior means of training images, each of the capsule of its own class, ``n d``.
            labels: their classes, ``n``. A class with no image keeps the prior N(0, I).
        """
        for j in labels.unique().tolist():
            mine = codes[labels == j].double()
            centred = mine - mine.mean(0)
            values, vectors = torch.linalg.eigh(centred.mT @ centred / len(mine))
            self.code_mean[j] = mine.mean(0)
            self.code_root[j] = vectors * values.clamp_min(0).sqrt()


class Decoder(nn.Module):
    """Decode a class capsule to an image of the network's size by five transposed convolutions; others are masked.

    Initial weights keep the scale of the code up to the image (He et al. 2015, with the inputs that each output sees).
    PyTorch's own are so small that the image hardly depends on the code, and training stays long at the mean image.
    """

    def __init__(self, net: CapsNet, filters: int):
        super().__init__()
        if filters < 4:
            raise ValueError(f"filters must be at least 4, got {filters}")
        self.num_classes, self.image_size = net.num_classes, net.image_size
        first = (-(-net.image_size[0] // 16), -(-net.image_size[1] // 16))  # four doublings reach the image
        size = net.class_caps.pose_size**2
        # An output sees the entries of one class in the first layer, and 2 x 2 of the 4 x 4 taps in the others.
        f1, f2, f3 = filters, filters // 2, filters // 4
        self.deconv1 = nn.Sequential(_deconv(net.num_classes * size, f1, first, inputs=size), nn.ReLU())
        self.deconv2 = nn.Sequential(_deconv(f1, f1, (4, 4), 2, 1, inputs=4 * f1), nn.ReLU())
        self.deconv3 = nn.Sequential(_deconv(f1, f2, (4, 4), 2, 1, inputs=4 * f1), nn.ReLU())
        self.deconv4 = nn.Sequential(_deconv(f2, f3, (4, 4), 2, 1, inputs=4 * f2), nn.ReLU())
        self.deconv5 = _deconv(f3, net.in_channels, (4, 4), 2, 1, inputs=8 * f3)  # no ReLU follows, which halves

    def forward(self, code: Tensor, label: Tensor) -> Tensor:  # n d, n
        mask = F.one_hot(label, self.num_classes).to(code.dtype)
        x = (mask[:, :, None] * code[:, None]).flatten(1)[..., None, None]  # n (j d) 1 1
        for deconv in (self.deconv1, self.deconv2, self.deconv3, self.deconv4, self.deconv5):
            x = deconv(x)
        return x[:, :, : self.image_size[0], : self.image_size[1]]


def _deconv(
    channels: int, filters: int, kernel: tuple[int, int], stride: int = 1, padding: int = 0, *, inputs: int
) -> nn.ConvTranspose2d:
    layer = nn.ConvTranspose2d(channels, filters, kernel, stride, padding)
    nn.init.normal_(layer.weight, std=(2 / inputs) ** 0.5)
    assert layer.bias is not None
    nn.init.zeros_(layer.bias)
    return layer


Network = CapsNet | ConvNet | CapsVAE  # what a recipe trains


def capsules_of(net: Network) -> CapsNet | None:
    """Return the capsule network that a network is or contains; None for a CNN."""
    return net.net if isinstance(net, CapsVAE) else net if isinstance(net, CapsNet) else None

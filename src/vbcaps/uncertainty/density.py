"""A Gaussian density of what a network computes for an image: images far from all classes are strangers.

Axes: n image, f feature, c class.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from vbcaps.uncertainty.metrics import check_labels

SHRINK = 1e-3  # share of the mean variance that is added to every variance, so that each covariance has an inverse


class Density(NamedTuple):
    r"""A mixture of Gaussians over features, one for each class: $p(x) = \sum_c \pi_c N(x \mid \mu_c, \Sigma_c)$.

    Args:
        log_share: $\ln \pi_c$, ``c``.
        mean: ``c f``.
        whiten: the inverse of the Cholesky factor of each covariance, ``c f f``; of a tied one ``1 f f``.
        centre, spread: ``f``. Features are first brought to mean 0 and variance 1.
    """

    log_share: Tensor
    mean: Tensor
    whiten: Tensor
    centre: Tensor
    spread: Tensor

    @property
    def tied(self) -> bool:
        """Whether all classes have one covariance."""
        return len(self.whiten) == 1

    def log_prob(self, features: Tensor) -> Tensor:
        r"""Return $\ln p(x)$ of each image's features, ``n f``, in the units of the standardised features."""
        if features.ndim != 2 or features.shape[1] != self.mean.shape[1]:
            raise ValueError(
                f"the density is of {self.mean.shape[1]} features, got {tuple(features.shape)}: fit it again with the "
                "network that it is used with"
            )
        x = (features.double() - self.centre.double()) / self.spread.double()
        whiten, mean = self.whiten.double(), self.mean.double()
        if self.tied:  # whitened once, for all classes
            white, centres = x @ whiten[0].T, mean @ whiten[0].T
            distance = (white[:, None] - centres).square().sum(2)  # n c
        else:
            each = zip(mean, whiten, strict=True)
            distance = torch.stack([((x - m) @ W.T).square().sum(1) for m, W in each], 1)
        logdet = whiten.diagonal(dim1=1, dim2=2).log().sum(1)
        log_each = self.log_share.double() - 0.5 * distance + logdet - 0.5 * x.shape[1] * math.log(2 * math.pi)
        return log_each.logsumexp(1)


def fit_density(features: Tensor, labels: Tensor, classes: int, *, tied: bool = True) -> Density:
    """Fit a Gaussian to the features of each class.

    Args:
        features: of training images, ``n f``.
        labels: their classes, ``n`` of int64.
        classes: how many classes the network has.
        tied: one covariance for all classes, else one for each.

    Example:
        >>> x, y = torch.randn(200, 3), torch.arange(200) % 2
        >>> density = fit_density(x, y, classes=2)
        >>> bool(density.log_prob(torch.zeros(1, 3)) > density.log_prob(torch.full((1, 3), 9.0)))
        True
    """
    check_labels(labels)
    if features.ndim != 2 or labels.shape != features.shape[:1]:
        raise ValueError(
            f"expected features (n, f) and labels (n,), got {tuple(features.shape)} and {tuple(labels.shape)}"
        )
    if not bool(features.isfinite().all()):
        raise ValueError("features must be finite, got NaN or infinity")
    check_labels(labels, classes)
    counts = torch.bincount(labels, minlength=classes)
    if int(counts.min()) < 2:
        raise ValueError(
            f"a density of {classes} classes needs at least two images of each, there are {counts.tolist()}: give "
            "more training images"
        )
    x = features.double()
    centre, spread = x.mean(0), x.std(0).clamp_min(1e-6)
    x = (x - centre) / spread
    mean = torch.stack([x[labels == c].mean(0) for c in range(classes)])
    gap = x - mean[labels]
    groups = [gap] if tied else [gap[labels == c] for c in range(classes)]
    whiten = torch.stack([_whiten(group, len(group) - (classes if tied else 1)) for group in groups])
    log_share = (counts.double() / counts.sum()).log()
    return Density(*(t.float() for t in (log_share, mean, whiten, centre, spread)))


def _whiten(gap: Tensor, freedom: int) -> Tensor:
    """Return the inverse Cholesky factor of a covariance, shrunk towards its diagonal as far as the sample is small."""
    f = gap.shape[1]
    covariance = gap.T @ gap / max(freedom, 1)
    share = f / (f + len(gap))  # half where there are as many features as images
    diagonal = torch.diag_embed(covariance.diagonal())
    floor = SHRINK * covariance.diagonal().mean().clamp_min(1e-12)
    covariance = (1 - share) * covariance + share * diagonal + floor * torch.eye(f, dtype=gap.dtype, device=gap.device)
    return torch.linalg.inv(torch.linalg.cholesky(covariance)).tril()


def pack_densities(densities: Mapping[str, Density]) -> dict[str, Tensor]:
    """Return the tensors of densities by name, as a weights file keeps them: of a triangular matrix the one half.

    >>> pack_densities({})
    {}
    """
    return {
        f"{name}.{field}": _lower(x) if field == "whiten" else x
        for name, density in densities.items()
        for field, x in density._asdict().items()
    }


def unpack_densities(tensors: Mapping[str, Tensor]) -> dict[str, Density]:
    """Return the densities whose tensors ``pack_densities`` named."""
    names = sorted({name.rpartition(".")[0] for name in tensors})
    found = {name: Density(*(tensors[f"{name}.{field}"] for field in Density._fields)) for name in names}
    return {name: density._replace(whiten=_square(density.whiten)) for name, density in found.items()}


def _lower(whiten: Tensor) -> Tensor:
    """Return the lower triangles of ``c f f`` as ``c f(f+1)/2``."""
    row, column = torch.tril_indices(*whiten.shape[1:])
    return whiten[:, row, column]


def _square(whiten: Tensor) -> Tensor:
    """Return the matrices ``c f f`` of lower triangles; those of files of earlier versions are square already."""
    if whiten.ndim == 3:
        return whiten
    f = math.isqrt(2 * whiten.shape[1])  # f(f+1) lies between f^2 and (f+1)^2
    row, column = torch.tril_indices(f, f)
    square = whiten.new_zeros(len(whiten), f, f)
    square[:, row, column] = whiten
    return square

r"""Probabilities of classes: a temperature for the logits, and two ways to carry the posterior's uncertainty into them.

The default everywhere is the softmax of the logits over a temperature T, fitted on images that the network was not
trained on. In networks that are trained in the usual way the posterior's noise in the logits is large and says little
about the image, so that probabilities with it are mostly worse: docs/uncertainty.md has the comparison.

Axes: n image, c class (a parent type j of the class layer), s sample.
"""

import math

import torch
from torch import Tensor

from vbcaps.distributions import LN2PI, expected_log_pi
from vbcaps.layers import Capsules, ClassCaps
from vbcaps.losses import binary_cross_entropy
from vbcaps.routing import Posterior
from vbcaps.routing.vb import VBRouting, activation_logit, expected_logdet
from vbcaps.uncertainty.metrics import check_labels

COOLEST, HOTTEST = 0.02, 50.0  # the range of temperatures
GRID, ROUNDS = 33, 4  # each round searches a grid, and the next one between the neighbours of its best point


def fit_temperature(logits: Tensor, labels: Tensor) -> float:
    r"""Return the T in [0.02, 50] with the least negative log likelihood of $\operatorname{softmax}(z / T)$.

    For images of several objects it is that of $\sigma(z_j / T)$, the probabilities that each class is there.

    Args:
        logits: of images that the network was not trained on, ``n c``; log probabilities do as well for the softmax,
            if finite.
        labels: their classes, ``n`` of int64; or ``n k``, the classes of the k objects in each image.

    Example:
        >>> sure = 3 * torch.eye(2)[[0, 0, 1, 1]]  # of four answers, one is wrong
        >>> round(fit_temperature(sure, torch.tensor([0, 0, 1, 0])), 2)  # softmax(3 / 2.73) has 3/4 for the answer
        2.73
    """
    check_labels(labels)
    if logits.ndim != 2 or labels.ndim not in (1, 2) or len(labels) != len(logits) or len(labels) == 0:
        raise ValueError(
            "a temperature is fitted to logits (n, classes) and labels (n,) or (n, k) of at least one image, got "
            f"{tuple(logits.shape)} and {tuple(labels.shape)}"
        )
    z = logits.detach().double()
    if not bool(z.isfinite().all()):  # the logarithm of a probability that was rounded to 0 fits no temperature
        raise ValueError("logits must be finite, got NaN or infinity; give logits, or clamp probabilities above 0")
    check_labels(labels, logits.shape[1])
    loss = torch.nn.functional.cross_entropy if labels.ndim == 1 else binary_cross_entropy
    low, high = math.log(COOLEST), math.log(HOTTEST)
    for _ in range(ROUNDS):
        grid = torch.linspace(low, high, GRID, dtype=torch.float64).tolist()
        losses = [float(loss(z / math.exp(t), labels)) for t in grid]
        best = min(range(GRID), key=losses.__getitem__)
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, GRID - 1)]
    return math.exp(grid[best])


def sampled_probabilities(layer: ClassCaps, out: Capsules, samples: int = 32, temperature: float = 1.0) -> Tensor:
    r"""Return the mean of the softmax over samples of the class capsules, ``n c``.

    Args:
        layer, out, samples, temperature: see `probability_samples`.

    Example:
        >>> from vbcaps import CapsNet
        >>> net = CapsNet(num_classes=5).eval()
        >>> p = sampled_probabilities(net.class_caps, net(torch.randn(2, 2, 32, 32)))
        >>> p.shape, bool((p.sum(1) - 1).abs().max() < 1e-5)
        (torch.Size([2, 5]), True)
    """
    return probability_samples(layer, out, samples, temperature).mean(0)


def probability_samples(
    layer: ClassCaps,
    out: Capsules,
    samples: int = 32,
    temperature: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    r"""Return the softmax of each sample of the class capsules, ``s n c``; their quantiles are credible intervals.

    Each sample draws $\pi$ and $\Lambda_j$ from the posterior, and activates the capsules by them in place of their
    expectations.

    Args:
        layer: the class layer, in eval mode.
        out: its output, with the posterior.
        samples: how many to draw.
        temperature: divides the logits.
        generator: torch's generator of random numbers on the posterior's device; without it the global one.

    Example:
        >>> from vbcaps import CapsNet
        >>> net = CapsNet(num_classes=5).eval()
        >>> p = probability_samples(net.class_caps, net(torch.randn(2, 2, 32, 32)), samples=100)
        >>> low, high = p.quantile(torch.tensor([0.05, 0.95]), 0)
        >>> low.shape, bool((low <= high).all())
        (torch.Size([2, 5]), True)
    """
    routing, q = _of_vb(layer, out)
    if samples < 1:
        raise ValueError(f"samples must be at least 1, got {samples}")

    def gamma(shape: Tensor) -> Tensor:
        return torch._standard_gamma(shape.contiguous(), generator=generator).clamp_min(1e-30)

    alpha = gamma(q.alpha.expand(samples, *q.alpha.shape))  # s n c
    log_pi = alpha.log() - alpha.sum(-1, keepdim=True).log()
    Lambda = gamma((q.nu[..., None] / 2).expand(samples, *q.psi.shape))  # over 2 psi, s n c d
    lndet = (Lambda.log() + math.log(2.0) + q.psi.log()).sum(-1)
    gap = _raw(routing, q, log_pi, lndet) - _raw(routing, q, expected_log_pi(q.alpha), expected_logdet(q, "gamma"))
    return ((out.logits + _gain(layer) * gap) / temperature).softmax(-1)


def mean_field_probabilities(layer: ClassCaps, out: Capsules, temperature: float = 1.0) -> Tensor:
    r"""Return $\operatorname{softmax}(z_j / \sqrt{T^2 + \pi s_j^2 / 8})$, ``n c``: the closed form.

    It is the probit approximation of the softmax of a Gaussian logit (MacKay 1992). The variance is that of
    $\ln \pi_j$ and $\ln|\Lambda_j|$, $\psi'(\alpha_j) - \psi'(\sum_j \alpha_j)$ and $D \psi'(\nu_j / 2)$, through the
    rule of the activation, linearised at the expectations.

    Args:
        layer, out, temperature: see `probability_samples`.

    Example:
        >>> from vbcaps import CapsNet
        >>> net = CapsNet(num_classes=5).eval()
        >>> p = mean_field_probabilities(net.class_caps, net(torch.randn(2, 2, 32, 32)))
        >>> p.shape, bool((p.sum(1) - 1).abs().max() < 1e-5)
        (torch.Size([2, 5]), True)
    """
    routing, q = _of_vb(layer, out)
    E_ln_pi, E_lndet = expected_log_pi(q.alpha), expected_logdet(q, "gamma")
    var_ln_pi = torch.polygamma(1, q.alpha) - torch.polygamma(1, q.alpha.sum(-1, keepdim=True))
    var_lndet = q.m.shape[-1] * torch.polygamma(1, q.nu / 2)
    by_ln_pi, by_lndet = _slopes(routing, q, E_ln_pi, E_lndet)
    var = _gain(layer).square() * (by_ln_pi.square() * var_ln_pi + by_lndet.square() * var_lndet)
    return (out.logits / (temperature**2 + math.pi / 8 * var).sqrt()).softmax(-1)


def votes_of(q: Posterior) -> Tensor:
    r"""Return $r_j = \kappa_j - \kappa_0$, the votes that each parent took."""
    return (q.kappa - q.prior.kappa0).clamp_min(0)


def _raw(routing: VBRouting, q: Posterior, ln_pi: Tensor, lndet: Tensor) -> Tensor:
    """Return the logit of the activation before BatchNorm, without its offset beta_a."""
    return activation_logit(routing.activation, q, votes_of(q), ln_pi, lndet, 0.0, routing.beta_u)


def _slopes(routing: VBRouting, q: Posterior, ln_pi: Tensor, lndet: Tensor) -> tuple[Tensor, Tensor]:
    r"""Return the sizes of the logit's derivatives by $\ln \pi_j$ and $\ln|\Lambda_j|$."""
    votes = votes_of(q)
    if routing.activation == "agreement":
        return votes, 0.5 * votes
    if routing.activation == "paper":
        return votes, votes
    share = ln_pi.exp()
    return share * 0.5 * (q.m.shape[-1] * (1 + LN2PI) - lndet), -0.5 * share


def _gain(layer: ClassCaps) -> Tensor:
    """Return what BatchNorm in eval mode and the learned scale multiply each logit by, ``c``."""
    norm = layer.norm_a
    gain = torch.ones(()) if norm is None else (norm.running_var + norm.eps).rsqrt()
    return gain if layer.scale is None else gain * layer.scale


def _of_vb(layer: ClassCaps, out: Capsules) -> tuple[VBRouting, Posterior]:
    if not isinstance(layer.routing, VBRouting) or not isinstance(out.posterior, Posterior):
        raise ValueError("samples of class capsules need VB routing: other routings have no posterior; use the softmax")
    if layer.routing.activation == "information":
        raise ValueError(
            "samples of class capsules need a logit of ln pi and ln|Lambda|; activation='information' is a divergence "
            "of the whole posterior and has none to sample: use the softmax"
        )
    if out.posterior.full:
        raise ValueError("samples of class capsules need a diagonal precision, 'gamma' or 'wishart'; got 'full'")
    return layer.routing, out.posterior

r"""Losses: which one goes with which output of a network.

=====================================================================  ==============================================
``F.cross_entropy(out.logits, y)``                                     the usual choice; logits have a learned scale
``activation_nll_loss(out.activations, y)``                            the released code's loss; it bounds itself
``spread_loss(out.activations, y, margin)``                            the loss of matrix capsules with EM routing
``binary_cross_entropy(out.logits, y)``                                several classes in an image, as `overlap` has
``evidence_loss(out.posterior, y)``                                    beside one of these: votes count as evidence
``total_loss(F.cross_entropy(out.logits, y), vae_loss(images, out))``  for a `CapsVAE`
=====================================================================  ==============================================

Axes: n image, j class. Activations lie in (0, 1), logits anywhere.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vbcaps.distributions import expected_log_pi
from vbcaps.layers import RoutingResult
from vbcaps.routing import Posterior
from vbcaps.vae import Reconstruction


def cross_entropy(
    logits: Tensor, target: Tensor, *, weight: Tensor | None = None, label_smoothing: float = 0.0
) -> Tensor:
    """Return ``F.cross_entropy``, except that ``weight`` gives the mean over the images of their weighted losses.

    ``F.cross_entropy`` divides by the weights in the batch, so that an image counts more the fewer rare images are in
    the same batch, and processes that share a batch do not agree.

    Args:
        logits: ``n j``.
        target: class numbers, ``n`` of int64; or the share of each class in each image, ``n j``.
        weight: of each class, ``j``.
        label_smoothing: as in ``F.cross_entropy``.

    Example:
        >>> logits = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
        >>> print(f"{cross_entropy(logits, torch.tensor([0, 1]), weight=torch.tensor([0.0, 2.0])):.3f}")
        0.693
    """
    if weight is None:
        return F.cross_entropy(logits, target, label_smoothing=label_smoothing)
    total = F.cross_entropy(logits, target, weight, label_smoothing=label_smoothing, reduction="sum")
    return total / len(logits)


def activation_nll_loss(
    activations: Tensor, target: Tensor, *, weight: Tensor | None = None, label_smoothing: float = 0.0
) -> Tensor:
    r"""Return the released code's $L_{NLL} = -\sum_j y_j \ln \operatorname{softmax}(a)_j$, the mean over the batch.

    The softmax is over activations in (0, 1). So the loss cannot fall below $\ln(1 + (J - 1)/e)$, 0.905 for 5 classes,
    and a network that is sure of an image learns little more from it.

    Args:
        activations: ``n j``, in (0, 1).
        target: class numbers, ``n`` of int64; or the share of each class in each image, ``n j``.
        weight: of each class, ``j``, as in ``cross_entropy``.
        label_smoothing: how much of the target's 1 is given to all classes alike, as in ``F.cross_entropy``.

    Example:
        >>> sure = torch.tensor([[1.0, 0.0, 0.0, 0.0, 0.0]])
        >>> print(f"{activation_nll_loss(sure, torch.tensor([0])):.3f}")
        0.905
    """
    if not 0 <= label_smoothing < 1:
        raise ValueError(f"label_smoothing must be at least 0 and below 1, got {label_smoothing}")
    if target.is_floating_point():
        if activations.ndim != 2 or target.shape != activations.shape:
            raise ValueError(
                f"expected shares (n, num_classes) like the activations, got {tuple(target.shape)} for "
                f"{tuple(activations.shape)}"
            )
    else:
        _check_target(activations, target)
    return cross_entropy(activations, target, weight=weight, label_smoothing=label_smoothing)


def binary_cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    r"""Return $-\sum_j y_j \ln \sigma(z_j) + (1 - y_j) \ln \sigma(-z_j)$, the mean over the batch.

    It is the negative log likelihood of images that show several classes: each class is there or not, independently of
    the others. The classes are summed, not averaged.

    Args:
        logits: z, ``n j``.
        target: the numbers of the k classes that are there, ``n k`` of int64.

    Example:
        >>> logits = torch.tensor([[50.0, 50.0, -50.0, 0.0]])
        >>> print(f"{binary_cross_entropy(logits, torch.tensor([[0, 1]])):.3f}")  # unsure of the last class: ln 2
        0.693
    """
    loss = F.binary_cross_entropy_with_logits(logits, several_hot(target, logits), reduction="sum")
    return loss / len(logits)


def several_hot(target: Tensor, scores: Tensor) -> Tensor:
    """Return 1 for each class that is there and 0 for the others, ``n j``, from class numbers ``n k``."""
    if scores.ndim != 2 or target.ndim != 2 or len(target) != len(scores):
        raise ValueError(
            f"expected (n, num_classes) scores with (n, k) targets, got {tuple(scores.shape)} and {tuple(target.shape)}"
        )
    if target.dtype != torch.int64:
        raise TypeError(f"target must be class numbers as int64 (long), got {target.dtype}")
    return torch.zeros_like(scores).scatter(1, target, 1.0)


def evidence_loss(posterior: RoutingResult | None, target: Tensor, *, weight: Tensor | None = None) -> Tensor:
    r"""Return $-E[\ln \pi_y] = \psi(\sum_j \alpha_j) - \psi(\alpha_y)$ of the class layer, a mean over images.

    It is small if the votes of the class layer go to the right class. Then $\alpha_j = \alpha_0 + r_j$ counts the
    evidence for class j, and the loss is the Bayes risk of evidential networks (Sensoy et al. 2018).

    Args:
        posterior: of the class capsules, as in ``net(x).posterior``.
        target: class numbers, ``n`` of int64; or the share of each class in each image, ``n j``.
        weight: of each class, ``j``, as in ``cross_entropy``.

    Example:
        >>> from vbcaps import CapsNet
        >>> out = CapsNet(num_classes=5)(torch.randn(2, 2, 32, 32))
        >>> evidence_loss(out.posterior, torch.tensor([0, 3])).shape
        torch.Size([])
    """
    if not isinstance(posterior, Posterior):
        raise ValueError(f"evidence is counted by VB routing alone, got {type(posterior).__name__}")
    E_ln_pi = expected_log_pi(posterior.alpha)
    if weight is not None:
        E_ln_pi = E_ln_pi * weight
    if target.is_floating_point():
        return -(target * E_ln_pi).sum(1).mean()
    _check_target(E_ln_pi, target)
    return -E_ln_pi.gather(1, target[:, None]).mean()


def spread_loss(activations: Tensor, target: Tensor, margin: float | Tensor, *, weight: Tensor | None = None) -> Tensor:
    r"""Return $L_{SL} = \sum_{j \neq t} \max(0, m - (a_t - a_j))^2$, the mean over the batch.

    Args:
        activations: ``n j``, in (0, 1).
        target: class numbers t, ``n`` of int64.
        margin: m, see `spread_margin`.
        weight: of each class, ``j``, as in ``cross_entropy``.

    Example:
        >>> activations = torch.tensor([[0.9, 0.1, 0.5]])
        >>> print(f"{spread_loss(activations, torch.tensor([0]), margin=0.5):.2f}")  # (0.5 - 0.4)^2
        0.01
    """
    _check_target(activations, target)
    a_t = activations.gather(1, target[:, None])
    gap = (margin - (a_t - activations)).clamp_min(0).square()
    # The target's own term is margin^2, whatever the network does.
    loss = gap.sum(1) - gap.gather(1, target[:, None])[:, 0]
    return loss.mean() if weight is None else (loss * weight[target]).mean()


def spread_margin(step: int, steps: int, *, low: float = 0.2, high: float = 0.9) -> float:
    """Return the margin at ``step``: it grows from ``low`` to ``high`` over ``steps`` (Hinton et al. 2018).

    Example:
        >>> [round(spread_margin(step, steps=100), 2) for step in (0, 50, 200)]
        [0.2, 0.55, 0.9]
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    return low + (high - low) * min(max(step, 0) / steps, 1.0)


class VAELoss(NamedTuple):
    """The parts of `vae_loss`, means over the batch: ``total = beta * divergence + reconstruction``."""

    total: Tensor
    divergence: Tensor
    reconstruction: Tensor


def vae_loss(x: Tensor, output: Reconstruction, *, beta: float | Tensor = 1.0) -> VAELoss:
    r"""Return $L_{VAE} = \frac{\beta}2 \sum_d (\sigma_d^2 + \mu_d^2 - \ln \sigma_d^2 - 1) + \|x - f(x)\|_F^2$.

    Args:
        x: images ``n channels height width``.
        output: what a `CapsVAE` made of them.
        beta: the weight of the divergence from N(0, I); 1 in the paper.

    Example:
        >>> from vbcaps import CapsVAE
        >>> images = torch.rand(2, 1, 20, 20)
        >>> loss = vae_loss(images, CapsVAE((8, 4, 4, 4), in_channels=1, image_size=20)(images))
        >>> loss.total.backward()
    """
    if x.shape != output.images.shape:
        raise ValueError(f"x has shape {tuple(x.shape)}, its reconstruction {tuple(output.images.shape)}")
    divergence = 0.5 * (output.var + output.mean.square() - output.var.log() - 1).sum(-1).mean()
    reconstruction = (x - output.images).square().flatten(1).sum(1).mean()
    return VAELoss(beta * divergence + reconstruction, divergence, reconstruction)


def total_loss(classification: Tensor, vae: VAELoss | None = None, *, eta: float = 1e-3) -> Tensor:
    r"""Return $L = L_{class} + \eta L_{VAE}$.

    Args:
        classification: a loss on the network's logits or activations.
        vae: what `vae_loss` gave; without it the classification loss is all.
        eta: the weight of the second part.

    Example:
        >>> parts = VAELoss(torch.tensor(20.0), torch.tensor(5.0), torch.tensor(15.0))
        >>> print(f"{total_loss(torch.tensor(1.5), parts):.2f}")
        1.52
    """
    return classification if vae is None else classification + eta * vae.total


def _check_target(scores: Tensor, target: Tensor) -> None:
    if scores.ndim != 2 or target.shape != scores.shape[:1]:
        raise ValueError(
            f"expected (n, num_classes) activations with (n,) targets, got {tuple(scores.shape)} and "
            f"{tuple(target.shape)}"
        )
    if target.dtype != torch.int64:
        raise TypeError(f"target must be class numbers as int64 (long), got {target.dtype}")

"""Losses: the paper's section "Objective Function"."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vbcaps.models import Reconstruction

NLL_ON = ("activations", "logits")


def nll_loss(logits: Tensor, target: Tensor, *, on: str = "activations", smoothing: float = 0.0) -> Tensor:
    """L_NLL = -sum_k y_k ln y^_k, mean over the batch; ``logits`` are ``n classes``, ``target`` is ``n``.

    A ``target`` may also be what share each class has of each image, ``n classes``.

    ``smoothing`` gives so much of the target's 1 to all classes alike.

    ``on="activations"`` puts a softmax on the sigmoid outputs, as the released code does: with outputs in (0, 1) it
    cannot fall below ln(1 + (classes - 1)/e), 0.905 for 5 classes, and so bounds itself. ``on="logits"`` puts it on the
    logits: these come from a BatchNorm without affine, so the network needs a learned scale
    (``CapsNet(logit_scale=True)``) to become sure.
    """
    if on not in NLL_ON:
        raise ValueError(f"on must be one of {NLL_ON}, got {on!r}")
    if not 0 <= smoothing < 1:
        raise ValueError(f"smoothing must be at least 0 and below 1, got {smoothing}")
    if target.is_floating_point():
        if logits.ndim != 2 or target.shape != logits.shape:
            raise ValueError(
                f"expected shares (n, classes) like the scores, got {tuple(target.shape)} for {tuple(logits.shape)}"
            )
    else:
        _check_target(logits, target)
    return F.cross_entropy(logits.sigmoid() if on == "activations" else logits, target, label_smoothing=smoothing)


def spread_loss(activations: Tensor, target: Tensor, margin: float | Tensor) -> Tensor:
    """L_SL = sum_{j != t} max(0, m - (a_t - a_j))^2, mean over the batch; ``activations`` are ``n classes``."""
    _check_target(activations, target)
    a_t = activations.gather(1, target[:, None])
    gap = (margin - (a_t - activations)).clamp_min(0).square()
    # The target's own term is margin^2, whatever the network does.
    return (gap.sum(1) - gap.gather(1, target[:, None])[:, 0]).mean()


def spread_margin(step: int, steps: int, *, low: float = 0.2, high: float = 0.9) -> float:
    """The margin's schedule: linear from ``low`` to ``high`` over ``steps``, then ``high`` (Hinton et al. 2018)."""
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    return low + (high - low) * min(max(step, 0) / steps, 1.0)


class VAELoss(NamedTuple):
    """``total = divergence + reconstruction``, means over the batch."""

    total: Tensor
    divergence: Tensor
    reconstruction: Tensor


def vae_loss(x: Tensor, output: Reconstruction) -> VAELoss:
    """L_VAE = 1/2 sum_d (sigma_d^2 + mu_d^2 - ln sigma_d^2 - 1) + |x - f(x)|_F^2, mean over the batch of K images."""
    if x.shape != output.images.shape:
        raise ValueError(f"x has shape {tuple(x.shape)}, its reconstruction {tuple(output.images.shape)}")
    divergence = 0.5 * (output.var + output.mean.square() - output.var.log() - 1).sum(-1).mean()
    reconstruction = (x - output.images).square().flatten(1).sum(1).mean()
    return VAELoss(divergence + reconstruction, divergence, reconstruction)


def total_loss(classification: Tensor, vae: VAELoss | None = None, *, eta: float = 1e-3) -> Tensor:
    """L = L_NLL + eta L_VAE (or the spread loss in place of L_NLL)."""
    return classification if vae is None else classification + eta * vae.total


def _check_target(scores: Tensor, target: Tensor) -> None:
    if scores.ndim != 2 or target.shape != scores.shape[:1]:
        raise ValueError(
            f"expected (n, classes) scores with (n,) targets, got {tuple(scores.shape)} and {tuple(target.shape)}"
        )
    if target.dtype != torch.int64:
        raise TypeError(f"target must be class numbers as int64 (long), got {target.dtype}")

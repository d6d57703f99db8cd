"""BatchNorm and what lies between it and routing, in PyTorch; every backend must compute the same values.

Axes: n image, h w row and column, l parent position, c j type, p q rows and columns of a pose.
"""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from vbcaps.kernels.backend import Normaliser, NormedCapsules, Running


def plain_batch_norm(
    x: Tensor, running: Running, momentum: float, eps: float, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Normalise ``a j ...`` for each j by the batch's statistics, and update the running statistics."""
    y, mean, var = normalise(x, running, eps, weight, bias)
    take_in(running, mean, var, momentum)
    return y


def normalise(
    x: Tensor, running: Running, eps: float, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``a j ...`` normalised for each j by the batch, its mean and its unbiased variance."""
    mean, var = torch.zeros_like(running.mean), torch.zeros_like(running.var)
    return F.batch_norm(x, mean, var, weight, bias, training=True, momentum=1.0, eps=eps), mean, var


@torch.no_grad()
def take_in(running: Running, mean: Tensor, var: Tensor, momentum: float) -> None:
    """Update the running statistics: batch t has the share t^(-1/3), or momentum if that is more."""
    running.batches.add_(1)
    share = running.batches.to(mean.dtype).pow(-1 / 3).clamp_min(momentum)
    running.mean.lerp_(mean, share)
    running.var.lerp_(var, share)


def plain_primary(
    x: Tensor, types: int, norm_a: Normaliser, norm_pose: Normaliser | None, lay: Callable[[Tensor], Tensor]
) -> NormedCapsules:
    """Make capsules of ``n (c p q) + c h w``; ``lay`` brings ``n h w c ...`` into the memory order of a backend."""
    n, channels, h, w = x.shape
    p = math.isqrt(channels // types - 1)
    pose, logit = x.split([types * p * p, types], dim=1)
    logit = norm_a(logit.flatten(2)).reshape(n, types, h, w).permute(0, 2, 3, 1)
    if norm_pose is not None:
        pose = norm_pose(pose.reshape(n, types, p * p * h * w))
    pose = pose.reshape(n, types, p, p, h, w).permute(0, 4, 5, 1, 2, 3)
    return lay(logit.sigmoid()), logit, lay(pose)


def plain_parents(
    logit: Tensor,
    m: Tensor,
    norm_a: Normaliser | None,
    norm_pose: Normaliser | None,
    by_type: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor],
) -> NormedCapsules:
    """Normalise ``n l j`` and ``n l j p q``; ``by_type`` applies a BatchNorm to ``n l j p q`` in a memory order."""
    logit = logit if norm_a is None else by_type(norm_a, logit[..., None, None])[..., 0, 0]
    return logit.sigmoid(), logit, m if norm_pose is None else by_type(norm_pose, m)

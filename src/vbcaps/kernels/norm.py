"""BatchNorm in PyTorch; every backend must compute the same values."""

import torch
import torch.nn.functional as F
from torch import Tensor

from vbcaps.kernels.backend import Running


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

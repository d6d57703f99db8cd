"""BatchNorm without affine in PyTorch, as every backend must compute it."""

import torch.nn.functional as F
from torch import Tensor

from vbcaps.kernels.backend import RunningStatistics


def plain_batch_norm(x: Tensor, running: RunningStatistics, momentum: float, eps: float) -> Tensor:
    """Normalise ``a j b`` (or ``a j``) for each j by the batch, and take the batch into the running statistics."""
    running.batches.add_(1)
    return F.batch_norm(x, running.mean, running.var, training=True, momentum=momentum, eps=eps)

"""BatchNorm for capsules and feature maps, whose running statistics fit the network from the first steps on.

Axes: n image, c channel or type of capsule, h w row and column, d pose entry.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vbcaps.kernels import Running, batch_norm
from vbcaps.kernels.backend import TypeNorm
from vbcaps.kernels.norm import take_in


class RunningStatistics(nn.modules.batchnorm._BatchNorm):
    r"""BatchNorm whose running statistics fit the network from the first step on.

    PyTorch's statistics begin at mean 0 and variance 1, whose share shrinks by a factor of 0.9 in each step. If the
    variance is 1e-4, the initial 1 outweighs it even after 80 steps, and the network is at chance in ``eval`` mode.
    Here batch t has the share $\max(t^{-1/3}, \text{momentum})$: the first batch replaces the initial values, and a
    network that still changes much soon forgets early batches (a plain mean would lag behind). Parameters, buffers, and
    outputs in training are those of PyTorch.

    Attributes:
        gather: if several processes train together, a differentiable function that stacks the tensors of all of them
            (``vbcaps.training.distributed.synchronise`` sets it). All processes must have equally many values.
    """

    gather: Callable[[Tensor], Tensor] | None = None
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        self._check_input_dim(x)
        if self.gather is None and x.numel() == 0:  # a batch of no images has no statistics
            return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        if self.gather is None:
            return batch_norm(x, self.running(), self.momentum or 0.0, self.eps, self.weight, self.bias)
        y, mean, var = self.normalise_together(x, self.gather)
        take_in(self.running(), mean, var, self.momentum or 0.0)
        return y

    def running(self) -> Running:
        """Return the buffers that a batch changes."""
        return Running(self.running_mean, self.running_var, self.num_batches_tracked)

    def normalise_together(self, x: Tensor, gather: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Normalise ``n c ...`` by the statistics of all processes; return these, too, the variance unbiased."""
        axes = [axis for axis in range(x.ndim) if axis != 1]
        var, mean = torch.var_mean(x, axes, correction=0)
        means, variances = gather(torch.stack([mean, var])).unbind(1)  # process c
        mean = means.mean(0)
        var = (variances + (means - mean).square()).mean(0)
        shape = [-1 if axis == 1 else 1 for axis in range(x.ndim)]
        y = (x - mean.view(shape)) * (var + self.eps).rsqrt().view(shape)
        if self.weight is not None:
            y = y * self.weight.view(shape) + self.bias.view(shape)
        count = x.numel() // x.shape[1] * len(means)
        return y, mean, var * (count / (count - 1))


class BatchNorm2d(RunningStatistics, nn.BatchNorm2d):
    """BatchNorm of a feature map ``n c h w``, see `RunningStatistics`.

    Example:
        >>> norm = BatchNorm2d(3)
        >>> _ = norm(torch.full((2, 3, 4, 4), 5.0))
        >>> norm.running_mean  # PyTorch's would be 0.5
        tensor([5., 5., 5.])
    """


class BatchNorm(RunningStatistics, nn.BatchNorm1d):
    """BatchNorm of capsules, without affine: one mean and variance for each type c of ``n c`` or ``n c d``.

    A training batch with one value per type (one image, one position) has no spread to normalise by: it is
    normalised by the running statistics, which it leaves alone.

    Args:
        types: how many types of capsule there are.
    """

    def __init__(self, types: int):
        super().__init__(types, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        single = self.training and x.numel() == self.num_features and self.gather is None
        if single:
            return F.batch_norm(x, self.running_mean, self.running_var, training=False, eps=self.eps)
        return super().forward(x)

    def plan(self, values: int) -> TypeNorm | None:
        """Return what ``forward`` would do with so many values of each type, or None if only a call can do it: because
        several processes train together, or because hooks wait for a call."""
        if self.gather is not None or self._forward_hooks or self._forward_pre_hooks or self._backward_hooks:
            return None
        return TypeNorm(self.running(), self.momentum or 0.0, self.eps, self.training and values > 1)

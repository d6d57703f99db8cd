"""Several processes on one or more machines, started by torchrun: who is who, and BatchNorm over all of them.

One machine with four GPUs (or four processes on its CPU, with --device cpu)::

    torchrun --nproc-per-node 4 -m vbcaps train smallnorb --out run

Two machines with four each, the same command on both, RANK being 0 on the first and 1 on the second::

    torchrun --nnodes 2 --nproc-per-node 4 --node-rank RANK --master-addr FIRST --master-port 29500 \
        -m vbcaps train smallnorb --out run

Each process takes its share of every batch; ``batch`` stays the size of the whole. Only the first process writes, and
only its machine needs the folder of the run; every one needs the data. ``--resume`` goes on with any number of them.
"""

import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Group(NamedTuple):
    """The processes that train together."""

    rank: int = 0
    size: int = 1

    @property
    def writes(self) -> bool:
        """Whether this process is the one that writes files and reports."""
        return self.rank == 0

    def share(self, count: int) -> slice:
        """This process's part of a batch of ``count``."""
        each = count // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def sum(self, x: Tensor) -> Tensor:
        if self.size > 1:
            x = x.clone()
            dist.all_reduce(x)
        return x

    def largest(self, value: int, device: torch.device) -> int:
        if self.size == 1:
            return value
        x = torch.tensor(value, device=device)
        dist.all_reduce(x, dist.ReduceOp.MAX)
        return int(x)

    def read(self, path: Path, device: torch.device) -> bytes:
        """A file that only the first process needs to have."""
        if self.size == 1:
            return path.read_bytes()
        content = path.read_bytes() if self.writes else b""
        length = self.largest(len(content), device)
        x = torch.zeros(length, dtype=torch.uint8, device=device)
        if self.writes:
            x.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        dist.broadcast(x, 0)
        return x.cpu().numpy().tobytes()


ALONE = Group()


def started_by_torchrun() -> bool:
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def join(device: torch.device) -> Group:
    """Meet the other processes: over NCCL for GPUs, over gloo for CPUs. Alone where there are none."""
    if not started_by_torchrun():
        return ALONE
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return Group(dist.get_rank(), dist.get_world_size())


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


class _Normalise(torch.autograd.Function):
    """``n c ...`` to mean 0 and variance 1 of each channel c, over the images of every process.

    One message each way: means and variances of the processes forward, the two sums of its gradient backward. All have
    as many images, so the mean over all is the mean of means.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        axes = [axis for axis in range(x.ndim) if axis != 1]
        var, mean = torch.var_mean(x, axes, correction=0)
        mine = torch.stack([mean, var])
        every = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(every, mine)
        means, variances = torch.stack(every).unbind(1)  # process c
        mean = means.mean(0)
        var = (variances + (means - mean).square()).mean(0)
        ctx.count = x.numel() // x.shape[1] * len(every)
        shape = [-1 if axis == 1 else 1 for axis in range(x.ndim)]
        scale = (var + eps).rsqrt().view(shape)
        y = (x - mean.view(shape)) * scale
        ctx.save_for_backward(y, scale)
        ctx.axes = axes
        ctx.mark_non_differentiable(mean, var)
        return y, mean, var

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """dx = scale (dy - mean(dy) - y mean(dy y)), the means over every process."""
        dy = grads[0]
        y, scale = ctx.saved_tensors
        sums = torch.stack([dy.sum(ctx.axes), (dy * y).sum(ctx.axes)])
        dist.all_reduce(sums)
        mean_dy, mean_dot = (sums / ctx.count).view(2, *scale.shape)
        return scale * (dy - mean_dy - y * mean_dot), None


class SyncNorm(nn.Module):
    """A BatchNorm whose statistics, in training, are those of the whole batch; torch's own needs GPUs."""

    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, norm: nn.BatchNorm1d | nn.BatchNorm2d):
        super().__init__()
        self.eps, self.momentum = norm.eps, float(norm.momentum or 0)
        for name in ("weight", "bias"):
            self.register_parameter(name, getattr(norm, name))
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(name, getattr(norm, name))
        self.train(norm.training)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return nn.functional.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, False, 0.0, self.eps
            )
        y, mean, var = _Normalise.apply(x, self.eps)
        count = x.numel() // x.shape[1] * dist.get_world_size()
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * (count / (count - 1)), self.momentum)
            self.num_batches_tracked += 1
        if self.weight is None or self.bias is None:
            return y
        shape = [-1 if axis == 1 else 1 for axis in range(x.ndim)]
        return y * self.weight.view(shape) + self.bias.view(shape)


def synchronise(net: nn.Module) -> nn.Module:
    """Make every BatchNorm in ``net``, in place, see the batches of all processes; parameters keep their names."""
    for name, child in net.named_children():
        if isinstance(child, nn.BatchNorm1d | nn.BatchNorm2d):
            setattr(net, name, SyncNorm(child))
        else:
            synchronise(child)
    return net

"""Training by several processes on one or more machines, started by torchrun: their ranks, and BatchNorm over all.

One machine with four GPUs (or four processes on its CPU, with --device cpu)::

    torchrun --nproc-per-node 4 -m vbcaps train smallnorb --out run

Two machines with four processes each run the same command, with RANK 0 on the first and 1 on the second::

    torchrun --nnodes 2 --nproc-per-node 4 --node-rank RANK --master-addr FIRST --master-port 29500 \
        -m vbcaps train smallnorb --out run

Each process takes its share of every batch; ``batch`` is the size of the whole batch. Only the first process writes,
and only its machine needs the run's folder; every machine needs the data. ``--resume`` works with any number of
processes.
"""

import os
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vbcaps.disk import read_bytes
from vbcaps.norm import RunningStatistics


class Group(NamedTuple):
    """The processes that train together."""

    rank: int = 0
    size: int = 1

    @property
    def writes(self) -> bool:
        """Return whether this process writes files and reports."""
        return self.rank == 0

    def share(self, count: int) -> slice:
        """Return this process's part of a batch of ``count`` images."""
        each = count // self.size
        return slice(self.rank * each, (self.rank + 1) * each)

    def sum(self, x: Tensor) -> Tensor:
        if self.size > 1:
            x = x.clone()
            dist.all_reduce(x)
        return x

    def gather(self, x: Tensor) -> Tensor:
        """Return the rows of all processes, which may have different numbers of them, one process after another."""
        if self.size == 1:
            return x
        counts = torch.zeros(self.size, dtype=torch.int64, device=x.device)
        counts[self.rank] = len(x)
        counts = self.sum(counts)
        begin = int(counts[: self.rank].sum())
        everyones = x.new_zeros(int(counts.sum()), *x.shape[1:])
        everyones[begin : begin + len(x)] = x
        return self.sum(everyones)

    def largest(self, value: int, device: torch.device) -> int:
        if self.size == 1:
            return value
        x = torch.tensor(value, device=device)
        dist.all_reduce(x, dist.ReduceOp.MAX)
        return int(x)

    def read(self, path: Path, device: torch.device, limit: int) -> bytes:
        """Return the content of a file of at most ``limit`` bytes that only the first process needs to have."""
        if self.size == 1:
            return read_bytes(path, limit)
        content = read_bytes(path, limit) if self.writes else b""
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
    """Join the other processes, over NCCL for GPUs and gloo for CPUs; return ``ALONE`` if there are none."""
    if not started_by_torchrun():
        return ALONE
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    return Group(dist.get_rank(), dist.get_world_size())


def leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


class AllGather(torch.autograd.Function):
    """Stack the tensors of all processes, differentiably; PyTorch's own versions are deprecated or private."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        every = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(every, x)
        return torch.stack(every)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        every = grads[0].clone()
        dist.all_reduce(every)
        return every[dist.get_rank()]


def synchronise(net: nn.Module) -> nn.Module:
    """Make every BatchNorm in ``net`` use the batches of all processes; PyTorch's ``SyncBatchNorm`` needs GPUs."""
    for module in net.modules():
        if isinstance(module, RunningStatistics):
            module.gather = AllGather.apply
    return net

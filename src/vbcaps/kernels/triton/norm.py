"""Training BatchNorm without affine parameters over the middle axis of ``a j b``, for few types j with many values.

PyTorch gives each channel to one block, but a capsule layer has 5 to 32 channels and a GPU 132 multiprocessors. Here
the values of a type are split into shares, one per program. Each program computes the mean and the scatter of its
share, and the shares are combined in a fixed order without atomics, so the result is the same in every run.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from vbcaps.kernels.ops import on_its_device

BLOCK = 1024


@triton.jit
def moments_kernel(
    x_ptr,  # a j b
    mean_ptr,  # j shares
    scatter_ptr,  # j shares
    A, J, B, ROWS, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute the mean and the scatter of ROWS rows of type j."""
    j, share = tl.program_id(0), tl.program_id(1)
    first, last = share * ROWS, tl.minimum(share * ROWS + ROWS, A)
    lane = tl.arange(0, BLOCK)
    s = tl.zeros((BLOCK,), tl.float32)
    for a in range(first, last):
        for b in range(0, B, BLOCK):
            s += tl.load(x_ptr + (a * J + j) * B + b + lane, mask=b + lane < B, other=0.0)
    mean = tl.sum(s, 0) / ((last - first) * B)
    s = tl.zeros((BLOCK,), tl.float32)
    for a in range(first, last):
        for b in range(0, B, BLOCK):
            x = tl.load(x_ptr + (a * J + j) * B + b + lane, mask=b + lane < B, other=0.0) - mean
            s += tl.where(b + lane < B, x * x, 0.0)
    tl.store(mean_ptr + j * tl.num_programs(1) + share, mean)
    tl.store(scatter_ptr + j * tl.num_programs(1) + share, tl.sum(s, 0))


@triton.jit
def normalise_kernel(
    x_ptr,  # a j b
    mean_ptr,  # j shares
    scatter_ptr,  # j shares
    y_ptr,  # a j b
    scale_ptr,  # j
    center_ptr,  # j
    var_ptr,  # j
    A, J, B, ROWS, SHARES, eps, BLOCK: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Combine the shares (Chan et al. 1979) and normalise ROWS rows."""
    j, share = tl.program_id(0), tl.program_id(1)
    k = tl.arange(0, MOST)
    on = k < SHARES
    count = tl.where(on, (tl.minimum(k * ROWS + ROWS, A) - k * ROWS) * B, 0).to(tl.float32)
    means = tl.load(mean_ptr + j * SHARES + k, mask=on, other=0.0)
    total = A * B
    mean = tl.sum(count * means, 0) / total
    scatter = tl.sum(tl.load(scatter_ptr + j * SHARES + k, mask=on, other=0.0), 0)
    scatter += tl.sum(tl.where(on, count * (means - mean) * (means - mean), 0.0), 0)
    scale = 1 / tl.sqrt(scatter / total + eps)
    if share == 0:
        tl.store(scale_ptr + j, scale)
        tl.store(center_ptr + j, mean)
        tl.store(var_ptr + j, scatter / (total - 1))
    lane = tl.arange(0, BLOCK)
    for a in range(share * ROWS, tl.minimum(share * ROWS + ROWS, A)):
        for b in range(0, B, BLOCK):
            at = (a * J + j) * B + b + lane
            x = tl.load(x_ptr + at, mask=b + lane < B, other=0.0)
            tl.store(y_ptr + at, (x - mean) * scale, mask=b + lane < B)


@triton.jit
def keep_kernel(
    mean_ptr,  # j
    var_ptr,  # j
    running_mean_ptr,  # j
    running_var_ptr,  # j
    batches_ptr,  # ()
    J, momentum, MOST: tl.constexpr,
):  # fmt: skip
    """Update the running statistics: batch t has the share t^(-1/3), or momentum if that is more."""
    j = tl.arange(0, MOST)
    mean, var = tl.load(running_mean_ptr + j, mask=j < J), tl.load(running_var_ptr + j, mask=j < J)
    batches = tl.load(batches_ptr) + 1
    share = tl.maximum(momentum, tl.exp(tl.log(batches.to(tl.float32)) * (-1 / 3)))
    mean += share * (tl.load(mean_ptr + j, mask=j < J) - mean)
    var += share * (tl.load(var_ptr + j, mask=j < J) - var)
    tl.store(running_mean_ptr + j, mean, mask=j < J)
    tl.store(running_var_ptr + j, var, mask=j < J)
    tl.store(batches_ptr, batches)


@triton.jit
def grad_sums_kernel(
    y_ptr,  # a j b
    dy_ptr,  # a j b
    sum_ptr,  # j shares
    dot_ptr,  # j shares
    A, J, B, ROWS, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum dy and dy y over ROWS rows of type j."""
    j, share = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, BLOCK)
    s, d = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    for a in range(share * ROWS, tl.minimum(share * ROWS + ROWS, A)):
        for b in range(0, B, BLOCK):
            at = (a * J + j) * B + b + lane
            dy = tl.load(dy_ptr + at, mask=b + lane < B, other=0.0)
            s += dy
            d += dy * tl.load(y_ptr + at, mask=b + lane < B, other=0.0)
    tl.store(sum_ptr + j * tl.num_programs(1) + share, tl.sum(s, 0))
    tl.store(dot_ptr + j * tl.num_programs(1) + share, tl.sum(d, 0))


@triton.jit
def grad_kernel(
    y_ptr,  # a j b
    dy_ptr,  # a j b
    sum_ptr,  # j shares
    dot_ptr,  # j shares
    scale_ptr,  # j
    dx_ptr,  # a j b
    A, J, B, ROWS, SHARES, BLOCK: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Compute dx = scale (dy - mean(dy) - y mean(dy y))."""
    j, share = tl.program_id(0), tl.program_id(1)
    k = tl.arange(0, MOST)
    mean_dy = tl.sum(tl.load(sum_ptr + j * SHARES + k, mask=k < SHARES, other=0.0), 0) / (A * B)
    mean_dot = tl.sum(tl.load(dot_ptr + j * SHARES + k, mask=k < SHARES, other=0.0), 0) / (A * B)
    scale = tl.load(scale_ptr + j)
    lane = tl.arange(0, BLOCK)
    for a in range(share * ROWS, tl.minimum(share * ROWS + ROWS, A)):
        for b in range(0, B, BLOCK):
            at = (a * J + j) * B + b + lane
            dy = tl.load(dy_ptr + at, mask=b + lane < B, other=0.0)
            y = tl.load(y_ptr + at, mask=b + lane < B, other=0.0)
            tl.store(dx_ptr + at, scale * (dy - mean_dy - y * mean_dot), mask=b + lane < B)


def _shares(A: int, J: int, B: int) -> tuple[int, int, int]:
    """Return the rows of each share, the number of shares, and the values per block.

    There are about 500 programs, each with at least one block of values.
    """
    block = max(32, min(BLOCK, triton.next_power_of_2(B)))
    least = triton.cdiv(block, B)  # rows
    rows = max(least, triton.cdiv(A * J, 512))
    return rows, triton.cdiv(A, rows), block


@torch.library.custom_op("vbcaps::batch_norm", mutates_args=())
@on_its_device
def batch_norm(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return ``a j b`` normalised for each j, and the scale, mean and unbiased variance of each j."""
    A, J, B = x.shape
    rows, shares, block = _shares(A, J, B)
    mean, scatter = x.new_empty(J, shares), x.new_empty(J, shares)
    y, scale, center, var = torch.empty_like(x), x.new_empty(J), x.new_empty(J), x.new_empty(J)
    moments_kernel[(J, shares)](x, mean, scatter, A, J, B, rows, BLOCK=block)
    normalise_kernel[(J, shares)](
        x, mean, scatter, y, scale, center, var, A, J, B, rows, shares, eps,
        BLOCK=block, MOST=triton.next_power_of_2(shares),
    )  # fmt: skip
    return y, scale, center, var


@batch_norm.register_fake
def _(x: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    J = x.shape[1]
    return torch.empty_like(x), x.new_empty(J), x.new_empty(J), x.new_empty(J)


@torch.library.custom_op("vbcaps::keep_statistics", mutates_args=("running_mean", "running_var", "batches"))
@on_its_device
def keep_statistics(
    mean: Tensor, var: Tensor, running_mean: Tensor, running_var: Tensor, batches: Tensor, momentum: float
) -> None:
    J = len(mean)
    keep_kernel[(1,)](
        mean, var, running_mean, running_var, batches, J, momentum, MOST=triton.next_power_of_2(J), num_warps=1
    )


@keep_statistics.register_fake
def _(*_: Any) -> None:
    return None


@torch.library.custom_op("vbcaps::batch_norm_backward", mutates_args=())
@on_its_device
def batch_norm_backward(dy: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    A, J, B = y.shape
    rows, shares, block = _shares(A, J, B)
    total, dot, dx = y.new_empty(J, shares), y.new_empty(J, shares), torch.empty_like(y)
    grad_sums_kernel[(J, shares)](y, dy, total, dot, A, J, B, rows, BLOCK=block)
    grad_kernel[(J, shares)](
        y, dy, total, dot, scale, dx, A, J, B, rows, shares, BLOCK=block, MOST=triton.next_power_of_2(shares)
    )
    return dx


@batch_norm_backward.register_fake
def _(dy: Tensor, y: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(y)


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.save_for_backward(*output[:2])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, None]:
    return None if dy is None else batch_norm_backward(dy.contiguous(), *ctx.saved_tensors), None


batch_norm.register_autograd(_backward, setup_context=_save)

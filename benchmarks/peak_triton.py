"""Chains of fp32 multiply-adds and nothing else, to measure the peak rate of a GPU's fp32 units."""

import torch
import triton
import triton.language as tl
from torch import Tensor

LANES, CHAINS, STEPS = 256, 8, 8


@triton.jit
def chains_kernel(x_ptr, out_ptr, rounds, LANES: tl.constexpr, STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute eight independent chains per lane, so that the others hide the latency of each."""
    lane = tl.arange(0, LANES)
    x, y = tl.load(x_ptr + lane), tl.load(x_ptr + LANES + lane)
    c = [x + d for d in (0, 1, 2, 3, 4, 5, 6, 7)]
    for _ in range(rounds):
        for _ in tl.static_range(STEPS):
            c = [c[d] * y + x for d in (0, 1, 2, 3, 4, 5, 6, 7)]
    total = c[0] + c[1] + c[2] + c[3] + c[4] + c[5] + c[6] + c[7]
    tl.store(out_ptr + tl.program_id(0) * LANES + lane, total)


def run_chains(x: Tensor, out: Tensor, rounds: int) -> int:
    """Run the chains from ``x: 2 LANES`` to ``out: programs LANES``; return the number of floating-point operations."""
    chains_kernel[(len(out),)](x, out, rounds, LANES=LANES, STEPS=STEPS, num_warps=LANES // 32)
    return 2 * out.numel() * CHAINS * STEPS * rounds


def new_chains(device: torch.device, programs: int = 132 * 64) -> tuple[Tensor, Tensor]:
    """Return inputs and outputs for many programs per multiprocessor; factors are halves, so none overflows."""
    return torch.full((2 * LANES,), 0.5, device=device), torch.empty(programs, LANES, device=device)

"""Chains of fp32 multiply-adds with nothing else: as fast as a card's units for them go."""

import torch
import triton
import triton.language as tl
from torch import Tensor

LANES, CHAINS, STEPS = 256, 8, 8


@triton.jit
def chains_kernel(x_ptr, out_ptr, rounds, LANES: tl.constexpr, STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Eight chains a lane, independent of each other, so that one's latency hides behind the rest."""
    lane = tl.arange(0, LANES)
    x, y = tl.load(x_ptr + lane), tl.load(x_ptr + LANES + lane)
    c = [x + d for d in (0, 1, 2, 3, 4, 5, 6, 7)]
    for _ in range(rounds):
        for _ in tl.static_range(STEPS):
            c = [c[d] * y + x for d in (0, 1, 2, 3, 4, 5, 6, 7)]
    total = c[0] + c[1] + c[2] + c[3] + c[4] + c[5] + c[6] + c[7]
    tl.store(out_ptr + tl.program_id(0) * LANES + lane, total)


def run_chains(x: Tensor, out: Tensor, rounds: int) -> int:
    """From ``x: 2 LANES`` to ``out: programs LANES``; how many floating-point operations that is."""
    chains_kernel[(len(out),)](x, out, rounds, LANES=LANES, STEPS=STEPS, num_warps=LANES // 32)
    return 2 * out.numel() * CHAINS * STEPS * rounds


def new_chains(device: torch.device, programs: int = 132 * 64) -> tuple[Tensor, Tensor]:
    """Many programs for each multiprocessor, so that all are busy to the end; factors are halves, so none overflows."""
    return torch.full((2 * LANES,), 0.5, device=device), torch.empty(programs, LANES, device=device)

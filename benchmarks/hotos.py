"""How close to the card's fp32 peak is the operation that made capsules slow?

python benchmarks/hotos.py [--batch 32 128] [--iters 1 3] [--device cuda] [--csv benchmarks/hotos.csv]

Barham and Isard, "Machine Learning Systems are Stuck in a Rut" (HotOS 2019), took as their example the votes of a
convolutional capsule layer, P(n,32,15,15,4,4) * W(32,32,3,3,4,4) with stride 2: every child's 4x4 pose times a 4x4
weight for each parent. Our kernels compute votes inside the forward passes of VB routing, and never write one to
memory. The peers are a single einsum (cuBLAS) that writes the votes to memory, and the reference routing of such votes.

TFLOP/s count a vote as 64 multiply-adds as often as a pass needs it: twice in the moments of an iteration (the mean,
then the scatter about it) and once in the scores between two. "All" adds what the passes do with a vote (without exp
and the parents' own work). The peak is measured in the same run: chains of multiply-adds in Triton, and a large
matrix product. On a GPU every call is a CUDA graph; the peers and the peak are fp32 throughout, without TF32.
"""

import argparse
import functools
from collections.abc import Callable
from typing import Any

import torch
from measure import Measured, graphed, measure, record, the_device
from torch import Tensor

from vbcaps.kernels import route
from vbcaps.routing import VBRouting
from vbcaps.routing.fields import Fields, conv_fields
from vbcaps.routing.votes import votes

SIDE, TYPES, KERNEL, STRIDE = 15, 32, 3, 2
VOTE = 2 * 64  # floating-point operations
MOMENTS = (2 * VOTE, 34 + 64)  # R, sum R, sum R V; V - m, sum R (V - m)^2
SCORES = (VOTE, 64)  # V - m, sum lambda (V - m)^2


def operations(votes: int, iters: int) -> tuple[float, float]:
    """In the forward passes: those that make votes, and all."""
    made = votes * (iters * MOMENTS[0] + (iters - 1) * SCORES[0])
    return made, made + votes * (iters * MOMENTS[1] + (iters - 1) * SCORES[1])


def problem(batch: int, types: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Fields]:
    """Activations, poses and weights; poses lie as the layer before leaves them, images innermost but for a row."""
    torch.manual_seed(0)
    children = SIDE * SIDE * types
    a = torch.rand(children, batch, device=device).T
    pose = torch.randn(children, 4, batch, 4, device=device).permute(2, 0, 1, 3)
    W = torch.randn(KERNEL * KERNEL * types, types, 4, 4, device=device) / 4
    return a, pose, W, conv_fields(SIDE, SIDE, types, (KERNEL, KERNEL), (STRIDE, STRIDE), device)


def make_routed(batch: int, types: int, iters: int, backend: str, device: torch.device) -> Callable[[], Any]:
    def make() -> Callable[[], Tensor]:
        a, pose, W, fields = problem(batch, types, device)
        if backend == "reference":
            a, pose = a.contiguous(), pose.contiguous()
        routing = VBRouting(types, iters=iters).to(device)
        return captured(lambda: route(routing, a, pose, W, fields, None, backend, posterior=False)[1], device)

    return make


def make_einsum(batch: int, types: int, device: torch.device) -> Callable[[], Any]:
    def make() -> Callable[[], Tensor]:
        _, pose, W, fields = problem(batch, types, device)
        M = pose.index_select(1, fields.child.flatten()).unflatten(1, fields.child.shape)
        return captured(lambda: votes(M, W), device)

    return make


def captured(call: Callable[[], Tensor], device: torch.device) -> Callable[[], Tensor]:
    call = torch.inference_mode()(call)
    return graphed(call) if device.type == "cuda" else call


def peaks(device: torch.device, seconds: float) -> dict[str, float]:
    """TFLOP/s of chains of multiply-adds, and of a matrix product; on a CPU of the second only."""
    cuda = device.type == "cuda"
    size = 8192 if cuda else 512
    A, B = torch.randn(2, size, size, device=device)
    matmul = measure(lambda: functools.partial(torch.mm, A, B), device, seconds)
    found = dict(matmul=2 * size**3 / matmul.ms / 1e9, chains=0.0)
    if cuda:
        from peak_triton import new_chains, run_chains

        x, out = new_chains(device)
        done = run_chains(x, out, 4096)
        chains = measure(lambda: functools.partial(run_chains, x, out, 4096), device, seconds)
        found["chains"] = done / chains.ms / 1e9
    return found


def row(
    batch: int, iters: int, count: int, how: str, peer: Measured, ours: Measured, peak: dict[str, float]
) -> dict[str, Any]:
    made, every = operations(count, iters)
    best = max(peak.values())
    of_votes, of_all = made / ours.ms / 1e9, every / ours.ms / 1e9
    return dict(
        batch=batch, iters=iters, votes=count, peer=how, peer_ms=peer.cells[0], peer_low=peer.cells[1],
        peer_high=peer.cells[2], ours_ms=ours.cells[0], ours_low=ours.cells[1], ours_high=ours.cells[2],
        ratio=f"{peer.ms / ours.ms:.1f}", peer_TFLOPs=f"{count * VOTE / peer.ms / 1e9:.3g}",
        ours_TFLOPs=f"{of_votes:.3g}", ours_all_TFLOPs=f"{of_all:.3g}", peak_chains_TFLOPs=f"{peak['chains']:.3g}",
        peak_matmul_TFLOPs=f"{peak['matmul']:.3g}", share_of_peak=f"{of_votes / best:.3f}",
        all_share_of_peak=f"{of_all / best:.3f}", peer_GB=peer.memory, ours_GB=ours.memory,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--iters", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--types", type=int, default=TYPES, help="of children and of parents; 32 is the example's")
    parser.add_argument("--seconds", type=float, default=0.3, help="of repeats, for each measurement")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--csv", help="append to this file")
    arguments = parser.parse_args()
    device, types, seconds = the_device(arguments.device), arguments.types, arguments.seconds
    torch.backends.cuda.matmul.allow_tf32 = False

    peak = peaks(device, seconds)
    for batch in arguments.batch:
        fields = ((SIDE - KERNEL) // STRIDE + 1) ** 2
        count = batch * fields * KERNEL**2 * types * types
        einsum = measure(make_einsum(batch, types, device), device, seconds)
        for iters in arguments.iters:
            ours = measure(make_routed(batch, types, iters, "auto", device), device, seconds)
            reference = measure(make_routed(batch, types, iters, "reference", device), device, seconds)
            torch.testing.assert_close(ours.result, reference.result, rtol=1e-2, atol=1e-2)
            for how, peer in (("einsum, votes only", einsum), ("reference, routed", reference)):
                record(row(batch, iters, count, how, peer, ours, peak), device, arguments.csv)


if __name__ == "__main__":
    main()

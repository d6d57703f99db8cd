"""How long are a training step and an inference, and how much memory do they take? Ours against the reference.

python benchmarks/train_step.py [--arch 64,16,16,16,5] [--batch 32 128] [--routing vb em] [--mode training inference]
                                [--peer reference compiled] [--device cuda] [--csv benchmarks/steps.csv]

A training step is forward, loss, backward and Adam on images that lie on the device. Ours is what a user runs: on a GPU
one CUDA graph (`vbcaps.training.step.TrainStep`, and for inference a captured forward pass). The peers are the same
network with `backend="reference"`, eager and under torch.compile. Compiling the reference takes about a minute each
time, so that without --peer it is done for one network, in training, at two batches.

Without a filter it measures the four networks at four batches, and EM beside VB for one of them. A peer that does not
fit into memory leaves a row that says so. The script compares the loss or the logits of the first call with the peer's;
if they differ, the row says so and the script fails at the end.
"""

import argparse
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from measure import Measured, compile_ahead, graphed, measure, record, the_device
from torch import Tensor

from vbcaps import CapsNet
from vbcaps.losses import activation_nll_loss
from vbcaps.training.step import TrainStep

NETWORKS = ("64,8,16,16,5", "64,16,16,16,5", "64,16,32,32,5", "64,16,32,32,10")
USUAL = NETWORKS[1]
MODES = ("training", "inference", "inference uncaptured")
PEERS = ("reference", "compiled")


class Case(NamedTuple):
    network: str
    routing: str
    iters: int
    image: int
    batch: int

    @property
    def channels(self) -> int:
        """smallNORB's stereo pairs have five classes; colour images ten."""
        return 2 if self.network.endswith(",5") else 3

    @property
    def flags(self) -> list[str]:
        return [
            "--arch", self.network, "--routing", self.routing, "--iters", str(self.iters), "--image", str(self.image),
            "--batch", str(self.batch),
        ]  # fmt: skip


def make_call(case: Case, mode: str, how: str, device: torch.device) -> Callable[[], Callable[[], Tensor]]:
    """Return a function that makes the timed call; `how` is "ours" or a peer's name."""

    def make() -> Callable[[], Tensor]:
        torch.manual_seed(0)
        *arch, classes = map(int, case.network.split(","))
        backend = "auto" if how == "ours" else "reference"
        options = dict(routing_options=dict(iters=case.iters), backend=backend)
        net = CapsNet(arch, case.channels, classes, case.image, case.routing, **options).to(device)  # type: ignore[arg-type]
        x = torch.randn(case.batch, case.channels, case.image, case.image, device=device)
        y = torch.randint(classes, (case.batch,), device=device)
        run: Any = torch.compile(net) if how == "compiled" else net
        if mode == "training":
            optimiser = torch.optim.Adam(net.parameters(), 3e-3, fused=device.type == "cuda")
            step = TrainStep(
                run, optimiser, lambda out, y: activation_nll_loss(out.activations, y), capture=how == "ours"
            )
            return lambda: step(x, y)
        net.eval()

        def infer() -> Tensor:
            with torch.inference_mode():
                return run(x).logits

        capture = how == "ours" and mode == "inference" and device.type == "cuda"
        return graphed(infer) if capture else infer

    return make


def measure_peer(case: Case, mode: str, how: str, device: torch.device, seconds: float) -> tuple[Measured | None, str]:
    """Return the measurement of a peer, or the reason why there is none."""
    try:
        return measure(make_call(case, mode, how, device), device, seconds), ""
    except torch.OutOfMemoryError as error:
        return None, str(error).split(". GPU")[0]
    finally:
        torch.compiler.reset()


def row(case: Case, mode: str, how: str, peer: Measured | None, ours: Measured, note: str = "") -> dict[str, Any]:
    tf32 = ours.GB is not None and torch.backends.cudnn.allow_tf32  # a CPU has none
    peer_cells = ("", "", "") if peer is None else peer.cells
    both = peer is not None and peer.GB and ours.GB
    return dict(
        **case._asdict(), mode=mode, peer=how, peer_ms=peer_cells[0], peer_low=peer_cells[1], peer_high=peer_cells[2],
        ours_ms=ours.cells[0], ours_low=ours.cells[1], ours_high=ours.cells[2],
        ratio="" if peer is None else f"{peer.ms / ours.ms:.1f}",
        peer_GB="" if peer is None else peer.memory, ours_GB=ours.memory,
        memory_ratio=f"{peer.GB / ours.GB:.1f}" if both else "",  # type: ignore[union-attr, operator]
        first_s=f"{ours.first_s:.1f}", convolutions="tf32" if tf32 else "fp32", note=note,
    )  # fmt: skip


def cases(arguments: argparse.Namespace) -> Iterator[Case]:
    routings = arguments.routing or ["vb", "em"]
    for made in itertools.product(arguments.arch, routings, arguments.iters, arguments.image, arguments.batch):
        case = Case(*made)
        if arguments.routing or case.routing == "vb" or (case.network == USUAL and case.batch in (32, 128)):
            yield case


def peers(case: Case, mode: str, asked: list[str] | None) -> list[str]:
    if asked is not None:
        return asked
    usual = case.network == USUAL and case.routing == "vb" and case.batch in (32, 128) and mode == "training"
    return list(PEERS) if usual else ["reference"]


def flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", default=list(NETWORKS), help="networks as F,d1,d2,d3,classes")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 128, 512])
    parser.add_argument("--routing", nargs="+", choices=("vb", "em", "dynamic"))
    parser.add_argument("--iters", type=int, nargs="+", default=[3])
    parser.add_argument("--image", type=int, nargs="+", default=[32])
    parser.add_argument("--mode", nargs="+", choices=MODES, default=list(MODES[:2]))
    parser.add_argument("--peer", nargs="+", choices=PEERS, help="for every case")
    parser.add_argument("--only-ours", action="store_true", help="no peers")
    parser.add_argument("--seconds", type=float, default=0.4, help="of repeats, for each measurement")
    parser.add_argument("--fp32", action="store_true", help="convolutions in fp32, not PyTorch's usual TF32")
    parser.add_argument("--ahead", type=int, default=min(16, os.cpu_count() or 1), help="processes that compile ahead")
    parser.add_argument("--once", action="store_true", help="one step of ours, to compile it; no measurement")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--csv", help="append to this file")
    return parser.parse_args()


def main() -> None:
    arguments = flags()
    device = the_device(arguments.device)
    todo = list(cases(arguments))
    if arguments.once:
        for case in todo:
            make_call(case, "training", "ours", device)()()
        return
    torch.backends.cudnn.benchmark = True
    if arguments.fp32:
        torch.backends.cudnn.allow_tf32 = False
    if device.type == "cuda" and arguments.ahead > 1 and len(todo) > 1:
        for routing in ("vb", "em"):  # EM's passes are VB's: it finds them compiled
            compile_ahead(__file__, [case.flags for case in todo if case.routing == routing], arguments.ahead)

    wrong = 0
    for case, mode in itertools.product(todo, arguments.mode):
        ours = measure(make_call(case, mode, "ours", device), device, arguments.seconds)
        if arguments.only_ours:
            record(row(case, mode, "none", None, ours), device, arguments.csv)
            continue
        for how in peers(case, mode, arguments.peer):
            peer, note = measure_peer(case, mode, how, device, arguments.seconds)
            if peer is not None and not torch.allclose(ours.result, peer.result, rtol=2e-2, atol=2e-2):
                note = f"results differ by up to {(ours.result - peer.result).abs().max().item():.2g}"
                wrong += 1
            record(row(case, mode, how, peer, ours, note), device, arguments.csv)
    if wrong:
        sys.exit(f"{wrong} rows in which ours and the peer do not compute the same: see their notes")


if __name__ == "__main__":
    main()

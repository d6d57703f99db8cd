"""How long is a training step, and how much memory does it take? Fused kernels against the reference, on a GPU.

python benchmarks/train_step.py [--batch 32 128] [--arch 64,16,16,16,5] [--routing vb em] [--compile] [--csv FILE]

A step is forward, loss, backward and Adam on images of 32x32 that lie on the device. Ours is one CUDA graph
(`vbcaps.step.TrainStep`); the peers are the same network with `backend="reference"`, eager and, with --compile, under
torch.compile. Medians of --repeats steps; rows with an older commit in the CSV are kept.
"""

import argparse
import csv
import gc
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

from vbcaps import CapsNet
from vbcaps.losses import nll_loss
from vbcaps.step import TrainStep

HEADER = ("network", "channels", "routing", "iters", "image", "batch", "what", "ms", "ratio", "peak_GB", "first_s")
HERE = ("commit", "device", "torch", "triton", "date")


def measure(make: Callable[[], Callable[[], object]], repeats: int) -> tuple[float, float, float]:
    """Median milliseconds of a call, peak gigabytes, and seconds until the first was done (compilation)."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    step = make()
    step()
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    for _ in range(3):
        step()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for before, after in events:
        before.record()
        step()
        after.record()
    torch.cuda.synchronize()
    ms = statistics.median(before.elapsed_time(after) for before, after in events)
    return ms, torch.cuda.max_memory_allocated() / 1e9, first


def make_step(
    arch: list[int], channels: int, routing: str, iters: int, image: int, batch: int, backend: str, compiled: bool
) -> Callable[[], Callable[[], object]]:
    def make() -> Callable[[], object]:
        torch.manual_seed(0)
        options = dict(iters=iters)
        net = CapsNet(arch[:4], channels, arch[4], image, routing, routing_options=options, backend=backend).cuda()
        optimiser = torch.optim.Adam(net.parameters(), 3e-3, fused=True)
        x = torch.randn(batch, channels, image, image, device="cuda")
        y = torch.randint(arch[4], (batch,), device="cuda")
        fused = backend != "reference"
        run: Any = torch.compile(net) if compiled else net
        step = TrainStep(run, optimiser, lambda out, y: nll_loss(out.logits, y), capture=fused)
        return lambda: step(x, y)

    return make


def here() -> tuple[str, ...]:
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    try:
        import triton

        version = triton.__version__
    except ImportError:
        version = "none"
    commit = commit or os.environ.get("VBCAPS_COMMIT", "unknown")
    return commit, torch.cuda.get_device_name(), torch.__version__, version, time.strftime("%Y-%m-%d")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", nargs="+", default=["64,16,16,16,5"], help="networks as F,d1,d2,d3,classes")
    parser.add_argument("--batch", type=int, nargs="+", default=[32, 128])
    parser.add_argument("--routing", nargs="+", default=["vb"])
    parser.add_argument("--iters", type=int, nargs="+", default=[3])
    parser.add_argument("--image", type=int, nargs="+", default=[32])
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--compile", action="store_true", help="also the reference under torch.compile")
    parser.add_argument("--only-ours", action="store_true", help="no peers")
    parser.add_argument("--csv", help="append to this file")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("train_step.py measures a CUDA device, and there is none")
    torch.backends.cudnn.benchmark = True

    rows = []
    for network in arguments.arch:
        arch = [int(k) for k in network.split(",")]
        channels = 2 if arch[4] == 5 else 3
        for routing in arguments.routing:
            for iters in arguments.iters:
                for image in arguments.image:
                    for batch in arguments.batch:
                        shape = (arch, channels, routing, iters, image, batch)
                        ways = [("ours", "auto", False)]
                        if not arguments.only_ours:
                            ways = [("reference", "reference", False), *ways]
                            if arguments.compile:
                                ways.insert(1, ("reference, compiled", "reference", True))
                        peer = None
                        for what, backend, compiled in ways:
                            ms, memory, first = measure(make_step(*shape, backend, compiled), arguments.repeats)
                            peer = ms if peer is None else peer
                            row = (network, *shape[1:], what, f"{ms:.3f}", f"{peer / ms:.1f}", f"{memory:.2f}")
                            rows.append((*row, f"{first:.0f}"))
                            print("  ".join(f"{cell!s:>14s}" for cell in rows[-1]), flush=True)
    if arguments.csv:
        new = not os.path.exists(arguments.csv)
        with open(arguments.csv, "a", newline="") as file:
            writer = csv.writer(file)
            writer.writerows([(*HEADER, *HERE)] if new else [])
            writer.writerows((*row, *here()) for row in rows)


if __name__ == "__main__":
    main()

"""What do the kernels of a package cost beside those that are compiled for this very machine?

python benchmarks/variants.py [--batch 32] [--rounds 30] [--csv benchmarks/variants.csv]

A package has one library for each instruction set; `native` is what `VBCAPS_CPU=native` compiles here. One process
takes all of them in turns, so that whatever else the machine does slows them alike: forward and backward of a batch
through {64,16,16,16,5} at 32x32x2, then inference of one image, all on one thread. What is measured is its CPU time, in
which other programs have little part. A row has the median of it and the least, the median over all rounds of the ratio
to `native` with the middle half of the ratios, the ratio of the least ones, and whether outputs and gradients have the
bits of `native`.
"""

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from measure import processor, record

from vbcaps import CapsNet
from vbcaps.kernels.cpu import build, library


def libraries() -> dict[str, Any]:
    """Return the libraries of the package that this machine supports, after the one that is compiled for it."""
    return {"native": build.build_here("native")} | {name: library.shipped(name) for name in library.supported()}


def use(loaded: Any) -> None:
    """Let all kernels run from this library."""
    library._library = lambda: loaded  # type: ignore[assignment]


def network() -> CapsNet:
    torch.manual_seed(0)
    return CapsNet((64, 16, 16, 16), 2, 5, 32, backend="cpu")


def loss(net: CapsNet, x: torch.Tensor) -> torch.Tensor:
    out = net(x)
    return out.logits.square().sum() + out.poses.square().sum()


def bits(batch: int) -> list[torch.Tensor]:
    """Return outputs and gradients of a fresh network, for batches of one image and of several."""
    found = []
    for n in (1, batch):
        net, x = network(), torch.randn(n, 2, 32, 32, generator=torch.Generator().manual_seed(1))
        net.eval()
        out = loss(net, x)
        out.backward()
        found += [out.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]
    return found


def milliseconds(call: Callable[[], Any]) -> float:
    """Return the CPU time of a call."""
    start = time.process_time()
    call()
    return 1e3 * (time.process_time() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--csv", help="append to this file")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    loaded, before = libraries(), os.getloadavg()[0]
    x = torch.randn(arguments.batch, 2, 32, 32, generator=torch.Generator().manual_seed(1))
    training, trained = network(), network().eval()

    def one_image() -> None:
        with torch.inference_mode():
            for _ in range(5):
                trained(x[:1])

    work: dict[str, tuple[int, Callable[[], Any]]] = {
        "forward and backward": (1, lambda: loss(training, x).backward()),
        "one image": (5, one_image),
    }
    found = {}
    for name, one in loaded.items():
        use(one)
        found[name] = bits(arguments.batch)
    same = {
        name: all(torch.equal(a, b) for a, b in zip(mine, found["native"], strict=True)) for name, mine in found.items()
    }
    times: dict[str, dict[str, list[float]]] = {what: {name: [] for name in loaded} for what in work}
    for turn in range(arguments.rounds + 1):  # the first is a warm-up
        names = list(loaded) if turn % 2 else list(loaded)[::-1]
        for what, (count, call) in work.items():
            for name in names:
                use(loaded[name])
                took = milliseconds(call) / count
                if turn:
                    times[what][name].append(took)
    for what, of in times.items():
        for name, mine in of.items():
            ratios = [a / b for a, b in zip(mine, of["native"], strict=True)]
            low, ratio, high = statistics.quantiles(ratios, n=4, method="inclusive")
            row = dict(
                what=what, batch=1 if what == "one image" else arguments.batch, kernels=name,
                cpu_ms=f"{statistics.median(mine):.3f}", least_ms=f"{min(mine):.3f}", ratio=f"{ratio:.3f}",
                low=f"{low:.3f}", high=f"{high:.3f}", least_ratio=f"{min(mine) / min(of['native']):.3f}",
                same_bits=same[name], rounds=arguments.rounds, load_before=f"{before:.1f}", processor=processor(),
            )  # fmt: skip
            record(row, torch.device("cpu"), arguments.csv)


if __name__ == "__main__":
    main()

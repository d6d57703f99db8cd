"""What would the stem in bfloat16 save on a CPU? Forward and backward of stem and primary capsules, and of the network.

python benchmarks/stem_bf16.py [--batch 32] [--rounds 20] [--csv benchmarks/stem_bf16.csv]

bfloat16 by `torch.autocast` around the stem alone; primary capsules and routing stay float32. Times are the least
processor times of one thread, both in turns in one process. `error_float32` and `error_bfloat16` are the relative
errors of the class poses in evaluation, against float64.
"""

import argparse
import time
from collections.abc import Callable

import torch
from measure import record
from torch import Tensor

from vbcaps import CapsNet, Capsules


def features(net: CapsNet, x: Tensor, short: bool) -> Tensor:
    """Return the output of the stem, computed in bfloat16 or in float32."""
    with torch.autocast("cpu", torch.bfloat16, enabled=short):
        return net.stem(x).to(x.dtype)


def classes(net: CapsNet, x: Tensor, short: bool) -> Capsules:
    """Return the class capsules of images."""
    caps = net.primary_caps(features(net, x, short))
    return net.class_caps(net.conv_caps2(net.conv_caps1(caps, posterior=False), posterior=False))


def least(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the milliseconds of the fastest of several calls, which are made in turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + 1):
        for name, call in calls.items():
            start = time.thread_time()
            call()
            times[name].append(1e3 * (time.thread_time() - start))
    return {name: min(found[1:]) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--csv")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net, x = CapsNet((64, 16, 16, 16), 2, 5, 32), torch.randn(given.batch, 2, 32, 32)
    upstream = torch.randn_like(net.stem(x))

    def front(short: bool) -> Callable[[], object]:
        return lambda: features(net, x, short).backward(upstream)

    def whole(short: bool) -> Callable[[], object]:
        return lambda: classes(net, x, short).poses.square().sum().backward()

    calls = {"stem_float32": front(False), "stem_bfloat16": front(True)}
    calls |= {"step_float32": whole(False), "step_bfloat16": whole(True)}
    cells = {f"{name}_ms": f"{ms:.2f}" for name, ms in least(calls, given.rounds).items()}
    net.eval()
    with torch.no_grad():
        found = {name: classes(net, x, name == "bfloat16").poses.double() for name in ("float32", "bfloat16")}
        exact = classes(net.double(), x.double(), False).poses
    errors = {f"error_{name}": f"{float((y - exact).norm() / exact.norm()):.1e}" for name, y in found.items()}
    record(dict(batch=given.batch, **cells, **errors), torch.device("cpu"), given.csv)


if __name__ == "__main__":
    main()

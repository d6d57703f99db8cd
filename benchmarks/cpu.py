"""How fast is the whole network on a CPU? The C++ kernels beside the released arrangement, the reference and a CNN.

python benchmarks/cpu.py [--batch 32] [--repeats 10] [--csv benchmarks/cpu.csv]
python benchmarks/cpu.py --before ../other-checkout/src      # the kernels there and here, in turns

`nine axes` is the arrangement of the authors' released code (layouts.py) in all three capsule layers of
{64,16,16,16,5} at 32x32x2, everything around it the same. Each way runs in its own process: forward and backward of a
batch, then inference of one image; the script prints medians and the peak memory of the process. It first checks that
all but the CNN (`ConvNet`, as many parameters) give the same logits. The CSV keeps rows of older commits.
"""

import argparse
import csv
import json
import math
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import vbcaps.layers
from vbcaps import CapsNet, ConvNet

WAYS = ("nine axes", "reference", "cnn", "cpu")
HEADER = ("what", "batch", *(name.replace(" ", "_") for name in WAYS), "nine_axes/cpu", "reference/cpu", "cpu/cnn")
HERE = ("threads", "commit", "processor", "torch", "compiler", "load_before", "load_after", "date")


def route_as_released(
    routing: Any,
    a: Tensor,
    pose: Tensor,
    W: Tensor,
    fields: Any,
    place: Tensor | None,
    backend: str,
    posterior: bool,
) -> tuple[Tensor, Tensor, None]:
    """`kernels.route` of square maps with the paper's prior, by nine broadcast axes; without a posterior."""
    from layouts import route_by_nine_axes

    n, types, J = len(a), fields.types, W.shape[1]
    side = math.isqrt(a.shape[1] // types)
    count, kernel = math.isqrt(len(fields.child)), math.isqrt(fields.child.shape[1] // types)
    stride = (side - kernel) // (count - 1) if count > 1 else 1
    W = W.repeat(kernel * kernel * types // len(W), 1, 1, 1).view(kernel, kernel, types, J, 4, 4)
    where: Tensor | float = 0.0
    if place is not None:
        where = place.new_zeros(16, 1, 1, 1, kernel, kernel)
        where[3, 0, 0, 0], where[7, 0, 0, 0] = place.view(kernel, kernel, types, 2)[:, :, 0].unbind(-1)
    a, pose = a.view(n, side, side, types), pose.view(n, side, side, types, 4, 4)
    logit, m = route_by_nine_axes(a, pose, W, routing.iters, stride, where)
    logit, m = logit.reshape(n, J, -1).transpose(1, 2), m.reshape(n, J, 16, -1).permute(0, 3, 1, 2)
    return logit + routing.beta_a - routing.beta_u, m.unflatten(-1, (4, 4)), None


def make(way: str) -> nn.Module:
    torch.manual_seed(0)
    if way == "cnn":
        return ConvNet((64, 64, 72, 72), 2, 5, 32)
    if way == "nine axes":
        vbcaps.layers.route = route_as_released  # type: ignore[assignment]
    return CapsNet((64, 16, 16, 16), 2, 5, 32, backend="reference" if way == "nine axes" else way)


def milliseconds(run: Any, repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):  # the first is a warm-up
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[1:])


def loss(out: Any) -> Tensor:
    return out.logits.square().sum() + (out.poses.square().sum() if hasattr(out, "poses") else 0)


def measure(way: str, batch: int, repeats: int) -> dict[str, Any]:
    """Measure one way, and return the row that a process prints."""
    net = make(way)
    x = torch.randn(batch, 2, 32, 32, generator=torch.Generator().manual_seed(1))
    both = milliseconds(lambda: loss(net(x)).backward(), repeats)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e9 if sys.platform == "darwin" else 1e6)
    with torch.inference_mode():
        logits = net(x[:8]).logits
        net.eval()
        one = milliseconds(lambda: net(x[:1]), 5 * repeats)
    return dict(both=both, memory=memory, one=one, logits=logits.tolist())


def of_a_process(way: str, batch: int, repeats: int, source: str | None = None) -> dict[str, Any]:
    """What ``measure`` gives in a process of its own; ``source``: with the package in this folder."""
    command = [sys.executable, __file__, "--way", way, "--batch", str(batch), "--repeats", str(repeats)]
    environment = os.environ | ({} if source is None else {"PYTHONPATH": source})
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def compare(before: str, batch: int, repeats: int, rounds: int = 7) -> None:
    """Print the median of both over several rounds in turns, and the median of their ratios."""
    found: dict[str, list[list[float]]] = {"both": [], "one": []}
    for _ in range(rounds):
        old, new = (of_a_process("cpu", batch, repeats, source) for source in (before, None))
        for key, pairs in found.items():
            pairs.append([old[key], new[key]])
    for key, pairs in found.items():
        old, new = (statistics.median(column) for column in zip(*pairs, strict=True))
        ratio = statistics.median(b / a for a, b in pairs)
        what = f"forward and backward of {batch}" if key == "both" else "one image"
        print(f"{what}: before {old:.2f} ms, now {new:.2f} ms, median ratio {ratio:.3f} over {rounds} rounds")


def processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
        wide = [flag for flag in ("avx512f", "avx2") if any(flag in line.split() for line in lines)]
        return " ".join([name, *wide[:1]])
    except (OSError, StopIteration):
        return platform.machine()


def here(before: float, after: float) -> tuple[Any, ...]:
    from vbcaps.kernels.cpu.build import find_compiler

    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True).stdout.strip()
    compiler = find_compiler() or ["none"]
    version = subprocess.run([*compiler, "-dumpfullversion"], capture_output=True, text=True).stdout.strip()
    about = (
        torch.get_num_threads(),
        commit or "unknown",
        processor(),
        torch.__version__,
        f"{Path(compiler[0]).name} {version}",
    )
    return (*about, f"{before:.1f}", f"{after:.1f}", time.strftime("%Y-%m-%d"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=10, help="of ours; the others run a fifth of them")
    parser.add_argument("--way", choices=WAYS, help="measure only this one, in this process")
    parser.add_argument("--csv", help="append to this file")
    parser.add_argument("--before", metavar="FOLDER", help="compare with the package in this folder, and nothing else")
    arguments = parser.parse_args()
    if arguments.way:
        print(json.dumps(measure(arguments.way, arguments.batch, arguments.repeats)))
        return
    from vbcaps.kernels.cpu.library import why_no_library

    if why := why_no_library():
        sys.exit(f"cpu.py measures the C++ kernels, and there are none: {why}")

    if arguments.before:
        compare(arguments.before, arguments.batch, arguments.repeats)
        return
    before = os.getloadavg()[0]
    few = max(1, arguments.repeats // 5)
    found = {
        way: of_a_process(way, arguments.batch, arguments.repeats if way in ("cpu", "cnn") else few) for way in WAYS
    }
    logits = [torch.tensor(found[way].pop("logits")) for way in WAYS if way != "cnn"]
    for other in logits[:-1]:
        torch.testing.assert_close(logits[-1], other, rtol=0, atol=1e-2)  # after three BatchNorms
    table = []
    names = dict(both="forward and backward, ms", memory="peak memory, GB", one="one image, ms")
    for key, name in names.items():
        values = [found[way][key] for way in WAYS]
        nine, reference, cnn, ours = values
        ratios = [f"{nine / ours:.1f}", f"{reference / ours:.1f}", f"{ours / cnn:.1f}"]
        table.append((name, 1 if key == "one" else arguments.batch, *(f"{value:.2f}" for value in values), *ratios))
    for row in (HEADER, *table):
        print("  ".join(f"{cell!s:>24s}" for cell in row))
    about = here(before, os.getloadavg()[0])
    print(", ".join(f"{name} {value}" for name, value in zip(HERE, about, strict=True)))
    if arguments.csv:
        new = not os.path.exists(arguments.csv)
        with open(arguments.csv, "a", newline="") as file:
            writer = csv.writer(file)
            writer.writerows([(*HEADER, *HERE)] if new else [])
            writer.writerows((*row, *about) for row in table)


if __name__ == "__main__":
    main()

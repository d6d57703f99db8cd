"""How fast is the whole network on a CPU? The C++ kernels beside the released arrangement, the reference and a CNN.

python benchmarks/cpu.py [--batch 32] [--repeats 10] [--csv benchmarks/cpu.csv]
python benchmarks/cpu.py --before v1.2 [--routing em] [--network 32] [--csv benchmarks/cpu_before.csv]

`nine axes` is the arrangement of the authors' released code (layouts.py) in all three capsule layers of
{64,16,16,16,5} at 32x32x2, everything around it the same. Each way runs in its own process: forward and backward of a
batch, inference of a batch, then of one image; the script prints medians and the peak memory of the process. It first
checks that all but the CNN (`ConvNet`, as many parameters) give the same logits. The CSV keeps rows of older commits.

With `--before` the package of a git revision, or in a folder (`../other/src`), runs beside the one here and the CNN.
They take turns for several rounds, because other programs make a machine slower and faster; ratios are medians over
rounds. On a machine that others keep busy, `--clock cpu` with OMP_NUM_THREADS=1 leaves out the waiting.
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
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import vbcaps.layers
from vbcaps import CapsNet, ConvNet

NETWORKS = {"16": ((64, 16, 16, 16), 2, 5), "32": ((64, 16, 32, 32), 3, 10)}  # sizes, channels, classes
BEFORE = ("what", "routing", "network", "batch", "before", "now", "cnn", "now/before", "now/cnn", "rounds", "clock")
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


def make(way: str, routing: str = "vb", network: str = "16") -> nn.Module:
    torch.manual_seed(0)
    sizes, channels, classes = NETWORKS[network]
    if way == "cnn":
        return ConvNet((64, 64, 72, 72), channels, classes, 32)
    if way == "nine axes":
        vbcaps.layers.route = route_as_released  # type: ignore[assignment]
    options = dict(activation="released") if routing == "vb" else {}
    backend = "reference" if way == "nine axes" else way
    return CapsNet(sizes, channels, classes, 32, routing, routing_options=options, backend=backend)


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def milliseconds(run: Any, repeats: int, clock: str) -> float:
    times, now = [], CLOCKS[clock]
    for _ in range(repeats + 1):  # the first is a warm-up
        start = now()
        run()
        times.append(1e3 * (now() - start))
    return statistics.median(times[1:])


NAMES = dict(both="forward and backward, ms", memory="peak memory, GB", many="inference, ms", one="one image, ms")


def loss(out: Any) -> Tensor:
    return out.logits.square().sum() + (out.poses.square().sum() if hasattr(out, "poses") else 0)


def measure(
    way: str, batch: int, repeats: int, routing: str = "vb", network: str = "16", clock: str = "wall"
) -> dict[str, Any]:
    """Measure one way, and return the row that a process prints."""
    net = make(way, routing, network)
    x = torch.randn(batch, NETWORKS[network][1], 32, 32, generator=torch.Generator().manual_seed(1))
    both = milliseconds(lambda: loss(net(x)).backward(), repeats, clock)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1e9 if sys.platform == "darwin" else 1e6)
    with torch.inference_mode():
        logits = net(x[:8]).logits
        net.eval()
        many = milliseconds(lambda: net(x), repeats, clock)
        one = milliseconds(lambda: net(x[:1]), 5 * repeats, clock)
    return dict(both=both, memory=memory, many=many, one=one, logits=logits.tolist())


def of_a_process(way: str, batch: int, repeats: int, *more: str, source: str | None = None) -> dict[str, Any]:
    """What ``measure`` gives in a process of its own; ``source``: with the package in this folder."""
    command = [sys.executable, __file__, "--way", way, "--batch", str(batch), "--repeats", str(repeats), *more]
    environment = os.environ | ({} if source is None else {"PYTHONPATH": source})
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def source_of(before: str, folder: str) -> str:
    """Return the folder of the package that ``--before`` names: the folder itself, or a revision's, unpacked."""
    if Path(before, "vbcaps").is_dir():
        return before
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(["git", "archive", before, "src"], cwd=root, capture_output=True)
    if done.returncode:
        sys.exit(f"--before must be a folder that holds vbcaps, or a git revision, got {before!r}")
    Path(folder, "src.tar").write_bytes(done.stdout)
    with tarfile.open(Path(folder, "src.tar")) as archive:
        archive.extractall(folder, filter="data")
    return str(Path(folder, "src"))


def compare(
    before: str, batch: int, repeats: int, rounds: int, routing: str, network: str, clock: str
) -> list[tuple[Any, ...]]:
    """Return a row of medians for each measure: the package of ``before``, the one here and the CNN, in turns."""
    more, found = ("--routing", routing, "--network", network, "--clock", clock), []
    with tempfile.TemporaryDirectory() as folder:
        source = source_of(before, folder)
        turns = (("cpu", source), ("cpu", None), ("cnn", None))
        for way, where in turns[:2]:
            of_a_process(way, 1, 1, *more, source=where)  # compiles kernels, if they are not built
        for _ in range(rounds):
            found.append([of_a_process(way, batch, repeats, *more, source=where) for way, where in turns])
    rows = []
    for key, name in NAMES.items():
        turns_of = [[way[key] for way in turn] for turn in found]
        medians = [f"{statistics.median(column):.3f}" for column in zip(*turns_of, strict=True)]
        ratios = [f"{statistics.median(turn[1] / turn[k] for turn in turns_of):.3f}" for k in (0, 2)]
        rows.append((name, routing, network, 1 if key == "one" else batch, *medians, *ratios, rounds, clock))
    return rows


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
    parser.add_argument("--before", metavar="REVISION", help="compare with this revision or folder, and nothing else")
    parser.add_argument("--rounds", type=int, default=7, help="of --before")
    parser.add_argument("--routing", choices=("vb", "em", "dynamic"), default="vb", help="of --before")
    parser.add_argument("--network", choices=NETWORKS, default="16", help="of --before: capsules of a type")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="of --before")
    arguments = parser.parse_args()
    if arguments.way:
        how = (arguments.routing, arguments.network, arguments.clock)
        print(json.dumps(measure(arguments.way, arguments.batch, arguments.repeats, *how)))
        return
    from vbcaps.kernels.cpu.library import why_no_library

    if why := why_no_library():
        sys.exit(f"cpu.py measures the C++ kernels, and there are none: {why}")

    before = os.getloadavg()[0]
    if arguments.before:
        size, what = (arguments.batch, arguments.repeats, arguments.rounds), (arguments.routing, arguments.network)
        table = compare(arguments.before, *size, *what, arguments.clock)
        show(BEFORE, table, here(before, os.getloadavg()[0]), arguments.csv)
        return
    few = max(1, arguments.repeats // 5)
    found = {
        way: of_a_process(way, arguments.batch, arguments.repeats if way in ("cpu", "cnn") else few) for way in WAYS
    }
    logits = [torch.tensor(found[way].pop("logits")) for way in WAYS if way != "cnn"]
    for other in logits[:-1]:
        torch.testing.assert_close(logits[-1], other, rtol=0, atol=1e-2)  # after three BatchNorms
    table = []
    for key, name in NAMES.items():
        values = [found[way][key] for way in WAYS]
        nine, reference, cnn, ours = values
        ratios = [f"{nine / ours:.1f}", f"{reference / ours:.1f}", f"{ours / cnn:.1f}"]
        table.append((name, 1 if key == "one" else arguments.batch, *(f"{value:.2f}" for value in values), *ratios))
    show(HEADER, table, here(before, os.getloadavg()[0]), arguments.csv)


def show(header: tuple[str, ...], table: list[tuple[Any, ...]], about: tuple[Any, ...], path: str | None) -> None:
    """Print a table, and append it to a CSV file if there is one."""
    for row in (header, *table):
        print("  ".join(f"{cell!s:>24s}" for cell in row))
    print(", ".join(f"{name} {value}" for name, value in zip(HERE, about, strict=True)))
    if path:
        new = not os.path.exists(path)
        with open(path, "a", newline="") as file:
            writer = csv.writer(file)
            writer.writerows([(*header, *HERE)] if new else [])
            writer.writerows((*row, *about) for row in table)


if __name__ == "__main__":
    main()

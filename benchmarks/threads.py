"""How much faster are the CPU kernels with more threads? Forward and backward, and inference, of a batch.

python benchmarks/threads.py [--batch 32] [--rounds 7] [--threads 1 2 4 8] [--csv benchmarks/threads.csv]

Each number of threads that the machine has cores for runs in processes of its own, in turns, so that other programs
disturb all alike. `ideal` is the share of the ideal: the time of one thread over the number of threads times their
time; both times are the least of all rounds.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from measure import record

from vbcaps import CapsNet

ARCH = (64, 16, 16, 16)
REPEATS = 5


def least(run: Callable[[], object]) -> float:
    """Return the milliseconds of the fastest call."""
    run()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        times.append(1e3 * (time.perf_counter() - start))
    return min(times)


def measure(routing: str, batch: int) -> dict[str, float]:
    """Return the milliseconds of forward and backward, and of inference, with the threads of this process."""
    torch.manual_seed(0)
    net, x = CapsNet(ARCH, 2, 5, 32, routing), torch.randn(batch, 2, 32, 32)

    def train() -> None:
        out = net(x)
        (out.logits.square().sum() + out.poses.square().sum()).backward()

    both = least(train)
    net.eval()
    with torch.inference_mode():
        return dict(both=both, inference=least(lambda: net(x)))


def of_a_process(routing: str, batch: int, threads: int) -> dict[str, float]:
    """Return what ``measure`` gives in a process with so many threads."""
    command = [sys.executable, __file__, "--one", routing, "--batch", str(batch)]
    environment = os.environ | dict(OMP_NUM_THREADS=str(threads), MKL_NUM_THREADS=str(threads))
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def compare(routing: str, batch: int, rounds: int, threads: list[int]) -> list[dict[str, object]]:
    """Return a row for each number of threads that the machine has cores for."""
    able = [count for count in threads if count <= cores()]
    found: dict[int, dict[str, float]] = {}
    for _ in range(rounds):
        for count in able:
            ms = of_a_process(routing, batch, count)
            found[count] = {what: min(ms[what], found.get(count, ms)[what]) for what in ms}
    rows: list[dict[str, object]] = []
    for count, ms in found.items():
        row: dict[str, object] = dict(routing=routing, batch=batch, threads=count)
        for what, value in ms.items():
            row[f"{what}_ms"] = f"{value:.2f}"
            row[f"{what}_ideal"] = f"{found[able[0]][what] * able[0] / (count * value):.2f}"
        rows.append(row)
    return rows


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--routing", nargs="+", default=["vb", "em", "dynamic"])
    parser.add_argument("--csv")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.one, given.batch)))
        return
    for routing in given.routing:
        for row in compare(routing, given.batch, given.rounds, given.threads):
            record(row, torch.device("cpu"), given.csv)


if __name__ == "__main__":
    main()

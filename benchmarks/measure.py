"""The functions that benchmarks share: medians with their spread, peak memory, and rows with their provenance."""

import csv
import gc
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch


class Measured(NamedTuple):
    ms: float  # median of a call
    low: float  # a tenth of the calls are faster
    high: float  # a tenth are slower
    GB: float | None  # most memory held on the device since `make` began; unknown on a CPU
    first_s: float  # until the first call was done: compilation, capture
    result: Any  # of the first call

    @property
    def cells(self) -> tuple[str, str, str]:
        return f"{self.ms:.3f}", f"{self.low:.3f}", f"{self.high:.3f}"

    @property
    def memory(self) -> str:
        return "" if self.GB is None else f"{self.GB:.3f}"


def measure(make: Callable[[], Callable[[], Any]], device: torch.device, seconds: float) -> Measured:
    """Time the call that `make` returns: three warm-up calls, then some seconds of calls, at least 5, at most 200."""
    cuda = device.type == "cuda"
    wait = torch.cuda.synchronize if cuda else lambda: None
    gc.collect()
    if cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    call = make()
    result = copied(call())
    wait()
    first = time.perf_counter() - start
    for _ in range(2):
        call()
    wait()
    start = time.perf_counter()
    call()
    wait()
    repeats = max(5, min(200, int(seconds / (time.perf_counter() - start))))
    times = cuda_times(call, repeats) if cuda else cpu_times(call, repeats)
    deciles = statistics.quantiles(times, n=10, method="inclusive")
    GB = torch.cuda.max_memory_allocated() / 1e9 if cuda else None
    return Measured(statistics.median(times), deciles[0], deciles[-1], GB, first, result)


def cuda_times(call: Callable[[], Any], repeats: int) -> list[float]:
    """Return the milliseconds between two events around each call; the calls queue up, which hides their launches."""
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(repeats)]
    for before, after in events:
        before.record()
        call()
        after.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) for before, after in events]


def cpu_times(call: Callable[[], Any], repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append(1e3 * (time.perf_counter() - start))
    return times


def copied(result: Any) -> Any:
    """Return a copy of a result, because a replayed graph overwrites its results."""
    return result.detach().clone() if isinstance(result, torch.Tensor) else result


def compile_ahead(script: str, cases: Sequence[Sequence[str]], processes: int) -> None:
    """Run a script once for each case, several at a time, so that Triton's cache holds what the measurement needs.

    Triton compiles on one core, up to a minute for each shape of layer and number of iterations.
    """

    def once(case: Sequence[str]) -> None:
        command = [sys.executable, script, *case, "--once"]
        done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        if done.returncode:
            print(f"could not compile {' '.join(case)} ahead: {done.stderr.strip()[-300:]}", file=sys.stderr)

    start = time.perf_counter()
    with ThreadPoolExecutor(processes) as threads:
        list(threads.map(once, cases))
    print(f"compiled {len(cases)} cases ahead in {time.perf_counter() - start:.0f} s", flush=True)


def graphed(call: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    """Return a call captured as one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call()

    def replay() -> torch.Tensor:
        graph.replay()
        return out

    return replay


def here(device: torch.device) -> dict[str, str]:
    """Return commit, device, versions and date of a row. VBCAPS_COMMIT names the commit if there is no git."""
    commit = os.environ.get("VBCAPS_COMMIT") or described()
    try:
        import triton

        version = triton.__version__
    except ImportError:
        version = "none"
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return dict(
        commit=commit, device=name, torch=torch.__version__, triton=version, date=time.strftime("%Y-%m-%d")
    )  # fmt: skip


def processor() -> str:
    """Return the name that the processor gives itself."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def described() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or "unknown"
    except FileNotFoundError:
        return "unknown"


def record(row: Mapping[str, Any], device: torch.device, path: str | None) -> None:
    """Print a row and append it at once, with its provenance, so that an interrupted run keeps its rows."""
    print("  ".join(f"{name} {value}" for name, value in row.items() if value != ""), flush=True)
    if path is None:
        return
    whole = {**row, **here(device)}
    new = not os.path.exists(path)
    if not new:
        with open(path, newline="") as file:
            columns = next(csv.reader(file), [])
        if columns != list(whole):
            sys.exit(f"--csv {path} has other columns: {columns}, and not {list(whole)}; name another file")
    with open(path, "a", newline="") as file:
        writer = csv.DictWriter(file, list(whole))
        if new:
            writer.writeheader()
        writer.writerow(whole)


def the_device(name: str) -> torch.device:
    """Return the device of `--device`, or exit with a message if it does not exist."""
    if name.startswith("cuda") and not torch.cuda.is_available():
        sys.exit(f"--device {name}, but there is no CUDA device; --device cpu runs on the processor")
    return torch.device(name)

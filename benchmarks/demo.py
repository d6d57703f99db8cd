"""How long does the demonstration train, and how well, beside an older revision?

python benchmarks/demo.py --before 6324184 [--rounds 3] [--csv benchmarks/demo.csv]

`vbcaps train` of both runs in turns, as a user would start it, with the start of Python, the test and the pictures.
Round k has seed k. A row has the median seconds, the median of their ratio, and the mean test errors.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from cpu import source_of
from measure import record


def train(source: str, seed: int, epochs: int | None) -> tuple[float, float]:
    """Return the seconds and the test error in percent of one training, with the package in the folder ``source``."""
    environment = os.environ | dict(PYTHONPATH=source)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "run")
        command = [sys.executable, "-P", "-m", "vbcaps", "train", "--quiet", "--seed", str(seed), "--out", str(out)]
        command += [] if epochs is None else ["--epochs", str(epochs)]
        start = time.perf_counter()
        subprocess.run(command, check=True, env=environment)
        seconds = time.perf_counter() - start
        return seconds, 100 * json.loads((out / "result.json").read_text())["test"]["error"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", metavar="REVISION", required=True, help="a git revision, or a folder with vbcaps")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, help="fewer than the recipe has")
    parser.add_argument("--csv")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sources = source_of(given.before, folder), str(Path(__file__).resolve().parents[1] / "src")
        for source in sources:
            train(source, 0, 1)  # compiles kernels, if they are not built
        turns = [[train(source, seed, given.epochs) for source in sources] for seed in range(given.rounds)]
    row: dict[str, object] = dict(before=given.before, epochs=given.epochs or "", rounds=given.rounds)
    for k, which in enumerate(("before", "now")):
        row[f"{which}_s"] = f"{statistics.median(turn[k][0] for turn in turns):.1f}"
    row["ratio"] = f"{statistics.median(turn[1][0] / turn[0][0] for turn in turns):.3f}"
    for k, which in enumerate(("before", "now")):
        row[f"{which}_error"] = f"{statistics.mean(turn[k][1] for turn in turns):.2f}"
    record(row, torch.device("cpu"), given.csv)


if __name__ == "__main__":
    main()

"""Kill trainings at random moments by the thousand, resume them, and count those that end in other bits.

    python tools/kills.py --times 1000 --csv benchmarks/kills.csv

Trainings of ``tests/tiny.py`` run in process groups, which are killed at once (kill -9): at random moments, and with
``--calls`` also at each call that opens, writes, syncs or renames a file of a run. Every run is resumed until it ends,
and then compared with one that was never killed. Prints the counts; ``--csv`` adds a row with them.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

TESTS = Path(__file__).parents[1] / "tests"
COLUMNS = ("vbcaps", "commit", "torch", "seed", "random_kills", "while_writing", "kills_at_calls", "runs", "other_bits",
           "left_over", "seconds")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=1000, help="kills at random moments")
    parser.add_argument("--minutes", type=float, default=60, help="stop these after so long, and count what was done")
    parser.add_argument("--calls", action="store_true", help="also kill at each call that writes")
    parser.add_argument("--seed", type=int, default=0, help="seed of the moments")
    parser.add_argument("--csv", type=Path, help="add a row with the counts to this table")
    arguments = parser.parse_args()
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as made:
        counts = in_new_process(arguments, Path(made))
    row = counts | dict(seed=arguments.seed, seconds=round(time.perf_counter() - began))
    print("\n".join(f"{name}: {row[name]}" for name in COLUMNS))
    if arguments.csv is not None:
        new = not arguments.csv.exists()
        with open(arguments.csv, "a", newline="") as file:
            table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            if new:
                table.writeheader()
            table.writerow(row)
    sys.exit(bool(row["other_bits"] or row["left_over"]))


def in_new_process(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    """Return the counts. A process that forks must not have computed anything, so the comparison has one of its own."""
    words = [folder, arguments.times, arguments.seed, int(arguments.calls), arguments.minutes]
    environment = os.environ | dict(VBCAPS_COMMIT="fixed")  # weights files name the commit, which must not change
    found: dict[str, object] = {}
    for part in ("kill", "compare"):
        code = f"import sys; sys.path[:0] = {[str(TESTS), str(Path(__file__).parent)]!r}; import kills; kills.{part}()"
        done = subprocess.run(
            [sys.executable, "-P", "-c", code, *map(str, words)], env=environment, stdout=subprocess.PIPE, text=True
        )
        if done.returncode:
            raise SystemExit(f"{part} failed, with the output above")
        found |= json.loads(done.stdout.splitlines()[-1])
    return found


def kill() -> None:
    """Kill and resume trainings; print how often."""
    import forked

    folder, times, seed, calls = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    report = forked.kill(folder / "random", times, seed, forked.QUICK, float(sys.argv[5]))
    at_calls = forked.die(folder / "calls", every=1)["runs"] if calls else 0
    print(json.dumps(dict(random_kills=report["kills"], while_writing=report["writing"], kills_at_calls=at_calls)))


def compare() -> None:
    """Compare every run with the one that was not killed; print how many differ, and how many left files over."""
    import torch
    from same import assert_same_run

    import vbcaps

    folder = Path(sys.argv[1])
    runs = sorted(folder.glob("*/killed*"))
    differ = left = 0
    for run in runs:
        try:
            assert_same_run(run.parent / "whole", run)
        except AssertionError as error:
            differ += 1
            print(f"{run.name}: {error}", file=sys.stderr)
        left += bool(list(run.glob(".*")))
    git = subprocess.run(["git", "-C", str(TESTS), "describe", "--always", "--dirty"], capture_output=True, text=True)
    about = dict(vbcaps=vbcaps.__version__, commit=git.stdout.strip(), torch=torch.__version__)
    print(json.dumps(about | dict(runs=len(runs), other_bits=differ, left_over=left)))


if __name__ == "__main__":
    main()

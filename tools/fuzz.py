"""Change the files that readers read, by seeds, and watch what the readers do: `python tools/fuzz.py --minutes 10`.

Every reader has a harness in `tests/fuzz/harnesses.py`. A reader may accept a file, or refuse it by a clear error that
names it. A finding is a crash, a hang, memory beyond the bound, another error, one that names no file, a file that is
written elsewhere, a program that is started, or code that is executed.

`--reader idx --seed 7 --count 1` does one change again. `--guided idx` lets Atheris choose the changes, where it is
installed.
"""

import argparse
import csv
import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from types import FunctionType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests" / "fuzz"), str(ROOT / "tests")]
os.environ.setdefault("OMP_NUM_THREADS", "1")  # children are forked, and a fork has no pool of threads

from corpus import corpus  # noqa: E402
from harnesses import HARNESSES, Case  # noqa: E402
from judge import Outcome, Watch, in_child, judged  # noqa: E402

BATCH = 500  # changes of one reader before the next has its turn
ROOM = 2 << 30  # bytes of address space that a child may take
COLUMNS = ("reader", "changes", "refused", "findings", "first_seed", "seconds", "commit", "date")
RECORD = ROOT / "benchmarks" / "fuzz.csv"


def main() -> None:
    """Read the command line, try every reader, print what was found, and end with 1 if there was anything."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, help="how long, all readers together; default: --count")
    parser.add_argument("--count", type=int, default=300, help="changes of each reader, fewer of slow ones")
    parser.add_argument("--reader", action="append", choices=HARNESSES, help="only this one; may be given again")
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--write", action="store_true", help=f"write a row for each reader to {RECORD.name}")
    parser.add_argument("--corpus", action="store_true", help="try every file of tests/fuzz/corpus.py instead")
    parser.add_argument("--guided", choices=HARNESSES, help="let Atheris choose the changes of this reader")
    options, rest = parser.parse_known_args()
    if options.guided:
        guided(options.guided, rest)
        return
    if rest:
        parser.error(f"unknown words: {' '.join(rest)} (only --guided passes such to Atheris)")
    readers = options.reader or list(HARNESSES)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["VBCAPS_CACHE"] = str(Path(folder) / "cache")
        if options.corpus:
            rows = tried_corpus(readers, Path(folder))
        else:
            counts = {
                name: options.count if options.reader else options.count // HARNESSES[name].slow for name in readers
            }
            rows = tried(counts, Path(folder), options.seed, options.minutes)
    for row in rows:
        numbers = f"{row['changes']:7,d} changes  {row['refused']:7,d} refused  {row['findings']} findings"
        print(f"{row['reader']:10s} {numbers}")
    if options.write:
        write(rows)
    sys.exit(any(row["findings"] for row in rows))


def tried(counts: dict[str, int], folder: Path, seed: int, minutes: float | None) -> list[dict[str, Any]]:
    """Try readers in turns, each so often as ``counts`` says if no time is given; return a row for each."""
    cases = {name: Case(HARNESSES[name], folder / name) for name in counts}
    rows = {name: row_of(name, seed) for name in counts}
    end = None if minutes is None else time.monotonic() + 60 * minutes
    while True:
        for name, count in counts.items():
            row = rows[name]
            first = seed + row["changes"]
            last = first + BATCH if end is not None else min(first + BATCH, seed + count)
            if first >= last or (end is not None and time.monotonic() > end):
                continue
            began = time.monotonic()
            work = trial(HARNESSES[name].errors, cases[name], HARNESSES[name].bound, folder)
            changes, refused, findings = in_child(work, list(range(first, last)), ROOM)
            row["changes"] += changes
            row["refused"] += refused
            row["findings"] += len(findings)
            row["seconds"] += time.monotonic() - began
            for at, what in findings:
                print(f"{name} --seed {at}: {what}", flush=True)
        total, found = (sum(row[what] for row in rows.values()) for what in ("changes", "findings"))
        print(f"{total:,} changes, {found} findings", file=sys.stderr, flush=True)
        done = all(row["changes"] >= counts[name] for name, row in rows.items())
        if done if end is None else time.monotonic() > end:
            return list(rows.values())


def tried_corpus(readers: list[str], folder: Path) -> list[dict[str, Any]]:
    """Try the files that once failed; return a row for each reader."""
    rows = {name: row_of(name, 0) for name in readers}
    files = [one for one in corpus() if one[0] in readers]
    for name, row in rows.items():
        mine = [(file, content) for reader, file, content in files if reader == name]
        if not mine:
            continue
        case, watch = Case(HARNESSES[name], folder / name), list[Watch]()

        def one(at: int, mine: Any = mine, case: Case = case, watch: list[Watch] = watch) -> Outcome:
            watch[:] = watch or [Watch(folder)]
            path = case.put(*mine[at])
            outcome = judged(lambda: case.read(path), case.harness.errors, (path.name,), watch[0], case.harness.bound)
            case.put_back(path)
            return outcome

        row["changes"], row["refused"], findings = in_child(one, list(range(len(mine))), ROOM)
        row["findings"] = len(findings)
        for at, what in findings:
            print(f"{name}, {mine[at][0]}, number {at}: {what}", flush=True)
    return list(rows.values())


def row_of(reader: str, seed: int) -> dict[str, Any]:
    return dict(reader=reader, changes=0, refused=0, findings=0, first_seed=seed, seconds=0.0)


def trial(errors: tuple, case: Case, bound: int, folder: Path) -> Callable[[int], Outcome]:
    """Return the function that changes, reads and judges by a seed, in a child."""
    watch: list[Watch] = []  # made in the child: an audit hook stays for the life of its process

    def one(seed: int) -> Outcome:
        watch[:] = watch or [Watch(folder)]
        path = case.change(seed)
        names = (path.name.encode("unicode_escape").decode(), path.name)
        outcome = judged(lambda: case.read(path), errors, names, watch[0], bound)
        case.put_back(path)
        return outcome

    return one


def write(rows: list[dict[str, Any]]) -> None:
    """Add rows to the record."""
    from vbcaps.training.environment import commit

    new = not RECORD.exists()
    with RECORD.open("a", newline="") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if new:
            table.writeheader()
        for row in rows:
            row = row | dict(seconds=round(row["seconds"]), commit=commit(), date=date.today())
            table.writerow(row)


def functions() -> list[FunctionType]:
    """Return the functions and methods of the modules that read."""
    modules = [
        x for name, x in sys.modules.items() if name.startswith(("vbcaps.data", "vbcaps.weights", "vbcaps.training"))
    ]
    found = [x for module in modules for x in vars(module).values()]
    found += [x for one in found if isinstance(one, type) for x in vars(one).values()]
    return [x for x in found if isinstance(x, FunctionType) and x.__module__.startswith("vbcaps.")]


def guided(reader: str, options: list[str]) -> None:
    """Let Atheris change the first file of a reader, guided by what code it reaches; it has options of its own."""
    try:
        import atheris
    except ImportError:
        raise SystemExit("--guided needs Atheris: pip install atheris") from None
    folder = Path(tempfile.mkdtemp())
    case = Case(HARNESSES[reader], folder / reader)
    work = trial(HARNESSES[reader].errors, case, HARNESSES[reader].bound, folder)
    path = next(iter(case.files))
    case.change = lambda seed: path

    def one(data: bytes) -> None:
        path.write_bytes(data)
        if findings := work(0).findings:
            raise AssertionError(f"{path.name}: {findings}")

    corpus = folder / "corpus"
    corpus.mkdir()
    for file, content in case.files.items():
        (corpus / file.name).write_bytes(content)
    for function in functions():
        atheris.instrument_func(function)
    atheris.Setup([sys.argv[0], str(corpus), *options], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()

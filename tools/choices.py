"""Which choices train best? Compared on a held-out share of the training set, without a look at the test set.

python tools/choices.py [CHOICE...] [--base smallnorb_fast] [--also CHOICE] [--held 0.4] [--splits 0 1]
                          [--epochs 30] [--workers 3] [--minutes 8] [--csv results/choices.csv]

A CHOICE is a list of a recipe's fields: `"activation=paper lr=0.003"`; "" is the unchanged recipe. By default the tool
compares those in CHOICES that the recipe can have. It trains each choice on the remaining images, once per split. For
smallNORB it holds out whole toys, as the test set has other toys. A row has the errors on the held-out images: the
one after the last epoch, which a test would measure, and the lowest, which nobody could have chosen. `tables.py` makes
a table of the rows. Runs share the device, so their seconds say little.
"""

import argparse
import csv
import dataclasses
import math
import multiprocessing
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import typer
from recorded import flags

from vbcaps.cli.flags import given, parser_of
from vbcaps.training.recipe import Recipe, field_types, nearest
from vbcaps.training.recipes import recipe

CHOICES = (
    "",
    # those that are not algebra
    "activation=released",
    "norm_pose=no",
    "through=last",
    "precision=wishart",
    "loss_on=logits",
    "loss=spread mixup=0",
    "init=identity",
    "standardise=crop",
    # priors and iterations
    "iters=2",
    "psi0=4",
    "psi0=0.25",
    "kappa0=0.1",
    "alpha0=0.1",
    # regularisation
    "brightness=0.2 contrast=0.2",
    "flip=yes",
    "rotate=15",
    "zoom=0.2",
    "stretch=0.2",
    "rotate=15 zoom=0.2 stretch=0.2 resample=bicubic",
    "cutout=0",
    "mixup=0",
    "optimiser=adam lr=0.006 weight_decay=0",
    "optimiser=adamw lr=0.006 weight_decay=0.05",
    # what the network sees
    "image_size=48 pad=0",
    "image_size=32 pad=3",
    # optimisation
    "lr=0.0015",
    "lr=0.006",
    "batch=64",
    "ema=0",
)


OWN = ("name", "data", "validation", "split", "hold_out", "test", "match", "save_seconds")  # not a choice's to change


class Job(NamedTuple):
    choice: str
    recipe: Recipe
    held: float
    data_folder: str | None
    device: str
    until: float  # begin no run after this time


def main(words: list[str] | None = None) -> None:
    parser = options(__doc__, base="smallnorb_fast", csv="choices.csv")
    parser.add_argument("--minutes", type=float, default=1e9, help="start no run after this many minutes")
    arguments = parser.parse_args(words)
    with refusing():
        base = recipe_of(arguments)
        base = dataclasses.replace(
            base,
            validation=arguments.held,
            test=False,
            hold_out="objects" if base.dataset == "smallnorb" else "images",
        )
        jobs = jobs_of(base, arguments, CHOICES, until=time.time() + 60 * arguments.minutes)
    compare(run, jobs, arguments)


def options(about: str | None, base: str, csv: str) -> argparse.ArgumentParser:
    """Return the options that every script for comparing choices has."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("choices", nargs="*", metavar="CHOICE", help='as "activation=paper lr=0.003"')
    parser.add_argument("--base", default=base, help="the recipe that is changed")
    parser.add_argument("--also", default="", metavar="CHOICE", help="a change in all of them, the base included")
    parser.add_argument("--held", type=float, default=0.4, help="hold out this share of each class, or of its toys")
    parser.add_argument(
        "--splits", type=int, nargs="+", default=[0, 1], help="numbers of the random shares that are held out"
    )
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--workers", type=int, default=3, help="runs at the same time")
    parser.add_argument("--data-folder")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--csv", default=str(Path(__file__).parents[1] / "results" / csv), help="append to this file")
    return parser


@contextmanager
def refusing() -> Iterator[None]:
    """End with one line, not a traceback, if the arguments are wrong."""
    try:
        yield
    except ValueError as error:
        sys.exit(f"{Path(sys.argv[0]).stem}: {error}")


def recipe_of(arguments: argparse.Namespace) -> Recipe:
    if not 0 < arguments.held <= 0.9:
        raise ValueError(f"held must be above 0 and at most 0.9, got {arguments.held:g}")
    if arguments.workers < 1:
        raise ValueError(f"workers must be at least 1, got {arguments.workers}")
    return recipe(arguments.base).with_epochs(arguments.epochs)


def jobs_of(base: Recipe, arguments: argparse.Namespace, choices: Sequence[str], until: float = math.inf) -> list[Job]:
    """Return a job for each choice and split; without choices given, those of ``choices`` that the recipe can have."""
    made: dict[str, Recipe] = {}
    for choice in arguments.choices or choices:
        words = " ".join(f"{arguments.also} {choice}".split())
        try:
            made[words] = changed(base, words)
        except ValueError as error:
            if arguments.choices or not choice:
                raise
            print(f"left out: {error}", file=sys.stderr)
    return [
        Job(
            words, dataclasses.replace(one, split=split), arguments.held, arguments.data_folder, arguments.device, until
        )
        for words, one in made.items()
        for split in arguments.splits
    ]


def compare(run: Callable[[Job], dict[str, Any] | None], jobs: Sequence[Job], arguments: argparse.Namespace) -> None:
    """Run some jobs at a time, and write a row for each; report a job that fails, and go on with the others."""
    end_in_order()
    failed = 0
    with ProcessPoolExecutor(arguments.workers, multiprocessing.get_context("spawn"), end_in_order) as pool:
        try:
            futures = {pool.submit(run, job): job for job in jobs}
            for future in as_completed(futures):
                try:
                    row = future.result()
                except BrokenProcessPool:
                    raise
                except Exception as error:
                    failed += 1
                    where = f"{futures[future].choice!r} on split {futures[future].recipe.split}"
                    print(f"{where}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
                    continue
                if row is not None:
                    append(Path(arguments.csv), row)
        except BaseException:  # a signal, here or in a run: nobody waits for the others
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                child.terminate()
            raise
    if failed:
        sys.exit(f"{failed} of {len(jobs)} runs failed")


def end_in_order() -> None:
    """On SIGTERM exit as usual, so that a process gives up its folder and the lock that others wait for."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def changed(base: Recipe, choice: str) -> Recipe:
    """Return ``base`` with the fields that ``choice`` names."""
    fields: dict[str, Any] = {}
    kinds = field_types()
    for word in choice.split():
        name, _, value = word.partition("=")
        if name not in kinds:
            raise ValueError(f"{word!r}: a recipe has no field {name!r}{nearest(name, kinds)}")
        if name in OWN:
            raise ValueError(f"{word!r}: {name} is what all choices share")
        if kinds[name] is bool:
            if value not in ("yes", "no"):
                raise ValueError(f"{word!r}: {name} is yes or no")
            fields[name] = value == "yes"
        else:
            try:
                fields |= given({name: parser_of(kinds[name])(value)})
            except typer.BadParameter as error:
                raise ValueError(f"{word!r}: {error.message}") from None
    return base.with_fields(**fields)


def run(job: Job) -> dict[str, Any] | None:
    """Train, and return a row, or None if the time is over; the row of a run that diverges says so."""
    if time.time() > job.until:
        return None
    from vbcaps.training.environment import environment
    from vbcaps.training.loop import Interrupted, fit, pick_device

    about = environment(pick_device(job.device), 1)
    start, note = time.time(), ""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        try:
            fit(job.recipe, out, data_folder=job.data_folder, device=job.device)
        except ArithmeticError as error:
            note = str(error)
        except Interrupted as stop:
            sys.exit(stop.code)
        with open(out / "metrics.csv", newline="") as file:
            epochs = list(csv.DictReader(file))
    errors = [float(epoch["validation_error"]) for epoch in epochs]
    last = epochs[-1] if epochs else dict(train_error="nan", loss="nan")
    return dict(
        base=job.recipe.name, choice=job.choice, held=job.held, split=job.recipe.split,
        epochs=len(epochs), **last_and_least(errors), train_error=last["train_error"], loss=last["loss"],
        seconds=f"{time.time() - start:.0f}", flags=flags(job.recipe),
        **{key: about[key] for key in ("commit", "device", "torch")}, note=note,
    )  # fmt: skip


def last_and_least(errors: Sequence[float]) -> dict[str, str]:
    errors = errors or [math.nan]
    return dict(last=f"{errors[-1]:.5f}", last_five=f"{statistics.mean(errors[-5:]):.5f}", least=f"{min(errors):.5f}")


def append(path: Path, row: dict[str, Any]) -> None:
    """Append a row at once, so that a comparison that is cut short keeps the rows that it has."""
    print("  ".join(f"{name} {value}" for name, value in row.items() if value != ""), flush=True)
    new = not path.exists()
    with path.open("a+", newline="") as file:
        file.seek(0)
        if not new and next(csv.reader(file)) != list(row):
            sys.exit(f"{path} has other columns: it is not of this comparison")
        writer = csv.DictWriter(file, list(row))
        if new:
            writer.writeheader()
        writer.writerow(row)


if __name__ == "__main__":
    main()

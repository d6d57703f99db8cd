"""``fit(recipe, folder)``: from a recipe to a folder that explains itself."""

import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import FrameType

import torch

from vbcaps.data import Split, hold_out, load, viewpoints
from vbcaps.kernels.cpu.launch import why_no_library
from vbcaps.training.checkpoint import RunError, fingerprint, seed_folders
from vbcaps.training.distributed import Group, join, leave, started_by_torchrun
from vbcaps.training.evaluate import Evaluation, Scorer, evaluate, predict_scores, summary
from vbcaps.training.learner import NEVER, Learner, NonFinite, Totals, diagnose
from vbcaps.training.recipe import Recipe
from vbcaps.training.runlog import Board, Data, Event, Record, Result, check_folder

__all__ = [
    "Evaluation",
    "Event",
    "Interrupted",
    "NonFinite",
    "Result",
    "evaluate",
    "fit",
    "pick_device",
    "predict_scores",
]

READS = 20  # times an epoch that the host waits for the device: to report, to look for NaN, to save


class Interrupted(Exception):
    """A signal asked the run to end; its state is saved. ``code`` is the exit status that says so."""

    def __init__(self, number: int, folder: Path):
        self.code = 128 + number
        name = signal.Signals(number).name
        super().__init__(f"{name}: the state is saved in {folder}; the same command with --resume goes on")


def fit(
    recipe: Recipe,
    out: str | Path,
    *,
    data_folder: str | Path | None = None,
    device: str = "auto",
    seeds: int = 1,
    resume: bool = False,
    deterministic: bool = True,
    tensorboard: bool = False,
    on_event: Callable[[Event], None] | None = None,
) -> list[Result]:
    """Train ``recipe`` with one or more seeds, and test.

    Arguments:
        out: the run's folder; with several seeds, ``out/seed0`` and so on.
        device: ``auto`` takes a GPU where there is one. Several seeds train there at the same time.
        resume: go on where the folder's state is; a finished run is not run again.
        deterministic: the same seed gives the same bits on the same device, cuDNN's convolutions included.
        tensorboard: write its event files as well.
        on_event: is told of progress. With torchrun only the first process tells, and writes.
    """
    out, place = Path(out), pick_device(device)
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    recipes = [replace(recipe, seed=recipe.seed + k) for k in range(seeds)]
    folders = [out] if seeds == 1 else [out / f"seed{r.seed}" for r in recipes]
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = deterministic, not deterministic
    group = join(place)
    if group.writes:
        if resume and not out.is_dir():
            raise RunError(f"there is no run to resume in {out}")
        if resume and seeds > 1 and (out / "recipe.json").exists():
            raise RunError(f"{out} is one run: resume it without --seeds (seeds=)")
        if resume and seeds == 1 and seed_folders(out):
            raise RunError(f"{out} has a folder for each seed: resume them with --seeds (seeds=), or one by its folder")
        for r, folder in zip(recipes, folders, strict=True):
            check_folder(r, folder, resume)
    data = prepare(recipe, data_folder, place)
    send = on_event if on_event is not None and group.writes else lambda event: None
    together = place.type == "cuda" and group.size == 1
    if together:
        torch.cuda.synchronize(place)  # each run has a stream of its own, and the data must be there
    with listening() as stop, leaving(group):
        runs = []
        for r, folder in zip(recipes, folders, strict=True):
            stream = torch.cuda.Stream(place) if together else None
            runs.append((train(r, folder, data, group, stream, resume, tensorboard, stop, send), stream))
        return in_turns(runs) if together else [result for one in runs for result in in_turns([one])]


def in_turns(runs: list[tuple[Generator[None, None, Result], "torch.cuda.Stream | None"]]) -> list[Result]:
    """Let each run take a step, again and again, until all have ended; then raise what the first to fail raised."""
    results: dict[int, Result] = {}
    errors: dict[int, Exception] = {}
    while len(results) + len(errors) < len(runs):
        for k, (steps, stream) in enumerate(runs):
            if k in results or k in errors:
                continue
            try:
                with nullcontext() if stream is None else torch.cuda.stream(stream):
                    next(steps)
            except StopIteration as end:
                results[k] = end.value
            except Exception as error:
                errors[k] = error
    if errors:
        raise errors[min(errors)]
    return [results[k] for k in sorted(results)]


def train(
    recipe: Recipe,
    folder: Path,
    data: Data,
    group: Group,
    stream: "torch.cuda.Stream | None",
    resume: bool,
    tensorboard: bool,
    stop: "Stop",
    send: Callable[[Event], None],
) -> Generator[None, None, Result]:
    """A run. It yields after every step, so that several can share a GPU."""
    learner = Learner(recipe, data.train, data.view, len(data.classes), group, stream)
    record = Record(recipe, folder, data, learner)
    try:
        return (yield from loop(learner, record, resume, tensorboard, stop, send))
    finally:
        record.close()
        learner.part()


def loop(
    learner: Learner,
    record: Record,
    resume: bool,
    tensorboard: bool,
    stop: "Stop",
    send: Callable[[Event], None],
) -> Generator[None, None, Result]:
    """Epochs of steps, each epoch with its validation and its files; the test at the end."""
    recipe, folder, data, group = record.recipe, record.folder, record.data, record.group
    if record.finished():
        send(record.event("note", message=f"{folder} is finished, there is nothing to do"))
        return record.read_result()
    record.open(resume)
    board = Board(folder, learner.epoch) if tensorboard and group.writes else None
    validate = scorer(learner, data.validation, data.classes)
    if slow := why_slow(recipe, data.train.labels.device):
        send(record.event("note", message=slow))
    if record.steps_done:
        send(record.event("note", message=f"goes on from {record.steps_done} steps done"))
    send(record.event("start"))
    every = max(learner.steps // READS, 1)
    while learner.epoch < recipe.epochs and not record.matched:
        record.begin_epoch()
        while learner.step < learner.steps:
            learner()
            yield
            if learner.step % every == 0 or (stop.signal and group.size == 1):
                send(record.event("step", sound(learner, record)))
                wish = group.largest(2 if stop.signal else int(record.due()), data.train.labels.device)
                if wish:
                    record.save()
                if wish == 2:
                    raise Interrupted(stop.signal or signal.SIGTERM, folder)
        totals, speed = sound(learner, record), record.epoch_speed()
        validation = None if validate is None else validate().error
        record.end_epoch(totals, speed, validation)
        send(record.event("epoch", totals, validation))
        if board is not None:
            board.write(record.rows[-1])
    chosen = record.choose()
    test, familiar = (scorer(learner, split, data.classes) for split in record.to_test())
    result = record.finish(chosen, test and test(), familiar and familiar())
    send(record.event("end", result=result))
    return result


def sound(learner: Learner, record: Record) -> Totals:
    """The epoch so far, or ``NonFinite``: then the run goes back to its state to find where that began."""
    totals = learner.totals()
    if totals.bad != NEVER:
        record.load()
        learner.begin()
        raise diagnose(learner, totals.bad)
    return totals


def why_slow(recipe: Recipe, device: torch.device) -> str:
    """A warning where routing on a CPU has to do without its kernels; looking for them compiles them."""
    routed = recipe.network == "caps" and recipe.precision != "full"
    if device.type != "cpu" or recipe.backend != "auto" or not routed:
        return ""
    why = why_no_library()
    return f"there are no kernels for this CPU, so training takes some 25 times as long: {why}" if why else ""


def scorer(learner: Learner, split: Split | None, classes: tuple[str, ...]) -> Callable[[], Evaluation] | None:
    """A function that evaluates the weights as they are; each process takes every so-manieth image."""
    if split is None:
        return None
    group, mine = learner.group, split
    if group.size > 1:  # alone it takes no copy: several seeds share the data
        mine = split.take(torch.arange(group.rank, len(split.labels), group.size, device=split.labels.device))
    score = Scorer(learner.weights, mine.images, learner.view, stream=learner.stream)
    return lambda: summary(score(), mine.labels, classes, group=group)


def prepare(recipe: Recipe, folder: str | Path | None, device: torch.device, whole: bool = False) -> Data:
    """The parts of the recipe's data, on the device; ``whole``: all of a folder of images is the test."""
    if recipe.data is not None:
        dataset = load(Path(recipe.data).resolve(), size=recipe.image_size or recipe.crop, whole=whole)
    else:
        dataset = load(recipe.dataset, folder, recipe.image_size)
    train, test = dataset.train, dataset.test
    familiar: Split | None = None
    if recipe.viewpoint is not None:
        train, familiar, test = viewpoints(dataset, recipe.viewpoint)
    elif recipe.data is None and recipe.dataset == "affnist":
        familiar = load("mnist", folder).test
    validation = familiar if recipe.match else dataset.validation
    if recipe.validation and not whole:
        train, validation = hold_out(train, recipe.validation, recipe.split, recipe.hold_out)
    view = recipe.view().fit(train)
    view.train(train.images[:1], torch.zeros(1, view.draws))  # a crop that does not fit is an error now
    view.test(test.images[:1])
    total = fingerprint(train, validation, test)
    validation, familiar = (None if split is None else split.to(device) for split in (validation, familiar))
    return Data(train.to(device), validation, familiar, test.to(device), dataset.classes, view, dataset.source, total)


def pick_device(name: str = "auto") -> torch.device:
    """``auto``, ``cpu``, ``cuda`` or ``cuda:1``; under torchrun each process has a GPU of its own."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cpu":
        return torch.device("cpu")
    kind, _, number = name.partition(":")
    if kind != "cuda" or not (number.isdigit() or name == "cuda"):
        raise ValueError(f"device must be auto, cpu, cuda or cuda:NUMBER, got {name!r}")
    if not torch.cuda.is_available():
        raise ValueError(
            f"device={name!r}, but PyTorch {torch.__version__} finds no CUDA device here; use device='cpu'"
        )
    index = int(number) if number else int(os.environ.get("LOCAL_RANK", "0")) if started_by_torchrun() else 0
    if index >= torch.cuda.device_count():
        raise ValueError(f"device={name!r}: there are {torch.cuda.device_count()} CUDA devices, counted from 0")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


@contextmanager
def leaving(group: Group) -> Iterator[None]:
    try:
        yield
    finally:
        if group.size > 1:
            leave()


class Stop:
    """Which signal came, if one did."""

    signal: int = 0


@contextmanager
def listening() -> Iterator[Stop]:
    """Ctrl-C and SIGTERM are noted, once; a second one acts as it always does."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():  # only there can signals be caught
        yield stop
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.getsignal(number) for number in numbers}

    def note(number: int, frame: FrameType | None) -> None:
        stop.signal = number
        restore()

    def restore() -> None:
        for number in numbers:
            signal.signal(number, before[number])

    for number in numbers:
        signal.signal(number, note)
    try:
        yield stop
    finally:
        restore()

"""``fit(recipe, folder)`` trains a recipe: it returns a model and writes a self-explanatory folder."""

import os
import signal
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypedDict, Unpack

import torch

from vbcaps.data import DataError, Dataset, Split, divide, hold_out, load_dataset, overlapping, viewpoints
from vbcaps.data.resize import resize_dataset
from vbcaps.data.stored import Progress
from vbcaps.inference import evaluating, exact_convolutions
from vbcaps.kernels.cpu.launch import why_no_library
from vbcaps.training.checkpoint import fingerprint
from vbcaps.training.distributed import Group, join, leave, started_by_torchrun
from vbcaps.training.evaluate import Evaluation, Scorer, evaluate, summary
from vbcaps.training.events import Event, Hook
from vbcaps.training.files import RunError, inner_folder
from vbcaps.training.health import health_after
from vbcaps.training.learner import NEVER, Learner, NonFinite, Totals, diagnose
from vbcaps.training.memory import freed_memory_kept
from vbcaps.training.recipe import Recipe
from vbcaps.training.recipes import recipe as named_recipe
from vbcaps.training.runfolder import seed_folders
from vbcaps.training.runlog import Board, Data, Result, RunLog, check_folder
from vbcaps.uncertainty.predictive import fit_temperature
from vbcaps.vae import CapsVAE
from vbcaps.weights.header import check_classes
from vbcaps.weights.model import Model
from vbcaps.weights.transfer import Start

__all__ = [
    "Evaluation",
    "Event",
    "Interrupted",
    "NonFinite",
    "Result",
    "evaluate",
    "fit",
    "fit_all",
    "fit_seeds",
    "pick_device",
]

MEASURED = 10_000  # images of overlapping objects from which the view takes its statistics
READS = 20  # how often per epoch the host waits for the device: to report, to look for NaN, to save


class Interrupted(Exception):
    """Raised when a signal ended the run and its state was saved. ``code`` is the exit status for the signal."""

    def __init__(self, number: int, folder: Path):
        self.code = 128 + number
        name = signal.Signals(number).name
        super().__init__(f"{name}: the state is saved in {folder}; the same command with --resume continues")


class Options(TypedDict, total=False):
    """The keyword arguments that ``fit`` and ``fit_seeds`` share."""

    weights: Model | str | Path | None
    data: Dataset | None
    data_folder: str | Path | None
    device: str
    resume: bool
    deterministic: bool
    tensorboard: bool
    on_event: Hook | None


def fit(
    recipe: Recipe | str,
    folder: str | Path,
    *,
    weights: Model | str | Path | None = None,
    data: Dataset | None = None,
    data_folder: str | Path | None = None,
    device: str = "auto",
    resume: bool = False,
    deterministic: bool = True,
    tensorboard: bool = False,
    on_event: Hook | None = None,
) -> Model:
    """Train a recipe with its seed, test, and return the trained model.

    The recipe is trained as it is. ``vbcaps train --data FOLDER`` changes some fields to suit the images of the folder;
    ``vbcaps.training.own_images.for_own_images`` returns a recipe with these changes.

    Args:
        recipe: a ``Recipe`` or the name of one, such as ``"smallnorb_fast"``.
        folder: the folder of the run, which is created; it must not hold a run already unless ``resume`` is given.
        weights: trained weights to begin with: a model, or anything that ``vbcaps.load`` takes (a name, a weights file,
            the folder of a run). Their network must be the recipe's, but the number of channels and the classes may
            differ; with other classes, the class layer starts from random weights.
        data: images and labels in memory, ``vbcaps.data.Dataset``, in place of the recipe's dataset. The weights file
            then says that it was trained on ``data.name``, and has ``image_size``, by default the side of the images.
        data_folder: the folder of the datasets; by default ``VBCAPS_DATA``, else the user's cache.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"`` or ``"auto"``, which takes a GPU if there is one.
        resume: resume from the state in the folder, which no longer needs ``weights``; a finished run is not repeated.
        deterministic: give the same bits for the same seed, device and number of threads, also of cuDNN.
        tensorboard: also write TensorBoard's event files.
        on_event: a function that is called with each ``Event`` of the run (``vbcaps.training.events``). If it raises
            an exception, the run is saved and ends. Under torchrun only the first process calls it, and writes.

    Returns:
        The model, on the device and in eval mode; ``model.result`` has the test error, and the files of the run.

    Example:
        >>> import vbcaps
        >>> model = vbcaps.fit("default", "runs/mine")  # doctest: +SKIP
        >>> model.result.test.error  # doctest: +SKIP
        0.129
    """
    recipe, folder = named_recipe(recipe) if isinstance(recipe, str) else recipe, Path(folder)
    options = Options(
        weights=weights, data=data, data_folder=data_folder, device=device, resume=resume,
        deterministic=deterministic, tensorboard=tensorboard, on_event=on_event,
    )  # fmt: skip
    (model,) = _fit(folder, [recipe], [folder], **options)
    return model


def fit_seeds(recipe: Recipe | str, folder: str | Path, seeds: int, **options: Unpack[Options]) -> list[Model]:
    """Train a recipe with several seeds, and return the model of each. On one GPU all train at the same time.

    Args:
        recipe: a ``Recipe`` or the name of one; its ``seed`` is the first seed.
        folder: receives a folder for each run: ``seed0``, ``seed1`` and so on.
        seeds: the number of seeds.
        options: the keyword arguments of ``fit``.

    Returns:
        The models, in the order of their seeds.

    Example:
        >>> import vbcaps
        >>> models = vbcaps.fit_seeds("default", "runs/three", 3)  # doctest: +SKIP
        >>> [model.recipe.seed for model in models]  # doctest: +SKIP
        [0, 1, 2]
    """
    recipe, folder = named_recipe(recipe) if isinstance(recipe, str) else recipe, Path(folder)
    if seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    recipes = [replace(recipe, seed=recipe.seed + k) for k in range(seeds)]
    return _fit(folder, recipes, [inner_folder(folder / f"seed{r.seed}") for r in recipes], **options)


def fit_all(recipes: Sequence[Recipe], folders: Sequence[Path], **options: Unpack[Options]) -> list[Model]:
    """Train recipes that differ in their seeds alone, each in a folder of its own; return the model of each.

    Args:
        recipes: one for each seed.
        folders: the folders of the runs, which lie in one folder; with ``resume`` each may hold a begun run or none.
        options: the keyword arguments of ``fit``.
    """
    if len({replace(one, seed=0) for one in recipes}) != 1 or len(recipes) != len(folders):
        raise ValueError("fit_all trains one recipe with several seeds, and needs a folder for each")
    return _fit(Path(os.path.commonpath(folders)), list(recipes), list(folders), **options)


def _fit(
    out: Path,
    recipes: list[Recipe],
    folders: list[Path],
    *,
    weights: Model | str | Path | None = None,
    data: Dataset | None = None,
    data_folder: str | Path | None = None,
    device: str = "auto",
    resume: bool = False,
    deterministic: bool = True,
    tensorboard: bool = False,
    on_event: Hook | None = None,
) -> list[Model]:
    """Train recipes that differ in their seeds, each in its folder, which is ``out`` itself or lies in it."""
    recipes = recipes if data is None else [trained_on(data, recipe) for recipe in recipes]
    place = pick_device(device)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = deterministic, not deterministic
    group = join(place)
    if group.writes:
        if resume and not out.is_dir():
            raise RunError(f"there is no run to resume in {out}")
        if resume and folders != [out] and (out / "recipe.json").exists():
            raise RunError(f"{out} is one run: resume it without --seeds (`fit`)")
        if resume and folders == [out] and seed_folders(out):
            raise RunError(f"{out} has a folder for each seed: resume them with --seeds (`fit_seeds`), or one of them")
        for recipe, folder in zip(recipes, folders, strict=True):
            check_folder(recipe, folder, resume)
    start = None if weights is None else Start.of(weights, recipes[0])
    send = on_event if on_event is not None and group.writes else lambda event: None

    def decoding(done: int, count: int) -> None:
        send(Event("decode", recipes[0].seed, out, step=done, steps=count))

    parts = prepare(recipes[0], data_folder, place, dataset=data, progress=decoding)
    check_chooses(recipes[0], parts.validation)
    together = place.type == "cuda" and group.size == 1
    if together:
        torch.cuda.synchronize(place)  # each run has its own stream, and the data must be there
    with listening() as stop, leaving(group), freed_memory_kept(place):
        runs = []
        for recipe, folder in zip(recipes, folders, strict=True):
            stream = torch.cuda.Stream(place) if together else None
            runs.append((train(recipe, folder, parts, group, stream, start, resume, tensorboard, stop, send), stream))
        return in_turns(runs) if together else [model for one in runs for model in in_turns([one])]


def in_turns(runs: list[tuple[Generator[None, None, Model], "torch.cuda.Stream | None"]]) -> list[Model]:
    """Advance the runs in turns, step by step, until all have ended; return their models or raise the first error."""
    models: dict[int, Model] = {}
    errors: dict[int, Exception] = {}
    while len(models) + len(errors) < len(runs):
        for k, (steps, stream) in enumerate(runs):
            if k in models or k in errors:
                continue
            try:
                with nullcontext() if stream is None else torch.cuda.stream(stream):
                    next(steps)
            except StopIteration as end:
                models[k] = end.value
            except Exception as error:
                errors[k] = error
    if errors:
        raise errors[min(errors)]
    return [models[k] for k in sorted(models)]


def train(
    recipe: Recipe,
    folder: Path,
    data: Data,
    group: Group,
    stream: "torch.cuda.Stream | None",
    start: Start | None,
    resume: bool,
    tensorboard: bool,
    stop: "Stop",
    send: Hook,
) -> Generator[None, None, Model]:
    """Train one seed. The generator yields after every step, so that several seeds can share a GPU."""
    begin = None if start is None else partial(start, classes=data.classes)
    learner = Learner(recipe, data.train, data.view, len(data.classes), group, stream, begin)
    log = RunLog(recipe, folder, data, learner, None if start is None else start.about)
    try:
        return (yield from loop(learner, log, resume, tensorboard, stop, send))
    except Exception as error:
        if not (folder / "result.json").exists():
            with suppress(Exception):  # the error that stopped the run is the one to raise
                send(log.event("stop", message=f"{type(error).__name__}: {error}"))
        raise
    finally:
        log.close()
        learner.disconnect()


def loop(
    learner: Learner,
    log: RunLog,
    resume: bool,
    tensorboard: bool,
    stop: "Stop",
    send: Hook,
) -> Generator[None, None, Model]:
    """Train all epochs, validate and write files after each epoch, and test at the end."""
    recipe, folder, data, group = log.recipe, log.folder, log.data, log.group
    if log.finished():
        send(log.event("note", message=f"{folder} is finished, there is nothing to do"))
        return log.finished_model()
    log.open(resume)
    board = Board(folder, learner.epoch) if tensorboard and group.writes else None
    validate = scorer(learner, data.validation, data.classes, measured=False)
    if slow := why_slow(recipe, data.train.labels.device):
        send(log.event("note", message=slow))
    if log.steps_done:
        send(log.event("note", message=f"resumed after {log.steps_done} steps"))
    send(log.event("start"))
    every = max(learner.steps // READS, 1)
    while learner.epoch < recipe.epochs and not log.matched and not log.stalled:
        log.begin_epoch()
        while learner.step < learner.steps:
            learner()
            yield
            if learner.step % every == 0 or (stop.signal and group.size == 1):
                event = log.event("step", sound(learner, log))
                try:
                    send(event)
                except Exception:
                    if group.size == 1:
                        log.save()
                    raise
                wish = group.largest(2 if stop.signal else int(log.due()), data.train.labels.device)
                if wish:
                    log.save()
                if wish == 2:
                    raise Interrupted(stop.signal or signal.SIGTERM, folder)
        totals, speed = sound(learner, log), log.epoch_speed()
        validation = None if validate is None else validate()
        log.end_epoch(totals, speed, validation)
        send(log.event("epoch", totals, None if validation is None else validation.error))
        if board is not None:
            board.write(log.rows[-1])
    if log.stalled and learner.epoch < recipe.epochs:
        send(log.event("note", message=f"stopped after epoch {learner.epoch}: {recipe.patience} epochs were no better"))
    chosen = log.choose()
    fit_codes(learner)
    temperature = temperature_of(learner, data.validation, data.classes) if log.held_out else None
    test, familiar = (scorer(learner, split, data.classes) for split in log.to_test())
    model = log.finish(chosen, temperature, test and test(), familiar and familiar(), health_after(log))
    send(log.event("end", result=model.result))
    return model


def fit_codes(learner: Learner, batch_size: int = 256) -> None:
    """Give a VAE the Gaussian of each class's codes, over all training images; it draws samples from them."""
    vae, train, view = learner.weights, learner.train, learner.view
    if not isinstance(vae, CapsVAE):
        return
    with torch.no_grad(), evaluating(vae), exact_convolutions():
        parts = zip(train.images.split(batch_size), train.labels.split(batch_size), strict=True)
        codes = torch.cat([vae(view.test(images), labels).mean for images, labels in parts])
    vae.fit_codes(codes, train.labels)


def sound(learner: Learner, log: RunLog) -> Totals:
    """Return the totals of the epoch; if a loss was not finite, go back to the saved state and raise the cause."""
    totals = learner.totals()
    if totals.bad != NEVER:
        log.restore()
        learner.begin()
        raise diagnose(learner, totals.bad)
    return totals


def why_slow(recipe: Recipe, device: torch.device) -> str:
    """Return a warning if routing on a CPU runs without its kernels, else ""; this compiles the kernels."""
    routed = recipe.network != "cnn" and recipe.precision != "full"
    if device.type != "cpu" or recipe.backend != "auto" or not routed:
        return ""
    why = why_no_library()
    return f"there are no kernels for this CPU, so training takes some 20 times as long: {why}" if why else ""


def scorer(
    learner: Learner, split: Split | None, classes: tuple[str, ...], measured: bool = True
) -> Callable[[], Evaluation] | None:
    """Return a function that evaluates the present weights; of w processes each takes every w-th image."""
    if split is None:
        return None
    group, mine = learner.group, split
    if group.size > 1:  # a single process copies nothing: several seeds share the data
        mine = split.take(torch.arange(group.rank, len(split.labels), group.size, device=split.labels.device))
    score = scorer_of(learner, mine, classes)
    options: dict[str, Any] = dict(group=group, errors=score.errors, measured=measured, shared=mine.shared)
    return lambda: summary(score(), mine.labels, classes, **options)


def scorer_of(learner: Learner, split: Split, classes: tuple[str, ...]) -> Scorer:
    """Return a function that gives the probabilities of the present weights."""
    of_images = learner.weights, split.images, learner.view, len(classes)
    return Scorer(*of_images, objects=learner.recipe.objects, stream=learner.stream)


def temperature_of(learner: Learner, split: Split | None, classes: tuple[str, ...]) -> float | None:
    """Return the temperature that fits the present weights to held-out images, or None where there are none."""
    if split is None:
        return None
    group = learner.group
    mine = torch.arange(group.rank, len(split.labels), group.size, device=split.labels.device)
    found = scorer_of(learner, split.take(mine), classes)()
    everyones = group.sum(found.new_zeros(len(split.labels), len(classes)).index_copy_(0, mine, found))
    certain = torch.finfo(found.dtype)
    if learner.recipe.objects > 1:  # each probability has a logit of its own
        return fit_temperature(everyones.double().clamp(certain.tiny, 1 - certain.eps / 2).logit(), split.labels)
    return fit_temperature(everyones.clamp_min(certain.tiny).log(), split.labels)


def trained_on(dataset: Dataset, recipe: Recipe) -> Recipe:
    """Return the recipe of a training on images in memory; it names them, and the side to which images are resized."""
    splits = [split for split in (dataset.train, dataset.test, dataset.validation) if split is not None]
    sizes = sorted({tuple(split.images.shape[2:]) for split in splits})
    height, width = sizes[0]
    if recipe.image_size is None and (len(sizes) > 1 or height != width):
        raise DataError(f"{dataset.name}: images must be square and of one size, or image_size be set; got {sizes}")
    return replace(recipe, data=dataset.name, image_size=recipe.image_size or height)


def prepare(
    recipe: Recipe,
    folder: str | Path | None,
    device: torch.device,
    whole: bool = False,
    *,
    dataset: Dataset | None = None,
    progress: Progress | None = None,
) -> Data:
    """Return the parts of the recipe's data, on the device.

    Args:
        recipe: says which dataset, and which of its images are trained on, held out and tested.
        folder: the folder of the datasets.
        device: receives images and labels.
        whole: take all images of a folder as the test set.
        dataset: images in memory, in place of the recipe's; ``trained_on`` gives them their recipe.
        progress: is told how many images of a large folder have been decoded, and how many there are.
    """
    every = whole or recipe.folds > 0  # class folders alone are not divided into training and test images
    if dataset is not None:
        if recipe.groups is not None:
            raise ValueError(
                f"groups of images in memory are in their Split: groups must be None, got {recipe.groups!r}"
            )
        dataset = resize_dataset(dataset, recipe.image_size)
    elif recipe.data is not None:
        own, size = Path(recipe.data).resolve(), recipe.image_size or recipe.crop
        dataset = load_dataset(own, size=size, whole=every, axes=recipe.axes, progress=progress, groups=recipe.groups)
    else:
        dataset = load_dataset(recipe.dataset, folder, recipe.image_size, groups=recipe.groups)
    check_classes(dataset.classes)  # now: the weights files of this training must be readable
    train, test = dataset.train, dataset.test
    familiar: Split | None = None
    if recipe.viewpoint is not None:
        train, familiar, test = viewpoints(dataset, recipe.viewpoint)
    elif recipe.data is None and recipe.dataset == "affnist":
        familiar = load_dataset("mnist", folder).test
    if recipe.folds and not whole:
        if not recipe.fold:
            raise ValueError(f"fold must be 1 to {recipe.folds}, got 0: `fit_folds` trains all folds")
        train, test = divide(train, recipe.folds, recipe.fold, recipe.split)
    validation = familiar if recipe.match else dataset.validation
    if recipe.validation and not whole:
        train, validation = hold_out(train, recipe.validation, recipe.split, recipe.hold_out)
    shown = train
    if recipe.objects > 1:
        some = train.take(torch.arange(0, len(train.labels), max(len(train.labels) // MEASURED, 1)))
        shown, test = together(recipe, some), together(recipe, test)
        validation = None if validation is None else together(recipe, validation)
    view = recipe.view().fit(shown)
    view.train(shown.images[:1], torch.zeros(1, view.draws))  # raise the error of a crop that does not fit now
    view.test(test.images[:1])
    total = fingerprint(train, validation, test)
    validation, familiar = (None if split is None else split.to(device) for split in (validation, familiar))
    return Data(train.to(device), validation, familiar, test.to(device), dataset.classes, view, dataset.source, total)


def together(recipe: Recipe, split: Split) -> Split:
    """Return images with the recipe's number of overlapping objects, always the same ones."""
    return overlapping(split, recipe.objects, recipe.crop) if len(split.labels) else split


def check_chooses(recipe: Recipe, validation: Split | None) -> None:
    """Raise an error if a recipe says how images choose the epoch, but there are none."""
    for field in ("patience", "choose_by"):
        if validation is None and getattr(recipe, field) != getattr(Recipe, field):
            raise ValueError(
                f"{field}={getattr(recipe, field)!r} needs images that choose the epoch: set validation above 0, or "
                "put images in a folder val"
            )


def pick_device(name: str = "auto") -> torch.device:
    """Return the device of this name, see ``fit``; under torchrun each process has its own GPU."""
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
    """The number of the signal that arrived, or 0."""

    signal: int = 0


@contextmanager
def listening() -> Iterator[Stop]:
    """Record the first Ctrl-C, SIGTERM or SIGHUP, of a terminal that closes; a second one has its usual effect."""
    stop = Stop()
    if threading.current_thread() is not threading.main_thread():  # only the main thread can catch signals
        yield stop
        return
    numbers: tuple[signal.Signals, ...] = (signal.SIGINT, signal.SIGTERM)
    if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # which nohup sets
        numbers = (*numbers, signal.SIGHUP)
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

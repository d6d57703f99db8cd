"""What a run writes down: its position, its rows, the best weights so far; and what it tells of them."""

import dataclasses
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from vbcaps.data import Split, View
from vbcaps.training import checkpoint
from vbcaps.training.checkpoint import RunError
from vbcaps.training.evaluate import Evaluation
from vbcaps.training.learner import NEVER, Learner, Totals
from vbcaps.training.recipe import Recipe


class Data(NamedTuple):
    """The parts of a recipe's data."""

    train: Split
    validation: Split | None  # what chooses the weights
    familiar: Split | None  # the familiar views of a viewpoint recipe; MNIST, for affNIST
    test: Split
    classes: tuple[str, ...]
    view: View
    source: str
    sum: str


@dataclass(frozen=True)
class Result:
    """What a finished run gave; errors are shares from 0 to 1."""

    seed: int
    folder: Path
    recipe: Recipe
    parameters: int
    epochs: int
    seconds: float
    loss: float
    train_error: float
    best_epoch: int | None  # where a validation part chose it
    validation: float | None  # its error then
    matched: bool | None  # whether recipe.match was reached
    test: Evaluation | None
    familiar: Evaluation | None
    weights: Path  # those that were tested
    source: str  # of the data: the original files, or in which way they are not

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | dict(
            folder=self.folder.name, recipe=self.recipe.to_json(), weights=self.weights.name
        )


class Event(NamedTuple):
    """Progress, for whoever shows it."""

    kind: str  # start, step, epoch, end; note: a sentence
    seed: int
    folder: Path
    epoch: int = 0  # the present one, from 1
    epochs: int = 0
    step: int = 0  # steps done in this epoch
    steps: int = 0
    loss: float | None = None  # of the epoch so far
    error: float | None = None  # on its training images
    validation: float | None = None  # error
    lr: float = 0.0
    images_per_second: float = 0.0
    eta: float = 0.0  # seconds
    message: str = ""
    result: Result | None = None


def check_folder(recipe: Recipe, folder: Path, resume: bool) -> None:
    """Before any time is spent: may a run of this recipe write here?"""
    if not resume and any((folder / name).exists() for name in ("state.safetensors", "result.json")):
        raise RunError(f"{folder} already holds a run: resume it, or choose another folder")
    if resume and (folder / "recipe.json").exists():
        checkpoint.check_same(checkpoint.read_json(folder / "recipe.json"), recipe, folder)


class Moment(NamedTuple):
    """Speed is what happened between two of them."""

    time: float
    steps: int  # done by then


class Record:
    """The folder of one run, as its learner goes on. Only the first of several processes writes."""

    def __init__(self, recipe: Recipe, folder: Path, data: Data, learner: Learner):
        self.recipe, self.folder, self.data, self.learner, self.group = recipe, folder, data, learner, learner.group
        self.device = data.train.labels.device
        self.writer = checkpoint.Writer()
        self.held: int | None = None  # the folder, while this run is open
        self.rows: list[dict[str, Any]] = []
        self.best: dict[str, Any] | None = None  # the row with the lowest validation error
        self.seconds = self.epoch_seconds = 0.0  # before this process: of the run, of training in the present epoch
        self.began = self.saved = time.perf_counter()
        self.first = 0  # steps when this process began
        self.seen = self.turned = Moment(self.began, 0)  # of the last event, and when the epoch began

    @property
    def matched(self) -> bool:
        return bool(self.recipe.match and self.rows and self.rows[-1]["validation_error"] <= self.recipe.match)

    def has(self, name: str) -> bool:
        there = self.group.writes and (self.folder / name).exists()
        return bool(self.group.largest(int(there), self.device))

    def finished(self) -> bool:
        return self.has("result.json")

    def open(self, resume: bool) -> None:
        """Go on from the state, or begin; either way see first that there is room."""
        if self.group.writes:
            size = len(checkpoint.pack(self.learner.tensors(), {}))
            checkpoint.check_writable(self.folder, 4 * size)  # state, last, best, and the one being written
            self.held = checkpoint.lock(self.folder)
            check_folder(self.recipe, self.folder, resume)  # again: another run may have ended meanwhile
        if resume and self.has("state.safetensors"):
            self.load()
        else:
            if self.group.writes:
                checkpoint.write_json(self.folder / "recipe.json", self.recipe.to_json())
            self.save()
            self.wait()
        if self.group.writes:
            about, file = checkpoint.environment(self.device, self.group.size), self.folder / "environment.json"
            if resume and file.exists():
                about = checkpoint.went_on(checkpoint.read_json(file), about)
            checkpoint.write_json(file, about)
            checkpoint.write(self.folder / "metrics.csv", checkpoint.pack_metrics(self.rows))
        self.began = self.saved = time.perf_counter()
        self.first = self.steps_done
        self.seen = Moment(self.began, self.first)

    def load(self) -> None:
        self.wait()
        path = self.folder / "state.safetensors"
        tensors, state = checkpoint.unpack(self.group.read(path, self.device), str(path))
        if state.get("format") != checkpoint.STATE:
            raise RunError(f"{path} is not the state of a run")
        try:
            recipe, images, epoch, step = (state[key] for key in ("recipe", "data", "epoch", "step"))
            self.rows, self.best = state["rows"], state["best"]
            self.seconds, self.epoch_seconds = state["seconds"], state["epoch_seconds"]
        except KeyError as error:
            raise RunError(f"{path} is damaged: its header has no {error}") from error
        checkpoint.check_same(recipe, self.recipe, self.folder)
        if images != self.data.sum:
            raise RunError(f"{self.folder} was trained on other images than are there now ({self.data.source})")
        if len(self.rows) != epoch or not (0 <= epoch <= self.recipe.epochs and 0 <= step <= self.learner.steps):
            raise RunError(f"{path} is damaged: it stands at epoch {epoch}, step {step}, with {len(self.rows)} rows")
        checkpoint.put(self.learner.tensors(), tensors, str(path))
        self.learner.bad.fill_(NEVER)
        if not self.group.writes:
            self.learner.sums.zero_()  # the first process has those of all
        self.learner.epoch, self.learner.step = epoch, step

    def save(self) -> None:
        """The state as it is now; it may be on the disk only after ``wait``."""
        state = self.pack_state()
        if self.group.writes:
            self.writer({self.folder / "state.safetensors": state})
        self.saved = time.perf_counter()

    def wait(self) -> None:
        self.writer.wait()

    def close(self) -> None:
        """However it ended: what it saved is on the disk, and another run may have the folder."""
        try:
            self.wait()
        finally:
            if self.held is not None:
                os.close(self.held)
                self.held = None

    def pack_state(self) -> bytes:
        """All that is needed to go on, in one file that is replaced in one step."""
        tensors = self.learner.tensors() | {"sums": self.group.sum(self.learner.sums)}
        state = dict(
            format=checkpoint.STATE, recipe=self.recipe.to_json(), data=self.data.sum,
            epoch=self.learner.epoch, step=self.learner.step, rows=self.rows, best=self.best, seconds=self.elapsed(),
            epoch_seconds=time.perf_counter() - self.turned.time if self.learner.step else 0.0,
        )  # fmt: skip
        return checkpoint.pack(tensors, state)

    def due(self) -> bool:
        """Whether it is time to save within an epoch; the first process's clock counts."""
        late = time.perf_counter() - self.saved > self.recipe.save_seconds > 0
        return late and self.group.writes

    def begin_epoch(self) -> None:
        self.learner.begin()
        self.turned = Moment(time.perf_counter() - self.epoch_seconds, self.learner.epoch * self.learner.steps)
        self.epoch_seconds = 0.0

    def epoch_speed(self) -> float:
        """Images a second of its training alone: to be asked before validation."""
        return self.speed(self.turned)

    def end_epoch(self, totals: Totals, speed: float, validation: float | None) -> None:
        """Weights first, then the state, then the table: a crash between them is made good by going on."""
        learner = self.learner
        row = dict(
            epoch=learner.epoch + 1, loss=totals.loss, train_error=totals.error, validation_error=validation,
            lr=self.lr(), seconds=round(self.elapsed(), 3), images_per_second=float(f"{speed:.5g}"),
        )  # fmt: skip
        self.rows.append(row)
        better = validation is not None and (self.best is None or validation <= self.best["validation_error"])
        self.best = row if better else self.best
        learner.epoch, learner.step = learner.epoch + 1, 0
        learner.sums.zero_()
        state = self.pack_state()
        if self.group.writes:
            weights, metrics = self.pack_weights(row), checkpoint.pack_metrics(self.rows)
            files = {"best.safetensors": weights} if better else {}
            files |= {"last.safetensors": weights, "state.safetensors": state, "metrics.csv": metrics}
            self.writer({self.folder / name: content for name, content in files.items()})
        self.saved = time.perf_counter()

    def pack_weights(self, row: dict[str, Any], test: float | None = None) -> bytes:
        about = dict(epoch=row["epoch"], validation_error=row["validation_error"], test_error=test, data=self.data.sum)
        return checkpoint.pack_weights(self.learner.weights, self.recipe, self.data.classes, self.data.view, **about)

    def choose(self) -> str:
        """The weights that count, best on the validation part or last: gives the learner them, returns their name."""
        self.wait()
        if self.best is None:
            return "last.safetensors"
        path = self.folder / "best.safetensors"
        if not self.has(path.name):
            raise RunError(f"{path} is missing, and with it the weights that were best in validation")
        checkpoint.put(
            self.learner.weights.state_dict(),
            checkpoint.unpack(self.group.read(path, self.device), str(path))[0],
            str(path),
        )
        return path.name

    def to_test(self) -> tuple[Split | None, Split | None]:
        """(test set, familiar views): none where weights are still being chosen on a share of the training set."""
        tested = self.recipe.test or not self.recipe.validation
        return (self.data.test, self.data.familiar) if tested else (None, None)

    def finish(self, chosen: str, test: Evaluation | None, familiar: Evaluation | None) -> Result:
        last = self.rows[-1]
        result = Result(
            seed=self.recipe.seed, folder=self.folder, recipe=self.recipe,
            parameters=sum(p.numel() for p in self.learner.net.parameters()),
            epochs=last["epoch"], seconds=self.elapsed(), loss=last["loss"], train_error=last["train_error"],
            best_epoch=None if self.best is None else self.best["epoch"],
            validation=None if self.best is None else self.best["validation_error"],
            matched=self.matched if self.recipe.match else None, test=test, familiar=familiar,
            weights=self.folder / chosen, source=self.data.source,
        )  # fmt: skip
        if self.group.writes:
            weights = self.pack_weights(self.best or last, None if test is None else test.error)
            checkpoint.write(self.folder / chosen, weights)
            checkpoint.write_json(self.folder / "result.json", result.to_json())
        return result

    def read_result(self) -> Result:
        path = self.folder / "result.json"
        try:
            fields = json.loads(self.group.read(path, self.device))
            for part in ("test", "familiar"):
                if fields[part] is not None:
                    fields[part] = Evaluation.from_json(fields[part])
            fields |= dict(folder=self.folder, recipe=self.recipe, weights=self.folder / fields["weights"])
            return Result(**fields)
        except (ValueError, KeyError, TypeError) as error:
            raise RunError(f"{path} is damaged ({error}): remove it, and resume, to test again") from error

    @property
    def steps_done(self) -> int:
        return self.learner.epoch * self.learner.steps + self.learner.step

    def elapsed(self) -> float:
        return self.seconds + time.perf_counter() - self.began

    def speed(self, since: Moment) -> float:
        """Images a second since then."""
        return (self.steps_done - since.steps) * self.learner.batch / max(time.perf_counter() - since.time, 1e-9)

    def lr(self) -> float:
        step = max(self.steps_done - 1, 0)
        return self.recipe.learning_rate(step, self.learner.steps)

    def event(
        self,
        kind: str,
        totals: Totals | None = None,
        validation: float | None = None,
        message: str = "",
        result: Result | None = None,
    ) -> Event:
        learner, epochs = self.learner, self.recipe.epochs
        now, steps = time.perf_counter(), self.steps_done
        done, left = steps - self.first, epochs * learner.steps - steps
        eta = (now - self.began) / done * left if done > 0 else 0.0
        speed = self.rows[-1]["images_per_second"] if kind == "epoch" else self.speed(self.seen)
        self.seen = Moment(now, steps)
        loss, error = (None, None) if totals is None else (totals.loss, totals.error)
        ended = learner.step == 0 and kind in ("epoch", "end")
        return Event(
            kind, self.recipe.seed, self.folder, learner.epoch + (not ended), epochs,
            learner.steps if ended else learner.step, learner.steps, loss, error, validation, self.lr(), speed, eta,
            message, result,
        )  # fmt: skip


class Board:
    """TensorBoard's event files, beside the others."""

    def __init__(self, folder: Path, epoch: int):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise RunError("tensorboard is not installed: pip install tensorboard, or leave the flag out") from None
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=epoch + 1)

    def write(self, row: dict[str, Any]) -> None:
        for name, value in row.items():
            if name != "epoch" and value is not None:
                self.writer.add_scalar(name, value, row["epoch"])
        self.writer.flush()

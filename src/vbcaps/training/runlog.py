"""The log of a run: the files in its folder, its events, and the state that it resumes from."""

import dataclasses
import json
import os
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import vbcaps
from vbcaps import disk
from vbcaps.data import Split, View
from vbcaps.health import Health
from vbcaps.models import current_names
from vbcaps.training.checkpoint import State, check_same, is_number, pack_state, unpack_state
from vbcaps.training.environment import commit, environment, other_threads, with_resumption
from vbcaps.training.evaluate import Evaluation
from vbcaps.training.events import Event, Kind
from vbcaps.training.files import RunError, Writer, check_writable, inner_folder, lock, read_json, write, write_json
from vbcaps.training.learner import NEVER, Learner, Totals
from vbcaps.training.recipe import Recipe
from vbcaps.training.runfolder import BEFORE, STATE, pack_metrics, sums_of
from vbcaps.weights.file import pack_weights, unpack_weights
from vbcaps.weights.model import Model, model_of
from vbcaps.weights.tensors import LONGEST, copy_tensors, pack_tensors


class Data(NamedTuple):
    """The parts of a recipe's data."""

    train: Split
    validation: Split | None  # the images that choose the weights
    familiar: Split | None  # the familiar views of a viewpoint recipe; MNIST, for affNIST
    test: Split
    classes: tuple[str, ...]
    view: View
    source: str
    sum: str


@dataclass(frozen=True)
class Result:
    """The result of a finished run; errors are shares from 0 to 1."""

    seed: int
    folder: Path
    recipe: Recipe
    parameters: int
    epochs: int
    seconds: float
    loss: float
    train_error: float
    best_epoch: int | None  # the epoch that is best by recipe.choose_by, if there is a validation part
    validation: float | None  # the validation error in that epoch
    matched: bool | None  # whether recipe.match was reached
    test: Evaluation | None
    familiar: Evaluation | None
    weights: Path  # the tested weights
    source: str  # says whether the data are the original files, and if not how they differ
    stopped_early: bool | None = None  # whether recipe.patience ended the run before its last epoch
    health: Health | None = None  # what the capsules of these weights do

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | dict(
            folder=self.folder.name, recipe=self.recipe.to_json(), weights=self.weights.name,
            health=None if self.health is None else self.health.to_json(),
        )  # fmt: skip


def check_folder(recipe: Recipe, folder: Path, resume: bool) -> None:
    """Raise an error if a run of this recipe may not write to the folder."""
    if not resume and any((folder / name).exists() for name in (STATE, BEFORE, "result.json")):
        raise RunError(f"{folder} already holds a run: resume it, or choose another folder")
    if resume and (folder / "recipe.json").exists():
        check_same(read_json(folder / "recipe.json"), recipe, folder)


class Moment(NamedTuple):
    """A time and the steps done by then; speed is measured between two moments."""

    time: float
    steps: int  # done by then


class RunLog:
    """The folder of one run while it trains. Only the first of several processes writes.

    Args:
        recipe: the recipe of the run.
        folder: the folder of the run.
        data: the parts of its data.
        learner: the learner that is trained.
        began_with: the trained weights that the learner began with (``weights``, their name, and ``sum``, a checksum);
            None for random ones.
    """

    def __init__(
        self, recipe: Recipe, folder: Path, data: Data, learner: Learner, began_with: dict[str, Any] | None = None
    ):
        self.recipe, self.folder, self.data, self.learner, self.group = recipe, folder, data, learner, learner.group
        self.began_with = began_with
        self.device = data.train.labels.device
        self.writer = Writer({STATE: BEFORE})
        self.held: int | None = None  # the lock on the folder, while this run is open
        self.rows: list[dict[str, Any]] = []
        self.best: dict[str, Any] | None = None  # the row that is best in validation
        self.seconds = self.epoch_seconds = 0.0  # before this process: of the run, of training in the present epoch
        self.began = self.saved = time.perf_counter()
        self.first = 0  # steps when this process began
        self.seen = self.turned = Moment(self.began, 0)  # of the last event, and when the epoch began

    @property
    def most(self) -> int:
        """Return the most bytes of a state or a weights file of this run."""
        return LONGEST + 2 * sum(x.numel() * max(x.element_size(), 4) for x in self.learner.tensors().values())

    @property
    def matched(self) -> bool:
        return bool(self.recipe.match and self.rows and self.rows[-1]["validation_error"] <= self.recipe.match)

    @property
    def chosen_by(self) -> str:
        """Return the column that chooses the best epoch."""
        return f"validation_{self.recipe.choose_by}"

    @property
    def stalled(self) -> bool:
        """Return whether so many epochs as the recipe has patience for were no better than an earlier one."""
        if not self.recipe.patience or not self.rows:
            return False
        errors = [row[self.chosen_by] for row in self.rows]
        return len(errors) - 1 - errors.index(min(errors)) >= self.recipe.patience

    def has(self, name: str) -> bool:
        there = self.group.writes and (self.folder / name).exists()
        return bool(self.group.largest(int(there), self.device))

    def finished(self) -> bool:
        return self.has("result.json")

    def open(self, resume: bool) -> None:
        """Resume from the state, or begin; before that, check that the folder has room and lock it."""
        if self.group.writes:
            size = len(pack_tensors(self.learner.tensors(), {}))
            check_writable(self.folder, 5 * size)  # state, the one before, last, best, and the one being written
            self.held = lock(self.folder)
            disk.clear_parts(self.folder)
            check_folder(self.recipe, self.folder, resume)  # again: another run may have ended meanwhile
        if resume and (self.has(STATE) or self.has(BEFORE)):
            self.restore()
            self.write_environment(resume)
        else:
            self.check_weights(resume)
            self.write_environment(resume)  # first: it says which weights a run without a state must begin with
            if self.group.writes:
                write_json(self.folder / "recipe.json", self.recipe.to_json())
            self.save()
            self.wait()
        if self.group.writes:
            write(self.folder / "metrics.csv", pack_metrics(self.rows))
        self.began = self.saved = time.perf_counter()
        self.first = self.steps_done
        self.seen = Moment(self.began, self.first)

    def write_environment(self, resume: bool) -> None:
        """Write ``environment.json``: the environment, and at the beginning of a run its initial weights."""
        if not self.group.writes:
            return
        now, file = environment(self.device, self.group.size), self.folder / "environment.json"
        if resume and file.exists():
            before = read_json(file)
            if sentence := other_threads(before, now):
                warnings.warn(f"{self.folder} {sentence}", stacklevel=2)
            now = with_resumption(before, now)
        elif self.began_with is not None:
            now |= dict(began_with=self.began_with)
        write_json(file, now)

    def check_weights(self, resume: bool) -> None:
        """Raise an error if a run that was killed before its first state is resumed with other initial weights."""
        file = self.folder / "environment.json"
        before = read_json(file).get("began_with") if resume and self.group.writes and file.exists() else None
        if before is not None and self.began_with != before:
            raise RunError(
                f"{self.folder} was to begin with the weights {before['weights']} and has no state yet: train with "
                "these weights in a new folder"
            )

    def restore(self) -> None:
        """Go back to the saved state, or where that is gone, to the one before it."""
        self.wait()
        path = self.folder / (STATE if self.has(STATE) else BEFORE)
        content = self.read(path)
        try:
            tensors, state = unpack_state(content, str(path))
            self.check_position(path, state)
        except RunError as error:
            raise RunError(f"{error}{self.offer(path)}") from error
        self.rows, self.best, self.began_with = state.rows, state.best, state.began_with
        self.seconds, self.epoch_seconds = state.seconds, state.epoch_seconds
        check_same(state.recipe, self.recipe, self.folder)
        if state.data != self.data.sum:
            raise RunError(f"{self.folder} was trained on other images than the present ones ({self.data.source})")
        copy_tensors(self.learner.tensors(), current_names(tensors), str(path))
        self.learner.bad.fill_(NEVER)
        if not self.group.writes:
            self.learner.sums.zero_()  # the first process has the sums of all
        self.learner.epoch, self.learner.step = state.epoch, state.step

    def check_position(self, path: Path, state: State) -> None:
        """Raise an error if a state stands where no run of this recipe can be."""
        epoch, step, rows = state.epoch, state.step, len(state.rows)
        if rows != epoch or not (0 <= epoch <= self.recipe.epochs and 0 <= step <= self.learner.steps):
            raise RunError(f"{path} is damaged: it stands at epoch {epoch}, step {step}, with {rows} rows")
        if not all(is_number(row.get(self.chosen_by, "")) for row in state.rows):
            raise RunError(f"{path} is damaged: a row has no {self.chosen_by}")

    def read(self, path: Path, limit: int | None = None) -> bytes:
        """Return the content of a file of the run, which only the first process needs to have.

        Args:
            path: the file.
            limit: its most bytes; by default twice what the state of the learner takes, and a header.
        """
        try:
            return self.group.read(path, self.device, self.most if limit is None else limit)
        except OSError as error:
            raise RunError(f"cannot read {path}: {error.strerror}") from error

    def offer(self, path: Path) -> str:
        """Return the end of an error about a state: what to do with the state before it, if that is whole."""
        before = self.folder / BEFORE
        if path == before or not before.exists():
            return ""
        try:
            _, state = unpack_state(disk.read_bytes(before, self.most), str(before))
        except (OSError, RunError):
            return ""
        return (
            f". The state before it, {before.name}, is whole, at epoch {state.epoch + 1}, step {state.step}: remove "
            f"{path.name}, and --resume continues from there, with the same bits"
        )

    def save(self) -> None:
        """Begin to write the present state; it is on the disk only after ``wait``."""
        state = self.pack_state()
        if self.group.writes:
            self.writer({self.folder / STATE: state})
        self.saved = time.perf_counter()

    def wait(self) -> None:
        self.writer.wait()

    def close(self) -> None:
        """Wait until every saved file is on the disk, and release the folder."""
        try:
            self.wait()
        finally:
            if self.held is not None:
                os.close(self.held)
                self.held = None

    def pack_state(self) -> bytes:
        """Return the content of ``state.safetensors``, everything that is needed to resume."""
        tensors = self.learner.tensors() | {"sums": self.group.sum(self.learner.sums)}
        state = State(
            recipe=self.recipe.to_json(), data=self.data.sum,
            epoch=self.learner.epoch, step=self.learner.step, rows=self.rows, best=self.best, seconds=self.elapsed(),
            epoch_seconds=time.perf_counter() - self.turned.time if self.learner.step else 0.0,
            began_with=self.began_with,
        )  # fmt: skip
        return pack_state(tensors, state)

    def due(self) -> bool:
        """Return whether it is time to save within an epoch, by the clock of the first process."""
        late = time.perf_counter() - self.saved > self.recipe.save_seconds > 0
        return late and self.group.writes

    def begin_epoch(self) -> None:
        self.learner.begin()
        self.turned = Moment(time.perf_counter() - self.epoch_seconds, self.learner.epoch * self.learner.steps)
        self.epoch_seconds = 0.0

    def epoch_speed(self) -> float:
        """Return the images per second of the epoch's training; call it before validation."""
        return self.speed(self.turned)

    def end_epoch(self, totals: Totals, speed: float, validation: Evaluation | None) -> None:
        """Write weights, state and table in this order, so that resuming repairs the effect of a crash between them."""
        learner = self.learner
        row: dict[str, Any] = dict(
            epoch=learner.epoch + 1, loss=totals.loss, train_error=totals.error,
            validation_error=None if validation is None else validation.error,
            lr=self.lr(), seconds=round(self.elapsed(), 3), images_per_second=float(f"{speed:.5g}"),
        )  # fmt: skip
        if self.recipe.choose_by == "balanced_error":
            row |= dict(validation_balanced_error=None if validation is None else validation.balanced_error)
        if totals.parts:
            of_validation = None if validation is None else validation.reconstruction
            row |= totals.parts | dict(validation_reconstruction=of_validation)
        self.rows.append(row)
        by = self.chosen_by
        better = validation is not None and (self.best is None or row[by] <= self.best[by])
        self.best = row if better else self.best
        learner.epoch, learner.step = learner.epoch + 1, 0
        learner.sums.zero_()
        state = self.pack_state()
        if self.group.writes:
            weights, metrics = self.pack_weights(row), pack_metrics(self.rows)
            files = {"best.safetensors": weights} if better else {}
            files |= {"last.safetensors": weights, STATE: state, "metrics.csv": metrics}
            self.writer({self.folder / name: content for name, content in files.items()})
        self.saved = time.perf_counter()

    def pack_weights(
        self,
        row: dict[str, Any],
        test: Evaluation | None = None,
        temperature: float | None = None,
        health: Health | None = None,
    ) -> bytes:
        about = dict(
            epoch=row["epoch"], validation_error=row["validation_error"],
            test_error=None if test is None else test.error, data=self.data.sum,
            version=vbcaps.__version__, commit=commit(),
        )  # fmt: skip
        if test is not None and test.reconstruction is not None:
            about |= dict(reconstruction=test.reconstruction)
        if temperature is not None:
            about |= dict(temperature=round(temperature, 4))
        if health is not None:
            about |= dict(health=health.to_json())
        if self.began_with is not None:
            about |= dict(began_with=self.began_with)
        return pack_weights(self.learner.weights, self.recipe, self.data.classes, self.data.view, about)

    def choose(self) -> str:
        """Load the weights to be tested, the best on the validation part or else the last, and return their name."""
        self.wait()
        if self.best is None:
            return "last.safetensors"
        path = self.folder / "best.safetensors"
        if not self.has(path.name):
            raise RunError(f"{path} is missing, and with it the weights that were best in validation")
        kept = unpack_weights(self.read(path), str(path))
        copy_tensors(self.learner.weights.state_dict(), kept.tensors, str(path))
        return path.name

    def to_test(self) -> tuple[Split | None, Split | None]:
        """Return the test set and the familiar views, or None for both while a share of the training set chooses, and
        where the test set has no images. In a cross-validation the part that is held out is always tested."""
        tested = (self.recipe.test or not self.recipe.validation or self.recipe.folds) and len(self.data.test.labels)
        return (self.data.test, self.data.familiar) if tested else (None, None)

    @property
    def held_out(self) -> bool:
        """Return whether the images that chose the weights are held out of training, and no part of the test set."""
        return self.best is not None and not self.recipe.match

    def finish(
        self,
        chosen: str,
        temperature: float | None,
        test: Evaluation | None,
        familiar: Evaluation | None,
        health: Health | None = None,
    ) -> Model:
        """Write the tested weights and the result; return them as a model."""
        last = self.rows[-1]
        result = Result(
            seed=self.recipe.seed, folder=self.folder, recipe=self.recipe,
            parameters=sum(p.numel() for p in self.learner.net.parameters()),
            epochs=last["epoch"], seconds=self.elapsed(), loss=last["loss"], train_error=last["train_error"],
            best_epoch=None if self.best is None else self.best["epoch"],
            validation=None if self.best is None else self.best["validation_error"],
            matched=self.matched if self.recipe.match else None, test=test, familiar=familiar,
            weights=self.folder / chosen, source=self.data.source,
            stopped_early=last["epoch"] < self.recipe.epochs if self.recipe.patience else None, health=health,
        )  # fmt: skip
        weights = self.pack_weights(self.best or last, test, temperature, health)
        if self.group.writes:
            write(result.weights, weights)
            write_json(self.folder / "result.json", result.to_json() | dict(sums=sums_of(self.folder)))
            with suppress(OSError):
                (self.folder / BEFORE).unlink()
        return self.model(weights, result)

    def model(self, content: bytes, result: Result) -> Model:
        """Return the model in the content of a weights file of this run."""
        return model_of(unpack_weights(content, str(result.weights)), result.weights, self.device, result=result)

    def finished_model(self) -> Model:
        """Return the model of a run that is finished."""
        result = self.read_result()
        return self.model(self.read(result.weights), result)

    def read_result(self) -> Result:
        path = self.folder / "result.json"
        try:
            fields = json.loads(self.read(path, disk.RESULT))
            for split in ("test", "familiar"):
                if fields[split] is not None:
                    fields[split] = Evaluation.from_json(fields[split])
            if fields.get("health") is not None:
                fields["health"] = Health.from_json(fields["health"])
            fields.pop("sums", None)
            fields |= dict(folder=self.folder, recipe=self.recipe, weights=self.folder / fields["weights"])
            return Result(**fields)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            said = isinstance(error, ValueError) and not isinstance(error, UnicodeDecodeError)
            missing = f"it has no {error}" if isinstance(error, KeyError) else "its fields are not those of a result"
            why = error if said else missing
            raise RunError(f"{path} is damaged ({why}): remove it, and resume, to test again") from error

    @property
    def steps_done(self) -> int:
        return self.learner.epoch * self.learner.steps + self.learner.step

    def elapsed(self) -> float:
        return self.seconds + time.perf_counter() - self.began

    def speed(self, since: Moment) -> float:
        """Return the images per second since a moment."""
        return (self.steps_done - since.steps) * self.learner.batch / max(time.perf_counter() - since.time, 1e-9)

    def lr(self) -> float:
        step = max(self.steps_done - 1, 0)
        return self.recipe.learning_rate(step, self.learner.steps)

    def event(
        self,
        kind: Kind,
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
            message, result, self.recipe, dict(self.rows[-1]) if kind == "epoch" else None,
        )  # fmt: skip


class Board:
    """Writes TensorBoard's event files into the folder of a run."""

    def __init__(self, folder: Path, epoch: int):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise RunError("TensorBoard's files need tensorboard: pip install 'vbcaps[tensorboard]'") from error
        try:
            self.writer = SummaryWriter(str(inner_folder(folder / "tensorboard")), purge_step=epoch + 1)
        except OSError as error:
            raise RunError(f"cannot write in {folder / 'tensorboard'}: {error.strerror}") from error

    def write(self, row: dict[str, Any]) -> None:
        for name, value in row.items():
            if name != "epoch" and value is not None:
                self.writer.add_scalar(name, value, row["epoch"])
        self.writer.flush()

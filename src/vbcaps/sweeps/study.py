"""The trials of a sweep, kept by Optuna in a file of its folder or in a database, and handed out to one worker each.

Everything that changes the trials happens under the sweep's mutex (``claims``), so that two workers never draw at the
same time, and no setting is drawn twice. A trial belongs to the worker that has its claim. Where a trial is running but
its claim is free, its worker has died: the next worker takes the trial itself, with its number and its folder, so that
its checkpoint is there. A worker that lost its claim meanwhile cannot write a result.
"""

import contextlib
import math
import os
import platform
import random
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple

from vbcaps.data.errors import written
from vbcaps.sweeps.claims import Claims, DatabaseClaims, FileClaims, check_database
from vbcaps.sweeps.plan import Plan
from vbcaps.sweeps.space import Word, grid_of
from vbcaps.training.files import RunError, inner_folder, make_folder, read_json, write_json
from vbcaps.weights.header import check_words, shortened

if TYPE_CHECKING:
    import optuna

FILE, ABOUT, CLAIMS = "sweep.db", "sweep.json", ".claims"
DEATHS = 3  # workers that may die of a trial before it counts as failed
SQLITE: dict[str, Any] = dict(connect_args=dict(timeout=120))  # seconds that a process waits for the file
DRAWS = 50  # tries to draw a setting that is new
PLAN, STARTS, ERROR, AGAIN = "plan", "starts", "error", "again"  # attributes of a study and of its trials
ABOUTS: dict[str, tuple[type, ...]] = dict(
    starts=(int,), worker=(str,), error=(str,), epochs=(int,), parameters=(int,), seconds=(float, int),
    best_epoch=(int, NoneType),
)  # fmt: skip


class Trial(NamedTuple):
    """A trial as the sweep knows it."""

    number: int
    state: str  # running, waiting (its worker has gone), done, failed
    params: dict[str, Word]
    error: float | None  # on held-out images
    about: dict[str, Any]  # epoch, seconds, parameters, worker; error: why it failed


class Work(NamedTuple):
    """A trial that a worker has to train."""

    number: int
    params: dict[str, Word]
    starts: int  # with this one


class Study:
    """A sweep in its folder. ``open_sweep`` makes one."""

    def __init__(self, folder: Path, claims: Claims, storage: "optuna.storages.BaseStorage", name: str):
        self.folder, self.claims, self.storage, self.name = folder, claims, storage, name
        self.study: optuna.Study | None = None
        self.plan: Plan

    def begin(self, plan: Plan | None) -> None:
        """Write the plan, or join the sweep that is there, which may get more trials."""
        import optuna

        with self.alone():
            names = [one.study_name for one in optuna.get_all_study_summaries(self.storage, include_best_trial=False)]
            if plan is None and self.name not in names:
                raise RunError(
                    f"there is no sweep {self.name} in {self.folder}: begin it with `vbcaps sweep RECIPE --field …`"
                )
            study = optuna.create_study(
                storage=self.storage, study_name=self.name, direction="minimize", load_if_exists=True
            )
            there = study.user_attrs.get(PLAN)
            if there is not None:
                before = Plan.from_json(there, self.where)
                if plan is not None and (lines := plan.differences(before)):
                    raise RunError(
                        f"{self.folder} is another sweep ({'; '.join(lines)}): continue it with --resume, or choose "
                        "another folder"
                    )
                if plan is None or plan.trials <= before.trials:
                    plan = before
            assert plan is not None
            if there != plan.to_json():
                study.set_user_attr(PLAN, plan.to_json())
            self.study, self.plan = study, plan

    def extend(self, trials: int) -> None:
        """Let the sweep have more trials."""
        import dataclasses

        if trials > self.plan.trials:
            self.plan = dataclasses.replace(self.plan, trials=trials)
            with self.alone():
                self._study.set_user_attr(PLAN, self.plan.to_json())

    @property
    def _study(self) -> "optuna.Study":
        assert self.study is not None, "begin the study first"
        return self.study

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the mutex; errors of the storage become sentences."""
        if isinstance(self.claims, FileClaims):
            check_database(self.folder / FILE)
        with self.claims.mutex(), clear(self.where):
            yield

    def take(self) -> Work | None:
        """Claim a trial that nobody trains, or draw a new one; return None where there is none now."""
        with self.alone():
            self._read_plan()
            self._study.sampler = sampler_of(self.plan, len(self._study.get_trials(deepcopy=False)))
            for trial in self._trials("RUNNING"):
                if self.claims.take(trial.number) and (work := self._start(trial)) is not None:
                    return work
            while self.wanted() > 0:
                trial = self._draw()
                if not self.claims.take(trial.number):
                    raise RunError(f"trial {trial.number} of {self.folder} is new, but another worker has it")
                if (work := self._start(trial)) is not None:
                    return work
        return None

    def _read_plan(self) -> None:
        """Read the plan again: another worker may have been given more trials."""
        self.plan = Plan.from_json(self._study.user_attrs[PLAN], self.where)

    def wanted(self) -> int:
        """Return how many trials are still to be drawn."""
        return int(min(self.plan.trials, self.plan.size())) - len(self._trials())

    def running(self) -> int:
        """Return how many trials have begun and not ended."""
        return len(self._trials("RUNNING"))

    def _trials(self, state: str | None = None) -> "list[optuna.trial.FrozenTrial]":
        """Return the trials in a state, or all that began; draws that repeated a setting are none."""
        trials = [one for one in self._study.get_trials(deepcopy=False) if AGAIN not in one.user_attrs]
        for one in trials:
            self._check(one)
        return [one for one in trials if one.state.name == state or (state is None and one.state.name != "WAITING")]

    def _check(self, trial: "optuna.trial.FrozenTrial") -> None:
        """Raise an error unless a trial has what a sweep writes: other programs may have written to the file."""
        axes = {axis.field: axis for axis in self.plan.axes}
        for field, value in trial.params.items():
            axis = axes.get(field)
            known = axis is not None and (
                value in axis.words if axis.kind == "choice" else type(value) in (int, float) and math.isfinite(value)
            )
            if not known:
                raise RunError(
                    f"{self.where} is damaged: trial {trial.number} has {shortened(field)} = {shortened(value)}"
                )
        for name, kinds in ABOUTS.items():
            if not isinstance(trial.user_attrs.get(name, kinds[0]()), kinds):
                raise RunError(
                    f"{self.where} is damaged: trial {trial.number} has {name} = {shortened(trial.user_attrs[name])}"
                )
        try:
            check_words(trial.user_attrs)
        except ValueError as error:
            words = f"trial {trial.number} has words with control characters"
            raise RunError(f"{self.where} is damaged: {words}") from error

    def _draw(self) -> "optuna.trial.FrozenTrial":
        """Draw a setting; that of a grid, and after many repetitions any, is the next that no trial has."""
        study, drawn = self._study, len(self._study.get_trials(deepcopy=False))
        study.sampler = sampler_of(self.plan, drawn)
        repeated = drawn - len(self._trials())
        if self.plan.method == "grid" or repeated > DRAWS:
            points = list(grid_of(self.plan.axes))
            random.Random(self.plan.seed).shuffle(points)
            tried = [trial.params for trial in self._trials()]
            point = next((one for one in points if one not in tried), None)
            if point is not None:
                study.enqueue_trial(point)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a sampler that draws fields one by one
            asked = study.ask()
            for axis in self.plan.axes:
                axis.suggest(asked)
        return self._frozen(asked.number)

    def _frozen(self, number: int) -> "optuna.trial.FrozenTrial":
        return self._study.get_trials(deepcopy=False)[number]

    def _start(self, trial: "optuna.trial.FrozenTrial") -> Work | None:
        """Count one more start of a claimed trial; end it instead if it repeats another, or kills its workers."""
        import optuna
        from optuna.trial import TrialState

        live = optuna.Trial(self._study, trial._trial_id)
        starts = trial.user_attrs.get(STARTS, 0)
        if starts == 0:  # a worker may have died while it drew
            params = {axis.field: axis.suggest(live) for axis in self.plan.axes}
            if any(one.params == params for one in self._trials() if one.number != trial.number):
                live.set_user_attr(AGAIN, True)
                self._end(trial.number, state=TrialState.FAIL)
                return None
        if starts >= DEATHS:
            live.set_user_attr(ERROR, f"{starts} workers died of it")
            self._end(trial.number, state=TrialState.PRUNED)
            return None
        live.set_user_attr(STARTS, starts + 1)
        live.set_user_attr("worker", f"{platform.node()}:{os.getpid()}")
        return Work(trial.number, self._frozen(trial.number).params, starts + 1)

    def _end(self, number: int, **result: Any) -> None:
        self._study.tell(number, **result)
        self.claims.release(number)

    def tell(self, work: Work, measured: float | None, **about: Any) -> bool:
        """Write the result of a trial; return whether it was still this worker's.

        Args:
            work: the trial.
            measured: the error on held-out images; None if the trial failed, which ``about`` explains as ``error``.
            about: what else is known of it.
        """
        import optuna
        from optuna.trial import TrialState

        with self.alone():
            trial = self._frozen(work.number)
            mine = self.claims.holds(work.number) or self.claims.take(work.number)
            if not mine or trial.state != TrialState.RUNNING:
                if mine:
                    self.claims.release(work.number)
                return False
            live = optuna.Trial(self._study, trial._trial_id)
            for name, value in about.items():
                live.set_user_attr(name, value)
            if measured is None:
                self._end(work.number, state=TrialState.PRUNED)  # a bad value, for the sampler
            else:
                self._end(work.number, values=measured)
        return True

    def leave(self, work: Work) -> None:
        """Give a trial back, so that another worker continues it; this does not count as a death."""
        import optuna

        with self.alone():
            trial = self._frozen(work.number)
            if self.claims.holds(work.number):
                optuna.Trial(self._study, trial._trial_id).set_user_attr(STARTS, work.starts - 1)
                self.claims.release(work.number)

    def trials(self) -> list[Trial]:
        """Return all trials, the best first, then those that run, wait or failed."""
        found = []
        with self.alone():
            for one in self._trials():
                state = dict(COMPLETE="done", PRUNED="failed", FAIL="failed").get(one.state.name, "running")
                if state == "running" and self.claims.take(one.number):
                    self.claims.release(one.number)
                    state = "waiting"
                found.append(Trial(one.number, state, one.params, one.value, dict(one.user_attrs)))
        order = ("done", "running", "waiting", "failed")
        return sorted(found, key=lambda one: (order.index(one.state), one.error or 0.0, one.number))

    def best(self) -> Trial | None:
        """Return the trial with the lowest error, if one has ended."""
        return next((one for one in self.trials() if one.state == "done"), None)

    def run_folder(self, number: int) -> Path:
        return inner_folder(self.folder / f"trial-{number:04d}")

    @property
    def where(self) -> str:
        """Return what keeps the trials, as errors name it."""
        return str(self.folder / FILE) if isinstance(self.claims, FileClaims) else f"the sweep {self.folder}"

    def close(self) -> None:
        self.claims.close()


@contextlib.contextmanager
def clear(where: str) -> Iterator[None]:
    """Turn whatever Optuna and its storage raise on damage into one sentence, which names what keeps the trials."""
    import sqlalchemy.exc

    try:
        yield
    except (RunError, MemoryError):
        raise
    except Exception as error:  # a damaged database makes libraries fail in dozens of ways
        told = isinstance(error, sqlalchemy.exc.DBAPIError)  # in words of the database
        reason = next(iter(str(error).splitlines()), "") if told else "it is damaged, or another program's"
        raise RunError(f"cannot read or write the trials in {where}: {reason}") from error


def sampler_of(plan: Plan, drawn: int) -> "optuna.samplers.BaseSampler":
    """Return the sampler of the next draw, whose seed follows from the number of draws: workers never draw alike."""
    import optuna

    seed = random.Random(f"{plan.seed} {drawn}").getrandbits(31)
    if plan.method == "tpe":
        return optuna.samplers.TPESampler(seed=seed, constant_liar=True)
    return optuna.samplers.RandomSampler(seed=seed)


def open_sweep(folder: Path, plan: Plan | None = None, storage: str | None = None) -> Study:
    """Begin a sweep in a folder, or join the one that is there.

    Args:
        folder: the folder of the sweep, whose name is that of the sweep in a database.
        plan: what to try; None joins a sweep that has begun.
        storage: the URL of a PostgreSQL database; None for the file ``sweep.db`` of the folder, or for the database
            that ``sweep.json`` there names.
    """
    try:
        import optuna
        import sqlalchemy
    except ImportError as error:
        raise RunError(f"{error.name} is not installed, which sweeps need: pip install 'vbcaps[sweep]'") from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    if plan is None and storage is None and not (folder / ABOUT).exists():
        raise RunError(f"there is no sweep in {folder}")
    before = read_json(folder / ABOUT).get("storage") if (folder / ABOUT).exists() else None
    if before is not None and (not isinstance(before, str) or written(before) != before):
        raise RunError(f"{folder / ABOUT} is damaged: storage must be the URL of a database, got {shortened(before)}")
    if storage is not None and before is None and (folder / FILE).exists():
        raise RunError(f"{folder} keeps its trials in {FILE}: leave --storage out, or choose another folder")
    address = storage or before
    try:
        url = None if address is None else database_url(address)
    except ValueError as error:
        if storage is None:  # it stands in the file
            raise RunError(f"{folder / ABOUT} is damaged: {error}") from error
        raise
    storage = address
    options: dict[str, Any] = dict(pool_pre_ping=True)
    make_folder(folder)
    name = folder.resolve().name
    if url is None:
        claims: Claims = FileClaims(folder / CLAIMS)
        check_database(folder / FILE)
        url, options = sqlalchemy.engine.make_url(f"sqlite:///{folder.resolve() / FILE}"), SQLITE
    else:
        claims = DatabaseClaims(url.set(drivername="postgresql").render_as_string(hide_password=False), name)
    where = str(folder / FILE) if isinstance(claims, FileClaims) else url.render_as_string()
    with claims.mutex(), clear(where):  # two workers must not make the tables at once
        kept = optuna.storages.RDBStorage(url.render_as_string(hide_password=False), engine_kwargs=options)
    found = Study(folder, claims, kept, name)
    found.begin(plan)
    if not (folder / ABOUT).exists():
        shown = None if storage is None else url.set(password=None).render_as_string()
        write_json(folder / ABOUT, dict(storage=shown, name=name, plan=found.plan.to_json()))
    return found


def database_url(words: str) -> Any:
    """Return the URL of a PostgreSQL database for SQLAlchemy, through psycopg."""
    import sqlalchemy

    try:
        url = sqlalchemy.engine.make_url(words)
    except sqlalchemy.exc.ArgumentError:
        url = None
    if url is None or url.drivername.partition("+")[0] not in ("postgresql", "postgres"):
        raise ValueError(
            f"storage must be the URL of a PostgreSQL database, postgresql://USER:PASSWORD@HOST/DATABASE, got {words!r}"
            "; without it a file in the folder of the sweep keeps the trials"
        )
    try:
        import psycopg  # noqa: F401
    except ImportError as error:
        raise RunError("psycopg is not installed, which PostgreSQL needs: pip install 'vbcaps[sweep]'") from error
    return url.set(drivername="postgresql+psycopg")

"""A worker of a sweep: it takes one trial after another, trains it in a folder of its own, and writes the result."""

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

from vbcaps.sweeps.study import Study, Trial, Work
from vbcaps.training.events import Hook
from vbcaps.training.files import RunError
from vbcaps.training.learner import NonFinite
from vbcaps.training.loop import fit
from vbcaps.training.runfolder import read_metrics

PAUSE = 2.0  # seconds between looks at the trials of other workers
Say = Callable[[str], None]


def work(
    study: Study,
    *,
    device: str = "auto",
    data_folder: str | Path | None = None,
    on_event: Hook | None = None,
    say: Say = lambda sentence: None,
    wait: bool = True,
) -> list[Trial]:
    """Train trials until the sweep has as many as its plan says; return all, the best first.

    Any number of workers may do this at the same time, on one machine or, with a database, on several.

    Args:
        study: the sweep, from ``open_sweep``.
        device: as in ``fit``.
        data_folder: as in ``fit``.
        on_event: receives the events of every trial's run.
        say: receives a sentence about each trial.
        wait: where other workers still train, wait, and take over what they leave if they die.
    """
    said = False
    while True:
        one = study.take()
        if one is not None:
            train(study, one, device, data_folder, on_event, say)
            said = False
        elif wait and (running := study.running()):
            if not said:
                say(f"nothing left to begin: waiting for {running} trial{'s' if running > 1 else ''} of other workers")
            said = True
            time.sleep(PAUSE)
        else:
            return study.trials()


def train(
    study: Study, one: Work, device: str, data_folder: str | Path | None, on_event: Hook | None, say: Say
) -> None:
    """Train a trial, from its checkpoint where there is one, and write its result."""
    folder = study.run_folder(one.number)
    settings = ", ".join(f"{field} {value:.4g}" if isinstance(value, float) else f"{field} {value}"
                         for field, value in one.params.items())  # fmt: skip
    left = ", which another worker left" if one.starts > 1 or folder.exists() else ""
    say(f"trial {one.number}{left}: {settings}")
    try:
        recipe = study.plan.recipe(one.params)
        model = fit(recipe, folder, device=device, data_folder=data_folder, resume=folder.is_dir(), on_event=on_event)
    except (ValueError, NonFinite, torch.OutOfMemoryError) as error:  # of these settings, so the others go on
        why = str(error).splitlines()[0]
        if study.tell(one, None, error=why):
            say(f"trial {one.number} failed: {why}")
        return
    except BaseException:  # Ctrl-C, a full disk, missing data: not the fault of these settings
        with suppress(RunError):  # the claim ends with this process in any case
            study.leave(one)
        raise
    result = model.result
    assert result is not None
    measured = lowest(folder, recipe.choose_by)
    about = dict(best_epoch=result.best_epoch, epochs=result.epochs, seconds=round(result.seconds, 1),
                 parameters=result.parameters)  # fmt: skip
    if not study.tell(one, measured, **about):
        say(f"trial {one.number} belongs to another worker by now: its result here does not count")
        return
    best = study.best()
    of_best = f", the best is {100 * (best.error or 0):.2f}% of trial {best.number}" if best else ""
    say(f"trial {one.number}: validation error {100 * measured:.2f}%{of_best}")


def lowest(folder: Path, choose_by: str) -> float:
    """Return the lowest error on held-out images in the table of a run."""
    errors = [row[f"validation_{choose_by}"] for row in read_metrics(folder)]
    found = [error for error in errors if error is not None]
    if not found:
        raise RunError(f"{folder}/metrics.csv has no validation error")
    return min(found)

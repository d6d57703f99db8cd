"""The events of a run, of which ``on_event`` is told: the one door for displays, trackers of experiments and tests.

``fit(recipe, folder, on_event=hook)`` calls ``hook(event)`` in the thread of the training, in this order:

=========  ==========================================================================================================
decode     before the run, of a large folder of images: ``step`` of ``steps`` images have been decoded
start      the run begins, or resumes after ``epoch - 1`` epochs and ``step`` steps; ``recipe`` says of what
note       ``message`` is a sentence for the user
step       about 20 times in an epoch: loss and training error of the epoch so far
epoch      an epoch has ended, and its files are written; ``metrics`` has its row of ``metrics.csv``
end        the run has ended; ``result`` is what ``result.json`` has
stop       the run ended early, by an error or a signal, which ``message`` names; ``fit`` raises it afterwards
=========  ==========================================================================================================

A run ends with one ``end`` or one ``stop``, unless it is killed. A finished run that is resumed sends a ``note`` alone.

An exception that a hook raises ends the run, and ``fit`` raises it. So a hook can stop a run, and no failure is hidden.
Nothing is lost: the state is saved first, and the same call with ``resume=True`` continues with the same bits. With
several processes, only the state of the last save remains. A hook that must not stop a run catches its own exceptions.
While a run stops, an exception of the hook is dropped in favour of the one that stopped the run.

Several seeds call the same hook in turns; ``event.folder`` and ``event.seed`` tell them apart. Of several processes
under torchrun only the first calls it.
"""

import importlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

if TYPE_CHECKING:
    from vbcaps.training.recipe import Recipe
    from vbcaps.training.runlog import Result

Kind = Literal["decode", "start", "note", "step", "epoch", "end", "stop"]
OF_TEST = ("error", "balanced_accuracy", "macro_f1", "macro_auc")  # measures that metrics has of a test
OF_STEP = ("loss", "error", "lr", "images_per_second")


class Event(NamedTuple):
    """Progress of a run."""

    kind: Kind
    seed: int
    folder: Path  # of the run
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
    result: "Result | None" = None
    recipe: "Recipe | None" = None  # of the run; None for `decode`
    row: dict[str, Any] | None = None  # of metrics.csv, for `epoch`

    @property
    def metrics(self) -> dict[str, float]:
        """Return the numbers to record, by name: those of an epoch, of a step, or of the test at the end."""
        if self.kind == "epoch":
            return numbers(self.row or {})
        if self.kind == "step":
            named = {field: getattr(self, field) for field in OF_STEP}
            return numbers({"train_error" if field == "error" else field: x for field, x in named.items()})
        if self.kind != "end" or self.result is None:
            return {}
        found: dict[str, Any] = dict(seconds=self.result.seconds, best_epoch=self.result.best_epoch)
        for name, evaluation in (("test", self.result.test), ("familiar", self.result.familiar)):
            if evaluation is not None:
                found |= {f"{name}_{field}": getattr(evaluation, field) for field in OF_TEST}
        return numbers(found)


Hook = Callable[[Event], None]


def numbers(fields: dict[str, Any]) -> dict[str, float]:
    return {name: float(x) for name, x in fields.items() if name != "epoch" and x is not None}


def named_hook(words: str) -> Hook:
    """Return the function that ``MODULE:FUNCTION`` names; the module may be a file in the present folder."""
    module, _, function = words.partition(":")
    if not module or not function.isidentifier():
        raise ValueError(f"on_event must be MODULE:FUNCTION, such as trackers:log, got {words!r}")
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last: a file there is not taken for a library of the same name
    try:
        found = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        raise ValueError(f"on_event={words!r}: there is no module {error.name!r}") from error
    except AttributeError:
        raise ValueError(f"on_event={words!r}: the module {module!r} has no {function!r}") from None
    if not callable(found):
        raise ValueError(f"on_event={words!r} must be a function of one event, got {type(found).__name__}")
    return found

"""Several workers of one sweep of ``tests/tiny.py``, each a process; one is killed in the middle of a trial.

    python tests/sweeping.py FOLDER [STORAGE]

Children are forked, so PyTorch is imported once. The first worker is killed with SIGKILL in the second epoch of its
first trial. The others go on, and a last one is started after the kill. Each worker writes the events of its trials to
``FOLDER/../events.jsonl``. Prints the exit statuses as JSON.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import tiny

from vbcaps.sweeps.plan import make_plan
from vbcaps.sweeps.study import open_sweep
from vbcaps.sweeps.worker import work
from vbcaps.training.events import Event

WORKERS, TRIALS, EPOCHS = 3, 5, 3
FIELDS = ["lr=log:1e-3,1e-1", "routing=choice:vb,em", f"epochs={EPOCHS}"]


def worker(folder: Path, storage: str | None, dies: bool = False) -> None:
    log = os.open(folder.parent / "events.jsonl", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def note(event: Event) -> None:
        line = dict(pid=os.getpid(), trial=event.folder.name, kind=event.kind, epoch=event.epoch, step=event.step)
        os.write(log, (json.dumps(line) + "\n").encode())
        time.sleep(0.02)  # so that every worker gets trials
        if dies and event.kind == "step" and event.epoch == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    plan, _ = make_plan(tiny.recipe(), FIELDS, "tpe", TRIALS, validation=0.25)
    study = open_sweep(folder, plan, storage)
    work(study, device="cpu", on_event=note)
    study.close()


def together(folder: Path, storage: str | None) -> dict:
    from forked import ends, fork  # it replaces the data, which a test that reads the numbers above must not

    start: Callable[..., int] = lambda **options: fork(partial(worker, folder, storage, **options))  # noqa: E731
    first = start(dies=True)
    others = [start() for _ in range(WORKERS - 1)]
    killed = ends(first)
    last = start()
    return dict(killed=killed, others=[ends(child) for child in [*others, last]])


if __name__ == "__main__":
    folder, *storage = sys.argv[1:]
    print(json.dumps(together(Path(folder), *storage or [None])))

"""Trainings of ``tests/tiny.py`` in processes of their own, to be killed or to train together.

    python tests/forked.py kill FOLDER       kill at random moments and resume, until 20 kills and the end
    python tests/forked.py signal FOLDER     the same with SIGTERM and SIGINT
    python tests/forked.py together FOLDER   two processes against one

Children are forked, so PyTorch is imported once; the parent must therefore not compute anything before. Prints JSON.
"""

import json
import os
import random
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import sklearn.metrics  # noqa: F401  (a run imports it to test: a child would be killed in that, again and again)
import tiny
import torch
import torch._dynamo  # optimisers import it at their first step: a child would be killed in that, again and again

import vbcaps.training.loop
from vbcaps.training.loop import Event, Interrupted, fit

torch.set_num_threads(1)  # no pool of threads that a fork would lose
vbcaps.training.loop.load_dataset = tiny.dataset


def fork(work: Callable[[], object], **environment: str) -> int:
    child = os.fork()
    if child:
        return child
    code = 99
    signal.alarm(100)  # no child outlives a test that was given up
    try:
        os.environ.update(environment)
        work()
        code = 0
    except Interrupted as stop:
        print(stop, file=sys.stderr)
        code = stop.code
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def ends(child: int) -> int:
    """Exit status, negative for the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def train(
    folder: Path, resume: bool = False, on_event: Callable[[Event], None] | None = None, **fields: object
) -> None:
    fit(tiny.recipe(**fields), folder, device="cpu", resume=resume, on_event=on_event)


def kill(folder: Path) -> dict:
    """Runs with validation and an average of the weights, so that every kind of state there is must survive."""
    fields = dict(epochs=6, validation=0.25, test=True, ema=0.9, save_seconds=0.01)
    start = time.perf_counter()
    assert ends(fork(partial(train, folder / "whole", **fields))) == 0
    whole = time.perf_counter() - start
    random.seed(0)
    kills, runs = 0, 0
    while kills < 20 or runs < 2:
        out = folder / f"killed{runs}"
        while True:
            child = fork(partial(train, out, resume=out.exists(), **fields))
            time.sleep(random.uniform(0, whole / 3))
            os.kill(child, signal.SIGKILL)
            code = ends(child)
            assert code in (0, -signal.SIGKILL), code
            if code == 0:
                break
            kills += 1
        runs += 1
    return dict(kills=kills, runs=runs)


def stop(folder: Path) -> dict:
    """A signal in the middle of the second epoch; then resumed."""
    assert ends(fork(partial(train, folder / "whole"))) == 0
    codes = {}
    for number in (signal.SIGTERM, signal.SIGINT):
        out = folder / number.name

        def interrupt(event: Event, number: int = number) -> None:
            if event.kind == "step" and (event.epoch, event.step) == (2, 3):
                os.kill(os.getpid(), number)

        codes[number.name] = [ends(fork(partial(train, out, on_event=interrupt)))]
        codes[number.name] += [ends(fork(partial(train, out, resume=True)))]
    return codes


def together(folder: Path) -> dict:
    """The loss after every step: alone, by two, begun alone and gone on by two, and the other way round."""
    curves: dict[str, list] = {}
    cases = dict(alone=(1, 1), two=(2, 2), one_then_two=(1, 2), two_then_one=(2, 1))
    for name, (before, after) in cases.items():
        curve = folder / f"{name}.jsonl"

        def note(event: Event, curve: Path = curve) -> None:
            if event.kind in ("step", "epoch"):
                with open(curve, "a") as file:
                    file.write(json.dumps([event.kind, event.epoch, event.step, event.loss, event.validation]) + "\n")

        def note_and_stop(event: Event, note: Callable = note) -> None:
            note(event)
            if event.kind == "step" and (event.epoch, event.step) == (1, 3):
                os.kill(os.getpid(), signal.SIGTERM)

        out = folder / name
        fields = dict(epochs=2, validation=0.25, ema=0.5, mixup=0.1)
        if before != after:
            codes = processes(before, partial(train, out, on_event=note_and_stop, **fields))
            assert codes == [143] * before, codes
        codes = processes(after, partial(train, out, resume=out.exists(), on_event=note, **fields))
        assert codes == [0] * after, codes
        curves[name] = [json.loads(line) for line in curve.read_text().splitlines()]
    return curves


def processes(count: int, work: Callable[[], None]) -> list[int]:
    if count == 1:
        return [ends(fork(work))]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    place = dict(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, WORLD_SIZE=str(count))
    children = [fork(work, **place, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(count)]
    return [ends(child) for child in children]


if __name__ == "__main__":
    which = dict(kill=kill, signal=stop, together=together)[sys.argv[1]]
    print(json.dumps(which(Path(sys.argv[2]))))

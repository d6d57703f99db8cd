"""Trainings of ``tests/tiny.py`` in processes of their own, to be killed or to train together.

    python tests/forked.py kill FOLDER       kill at random moments and resume, until 20 kills and the end
    python tests/forked.py die FOLDER        kill at the calls that write files, one after the other, and resume
    python tests/forked.py signal FOLDER     SIGTERM, SIGINT, SIGHUP, and SIGINT twice
    python tests/forked.py second FOLDER     two processes in one folder
    python tests/forked.py unheard FOLDER    nobody reads the output
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
from contextlib import suppress
from functools import partial
from pathlib import Path

import sklearn.metrics  # noqa: F401  (a run imports it to test: a child would be killed in that, again and again)
import tiny
import torch
import torch._dynamo  # optimisers import it at their first step: a child would be killed in that, again and again
from faults import dying, watched

import vbcaps.training.loop
from vbcaps.training.loop import Event, Interrupted, fit

torch.set_num_threads(1)  # no pool of threads that a fork would lose
vbcaps.training.loop.load_dataset = tiny.dataset


def fork(work: Callable[[], object], **environment: str) -> int:
    child = os.fork()
    if child:
        with suppress(OSError):
            os.setpgid(child, child)  # here and below: whoever comes first
        return child
    code = 99
    with suppress(OSError):
        os.setpgid(0, 0)
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


KILLED: dict = dict(epochs=6, validation=0.25, test=True, ema=0.9, save_seconds=0.01)  # every kind of state there is
QUICK: dict = tiny.SMALL | dict(batch=6, epochs=4, ema=0.9, save_seconds=0.001)  # the same in milliseconds


def kill(folder: Path, times: int = 20, seed: int = 0, fields: dict = KILLED, minutes: float = 60) -> dict:
    """Kill the group of a training at random moments and resume, until so many kills, or minutes, and the end.

    There are at least two runs, each of which is resumed until it has ended.
    """
    start = time.perf_counter()
    assert ends(fork(partial(train, folder / "whole", **fields))) == 0
    whole = time.perf_counter() - start
    random.seed(seed)
    kills = runs = writing = 0
    while (kills < times and time.perf_counter() - start < 60 * minutes) or runs < 2:
        out = folder / f"killed{runs}"
        while True:
            child = fork(partial(train, out, resume=out.exists(), **fields))
            time.sleep(random.uniform(0, whole / 3))
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            code = ends(child)
            assert code in (0, -signal.SIGKILL), code
            if code == 0:
                break
            kills += 1
            writing += bool(list(out.glob(".*.part")))
        runs += 1
    return dict(kills=kills, runs=runs, writing=writing)


def die(folder: Path, every: int = 3) -> dict:
    """Kill a training at a call that opens, writes, syncs or renames a file, at every third of them, and resume."""

    def count() -> None:
        with watched(folder / "whole") as calls:
            train(folder / "whole", **tiny.SMALL)
        (folder / "calls").write_text(str(len(calls.names)))

    def until(out: Path, at: int) -> None:
        with watched(out, at, dying):
            train(out, **tiny.SMALL)

    assert ends(fork(count)) == 0
    calls = range(0, int((folder / "calls").read_text()), every)
    for k, at in enumerate(calls):
        out = folder / f"killed{k}"
        assert ends(fork(partial(until, out, at))) == -signal.SIGKILL, at
        assert ends(fork(partial(train, out, resume=out.exists(), **tiny.SMALL))) == 0, at
    return dict(runs=len(calls))


def stop(folder: Path) -> dict:
    """A signal in the middle of the second epoch; then resumed."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # which nohup ignores
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell ignores for a program in the background
    assert ends(fork(partial(train, folder / "whole"))) == 0
    codes = {}
    for number, times in ((signal.SIGTERM, 1), (signal.SIGINT, 1), (signal.SIGHUP, 1), (signal.SIGINT, 2)):
        name = number.name * times
        out = folder / name

        def interrupt(event: Event, number: int = number, times: int = times) -> None:
            if event.kind == "step" and (event.epoch, event.step) == (2, 3):
                for _ in range(times):
                    os.kill(os.getpid(), number)

        codes[name] = [ends(fork(partial(train, out, on_event=interrupt)))]
        codes[name] += [ends(fork(partial(train, out, resume=True)))]
    return codes


def second(folder: Path) -> dict:
    """Begin and resume runs in a folder that another process trains in, and after that process was killed."""
    came = folder / "came"

    def wait(event: Event) -> None:
        if event.kind == "step" and event.epoch == 2:
            came.touch()
            time.sleep(60)

    first = fork(partial(train, folder / "run", on_event=wait))
    while not came.exists():
        time.sleep(0.01)
    codes = [ends(fork(partial(train, folder / "run", resume=resume))) for resume in (False, True)]
    os.killpg(first, signal.SIGKILL)
    assert ends(first) == -signal.SIGKILL
    codes.append(ends(fork(partial(train, folder / "run", resume=True))))
    assert ends(fork(partial(train, folder / "whole"))) == 0
    return dict(codes=codes)


def unheard(folder: Path) -> dict:
    """Train by the command line while nobody reads its output, and with no output at all."""
    from vbcaps.cli import train as command
    from vbcaps.cli.main import open_streams

    words = "--epochs 2 --batch 8 --arch 4,2,2,2 --crop 20 --pad 0 --iters 2 --image-size 22 --validation 0 --rotate 0"
    words += " --warmup 0 --device cpu --backend reference"

    def run(out: str, closed: bool) -> None:
        reads, writes = os.pipe()
        os.close(reads)
        for stream in (1, 2):
            os.close(stream) if closed else os.dup2(writes, stream)
        open_streams()
        command.draw_run = lambda *_: None
        command.app([*words.split(), "--out", str(folder / out)], standalone_mode=False)

    return dict(codes=[ends(fork(partial(run, name, name == "closed"))) for name in ("pipe", "closed")])


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
    which = dict(kill=kill, die=die, signal=stop, second=second, unheard=unheard, together=together)[sys.argv[1]]
    print(json.dumps(which(Path(sys.argv[2]))))

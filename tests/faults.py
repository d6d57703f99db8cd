"""Calls of the system that fail, or at which the process dies: the k-th among all that concern a folder."""

import errno
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CALLS = ("open", "write", "fsync", "replace", "link", "mkdir")
ERRORS = (errno.ENOSPC, errno.EIO, errno.EACCES)
Fail = Callable[[str, Callable, tuple], Any]


class Calls:
    """The calls in a folder so far; ``at`` is the number of the one at which ``fail`` is called in its place."""

    def __init__(self, folder: Path, at: int | None, fail: Fail):
        self.folder, self.at, self.fail = str(folder), at, fail
        self.names: list[str] = []
        self.mine: set[int] = set()  # descriptors of files in the folder

    def around(self, name: str, real: Callable) -> Callable:
        def call(*args: Any, **options: Any) -> Any:
            if not self.concerns(name, args):
                return real(*args, **options)
            self.names.append(name)
            if len(self.names) - 1 == self.at:
                return self.fail(name, real, args)
            made = real(*args, **options)
            if name == "open":
                self.mine.add(made)
            return made

        return call

    def concerns(self, name: str, args: tuple) -> bool:
        if isinstance(args[0], int):
            return args[0] in self.mine
        return name != "write" and os.fspath(args[0]).startswith(self.folder)


@contextmanager
def watched(folder: Path, at: int | None = None, fail: Fail = lambda name, real, args: None) -> Iterator[Calls]:
    """Count the calls that open, write, sync, rename and make files in a folder, and let one of them fail."""
    calls, kept = Calls(folder, at, fail), {name: getattr(os, name) for name in CALLS}
    for name, real in kept.items():
        setattr(os, name, calls.around(name, real))
    try:
        yield calls
    finally:
        for name, real in kept.items():
            setattr(os, name, real)


def failing(number: int) -> Fail:
    """Return what fails with this error, a write after half of its bytes."""

    def fail(name: str, real: Callable, args: tuple) -> Any:
        if name == "write":
            real(args[0], args[1][: len(args[1]) // 2])
        raise OSError(number, os.strerror(number), None if isinstance(args[0], int) else os.fspath(args[0]))

    return fail


def dying(name: str, real: Callable, args: tuple) -> Any:
    """Kill the group of this process before the call, a write after half of its bytes."""
    if name == "write":
        real(args[0], args[1][: len(args[1]) // 2])
    os.killpg(0, signal.SIGKILL)

"""Claims: which worker has which trial. The operating system or the database server ends a claim when its worker dies.

So no clock decides that a worker is dead: a worker that is slow, or whose machine slept, keeps its trial. Each claim
is a lock: on one machine that of an SQLite file, with PostgreSQL an advisory lock, which belongs to the worker's
connection.
``mutex`` is one lock for the whole sweep, under which trials are handed out and results are written.
"""

import contextlib
import hashlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from vbcaps.training.files import RunError

WAIT = 120.0  # seconds after which a sweep whose mutex is held counts as stuck
SWEEP = -1  # the number of the mutex
# A machine that vanishes closes no connection: the server looks after 30 s, and gives up after five tries.
KEEP = dict(tcp_keepalives_idle="30", tcp_keepalives_interval="10", tcp_keepalives_count="5", lock_timeout=f"{WAIT:g}s")


class Claims(Protocol):
    """What a worker may call; ``number`` is that of a trial."""

    def mutex(self) -> contextlib.AbstractContextManager[None]:
        """Hold the sweep alone."""

    def take(self, number: int) -> bool:
        """Claim a trial; return whether no other worker has it."""

    def holds(self, number: int) -> bool:
        """Return whether the claim still stands, which a lost connection ends."""

    def release(self, number: int) -> None:
        """End a claim."""

    def close(self) -> None:
        """End all claims."""


class FileClaims:
    """Claims of processes on one machine, in a folder: one empty SQLite file for each trial."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.held: dict[int, sqlite3.Connection] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def _lock(self, number: int, wait: float) -> sqlite3.Connection | None:
        name = "sweep" if number == SWEEP else f"trial-{number:04d}"
        file = sqlite3.connect(self.folder / f"{name}.lock", timeout=wait, isolation_level=None)
        try:
            file.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError:
            file.close()
            return None
        return file

    @contextlib.contextmanager
    def mutex(self) -> Iterator[None]:
        held = self._lock(SWEEP, WAIT)
        if held is None:
            raise RunError(f"{self.folder.parent} is held by another process since {WAIT:g} s: is one stopped?")
        try:
            yield
        finally:
            held.close()

    def take(self, number: int) -> bool:
        found = self._lock(number, 0.0)
        if found is not None:
            self.held[number] = found
        return found is not None

    def holds(self, number: int) -> bool:
        return number in self.held

    def release(self, number: int) -> None:
        self.held.pop(number).close()

    def close(self) -> None:
        for number in list(self.held):
            self.release(number)


class DatabaseClaims:
    """Claims of workers on any machines: advisory locks of one connection to PostgreSQL, which end with it."""

    def __init__(self, url: str, name: str):
        self.url, self.name = url, name
        self.held: set[int] = set()
        self.connection = self._connect()

    def _connect(self) -> Any:
        import psycopg

        options = " ".join(f"-c {name}={value}" for name, value in KEEP.items())
        try:
            return psycopg.connect(self.url, autocommit=True, options=options, connect_timeout=20)
        except psycopg.Error as error:
            raise unreachable(error) from error

    def _key(self, number: int) -> int:
        """Return the number of a lock, which all sweeps in a database share: 64 bits of a hash."""
        digest = hashlib.blake2b(f"vbcaps sweep {self.name} {number}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big", signed=True)

    def _ask(self, question: str, number: int) -> Any:
        import psycopg

        try:
            if self.connection.closed:
                self.held.clear()
                self.connection = self._connect()
            return self.connection.execute(question, [self._key(number)]).fetchone()[0]
        except psycopg.OperationalError as error:
            self.connection.close()
            self.held.clear()
            raise unreachable(error) from error

    @contextlib.contextmanager
    def mutex(self) -> Iterator[None]:
        with contextlib.suppress(RunError):  # after an interruption of the network: connect again
            self._ask("select %s::bigint", SWEEP)
        self._ask("select pg_advisory_lock(%s)", SWEEP)
        try:
            yield
        finally:
            with contextlib.suppress(RunError):  # without a connection there is no lock
                self._ask("select pg_advisory_unlock(%s)", SWEEP)

    def take(self, number: int) -> bool:
        if number in self.held:  # the server counts how often a connection has a lock
            return False
        taken = bool(self._ask("select pg_try_advisory_lock(%s)", number))
        if taken:
            self.held.add(number)
        return taken

    def holds(self, number: int) -> bool:
        return number in self.held

    def release(self, number: int) -> None:
        self.held.discard(number)
        with contextlib.suppress(RunError):
            self._ask("select pg_advisory_unlock(%s)", number)

    def close(self) -> None:
        self.held.clear()
        self.connection.close()


def unreachable(error: Exception) -> RunError:
    return RunError(f"the database of the sweep does not answer: {' '.join(str(error).split())}")

"""Claims: which worker has which trial. The operating system or the database server ends a claim when its worker dies.

So no clock decides that a worker is dead: a worker that is slow, or whose machine slept, keeps its trial. Each claim
is a lock: on one machine that of an SQLite file, with PostgreSQL an advisory lock, which belongs to the worker's
connection.
``mutex`` is one lock for the whole sweep, under which trials are handed out and results are written.
"""

import contextlib
import hashlib
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from vbcaps import disk
from vbcaps.training.files import RunError, inner_folder

WAIT = 120.0  # seconds after which a sweep whose mutex is held counts as stuck
MOST = 1 << 30  # bytes of the file with the trials
JOURNAL = bytes.fromhex("d9d505f920a163d7")  # ends a journal that names another
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


def check_database(path: Path) -> None:
    """Raise an error if SQLite would read or write something else than a file of this name in its folder.

    SQLite follows links, waits at pipes, and rolls a journal back that another program may have left. A journal that
    names a further journal, which SQLite would remove, is never one of ours.
    """
    for name in (path.name, *(f"{path.name}-{part}" for part in ("journal", "wal", "shm"))):
        one = path.with_name(name)
        try:
            about = one.lstat()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise RunError(f"cannot read {one}: {error.strerror}") from error
        if not stat.S_ISREG(about.st_mode):
            raise RunError(f"cannot read {one}: it is no file but a link, a folder, a pipe or a device; remove it")
        if about.st_size > MOST:
            raise RunError(f"cannot read {one}: it has {about.st_size:,} bytes, more than the {MOST:,} of a sweep")
        if name.endswith("-journal") and about.st_size >= len(JOURNAL):
            with disk.opened(one) as file:
                file.seek(-len(JOURNAL), 2)
                if file.read() == JOURNAL:
                    raise RunError(f"cannot read {one}: it is the journal of another program; remove it")


class FileClaims:
    """Claims of processes on one machine, in a folder: one empty SQLite file for each trial."""

    def __init__(self, folder: Path):
        self.folder = inner_folder(folder)
        self.held: dict[int, sqlite3.Connection] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(f"cannot make the folder {folder}: {error.strerror}") from error

    def _lock(self, number: int, wait: float) -> sqlite3.Connection | None:
        name = "sweep" if number == SWEEP else f"trial-{number:04d}"
        path = self.folder / f"{name}.lock"
        check_database(path)
        try:
            file = sqlite3.connect(path, timeout=wait, isolation_level=None)
        except sqlite3.Error as error:
            raise RunError(f"cannot lock {path}: {error}") from error
        try:
            file.execute("BEGIN EXCLUSIVE")
        except sqlite3.DatabaseError as error:
            file.close()
            if error.sqlite_errorcode & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                return None
            raise RunError(f"cannot lock {path}: {error}; remove it while no worker runs") from error
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

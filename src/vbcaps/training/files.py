"""Atomic files, and folders that only one run at a time may write to.

A file is written under another name in its folder and then renamed, so a reader always finds the old or the new file.
File and folder are synced, so that this also holds after a power cut.

The lock on a folder is the system's (flock): it ends with the process that holds it, also when that is killed or the
machine stops, so no lock can be left over.
"""

import contextlib
import errno
import json
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vbcaps import disk
from vbcaps.data.errors import shortened, written

try:
    import fcntl
except ImportError:  # Windows: folders are not locked there
    fcntl = None  # type: ignore[assignment]


MOST_VALUES = 1 << 25  # of a JSON file
PATIENCE = 2.0  # seconds: a run that was killed holds its lock until its last subprocess is gone, too


class RunError(Exception):
    """Raised when a run's folder or a weights file cannot be used. The message says what to do."""

    def __init__(self, message: str):
        super().__init__(shortened(written(message)))


def write(path: Path, content: bytes) -> None:
    """Replace a file in one step, so that readers, also after a crash, find the old or the new file.

    Args:
        path: the file.
        content: all of its bytes.
    """
    try:
        disk.replace(path, content)
    except OSError as error:
        raise RunError(
            f"cannot write {path}: {error.strerror}; what was there before is unchanged, unless the new file is whole"
        ) from error


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, so that they outlast a power cut."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        disk.sync(folder.parent)


def inner_folder(folder: Path) -> Path:
    """Return the folder of one of several runs; a link in its place, which may lead anywhere, is an error."""
    try:
        return disk.no_link(folder)
    except OSError as error:
        raise RunError(f"cannot write {folder}: {error.strerror}; remove it") from error


def keep(path: Path, before: Path) -> None:
    """Give a file that is about to be replaced a second name, under which it stays."""
    if not path.exists():  # nothing was written yet
        return
    beside = disk.beside(before)
    try:
        try:
            os.link(path, beside)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS):
                raise
            os.replace(path, before)  # a file system without second names
            return
        os.replace(beside, before)
        beside.unlink(missing_ok=True)  # it is still there if both were names of one file
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise RunError(f"cannot write {before}: {error.strerror}; {path.name} beside it is unchanged") from error


class Writer:
    """Write files in a thread, so that a run does not wait for the disk.

    The files of one call are written in order, and after the files of the previous call, so a crash leaves the same
    files as without a thread. If writing fails, the next ``writer()`` or ``wait()`` raises the error.

    Args:
        kept: the names of files whose former content is kept, with the names under which it is.
    """

    def __init__(self, kept: Mapping[str, str] | None = None) -> None:
        self.kept = kept or {}
        self.thread: threading.Thread | None = None
        self.error: Exception | None = None

    def __call__(self, files: dict[Path, bytes]) -> None:
        self.wait()
        self.thread = threading.Thread(target=self.work, args=(files,))
        self.thread.start()

    def work(self, files: dict[Path, bytes]) -> None:
        try:
            for path, content in files.items():
                if path.name in self.kept:
                    keep(path, path.with_name(self.kept[path.name]))
                write(path, content)
        except Exception as error:
            self.error = error

    def wait(self) -> None:
        """Return when every file is on the disk."""
        if self.thread is not None:
            self.thread.join()
        self.thread, error, self.error = None, self.error, None
        if error is not None:
            raise error


def write_json(path: Path, content: Any) -> None:
    """Write ``content`` as indented JSON, in one step."""
    write(path, (json.dumps(content, indent=2) + "\n").encode())


def read_json(path: Path, limit: int = disk.RECIPE) -> dict[str, Any]:
    """Return the fields of a JSON file of a run's folder, which has at most ``limit`` bytes."""
    try:
        text = disk.read_bytes(path, limit)
        if sum(map(text.count, (b",", b"[", b"{"))) > MOST_VALUES:  # which take many times the memory of their bytes
            raise ValueError(f"it has more than {MOST_VALUES:,} values")
        content = json.loads(text.decode())
    except FileNotFoundError:
        raise RunError(f"there is no {path}: not the folder of a run") from None
    except RecursionError:
        raise RunError(f"cannot read {path}: it is nested too deep") from None
    except UnicodeDecodeError:
        raise RunError(f"cannot read {path}: it is no text") from None
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(content, dict):
        raise RunError(f"cannot read {path}: it has no fields")
    return content


def lock(folder: Path) -> int | None:
    """Lock the folder against other runs until the returned descriptor is closed or the process ends."""
    if fcntl is None:
        return None
    try:
        held = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise RunError(f"cannot lock {folder}: {error.strerror}") from error
    until = time.monotonic() + PATIENCE
    while True:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() < until:
                time.sleep(0.02)
                continue
            os.close(held)
            raise RunError(f"{folder} is in use by another run: wait for its end, or choose another folder") from None
        except OSError:  # a file system that has no locks
            pass
        return held


def check_writable(folder: Path, size: int) -> None:
    """Make the folder and check that ``size`` bytes fit, now rather than after the first epoch."""
    try:
        make_folder(folder)
        probe = disk.beside(folder / "room")
        try:
            disk.put(probe, bytes(size))
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        needs = f"a run needs about {size / 1e6:.0f} MB there"
        raise RunError(f"cannot write in {folder}: {error.strerror}; {needs}, choose another folder") from error

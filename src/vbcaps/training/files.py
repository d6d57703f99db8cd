"""Atomic files, and folders that only one run at a time may write to.

A file is written under another name in its folder and then renamed, so a reader always finds the old or the new file.
"""

import contextlib
import json
import os
import threading
from pathlib import Path
from typing import Any

try:
    import fcntl
except ImportError:  # Windows: folders are not locked there
    fcntl = None  # type: ignore[assignment]


class RunError(Exception):
    """Raised when a run's folder or a weights file cannot be used. The message says what to do."""


def write(path: Path, content: bytes) -> None:
    """Replace a file in one step, so that readers, also after a crash, find the old or the new file.

    Args:
        path: the file.
        content: all of its bytes.
    """
    beside = path.with_name(f".{path.name}.part")
    try:
        with open(beside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        with contextlib.suppress(OSError):  # a path below a file cannot even be looked for
            beside.unlink()
        raise RunError(f"cannot write {path}: {error.strerror}; what was there before is unchanged") from error


class Writer:
    """Write files in a thread, so that a run does not wait for the disk.

    The files of one call are written in order, and after the files of the previous call, so a crash leaves the same
    files as without a thread. If writing fails, the next ``writer()`` or ``wait()`` raises the error.
    """

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.error: Exception | None = None

    def __call__(self, files: dict[Path, bytes]) -> None:
        self.wait()
        self.thread = threading.Thread(target=self.work, args=(files,))
        self.thread.start()

    def work(self, files: dict[Path, bytes]) -> None:
        try:
            for path, content in files.items():
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


def read_json(path: Path) -> dict[str, Any]:
    """Return the fields of a JSON file of a run's folder."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise RunError(f"there is no {path}: not the folder of a run") from None
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise RunError(f"cannot read {path}: it has no fields")
    return content


def lock(folder: Path) -> int | None:
    """Lock the folder against other runs until the returned descriptor is closed or the process ends."""
    if fcntl is None:
        return None
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise RunError(f"{folder} is in use by another run: wait for its end, or choose another folder") from None
    except OSError:  # a file system that has no locks
        pass
    return held


def check_writable(folder: Path, size: int) -> None:
    """Make the folder and check that ``size`` bytes fit, now rather than after the first epoch."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".room.part"
        try:
            with open(probe, "wb") as file:
                file.write(bytes(size))
                file.flush()
                os.fsync(file.fileno())
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        needs = f"a run needs about {size / 1e6:.0f} MB there"
        raise RunError(f"cannot write in {folder}: {error.strerror}; {needs}, choose another folder") from error

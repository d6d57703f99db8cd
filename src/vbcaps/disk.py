"""How every file is opened: only regular files are read, none beyond a limit, and nothing is written through a link.

A name in a folder may be a pipe, which never ends, a device, which fills the memory, or a file of terabytes without a
byte in it. All that is wrong with a file is an ``OSError`` whose ``strerror`` says it; the caller names the file.
Nothing here needs more than the standard library.
"""

import contextlib
import errno
import io
import os
import secrets
import stat
from pathlib import Path

BINARY = getattr(os, "O_BINARY", 0)  # Windows
NO_LINK = getattr(os, "O_NOFOLLOW", 0)
NO_WAIT = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0)
MB = 1 << 20
# The most bytes of each kind of file.
RECIPE = 4 * MB  # and of an environment, a configuration or a plan
RESULT = 256 * MB  # which has the confusion matrix of up to some thousands of classes
METRICS = 32 * MB  # of up to 100,000 epochs
TABLE = 64 * MB  # of the groups of images, or of measures of many runs


def opened(path: str | Path, limit: int | None = None) -> io.BufferedReader:
    """Open a file to be read; raise ``OSError`` for a folder, a pipe, a device or a socket.

    Args:
        path: the file; a link to a file is followed.
        limit: the most bytes that it may have; without it the caller reads no more than it has room for.
    """
    check(os.stat(path), path, limit)  # first, because to open a device may move it
    file = os.open(path, os.O_RDONLY | NO_WAIT | BINARY)
    try:
        check(os.fstat(file), path, limit)
        return io.BufferedReader(io.FileIO(file, "rb"))
    except BaseException:
        os.close(file)
        raise


def check(about: os.stat_result, path: str | Path, limit: int | None = None) -> None:
    """Raise an error for what is no file, or is larger than the limit."""
    if not stat.S_ISREG(about.st_mode):
        kind = errno.EISDIR if stat.S_ISDIR(about.st_mode) else errno.EINVAL
        raise OSError(kind, "it is no file but a folder, a pipe or a device", str(path))
    if limit is not None and about.st_size > limit:
        words = f"it has {about.st_size:,} bytes, more than the {limit:,} that such a file may have"
        raise OSError(errno.EFBIG, words, str(path))


def read_bytes(path: str | Path, limit: int) -> bytes:
    """Return the content of a file of at most ``limit`` bytes, also where it grows while it is read."""
    with opened(path, limit) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise OSError(errno.EFBIG, f"it has more than the {limit:,} bytes that such a file may have", str(path))
    return content


def read_text(path: str | Path, limit: int) -> str:
    """Return the text of a file of at most ``limit`` bytes."""
    return read_bytes(path, limit).decode()


def put(path: Path, content: bytes) -> None:
    """Write a new file, and wait until it is on the disk; what has its name already, even a link, is an error."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NO_LINK | BINARY, 0o666)
    try:
        left = memoryview(content)
        while left:
            left = left[os.write(file, left) :]
        os.fsync(file)
    finally:
        os.close(file)


def beside(path: Path) -> Path:
    """Return a name in the folder of a file, for the time in which it is written; nobody can know it before."""
    return path.with_name(f".{path.name[:40]}.{secrets.token_hex(8)}.part")


def replace(path: Path, content: bytes) -> None:
    """Replace a file in one step; a link of its name is replaced, and what it leads to stays as it is."""
    part = beside(path)
    try:
        put(part, content)
        os.replace(part, path)
        sync(path.parent)
    except OSError:
        with contextlib.suppress(OSError):  # a path below a file cannot even be looked for
            part.unlink()
        raise


def sync(folder: Path) -> None:
    """Wait until the names in a folder are on the disk: a file that was renamed is else not safe from a power cut."""
    if os.name == "nt":  # a folder cannot be opened there
        return
    held = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(held)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that cannot sync a folder
            raise
    finally:
        os.close(held)


def clear_parts(folder: Path) -> None:
    """Remove files that were being written when a process was killed; nobody else may be writing in the folder."""
    for part in folder.glob(".*.part"):
        with contextlib.suppress(OSError):
            part.unlink()


def no_link(folder: Path) -> Path:
    """Return a folder within a folder; a link in its place, which may lead anywhere, raises ``OSError``."""
    if folder.is_symlink():
        raise OSError(errno.ELOOP, "it is a link, and nothing is written through a link", str(folder))
    return folder

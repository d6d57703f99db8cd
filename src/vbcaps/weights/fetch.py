"""Fetch the weights that are not in the package, and hold them to their SHA-256, so that any mirror is safe."""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path

from vbcaps.disk import read_bytes

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

ADDRESS = "https://github.com/vbcaps/vbcaps/releases/download/weights-1/"
Progress = Callable[[str, int, int | None], None]  # name of the file, bytes so far, bytes in all

# What shows the progress of a file that `load` fetches without being given a `progress`; the command line sets it.
show: Callable[[], AbstractContextManager[Progress | None]] = nullcontext


class FetchError(Exception):
    """Weights that could not be fetched. The message says from where, and where to put the file by hand."""


def address() -> str:
    """Return the folder, ending in a slash, that weights are fetched from: `VBCAPS_WEIGHTS_URL`, or the release."""
    return os.environ.get("VBCAPS_WEIGHTS_URL", ADDRESS).rstrip("/") + "/"


def fetch_weights(name: str, size: int, sha256: str, folder: Path, progress: Progress | None = None) -> Path:
    """Fetch the weights of a trained network into a folder, and return their file.

    Args:
        name: the network's name.
        size: the bytes of its file.
        sha256: the sum that the file must have.
        folder: where the file goes, made if need be; it gets its name when it is whole.
        progress: called with the file's name, the bytes so far, and the bytes in all.
    """
    from vbcaps.data.download import fetch_file
    from vbcaps.data.official import OfficialFile

    file = OfficialFile(f"{name}.safetensors", size, sha256, None, (address(),))
    path = folder / file.name
    try:
        with locked(folder), nullcontext(progress) if progress else show() as told:
            if path.is_file() and path.stat().st_size == size and _has(path, size, sha256):  # by another process
                return path
            reasons = fetch_file(file, [address() + file.name], folder, told)
    except OSError as error:
        reasons = [f"{folder}: cannot be written to ({error})"]
    if not reasons:
        return path
    raise FetchError(
        f"the weights {name} are not in the package and could not be fetched:\n"
        + "\n".join(f"  {reason}" for reason in reasons)
        + f"\nWithout a network, put {file.name} into {folder}, or into a folder that VBCAPS_WEIGHTS names. "
        "VBCAPS_WEIGHTS_URL names another address to fetch from"
    )


def _has(path: Path, size: int, sha256: str) -> bool:
    return hashlib.sha256(read_bytes(path, size)).hexdigest() == sha256


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Wait for other processes that fetch into the folder, for example those that train together."""
    folder.mkdir(parents=True, exist_ok=True)
    if fcntl is None:
        yield
        return
    held = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):  # of a file system that has no locks
            fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)

"""Published sums: a file whose bytes are not those that were published is refused whenever it is loaded.

Hashing a large file takes as long as reading it, so a sum that was right is remembered in the user's cache by the path,
size and times of the file, and not taken again until one of them changes.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from vbcaps.disk import read_text, replace

KEPT = 1000  # files that are remembered
FRESH = 2_000_000_000  # ns: a file so young may still change without another time
LARGEST = 1 << 20  # bytes of the list of remembered files


def is_published(path: Path, sha256: str, take: Callable[[], str]) -> bool:
    """Return whether a file has a published sum.

    Args:
        path: the file.
        sha256: the sum of its bytes, or of its contents.
        take: takes this sum of the file; it is called where the sum is not remembered.
    """
    key, stamp = _stamp(path, sha256)
    known = _remembered()
    if stamp is not None and known.get(key) == stamp:
        return True
    if take() != sha256:
        return False
    if stamp is not None:
        known.pop(key, None)
        _remember({**known, key: stamp})
    return True


def _stamp(path: Path, sha256: str) -> tuple[str, str | None]:
    """Return the key of a file and what changes with it; None for a file that was written just now."""
    about = path.stat()
    newest = max(about.st_mtime_ns, about.st_ctime_ns)
    if time.time_ns() - newest < FRESH:
        return str(path.resolve()), None
    return str(path.resolve()), f"{sha256[:16]} {about.st_size} {about.st_mtime_ns} {about.st_ctime_ns} {about.st_ino}"


def _file() -> Path:
    cache = os.environ.get("VBCAPS_CACHE")
    if cache:
        return Path(cache) / "sums.json"
    home = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA") or "~/.cache"
    return Path(home).expanduser() / "vbcaps" / "sums.json"


def _remembered() -> dict[str, str]:
    with contextlib.suppress(OSError, RuntimeError, ValueError, RecursionError):  # damaged, or no home
        known = json.loads(read_text(_file(), LARGEST))
        if isinstance(known, dict) and all(isinstance(stamp, str) for stamp in known.values()):
            return known
    return {}


def _remember(known: dict[str, str]) -> None:
    """Write the list in one step; without a place to write it, the next load takes the sum again."""
    with contextlib.suppress(OSError, RuntimeError):
        file = _file()
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        replace(file, json.dumps(dict(list(known.items())[-KEPT:])).encode())

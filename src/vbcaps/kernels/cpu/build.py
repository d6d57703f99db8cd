"""Compile the C++ kernels once for this machine, and load them.

The library is kept in the user's cache folder (`VBCAPS_CACHE`, else `$XDG_CACHE_HOME/vbcaps`, else `~/.cache/vbcaps`).
Its name is a hash of the sources, the flags, and the compiler's description of itself and of the processor. The file
ends in a checksum of its content: a damaged library is built again.
"""

import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = ("passes.cpp", "vb.cpp", "em.cpp")
HEADERS = ("lanes.h",)
# No -ffast-math: the kernels use infinities and NaNs. Without errno and traps, the compiler still vectorises the loops.
FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd", "-shared", "-fPIC")
MACHINES = (("-march=native", "-fopenmp"), ("-march=native",), ())  # the first that the compiler accepts

_lock = threading.Lock()


class NoLibraryError(RuntimeError):
    """Raised where there is no compiler, or where it failed."""


def library() -> ctypes.CDLL:
    """Return the compiled kernels, built if necessary, or raise NoLibraryError if they cannot be built."""
    with _lock:
        loaded = _library()
    if isinstance(loaded, NoLibraryError):
        raise loaded
    return loaded


def why_no_library() -> str | None:
    """Return why the kernels cannot be used on this machine, or None if they can."""
    try:
        library()
    except NoLibraryError as error:
        return str(error)
    return None


@functools.cache
def _library() -> ctypes.CDLL | NoLibraryError:
    compiler = find_compiler()
    if compiler is None:
        return NoLibraryError("there is no C++ compiler: neither CXX nor c++, g++ or clang++ on the PATH")
    said = ""
    for machine in MACHINES:
        try:
            return build([*compiler, *FLAGS, *machine])
        except (OSError, subprocess.SubprocessError) as error:
            said = said or f"{error}: {getattr(error, 'stderr', None) or ''}".strip()
    return NoLibraryError(f"{shlex.join(compiler)} failed: {said[:2000]}")


def find_compiler() -> list[str] | None:
    """Return the command of a C++ compiler, or None if there is none."""
    named = shlex.split(os.environ.get("CXX", ""))
    if named and shutil.which(named[0]):
        return named
    return next(([found] for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)


def build(command: list[str]) -> ctypes.CDLL:
    """Return the library that this command builds, from the cache folder or newly built."""
    name = f"{_key(command)}.so"
    folder = cache_folder()
    kept = None if folder is None else folder / name
    if kept is not None and _is_whole(kept):
        try:
            return ctypes.CDLL(str(kept))
        except OSError:  # built for another system, on a shared disk
            pass
    with tempfile.TemporaryDirectory() as made:
        fresh = Path(made) / name
        _run([*command, *(str(HERE / source) for source in SOURCES), "-o", str(fresh)])
        with fresh.open("ab") as file:
            file.write(hashlib.sha256(fresh.read_bytes()).digest())
        if kept is not None and _keep(fresh, kept):
            try:
                return ctypes.CDLL(str(kept))
            except OSError:  # the disk does not allow execution
                pass
        return ctypes.CDLL(str(fresh))


def cache_folder() -> Path | None:
    if named := os.environ.get("VBCAPS_CACHE"):
        return Path(named)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vbcaps"
    except RuntimeError:  # a user without a home
        return None


def _key(command: list[str]) -> str:
    about = _run([*command, "-dM", "-E", "-x", "c++", os.devnull])  # version, and features of the processor
    hashed = hashlib.sha256("\0".join([*command, about]).encode())
    for name in (*HEADERS, *SOURCES):
        hashed.update((HERE / name).read_bytes() + b"\0")
    return hashed.hexdigest()[:32]


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout


def _is_whole(path: Path) -> bool:
    """Return whether the file ends in the checksum of the bytes before it."""
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-32]).digest() == content[-32:]


def _keep(fresh: Path, kept: Path) -> bool:
    """Move the library atomically to the path where other processes find it; return False if that is not allowed."""
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as beside:
            os.replace(shutil.copyfile(fresh, Path(beside) / kept.name), kept)
    except OSError:
        return False
    return True

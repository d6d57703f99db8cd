"""Compile the C++ kernels once for this machine, and load them.

The library is kept in `kernels/` within the user's cache folder (`VBCAPS_CACHE`, else `$XDG_CACHE_HOME/vbcaps`, else
`~/.cache/vbcaps`). Its name is a hash of the sources, the flags, and the compiler's description of itself and of the
processor. The file ends in a checksum of its content: a damaged library is built again. A checksum does not protect
from other users, and loading a library runs it: so the folder and the file must belong to the user, and nobody else may
be able to write to them.
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
import warnings
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
    folder = private_folder()
    kept = None if folder is None else folder / name
    if kept is not None and is_private(kept) and _is_whole(kept):
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


def private_folder() -> Path | None:
    """Return the folder of the libraries, made if need be; None if there can be none that is the user's own."""
    cache = cache_folder()
    if cache is None:
        return None
    folder = cache / "kernels"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return None
    if is_private(folder):
        return folder
    warnings.warn(
        f"{folder} is not yours alone, so nothing is loaded from it and each process compiles its kernels anew: "
        f"`chmod 700 {folder}`, or set VBCAPS_CACHE to a folder of your own",
        stacklevel=2,
    )
    return None


def is_private(path: Path) -> bool:
    """Return whether a file or folder is there, belongs to the user, and nobody else may write to it."""
    if not hasattr(os, "getuid"):  # Windows, where the cache lies in the user's profile
        return path.exists()
    try:
        about = path.lstat()  # of a link itself, to which anybody may write
    except OSError:
        return False
    return about.st_uid == os.getuid() and not about.st_mode & 0o022


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
        with tempfile.TemporaryDirectory(dir=kept.parent) as beside:
            copy = shutil.copyfile(fresh, Path(beside) / kept.name)
            copy.chmod(0o600)
            os.replace(copy, kept)
    except OSError:
        return False
    return True

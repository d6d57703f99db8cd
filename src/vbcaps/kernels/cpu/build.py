"""Compile the C++ kernels: for each instruction set when the package is built, or for this machine at first use.

`setup.py` reads this file alone, so it imports nothing but the standard library. `library.py` chooses and loads what a
wheel holds, and comes here for a compiler only where no built library matches the sources.

A library that is compiled at first use is kept in `kernels/` within the user's cache folder (`VBCAPS_CACHE`, else
`$XDG_CACHE_HOME/vbcaps`, else `~/.cache/vbcaps`). Its name is a hash of the sources, the flags, and the compiler's
description of itself and of the processor. The file ends in a checksum of its content: a damaged library is built
again. A checksum does not protect from other users, and loading a library runs it: so the folder and the file must
belong to the user, and nobody else may be able to write to them.
"""

import ctypes
import hashlib
import os
import platform
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

Made = TypeVar("Made")
HERE = Path(__file__).parent
SOURCES = ("passes.cpp", "vb.cpp", "em.cpp", "norm.cpp", "processor.cpp")
HEADERS = ("lanes.h",)
# No -ffast-math: the kernels use infinities and NaNs. Without errno and traps, the compiler still vectorises the loops.
FLAGS = ("-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd", "-shared", "-fPIC")
MACHINES = (("-march=native", "-fopenmp"), ("-march=native",), ())  # the first that the compiler accepts
# The instruction sets that a package has libraries for, best first, with what each needs of the processor; on other
# processors than x86-64 there is the baseline alone.
VARIANTS = {
    "avx512": ("avx512f", "avx512dq", "avx512bw", "avx512vl", "avx2", "fma"),
    "avx2": ("avx2", "fma"),
    "baseline": (),
}


class NoLibraryError(RuntimeError):
    """Raised where there is no compiler, or where it failed."""


def variants() -> tuple[str, ...]:
    """Return the instruction sets that libraries are built for on this kind of processor, best first."""
    return tuple(VARIANTS) if platform.machine() in ("x86_64", "AMD64") else ("baseline",)


def machines(variant: str) -> tuple[tuple[str, ...], ...]:
    """Return the flags for an instruction set, or for this machine, "native"; the first that the compiler accepts."""
    if variant == "native":
        return MACHINES
    features = tuple(f"-m{feature}" for feature in VARIANTS[variant])
    return (*features, "-fopenmp"), features


def sum_of_sources() -> int:
    """Return a checksum of all that decides what is in a built library, which ``sources`` of the library returns."""
    hashed = hashlib.sha256(repr((FLAGS, VARIANTS)).encode())
    for name in (*HEADERS, *SOURCES):
        hashed.update((HERE / name).read_bytes() + b"\0")
    return int.from_bytes(hashed.digest()[:8], "little")


def build_variant(variant: str, path: Path) -> None:
    """Compile a library for a package, or raise NoLibraryError.

    The library of a wheel is linked to no OpenMP runtime. PyTorch brings one and has loaded it before the kernels, and
    a second one in the process would have threads of its own, which fight with PyTorch's for the cores; the tools that
    make Linux wheels self-contained would put just such a second one into the wheel. GCC's calls (GOMP_parallel and
    others) are left undefined instead, and the loader finds them in the runtime that is there, be it GCC's or LLVM's,
    which has these names too. Clang calls other names, which GCC's runtime lacks, so a library that Clang compiles is
    linked to Clang's own runtime where that is installed; and else it uses one thread.
    """
    compiler = need_compiler()
    unlinked = _is_gcc(compiler) and sys.platform == "linux"
    windows = sys.platform == "win32"  # where code has no fixed place anyhow, and what a library exports must be named
    compiling = [flag for flag in FLAGS if flag != "-shared" and not (windows and flag == "-fPIC")]
    compiling.append(f"-DSOURCES_SUM={sum_of_sources()}ull")
    linking = ["-shared", *(f"-Wl,/EXPORT:{name}" for name in exported() if windows)]
    with tempfile.TemporaryDirectory() as made:
        objects = [str(Path(made) / f"{source}.o") for source in SOURCES]

        def attempt(machine: Sequence[str]) -> None:
            for source, made_of in zip(SOURCES, objects, strict=True):
                _run([*compiler, *compiling, *machine, "-c", str(HERE / source), "-o", made_of])
            threads = [flag for flag in machine if flag == "-fopenmp" and not unlinked]
            _run([*compiler, *linking, *threads, *objects, "-o", str(path)])

        _first(machines(variant), attempt, compiler)


def exported() -> list[str]:
    """Return the names of the functions that a library offers: those between ``extern "C" {`` and its end."""
    parts = [(HERE / source).read_text().partition('extern "C" {')[2] for source in SOURCES]
    return [name for part in parts for name in re.findall(r"^\w+ (\w+)\(", part, re.MULTILINE)]


def build_here(variant: str) -> ctypes.CDLL:
    """Return the library that is compiled at first use, or raise NoLibraryError; ``variant`` may be "native"."""
    compiler = need_compiler()
    return _first(machines(variant), lambda machine: build([*compiler, *FLAGS, *machine]), compiler)


def need_compiler() -> list[str]:
    compiler = find_compiler()
    if compiler is None:
        raise NoLibraryError("there is no C++ compiler: neither CXX nor c++, g++ or clang++ on the PATH")
    return compiler


def _first(machines: Iterable[Sequence[str]], attempt: Callable[[Sequence[str]], Made], compiler: list[str]) -> Made:
    """Return what the first attempt makes that does not fail."""
    said = ""
    for machine in machines:
        try:
            return attempt(machine)
        except (OSError, subprocess.SubprocessError) as error:
            said = said or f"{error}: {getattr(error, 'stderr', None) or ''}".strip()
    raise NoLibraryError(f"{shlex.join(compiler)} failed: {said[:2000]}")


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
    if is_private(folder) and not is_replaceable(folder):
        return folder
    warnings.warn(
        f"{folder} is not yours alone, so nothing is loaded from it and each process compiles its kernels anew: "
        f"`chmod 700 {folder}`, or set VBCAPS_CACHE to a folder of your own",
        stacklevel=2,
    )
    return None


def is_replaceable(folder: Path) -> bool:
    """Return whether anybody could put another folder in the place of this one, because one above it is open to all."""
    above = [path.stat().st_mode for path in folder.resolve().parents]
    return any(mode & stat.S_IWOTH and not mode & stat.S_ISVTX for mode in above)


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
    about = _about(command)  # version, and features of the processor
    hashed = hashlib.sha256("\0".join([*command, about]).encode())
    for name in (*HEADERS, *SOURCES):
        hashed.update((HERE / name).read_bytes() + b"\0")
    return hashed.hexdigest()[:32]


def _about(command: list[str]) -> str:
    return _run([*command, "-dM", "-E", "-x", "c++", os.devnull])


def _is_gcc(compiler: list[str]) -> bool:
    try:
        return "__clang__" not in _about(compiler)
    except (OSError, subprocess.SubprocessError):
        return False


def _run(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=600).stdout


def _is_whole(path: Path) -> bool:
    """Return whether the file ends in the checksum of the bytes before it."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return False
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

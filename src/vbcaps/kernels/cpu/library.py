"""Choose the library of C++ kernels for this machine, and load it.

A wheel has one library for each instruction set (`build.VARIANTS`), and the best that the processor and the operating
system support is loaded. `VBCAPS_CPU` names another: `baseline`, `avx2`, `avx512`, or `native`, which is compiled for
this very machine. Where no library was built from the sources that lie here, as in a checkout whose kernels were
changed since, or after an installation without a compiler, the kernels are compiled at first use instead.
"""

import ctypes
import functools
import os
import threading
from pathlib import Path

from vbcaps.kernels.cpu import build
from vbcaps.kernels.cpu.build import NoLibraryError

FOLDER = build.HERE  # of the libraries that were built with the package
_lock = threading.Lock()


def library() -> ctypes.CDLL:
    """Return the kernels, compiled if necessary, or raise NoLibraryError if there can be none."""
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


def file_of(variant: str) -> Path:
    """Return the path of the library that was built with the package for an instruction set."""
    return FOLDER / f"kernels_{variant}.so"


@functools.cache
def _library() -> ctypes.CDLL | NoLibraryError:
    named = os.environ.get("VBCAPS_CPU") or None
    if named not in (None, "native", *build.variants()):
        raise ValueError(f"VBCAPS_CPU must be {', '.join(build.variants())} or native, got {named!r}")
    try:
        if named == "native":
            return build.build_here("native")
        if named is not None and not _supports(_probe(), named):
            raise ValueError(f"VBCAPS_CPU={named}, but this processor does not have the instructions of {named}")
        try:
            return shipped(named or best())
        except NoLibraryError as error:
            why = error
        try:
            return build.build_here(named or "native")
        except NoLibraryError as error:
            return NoLibraryError(f"{why}, and {error}")
    except NoLibraryError as error:
        return error


def shipped(variant: str) -> ctypes.CDLL:
    """Return the library that was built with the package, or raise NoLibraryError that says why it does not serve."""
    path = file_of(variant)
    if not path.is_file():
        raise NoLibraryError(f"the package was installed without {path.name}")
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise NoLibraryError(f"{path} cannot be loaded ({error})") from error
    loaded.sources.restype = ctypes.c_uint64
    if loaded.sources() != build.sum_of_sources():
        raise NoLibraryError(f"{path.name} was built from other sources than those beside it")
    return loaded


def best() -> str:
    """Return the best instruction set that the processor and the operating system support."""
    probe = shipped("baseline")
    return next(variant for variant in build.variants() if _supports(probe, variant))


def supported() -> list[str]:
    """Return the instruction sets that this machine supports, best first."""
    probe = _probe()
    return [variant for variant in build.variants() if _supports(probe, variant)]


def _probe() -> ctypes.CDLL:
    """Return a library that every processor can run."""
    try:
        return shipped("baseline")
    except NoLibraryError:
        return build.build_here("baseline")


def _supports(probe: ctypes.CDLL, variant: str) -> bool:
    return bool(getattr(probe, f"has_{variant}")())

"""Finding and reading data files, compressed or not, with errors that say which file and what to do.

Nothing that is read is executed: no pickles, and arrays only as ``.npy`` without objects.
"""

import gzip
import hashlib
import io
import lzma
import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from vbcaps.data.dataset import DataError
from vbcaps.data.official import SUMS

AGAIN = "delete it and fetch it again (vbcaps data fetch)"


def plain(name: str) -> str:
    """Return the name without its compression: a.mat for a.mat.gz."""
    return name.removesuffix(".gz").removesuffix(".xz").removesuffix(".zip")


def find(folder: Path, name: str) -> Path | None:
    """Return the file ``name`` in ``folder``, or its uncompressed twin."""
    candidates = (folder / name, folder / plain(name))
    return next((path for path in candidates if path.is_file()), None)


def need(folder: Path, name: str) -> Path:
    path = find(folder, name)
    if path is None:
        fetch = f"vbcaps data fetch {folder.name} --data-folder {folder.parent}"
        raise DataError(f"{folder / name} is missing: fetch it with `{fetch}`, or place it there by hand")
    return path


def read_raw(path: Path) -> bytes:
    """Read the bytes on the disk. A file with the name and size of an official one must have its sum."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error})") from error
    published = SUMS.get((path.name, len(data)))
    if published and hashlib.sha256(data).hexdigest() != published:
        raise DataError(f"{path}: damaged, its SHA-256 is not the published {published}: {AGAIN}")
    return data


def read(path: Path) -> bytes:
    """Read the contents, uncompressed; for a.mat.zip, those of a.mat in it."""
    data = read_raw(path)
    try:
        if path.suffix == ".gz":
            return gzip.decompress(data)
        if path.suffix == ".xz":
            return lzma.decompress(data)
        if path.suffix == ".zip":
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                return archive.read(plain(path.name))
    except (EOFError, KeyError, OSError, zlib.error, lzma.LZMAError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: damaged or cut short ({error}): {AGAIN}") from error
    return data


def read_npy(path: Path) -> np.ndarray:
    """Read an array from .npy or .npy.xz."""
    data = read(path)
    try:
        return np.load(io.BytesIO(data), allow_pickle=False)
    except (EOFError, OSError, ValueError) as error:
        raise DataError(f"{path}: not an array in .npy format, or damaged ({error})") from error


def read_matlab(path: Path, variables: tuple[str, ...]) -> dict[str, Any]:
    """Read variables of a MATLAB file (version 5), zipped or not."""
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise DataError(f"{path}: MATLAB files need SciPy: pip install scipy") from error
    data = read(path)
    try:
        found = loadmat(io.BytesIO(data), variable_names=variables)
    except Exception as error:  # SciPy fails on damage in a dozen ways, from TypeError to zlib.error
        raise DataError(f"{path}: not a MATLAB 5 file, or damaged ({error}): {AGAIN}") from error
    if missing := [name for name in variables if name not in found]:
        raise DataError(f"{path}: has no variable {missing[0]!r}")
    return found

"""Finding and reading data files, compressed or not, with errors that say which file and what to do.

Nothing that is read is executed, no size is believed before it is compared with what there is, and nothing is unpacked
further than twice what the official file has: see ``contents``, ``npy``, ``matlab``, ``tar`` and ``pickles``.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vbcaps.data.contents import contents
from vbcaps.data.dataset import DataError
from vbcaps.data.matlab import unpack_matlab
from vbcaps.data.npy import unpack_npy
from vbcaps.data.official import CONTENTS, OFFICIAL, SUMS
from vbcaps.data.sums import is_published
from vbcaps.disk import opened

AGAIN = "delete it and fetch it again (vbcaps data fetch)"
UNKNOWN = 1 << 29  # bytes of contents, where there is no official file of that name


def plain(name: str) -> str:
    """Return the name without its compression: a.mat for a.mat.gz."""
    return name.removesuffix(".gz").removesuffix(".xz").removesuffix(".zip")


# Of the contents of official files, by dataset and name without compression.
CONTENT_SUMS = {(name, plain(one.name)): one.content for name in OFFICIAL for one in OFFICIAL[name] if one.content}


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


@contextmanager
def reading(path: Path | str, hint: str = AGAIN) -> Iterator[None]:
    """Turn whatever a reader raises on a damaged file into one error, which names the file and says what to do."""
    try:
        yield
    except DataError:
        raise
    except MemoryError as error:
        raise DataError(f"{path}: there is not enough memory to read it") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error}): {hint}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: damaged or of another kind (a name in it is no text): {hint}") from error
    except Exception as error:  # damage makes libraries fail in dozens of ways, from KeyError to RecursionError
        raise DataError(f"{path}: damaged or of another kind ({error or type(error).__name__}): {hint}") from error


def read(path: Path) -> bytearray:
    """Read the contents, uncompressed; for a.mat.zip, those of a.mat in it.

    A file with the name and size of an official one must have its published sum, and so must contents with the size of
    the official ones.
    """
    name = plain(path.name)
    official = CONTENTS.get(name, UNKNOWN)
    with reading(path), opened(path) as file:
        packed = SUMS.get((path.name, path.stat().st_size))
        if packed and not is_published(path, packed, lambda: hashlib.file_digest(file, "sha256").hexdigest()):
            raise DataError(f"{path}: damaged, its SHA-256 is not the published {packed}: {AGAIN}")
        data = contents(file, path.name, 2 * official)
        published = CONTENT_SUMS.get((path.parent.name, name))
        if packed or not published or len(data) != official:
            return data
        if not is_published(path, published, lambda: hashlib.sha256(data).hexdigest()):
            raise DataError(f"{path}: changed, the SHA-256 of its contents is not the published {published}: {AGAIN}")
        return data


def read_npy(path: Path) -> np.ndarray:
    """Read an array of plain numbers from .npy or .npy.xz."""
    with reading(path):
        return unpack_npy(read(path))


def read_matlab(path: Path, wanted: tuple[str, ...]) -> dict[str, np.ndarray]:
    """Read arrays of a MATLAB file (version 5), zipped or not: variables, and fields of structs as "struct.field"."""
    with reading(path):
        found = unpack_matlab(read(path), wanted, 2 * CONTENTS.get(plain(path.name), UNKNOWN))
    if missing := [name for name in wanted if name not in found]:
        raise DataError(f"{path}: has no variable {missing[0]!r}: {AGAIN}")
    return found


def as_labels(numbers: np.ndarray, path: Path | str, low: int, high: int) -> Tensor:
    """Return whole numbers of any type from ``low`` to ``high`` as int64."""
    if not len(numbers):
        raise DataError(f"{path}: there are no images: {AGAIN}")
    if not bool(np.isfinite(numbers).all()) or not bool((numbers == np.floor(numbers)).all()):
        raise DataError(f"{path}: labels must be whole numbers, got others: {AGAIN}")
    least, most = numbers.min(), numbers.max()
    if not low <= least <= most <= high:
        raise DataError(f"{path}: labels must be {low} to {high}, got {int(least)} to {int(most)}: {AGAIN}")
    return torch.from_numpy(numbers.astype(np.int64))

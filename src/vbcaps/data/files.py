"""Finding and reading the official files, compressed or not, with errors that say which file and what to do."""

import gzip
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path

from vbcaps.data.dataset import DataError

OPEN: dict[str, Callable] = {".gz": gzip.open, ".xz": lzma.open}


def plain(name: str) -> str:
    """The name without its compression: a.mat for a.mat.gz."""
    return name.removesuffix(".gz").removesuffix(".xz")


def find(folder: Path, names: tuple[str, ...]) -> Path:
    """The first of ``names`` that is in ``folder``, or is there uncompressed."""
    for name in names:
        for candidate in (name, plain(name)):
            if (folder / candidate).is_file():
                return folder / candidate
    raise DataError(f"{folder / names[0]} is missing: fetch it with `vbcaps data fetch`, or place it there by hand")


def read(path: Path) -> bytes:
    """All bytes of a file, uncompressed."""
    try:
        with OPEN.get(path.suffix, open)(path, "rb") as file:
            return file.read()
    except (EOFError, gzip.BadGzipFile, zlib.error, lzma.LZMAError) as error:
        raise DataError(f"{path}: damaged or cut short ({error}): delete it and fetch it again") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error})") from error

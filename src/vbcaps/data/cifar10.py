"""CIFAR-10: the python or the binary version, as the archive or unpacked, or sheets.

A binary batch consists of rows of one label and 3072 pixels, colour by colour. A python batch is a pickle of a
dictionary; its unpickler loads no class and calls no function, and only records the contents of arrays.
"""

import io
import math
import pickle
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vbcaps.data.dataset import DataError, Dataset, Split
from vbcaps.data.files import AGAIN, need, read, read_raw
from vbcaps.data.sheets import has_sheets, read_sheets

CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
BATCHES = {"train": [f"data_batch_{k}" for k in range(1, 6)], "test": ["test_batch"]}
PIXELS = 3 * 32 * 32


def cifar10(folder: Path) -> Dataset:
    batches = _batches(folder)
    if batches:
        train, test = (_join([batches[name] for name in names]) for names in BATCHES.values())
        return Dataset("cifar10", train, test, CLASSES, "original files")
    if has_sheets(folder):
        train, test = (read_sheets(folder, part) for part in BATCHES)
        return Dataset("cifar10", train, test, CLASSES, "original pixels, from lossless sheets")
    raise DataError(
        f"{folder / 'cifar-10-python.tar.gz'} is missing (cifar-10-binary.tar.gz will do): "
        f"fetch it with `vbcaps data fetch {folder.name}`, or place it there by hand"
    )


def read_binary(data: bytes, path: str) -> tuple[np.ndarray, np.ndarray]:
    """Return images ``n 3072`` and labels ``n`` of a batch of the binary version; ``path`` is for the message."""
    if not data or len(data) % (1 + PIXELS):
        raise DataError(
            f"{path}: {len(data)} bytes is not a multiple of the {1 + PIXELS} of an image: cut short? {AGAIN}"
        )
    rows = np.frombuffer(data, np.uint8).reshape(-1, 1 + PIXELS)
    return rows[:, 1:], rows[:, 0]


def read_pickle(data: bytes, path: str) -> tuple[np.ndarray, np.ndarray]:
    """Return images ``n 3072`` and labels ``n`` of a batch of the python version; ``path`` is for the message."""
    try:
        batch = _Unpickler(io.BytesIO(data), encoding="bytes").load()
        images, labels = _array(batch[b"data"]), np.array(batch[b"labels"], np.int64)
    except Exception as error:  # a damaged pickle can raise any error
        raise DataError(f"{path}: not a CIFAR-10 batch, or damaged ({error}): {AGAIN}") from error
    if images.ndim != 2 or images.shape[1] != PIXELS or labels.shape != images.shape[:1]:
        raise DataError(f"{path}: data must be n {PIXELS} with n labels, got {images.shape} and {labels.shape}")
    return images, labels


class _Made:
    """Stand in for any object in a pickle: keep the arguments and the state, execute nothing."""

    def __init__(self, *args: Any):
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    NAMES = {(f"numpy{core}.multiarray", "_reconstruct") for core in (".core", "._core")} | {
        ("numpy", "ndarray"),
        ("numpy", "dtype"),
    }

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self.NAMES:
            return _Made
        raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no array needs")


def _array(made: _Made) -> np.ndarray:
    """Return the array of bytes that NumPy would make of this state: version, shape, dtype, column-major, data."""
    _, shape, dtype, columns_first, data = made.state
    if dtype.args[0] not in (b"u1", "u1") or len(data) != math.prod(shape):
        raise ValueError(f"data of type {dtype.args[0]!r} and shape {shape} in {len(data)} bytes")
    return np.frombuffer(data, np.uint8).reshape(shape, order="F" if columns_first else "C")


def _batches(folder: Path) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return every batch by its name, from the first version found, or an empty dictionary if there is none."""
    wanted = [name for names in BATCHES.values() for name in names]
    for archive, unpacked, suffix, reader in (
        (folder / "cifar-10-binary.tar.gz", folder / "cifar-10-batches-bin", ".bin", read_binary),
        (folder / "cifar-10-python.tar.gz", folder / "cifar-10-batches-py", "", read_pickle),
    ):
        for place in (unpacked, folder):
            if any((place / f"{name}{suffix}").is_file() for name in wanted):
                paths = {name: need(place, f"{name}{suffix}") for name in wanted}
                return {name: reader(read_raw(path), str(path)) for name, path in paths.items()}
        if archive.is_file():
            members = _members(archive, {f"{name}{suffix}": name for name in wanted})
            return {name: reader(members[name], f"{archive}, {name}{suffix}") for name in wanted}
    return {}


def _members(archive: Path, wanted: dict[str, str]) -> dict[str, bytes]:
    """Read files of an archive without unpacking it: ``wanted`` maps their names to those in the result."""
    found = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(read(archive)), mode="r:") as tar:
            for member in tar:
                name = wanted.get(Path(member.name).name)
                if name and (file := tar.extractfile(member)):
                    found[name] = file.read()
    except (tarfile.TarError, OSError) as error:
        raise DataError(f"{archive}: damaged or cut short ({error}): {AGAIN}") from error
    if missing := sorted(set(wanted.values()) - set(found)):
        raise DataError(f"{archive}: has no {', '.join(missing)}: {AGAIN}")
    return found


def _join(batches: list[tuple[np.ndarray, np.ndarray]]) -> Split:
    images = np.concatenate([images for images, _ in batches]).reshape(-1, 3, 32, 32)
    labels = np.concatenate([labels for _, labels in batches]).astype(np.int64)
    return Split(torch.from_numpy(images), torch.from_numpy(labels))

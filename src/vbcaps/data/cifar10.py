"""CIFAR-10: the python or the binary version, as the archive or unpacked, or sheets.

A binary batch consists of rows of one label and 3072 pixels, colour by colour. A python batch is a pickle of a
dictionary; ``pickles`` reads it without loading a class or calling a function.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from vbcaps.data.contents import Damaged
from vbcaps.data.dataset import DataError, Dataset, Split
from vbcaps.data.files import AGAIN, as_labels, need, read, reading
from vbcaps.data.pickles import bytes_of, unpack_pickle
from vbcaps.data.sheets import has_sheets, read_sheets
from vbcaps.data.tar import unpack_tar

Bytes = bytes | bytearray | memoryview
Batch = tuple[np.ndarray, Tensor]  # images n 3072, labels n
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


def read_binary(data: Bytes, path: str) -> Batch:
    """Return images ``n 3072`` and labels ``n`` of a batch of the binary version; ``path`` is for the message."""
    if not len(data) or len(data) % (1 + PIXELS):
        raise DataError(
            f"{path}: {len(data)} bytes is not a multiple of the {1 + PIXELS} of an image: cut short? {AGAIN}"
        )
    rows = np.frombuffer(data, np.uint8).reshape(-1, 1 + PIXELS)
    return rows[:, 1:], as_labels(rows[:, 0], path, 0, len(CLASSES) - 1)


def read_pickle(data: Bytes, path: str) -> Batch:
    """Return images ``n 3072`` and labels ``n`` of a batch of the python version; ``path`` is for the message."""
    try:
        batch = unpack_pickle(data)
        if not isinstance(batch, dict) or not {b"data", b"labels"} <= batch.keys():
            raise Damaged("it has no dictionary with data and labels")
        images, labels = bytes_of(batch[b"data"]), batch[b"labels"]
        if not isinstance(labels, list) or not all(type(label) is int for label in labels):
            raise Damaged("its labels are no whole numbers")
        of_classes = np.array(labels, np.int64)
    except (ValueError, OverflowError) as error:  # a number beyond 64 bits, a word that is no text
        words = error if isinstance(error, Damaged) else "it has a number or a word that no batch has"
        raise DataError(f"{path}: not a CIFAR-10 batch, or damaged ({words}): {AGAIN}") from error
    if images.ndim != 2 or images.shape[1] != PIXELS or len(images) != len(labels):
        raise DataError(f"{path}: data must be n {PIXELS} with n labels, got {images.shape} and {len(labels)}: {AGAIN}")
    return images, as_labels(of_classes, path, 0, len(CLASSES) - 1)


def _batches(folder: Path) -> dict[str, Batch]:
    """Return every batch by its name, from the first version found, or an empty dictionary if there is none."""
    wanted = [name for names in BATCHES.values() for name in names]
    for archive, unpacked, suffix, reader in (
        (folder / "cifar-10-binary.tar.gz", folder / "cifar-10-batches-bin", ".bin", read_binary),
        (folder / "cifar-10-python.tar.gz", folder / "cifar-10-batches-py", "", read_pickle),
    ):
        for place in (unpacked, folder):
            if any((place / f"{name}{suffix}").is_file() for name in wanted):
                paths = {name: need(place, f"{name}{suffix}") for name in wanted}
                return {name: reader(read(path), str(path)) for name, path in paths.items()}
        if archive.is_file():
            members = _members(archive, {f"{name}{suffix}": name for name in wanted})
            return {name: reader(members[name], f"{archive}, {name}{suffix}") for name in wanted}
    return {}


def _members(archive: Path, wanted: dict[str, str]) -> dict[str, memoryview]:
    """Read files of an archive without unpacking it: ``wanted`` maps their names to those in the result."""
    with reading(archive):
        found = unpack_tar(read(archive), wanted)
    if missing := sorted(wanted.keys() - found.keys()):
        raise DataError(f"{archive}: has no {', '.join(missing)}: {AGAIN}")
    return {wanted[name]: data for name, data in found.items()}


def _join(batches: list[Batch]) -> Split:
    images = np.concatenate([images for images, _ in batches]).reshape(-1, 3, 32, 32)
    return Split(torch.from_numpy(images), torch.cat([labels for _, labels in batches]))

"""MedMNIST: eleven datasets of medical images in the official ``.npz`` files, each with its own validation images.

A file has ``train_images``, ``train_labels`` and the same for ``val`` and ``test``: uint8 ``n h w`` or ``n h w 3``, and
labels ``n 1``. The grades of RetinaMNIST are ordered; they are told apart like any other classes.
"""

import hashlib
import zipfile
import zlib
from pathlib import Path
from typing import IO

import numpy as np
import torch

from vbcaps.data.dataset import DataError, Dataset, Split
from vbcaps.data.files import AGAIN
from vbcaps.data.medmnist_table import PARTS, SIDES, TABLE, file_name
from vbcaps.data.resize import resize

BLOCK = 1 << 22  # bytes that are decompressed at a time


def medmnist(folder: Path, size: int | None = None) -> Dataset:
    """Read the dataset ``folder.name``.

    Args:
        folder: the folder of its files.
        size: height and width of the images, 28 by default. They come from the file of this side, or from the next
            larger one and are resized.
    """
    name, size = folder.name, size or SIDES[0]
    about = TABLE[name]
    side = next((side for side in SIDES if side >= size), SIDES[-1])
    path = folder / file_name(name, side)
    if not path.is_file():
        what = name if side == SIDES[0] else f"{name}_{side}"
        fetch = f"vbcaps data fetch {what} --data-folder {folder.parent}"
        raise DataError(f"{path} is missing: fetch it with `{fetch}`, or place it there by hand")
    images = f"{'n h w' if about.channels == 1 else 'n h w 3'}"
    splits = []
    try:
        with open(path, "rb") as file, zipfile.ZipFile(file) as archive:
            for part in PARTS:
                pixels = _array(archive, f"{part}_images", path)
                shape = (len(pixels) if pixels.ndim else 0, side, side, *([3] if about.channels == 3 else []))
                if pixels.shape != shape or pixels.dtype != np.uint8:
                    raise DataError(
                        f"{path}: {part}_images must be uint8 {images} of {side} x {side} pixels, got {pixels.dtype} "
                        f"{pixels.shape}"
                    )
                labels = _array(archive, f"{part}_labels", path)
                if labels.shape != (len(pixels), 1) or labels.dtype.kind not in "ui":
                    raise DataError(
                        f"{path}: {part}_labels must be whole numbers, one for each of {len(pixels)} images "
                        f"(n 1), got {labels.dtype} {labels.shape}"
                    )
                channels_first = torch.from_numpy(pixels).view(len(pixels), side, side, -1).permute(0, 3, 1, 2)
                found = torch.from_numpy(labels[:, 0].astype(np.int64))
                splits.append(Split(resize(channels_first.contiguous(), size), found))
            file.seek(0)
            published = hashlib.file_digest(file, "md5").hexdigest() == about.md5[SIDES.index(side)]
    except (EOFError, KeyError, OSError, ValueError, zlib.error, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: no .npz file, damaged or cut short ({error}): {AGAIN}") from error
    train, validation, test = splits
    source = "original files" if published else "a file in MedMNIST's format that is not the published one"
    return Dataset(name, train, test, about.classes, source, validation)


def _array(archive: zipfile.ZipFile, name: str, path: Path) -> np.ndarray:
    """Read one array of an ``.npz`` file.

    The array is allocated only after its header has been held to the length of its data, and never by unpickling.
    """
    try:
        entry = archive.getinfo(f"{name}.npy")
    except KeyError:
        raise DataError(f"{path}: has no array {name}, so it is no file of MedMNIST") from None
    with archive.open(entry) as file:
        shape, column_major, dtype = _header(file)
        count = int(np.prod(shape, dtype=object)) if shape else 1
        if dtype.hasobject or column_major:
            raise DataError(f"{path}: {name} must be an array of numbers, row after row, got {dtype}")
        if count * dtype.itemsize != entry.file_size - file.tell():
            raise DataError(f"{path}: {name} says it has shape {shape} and has another number of bytes: {AGAIN}")
        array = np.empty(count, dtype)
        view, done = memoryview(array.view(np.uint8).data), 0
        while done < len(view):
            block = file.read(min(BLOCK, len(view) - done))
            if not block:
                raise EOFError(f"{name} ends after {done} of {len(view)} bytes")
            view[done : done + len(block)] = block
            done += len(block)
        file.read(1)  # at the end the archive compares its sum
    return array.reshape(shape)


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    version = np.lib.format.read_magic(file)
    if version == (1, 0):
        return np.lib.format.read_array_header_1_0(file)
    if version == (2, 0):
        return np.lib.format.read_array_header_2_0(file)
    raise ValueError(f"version {version} of .npy")

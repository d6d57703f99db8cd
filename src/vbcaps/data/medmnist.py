"""MedMNIST: eleven datasets of medical images in the official ``.npz`` files, each with its own validation images.

A file has ``train_images``, ``train_labels`` and the same for ``val`` and ``test``: uint8 ``n h w`` or ``n h w 3``, and
labels ``n 1``. The grades of RetinaMNIST are ordered; they are told apart like any other classes.
"""

import hashlib
import math
import zipfile
from pathlib import Path

import numpy as np
import torch

from vbcaps.data.contents import Damaged, check_list, unzip
from vbcaps.data.dataset import DataError, Dataset, Split
from vbcaps.data.files import AGAIN, as_labels, reading
from vbcaps.data.medmnist_table import PARTS, SIDES, TABLE, file_name
from vbcaps.data.npy import LONGEST, unpack_npy
from vbcaps.data.resize import resize
from vbcaps.data.sums import is_published
from vbcaps.disk import opened


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
    shape = (side, side) if about.channels == 1 else (side, side, 3)
    splits = []
    with reading(path), opened(path) as file:
        check_list(file, path.stat().st_size)
        with zipfile.ZipFile(file) as archive:
            for part, count in zip(PARTS, about.counts, strict=True):
                pixels, labels = _part(archive, part, count, shape, path)
                channels_first = torch.from_numpy(pixels).reshape(len(pixels), side, side, -1).permute(0, 3, 1, 2)
                found = as_labels(labels[:, 0], path, 0, len(about.classes) - 1)
                splits.append(Split(resize(channels_first.contiguous(), size), found))
        published = is_published(path, about.md5[SIDES.index(side)], lambda: _md5(path))
    train, validation, test = splits
    source = "original files" if published else "a file in MedMNIST's format that is not the published one"
    return Dataset(name, train, test, about.classes, source, validation)


def _part(
    archive: zipfile.ZipFile, part: str, count: int, shape: tuple[int, ...], path: Path
) -> tuple[np.ndarray, np.ndarray]:
    """Return the images and labels of a part, of at most twice the ``count`` images that the published file has."""
    pixels = _array(archive, f"{part}_images", 2 * count * math.prod(shape))
    if pixels.ndim != 1 + len(shape) or pixels.shape[1:] != shape or pixels.dtype != np.uint8:
        axes = f"uint8 {'n h w' if len(shape) == 2 else 'n h w 3'} of {shape[0]} x {shape[1]} pixels"
        raise DataError(f"{path}: {part}_images must be {axes}, got {pixels.dtype} {pixels.shape}: {AGAIN}")
    labels = _array(archive, f"{part}_labels", 2 * count * 8)
    if labels.shape != (len(pixels), 1) or labels.dtype.kind not in "ui":
        raise DataError(
            f"{path}: {part}_labels must be whole numbers, one for each of {len(pixels)} images (n 1), got "
            f"{labels.dtype} {labels.shape}: {AGAIN}"
        )
    return pixels, labels


def _array(archive: zipfile.ZipFile, name: str, most: int) -> np.ndarray:
    """Read one array of numbers of at most ``most`` bytes."""
    try:
        entry = archive.getinfo(f"{name}.npy")
    except KeyError:
        raise Damaged(f"it has no array {name}, so it is no file of MedMNIST") from None
    if entry.file_size > most + LONGEST:
        raise Damaged(f"{name} has {entry.file_size:,} bytes, and {most:,} at most")
    try:
        return unpack_npy(unzip(archive, entry, most + LONGEST))
    except Damaged as error:
        raise Damaged(f"{name}: {error}") from error


def _md5(path: Path) -> str:
    with opened(path) as file:
        return hashlib.file_digest(file, "md5").hexdigest()

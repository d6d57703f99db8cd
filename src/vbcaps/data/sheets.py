"""Lossless sheets: up to 4096 images of 32x32 in one WebP, 64 to a row, in order; the labels in a .npy beside them."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vbcaps.data.contents import Damaged
from vbcaps.data.dataset import DataError, Split
from vbcaps.data.files import AGAIN, as_labels, need, read_npy, reading
from vbcaps.disk import opened

SIZE, COLUMNS, PER_SHEET = 32, 64, 4096


def has_sheets(folder: Path) -> bool:
    return any(folder.glob("*_[0-9][0-9].webp"))


def read_sheets(folder: Path, part: str) -> Split:
    """Read the images ``part_00.webp``, ``part_01.webp``, ... and ``part_labels.npy``."""
    path = need(folder, f"{part}_labels.npy")
    labels = read_npy(path)
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise DataError(f"{path}: must be integers n, got {labels.dtype} {labels.shape}")
    classes = as_labels(labels, path, 0, 9)
    starts = range(0, len(labels), PER_SHEET)
    sheets = [
        _read_sheet(need(folder, f"{part}_{k:02d}.webp"), min(PER_SHEET, len(labels) - start))
        for k, start in enumerate(starts)
    ]
    return Split(torch.from_numpy(np.concatenate(sheets)), classes)


def _read_sheet(path: Path, count: int) -> np.ndarray:
    rows = -(-count // COLUMNS)
    expected = (COLUMNS * SIZE, rows * SIZE)
    with reading(path), opened(path) as file:
        size = _size_of(file.read(30))
        if size != expected:  # the decoder would allocate what the header says
            raise DataError(f"{path}: a sheet of {count} images is {expected[0]} x {expected[1]}, got {size}: {AGAIN}")
        if path.stat().st_size > 4 * expected[0] * expected[1]:
            raise DataError(f"{path}: has {path.stat().st_size:,} bytes, more than its pixels: {AGAIN}")
        with Image.open(file, formats=("WEBP",)) as image:
            sheet = np.asarray(image if image.mode == "RGB" else image.convert("RGB"))
    images = sheet.reshape(rows, SIZE, COLUMNS, SIZE, 3).transpose(0, 2, 4, 1, 3)  # row column channel y x
    return images.reshape(rows * COLUMNS, 3, SIZE, SIZE)[:count]


def _size_of(head: bytes) -> tuple[int, int]:
    """Return the width and height in the header of a lossless WebP file: 14 bits each, less 1."""
    if head[:4] != b"RIFF" or head[8:16] != b"WEBPVP8L" or head[20:21] != b"\x2f" or len(head) < 25:
        raise Damaged("it is no lossless WebP image")
    bits = int.from_bytes(head[21:25], "little")
    return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1

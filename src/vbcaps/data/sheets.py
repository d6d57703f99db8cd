"""Lossless sheets: up to 4096 images of 32x32 in one WebP, 64 to a row, in order; the labels in a .npy beside them."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vbcaps.data.dataset import DataError, Split
from vbcaps.data.files import need, read_npy

SIZE, COLUMNS, PER_SHEET = 32, 64, 4096


def has_sheets(folder: Path) -> bool:
    return any(folder.glob("*_[0-9][0-9].webp"))


def read_sheets(folder: Path, part: str) -> Split:
    """Read the images ``part_00.webp``, ``part_01.webp``, ... and ``part_labels.npy``."""
    labels = read_npy(need(folder, f"{part}_labels.npy"))
    if labels.ndim != 1 or labels.dtype.kind not in "iu":
        raise DataError(f"{folder / f'{part}_labels.npy'}: must be integers n, got {labels.dtype} {labels.shape}")
    starts = range(0, len(labels), PER_SHEET)
    sheets = [
        _read_sheet(need(folder, f"{part}_{k:02d}.webp"), min(PER_SHEET, len(labels) - start))
        for k, start in enumerate(starts)
    ]
    images = np.concatenate(sheets or [np.empty((0, 3, SIZE, SIZE), np.uint8)])
    return Split(torch.from_numpy(images), torch.from_numpy(labels.astype(np.int64)))


def _read_sheet(path: Path, count: int) -> np.ndarray:
    try:
        with Image.open(path) as image:
            sheet = np.asarray(image.convert("RGB"))
    except (OSError, Image.DecompressionBombError) as error:
        raise DataError(f"{path}: cannot be read as an image ({error})") from error
    rows = -(-count // COLUMNS)
    if sheet.shape != (rows * SIZE, COLUMNS * SIZE, 3):
        raise DataError(f"{path}: a sheet of {count} images is {rows * SIZE}x{COLUMNS * SIZE}, got {sheet.shape[:2]}")
    images = sheet.reshape(rows, SIZE, COLUMNS, SIZE, 3).transpose(0, 2, 4, 1, 3)  # row column channel y x
    return images.reshape(rows * COLUMNS, 3, SIZE, SIZE)[:count]

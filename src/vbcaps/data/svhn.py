"""SVHN, cropped digits: the original MATLAB files, or sheets. The ``extra`` set is not used, as in the paper."""

from pathlib import Path

import numpy as np
import torch

from vbcaps.data.dataset import DataError, Dataset, Split
from vbcaps.data.files import find, need, read_matlab
from vbcaps.data.mnist import DIGITS
from vbcaps.data.sheets import has_sheets, read_sheets

RE_CROPPED = "re-cropped: digits cut anew from the full-number images; order and labels as in the original"


def svhn(folder: Path) -> Dataset:
    if has_sheets(folder) and find(folder, "train_32x32.mat") is None:
        return Dataset("svhn", read_sheets(folder, "train"), read_sheets(folder, "test"), DIGITS, RE_CROPPED)
    return Dataset("svhn", read_mat(folder, "train"), read_mat(folder, "test"), DIGITS, "original files")


def read_mat(folder: Path, part: str) -> Split:
    """Read X, ``y x c n``, and y, ``n 1`` with 10 for the digit 0."""
    path = need(folder, f"{part}_32x32.mat")
    found = read_matlab(path, ("X", "y"))
    images, labels = np.asarray(found["X"]), np.asarray(found["y"]).reshape(-1)
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[2] != 3 or images.shape[3] != len(labels):
        raise DataError(f"{path}: X must be uint8 32 32 3 {len(labels)}, got {images.dtype} {images.shape}")
    labels = labels.astype(np.int64)
    if len(labels) and not 1 <= labels.min() <= labels.max() <= 10:
        raise DataError(f"{path}: labels must be 1 to 10, got {labels.min()} to {labels.max()}")
    return Split(torch.from_numpy(images.transpose(3, 2, 0, 1).copy()), torch.from_numpy(labels % 10))

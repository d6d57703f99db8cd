"""SVHN, cropped digits: the original MATLAB files, or sheets. The ``extra`` set is not used, as in the paper."""

from pathlib import Path

import numpy as np
import torch

from vbcaps.data.dataset import DataError, Dataset, Split
from vbcaps.data.files import AGAIN, as_labels, find, need, read_matlab
from vbcaps.data.mnist import DIGITS
from vbcaps.data.sheets import SIZE, has_sheets, read_sheets

RE_CROPPED = "re-cropped: digits cut anew from the full-number images; order and labels as in the original"


def svhn(folder: Path) -> Dataset:
    if has_sheets(folder) and find(folder, "train_32x32.mat") is None:
        return Dataset("svhn", read_sheets(folder, "train"), read_sheets(folder, "test"), DIGITS, RE_CROPPED)
    return Dataset("svhn", read_mat(folder, "train"), read_mat(folder, "test"), DIGITS, "original files")


def read_mat(folder: Path, part: str) -> Split:
    """Read X, ``y x c n``, and y, ``n 1`` with 10 for the digit 0."""
    path = need(folder, f"{part}_32x32.mat")
    found = read_matlab(path, ("X", "y"))
    images, labels = found["X"], found["y"].reshape(-1)
    if images.dtype != np.uint8 or images.shape != (SIZE, SIZE, 3, len(labels)):
        raise DataError(f"{path}: X must be uint8 32 32 3 {len(labels)}, got {images.dtype} {images.shape}: {AGAIN}")
    digits = as_labels(labels, path, 1, 10) % 10
    return Split(torch.from_numpy(images.transpose(3, 2, 0, 1).copy()), digits)

"""MNIST and Fashion-MNIST: idx files, gzipped or not.

An idx file: two zero bytes, the type (8: unsigned byte), the number of axes, each axis as a big-endian uint32, data.
"""

import math
import struct
from pathlib import Path

import numpy as np
import torch

from vbcaps.data.dataset import DataError, Dataset, Split
from vbcaps.data.files import AGAIN, as_labels, need, read

SIDE = 28
DIGITS = tuple("0123456789")
CLOTHES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip


def mnist(folder: Path) -> Dataset:
    return Dataset("mnist", read_split(folder, "train"), read_split(folder, "t10k"), DIGITS, "original files")


def fashion_mnist(folder: Path) -> Dataset:
    return Dataset("fashion-mnist", read_split(folder, "train"), read_split(folder, "t10k"), CLOTHES, "original files")


def read_split(folder: Path, prefix: str) -> Split:
    paths = [need(folder, f"{prefix}-{part}-ubyte.gz") for part in ("images-idx3", "labels-idx1")]
    images, labels = read_idx(paths[0], 3), read_idx(paths[1], 1)
    if images.shape[1:] != (SIDE, SIDE):
        raise DataError(f"{paths[0]}: images must be {SIDE} x {SIDE}, got {images.shape[1:]}: {AGAIN}")
    if len(images) != len(labels):
        raise DataError(f"{paths[0]} has {len(images)} images, {paths[1]} {len(labels)} labels: they do not match")
    return Split(torch.from_numpy(images)[:, None], as_labels(labels, paths[1], 0, 9))


def read_idx(path: Path, axes: int) -> np.ndarray:
    """Read an array of unsigned bytes with so many axes from an idx file."""
    data = read(path)
    expected = bytes([0, 0, 8, axes])
    if data[:4] != expected:
        raise DataError(
            f"{path}: not an idx file of bytes with {axes} axes: it begins with {data[:4].hex()}, not {expected.hex()}"
        )
    start = 4 + 4 * axes
    if len(data) < start:
        raise DataError(f"{path}: ends within its header: {AGAIN}")
    shape = struct.unpack_from(f">{axes}I", data, 4)
    if len(data) - start != math.prod(shape):
        raise DataError(f"{path}: {shape} takes {math.prod(shape)} bytes, the file has {len(data) - start}: {AGAIN}")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)

"""MNIST and Fashion-MNIST: idx files, gzipped or not.

An idx file: two zero bytes, the type (8: unsigned byte), the number of axes, each axis as a big-endian uint32, data.
"""

import math
import struct
from pathlib import Path

import numpy as np
import torch

from vbcaps.data.dataset import DataError, Dataset, Split
from vbcaps.data.files import AGAIN, need, read

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
    images, labels = (read_idx(path) for path in paths)
    if images.ndim != 3 or labels.ndim != 1 or len(images) != len(labels):
        raise DataError(f"{paths[0]} has shape {images.shape}, {paths[1].name} has {labels.shape}: they do not match")
    return Split(torch.from_numpy(images)[:, None], torch.from_numpy(labels.astype(np.int64)))


def read_idx(path: Path) -> np.ndarray:
    """Read the array of unsigned bytes in an idx file."""
    data = read(path)
    if data[:3] != b"\0\0\x08":
        raise DataError(f"{path}: not an idx file of bytes: it begins with {data[:4].hex()}, not 000008..")
    axes = data[3] if len(data) > 3 else 0
    start = 4 + 4 * axes
    if not axes or len(data) < start:
        raise DataError(f"{path}: ends within its header: {AGAIN}")
    shape = struct.unpack(f">{axes}I", data[4:start])
    if len(data) - start != math.prod(shape):
        raise DataError(f"{path}: {shape} takes {math.prod(shape)} bytes, the file has {len(data) - start}: {AGAIN}")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape).copy()

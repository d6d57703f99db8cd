"""smallNORB: 24,300 + 24,300 stereo pairs of 50 toys, from the original files or from a folder of arrays.

An original file is a "binary matrix": magic number (the type), number of axes, at least three sizes (the unused are 1),
all little-endian int32, then the data. Three files make a split: dat (n 2 96 96), cat (n), info (n 4).
"""

import math
import struct
from pathlib import Path

import numpy as np
import torch

from vbcaps.data.dataset import DataError, Dataset, Split
from vbcaps.data.files import AGAIN, need, read, read_npy
from vbcaps.data.resize import CHUNK, resize

CLASSES = ("animal", "human", "airplane", "truck", "car")
PREFIX = {
    "train": "smallnorb-5x46789x9x18x6x2x96x96-training",
    "test": "smallnorb-5x01235x9x18x6x2x96x96-testing",
}
MAGIC = {
    0x1E3D4C51: "<f4",
    0x1E3D4C53: "<f8",
    0x1E3D4C54: "<i4",
    0x1E3D4C55: "|u1",
    0x1E3D4C56: "<i2",
}
RE_ENCODED = (
    "re-encoded: arrays of 48x48 whose images went through JPEG at 96x96, labels and info as in the original files"
)


def smallnorb(folder: Path, size: int | None = None) -> Dataset:
    """Load smallNORB at ``size`` (48), resized with antialiasing while it is read: the originals take a gigabyte."""
    arrays = not any(folder.glob("*-dat.mat*")) and any(folder.glob("*_images_48.npy*"))
    read_split, source = (read_arrays, RE_ENCODED) if arrays else (read_original, "original files")
    train, test = (read_split(folder, part, size or 48) for part in PREFIX)
    return Dataset("smallnorb", train, test, CLASSES, source)


def read_original(folder: Path, part: str, size: int) -> Split:
    paths = {kind: need(folder, f"{PREFIX[part]}-{kind}.mat.gz") for kind in ("dat", "cat", "info")}
    dat, cat, info = (read_matrix(path) for path in paths.values())
    if dat.dtype != np.uint8 or dat.ndim != 4 or dat.shape[1] != 2:
        raise DataError(f"{paths['dat']}: must be bytes n 2 h w, got {dat.dtype} {dat.shape}")
    return _split(_resized(dat, size), cat, info, paths["dat"])


def read_arrays(folder: Path, part: str, size: int) -> Split:
    path = need(folder, f"{part}_images_48.npy.xz")
    images, labels, info = (read_npy(p) for p in (path, *(need(folder, f"{part}_{x}.npy") for x in ("labels", "info"))))
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1] != 2:
        raise DataError(f"{path}: must be uint8 n 2 h w, got {images.dtype} {images.shape}")
    return _split(_resized(images, size), labels, info, path)


def read_matrix(path: Path) -> np.ndarray:
    """Read the array in a binary-matrix file."""
    data = read(path)
    if len(data) < 20:
        raise DataError(f"{path}: ends within its header: {AGAIN}")
    magic, axes = struct.unpack("<Ii", data[:8])
    if magic not in MAGIC:
        raise DataError(f"{path}: not a binary matrix: magic number {magic:#010x}, not 0x1e3d4c51 to 0x1e3d4c56")
    start = 8 + 4 * max(axes, 3)
    if not 1 <= axes <= 8 or len(data) < start:
        raise DataError(f"{path}: damaged header, {axes} axes: {AGAIN}")
    shape = struct.unpack(f"<{axes}i", data[8 : 8 + 4 * axes])
    dtype = np.dtype(MAGIC[magic])
    if min(shape) < 0 or len(data) - start != math.prod(shape) * dtype.itemsize:
        raise DataError(f"{path}: {shape} of {dtype} does not take {len(data) - start} bytes: {AGAIN}")
    return np.frombuffer(data, dtype, offset=start).reshape(shape)


def _resized(images: np.ndarray, size: int) -> torch.Tensor:
    parts = (images[k : k + CHUNK].copy() for k in range(0, len(images), CHUNK))
    return torch.cat([resize(torch.from_numpy(part), size) for part in parts] or [torch.empty(0, 2, size, size).byte()])


def _split(images: torch.Tensor, labels: np.ndarray, info: np.ndarray, path: Path) -> Split:
    if labels.shape != (len(images),) or info.shape != (len(images), 4):
        raise DataError(f"{path}: {len(images)} pairs, but labels {labels.shape} and info {info.shape}")
    return Split(images, torch.from_numpy(labels.astype(np.int64)), torch.from_numpy(info.astype(np.int64)))

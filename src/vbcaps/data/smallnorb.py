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
from vbcaps.data.files import AGAIN, as_labels, need, read, read_npy
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
    return _split({kind: (path, read_matrix(path)) for kind, path in paths.items()}, size)


def read_arrays(folder: Path, part: str, size: int) -> Split:
    names = dict(dat=f"{part}_images_48.npy.xz", cat=f"{part}_labels.npy", info=f"{part}_info.npy")
    paths = {kind: need(folder, name) for kind, name in names.items()}
    return _split({kind: (path, read_npy(path)) for kind, path in paths.items()}, size)


def read_matrix(path: Path) -> np.ndarray:
    """Read the array in a binary-matrix file."""
    data = read(path)
    if len(data) < 20:
        raise DataError(f"{path}: ends within its header: {AGAIN}")
    magic, axes = struct.unpack_from("<Ii", data)
    if magic not in MAGIC:
        raise DataError(f"{path}: not a binary matrix: magic number {magic:#010x}, not 0x1e3d4c51 to 0x1e3d4c56")
    start = 8 + 4 * max(axes, 3)
    if not 1 <= axes <= 8 or len(data) < start:
        raise DataError(f"{path}: damaged header, {axes} axes: {AGAIN}")
    shape = struct.unpack_from(f"<{axes}i", data, 8)
    dtype = np.dtype(MAGIC[magic])
    if min(shape) < 0 or len(data) - start != math.prod(shape) * dtype.itemsize:
        raise DataError(f"{path}: {shape} of {dtype} does not take {len(data) - start} bytes: {AGAIN}")
    return np.frombuffer(data, dtype, offset=start).reshape(shape)


def _resized(images: np.ndarray, size: int) -> torch.Tensor:
    return torch.cat([resize(torch.from_numpy(images[k : k + CHUNK]), size) for k in range(0, len(images), CHUNK)])


def _split(files: dict[str, tuple[Path, np.ndarray]], size: int) -> Split:
    """Return a split of images (dat), labels (cat) and info, each with the path of its file."""
    (path, images), (of_labels, labels), (of_info, info) = (files[kind] for kind in ("dat", "cat", "info"))
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[1] != 2 or min(images.shape[2:]) < 1:
        raise DataError(f"{path}: must be uint8 n 2 h w, got {images.dtype} {images.shape}: {AGAIN}")
    if labels.shape != (len(images),) or info.shape != (len(images), 4):
        raise DataError(
            f"{path}: {len(images)} pairs, but labels {labels.shape} in {of_labels} and info {info.shape} in "
            f"{of_info}: one of them is another file or damaged, {AGAIN}"
        )
    classes = as_labels(labels, of_labels, 0, len(CLASSES) - 1)
    return Split(_resized(images, size), classes, as_labels(info, of_info, 0, 255))

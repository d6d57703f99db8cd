"""affNIST: train on MNIST, test on affine maps of its test digits in a 40x40 frame.

The original test set is a MATLAB struct. If it is missing, a similar one is generated from MNIST.
"""

import math
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from vbcaps.data.dataset import DataError, Dataset, Split
from vbcaps.data.files import as_labels, find, read_matlab
from vbcaps.data.mnist import DIGITS, mnist, read_split

FRAME, COPIES, SEED = 40, 32, 0
ROTATION, SHEAR, SCALE = math.radians(20), 0.2, 0.2  # each uniform from minus to plus; the scale is around 1
CHUNK = 250  # images at a time: their coordinates stay in the cache
REGENERATED = (
    "affNIST-style, regenerated: 32 random affine maps of each MNIST test digit, not the original affNIST; "
    "training images are MNIST's original files"
)


def affnist(folder: Path) -> Dataset:
    """Load affNIST; MNIST's files are expected in ``mnist`` beside ``folder``."""
    digits = folder.parent / "mnist"
    path = find(folder, "test.mat.zip")
    if path is not None:
        return Dataset("affnist", read_split(digits, "train"), read_mat(path), DIGITS, "original files")
    both = mnist(digits)
    test = Split(affine_digits(both.test.images), both.test.labels.repeat(COPIES))
    return Dataset("affnist", both.train, test, DIGITS, REGENERATED)


def read_mat(path: Path) -> Split:
    """Read ``affNISTdata``: ``image`` is 1600 n, an image in each column, ``label_int`` is 1 n."""
    found = read_matlab(path, ("affNISTdata.image", "affNISTdata.label_int"))
    images, labels = found["affNISTdata.image"], found["affNISTdata.label_int"].reshape(-1)
    if images.dtype != np.uint8 or images.shape != (FRAME * FRAME, len(labels)):
        raise DataError(f"{path}: image must be uint8 {FRAME * FRAME} {len(labels)}, got {images.dtype} {images.shape}")
    digits = as_labels(labels, path, 0, 9)
    return Split(torch.from_numpy(np.ascontiguousarray(images.T)).view(-1, 1, FRAME, FRAME), digits)


def affine_digits(images: Tensor, copies: int = COPIES, seed: int = SEED) -> Tensor:
    """Map uint8 ``n 1 h w`` at random to ``copies n`` images in a 40x40 frame: all images once, then all again.

    x' = R(rotation) [[1, shear], [0, 1]] diag(scale_x, scale_y) x, then a translation uniform over the places where all
    of the ink still is in the frame. Bilinear, in float64, so that rounding to bytes is the same everywhere.
    """
    if images.dtype != torch.uint8 or images.ndim != 4 or images.shape[1] != 1:
        raise ValueError(f"images must be uint8 n 1 h w, got {images.dtype} {tuple(images.shape)}")
    generator = torch.Generator().manual_seed(seed)
    out = torch.empty(copies, len(images), 1, FRAME, FRAME, dtype=torch.uint8)
    outline = _outline(images[:, 0] > 0)
    for copy in out:
        u = torch.rand(len(images), 6, generator=generator, dtype=torch.float64)
        for k in range(0, len(images), CHUNK):
            part = slice(k, k + CHUNK)
            copy[part] = _warp(images[part], outline[part], u[part])
    return out.flatten(0, 1)


def _warp(images: Tensor, outline: Tensor, u: Tensor) -> Tensor:
    """Map each image once, by six uniform numbers: rotation, shear, scale x and y, position x and y."""
    h, w = images.shape[2:]
    between = 2 * u - 1
    A = _matrix(ROTATION * between[:, 0], SHEAR * between[:, 1], 1 + SCALE * between[:, 2:4])  # n 2 2
    moved = outline @ A.mT
    low, high = moved.amin(1), moved.amax(1)  # n 2
    room = FRAME - 1 - (high - low)
    # Centre ink that is too wide for the frame.
    shift = torch.where(room >= 0, u[:, 4:] * room, room / 2) - low

    # Target pixel x' is read at A^-1 (x' - shift) in the source; torch counts both from -1 to 1, centre to edge.
    source, target = torch.tensor([(w - 1) / 2, (h - 1) / 2], dtype=torch.float64), (FRAME - 1) / 2
    back = torch.linalg.inv(A) / source[:, None]
    theta = torch.cat([back * target, back @ (target - shift)[..., None]], 2)  # n 2 3
    grid = F.affine_grid(theta, [len(images), 1, FRAME, FRAME], align_corners=True)
    warped = F.grid_sample(images.double(), grid, mode="bilinear", padding_mode="zeros", align_corners=True)
    return warped.round().byte()


def _outline(ink: Tensor) -> Tensor:
    """The ends of the ink in each row, ``n 2*h 2`` as (x, y) from the centre: wherever ink is sent, no ink lies outside
    of them. An image without ink gets its centre."""
    n, h, w = ink.shape
    x, y = (torch.arange(size, dtype=torch.float64) - (size - 1) / 2 for size in (w, h))
    left = x.expand(n, h, w).masked_fill(~ink, math.inf).amin(2)
    right = x.expand(n, h, w).masked_fill(~ink, -math.inf).amax(2)
    ends = torch.stack([torch.cat([left, right], 1), y.repeat(n, 2)], 2)
    # A row without ink repeats the first end there is.
    some = ends[:, :, 0].isfinite()
    first = ends[torch.arange(n), some.int().argmax(1)].masked_fill(~some.any(1, keepdim=True), 0)
    return torch.where(some[..., None], ends, first[:, None])


def _matrix(rotation: Tensor, shear: Tensor, scale: Tensor) -> Tensor:
    cos, sin = rotation.cos(), rotation.sin()
    turn = torch.stack([cos, -sin, sin, cos], 1).view(-1, 2, 2)
    one, zero = torch.ones_like(shear), torch.zeros_like(shear)
    slant = torch.stack([one, shear, zero, one], 1).view(-1, 2, 2)
    return turn @ slant * scale[:, None]

"""The result of every loader: images, labels, and their source."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vbcaps.data.errors import DataError

__all__ = ["DataError", "Dataset", "Split", "check_split", "data_folder"]

DTYPES = (torch.uint8, torch.uint16, torch.float32)
CHUNK = 2048  # images that are looked at a time, of a set that may be larger than memory


class Split(NamedTuple):
    """Images of one split: bytes; or 16 bits or floats, as own files may have them.

    Images of a folder that is larger than memory are ``stored.Images``, which behaves like a tensor.
    """

    images: Tensor  # n c h w   uint8, uint16 or float32
    labels: Tensor  # n         int64; n k for images of k objects, which ``overlapping`` makes
    info: Tensor | None = (
        None  # n 4   smallNORB: instance, elevation 0..8, azimuth 0, 2..34 (tens of degrees), lighting
    )
    groups: Tensor | None = None  # n   int64: images with the same number, as of one patient, stay on one side
    shared: Tensor | None = None  # n   of overlapping objects: the share of the foreground that several of them cover

    def take(self, index: Tensor) -> "Split":
        """Return the images that ``index`` selects, by numbers or as a mask."""
        others = (None if x is None else x[index] for x in self[2:])
        return Split(self.images[index], self.labels[index], *others)

    def to(self, device: torch.device | str) -> "Split":
        """Return the split on a device; on a GPU, where PyTorch does little with uint16, such images are floats."""
        images, labels, *others = self
        if images.dtype == torch.uint16 and torch.device(device).type != "cpu":
            images = images.float()
        return Split(images.to(device), labels.to(device), *(None if x is None else x.to(device) for x in others))


@dataclass(frozen=True)
class Dataset:
    """Two or three splits, the names of the classes, and ``source``: the original files, or how the data differ."""

    name: str
    train: Split
    test: Split  # with no images, as of `train.take(torch.arange(0))`, the network is not tested
    classes: tuple[str, ...]
    source: str
    validation: Split | None = None  # MedMNIST's, or where your own images have a folder for it

    def __post_init__(self) -> None:
        for which, split in (("training", self.train), ("test", self.test), ("validation", self.validation)):
            if split is not None:
                check_split(split, len(self.classes), f"{self.name}, {which} set", empty=which == "test")


def check_split(split: Split, classes: int, where: str, empty: bool = False) -> None:
    """Check a split's shapes, types and range of labels; ``where`` begins the message, ``empty`` allows no images."""
    images, labels, info, groups, _ = split
    if images.dtype not in DTYPES or images.ndim != 4:
        raise DataError(
            f"{where}: images must be uint8, uint16 or float32 n c h w, got {images.dtype} {tuple(images.shape)}"
        )
    if len(images) == 0 and not empty:
        raise DataError(f"{where}: there are no images")
    if labels.dtype != torch.int64 or labels.shape != images.shape[:1]:
        raise DataError(
            f"{where}: {len(images)} images need as many int64 labels, got {labels.dtype} {tuple(labels.shape)}"
        )
    if info is not None and info.shape != (len(images), 4):
        raise DataError(f"{where}: {len(images)} images need info of shape {(len(images), 4)}, got {tuple(info.shape)}")
    if groups is not None and (groups.dtype != torch.int64 or groups.shape != labels.shape):
        raise DataError(
            f"{where}: {len(images)} images need as many int64 groups, got {groups.dtype} {tuple(groups.shape)}"
        )
    if len(images) == 0:
        return
    if images.is_floating_point() and not all(bool(part.isfinite().all()) for part in images.split(CHUNK)):
        raise DataError(f"{where}: images have values that are NaN or infinite")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise DataError(f"{where}: labels must be 0 to {classes - 1}, got {low if low < 0 else high}")


def data_folder(folder: str | Path | None = None) -> Path:
    """Return the folder of the datasets, one folder each: the argument, or ``VBCAPS_DATA``, or the user's cache."""
    if folder is not None:
        return Path(folder).expanduser()
    if named := os.environ.get("VBCAPS_DATA"):
        return Path(named).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA") or "~/.cache"
    try:
        return Path(cache).expanduser() / "vbcaps"
    except RuntimeError:
        raise DataError(
            "there is no folder for datasets, because this user has no home: give --data-folder (data_folder), or set "
            "VBCAPS_DATA"
        ) from None

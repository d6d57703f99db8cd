"""Antialiased resizing, the same for every dataset."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from vbcaps.data.dataset import Dataset

CHUNK = 2048  # images at a time: the floats of a whole dataset would not fit in a laptop's memory


def resize(images: Tensor, size: int) -> Tensor:
    """Resize ``n c h w`` to ``n c size size``: bilinear, antialiased; bytes and 16 bits are rounded."""
    if size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    if images.shape[2:] == (size, size):
        return images
    most = {torch.uint8: 255, torch.uint16: 65535}.get(images.dtype)
    small = []
    for part in images.split(CHUNK):
        x = F.interpolate(part.float(), (size, size), mode="bilinear", antialias=True, align_corners=False)
        small.append(x if most is None else x.round_().clamp_(0, most).to(images.dtype))
    return torch.cat(small)


def resize_dataset(dataset: Dataset, size: int | None) -> Dataset:
    if size is None:
        return dataset
    found = {name: getattr(dataset, name) for name in ("train", "test", "validation")}
    return replace(dataset, **{k: s._replace(images=resize(s.images, size)) for k, s in found.items() if s is not None})

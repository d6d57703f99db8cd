"""Overlapping objects: images of different classes on one canvas, each at a random place, by the maximum of each pixel.

Random numbers are arguments, and no call waits for the device, so images may be put together in a CUDA graph.
Axes: n image, k object, c channel, j class, y x pixel.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from vbcaps.data.dataset import DataError, Split

FOREGROUND = 25  # a pixel above it, a tenth of white, belongs to an object
CHUNK = 2048  # images that are put together at a time


class Overlap:
    """A function ``overlap(index, u)`` that puts images with numbers ``index`` together with others of other classes.

    Each further object is drawn from all images whose classes are not in the image yet, each with the same probability.
    Every object lies anywhere on the canvas.

    Args:
        split: images of one object each, bytes before a black background.
        objects: the number of objects in an image, at least 2.
        side: height and width of the canvas.
    """

    def __init__(self, split: Split, objects: int, side: int):
        images, labels = split.images, split.labels
        if images.dtype != torch.uint8:
            raise DataError(f"objects that overlap must be bytes, uint8, got images of {images.dtype}")
        if objects < 2:
            raise ValueError(f"objects must be at least 2 to overlap, got {objects}")
        if side < max(images.shape[2:]):
            raise ValueError(f"crop must be at least the side of the objects, {max(images.shape[2:])}, got {side}")
        self.images, self.labels, self.objects, self.side = images, labels, objects, side
        self.counts = torch.bincount(labels.cpu()).to(labels.device)  # j
        if int((self.counts > 0).sum()) < objects:
            there = int((self.counts > 0).sum())
            raise DataError(f"{objects} objects of different classes need as many classes of images, got {there}")
        self.first = self.counts.cumsum(0) - self.counts  # j   in by_class
        self.by_class = labels.cpu().argsort(stable=True).to(labels.device)

    @property
    def draws(self) -> int:
        """Count the uniform numbers of an image: the choice of each further object, then top and left of each."""
        return 3 * self.objects - 1

    def __call__(self, index: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
        """Return images ``n c side side`` and the classes of their objects, ``n k``, from numbers ``n draws``."""
        chosen = self.choose(index, u[:, : self.objects - 1])
        return self.place(chosen, u[:, self.objects - 1 :]).amax(1), self.labels[chosen]

    def choose(self, index: Tensor, u: Tensor) -> Tensor:
        """Return the numbers of the images that are put together, ``n k``, from numbers ``n k-1``."""
        chosen, left = [index], self.counts.expand(len(index), -1)  # n j   how many images may still be chosen
        for draw in u.unbind(1):
            left = left.scatter(1, self.labels[chosen[-1]][:, None], 0)
            ends = left.cumsum(1)
            at = torch.minimum((draw.double() * ends[:, -1]).long(), ends[:, -1] - 1)  # among these, by class
            label = (ends <= at[:, None]).sum(1)
            of_class = at - (ends - left).gather(1, label[:, None])[:, 0]
            chosen.append(self.by_class[self.first[label] + of_class])
        return torch.stack(chosen, 1)

    def place(self, chosen: Tensor, u: Tensor) -> Tensor:
        """Return each object alone on the canvas, ``n k c side side``, from numbers ``n 2k``."""
        images = self.images.index_select(0, chosen.flatten())
        step = torch.arange(self.side, device=images.device)
        down, across = (self.side - size for size in images.shape[2:])  # pixels by which an object may move
        top, left = (
            (draw * (room + 1)).long().clamp(max=room)
            for draw, room in zip(u.reshape(-1, 2).unbind(1), (down, across), strict=True)
        )
        framed = F.pad(images, (across, across, down, down))
        rows, cols = ((room - at)[:, None, None] + step for room, at in ((down, top), (across, left)))  # n 1 y, n 1 x
        moved = framed.gather(2, rows[..., None].expand(-1, framed.shape[1], -1, framed.shape[3]))
        return moved.gather(3, cols[:, :, None].expand(*moved.shape[:3], -1)).unflatten(0, chosen.shape)


def overlapping(split: Split, objects: int, side: int, seed: int = 0) -> Split:
    """Return a fixed set of images with overlapping objects: every image is once put together with others.

    Args:
        split: images of one object each, bytes before a black background.
        objects: the number of objects in an image, at least 2.
        side: height and width of the new images.
        seed: decides the other objects and the places, the same on every device.

    Returns:
        Images ``n c side side``; the classes of their objects, ``n k``, that of the image itself first; and in
        ``shared`` the share of the foreground that more than one object covers.

    Example:
        >>> from vbcaps.data import load_dataset
        >>> pairs = overlapping(load_dataset("sample").test, objects=2, side=36)
        >>> pairs.images.shape, pairs.labels.shape
        (torch.Size([1000, 1, 36, 36]), torch.Size([1000, 2]))
    """
    overlap = Overlap(split, objects, side)
    u = torch.rand(len(split.labels), overlap.draws, generator=torch.Generator().manual_seed(seed))
    parts = zip(torch.arange(len(u)).split(CHUNK), u.split(CHUNK), strict=True)
    made = [_made(overlap, *(x.to(split.labels.device) for x in part)) for part in parts]
    images, labels, shared = (torch.cat(column) for column in zip(*made, strict=True))
    return Split(images, labels, shared=shared)


def _made(overlap: Overlap, index: Tensor, u: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    chosen = overlap.choose(index, u[:, : overlap.objects - 1])
    placed = overlap.place(chosen, u[:, overlap.objects - 1 :])
    covered = (placed > FOREGROUND).any(2).sum(1, dtype=torch.uint8)  # n y x   by how many objects
    shared = (covered > 1).sum((1, 2)) / (covered > 0).sum((1, 2)).clamp_min(1)
    return placed.amax(1), overlap.labels[chosen], shared

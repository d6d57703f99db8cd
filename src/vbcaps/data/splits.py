"""Splits of a dataset: a validation set, and smallNORB's familiar and novel viewpoints."""

import torch
from torch import Tensor

from vbcaps.data.dataset import DataError, Dataset, Split

# smallNORB stores azimuths in tens of degrees and elevations as 0 to 8 for 30 to 70 degrees. The training viewpoints of
# the paper's Table 2 (and of Hinton et al. 2018): azimuths 300, 320, 340, 0, 20, 40; the three lowest elevations.
FAMILIAR_VIEWS = {"elevation": (1, (0, 1, 2)), "azimuth": (2, (30, 32, 34, 0, 2, 4))}  # column of info, values
HELD = ("images", "objects")


def hold_out(split: Split, fraction: float, seed: int, what: str = "images") -> tuple[Split, Split]:
    """Return a training and a validation set: ``fraction`` of each class, at least one image, is held out.

    With ``what="objects"`` all images of some objects are held out. smallNORB's test set has other toys than its
    training set, so images of familiar toys do not measure the test error.

    The same images and seed give the same sets; each set keeps the order of the images.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"fraction must be between 0 and 1, got {fraction}")
    if what not in HELD:
        raise ValueError(f"what must be one of {HELD}, got {what!r}")
    if what == "objects" and split.info is None:
        raise DataError("objects can be held out of smallNORB only: other images do not say which object they show")
    held = torch.zeros(len(split.labels), dtype=torch.bool)
    generator = torch.Generator().manual_seed(seed)
    labels = split.labels.cpu()
    unit = torch.arange(len(labels)) if what == "images" or split.info is None else split.info[:, 0].cpu()
    for label in labels.unique().tolist():
        units = unit[labels == label].unique()
        if len(units) < 2:
            raise DataError(f"class {label} has one {what[:-1]} only: holding one out takes two")
        chosen = units[torch.randperm(len(units), generator=generator)[: held_out(len(units), fraction)]]
        held |= (labels == label) & torch.isin(unit, chosen)
    held = held.to(split.labels.device)
    return split.take(~held), split.take(held)


def held_out(count: int, fraction: float) -> int:
    """Return how many of ``count`` images of a class ``hold_out`` takes: at least one, and never all."""
    return min(max(round(fraction * count), 1), count - 1)


def viewpoints(dataset: Dataset, axis: str) -> tuple[Split, Split, Split]:
    """Return training images at familiar viewpoints, test images at familiar ones, and test images at novel ones.

    This is the paper's Table 2: ``axis`` is "azimuth" or "elevation".
    """
    if axis not in FAMILIAR_VIEWS:
        raise ValueError(f"axis must be one of {tuple(sorted(FAMILIAR_VIEWS))}, got {axis!r}")
    train, test = (_familiar(split, axis, dataset.name) for split in (dataset.train, dataset.test))
    splits = dataset.train.take(train), dataset.test.take(test), dataset.test.take(~test)
    if not all(len(split.labels) for split in splits):
        raise DataError(f"{dataset.name}: no images at some viewpoints: {[len(split.labels) for split in splits]}")
    return splits


def _familiar(split: Split, axis: str, name: str) -> Tensor:
    if split.info is None:
        raise DataError(f"{name} has no viewpoints: only smallNORB has them")
    column, values = FAMILIAR_VIEWS[axis]
    return torch.isin(split.info[:, column], torch.tensor(values, device=split.info.device))

"""Splits of a dataset: a validation set, and smallNORB's familiar and novel viewpoints."""

import warnings

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
    training set, so images of familiar toys do not measure the test error. Where ``split.groups`` says which images
    belong together, whole groups are held out, so the share of a class is near ``fraction`` only.

    The same images and seed give the same sets; each set keeps the order of the images.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"fraction must be between 0 and 1, got {fraction}")
    if what not in HELD:
        raise ValueError(f"what must be one of {HELD}, got {what!r}")
    if what == "objects" and split.info is None:
        raise DataError("objects can be held out of smallNORB only: other images do not say which object they show")
    if split.groups is not None and what == "images":
        parts = max(round(1 / min(fraction, 1 - fraction)), 2)
        first = part_of(split, parts, 1, seed)
        held = first if fraction <= 0.5 else ~first
        check_classes(split, held, "holding groups out")
        return split.take(~held), split.take(held)
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


def divide(split: Split, folds: int, fold: int, seed: int = 0) -> tuple[Split, Split]:
    """Return the images that one fold of a cross-validation trains on, and those that it is tested on.

    The test parts of all folds are disjoint, and together all images. Each has the same share of every class, as far as
    whole groups allow it; no group of ``split.groups`` is in both parts of a fold. The same images and seed give the
    same folds.

    Args:
        split: the images.
        folds: how many, at least 2.
        fold: which, from 1.
        seed: of the division.
    """
    if folds < 2 or not 1 <= fold <= folds:
        raise ValueError(f"fold must be 1 to folds, and folds at least 2, got fold={fold} of folds={folds}")
    held = part_of(split, folds, fold, seed)
    check_classes(split, held, f"fold {fold} of {folds}")
    return split.take(~held), split.take(held)


def part_of(split: Split, parts: int, part: int, seed: int) -> Tensor:
    """Return which images are in one of several parts, as a mask; parts keep groups together, and divide classes."""
    from sklearn.model_selection import StratifiedGroupKFold, StratifiedKFold

    labels = split.labels.cpu().numpy()
    groups = None if split.groups is None else split.groups.cpu().numpy()
    units, what = (len(labels), "images") if groups is None else (len(set(groups.tolist())), "groups")
    if parts > units:
        raise DataError(f"{parts} parts need as many {what}, and there are {units} {what}")
    kind = StratifiedKFold if groups is None else StratifiedGroupKFold
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a class with fewer images than parts, which the caller checks
            found = list(kind(parts, shuffle=True, random_state=seed).split(labels, labels, groups))
    except ValueError as error:
        raise DataError(f"{len(labels)} images cannot be divided into {parts} parts: {error}") from error
    held = torch.zeros(len(labels), dtype=torch.bool)
    held[torch.from_numpy(found[part - 1][1])] = True
    if not held.any():
        raise DataError(f"part {part} of {parts} has no images: there are too few groups, {units}")
    return held.to(split.labels.device)


def check_classes(split: Split, held: Tensor, what: str) -> None:
    """Raise an error if a class has no images left to train on."""
    missing = sorted(set(split.labels.tolist()) - set(split.labels[~held].tolist()))
    if missing:
        of = "images" if split.groups is None else "groups"
        raise DataError(f"{what} leaves no images of class {missing[0]} to train on: the class has too few {of}")


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

"""Parts of a dataset: a validation set, and smallNORB's familiar and novel viewpoints."""

import torch
from torch import Tensor

from vbcaps.data.dataset import DataError, Dataset, Split

# smallNORB stores azimuths in tens of degrees and elevations as 0 to 8 for 30 to 70 degrees. The training viewpoints of
# the paper's Table 2 (and of Hinton et al. 2018): azimuths 300, 320, 340, 0, 20, 40; the three lowest elevations.
FAMILIAR = {"elevation": (1, (0, 1, 2)), "azimuth": (2, (30, 32, 34, 0, 2, 4))}  # column of info, values
HELD = ("images", "objects")


def hold_out(split: Split, fraction: float, seed: int, what: str = "images") -> tuple[Split, Split]:
    """Training and validation set: ``fraction`` of each class, at least one image of it, is held out.

    Or ``what="objects"``: all images of some objects. smallNORB's test has other toys than its training; how a network
    does on those, images of toys that it knows do not tell.

    The same split and seed give the same parts; each part keeps the order of the images.
    """
    if not 0 < fraction < 1:
        raise ValueError(f"fraction must be between 0 and 1, got {fraction}")
    if what not in HELD:
        raise ValueError(f"what must be one of {HELD}, got {what!r}")
    if what == "objects" and split.info is None:
        raise DataError("these images do not say of which object they are: only those of smallNORB do")
    held = torch.zeros(len(split.labels), dtype=torch.bool)
    generator = torch.Generator().manual_seed(seed)
    labels = split.labels.cpu()
    unit = torch.arange(len(labels)) if what == "images" or split.info is None else split.info[:, 0].cpu()
    for label in labels.unique().tolist():
        units = unit[labels == label].unique()
        if len(units) < 2:
            raise DataError(f"class {label} has one of {what}: there must be two to hold one out")
        count = min(max(round(fraction * len(units)), 1), len(units) - 1)
        chosen = units[torch.randperm(len(units), generator=generator)[:count]]
        held |= (labels == label) & torch.isin(unit, chosen)
    held = held.to(split.labels.device)
    return split.take(~held), split.take(held)


def viewpoints(dataset: Dataset, axis: str) -> tuple[Split, Split, Split]:
    """(training images at familiar viewpoints, test images at familiar ones, test images at novel ones).

    The paper's Table 2: ``axis`` is "azimuth" or "elevation".
    """
    if axis not in FAMILIAR:
        raise ValueError(f"axis must be one of {tuple(sorted(FAMILIAR))}, got {axis!r}")
    train, test = (_familiar(split, axis, dataset.name) for split in (dataset.train, dataset.test))
    parts = dataset.train.take(train), dataset.test.take(test), dataset.test.take(~test)
    if not all(len(part.labels) for part in parts):
        raise DataError(f"{dataset.name}: no images at some viewpoints: {[len(part.labels) for part in parts]}")
    return parts


def _familiar(split: Split, axis: str, name: str) -> Tensor:
    if split.info is None:
        raise DataError(f"{name} has no viewpoints: only smallNORB does")
    column, values = FAMILIAR[axis]
    return torch.isin(split.info[:, column], torch.tensor(values, device=split.info.device))

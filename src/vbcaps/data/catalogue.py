"""Load datasets by name: ``load_dataset``."""

import difflib
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from vbcaps.data.affnist import affnist
from vbcaps.data.cifar10 import cifar10
from vbcaps.data.dataset import DataError, Dataset, data_folder
from vbcaps.data.facts import FACTS
from vbcaps.data.folder import image_folder
from vbcaps.data.groups import groups_of_info
from vbcaps.data.medmnist import medmnist
from vbcaps.data.medmnist_table import MULTI_LABEL, TABLE
from vbcaps.data.mnist import fashion_mnist, mnist
from vbcaps.data.official import COUNTS
from vbcaps.data.resize import resize_dataset
from vbcaps.data.sample import sample
from vbcaps.data.smallnorb import smallnorb
from vbcaps.data.stored import Progress
from vbcaps.data.svhn import svhn

OTHERS = "files in the original format that are not the published ones: {:,} images to train, {:,} to test"
LOADERS: dict[str, Callable[..., Dataset]] = {
    "smallnorb": smallnorb,
    "fashion-mnist": fashion_mnist,
    "mnist": mnist,
    "affnist": affnist,
    "svhn": svhn,
    "cifar10": cifar10,
    **dict.fromkeys(TABLE, medmnist),
}


def load_dataset(
    name: str | Path,
    folder: str | Path | None = None,
    size: int | None = None,
    whole: bool = False,
    axes: str = "auto",
    progress: Progress | None = None,
    groups: str | None = None,
) -> Dataset:
    """Load a dataset by its name, from its files in ``data_folder(folder) / name``; "sample" needs none.

    A path to a folder of class folders loads your own images. ``size`` is the height and width of the images; without
    it smallNORB comes at 48, MedMNIST at 28, your own at 32, others at their own size. ``whole`` holds none of your own
    images out. ``axes``, ``progress`` and ``groups`` are for your own images, see ``image_folder``; ``groups`` also has
    names for smallNORB (``vbcaps.data.groups``).
    """
    if size is not None and size < 1:
        raise ValueError(f"size must be at least 1, got {size}")
    if groups is not None and str(name) in FACTS:
        dataset = load_dataset(name, folder, size)
        parts = {part: getattr(dataset, part) for part in ("train", "test")}
        found = {part: split._replace(groups=groups_of_info(groups, split, str(name))) for part, split in parts.items()}
        return replace(dataset, **found)
    if str(name) == "sample":
        return resize_dataset(sample(), size)
    if str(name) == "smallnorb" or str(name) in TABLE:
        return of_published_size(LOADERS[str(name)](data_folder(folder) / name, size))
    if str(name) in MULTI_LABEL:
        raise DataError(MULTI_LABEL[str(name)])
    if str(name) in LOADERS:
        return of_published_size(resize_dataset(LOADERS[str(name)](data_folder(folder) / name), size))
    if os.path.isdir(name):  # unlike Path.is_dir, it takes any word
        return image_folder(Path(name), size, whole, axes, progress, groups)
    near = difflib.get_close_matches(str(name)[:100], FACTS, 1)
    hint = f" (nearest: {near[0]})" if near else ""
    raise DataError(f"{str(name)[:200]!r} is neither a dataset nor a folder{hint}: datasets are {', '.join(FACTS)}")


def of_published_size(dataset: Dataset) -> Dataset:
    """Return a dataset whose source says if it has more or fewer images than the published files."""
    counts = len(dataset.train.labels), len(dataset.test.labels)
    if dataset.source != "original files" or counts == COUNTS.get(dataset.name, counts):
        return dataset
    return replace(dataset, source=OTHERS.format(*counts))

"""Datasets by name, and the one way in: ``load``."""

import difflib
from collections.abc import Callable
from pathlib import Path

from vbcaps.data.dataset import DataError, Dataset, data_folder
from vbcaps.data.mnist import fashion_mnist, mnist
from vbcaps.data.resize import resize_dataset
from vbcaps.data.sample import sample

LOADERS: dict[str, Callable[[Path], Dataset]] = {
    "fashion-mnist": fashion_mnist,
    "mnist": mnist,
}
DATASETS = ("sample", *LOADERS)


def load(name: str | Path, folder: str | Path | None = None, size: int | None = None) -> Dataset:
    """A dataset by its name, from its files in ``data_folder(folder) / name``; "sample" needs none.

    A path to a folder of class folders loads your own images. ``size`` is the height and width of the images; without
    it they keep their own.
    """
    if str(name) == "sample":
        return resize_dataset(sample(), size)
    if str(name) in LOADERS:
        return resize_dataset(LOADERS[str(name)](data_folder(folder) / name), size)
    near = difflib.get_close_matches(str(name), DATASETS, 1)
    hint = f" (nearest: {near[0]})" if near else ""
    raise DataError(f"{str(name)!r} is neither a dataset nor a folder{hint}: datasets are {', '.join(DATASETS)}")

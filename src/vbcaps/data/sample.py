"""The sample of Fashion-MNIST inside the package: the first 800 training and 100 test images of each class.

Two PNG sheets, lossless, 100 images to a row. The classes take turns, so image i has label i mod 10 and the first few
hundred images are as balanced as all of them. Fashion-MNIST is Zalando's, under the MIT licence beside the sheets.
``python -m vbcaps.data.sample FOLDER`` makes the sheets again from the official files in FOLDER/fashion-mnist.
"""

import hashlib
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from vbcaps.data.dataset import DataError, Dataset, Split
from vbcaps.data.mnist import CLOTHES, fashion_mnist

SHEETS = Path(__file__).parent / "fashion_sample"
SIZE, COLUMNS = 28, 100
PER_CLASS = {"train": 800, "test": 100}
SHA256 = {  # of the pixels, image after image
    "train": "dc61419f9ef34e934a615912bc878eccd1ce708d987e36d0949480085ee58411",
    "test": "e9f89eb06e8c2328785b00abd588a8528d881d7f062acd7b17be736dfe20f1f5",
}


def sample(folder: Path = SHEETS) -> Dataset:
    train, test = (_read(folder / f"{part}.png", PER_CLASS[part] * len(CLOTHES), SHA256[part]) for part in PER_CLASS)
    return Dataset("sample", train, test, CLOTHES, "a class-balanced sample of Fashion-MNIST, with its own pixels")


def _read(path: Path, count: int, sha256: str) -> Split:
    try:
        with Image.open(path) as sheet:
            pixels = np.array(sheet)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error}): install vbcaps again") from error
    if pixels.shape != (count // COLUMNS * SIZE, COLUMNS * SIZE):
        raise DataError(f"{path}: a sheet of {count} images, got {pixels.shape}: install vbcaps again")
    images = pixels.reshape(-1, SIZE, COLUMNS, SIZE).swapaxes(1, 2).reshape(count, 1, SIZE, SIZE)
    if hashlib.sha256(images.tobytes()).hexdigest() != sha256:
        raise DataError(f"{path}: the images are not those that were recorded: install vbcaps again")
    return Split(torch.from_numpy(images), torch.arange(count) % len(CLOTHES))


def make(fashion: Dataset, folder: Path) -> dict[str, str]:
    """Write the sheets from the whole of Fashion-MNIST; return their sums."""
    folder.mkdir(parents=True, exist_ok=True)
    sums = {}
    for part, count in PER_CLASS.items():
        split: Split = getattr(fashion, part)
        members = [(split.labels == label).nonzero()[:count, 0] for label in range(len(CLOTHES))]
        images = split.images[torch.stack(members, 1).flatten(), 0].numpy()
        sums[part] = hashlib.sha256(images.tobytes()).hexdigest()
        sheet = images.reshape(-1, COLUMNS, SIZE, SIZE).swapaxes(1, 2).reshape(-1, COLUMNS * SIZE)
        Image.fromarray(sheet).save(folder / f"{part}.png", optimize=True)
    return sums


if __name__ == "__main__":
    print(make(fashion_mnist(Path(sys.argv[1]) / "fashion-mnist"), SHEETS))

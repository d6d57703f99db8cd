"""Facts about each dataset that need neither its files nor PyTorch."""

from typing import NamedTuple

from vbcaps.data.medmnist_table import SIDES, TABLE


class Facts(NamedTuple):
    """The training images of a dataset as its loader gives them, and a few words for `vbcaps data list`."""

    title: str  # as people write it
    channels: int
    classes: int
    side: int  # height and width in pixels, unless ``load`` is asked for another size
    about: str


FACTS = {
    "sample": Facts("Fashion-MNIST (sample)", 1, 10, 28, "9,000 images of Fashion-MNIST, in the package"),
    "smallnorb": Facts("smallNORB", 2, 5, 48, "48,600 stereo pairs of 50 toys, resized from 96x96"),
    "fashion-mnist": Facts("Fashion-MNIST", 1, 10, 28, "70,000 articles of clothing"),
    "mnist": Facts("MNIST", 1, 10, 28, "70,000 handwritten digits"),
    "affnist": Facts("affNIST", 1, 10, 28, "MNIST to train, digits under affine maps to test"),
    "svhn": Facts("SVHN", 3, 10, 32, "99,289 house numbers, the core training set"),
    "cifar10": Facts("CIFAR-10", 3, 10, 32, "60,000 small photographs"),
} | {
    name: Facts(
        one.title, one.channels, len(one.classes), SIDES[0], f"{one.about}, {len(one.classes)} classes, MedMNIST"
    )
    for name, one in TABLE.items()
}

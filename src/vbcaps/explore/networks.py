"""The networks that the explorer shows, and images for each of them.

A page names networks by the names of those that are at hand, and fetches none; a run, a file or a network that must be
fetched first is named on the command line only.
"""

import functools
import itertools
import re
from collections.abc import Container
from pathlib import Path
from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor

import vbcaps
from vbcaps.data import FACTS, DataError, load_dataset, overlapping
from vbcaps.explore.pictures import Refused
from vbcaps.models import CapsNet, ConvNet
from vbcaps.vae import CapsVAE, capsules_of
from vbcaps.weights.find import at_hand
from vbcaps.weights.inputs import PICTURES, frame_of, read_pixels, side_of
from vbcaps.weights.model import ROUTING_NAMES, Model

FIRST = "fashion_laptop"  # it has twins with EM and Dynamic routing, a CNN and a Capsule-VAE, and its images are here
PER_CLASS = 20  # images to choose from
COLUMNS = 20  # of the sheet that has them
SIMILAR = 0.1  # networks whose numbers of parameters differ by so much are equal in size


class Images(NamedTuple):
    """Images to choose from, as the network's bytes, with a title and a note on where they come from."""

    pixels: Tensor  # n c side side   uint8
    labels: Tensor  # n k   the classes of the k objects in each image
    classes: tuple[str, ...]
    title: str
    note: str


class Networks:
    """All networks that a page may choose, loaded once.

    Args:
        given: the network to begin with, whatever ``vbcaps.load`` takes; without it one of the package.
        data_folder: where datasets lie.
    """

    def __init__(self, given: str | Path | None = None, data_folder: str | Path | None = None):
        self.data_folder = data_folder
        self.models = {name: vbcaps.load(name) for name in at_hand()}
        self.first = FIRST if given is None else str(given)
        if self.first not in self.models:
            model = vbcaps.load(self.first)
            check_shown(model)
            self.first = name_of(model, self.models)
            self.models[self.first] = model
        self.images, self.twins = functools.cache(self._images), functools.cache(self._twins)

    def model(self, name: object) -> Model:
        """Return a network by its name; any other name, a path above all, is refused."""
        if not isinstance(name, str) or name not in self.models:
            raise Refused(f"there is no network {name!r} here: choose one from the list", 404)
        return self.models[name]

    def sorted(self) -> list[str]:
        """Return the names: the first network, then those of its dataset, then the others by dataset."""
        of_first = self.models[self.first].recipe.dataset

        def order(name: str) -> tuple[bool, bool, str, str]:
            dataset = self.models[name].recipe.dataset
            return name != self.first, dataset != of_first, dataset, name

        return sorted(self.models, key=order)

    def _twins(self, name: str) -> list[str]:
        """Return the networks of the same data, input and size that route otherwise, or have no capsules."""
        mine = self.models[name]
        found: dict[str, str] = {}
        for other, model in sorted(self.models.items(), key=lambda one: one[1].recipe.evidence):  # plain ones first
            same = (FACTS[dataset_of(model)].title, model.classes, input_of(model), model.recipe.objects) == (
                FACTS[dataset_of(mine)].title, mine.classes, input_of(mine), mine.recipe.objects
            )  # fmt: skip
            near = abs(size_of(model) - size_of(mine)) <= SIMILAR * size_of(mine)
            if same and near and kind_of(model) != kind_of(mine) and "vae" not in (kind_of(model), kind_of(mine)):
                found.setdefault(kind_of(model), other)
        return [found[kind] for kind in ("vb", "em", "dynamic", "cnn") if kind in found]

    def vae(self, name: str) -> str | None:
        """Return the Capsule-VAE that decodes what this network classifies; itself, if it is one."""
        mine = self.models[name]
        if isinstance(mine.net, CapsVAE):
            return name
        for other, model in self.models.items() if mine.recipe.objects == 1 else ():
            same = (model.classes, input_of(model)[:2]) == (mine.classes, input_of(mine)[:2])  # whatever their crops
            if isinstance(model.net, CapsVAE) and same:
                return other
        return None

    def _images(self, name: str) -> Images:
        """Return the images to choose from: test images of the network's data, or else those in the package."""
        model = self.models[name]
        side, channels, dataset = side_of(model.recipe), model.net.in_channels, dataset_of(model)
        objects = model.recipe.objects
        resized = None if frame_of(model.view) else side if objects == 1 else model.recipe.image_size
        note = ""
        try:
            if dataset == "fashion-mnist" and model.recipe.data is None:
                dataset = "sample"
            found = load_dataset(model.recipe.data or dataset, self.data_folder, size=resized)
        except DataError:
            fetch = "" if model.recipe.data else f" (`vbcaps data fetch {dataset}` fetches them)"
            note = (
                f"The images of {title_of(model)} are not here{fetch}, so these are clothes, which this network has "
                "never seen."
            )
            found = load_dataset("sample", size=resized)
        split, kind = found.test, "test images"
        if objects > 1:
            split, kind = overlapping(split, objects, side), f"images of {objects} test images each"
        labels = split.labels.view(len(split.labels), -1)
        some = [(labels[:, 0] == j).nonzero()[:PER_CLASS, 0] for j in range(len(found.classes))]
        chosen = [index for one in some for index in one.tolist()]
        pixels = split.images[chosen]
        if pixels.shape[1] != channels:
            planes = channels if channels in PICTURES else 1
            pixels = read_pixels(pixels if pixels.shape[1] in PICTURES else pixels[:, :1], pixels.shape[2], planes)
        pixels = framed(pixels.expand(-1, channels, -1, -1), shown_side(model)).contiguous()
        return Images(pixels, labels[chosen], found.classes, f"{len(chosen)} {kind}", note)


def check_shown(model: Model) -> None:
    """Raise an error for a network whose images the page cannot show."""
    if model.net.in_channels > 3 or model.view.low:
        kind = "more than 8 bits" if model.view.low else f"{model.net.in_channels} channels"
        raise ValueError(
            f"the explorer shows networks for images of 8 bits with 1, 2 or 3 channels, and {model.name} looks at "
            f"images of {kind}: `vbcaps routing` draws it"
        )


def name_of(model: Model, taken: Container[str]) -> str:
    """Return a name for a network that is not in the package: of its file or its run, without their path."""
    assert model.file is not None
    path = model.file.resolve()
    run = path.parent
    if path.stem not in ("last", "best"):
        name = path.stem
    else:
        name = f"{run.parent.name}-{run.name}" if re.fullmatch(r"seed\d+", run.name) else run.name
    names = (name if k == 1 else f"{name}-{k}" for k in itertools.count(1))
    return next(one for one in names if one not in taken)


def dataset_of(model: Model) -> str:
    """Return the dataset of a network; the sample in the package is Fashion-MNIST."""
    return "fashion-mnist" if model.recipe.dataset == "sample" else model.recipe.dataset


def title_of(model: Model) -> str:
    return Path(model.recipe.data).name if model.recipe.data else FACTS[dataset_of(model)].title


def input_of(model: Model) -> tuple[int, int, int]:
    """Return the channels of a network's images, their side, and the side of the crop that it sees."""
    return model.net.in_channels, shown_side(model), model.view.crop


def shown_side(model: Model) -> int:
    """Return the side of the images that the explorer shows a network: that of its frame, if it has one."""
    return frame_of(model.view) or side_of(model.recipe)


def framed(pixels: Tensor, side: int) -> Tensor:
    """Return images in the middle of a black frame of this side, as the network's view would place them."""
    gap = side - pixels.shape[-1]
    return F.pad(pixels, (gap // 2, gap - gap // 2, gap // 2, gap - gap // 2))


def size_of(model: Model) -> int:
    return sum(p.numel() for p in model.net.parameters())


def kind_of(model: Model) -> str:
    """Return the routing of a capsule network, ``"cnn"`` or ``"vae"``."""
    if isinstance(model.net, CapsVAE):
        return "vae"
    return "cnn" if isinstance(model.net, ConvNet) else model.recipe.routing


def described(model: Model) -> str:
    """Return what a network is in a few words, as "Fashion-MNIST, VB routing, {32,8,8,8}"."""
    kind = kind_of(model)
    what = {"cnn": "CNN", "vae": "Capsule-VAE"}.get(kind) or f"{ROUTING_NAMES[kind]} routing"
    extra = ", votes as evidence" if model.recipe.evidence else ""
    extra += f", {model.recipe.objects} overlapping objects" if model.recipe.objects > 1 else ""
    stem = ", residual" if model.recipe.stem == "residual" else ""
    return f"{title_of(model)}, {what}{extra}, {{{','.join(map(str, model.recipe.arch))}}}{stem}"


def capsules(model: Model) -> CapsNet:
    """Return a model's capsule network; a CNN is refused."""
    net = capsules_of(model.net)
    if net is None:
        raise Refused(f"{model.name} is a CNN: it has no capsules whose routing could be shown")
    return net

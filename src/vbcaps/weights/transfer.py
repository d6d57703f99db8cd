"""Transfer trained capsules to another task: other classes, other channels, and a recipe that fine-tunes them."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vbcaps.data import View
from vbcaps.training.files import RunError
from vbcaps.training.recipe import CAPS_ONLY, VAE_ONLY, Recipe
from vbcaps.vae import Network
from vbcaps.weights import find
from vbcaps.weights.file import Contents, read_weights
from vbcaps.weights.inputs import side_of
from vbcaps.weights.tensors import copy_tensors

if TYPE_CHECKING:
    from vbcaps.weights.model import Model

# Of CapsNet, of ConvNet, and of CapsVAE.
CLASS_LAYERS = ("class_caps.", "head.", "net.class_caps.", "decoder.deconv1.", "code_")
PAINTERS = ("decoder.deconv5.",)  # layers of a CapsVAE that write the channels of an image
SCALES = ("class_caps.scale", "net.class_caps.scale", "class_caps.bias")  # of the logits, if the loss needs them
# The fields of a recipe that decide what is learned.
SHAPE = ("network", "arch", "stem", "routing", "norm_pose", "norm_logit", "precision", "learn", "decoder")


def class_names(old: tuple[str, ...], num_classes: int | None, classes: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of the classes: the old ones unless other names or another number are asked for."""
    if classes is not None:
        names = tuple(classes)
        if isinstance(classes, str) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"classes must be a list of names, got {classes!r}")
        if num_classes not in (None, len(names)):
            raise ValueError(f"classes has {len(names)} names, but num_classes is {num_classes}")
        if len(set(names)) != len(names) or len(names) < 2:
            raise ValueError(f"classes must be at least two different names, got {list(names)}")
        return names
    if num_classes is None or num_classes == len(old):
        return old
    if isinstance(num_classes, bool) or not isinstance(num_classes, int) or num_classes < 2:
        raise ValueError(f"num_classes must be a whole number of at least 2, got {num_classes!r}")
    return tuple(map(str, range(num_classes)))


def transfer(source: Contents, net: Network, name: str, *, fresh: bool) -> None:
    """Copy trained weights into another network, in place.

    BatchNorm's running statistics are copied with a count of 0 batches, so the first new batch replaces them.

    Args:
        source: the trained weights. The first convolution is spread over the channels of ``net`` if these differ.
        net: the network that receives the weights; the error names tensors that do not fit.
        name: the name of the source in errors.
        fresh: keep the class layer of ``net`` and the scale of its logits. Other channels keep the last layer of a
            decoder.
    """
    left = (CLASS_LAYERS if fresh else ()) + (PAINTERS if source.in_channels != net.in_channels else ())
    into = {k: x for k, x in net.state_dict().items() if not k.startswith(left)}
    given = {k: x for k, x in source.tensors.items() if not k.startswith(left)}
    for scale in SCALES:
        if (scale in into) != (scale in given):  # a loss on logits learns a scale, one of several objects also a bias
            into.pop(scale, None)
            given.pop(scale, None)
    given = {k: _spread(x, into[k], source, net) if k in into else x for k, x in given.items()}
    copy_tensors(into, given, name)
    for key, x in into.items():
        if key.endswith("num_batches_tracked"):
            x.zero_()


def _spread(x: Tensor, like: Tensor, source: Contents, net: Network) -> Tensor:
    """Return the weights of the first convolution for other channels: their sum over channels, in equal shares.

    The response to an image with equal channels does not change. Other tensors are returned unchanged.
    """
    channels = (source.in_channels, net.in_channels)
    if x.ndim != 4 or x.shape == like.shape or (x.shape[1], like.shape[1]) != channels:
        return x
    return (x.sum(1, keepdim=True) / net.in_channels).expand(-1, net.in_channels, -1, -1)


def view_of(view: View, channels: int) -> View:
    """Return the view for another number of channels: each is standardised by the old channels' average statistics."""
    pairs = {name: getattr(view, name) for name in ("mean", "std", "low", "high")}
    new: dict[str, Any] = {name: (sum(x) / len(x),) * channels for name, x in pairs.items() if x and len(x) != channels}
    return replace(view, **new)


def check_same_network(source: Recipe, recipe: Recipe, name: str) -> None:
    """Raise an error that names the fields in which the network of trained weights differs from the recipe's."""
    wrong = [field for field in SHAPE if getattr(source, field) != getattr(recipe, field)]
    if wrong:
        lines = "; ".join(f"{k} is {getattr(source, k)!r}, the recipe's {getattr(recipe, k)!r}" for k in wrong)
        raise RunError(
            f"the weights {name} are of another network ({lines}): fine-tune them by their own recipe "
            "(vbcaps train --from without RECIPE), or give the recipe these fields"
        )


@dataclass(frozen=True)
class Start:
    """Initial weights of a training; ``start(net, classes)`` copies them into a network."""

    source: Contents
    about: dict[str, Any]  # weights: their name; sum: a checksum of them

    @classmethod
    def of(cls, weights: "Model | str | Path", recipe: Recipe) -> "Start":
        """Read weights, and check that their network is the recipe's.

        Args:
            weights: a model, or anything that ``vbcaps.load`` takes.
            recipe: the recipe of the training.
        """
        if isinstance(weights, str | Path):
            file = find.weights_file(weights)
            source, name = read_weights(file), str(weights) if find.belongs(file) else str(file.resolve())
        else:
            source, name = contents_of(weights), weights.name
        check_same_network(source.recipe, recipe, name)
        total = 0
        for key in sorted(source.tensors):
            total = zlib.crc32(source.tensors[key].detach().cpu().contiguous().numpy().data, total)
        return cls(source, dict(weights=name, sum=f"{total:08x}"))

    def __call__(self, net: Network, classes: tuple[str, ...]) -> None:
        begin_with(self.source, net, classes, self.about["weights"])


def contents_of(model: "Model") -> Contents:
    """Return the content of a weights file of ``model``."""
    channels = model.net.in_channels
    return Contents(model.net.state_dict(), model.recipe, model.classes, model.view, channels, model.about, {})


@torch.no_grad()
def begin_with(source: Contents, net: Network, classes: tuple[str, ...], name: str) -> None:
    """Copy trained weights into a network that is to be trained; the class layer is copied if the classes are equal."""
    transfer(source, net, name, fresh=classes != source.classes)


def fine_tuning(source: Recipe, **fields: Any) -> Recipe:
    """Return a recipe that fine-tunes trained weights: their network and input, and a short schedule.

    The recipe keeps the network, its loss and the preprocessing of images (side, crop, frame, standardising). All
    augmentation but the crop is off, because an augmentation that suits clothes need not suit letters. The schedule is
    20 epochs of AdamW in batches of 32; the rate rises to 0.002 in the first twentieth and then falls to a hundredth of
    that. 0.002 was chosen among 0.0005, 0.001, 0.002 and 0.004 on a hundred pictures of digits, from "fashion_small".

    Args:
        source: the recipe of the trained weights.
        fields: fields of the recipe to override.
    """
    same = {"dataset", "crop", "pad", "standardise", "fill", "place", "loss", "loss_on", "network", "arch", "stem"}
    same |= {*CAPS_ONLY, *VAE_ONLY} - {"backend", "kl_warmup"}
    kept: dict[str, Any] = {field: getattr(source, field) for field in sorted(same)}
    if fields.get("data") or source.dataset != "affnist":  # whose own images are not to be resized
        kept |= dict(image_size=side_of(source))
    epochs = fields.get("epochs", 20)
    schedule: dict[str, Any] = dict(
        batch=32, epochs=epochs, warmup=epochs / 20, optimiser="adamw", lr=0.002, weight_decay=0.01,
        schedule="onecycle", final=0.01,
    )  # fmt: skip
    return Recipe(**{"name": f"{source.name}_tuned", **kept, **schedule, **fields})

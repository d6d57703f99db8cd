"""What a trained Capsule-VAE does beside classifying: reconstruct, tweak and sample images.

`Model` has these functions as methods. Axes: n image, k value, d pose entry.
"""

import math
from collections.abc import Callable, Sequence
from numbers import Integral
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vbcaps.inference import evaluating, exact_convolutions
from vbcaps.training.recipe import nearest
from vbcaps.vae import CapsVAE

if TYPE_CHECKING:
    from vbcaps.weights.model import Model


def vae_of(model: "Model") -> CapsVAE:
    """Return the network of a model; the error for any other network says where to get a Capsule-VAE."""
    if not isinstance(model.net, CapsVAE):
        raise ValueError(
            f"{model.name} is a {type(model.net).__name__} without a decoder: load a Capsule-VAE, such as "
            "vbcaps.load('vae_mnist'), or train one with `vbcaps train vae_mnist_laptop`"
        )
    return model.net


def class_number(model: "Model", label: int | str) -> int:
    """Return the number of a class that is given by its name or its number."""
    if isinstance(label, str) and label in model.classes:
        return model.classes.index(label)
    if isinstance(label, Integral) and not isinstance(label, bool) and 0 <= label < model.num_classes:
        return int(label)
    hint = nearest(label, model.classes) if isinstance(label, str) else ""
    raise ValueError(
        f"label must be one of {', '.join(model.classes)}, or a number from 0 to {model.num_classes - 1}; "
        f"got {label!r}{hint}"
    )


def checked_entry(vae: CapsVAE, entry: int) -> int:
    """Return the number of a pose entry; the error for any other number says which there are."""
    if isinstance(entry, bool) or not isinstance(entry, Integral) or not 0 <= entry < vae.code_size:
        raise ValueError(f"entry must be a pose entry from 0 to {vae.code_size - 1}, got {entry!r}")
    return int(entry)


@torch.no_grad()
def codes(model: "Model", images: Any, label: int | str | None, batch_size: int) -> Tensor:
    return over_batches(model, images, label, batch_size, lambda out: out.mean)


@torch.no_grad()
def reconstruct(model: "Model", images: Any, label: int | str | None, batch_size: int) -> Tensor:
    return over_batches(model, images, label, batch_size, lambda out: out.images.clamp(0, 1))


def over_batches(
    model: "Model", images: Any, label: int | str | None, batch_size: int, part: Callable[[Any], Tensor]
) -> Tensor:
    """Return a part of the network's output for all images, as floats on the CPU."""
    vae = vae_of(model)
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    number = None if label is None else class_number(model, label)
    found, weight = [], next(vae.parameters())
    with evaluating(model), exact_convolutions():
        for pixels in model.read(images).split(batch_size):
            x = model.view.test(pixels.to(weight.device)).to(weight.dtype)
            chosen = None if number is None else torch.full((len(x),), number, device=weight.device)
            found.append(part(vae(x, chosen)).float().cpu())
    return torch.cat(found)


@torch.no_grad()
def tweak(model: "Model", image: Any, entry: int, values: Sequence[float] | Tensor, label: int | str | None) -> Tensor:
    vae = vae_of(model)
    pixels, weight = model.read(image), next(vae.parameters())
    if len(pixels) != 1:
        raise ValueError(f"tweak moves the pose of one image, got {len(pixels)}: give them one by one")
    entry = checked_entry(vae, entry)
    if len(values) == 0:
        raise ValueError("values must be numbers that are added to the pose entry, got none")
    if wrong := [value for value in map(float, values) if not math.isfinite(value)]:
        raise ValueError(f"values must be finite numbers that are added to the pose entry, got {wrong[0]}")
    number = None if label is None else torch.tensor([class_number(model, label)], device=weight.device)
    with evaluating(model), exact_convolutions():
        x = model.view.test(pixels.to(weight.device)).to(weight.dtype)
        return vae.tweak(x, entry, values, number)[:, 0].clamp(0, 1).float().cpu()


@torch.no_grad()
def sample(model: "Model", label: int | str, count: int, source: str, seed: int | None) -> Tensor:
    vae, number = vae_of(model), class_number(model, label)
    if count < 1:
        raise ValueError(f"count must be at least 1, got {count}")
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    chosen = torch.full((count,), number, device=model.device)
    with evaluating(model), exact_convolutions():
        return vae.sample(chosen, source, generator).clamp(0, 1).float().cpu()

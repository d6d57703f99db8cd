"""What networks of the package make of its test images, for the pictures of `capsules.py`.

Axes: n image, j class, i child, d pose entry, t iteration; y x row and column.
"""

from typing import NamedTuple

import numpy as np
import torch

import vbcaps
from vbcaps.data.sample import sample
from vbcaps.figures.routing import seen_by, trace_of
from vbcaps.models import CapsNet
from vbcaps.trace import Cloud, cloud_of
from vbcaps.weights.model import Model

SANDAL = 15  # the test image that is looked into
LEVELS = (0, 15, 30, 45, 60)  # standard deviations of noise, in grey values of 0 to 255
COUNT = 300  # test images that get noise


class Map(NamedTuple):
    """An image, the activations ``y x`` of one type of primary capsule, and the pose of its most active one."""

    image: np.ndarray
    activations: np.ndarray
    pose: np.ndarray
    at: tuple[int, int]


class Votes(NamedTuple):
    """A class, its probability, and the votes for it."""

    name: str
    probability: float
    cloud: Cloud


class Noisy(NamedTuple):
    """An image at each level of noise, the entropy of the winner's pose for many images, and the share of errors."""

    images: list[np.ndarray]
    entropies: np.ndarray  # level n
    errors: list[float]


def capsules() -> tuple[Model, CapsNet]:
    """Return the network of the pictures."""
    model = vbcaps.load("fashion_laptop")
    assert isinstance(model.net, CapsNet)
    return model, model.net


def sandal_map() -> Map:
    """Return the map of the primary capsules whose activations differ most over the sandal."""
    model, net = capsules()
    shoe = sample().test.images[SANDAL : SANDAL + 1]
    children = trace_of(model, net, shoe).layers["conv_caps1"].children
    a = children.activations[0]  # y x j
    kind = int(a.flatten(0, 1).std(0).argmax())
    at = divmod(int(a[..., kind].argmax()), a.shape[1])
    return Map(seen_by(model, shoe)[0], a[..., kind].numpy(), children.poses[0, at[0], at[1], kind].numpy(), at)


def sandal_votes() -> tuple[np.ndarray, list[Votes]]:
    """Return the sandal and the votes for its most probable class and for the class that takes the least."""
    model, net = capsules()
    shoe = sample().test.images[SANDAL : SANDAL + 1]
    trace, p = trace_of(model, net, shoe), model.predict(shoe)[0]
    layer = trace.layers["class_caps"]
    taken = layer.activations[0] @ layer.iterations[-1].r[0]  # j
    shown = int(p.argmax()), int(taken.argmin())
    found = [Votes(model.classes[j], float(p[j]), cloud_of(trace, "class_caps", 0, j)) for j in shown]
    return seen_by(model, shoe)[0], found


@torch.no_grad()
def noisy_clothes() -> Noisy:
    """Return what noise does to the posterior of the answer and to the answers."""
    model, net = capsules()
    test = sample().test
    clean, labels = test.images[:COUNT], test.labels[:COUNT]
    noise = torch.randn(clean.shape, generator=torch.Generator().manual_seed(0))
    images, entropies, errors = [], [], []
    for level in LEVELS:
        noisy = (clean + level * noise).clamp(0, 255).round().to(torch.uint8)
        out = net(model.view.test(noisy))
        best = out.logits.argmax(1)
        entropies.append(out.posterior.entropy()[1].gather(1, best[:, None])[:, 0].numpy())
        errors.append(float((best != labels).float().mean()))
        images.append(noisy[9, 0].numpy() / 255)
    return Noisy(images, np.stack(entropies), errors)

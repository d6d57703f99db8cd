"""Trained networks that come with the package: ``weights/NAME.safetensors``, each a weights file as a run writes it."""

from pathlib import Path

import torch

from vbcaps.training.checkpoint import RunError, Weights, load_weights
from vbcaps.training.recipe import nearest

FOLDER = Path(__file__).parent


def load(name: str, device: str | torch.device = "cpu") -> Weights:
    """A trained network by name, in eval mode, with its recipe, classes, view and, in ``metadata``, its test error.

    ``net, recipe, classes, view, about = vbcaps.load("smallnorb")``
    """
    return load_weights(shipped_file(name), device)


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.safetensors"))


def shipped_file(name: str) -> Path:
    """Its file; an unknown name is an error that says the nearest and what there is."""
    if name not in names():
        there = f"there are {', '.join(names())}" if names() else "there are none in this version"
        raise RunError(f"no weights called {name!r} come with the package{nearest(name, names())}; {there}")
    return FOLDER / f"{name}.safetensors"

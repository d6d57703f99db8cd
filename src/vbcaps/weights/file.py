"""Weights files: the tensors of a network, with recipe, classes and view in the header, so that the file is enough."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

import vbcaps
from vbcaps.data import View
from vbcaps.models import current_names
from vbcaps.training.files import RunError
from vbcaps.training.recipe import Recipe
from vbcaps.uncertainty.density import Density, pack_densities, unpack_densities
from vbcaps.vae import Network
from vbcaps.weights.tensors import pack_tensors, unpack_tensors

FORMAT = "vbcaps weights 1"
DENSITY = "density."  # begins the names of the tensors of densities; all others are the network's


class Contents(NamedTuple):
    """The content of a weights file."""

    tensors: dict[str, Tensor]  # the network's state_dict
    recipe: Recipe
    classes: tuple[str, ...]
    view: View
    in_channels: int
    about: dict[str, Any]  # epoch, validation and test error, temperature, checksum of the data, version, commit
    densities: dict[str, Density]  # of features, by name; mostly none


def pack_weights(
    net: Network,
    recipe: Recipe,
    classes: tuple[str, ...],
    view: View,
    about: dict[str, Any],
    densities: Mapping[str, Density] | None = None,
) -> bytes:
    """Return the bytes of a weights file.

    Args:
        net: the network whose ``state_dict`` is written.
        recipe: how the network is built and was trained.
        classes: the names of its classes, in the order of its output.
        view: how images become its input.
        about: any other facts that JSON can hold.
        densities: of the network's features, by name.
    """
    header = dict(
        format=FORMAT,
        recipe=recipe.to_json(),
        classes=list(classes),
        view=dataclasses.asdict(view),
        in_channels=net.in_channels,
        metadata=about,
    )
    of_densities = {f"{DENSITY}{name}": x for name, x in pack_densities(densities or {}).items()}
    return pack_tensors(net.state_dict() | of_densities, header)


def unpack_weights(content: bytes, file: str) -> Contents:
    """Return the content of a weights file; ``file`` is its name in errors."""
    tensors, header = unpack_tensors(content, file)
    if header.get("format") != FORMAT:
        saved = str(header.get("format")).startswith("vbcaps state")
        kind = "a saved state: use last.safetensors beside it" if saved else "another program's"
        raise RunError(f"{file} has no vbcaps weights, it is {kind}")
    try:
        recipe, view = Recipe.from_json(header["recipe"]), View.from_json(header["view"])
        classes = tuple(header["classes"])
        of_densities = {name.removeprefix(DENSITY): x for name, x in tensors.items() if name.startswith(DENSITY)}
        of_net = current_names({name: x for name, x in tensors.items() if not name.startswith(DENSITY)})
        densities, channels, about = unpack_densities(of_densities), header["in_channels"], header["metadata"]
        return Contents(of_net, recipe, classes, view, channels, about, densities)
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{file} has a header that this version ({vbcaps.__version__}) cannot read: {error}") from error


def read_weights(path: Path) -> Contents:
    """Return the content of the weights file at ``path``; the error for any other file says what the file is."""
    try:
        content = path.read_bytes()
    except OSError as error:
        state, last = (path.parent / name for name in ("state.safetensors", "last.safetensors"))
        begun = state.exists() and not last.exists()
        hint = f"; its run has not finished an epoch: vbcaps train --resume {path.parent}" if begun else ""
        raise RunError(f"cannot read the weights {path}: {error.strerror}{hint}") from error
    return unpack_weights(content, str(path))

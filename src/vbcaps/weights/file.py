"""Weights files: the tensors of a network, with recipe, classes and view in the header, so that the file is enough."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import vbcaps
from vbcaps.data import View
from vbcaps.disk import opened
from vbcaps.models import current_names
from vbcaps.training.files import RunError
from vbcaps.training.recipe import Recipe
from vbcaps.uncertainty.density import Density, pack_densities, unpack_densities
from vbcaps.vae import Network
from vbcaps.weights.header import check_about, check_classes, view_of_header
from vbcaps.weights.tensors import (
    DTYPES,
    FLOATS,
    Header,
    check_shapes,
    header_size,
    pack_tensors,
    read_header,
    unpack_tensors,
)

FORMAT = "vbcaps weights 1"
DENSITY = "density."  # begins the names of the tensors of densities; all others are the network's
TINY = torch.finfo(torch.float32).tiny


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
    check_classes(classes)
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
    return _contents(known(read_header(content, file), file), content, file)


def read_weights(path: Path) -> Contents:
    """Return the content of the weights file at ``path``; the error for any other file says what the file is.

    The header is compared with the network that it describes before the tensors are read.
    """
    try:
        with opened(path) as file:
            begin = file.read(8)
            begin += file.read(header_size(begin, str(path)) - 8)
            header = known(read_header(begin, str(path)), str(path))
            content = begin + file.read(_bytes_of(header) + 1)
    except OSError as error:
        state, last = (path.parent / name for name in ("state.safetensors", "last.safetensors"))
        begun = state.exists() and not last.exists()
        hint = f"; its run has not finished an epoch: vbcaps train --resume {path.parent}" if begun else ""
        raise RunError(f"cannot read the weights {path}: {error.strerror}{hint}") from error
    return _contents(header, content, str(path))


class Known(NamedTuple):
    """The header of a weights file whose tensors are those of the network that it describes."""

    tensors: dict[str, tuple[str, tuple[int, ...]]]
    recipe: Recipe
    classes: tuple[str, ...]
    view: View
    in_channels: int
    about: dict[str, Any]


def known(header: Header, file: str) -> Known:
    """Return the parts of a header, after each was held to its type, its range and the network."""
    fields = header.fields
    if fields.get("format") != FORMAT:
        saved = str(fields.get("format")).startswith("vbcaps state")
        kind = "a saved state: use last.safetensors beside it" if saved else "another program's"
        raise RunError(f"{file} has no vbcaps weights, it is {kind}")
    try:
        recipe, about, channels = Recipe.from_json(fields["recipe"]), fields["metadata"], fields["in_channels"]
        check_classes(fields["classes"])
        check_about(about)
        net = outline(recipe, channels, len(fields["classes"]))
        view = view_of_header(fields["view"], recipe, channels)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise RunError(f"{file} has a header that this version ({vbcaps.__version__}) cannot read: {error}") from error
    of_net = current_names({name: x for name, x in header.tensors.items() if not name.startswith(DENSITY)})
    check_shapes(net.state_dict(), of_net, file)
    _check_density_shapes(header, net, len(fields["classes"]), file)
    return Known(header.tensors, recipe, tuple(fields["classes"]), view, channels, about)


def outline(recipe: Recipe, in_channels: int, num_classes: int) -> Network:
    """Return the network of a recipe on the meta device: names and shapes of its tensors without any memory."""
    with torch.device("meta"), NoDraws():
        return recipe.net(in_channels, num_classes)


class NoDraws(TorchFunctionMode):
    """Leaves out the draws of initial weights, which are overwritten, and for which PyTorch would import its compiler
    on the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") in ("normal_", "uniform_"):
            return args[0] if args else kwargs["tensor"]
        return func(*args, **(kwargs or {}))


def _check_density_shapes(header: Header, net: Network, classes: int, file: str) -> None:
    """Raise an error unless every density has all its tensors, in the shapes that the network's features have."""
    from vbcaps.uncertainty.scores import feature_sizes

    named = {name.removeprefix(DENSITY): x for name, x in header.tensors.items() if name.startswith(DENSITY)}
    there = feature_sizes(net) if named else {}
    for density in sorted({name.rpartition(".")[0] for name in named}):
        if unknown := [one for one in density.split("+") if one not in there]:
            raise RunError(f"{file} has the density {density}, but its network has no features {', '.join(unknown)}")
        f = sum(there[one] for one in density.split("+"))
        halves: set[tuple[int, ...]] = {(c, f * (f + 1) // 2) for c in (1, classes)} | {(c, f, f) for c in (1, classes)}
        shapes: dict[str, set[tuple[int, ...]]] = dict(
            log_share={(classes,)}, mean={(classes, f)}, whiten=halves, centre={(f,)}, spread={(f,)}
        )
        for field, allowed in shapes.items():
            dtype, shape = named.pop(f"{density}.{field}", ("", ()))
            if dtype not in FLOATS or shape not in allowed:
                must = " or ".join(map(str, sorted(allowed)))
                got = f"got {shape} of {dtype}" if dtype else "but it is missing"
                raise RunError(f"{file}: {DENSITY}{density}.{field} must have floats of {must}, {got}")
    if named:
        raise RunError(f"{file} has tensors of densities that are not known: {', '.join(sorted(named)[:3])}")


def _bytes_of(header: Known) -> int:
    """Return how many bytes the tensors of a checked header take."""
    sizes = {name: torch.empty((), dtype=dtype).element_size() for name, dtype in DTYPES.items()}
    return sum(math.prod(shape) * sizes[dtype] for dtype, shape in header.tensors.values())


def _contents(header: Known, content: bytes, file: str) -> Contents:
    """Return the content of a file whose header is known, after a look at every number."""
    tensors, _ = unpack_tensors(content, file)
    check_values(tensors, file)
    of_densities = {name.removeprefix(DENSITY): x for name, x in tensors.items() if name.startswith(DENSITY)}
    of_net = current_names({name: x for name, x in tensors.items() if not name.startswith(DENSITY)})
    densities = unpack_densities(of_densities)
    for name, density in densities.items():
        positive = density.spread.min() > 0 and density.whiten.diagonal(dim1=1, dim2=2).min() > 0
        if not positive or abs(float(density.log_share.double().exp().sum()) - 1) > 0.02:  # rounded to bfloat16
            raise RunError(
                f"{file} has a density {name} that makes no sense: its spread and the diagonal of its whitening must "
                "be above 0, and the shares of its classes must add up to 1; fit it again"
            )
    return Contents(of_net, *header[1:], densities)


def check_values(tensors: Mapping[str, Tensor], file: str) -> None:
    """Raise an error that names a tensor whose numbers no training gives."""
    for name, x in tensors.items():
        low, ending = -math.inf, name.rpartition(".")[2]
        if ending in ("running_var", "num_batches_tracked"):
            low = 0
        elif ending in ("alpha0_fixed", "kappa0_fixed", "Psi0_fixed", "nu0_fixed") and x.ndim < 2:
            low = TINY
        if x.is_floating_point() and not bool(x.isfinite().all()):
            what = "NaN or infinity"
        elif low > -math.inf and x.numel() and float(x.min()) < low:
            what = f"{float(x.min()):g}, but must be {'above' if low else 'at least'} 0"
        else:
            continue
        raise RunError(f"{file} has weights that make no sense: {name} has {what}; fetch the file or train again")

"""Convert a user's images to the bytes that a network expects.

Axes: n image, c channel, h height, w width. Every image becomes uint8 ``c side side``: the shorter side is resized and
the longer cropped, as for training on your own images; grey becomes colour and colour grey as the network needs.
"""

from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vbcaps.data import FACTS, View, fit_image, image_files, read_image, read_images
from vbcaps.data.npy import map_npy
from vbcaps.data.opening import TIFFS
from vbcaps.data.pixels import read_header, read_planes
from vbcaps.training.recipe import Recipe

PICTURES = (1, 3)  # numbers of channels that can be converted into each other
RANGES = "float images must lie in [0, 1] or in [0, 255]"


def side_of(recipe: Recipe) -> int:
    """Return the side of the images that the recipe's view crops or frames; of overlapping objects, the canvas's."""
    if recipe.objects > 1:
        return recipe.crop
    return recipe.image_size or (recipe.crop if recipe.data else FACTS[recipe.dataset].side)


def frame_of(view: View) -> int | None:
    """Return the side of the frame in which a view places smaller images; None for a view that crops."""
    return view.crop if view.place else None


def read_pixels(images: Any, side: int, channels: int, frame: int | None = None) -> Tensor:
    """Return any images as uint8 ``n channels side side``.

    Args:
        images: a NumPy array or tensor ``h w``, ``h w c``, ``c h w``, ``n h w``, ``n h w c`` or ``n c h w``, uint8 or
            float; a PIL image; the path of a picture, of a ``.npy`` file, or of a folder of pictures; or a list of any
            of these. All float values of a call have one range: [0, 1] where none is above 1, else [0, 255]. No
            images, as an empty list or an array with n = 0, give an empty result.
        side: height and width of the result.
        channels: the channels of the result. 1 and 3 are converted into each other; the images must have any other
            number themselves.
        frame: images of exactly this height and width, as affNIST's, keep them; images of other sizes in the same call
            then get the black frame that the view would give them.
    """
    items = list(images) if isinstance(images, list | tuple) else [images]
    if not items:
        return torch.zeros(0, channels, side, side, dtype=torch.uint8)
    items = [one for item in items for one in _members(item)]
    parts = _scaled([_decoded(item, side, channels, frame) for item in items])
    return together([_fitted(part, side, channels, frame) for part in parts])


def _members(item: Any) -> list[Any]:
    """Return the files of a folder that has more than pictures in it; anything else is one item."""
    if not isinstance(item, str | PathLike) or not Path(item).is_dir():
        return [item]
    files = image_files(Path(item))
    return list(files) if any(file.suffix.lower() in {".npy", *TIFFS} for file in files) else [item]


def together(parts: Sequence[Tensor]) -> Tensor:
    """Return square images ``n c y x`` of one or more calls as one tensor; the smaller ones get a black frame."""
    side = max(part.shape[2] for part in parts)
    room = [side - part.shape[2] for part in parts]
    edges = [(free - free // 2, free // 2) * 2 for free in room]  # left right top bottom, as View.test has them
    return torch.cat([F.pad(part, edge) for part, edge in zip(parts, edges, strict=True)])


def _decoded(item: Any, side: int, channels: int, frame: int | None) -> Tensor:
    """Return one item of a list: pictures as uint8 ``n channels side side``, arrays unchanged as ``n c h w``."""
    if isinstance(item, str | PathLike):
        path = Path(item)
        if path.suffix.lower() == ".npy" and not path.is_dir():
            return _array(_load(path), channels, str(path))
        if path.suffix.lower() in TIFFS and not path.is_dir() and not read_header(path).picture:
            return _array(read_planes(path)[None], channels, str(path))
        _check_picture(channels, f"{path}: a picture file")
        if frame is None:
            return read_images(image_files(path), side, channels)
        return together([read_image(file, side, channels, frame)[None] for file in image_files(path)])
    if isinstance(item, Image.Image):
        _check_picture(channels, "a PIL image")
        return fit_image(item, side, channels, "a PIL image", frame)[None]
    if isinstance(item, Tensor):
        return _array(item.detach().cpu(), channels, "images")
    if hasattr(item, "__array__"):
        return _array(np.asarray(item), channels, "images")
    raise TypeError(
        "images must be a NumPy array, a tensor, a PIL image, a path, or a list of these, got "
        f"{'a list in a list' if isinstance(item, list | tuple) else type(item).__name__}"
    )


def _check_picture(channels: int, what: str) -> None:
    if channels not in PICTURES:
        raise ValueError(
            f"{what} has 1 or 3 channels, and this network looks at {channels} at once: give an array "
            f"n {channels} h w, or a .npy file of one"
        )


def _load(path: Path) -> np.ndarray:
    try:
        return map_npy(path)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path}: cannot be read as a NumPy array ({error})") from error


def _array(x: np.ndarray | Tensor, channels: int, what: str) -> Tensor:
    """Return an array of one or more images as ``n c h w``, of its own dtype."""
    kind = str(x.dtype).removeprefix("torch.")
    if not (kind == "uint8" or kind.startswith(("float", "bfloat"))):
        raise TypeError(f"{what} must be uint8 or float, got {kind}; convert integers in 0 to 255 to uint8")
    if isinstance(x, np.ndarray):
        x = torch.from_numpy(x.copy() if kind == "uint8" else x.astype(np.float32))
    shape = tuple(x.shape)
    several = x.ndim == 4 or (x.ndim == 3 and shape[2] not in PICTURES)  # else the first axis is not n
    if 0 in shape[several:]:
        raise ValueError(f"{what} must not be empty, got shape {shape}")
    return x.permute(_axes(shape, channels, what)) if x.ndim == 4 else _with_axes(x, channels, what)


def _axes(shape: tuple[int, ...], channels: int, what: str) -> tuple[int, ...]:
    """Return the permutation that brings four axes into the order ``n c h w``."""
    allowed = PICTURES if channels in PICTURES else (channels,)
    first, last = shape[1] in allowed, shape[3] in allowed
    if first and last and shape[1] != shape[3]:
        raise ValueError(
            f"{what} of shape {shape} may be n c h w or n h w c: an image so narrow must be enlarged first"
        )
    if first:
        return 0, 1, 2, 3
    if last:
        return 0, 3, 1, 2
    raise ValueError(
        f"{what} must have {_words(allowed)} channels, n c h w or n h w c, got shape {shape}{_rgba(shape)}"
    )


def _with_axes(x: Tensor, channels: int, what: str) -> Tensor:
    """Return ``h w``, ``h w c``, ``c h w`` or ``n h w`` as ``n c h w``."""
    shape = tuple(x.shape)
    allowed = PICTURES if channels in PICTURES else (channels,)
    if x.ndim == 2 and 1 in allowed:
        return x[None, None]
    if x.ndim == 3 and shape[2] in allowed and shape[0] not in allowed:
        return x.permute(2, 0, 1)[None]
    if x.ndim == 3 and shape[0] in allowed and shape[2] not in allowed:
        if channels == 1 and shape[0] == 3:
            raise ValueError(
                f"{what} of shape {shape} may be one image in colour or three in grey: give images[None] for the "
                "one, images[:, None] for the three"
            )
        return x[None]
    if x.ndim == 3 and 1 in allowed and not (shape[0] in allowed or shape[2] in allowed or shape[2] == 4):
        return x[:, None]
    layouts = "h w, h w c, c h w, n h w, n h w c or n c h w" if 1 in allowed else "h w c, c h w, n h w c or n c h w"
    raise ValueError(f"{what} must be {layouts} with {_words(allowed)} channels, got shape {shape}{_rgba(shape)}")


def _words(allowed: Sequence[int]) -> str:
    return " or ".join(map(str, allowed))


def _rgba(shape: tuple[int, ...]) -> str:
    return "; give RGBA as PIL images, or as RGB" if shape[-1] == 4 else ""


def _scaled(parts: list[Tensor]) -> list[Tensor]:
    """Return arrays as bytes; float arrays have one common range, and an ambiguous or impossible range is an error."""
    floats = [part for part in parts if part.is_floating_point() and len(part)]
    if not floats:
        return [part.byte() for part in parts]
    if not all(bool(part.isfinite().all()) for part in floats):
        raise ValueError(f"{RANGES}, got NaN or infinity")
    low, high = min(float(part.min()) for part in floats), max(float(part.max()) for part in floats)
    got = f"{RANGES}, got values from {low:.4g} to {high:.4g}"
    if low < 0:
        raise ValueError(f"{got}: `predict` standardises images itself; `model(x)` takes standardised ones")
    if high > 255:
        raise ValueError(got)
    if 1 < high < 2:
        raise ValueError(f"{got}, which may be either: clip them to [0, 1], or give uint8")
    factor = 255 if high <= 1 else 1
    return [(part.float() * factor).round().byte() if part.is_floating_point() else part for part in parts]


def _fitted(part: Tensor, side: int, channels: int, frame: int | None) -> Tensor:
    """Return uint8 ``n c h w`` as ``n channels side side``."""
    side = side if frame is None or part.shape[2:] != (frame, frame) else frame
    if part.shape[1:] == (channels, side, side):
        return part.contiguous()
    fitted = [_one(image, side, channels) for image in part]
    return torch.stack(fitted) if fitted else part.new_zeros(0, channels, side, side)


def _one(image: Tensor, side: int, channels: int) -> Tensor:  # c h w
    if len(image) == 3 and channels == 1:
        return fit_image(Image.fromarray(image.permute(1, 2, 0).contiguous().numpy()), side, 1, "images")
    planes = [fit_image(Image.fromarray(plane.contiguous().numpy()), side, 1, "images") for plane in image]
    return torch.cat(planes).expand(channels, side, side)

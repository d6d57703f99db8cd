"""Convert a user's images for a network that was trained on images of 16 bits or floats: their values stay as they are.

Axes: n image, c channel, h height, w width.
"""

from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vbcaps.data import image_files
from vbcaps.data.npy import map_npy
from vbcaps.data.pixels import Form, channel_axis, dtype_of, fitted, read_planes


def read_values(images: Any, side: int, channels: int, axes: str = "auto") -> Tensor:
    """Return any images as float32 ``n channels side side``, in the values of the training images.

    Args:
        images: a NumPy array or tensor ``h w`` or ``n h w`` (one channel), ``h w c``, ``c h w``, ``n h w c`` or
            ``n c h w``; a PIL image of 16 bits or floats; the path of a ``.npy``, TIFF or PNG file, or of a folder of
            them; or a list of any of these. Bytes are refused, because they would have another range.
        side: height and width of the result.
        channels: the channels that the images must have.
        axes: where the channels of arrays are, if their number does not tell.
    """
    items = list(images) if isinstance(images, list | tuple) else [images]
    planes = [one for item in items for one in _each(item, channels, axes)]
    fitted = [_fitted(one, side, channels, name) for one, name in planes]
    return torch.stack(fitted) if fitted else torch.zeros(0, channels, side, side)


def _each(item: Any, channels: int, axes: str) -> list[tuple[np.ndarray, str]]:
    """Return each image of one item as ``c h w``, with its name in errors."""
    if isinstance(item, str | PathLike):
        return [one for file in image_files(Path(item)) for one in _of_file(file, channels, axes)]
    if isinstance(item, Image.Image):
        if not (item.mode in ("F", "I") or item.mode.startswith("I;16")):
            raise ValueError(f"a PIL image must be of 16 bits or floats for this network, got mode {item.mode}")
        return [(np.asarray(item)[None], "a PIL image")]
    if isinstance(item, Tensor):
        item = item.detach().cpu().float().numpy() if item.is_floating_point() else item.cpu().numpy()
    if not hasattr(item, "__array__"):
        raise TypeError(
            "images must be a NumPy array, a tensor, a PIL image, a path, or a list of these, got "
            f"{type(item).__name__}"
        )
    return [(one, "images") for one in _images(np.asarray(item), channels, axes, "images")]


def _of_file(file: Path, channels: int, axes: str) -> list[tuple[np.ndarray, str]]:
    if file.suffix.lower() != ".npy":
        return [(read_planes(file, axes), str(file))]
    try:
        array = map_npy(file)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{file}: cannot be read as a NumPy array ({error})") from error
    return [(one, str(file)) for one in _images(array, channels, axes, str(file))]


def _images(x: np.ndarray, channels: int, axes: str, name: str) -> list[np.ndarray]:
    """Return the images of an array, ``c h w`` each."""
    if 0 in x.shape[x.ndim > 2 :]:
        raise ValueError(f"{name} must not be empty, got shape {x.shape}")
    if x.ndim == 2 and channels == 1:
        return [x[None]]
    if x.ndim == 3 and channels == 1 and 1 not in (x.shape[0], x.shape[2]):
        return [one[None] for one in x]
    if x.ndim == 3:
        x = x[None]
    if x.ndim == 4:
        first, last = x.shape[1] == channels, x.shape[3] == channels
        if first and last:
            first = channel_axis(x.shape[1:], axes, name) == 0
        if first or last:
            return list(x if first else np.moveaxis(x, 3, 1))
    layouts = "h w, n h w, n c h w or n h w c" if channels == 1 else "c h w, h w c, n c h w or n h w c"
    raise ValueError(f"{name} must be {layouts} with {channels} channels, got shape {x.shape}")


def _fitted(planes: np.ndarray, side: int, channels: int, name: str) -> Tensor:
    dtype = dtype_of(planes.dtype, name)
    if dtype == "uint8":
        raise ValueError(
            f"{name}: this network was trained on images of more than 8 bits, got uint8: give the values themselves, "
            "as uint16 or float32"
        )
    return torch.from_numpy(fitted(planes, side, Form(channels, dtype), name).astype(np.float32))

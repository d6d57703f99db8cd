"""Pixels of the explorer: read from what a page sends, changed by its sliders, and written as PNG.

Axes: n image, c channel, y x pixel.
"""

import base64
import io
import math
import struct
import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from vbcaps.data import DataError, fit_image
from vbcaps.data.opening import check_scans, has_pages
from vbcaps.uncertainty.damage import damage
from vbcaps.weights.inputs import PICTURES

MOST_BYTES = 8 * 2**20  # of an upload
MOST_PIXELS = 4096 * 4096  # of a picture, before it is decoded
LEAST_SIDE = 4
FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF", "PPM")

BROKEN = (OSError, SyntaxError, ValueError, EOFError, OverflowError, MemoryError, struct.error)  # what Pillow raises


class Refused(ValueError):
    """A request that cannot be answered. The message says what was wrong with it and what to do."""

    def __init__(self, message: str, status: int = 400):
        super().__init__(message)
        self.status = status


class Change(NamedTuple):
    """A slider of the page.

    Args:
        title, unit: words for the page.
        least, most, step: the slider's range.
        rest: the value at which the image stays as it is.
    """

    title: str
    unit: str
    least: float
    most: float
    step: float
    rest: float


CHANGES = dict(
    rotate=Change("Rotate", "°", -180, 180, 1, 0),
    right=Change("Shift right", "%", -50, 50, 1, 0),
    down=Change("Shift down", "%", -50, 50, 1, 0),
    scale=Change("Scale", "×", 0.4, 2, 0.01, 1),
    blur=Change("Blur", "px", 0, 4, 0.1, 0),
    noise=Change("Noise", "σ", 0, 0.6, 0.01, 0),
    occlude=Change("Hide", "share", 0, 0.6, 0.01, 0),
)


def read_changes(given: Any) -> dict[str, float]:
    """Return the value of every slider; those that are not given are at rest."""
    if not isinstance(given, Mapping):
        raise Refused(f"changes must be an object with a number for each slider, got {type(given).__name__}")
    if unknown := sorted(set(given) - set(CHANGES)):
        raise Refused(f"there is no change {unknown[0]!r}; there are {', '.join(CHANGES)}")
    values = {}
    for name, change in CHANGES.items():
        value = given.get(name, change.rest)
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not change.least <= value <= change.most:  # NaN fails every comparison
            raise Refused(f"{name} must be a number from {change.least:g} to {change.most:g}, got {value!r}")
        values[name] = float(value)
    return values


def changed(pixels: Tensor, values: Mapping[str, float]) -> Tensor:
    """Return images with the changes of the sliders, uint8 ``n c y x``.

    The image is moved, turned and scaled about its middle in one step; pixels that come into view continue its edge.
    Then follow blur, noise and the hidden square of `vbcaps.uncertainty.damage`.

    Args:
        pixels: uint8 ``n c y x``.
        values: of all ``CHANGES``, by name.
    """
    turned = any(values[name] != CHANGES[name].rest for name in ("rotate", "right", "down", "scale"))
    out = moved(pixels, values) if turned else pixels
    for kind in ("blur", "noise", "occlude"):
        out = damage(out, kind, values[kind]) if values[kind] else out
    return out


def moved(pixels: Tensor, values: Mapping[str, float]) -> Tensor:
    angle, size = math.radians(values["rotate"]), values["scale"]
    cos, sin = math.cos(angle) / size, math.sin(angle) / size
    right, down = (2 * values[name] / 100 for name in ("right", "down"))  # of a side that is 2 long
    # From a pixel of the result to the one of the image that is shown there.
    back = torch.tensor([[cos, -sin, sin * down - cos * right], [sin, cos, -sin * right - cos * down]])
    x = pixels.float() / 255
    grid = F.affine_grid(back.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    x = F.grid_sample(x, grid, "bilinear", "border", align_corners=False)
    return (x.clamp(0, 1) * 255).round().byte()


def read_upload(content: bytes, side: int, channels: int) -> Tensor:
    """Return an uploaded picture as uint8 ``1 channels side side``; what is no usable picture is refused.

    A network with two channels gets the grey picture in both.
    """
    if not content:
        raise Refused("the file is empty: choose a picture")
    if len(content) > MOST_BYTES:
        raise Refused(f"the file has {len(content) / 2**20:.0f} MB; the explorer takes up to 8: make it smaller", 413)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # Pillow warns of bombs and of damage that it passes over
        try:
            with Image.open(io.BytesIO(content), formats=FORMATS) as picture:
                check_picture(picture)
                check_scans(picture, content)
                picture.load()
                planes = channels if channels in PICTURES else 1
                return fit_image(picture, side, planes, "the picture").expand(channels, -1, -1)[None].contiguous()
        except Refused:
            raise
        except Image.UnidentifiedImageError as error:
            raise Refused("the file is no picture that can be read: choose a PNG, JPEG or WebP file") from error
        except DataError as error:
            raise Refused(str(error)) from error
        except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
            raise Refused(
                f"the picture is too large to be decoded: the explorer takes {MOST_PIXELS:,} pixels"
            ) from error
        except (*BROKEN, Warning) as error:
            raise Refused("the picture is damaged, cut short or of a rare kind: save it again as PNG") from error


def check_picture(picture: Image.Image) -> None:
    """Refuse a picture by what its header says, before its pixels are decoded."""
    width, height = picture.size
    if width * height > MOST_PIXELS:
        raise Refused(f"the picture has {width} x {height} pixels; the explorer takes {MOST_PIXELS:,}: make it smaller")
    if min(width, height) < LEAST_SIDE:
        raise Refused(f"the picture has {width} x {height} pixels: it needs at least {LEAST_SIDE} on each side")
    if has_pages(picture):
        raise Refused("the picture is animated or has several pages: save one of them by itself")


def as_png(image: Tensor) -> str:
    """Return uint8 ``c y x`` as a PNG in base64: grey, colour, or two channels one below the other."""
    array = (image.flatten(0, 1) if len(image) == 2 else image.permute(1, 2, 0).squeeze(2)).contiguous().numpy()
    return encoded(array)


def encoded(array: np.ndarray) -> str:
    """Return a uint8 array ``y x`` or ``y x 3`` as a PNG in base64."""
    file = io.BytesIO()
    Image.fromarray(array).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def from_png(text: Any, side: int, channels: int) -> Tensor:
    """Return what `as_png` wrote as uint8 ``1 channels side side``; anything else is refused."""
    height = side * (2 if channels == 2 else 1)
    mode = "RGB" if channels == 3 else "L"
    if not isinstance(text, str) or len(text) > 2 * side * height * 4 + 4096:
        raise Refused(f"pixels must be a PNG of {side} x {height} pixels in base64: upload the picture again")
    try:
        content = base64.b64decode(text, validate=True)
        with Image.open(io.BytesIO(content), formats=["PNG"]) as picture:
            if picture.size != (side, height) or picture.mode != mode:
                raise Refused(
                    f"pixels are a picture of {picture.size[0]} x {picture.size[1]} ({picture.mode}), and this network "
                    f"takes {side} x {height} ({mode}): upload the picture again"
                )
            array = np.array(picture)
    except Refused:
        raise
    except (*BROKEN, Image.DecompressionBombError) as error:
        raise Refused("pixels are no PNG in base64: the link is cut short; upload the picture again") from error
    image = torch.from_numpy(array)
    if channels == 2:
        return image.reshape(1, 2, side, side)
    return (image.permute(2, 0, 1) if channels == 3 else image[None])[None].contiguous()

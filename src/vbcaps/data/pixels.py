"""Decode one image file to an array, without PyTorch, so that worker processes start at once.

Pictures are what Pillow reads with 8 bits, and grey pictures of 16 bits. Arrays are ``.npy`` files, and TIFF files with
more channels, bits or pages than a picture has.

Axes: c channel, h height, w width.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, ImageOps

from vbcaps.data.errors import DataError
from vbcaps.data.opening import TIFFS, TURNS, Turns, decoding, load_array, opened, opened_tiff

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".npy", ".pbm", ".pgm", ".png", ".ppm", ".webp"} | TIFFS
GREY = {"1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L", "I;16N"}
AXES = ("auto", "chw", "hwc")
ORIENTATION = 0x0112  # the tag of EXIF
PICTURES = (1, 3)  # numbers of channels that can be converted into each other


class Form(NamedTuple):
    """What the images of a folder become: channels and ``"uint8"``, ``"uint16"`` or ``"float32"``."""

    channels: int
    dtype: str

    def __str__(self) -> str:
        return f"{self.channels} channel{'s' if self.channels > 1 else ''} of {self.dtype}"


class Header(NamedTuple):
    """What a file says of itself before its pixels are decoded."""

    height: int
    width: int
    form: Form
    picture: bool


def read_header(path: Path, axes: str = "auto") -> Header:
    """Return the size, channels and dtype of a file; ``axes`` says where the channels of an array are."""
    if path.suffix.lower() == ".npy":
        array = load_array(path)
        return _header_of(array.shape, array.dtype, axes, path)
    with opened(path) as image:
        if image is not None:
            width, height = image.size
            deep = image.mode in ("F", "I") and image.format == "TIFF"
            dtype = "float32" if deep else "uint16" if image.mode.startswith("I") else "uint8"
            return Header(height, width, Form(1 if image.mode in GREY or deep else 3, dtype), picture=not deep)
    with opened_tiff(path) as series:
        shape, kind = _without_ones(series)
        return _header_of(shape, series.dtype, kind or axes, path)


def form_of(paths: Iterable[Path], headers: Iterable[Header]) -> Form:
    """Return the form in which files can be one dataset; files that do not go together are an error that names two.

    Grey and colour of 8 bits become colour, and pictures of 16 bits among pictures of 8 bits have 8. Other files must
    have the same channels and dtype.
    """
    first: dict[Form, Path] = {}
    pictures = True
    for path, header in zip(paths, headers, strict=True):
        first.setdefault(header.form, path)
        pictures &= header.picture
    channels, dtypes = {form.channels for form in first}, {form.dtype for form in first}
    if len(first) == 1:
        return next(iter(first))
    if channels <= set(PICTURES) and (dtypes == {"uint8"} or (pictures and dtypes <= {"uint8", "uint16"})):
        return Form(max(channels), "uint8")
    (one, path), (other, another) = list(first.items())[:2]
    raise DataError(
        f"the images of a folder must be of one kind: {path} has {one}, {another} has {other}; only grey and colour "
        "pictures of 8 bits may be mixed"
    )


def decode(path: Path, side: int, form: Form, axes: str = "auto", turns: Turns = TURNS) -> np.ndarray:
    """Return a file as ``c side side``: the shorter side is resized, the longer cropped; large ones in turns."""
    if path.suffix.lower() != ".npy" and form.dtype == "uint8" and form.channels in PICTURES:
        with opened(path) as image:
            if image is not None:
                with decoding(image, turns):
                    return fit_picture(image, side, form.channels, str(path))
    return fitted(read_planes(path, axes, turns), side, form, str(path))


def read_planes(path: Path, axes: str = "auto", turns: Turns = TURNS) -> np.ndarray:
    """Return the values of a file with their own dtype, ``c h w``."""
    if path.suffix.lower() == ".npy":
        return planes_of(np.array(load_array(path)), axes, str(path))
    with opened(path) as image:
        if image is not None:
            with decoding(image, turns):
                return planes_of(_values(_upright(image)), "hwc", str(path))
    with opened_tiff(path) as series, turns.take(series.nbytes // 4):
        shape, kind = _without_ones(series)
        return planes_of(series.asarray().reshape(shape), kind or axes, str(path))


def _values(image: Image.Image) -> np.ndarray:
    grey = image.mode in ("F", "L") or image.mode.startswith("I")
    values = np.array(image if grey else image.convert("RGB"))
    if image.mode == "I" and image.format != "TIFF":  # 16 bits that Pillow keeps in 32, as those of a PGM file
        return np.clip(values, 0, 65535).astype(np.uint16)
    return values


def planes_of(values: np.ndarray, axes: str, name: str) -> np.ndarray:
    """Return one image ``h w``, ``h w c`` or ``c h w`` as ``c h w``."""
    if values.ndim == 2:
        return values[None]
    if values.ndim != 3:
        raise DataError(f"{name}: one image must be h w, h w c or c h w, got shape {values.shape}")
    return np.moveaxis(values, channel_axis(values.shape, axes, name), 0)


def channel_axis(shape: tuple[int, ...], axes: str, name: str) -> int:
    """Return which of three axes has the channels, the first (0) or the last (2).

    ``"chw"`` and ``"hwc"`` say it. With ``"auto"`` two equal axes side by side are height and width, and the third has
    the channels; where all differ, the first or last axis has them if it is shorter than the other two.
    """
    if axes != "auto":
        return 0 if axes == "chw" else 2
    a, b, c = shape
    if (a == b) != (b == c):
        return 2 if a == b else 0
    if a != b and min(a, c) < b and a != c:
        return 0 if a < c else 2
    raise DataError(
        f"{name}: the channels of an image of shape {shape} may be its first or its last axis: say so with --axes chw "
        "or --axes hwc"
    )


def fitted(planes: np.ndarray, side: int, form: Form, name: str) -> np.ndarray:
    """Return ``c h w`` as ``c side side`` in a form; values must be finite, and have the form's channels."""
    if dtype_of(planes.dtype, name) != form.dtype:
        raise DataError(f"{name}: has {planes.dtype}, expected {form.dtype}")
    with np.errstate(over="ignore"):
        planes = planes.astype(form.dtype, copy=False)
    if form.dtype == "float32" and not np.isfinite(planes).all():
        raise DataError(f"{name}: has values that are NaN or infinite: repair the file, or leave it out")
    if len(planes) != form.channels:
        if form.dtype != "uint8" or {form.channels, len(planes)} != set(PICTURES):
            raise DataError(f"{name}: has {len(planes)} channels, expected {form.channels}")
        if len(planes) == 3:
            return fit_picture(Image.fromarray(np.ascontiguousarray(planes.transpose(1, 2, 0))), side, 1, name)
    if planes.shape[1:] != (side, side):
        planes = np.stack([_fitted_plane(plane, side) for plane in planes])
    return np.array(np.broadcast_to(planes, (form.channels, side, side)))  # a copy of its own, row after row


def dtype_of(dtype: np.dtype, name: str) -> str:
    """Return the dtype that values are kept in: bytes and 16 bits as they are, all other numbers as float32."""
    if dtype in (np.uint8, np.uint16):
        return str(dtype)
    if dtype.kind not in "uif":
        raise DataError(f"{name}: pixels must be whole numbers or floats, got {dtype}")
    return "float32"


def fit_picture(image: Image.Image, size: int, channels: int, name: str, frame: int | None = None) -> np.ndarray:
    """Return a picture as uint8 ``channels size size``; ``vbcaps.data.fit_image`` says how."""
    size = size if frame is None or image.size != (frame, frame) else frame
    kind = image.format  # a copy does not have it
    image = _upright(image)
    if image.mode == "F" or (image.mode == "I" and kind == "TIFF"):
        raise DataError(f"{name}: pixels of 32 bits have no agreed range: save it with 8 or 16 bits")
    if image.mode.startswith("I"):  # 16 bits of grey, which Pillow's own conversion would clip
        image = Image.fromarray((np.clip(np.asarray(image), 0, 65535) // 257).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    mode = "L" if channels == 1 else "RGB"
    image = image if image.mode == mode else image.convert(mode)
    image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)
    return np.ascontiguousarray(np.array(image).reshape(size, size, channels).transpose(2, 0, 1))


def _upright(image: Image.Image) -> Image.Image:
    """Return a picture as the camera says to hold it, without a copy where it stands upright already."""
    return image if image.getexif().get(ORIENTATION, 1) == 1 else ImageOps.exif_transpose(image)


def _without_ones(series: Any) -> tuple[tuple[int, ...], str]:
    """Return the shape of a TIFF file's series, and where the file says its channels are, or ""."""
    letters = [(size, letter) for size, letter in zip(series.shape, series.axes, strict=True) if size > 1]
    shape, kind = tuple(size for size, _ in letters), "".join(letter for _, letter in letters)
    return shape, {"YXS": "hwc", "SYX": "chw", "CYX": "chw"}.get(kind, "")


def _header_of(shape: tuple[int, ...], kind: np.dtype, axes: str, path: Path) -> Header:
    dtype = dtype_of(kind, str(path))
    if len(shape) not in (2, 3) or 0 in shape:
        raise DataError(f"{path}: one image must be h w, h w c or c h w, got shape {shape}")
    at = None if len(shape) == 2 else channel_axis(shape, axes, str(path))
    height, width = (size for k, size in enumerate(shape) if k != at)
    return Header(height, width, Form(1 if at is None else shape[at], dtype), picture=False)


def _fitted_plane(plane: np.ndarray, side: int) -> np.ndarray:
    kind = plane.dtype
    values = plane if kind == np.uint8 else plane.astype(np.float32)
    image = ImageOps.fit(Image.fromarray(np.ascontiguousarray(values)), (side, side), Image.Resampling.BILINEAR)
    found = np.asarray(image)
    return np.rint(found).clip(0, 65535).astype(kind) if kind == np.uint16 else found

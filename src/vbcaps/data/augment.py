"""Turn a batch of images into the network's input, on their device.

Random numbers are arguments, and no method waits for the device, so every method may be captured in a CUDA graph.
Axes: n image, c channel, y x pixel.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from dataclasses import fields as fields_of
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vbcaps.data.dataset import CHUNK, Split
from vbcaps.removed import without_removed

STANDARDISE = ("image", "crop", "dataset", "none")
FILL = ("black", "mean", "edge")
RESAMPLE = ("bilinear", "bicubic")
FLOOR = 1 / 255  # least standard deviation, one grey level: a constant image becomes zeros, not NaN
FINE = 1 / 65535  # the same for images of more than 8 bits


@dataclass(frozen=True)
class View:
    """How images become network input: crop, change the light, standardise.

    Arguments:
        crop: height and width of the network's input.
        pad: the width of the frame around the image; training crops may include the frame.
        standardise: each channel to mean 0 and variance 1, by the statistics of the "image" (the paper's order on
            smallNORB: standardise, then crop), of the "crop" the network sees (the released code on smallNORB), or of
            the training "dataset" (the released code elsewhere); "none" leaves values in 0 to 1.
        flip: mirror every other training image, at random. Two channels are a stereo pair: in a mirror the left image
            is the right one.
        place: the image is smaller than ``crop``; in training it lies anywhere in that frame (MNIST in 40x40).
        brightness, contrast: in training, values are scaled by a factor from 1 - b to 1 + b, and then their distance to
            the image's mean by one from 1 - c to 1 + c; 0 is off.
        rotate, zoom, stretch: in training, the image is turned about the middle of the crop by up to so many degrees
            either way, enlarged by a factor from 1 - z to 1 + z, and made wider by one from 1 - s to 1 + s and lower by
            the same; 0 is off.
        resample: how such images are read between pixels. "bilinear" blurs them, and images in a test are not blurred;
            "bicubic" hardly does, and goes beyond 0 and 1 at edges.
        cutout: in training, a square of so many pixels a side, anywhere, is set to 0, the mean of a standardised image;
            the square may lie partly outside the crop. 0 is off.
        fill: the pixels outside the image: "black" (pad, then standardise, as the released code does), the "mean"
            (standardise, then pad with zeros, as the paper says), or the nearest pixel at its "edge".
        mean, std: of the training set for ``standardise="dataset"``; ``fit`` measures them.
        low, high: for images of 16 bits or floats, the values of each channel that become 0 and 1: the least and the
            greatest in the training set, which ``fit`` measures. Nothing for bytes, where they are 0 and 255.
    """

    crop: int
    pad: int = 0
    standardise: str = "image"
    flip: bool = False
    place: bool = False
    brightness: float = 0.0
    contrast: float = 0.0
    rotate: float = 0.0
    zoom: float = 0.0
    stretch: float = 0.0
    resample: str = "bilinear"
    cutout: int = 0
    fill: str = "black"
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for name in ("mean", "std", "low", "high"):  # JSON brings them back as lists
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if self.crop < 1:
            raise ValueError(f"crop must be at least 1, got {self.crop}")
        if self.pad < 0:
            raise ValueError(f"pad must be at least 0, got {self.pad}")
        if self.standardise not in STANDARDISE:
            raise ValueError(f"standardise must be one of {STANDARDISE}, got {self.standardise!r}")
        if self.fill not in FILL:
            raise ValueError(f"fill must be one of {FILL}, got {self.fill!r}")
        if self.resample not in RESAMPLE:
            raise ValueError(f"resample must be one of {RESAMPLE}, got {self.resample!r}")
        for name in ("brightness", "contrast"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} must be from 0 to 1, got {getattr(self, name)}")
        for name, most in (("rotate", 180), ("zoom", 0.9), ("stretch", 0.9), ("cutout", self.crop)):
            if not 0 <= getattr(self, name) <= most:
                raise ValueError(f"{name} must be from 0 to {most}, got {getattr(self, name)}")
        if self.place and self.pad:
            raise ValueError(f"place finds its own frame: pad must be 0 with it, got {self.pad}")
        if self.fill == "mean" and (self.place or self.standardise == "crop"):
            raise ValueError('fill="mean" cannot be had with place or standardise="crop": there the frame is image too')
        if len(self.mean) != len(self.std) or not all(s > 0 for s in self.std):
            raise ValueError(f"mean and std must have one value for each channel, std above 0: {self.mean}, {self.std}")

        if len(self.low) != len(self.high) or not all(a < b for a, b in zip(self.low, self.high, strict=True)):
            raise ValueError(f"low and high must have one value for each channel, low below: {self.low}, {self.high}")

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "View":
        """Return the view in the header of a weights file; it may have fields of an earlier version if they are off."""
        kept = without_removed(fields)
        if unknown := sorted(kept.keys() - {field.name for field in fields_of(cls)}):
            raise ValueError(f"a view has no field {unknown[0]!a}")
        if "crop" not in kept:
            raise ValueError("a view must have a crop")
        return cls(**kept)

    def fit(self, split: Split) -> "View":
        """Return this view, with the range of ``split`` if it is not of bytes, and the statistics of ``split`` if the
        view standardises by the dataset."""
        images = split.images
        if images.dtype == torch.uint8:
            view = replace(self, low=(), high=())
        else:
            low, high = _range_of(images)
            view = replace(self, low=low, high=high)
        if self.standardise != "dataset":
            return view
        mean, var = _moments_of_bytes(images) if not view.low else view._moments_of(images)
        return replace(view, mean=tuple(mean), std=tuple(max(math.sqrt(v), view.floor) for v in var))

    def _moments_of(self, images: Tensor) -> tuple[list[float], list[float]]:
        """Return mean and variance of each channel, scaled to 0 to 1, in float64."""
        count = images[:1, 0].numel() * len(images)
        total = sum(self.scaled(part).double().sum((0, 2, 3)) for part in images.split(CHUNK))
        assert isinstance(total, Tensor)
        mean = (total / count)[:, None, None]
        gaps = (self.scaled(part).double() - mean for part in images.split(CHUNK))
        squares = sum(gap.square().sum((0, 2, 3)) for gap in gaps)
        assert isinstance(squares, Tensor)
        return mean.flatten().tolist(), (squares / count).tolist()

    @property
    def floor(self) -> float:
        """Return the least standard deviation by which a channel is divided."""
        return FINE if self.low else FLOOR

    def scaled(self, images: Tensor) -> Tensor:
        """Return images as floats: bytes in 0 to 1, others with ``low`` at 0 and ``high`` at 1."""
        if not self.low:
            return images.float() / 255
        low, high = _channels(self.low, images), _channels(self.high, images)
        return (images.float() - low) / (high - low)

    def from_bytes(self, images: Tensor) -> Tensor:
        """Return bytes in the range of this view: 0 becomes ``low`` and 255 ``high``."""
        if not self.low:
            return images
        low, high = _channels(self.low, images), _channels(self.high, images)
        return low + (high - low) * (images.float() / 255)

    def as_bytes(self, images: Tensor) -> Tensor:
        """Return images as bytes to look at, with the same channels: ``low`` is black and ``high`` is white."""
        return (self.scaled(images).clamp(0, 1) * 255).round().byte() if self.low else images

    @property
    def draws(self) -> int:
        """Count the uniform numbers that ``train`` takes for an image: top, left, flip, then those of each change."""
        once = (self.brightness, self.contrast, self.rotate, self.zoom, self.stretch)
        return 2 + self.flip + sum(strength > 0 for strength in once) + 2 * (self.cutout > 0)

    def train(self, images: Tensor, u: Tensor) -> Tensor:
        """Return training input ``n c crop crop`` from images ``n c y x`` and uniform numbers, ``n draws``."""
        self._check(images)
        if u.shape != (len(images), self.draws):
            raise ValueError(f"u must have shape {(len(images), self.draws)}, got {tuple(u.shape)}")
        draw = iter(u.unbind(1))
        top, left = (self._corner(next(draw), size) for size in images.shape[2:])
        flip = next(draw) < 0.5 if self.flip else None
        if flip is not None and images.shape[1] == 2:
            images = torch.where(flip[:, None, None, None], images.flip(1), images)
        turns = (self.rotate, self.zoom, self.stretch)
        if any(turns):
            angle, zoom, stretch = (strength * (2 * next(draw) - 1 if strength else 0 * top) for strength in turns)
            x, inside = self._turned_window(images, top, left, flip, angle, 1 + zoom, 1 + stretch)
        else:
            x, inside = self._window(images, top, left, flip)
        if self.brightness > 0:
            x = (x * self._factor(next(draw), self.brightness)).clamp(0, 1)
        if self.contrast > 0:
            mean = x.mean((1, 2, 3), keepdim=True)
            x = (mean + (x - mean) * self._factor(next(draw), self.contrast)).clamp(0, 1)
        x = self._standard(x, images, inside)
        return x * self._outside_square(next(draw), next(draw)) if self.cutout > 0 else x

    def test(self, images: Tensor) -> Tensor:
        """Return the central ``n c crop crop``; a smaller image gets a frame."""
        return self._at(images, [(images.shape[2] - self.crop) // 2, (images.shape[3] - self.crop) // 2])

    def crops(self, images: Tensor, k: int) -> Tensor:
        """Return ``k n c crop crop`` to average over: the central crop (1), the corners of the range of training crops
        and the centre (5), or a square grid over that range (4, 9, 16, ...)."""
        side = math.isqrt(max(k, 0))
        if k < 1 or (k != 5 and side * side != k):
            raise ValueError(f"crops must be 1, 5 or a square (4, 9, 16, ...), got {k}")
        if k == 1:
            return self.test(images)[None]
        (top, down), (left, right) = (self._range(size) for size in images.shape[2:])
        steps = [i / (side - 1) for i in range(side)]  # side is 2 for k = 5
        grid = [[top + round(s * (down - 1)), left + round(t * (right - 1))] for s in steps for t in steps]
        views = [self._at(images, corner) for corner in grid]
        return torch.stack(views + [self.test(images)] * (k == 5))

    def _check(self, images: Tensor) -> None:
        if not self.low and (images.dtype != torch.uint8 or images.ndim != 4):
            raise ValueError(f"images must be uint8 n c h w, got {images.dtype} {tuple(images.shape)}")
        if self.low and (images.dtype == torch.uint8 or images.ndim != 4 or images.shape[1] != len(self.low)):
            raise ValueError(
                f"images must be uint16 or float32 n c h w with {len(self.low)} channels, as the training images, got "
                f"{images.dtype} {tuple(images.shape)}"
            )
        if self.standardise == "dataset" and len(self.mean) != images.shape[1]:
            raise ValueError(f"images have {images.shape[1]} channels, mean and std {len(self.mean)}: call fit first")

    def _range(self, size: int) -> tuple[int, int]:
        """Return the first corner of a training crop along an axis of this size, and how many corners there are."""
        pad = max(self.crop - size, 0) if self.place else self.pad
        room = size + 2 * pad - self.crop + 1
        if room < 1:
            raise ValueError(f"crop {self.crop} is larger than an image of {size} with pad {pad}")
        return -pad, room

    def _corner(self, u: Tensor, size: int) -> Tensor:
        first, room = self._range(size)
        return first + (u * room).long().clamp(max=room - 1)

    def _at(self, images: Tensor, corner: list[int]) -> Tensor:
        self._check(images)
        top, left = (torch.full((len(images),), at, device=images.device) for at in corner)
        x, inside = self._window(images, top, left, None)
        return self._standard(x, images, inside)

    def _window(self, images: Tensor, top: Tensor, left: Tensor, flip: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return values in 0 to 1 with the corner of each crop at ``top, left``, and which lie inside the image."""
        n, c, h, w = images.shape
        step = torch.arange(self.crop, device=images.device)
        rows = top[:, None] + step  # n y
        across = step if flip is None else torch.where(flip[:, None], self.crop - 1 - step, step)
        cols = left[:, None] + across  # n x
        inside = ((rows >= 0) & (rows < h))[:, None, :, None] & ((cols >= 0) & (cols < w))[:, None, None, :]  # n 1 y x
        image = torch.arange(n, device=images.device)[:, None, None, None]
        channel = torch.arange(c, device=images.device)[:, None, None]
        x = images[image, channel, rows.clamp(0, h - 1)[:, None, :, None], cols.clamp(0, w - 1)[:, None, None, :]]
        x = self.scaled(x)
        if self.fill == "mean":
            return torch.where(inside, x, self._moments(images)[0]), inside
        return x if self.fill == "edge" else x * inside, inside

    def _turned_window(
        self,
        images: Tensor,
        top: Tensor,
        left: Tensor,
        flip: Tensor | None,
        degrees: Tensor,
        size: Tensor,
        wide: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return the same of images made wider, then turned about the middle of the crop and enlarged by ``size``."""
        h, w = images.shape[2:]
        step = torch.arange(self.crop, device=images.device) - (self.crop - 1) / 2
        across = step[None] if flip is None else torch.where(flip[:, None], -step, step)
        y, x = step[None, :, None], across[:, None, :]  # from the middle of the crop
        cos, sin = ((f(torch.deg2rad(degrees)) / size)[:, None, None] for f in (torch.cos, torch.sin))
        wide = wide[:, None, None]
        row = (top + (self.crop - 1) / 2)[:, None, None] + (cos * y - sin * x) * wide  # n y x, in pixels of the image
        col = (left + (self.crop - 1) / 2)[:, None, None] + (sin * y + cos * x) / wide
        reach = 1 if self.resample == "bilinear" else 2  # pixels that are mixed lie so near
        inside = ((row > -reach) & (row < h - 1 + reach) & (col > -reach) & (col < w - 1 + reach))[:, None]
        grid = torch.stack([(2 * col + 1) / w - 1, (2 * row + 1) / h - 1], -1)
        outside, x = "border" if self.fill == "edge" else "zeros", self.scaled(images)
        if self.fill == "mean":  # mixed with the mean, not with black
            mean, _ = self._moments(images)
            return mean + F.grid_sample(x - mean, grid, self.resample, outside, align_corners=False), inside
        return F.grid_sample(x, grid, self.resample, outside, align_corners=False), inside

    def _outside_square(self, u: Tensor, v: Tensor) -> Tensor:
        """Return 0 in the square, 1 elsewhere: ``n 1 y x``. The square's middle is anywhere in the crop."""
        step = torch.arange(self.crop, device=u.device) + 0.5
        near = [(step - at[:, None] * self.crop).abs() <= self.cutout / 2 for at in (u, v)]
        return 1 - (near[0][:, None, :, None] & near[1][:, None, None, :]).float()

    def _moments(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation, of the dataset or of each image."""
        if self.standardise == "dataset":
            return _channels(self.mean, images), _channels(self.std, images)
        std, mean = torch.std_mean(self.scaled(images), (2, 3), correction=0, keepdim=True)
        return mean, std

    def _standard(self, x: Tensor, images: Tensor, inside: Tensor) -> Tensor:
        if self.standardise == "none":
            return x
        if self.standardise == "crop":
            std, mean = torch.std_mean(x, (2, 3), correction=0, keepdim=True)
        else:
            mean, std = self._moments(images)
        x = (x - mean) / std.clamp_min(self.floor)
        return x * inside if self.fill == "mean" else x

    @staticmethod
    def _factor(u: Tensor, strength: float) -> Tensor:
        return (1 + strength * (2 * u - 1))[:, None, None, None]


def mixup(x: Tensor, y: Tensor, share: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """Blend each image of ``n c y x`` with its neighbour, which makes up ``share`` (``n 1 1 1``) of the result; return
    the images and the share of each class in their labels, ``n classes``.

    Neighbours are blended two by two, so that a batch dealt out to processes gives the same where each process has an
    even number. A last image without a neighbour stays as it is.
    """
    other = (torch.arange(len(y), device=y.device) ^ 1).clamp(max=len(y) - 1)
    label = F.one_hot(y, classes).to(x.dtype)
    return torch.lerp(x, x[other], share), torch.lerp(label, label[other], share[:, :, 0, 0])


def _channels(values: tuple[float, ...], like: Tensor) -> Tensor:
    """Return ``1 c 1 1``, made on the device: a copy from the host cannot be captured in a CUDA graph."""
    return torch.cat([torch.full((1, 1, 1, 1), value, device=like.device) for value in values], 1)


def _moments_of_bytes(images: Tensor) -> tuple[list[float], list[float]]:
    """Return mean and variance of each channel, scaled to 0 to 1, exactly."""
    counts = [torch.zeros(256, dtype=torch.float64) for _ in range(images.shape[1])]
    for part in images.split(CHUNK):
        for count, channel in zip(counts, part.transpose(0, 1).flatten(1), strict=True):
            count += torch.bincount(channel, minlength=256).double().cpu()
    grey = torch.arange(256, dtype=torch.float64) / 255
    mean = [float(count @ grey / count.sum()) for count in counts]
    return mean, [float(count @ (grey - m) ** 2 / count.sum()) for count, m in zip(counts, mean, strict=True)]


def _range_of(images: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Return the least and the greatest value of each channel; constant channels get a greater one."""
    ends = [(x.amin((0, 2, 3)), x.amax((0, 2, 3))) for x in (part.float() for part in images.split(CHUNK))]
    low, high = torch.stack([a for a, _ in ends]).amin(0), torch.stack([b for _, b in ends]).amax(0)
    least = low.tolist()
    return tuple(least), tuple(b if b > a else a + max(1.0, abs(a)) for a, b in zip(least, high.tolist(), strict=True))

"""Damage images more and more, to see whether uncertainty rises with the damage.

Axes: n image, c channel, y x pixel.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

LEVELS: dict[str, tuple[float, ...]] = dict(
    rotate=(15, 30, 45, 60, 90, 180),  # degrees
    blur=(0.5, 1, 1.5, 2, 3, 4),  # standard deviation in pixels
    noise=(0.05, 0.1, 0.2, 0.3, 0.4, 0.6),  # standard deviation, of values from 0 to 1
    occlude=(0.1, 0.2, 0.3, 0.4, 0.5, 0.6),  # share of the area, a grey square at a random place
)


def damage(images: Tensor, kind: str, level: float, seed: int = 0) -> Tensor:
    """Return damaged copies of uint8 images ``n c y x``; the same seed gives the same noise and places.

    Args:
        images: uint8 ``n c y x``.
        kind: one of ``LEVELS``.
        level: how much, in the unit of that kind; 0 leaves the images as they are.
        seed: of the noise and of the places of squares.

    Example:
        >>> images = torch.randint(0, 256, (2, 1, 28, 28), dtype=torch.uint8)
        >>> bool((damage(images, "rotate", 180) == images.flip(2, 3)).all())
        True
    """
    if kind not in LEVELS:
        raise ValueError(f"kind must be one of {tuple(LEVELS)}, got {kind!r}")
    if images.dtype != torch.uint8 or images.ndim != 4:
        raise ValueError(f"images must be uint8 n c y x to be damaged, got {images.dtype} {tuple(images.shape)}")
    if not 0 <= level < math.inf:
        raise ValueError(f"level must be a number of at least 0, got {level}")
    if level == 0:
        return images.clone()
    generator = torch.Generator().manual_seed(seed)
    x = images.float() / 255
    changed = dict(rotate=_rotate, blur=_blur, noise=_noise, occlude=_occlude)[kind](x, level, generator)
    return (changed.clamp(0, 1) * 255).round().byte()


def _rotate(x: Tensor, degrees: float, _: torch.Generator) -> Tensor:
    angle = math.radians(degrees)
    turn = torch.tensor([[math.cos(angle), -math.sin(angle), 0.0], [math.sin(angle), math.cos(angle), 0.0]])
    grid = F.affine_grid(turn.expand(len(x), 2, 3), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, "bilinear", "border", align_corners=False)


def _blur(x: Tensor, sigma: float, _: torch.Generator) -> Tensor:
    reach = min(math.ceil(3 * sigma), min(x.shape[2:]) - 1)
    step = torch.arange(-reach, reach + 1, dtype=x.dtype)
    kernel = (-0.5 * (step / sigma).square()).exp()
    kernel = (kernel / kernel.sum()).expand(x.shape[1], 1, -1)
    x = F.pad(x, (reach, reach, reach, reach), mode="replicate")
    x = F.conv2d(x, kernel[..., None], groups=x.shape[1])
    return F.conv2d(x, kernel[..., None, :], groups=x.shape[1])


def _noise(x: Tensor, sigma: float, generator: torch.Generator) -> Tensor:
    return x + sigma * torch.randn(x.shape, generator=generator)


def _occlude(x: Tensor, share: float, generator: torch.Generator) -> Tensor:
    height, width = x.shape[2:]
    sides = [round(length * math.sqrt(share)) for length in (height, width)]
    corner = torch.rand(2, len(x), generator=generator)
    top, left = ((corner[k] * (length - sides[k] + 1)).floor() for k, length in enumerate((height, width)))
    y, z = torch.arange(height), torch.arange(width)
    rows = (y >= top[:, None]) & (y < top[:, None] + sides[0])
    columns = (z >= left[:, None]) & (z < left[:, None] + sides[1])
    hidden = rows[:, None, :, None] & columns[:, None, None, :]
    return torch.where(hidden, 0.5, x)

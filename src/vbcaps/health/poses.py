"""How the poses of class capsules depend on the image, and how they follow a known move of it.

Axes: n image, k copy of an image, d pose entry, m number that describes a move.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

MOVES = 0.05  # an entry moves with the image if its standard deviation is above this; poses have about unit size
LEAST = 4  # images of one answer, fewer of which say nothing of it
LEAST_FIT = 8  # images of one answer in each half, fewer of which allow no readout
SHIFT = 3.0  # pixels
ANGLE = 20.0  # degrees


def others(entries: int) -> list[int]:
    """Return the pose entries to which `ClassCaps` adds no coordinates: all but the first two of the last column."""
    p = math.isqrt(entries)
    added = {p - 1, (2 * p - 1) % (p * p)}
    return [d for d in range(entries) if d not in added]


def moving(poses: Tensor, answers: Tensor) -> tuple[float, float] | None:
    """Return how many entries of the winner's pose have a standard deviation above ``MOVES`` over images of one answer.

    Args:
        poses: of the capsule that won, ``n d``.
        answers: which capsule it is, ``n``. Answers given to fewer than ``LEAST`` images are left out.

    Returns:
        The mean number over images, of all entries and of those without coordinates; None without such answers.
    """
    counts, kept = poses.new_zeros(2, dtype=torch.float64), 0
    for j in answers.unique().tolist():
        mine = poses[answers == j].double()
        if len(mine) >= LEAST:
            moves = mine.std(0, correction=0) > MOVES
            counts += len(mine) * torch.stack([moves.sum(), moves[others(len(moves))].sum()])
            kept += len(mine)
    return None if kept == 0 else (float(counts[0]) / kept, float(counts[1]) / kept)


def moved(x: Tensor, shift: Tensor, angle: Tensor) -> Tensor:
    """Return images ``n c h w`` that were turned and then shifted; outside, their border goes on.

    Args:
        x: the images.
        shift: pixels to the right and down, ``n 2``.
        angle: degrees against the clock, ``n``.
    """
    h, w = x.shape[2:]
    turn = angle.to(x.dtype) * math.pi / 180
    cos, sin = turn.cos(), turn.sin()
    # The grid says where each pixel comes from, in units of half a side, so its rows are those of the inverse move.
    right, down = (shift.to(x.dtype) * x.new_tensor([2 / w, 2 / h])).unbind(1)
    back = torch.stack([cos, -sin * h / w, sin * w / h, cos], 1).view(-1, 2, 2)
    offset = -(back @ torch.stack([right, down], 1)[..., None])
    grid = F.affine_grid(torch.cat([back, offset], 2), list(x.shape), align_corners=False)
    return F.grid_sample(x, grid, mode="bilinear", padding_mode="border", align_corners=False)


def readout(poses: Tensor, moves: Tensor, answers: Tensor, first: Tensor) -> float | None:
    r"""Return $R^2$ of a linear readout of moves from poses, fitted on half of the images and tested on the other half.

    Each class has a readout of its own, by ridge regression. Its penalty is that of noise with the standard deviation
    ``MOVES`` on every entry, so that an entry which hardly moves tells nothing.

    Args:
        poses: of the capsule that won, for every copy of each image, ``n k d``.
        moves: ``n k m``.
        answers: which capsule won, ``n``. Answers with fewer than ``LEAST_FIT`` images in one half are left out.
        first: whether an image belongs to the half that is fitted, ``n``.

    Returns:
        The mean over m of $1 - \sum (y - \hat y)^2 / \sum (y - \bar y)^2$, where sums are over classes; or None.
    """
    if not bool(poses.isfinite().all()):
        return None
    missed, spread = (moves.new_zeros(moves.shape[-1], dtype=torch.float64) for _ in range(2))
    for j in answers.unique().tolist():
        fit, test = (answers == j) & first, (answers == j) & ~first
        if min(int(fit.sum()), int(test.sum())) < LEAST_FIT:
            continue
        X, X2 = (poses[half].flatten(0, 1).double() for half in (fit, test))
        Y, Y2 = (moves[half].flatten(0, 1).double() for half in (fit, test))
        centre, mean = X.mean(0), Y.mean(0)
        X, Y = X - centre, Y - mean
        penalty = len(X) * MOVES**2 * torch.eye(X.shape[1], dtype=X.dtype, device=X.device)
        weights = torch.linalg.solve(X.T @ X + penalty, X.T @ Y)
        missed += (Y2 - mean - (X2 - centre) @ weights).square().sum(0)
        spread += (Y2 - Y2.mean(0)).square().sum(0)
    return None if not spread.all() else float((1 - missed / spread).mean())

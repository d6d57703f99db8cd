"""How strange is an image beside familiar ones? The quantiles of scores, kept with the network."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from vbcaps.weights.model import Model

STEPS = 101  # quantiles that are kept of each score


def remember_familiar(model: "Model", found: Mapping[str, Tensor], images: str) -> None:
    """Keep the quantiles of the scores of familiar images in the model, for `percentiles`; ``model.save`` writes them.

    Args:
        model: a trained network.
        found: what `scores` returned for images of the kind that the network is made for. Held-out images are best:
            the network knows its training images too well.
        images: what images these are, in words, as "2,000 test images of MNIST".

    Example:
        >>> import vbcaps
        >>> from vbcaps.data import load_dataset
        >>> from vbcaps.uncertainty import scores
        >>> model, test = vbcaps.load("fashion_laptop"), load_dataset("sample").test.images[:200]
        >>> remember_familiar(model, scores(model, test), "200 test images of Fashion-MNIST")
        >>> strange = percentiles(model, scores(model, torch.randint(0, 256, (4, 28, 28), dtype=torch.uint8)))
        >>> bool((strange["energy"] > 0.9).all())
        True
    """
    if not found or min(map(len, found.values())) == 0:
        raise ValueError("scores of at least one image are needed to remember how familiar images score")
    levels = torch.linspace(0, 1, STEPS, dtype=torch.float64)
    quantiles = {
        name: [float(f"{value:.5g}") for value in score.double().quantile(levels).tolist()]
        for name, score in found.items()
    }
    model.about["familiar"] = dict(images=images, quantiles=quantiles)


def percentiles(model: "Model", found: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return for each image and score the share of familiar images that score lower, from 0 to 1.

    Close to 1 means stranger than nearly all images that the network is made for. Scores that the model does not
    remember are left out; a model that remembers none gives an empty dict.

    Args:
        model: a network with which `remember_familiar` was called; those in the package have been.
        found: what `scores` returned.

    Example:
        >>> import vbcaps
        >>> from vbcaps.uncertainty import percentiles, scores
        >>> model, noise = vbcaps.load("fashion_laptop"), torch.randint(0, 256, (4, 28, 28), dtype=torch.uint8)
        >>> bool((percentiles(model, scores(model, noise))["density.conv_caps1.m"] > 0.9).all())
        True
    """
    known: dict[str, Any] = model.about.get("familiar", {}).get("quantiles", {})
    return {name: _share_below(score, known[name]) for name, score in found.items() if name in known}


def _share_below(score: Tensor, quantiles: list[float]) -> Tensor:
    """Return the height of the empirical distribution function at each score, linear between the quantiles."""
    at = torch.tensor(quantiles, dtype=torch.float64)
    x = score.double()
    above = torch.searchsorted(at, x).clamp(1, len(at) - 1)  # at[above - 1] < x <= at[above], within the range
    low, high = at[above - 1], at[above]
    share = ((x - low) / (high - low).clamp_min(1e-300)).clamp(0, 1)
    return ((above - 1 + share) / (len(at) - 1)).float()

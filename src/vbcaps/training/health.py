"""What the capsules of a freshly trained network do: measured once at the end of its training, and kept with it."""

import torch

from vbcaps.data import Split
from vbcaps.health import Health, health
from vbcaps.training.runlog import RunLog
from vbcaps.vae import capsules_of

IMAGES = 300  # that are measured at most: enough for shares, and a matter of seconds


def health_after(log: RunLog) -> Health | None:
    """Measure the weights that were chosen, on images that were held out of training or else on test images.

    Returns:
        The record; None for a CNN, where there are no such images, and in all processes but the first.
    """
    split, kind = images_of(log)
    net = capsules_of(log.learner.weights)
    if net is None or split is None or not len(split.labels) or not log.group.writes:
        return None
    order = torch.randperm(len(split.labels), generator=torch.Generator().manual_seed(0))
    some = split.take(order[:IMAGES].sort().values.to(split.labels.device))
    name = log.recipe.data or log.recipe.dataset
    return health(net, log.data.view.test(some.images), some.labels, of=f"{len(some.labels)} {kind} images of {name}")


def images_of(log: RunLog) -> tuple[Split | None, str]:
    """Return the images to measure, and what they are called."""
    if log.held_out:
        return log.data.validation, "held-out"
    return log.to_test()[0], "test"

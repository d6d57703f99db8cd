"""Types of capsule that are never on, always on, or through which no gradient comes.

Axes: n image, j type.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vbcaps.health.network import Stack
from vbcaps.layers import Capsules

OFF = 0.05  # a type is never on if its activation stays below this
ON = 0.95  # and always on if it stays above this
UNTAUGHT = 0.01  # of the largest gradient in a layer, below which a type is untaught


class Range(NamedTuple):
    """The least and the largest activation of each type over images and positions, ``j`` each."""

    low: Tensor
    high: Tensor

    @classmethod
    def of(cls, caps: Capsules) -> "Range":
        """Return the range in one batch."""
        a = caps.activations.flatten(0, -2)
        return cls(a.amin(0), a.amax(0))

    def joined(self, other: "Range") -> "Range":
        """Return the range over both."""
        return Range(torch.minimum(self.low, other.low), torch.maximum(self.high, other.high))

    def starved(self) -> tuple[int, int]:
        """Return how many types are never on, and how many always."""
        return int((self.high < OFF).sum()), int((self.low > ON).sum())


def largest_gradients(stack: Stack, x: Tensor, labels: Tensor) -> list[Tensor]:
    """Return the largest gradient that each type has in a batch, ``j`` for each layer, the primary capsules first.

    It is the size of the derivative of an image's cross entropy by the logit of one capsule, over images and positions;
    of the binary cross entropy where an image has several objects. Labels are ``n k``.
    """
    first = stack.begin(x)
    with torch.enable_grad():
        caps = first._replace(activations=first.activations.detach().requires_grad_())
        activations = [caps.activations]
        for layer in stack.layers.values():
            caps = layer(caps, posterior=False)
            activations.append(caps.activations)
        activations[-1] = caps.logits
        if labels.shape[1] == 1:
            loss = F.cross_entropy(caps.logits, labels[:, 0], reduction="sum")
        else:
            there = torch.zeros_like(caps.logits).scatter(1, labels, 1)
            loss = F.binary_cross_entropy_with_logits(caps.logits, there, reduction="sum")
        found = list(torch.autograd.grad(loss, activations))
    for k, a in enumerate(activations[:-1]):
        found[k] = found[k] * a.detach() * (1 - a.detach())  # by the logit, whose sigmoid is a
    return [gradient.abs().flatten(0, -2).amax(0) for gradient in found]


def untaught(largest: Tensor) -> int:
    """Return how many types have gradients below ``UNTAUGHT`` of the largest in their layer, given those of a layer."""
    return int((largest <= UNTAUGHT * largest.max()).sum())

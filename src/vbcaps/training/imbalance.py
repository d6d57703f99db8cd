"""Classes of different sizes: weights in the loss, and how often an epoch takes the images of each class.

Axes: n image, c class.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from vbcaps.training.recipe import weights_of


def class_weights(words: str, counts: Sequence[int]) -> list[float] | None:
    """Return the weight of each class in the loss, or None if every class has weight 1.

    The mean weight over the images that an epoch takes is 1, so that weights change neither the size of the loss nor
    the learning rate that suits it.

    Args:
        words: the field of a recipe: ``"none"``, ``"balanced"``, which gives every class the same part of the loss, or
            a number for each class, such as ``"1,5,20"``.
        counts: how many images of each class an epoch takes.

    >>> class_weights("balanced", [98, 2])[1] / class_weights("balanced", [98, 2])[0]
    49.0
    """
    given = weights_of(words)
    if given is None:
        return None
    if given == ():
        given = tuple(1 / max(count, 1) for count in counts)
    if len(given) != len(counts):
        raise ValueError(f"class_weights must have a number for each of {len(counts)} classes, got {words!r}")
    total = sum(weight * count for weight, count in zip(given, counts, strict=True))
    return [weight * sum(counts) / total for weight in given]


def quotas(counts: Sequence[int], balance: float) -> list[int]:
    """Return how many images of each class an epoch takes, as many in all as there are images.

    A class that has n images gets a share that goes as n to the power of 1 - ``balance``.

    >>> quotas([90, 10], 0.0), quotas([90, 10], 0.5), quotas([90, 10], 1.0)
    ([90, 10], [75, 25], [50, 50])
    """
    powers = [count ** (1 - balance) if count else 0.0 for count in counts]
    exact = [power / sum(powers) * sum(counts) for power in powers]
    whole = [int(share) for share in exact]
    largest_rests = sorted(range(len(counts)), key=lambda c: (whole[c] - exact[c], -counts[c]))
    for c in largest_rests[: sum(counts) - sum(whole)]:
        whole[c] += 1
    return whole


def take_quotas(members: Sequence[Tensor], counts: Sequence[int], generator: torch.Generator) -> Tensor:
    """Return the order of an epoch that takes ``counts`` images of each class; ``members`` are their numbers.

    All images of a class are taken equally often, but for one time more or less.
    """
    taken = []
    for of_class, count in zip(members, counts, strict=True):
        rounds = -(-count // max(len(of_class), 1))
        taken += [of_class[torch.randperm(len(of_class), generator=generator)] for _ in range(rounds)]
        if rounds:
            taken[-1] = taken[-1][: count - (rounds - 1) * len(of_class)]
    together = torch.cat(taken)
    return together[torch.randperm(len(together), generator=generator)]

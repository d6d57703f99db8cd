"""Test error with its confidence interval, by class and as a confusion matrix.

Axes: n image, k crop, c class.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vbcaps.data import Split, View
from vbcaps.layers import Capsules
from vbcaps.models import ConvNet, Network, Scores
from vbcaps.training.distributed import ALONE, Group
from vbcaps.training.step import Graph

Z95 = 1.959963984540054  # a standard normal lies within it with probability 0.95


@dataclass(frozen=True)
class Evaluation:
    """Errors are shares from 0 to 1; ``confusion[truth][answer]`` are counts."""

    error: float
    interval: tuple[float, float]  # Wilson's, 95%
    count: int
    crops: int
    per_class: list[dict[str, Any]]  # name, count, error, interval
    confusion: list[list[int]]

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Evaluation":
        return cls(**fields | dict(interval=tuple(fields["interval"])))


def evaluate(
    net: Network, split: Split, view: View, classes: Sequence[str], *, crops: int = 1, batch: int = 256
) -> Evaluation:
    """The error of ``net`` on ``split``: on the central crop, or on the mean of the scores of several crops."""
    if crops < 1:
        raise ValueError(f"crops must be at least 1, got {crops}")
    split = split.to(next(net.parameters()).device)
    return summary(Scorer(net, split.images, view, crops=crops, batch=batch)(), split.labels, classes, crops)


def predict_scores(net: Network, images: Tensor, view: View, *, crops: int = 1, batch: int = 256) -> Tensor:
    """What the network makes of uint8 ``images``: a probability of each class, ``n c``."""
    return Scorer(net, images.to(next(net.parameters()).device), view, crops=crops, batch=batch)()


def probabilities(net: Network, out: Capsules | Scores) -> Tensor:
    """A softmax where the logits have a learned scale; where not, each class's share of the activation."""
    if isinstance(net, ConvNet) or net.class_caps.scale is not None:
        return out.logits.softmax(1)
    return out.activations / out.activations.sum(1, keepdim=True)


class Scorer:
    """``scorer()`` gives the probabilities ``n c`` of the same images, as the network is now; a graph on CUDA."""

    def __init__(
        self,
        net: Network,
        images: Tensor,
        view: View,
        *,
        crops: int = 1,
        batch: int = 256,
        stream: "torch.cuda.Stream | None" = None,
    ):
        self.net, self.images, self.view, self.crops, self.count = net, images, view, crops, len(images)
        device = images.device
        self.batch = max(1, min(batch // crops, self.count))
        self.batches = -(-self.count // self.batch)
        self.at = torch.zeros((), dtype=torch.int64, device=device)  # first image of the next batch
        self.steps = torch.arange(self.batch, device=device)
        self.scores = torch.zeros(self.batches * self.batch, net.num_classes, device=device)
        self.graph = Graph(self.work, lambda: [self.at, self.scores], device, stream)

    @torch.no_grad()
    def __call__(self) -> Tensor:
        self.at.zero_()
        with evaluating(self.net):
            for _ in range(self.batches):
                self.graph()
        return self.scores[: self.count]

    @torch.no_grad()
    def work(self) -> None:
        index = (self.at + self.steps) % len(self.scores)  # a capture goes on past the end, and is put back
        images = self.images.index_select(0, index.clamp(max=self.count - 1))  # the last batch is filled up
        x = self.view.crops(images, self.crops)  # k n channel y x
        with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):  # as a CPU does
            scores = probabilities(self.net, self.net(x.flatten(0, 1)))
        self.scores.index_copy_(0, index, scores.unflatten(0, x.shape[:2]).mean(0))
        self.at.add_(self.batch)


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    training = net.training
    net.eval()
    try:
        yield
    finally:
        net.train(training)


def summary(scores: Tensor, labels: Tensor, classes: Sequence[str], crops: int = 1, group: Group = ALONE) -> Evaluation:
    """From probabilities ``n c`` and labels ``n``; those of all processes together where there are several."""
    c = len(classes)
    pairs = torch.bincount((labels * c + scores.argmax(1)).cpu(), minlength=c * c)
    confusion = group.sum(pairs.to(scores.device)).view(c, c).tolist()
    per_class = []
    for j, name in enumerate(classes):
        count, wrong = sum(confusion[j]), sum(confusion[j]) - confusion[j][j]
        row = dict(name=name, count=count, error=wrong / max(count, 1), interval=wilson(wrong, count))
        per_class.append(row)
    count = sum(map(sum, confusion))
    wrong = count - sum(confusion[j][j] for j in range(c))
    return Evaluation(wrong / count, wilson(wrong, count), count, crops, per_class, confusion)


def wilson(wrong: int, count: int) -> tuple[float, float]:
    """The 95% score interval of Wilson (1927) for a share; it does not leave [0, 1] and is not empty at 0 errors."""
    if count == 0:
        return 0.0, 1.0
    p, z2 = wrong / count, Z95 * Z95
    centre, half = p + z2 / (2 * count), Z95 * math.sqrt(p * (1 - p) / count + z2 / (4 * count * count))
    low, high = (centre - half) / (1 + z2 / count), (centre + half) / (1 + z2 / count)
    return (0.0 if wrong == 0 else low), (1.0 if wrong == count else high)

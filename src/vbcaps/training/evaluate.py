"""Test error with its confidence interval, other measures, by class and as a confusion matrix.

Axes: n image, k crop, c class.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vbcaps.data import Split, View
from vbcaps.inference import evaluating, exact_convolutions, probabilities
from vbcaps.training import measures
from vbcaps.training.distributed import ALONE, Group
from vbcaps.training.step import Graph
from vbcaps.vae import CapsVAE, Network, Reconstruction
from vbcaps.weights.model import Model

Z95 = 1.959963984540054  # a standard normal variable lies between -Z95 and Z95 with probability 0.95


@dataclass(frozen=True)
class Evaluation:
    """Errors are shares from 0 to 1; ``confusion[truth][answer]`` are counts.

    Where images have k objects, the k highest classes are the answer, and an image is wrong unless they are its
    objects. Measures by class, their means and the confusion matrix then count objects: an object that is missed stands
    beside an answer that is wrong. Kappa is not defined for several answers.

    A VAE decodes the class that it predicts, from the posterior mean. A measure is None where it is not defined, and in
    the results of earlier versions; means leave such classes out.
    """

    error: float
    interval: tuple[float, float]  # Wilson's, 95%
    count: int
    crops: int
    per_class: list[dict[str, Any]]  # name, count, error, interval; precision, recall, f1, auc if measured
    confusion: list[list[int]]
    reconstruction: float | None = None  # of a VAE: squared error for each pixel, on pixels from 0 to 1
    balanced_accuracy: float | None = None  # mean recall of the classes
    macro_f1: float | None = None  # mean over the classes
    weighted_f1: float | None = None  # mean over the images, each with the F1 of its class
    macro_auc: float | None = None  # mean over the classes, each against all others
    kappa: float | None = None  # Cohen's: agreement beyond chance
    quadratic_kappa: float | None = None  # the same for ordered classes: a miss by two counts four times
    objects: int = 1  # in each image
    objects_found: float | None = None  # of several objects in an image: the share that is among the answers
    by_overlap: list[dict[str, Any]] | None = None  # count, error, interval, and from which overlap to which

    @property
    def balanced_error(self) -> float:
        """Return the mean error of the classes that have images."""
        return measures.balanced_error(self.confusion)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Evaluation":
        return cls(**fields | dict(interval=tuple(fields["interval"])))


def evaluate(model: Model, split: Split, *, crops: int = 1, batch_size: int = 256) -> Evaluation:
    """Return the error of a model with its 95% interval and other measures, by class and as a confusion matrix.

    Args:
        model: a result of ``vbcaps.load`` or ``vbcaps.fit``. A GPU runs it as one CUDA graph.
        split: uint8 images ``n c h w``, of the size that ``model.view`` crops, and labels ``n``; or ``n k`` for images
            of k objects, which ``vbcaps.data.overlapping`` makes.
        crops: 1 for the central crop; 5 or a square number to average the probabilities of several crops.
        batch_size: how many images the network sees at a time.

    Example:
        >>> import vbcaps
        >>> from vbcaps.data import load_dataset
        >>> from vbcaps.training.evaluate import evaluate
        >>> test = load_dataset("sample").test
        >>> evaluate(vbcaps.load("fashion"), test).error < 0.1
        True
    """
    if crops < 1:
        raise ValueError(f"crops must be at least 1, got {crops}")
    split = split.to(next(model.parameters()).device)
    classes = model.classes
    parts = model.net, split.images, model.view, len(classes)
    options: dict[str, Any] = dict(objects=model.recipe.objects, temperature=model.temperature, batch_size=batch_size)
    score = Scorer(*parts, crops=crops, **options)
    return summary(score(), split.labels, classes, crops, errors=score.errors, shared=split.shared)


class Scorer:
    """A function ``scorer()`` that returns the probabilities ``n c`` of fixed images; on CUDA it replays a graph.

    Args:
        net: the network.
        images: uint8 ``n channels h w``, on the network's device.
        view: how images become the network's input.
        num_classes: the number of classes of the network.
        crops: how many crops to average.
        objects: how many objects the network names in an image; a class has the probability to be there if several.
        temperature: divides the logits.
        batch_size: how many images the network sees at a time.
        stream: scorers that run at the same time need one stream each.
    """

    def __init__(
        self,
        net: Network,
        images: Tensor,
        view: View,
        num_classes: int,
        *,
        crops: int = 1,
        objects: int = 1,
        temperature: float = 1.0,
        batch_size: int = 256,
        stream: "torch.cuda.Stream | None" = None,
    ):
        self.net, self.images, self.view, self.crops, self.count = net, images, view, crops, len(images)
        self.objects, self.temperature = objects, temperature
        device = images.device
        self.batch = max(1, min(batch_size // crops, self.count))
        self.batches = -(-self.count // self.batch)
        self.at = torch.zeros((), dtype=torch.int64, device=device)  # first image of the next batch
        self.steps = torch.arange(self.batch, device=device)
        self.scores = torch.zeros(self.batches * self.batch, num_classes, device=device)
        self.errors = torch.zeros(self.batches * self.batch, device=device) if isinstance(net, CapsVAE) else None
        self.graph = Graph(self.work, self.state, device, stream)

    def state(self) -> list[Tensor]:
        return [self.at, self.scores] if self.errors is None else [self.at, self.scores, self.errors]

    @torch.no_grad()
    def __call__(self) -> Tensor:
        self.at.zero_()
        with evaluating(self.net):
            for _ in range(self.batches):
                self.graph()
        return self.scores[: self.count]

    @torch.no_grad()
    def work(self) -> None:
        index = (self.at + self.steps) % len(self.scores)  # a capture runs past the end, and is undone
        images = self.images.index_select(0, index.clamp(max=self.count - 1))  # the last batch is filled up
        x = self.view.crops(images, self.crops)  # k n channel y x
        with exact_convolutions():
            out = self.net(x.flatten(0, 1))
        scores = probabilities(out, self.temperature, self.objects)
        if self.errors is not None:
            assert isinstance(out, Reconstruction)
            errors = (x.flatten(0, 1) - out.images.clamp(0, 1)).square().flatten(1).mean(1)
            self.errors.index_copy_(0, index, errors.unflatten(0, x.shape[:2]).mean(0))
        self.scores.index_copy_(0, index, scores.unflatten(0, x.shape[:2]).mean(0))
        self.at.add_(self.batch)


def summary(
    scores: Tensor,
    labels: Tensor,
    classes: Sequence[str],
    crops: int = 1,
    group: Group = ALONE,
    errors: Tensor | None = None,
    measured: bool = True,
    shared: Tensor | None = None,
) -> Evaluation:
    """Return errors from probabilities ``n c`` and labels ``n`` or ``n k``, over the images of all processes.

    Args:
        errors: the squared error of each image of a VAE for each pixel; those after the n-th are left out.
        measured: also compute the measures that need scikit-learn.
        shared: how much the objects of each image overlap.
    """
    c, objects = len(classes), 1 if labels.ndim == 1 else labels.shape[1]
    given = measures.answers(scores, labels)  # n k
    pairs = torch.bincount((labels.view(-1, objects) * c + given).flatten().cpu(), minlength=c * c)
    confusion = group.sum(pairs.to(scores.device)).view(c, c).tolist()
    per_class: list[dict[str, Any]] = []
    for j, name in enumerate(classes):
        count, wrong = sum(confusion[j]), sum(confusion[j]) - confusion[j][j]
        row = dict(name=name, count=count, error=wrong / max(count, 1), interval=wilson(wrong, count))
        per_class.append(row)
    of_all: dict[str, Any] = {}
    if measured:
        found = measures.of_classes(confusion, group.gather(scores), group.gather(labels))
        per_class = [row | more for row, more in zip(per_class, found, strict=True)]
        of_all = measures.of_all(confusion, per_class)
    missed = group.gather((given != labels.view(-1, objects)).any(1).int()).bool()
    count, wrong = len(missed), int(missed.sum())
    of_objects: dict[str, Any] = {}
    if objects > 1:
        right = sum(confusion[j][j] for j in range(c))
        of_objects = dict(objects=objects, objects_found=right / (count * objects), kappa=None, quadratic_kappa=None)
        if shared is not None:
            of_objects |= dict(by_overlap=by_overlap(missed, group.gather(shared)))
    reconstruction = None
    if errors is not None:
        reconstruction = float(group.sum(errors[: len(labels)].double().sum())) / count
    shares = wrong / count, wilson(wrong, count)
    return Evaluation(*shares, count, crops, per_class, confusion, reconstruction, **of_all | of_objects)


def by_overlap(wrong: Tensor, shared: Tensor, parts: int = 4) -> list[dict[str, Any]]:
    """Return the error of each fourth of the images, from those whose objects overlap least to those of the most."""
    rows = []
    for part in shared.argsort(stable=True).tensor_split(parts):
        if len(part):
            bad, count = int(wrong[part].sum()), len(part)
            ends = dict(least=round(float(shared[part[0]]), 4), most=round(float(shared[part[-1]]), 4))
            rows.append(ends | dict(count=count, error=bad / count, interval=wilson(bad, count)))
    return rows


def wilson(wrong: int, count: int) -> tuple[float, float]:
    """Return the 95% score interval of Wilson (1927), which stays within [0, 1] and is not empty at 0 errors."""
    if count == 0:
        return 0.0, 1.0
    p, z2 = wrong / count, Z95 * Z95
    centre, half = p + z2 / (2 * count), Z95 * math.sqrt(p * (1 - p) / count + z2 / (4 * count * count))
    low, high = (centre - half) / (1 + z2 / count), (centre + half) / (1 + z2 / count)
    return (0.0 if wrong == 0 else low), (1.0 if wrong == count else high)

r"""`health` measures what a network's capsules do: who gets the votes, how sharp routing is, what poses say.

Axes: n image, k copy of an image, i child slot, j class, d pose entry.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from vbcaps.health.assignments import Assignments, Routed, correlations, map_of_votes, parts_of_classes
from vbcaps.health.network import Stack, in_batches, iterations_of, normed_anew, stack_of, with_iterations
from vbcaps.health.poses import ANGLE, MOVES, SHIFT, moved, moving, others, readout
from vbcaps.health.record import AtIterations, Health, LayerHealth, Moves, Uniform
from vbcaps.health.starved import Range, largest_gradients, untaught
from vbcaps.inference import evaluating, exact_convolutions
from vbcaps.layers import Capsules
from vbcaps.routing import ROUTINGS, Mixture, Posterior
from vbcaps.routing.vb import expected_logdet
from vbcaps.uncertainty.metrics import check_labels

if TYPE_CHECKING:
    from vbcaps.weights.model import Model

ITERATIONS = (1, 2, 3, 4, 6, 10)
COPIES = 4  # of each image, moved; an even number
SEED = 0  # of the moves, and of the images in each half
TIE = 1e-5  # two classes have equally many votes if they differ by less than this share of the largest


def health(
    model: "Model | nn.Module",
    images: Any,
    labels: Tensor | None = None,
    *,
    batch_size: int = 64,
    iterations: Sequence[int] = ITERATIONS,
    of: str = "",
    progress: Callable[[str], None] = lambda stage: None,
) -> Health:
    """Measure what a network's capsules do on some images; the network is left as it was.

    Args:
        model: a trained network: a `Model`, or a `CapsNet`, `CapsVAE`, `CapsHead` or `BackboneCapsNet`, which runs in
            evaluation mode.
        images: for a `Model` anything that ``model.predict`` takes; else the network's input. A few hundred test images
            are enough, in any order.
        labels: their classes, ``n`` of int64; or the classes of the k objects in each image, ``n k``: then the k
            highest classes are the answer, which is wrong unless they are these. Without labels there are no errors,
            and gradients are those of the answers.
        batch_size: how many images the network sees at a time.
        iterations: the numbers of iterations to answer with; that of the network is always among them.
        of: what images these are, in words, which the record keeps.
        progress: called with the name of each stage when it begins.

    Example:
        >>> import vbcaps
        >>> from vbcaps.data import load_dataset
        >>> test = load_dataset("sample").test
        >>> found = health(vbcaps.load("fashion_laptop"), test.images[:60], test.labels[:60])
        >>> found.most_votes > 0.5, found.layers[-1].name
        (True, 'class_caps')
    """
    net, x = _input_of(model, images)
    stack = stack_of(net)
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    if len(x) < 1:
        raise ValueError("health is measured on images, got none")
    if labels is not None:
        check_labels(labels, stack.classes.num_classes)
        if len(labels) != len(x):
            raise ValueError(f"there are {len(x)} images and {len(labels)} labels")
        labels = labels.reshape(len(x), -1)  # n k
    # Gradients need ordinary tensors, also where the caller is in inference mode.
    with torch.inference_mode(False), torch.no_grad(), evaluating(net), exact_convolutions():
        x, labels = x.clone(), None if labels is None else labels.to(x.device, copy=True)
        return dataclasses.replace(_measured(stack, x, labels, batch_size, iterations, progress), of=of)


def _input_of(model: Any, images: Any) -> tuple[nn.Module, Tensor]:
    """Return the network and its input on its device."""
    from vbcaps.weights.model import Model

    net = model.net if isinstance(model, Model) else model
    if not isinstance(net, nn.Module):
        raise TypeError(f"model must be a network, got {type(model).__name__}")
    stack_of(net)  # raise its error before images are read
    weight = next(net.parameters())
    if isinstance(model, Model):
        images = model.view.test(model.read(images).to(weight.device))
    return net, images.to(weight.device, weight.dtype)


def _measured(
    stack: Stack,
    x: Tensor,
    labels: Tensor | None,
    batch_size: int,
    iterations: Sequence[int],
    progress: Callable[[str], None],
) -> Health:
    progress("votes and assignments")
    batches = list(in_batches(len(x), batch_size, x.device))
    sums = Sums(stack)
    for batch in batches:
        sums.add(x[batch], None if labels is None else labels[batch])
    seen = sums.seen()
    objects = 1 if labels is None else labels.shape[1]
    answers, winner = highest(seen.logits, objects), seen.logits.argmax(1)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(SEED)).to(x.device)
    first = order < len(x) // 2  # a random half
    rows = torch.arange(len(x), device=x.device)
    moves = moving(seen.poses[rows, winner], winner)
    rank = seen.logits.argsort(1, descending=True)
    shares = seen.votes / seen.votes.sum(1, keepdim=True).clamp_min(torch.finfo(seen.votes.dtype).tiny)
    progress("other numbers of iterations")
    after = at_iterations(stack, x, labels, answers, batches, iterations)
    progress("uniform routing")
    even = uniform(stack, x, labels, answers, first, batch_size)
    progress("moves")
    followed = follow(stack, x, winner, first, batches)
    routing = stack.classes.routing
    names = {kind: name for name, kind in ROUTINGS.items()}
    return Health(
        images=len(x),
        objects=objects,
        routing=names.get(type(routing), type(routing).__name__),
        activation=getattr(routing, "activation", None),
        iters=iterations_of(stack),
        error=_error(answers, labels),
        most_votes=_share(most(seen.votes, answers)),
        fewest_votes=_share(most(-seen.votes, answers)),
        tightest=None if seen.tightness is None else _share(most(seen.tightness, answers)),
        votes_by_rank=tuple(shares.gather(1, rank).double().mean(0).tolist()),
        entries=seen.poses.shape[-1],
        moving=None if moves is None else moves[0],
        moving_others=None if moves is None else moves[1],
        moving_all=float((seen.poses.std(0, correction=0) > MOVES).double().sum(1).mean()),
        maps=_mean(seen.maps),
        parts=_mean(seen.parts),
        layers=sums.layers(),
        at_iterations=after,
        uniform=even,
        moves=followed,
    )


class Seen(NamedTuple):
    """What one pass saw of each image.

    Args:
        logits: ``n j``.
        votes: the mass of votes of each class, ``n j``.
        tightness: larger for a tighter posterior, ``n j``; None for a routing without one.
        poses: of every class, ``n j d``.
        maps: correlation of the maps of the first and the last class, ``n``.
        parts: the same of their parts of the image, ``n``.
    """

    logits: Tensor
    votes: Tensor
    tightness: Tensor | None
    poses: Tensor
    maps: Tensor
    parts: Tensor


class Sums:
    """Everything that one pass over the images gives, batch by batch."""

    def __init__(self, stack: Stack):
        self.stack = stack
        self.batches: list[Seen] = []
        self.assignments: list[Assignments] = []
        self.ranges: list[Range] = []
        self.gradients: list[Tensor] = []

    def add(self, x: Tensor, labels: Tensor | None) -> None:
        """Take in a batch."""
        primary, routed = self.stack.routed(x)
        if not self.assignments:
            self.assignments = [Assignments(one.children.fields, one.r.shape[-1]) for one in routed]
        for sums, one in zip(self.assignments, routed, strict=True):
            sums.add(one.children.a, one.r)
        ranges = [Range.of(caps) for caps in (primary, *(one.parents for one in routed))]
        self.ranges = [a.joined(b) for a, b in zip(self.ranges, ranges, strict=True)] if self.ranges else ranges
        self.batches.append(seen_in(routed))
        labels = highest(self.batches[-1].logits, 1) if labels is None else labels
        largest = largest_gradients(self.stack, x, labels)
        before = self.gradients or largest
        self.gradients = [torch.maximum(a, b) for a, b in zip(before, largest, strict=True)]

    def seen(self) -> Seen:
        """Return what was seen of all images."""
        columns = zip(*self.batches, strict=True)
        return Seen(*(None if column[0] is None else torch.cat(column) for column in columns))  # type: ignore[arg-type]

    def layers(self) -> tuple[LayerHealth, ...]:
        """Return the health of every layer, the primary capsules first."""
        names = ["primary_caps", *self.stack.layers]
        routed = [None, *(sums.found() for sums in self.assignments)]
        layers = []
        for name, found, reach, largest in zip(names, routed, self.ranges, self.gradients, strict=True):
            sharpness, information, share = found or (None, None, None)
            never, always = reach.starved()
            types = len(reach.low)
            layers.append(LayerHealth(name, types, sharpness, information, share, never, always, untaught(largest)))
        return tuple(layers)


def seen_in(routed: list[Routed]) -> Seen:
    """Return what is seen of each image in one batch, given what every layer did."""
    top = routed[-1]
    out: Capsules = top.parents
    rank = out.logits.argsort(1, descending=True)
    first, last = rank[:, 0], rank[:, -1]
    maps = correlations(map_of_votes(top, first), map_of_votes(top, last))
    parts = correlations(parts_of_classes(routed, first), parts_of_classes(routed, last))
    votes = top.weights()[:, 0].sum(1)
    return Seen(out.logits, votes, tightness(top), out.poses.flatten(2), maps, parts)


def tightness(classes: Routed) -> Tensor | None:
    r"""Return a number that is larger for a tighter posterior of a class, ``n j``, or None where there is none.

    It is $E[\ln|\Lambda_j|]$ of a VB posterior, and $-\sum_d \ln \sigma_{jd}^2$ of EM's mixture.
    """
    q = classes.parents.posterior
    if isinstance(q, Posterior):
        prior = getattr(classes.layer.routing, "prior", None)
        return expected_logdet(q, getattr(prior, "precision", "full" if q.full else "gamma")).to(q.m.dtype)
    return -q.var.log().sum(-1) if isinstance(q, Mixture) else None


def most(score: Tensor, answers: Tensor) -> Tensor:
    """Return whether the scores of the answers are above that of every other class, ``n``; a tie is none.

    Args:
        score: of each class, ``n j``.
        answers: classes, ``n k``.
    """
    own = score.gather(1, answers).amin(1)
    best = score.scatter(1, answers, -torch.inf).amax(1)
    return own - best > TIE * score.abs().amax(1)


def highest(logits: Tensor, objects: int) -> Tensor:
    """Return the classes with the highest logits, ``n k``, in the order of their numbers."""
    return logits.topk(objects).indices.sort(1).values


def at_iterations(
    stack: Stack,
    x: Tensor,
    labels: Tensor | None,
    answers: Tensor,
    batches: list[Tensor],
    iterations: Sequence[int],
) -> tuple[AtIterations, ...]:
    """Return what the network answers with other numbers of iterations; ``answers`` are those as trained."""
    trained = iterations_of(stack)
    if trained is None:
        return ()
    found = []
    for iters in sorted({*iterations, trained}):
        if iters < 1:
            raise ValueError(f"iterations must be at least 1, got {iters}")
        with with_iterations(stack, iters):
            new = torch.cat([highest(stack(x[batch]).logits, answers.shape[1]) for batch in batches])
        found.append(AtIterations(iters, _error(new, labels), _share((new == answers).all(1))))
    return tuple(found)


def uniform(
    stack: Stack, x: Tensor, labels: Tensor | None, answers: Tensor, first: Tensor, batch_size: int
) -> Uniform | None:
    """Return what the network answers with one iteration, whose responsibilities are uniform.

    BatchNorm's statistics of the routed layers are taken anew on one half of the images; the other half is scored.
    """
    if iterations_of(stack) is None or int(first.sum()) < 2:
        return None
    with with_iterations(stack, 1), normed_anew(stack, x[first]):
        new = torch.cat([highest(stack(part).logits, answers.shape[1]) for part in x[~first].split(batch_size)])
    own, truth = answers[~first], None if labels is None else labels[~first]
    return Uniform(len(new), _error(new, truth), _error(own, truth), _share((new == own).all(1)))


def follow(stack: Stack, x: Tensor, winner: Tensor, first: Tensor, batches: list[Tensor]) -> Moves:
    """Return how well a linear readout of poses tells shifts and rotations of the images."""
    draws = torch.rand(3, len(x), COPIES // 2, generator=torch.Generator().manual_seed(SEED), dtype=torch.float64)
    draws = (2 * torch.cat([draws, 1 - draws], 2) - 1).to(x.device)  # the moves of each image add up to none
    shifts, angles = SHIFT * draws[:2].permute(1, 2, 0), ANGLE * draws[2, :, :, None]  # n k 2, n k 1
    found: list[float | None] = []
    for shift, angle, told in (
        (shifts, torch.zeros_like(angles), shifts),
        (torch.zeros_like(shifts), angles, angles),
    ):
        copies = []
        for k in range(COPIES):
            of_batch = []
            for batch in batches:
                out = stack(moved(x[batch], shift[batch, k], angle[batch, k, 0]))
                of_batch.append(out.poses[torch.arange(len(batch), device=x.device), winner[batch]].flatten(1))
            copies.append(torch.cat(of_batch))
        poses = torch.stack(copies, 1)  # n k d
        found += [readout(p, told, winner, first) for p in (poses, poses[..., others(poses.shape[-1])])]
    return Moves(*found)


def _error(answers: Tensor, labels: Tensor | None) -> float | None:
    return None if labels is None else _share((answers != labels.sort(1).values).any(1))


def _share(which: Tensor) -> float:
    return float(which.double().mean())


def _mean(values: Tensor) -> float | None:
    """Return the mean of the values that are no NaN, or None where there is none."""
    values = values[~values.isnan()]
    return float(values.mean()) if len(values) else None

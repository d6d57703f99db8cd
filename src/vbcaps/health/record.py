"""What a network's capsules do, as a value: `Health`, which goes to JSON and back, and into one row of a table."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

DIGITS = 4  # significant digits that a record keeps


@dataclass(frozen=True)
class LayerHealth:
    """What the capsules of one layer do. The first three measures are None for primary capsules, which nothing routes.

    Args:
        name: of the layer, as ``"conv_caps1"``.
        types: how many types of capsule it has; of class capsules, how many classes.
        sharpness: how far the assignment of a child is from an even one, from 0 (even) to 1 (one parent takes all).
        information: the mutual information of the image and the assignment of a child, in nats.
        information_share: the same as a share of what the child's assignment could say; at most ``sharpness``.
        never_on: types whose activation stays below `measure.OFF` in every image.
        always_on: types whose activation stays above `measure.ON` in every image.
        untaught: types through whose activation hardly any gradient comes, see `starved.untaught`.
    """

    name: str
    types: int
    sharpness: float | None
    information: float | None
    information_share: float | None
    never_on: int
    always_on: int
    untaught: int


@dataclass(frozen=True)
class AtIterations:
    """What the network answers with another number of iterations than it was trained with.

    Args:
        iters: the number of iterations of every layer.
        error: the share of wrong answers; None without labels.
        same: the share of answers that are those of the network as trained.
    """

    iters: int
    error: float | None
    same: float


@dataclass(frozen=True)
class Uniform:
    """How the network does where each child is shared out evenly, with BatchNorm's statistics taken anew.

    Args:
        images: how many images were scored; the others gave the statistics.
        error: the share of wrong answers with uniform responsibilities; None without labels.
        as_trained: the share of wrong answers of the network as trained on the same images; None without labels.
        same: the share of answers that are the same in both cases.
    """

    images: int
    error: float | None
    as_trained: float | None
    same: float


@dataclass(frozen=True)
class Moves:
    """How well a linear readout of the winner's pose tells how the image was moved: R^2 on images left out of the fit.

    The value is 1 for a perfect readout and 0 (or less) for none; None where there are too few images of a class.

    Args:
        shift: of shifts by up to `poses.SHIFT` pixels, the mean of both directions.
        shift_others: the same without the two entries to which coordinates are added.
        angle: of rotations by up to `poses.ANGLE` degrees.
        angle_others: the same without these two entries.
    """

    shift: float | None
    shift_others: float | None
    angle: float | None
    angle_others: float | None


@dataclass(frozen=True)
class Health:
    """What a network's capsules do on some images, as `health` measures it. Shares and errors lie from 0 to 1.

    Args:
        images: how many images were measured.
        routing: ``"vb"``, ``"em"`` or ``"dynamic"``; another routing has the name of its class.
        activation: the activation rule of VB routing, else None.
        iters: the iterations of the class layer, as trained.
        error: the share of wrong answers; None without labels.
        most_votes: share of answers whose class has more votes than any other, $r_j = \\sum_i a_i r_{ij}$.
        fewest_votes: share of answers whose class has fewer votes than any other.
        tightest: share of answers whose class has the tightest posterior: the largest $E[\\ln|\\Lambda_j|]$ (VB) or the
            least $\\sum_d \\ln \\sigma_{jd}^2$ (EM). None for Dynamic routing, which has no posterior.
        votes_by_rank: the mean share of votes of the class in each place of the ranking by logits, the answer first.
        entries: how many entries a pose has.
        moving: how many of them move with the image, the mean over answers, see `poses.moving`.
        moving_others: the same without the two entries to which coordinates are added.
        moving_all: how many entries of a class capsule's pose, whatever the answer, move over all images: the mean over
            classes. It counts what only tells classes apart, too.
        maps: the mean correlation over images of the maps of votes of the first and the last class of the ranking, over
            the positions of the class layer's children.
        parts: the same of their parts of the image, followed down to the primary capsules.
        layers: one for each layer of capsules, the primary capsules first.
        at_iterations: answers with other numbers of iterations, in rising order.
        uniform: answers with uniform responsibilities; None where there are too few images.
        moves: how poses follow a known move of the image.
        of: what images these are, in words, as "test images of MNIST"; "" where nobody said it.
        objects: how many objects an image has. The answer is as many classes, which must together be right, have the
            most votes, or the tightest posteriors.
    """

    images: int
    routing: str
    activation: str | None
    iters: int | None
    error: float | None
    most_votes: float
    fewest_votes: float
    tightest: float | None
    votes_by_rank: tuple[float, ...]
    entries: int
    moving: float | None
    moving_others: float | None
    moving_all: float
    maps: float | None
    parts: float | None
    layers: tuple[LayerHealth, ...]
    at_iterations: tuple[AtIterations, ...]
    uniform: Uniform | None
    moves: Moves
    of: str = ""
    objects: int = 1

    @property
    def inverted(self) -> bool:
        """Return whether the answer is more often the class with the fewest votes than the one with the most."""
        return self.fewest_votes > self.most_votes

    def to_json(self) -> dict[str, Any]:
        """Return the record in JSON's types, with numbers of four significant digits."""
        return _rounded(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Health":
        """Return the record that `to_json` gave; fields that this version does not know are left out."""
        known = _known(cls, fields)
        parts = dict(
            votes_by_rank=tuple(fields["votes_by_rank"]),
            layers=tuple(LayerHealth(**_known(LayerHealth, one)) for one in fields["layers"]),
            at_iterations=tuple(AtIterations(**_known(AtIterations, one)) for one in fields["at_iterations"]),
            uniform=None if fields["uniform"] is None else Uniform(**_known(Uniform, fields["uniform"])),
            moves=Moves(**_known(Moves, fields["moves"])),
        )
        return cls(**known | parts)

    def row(self) -> dict[str, Any]:
        """Return the record as one row of a table: a flat dict of words and numbers, None where there is none."""
        fields = self.to_json()
        row = {name: value for name, value in fields.items() if not isinstance(value, list | dict)}
        row["winner_votes"] = fields["votes_by_rank"][0]
        for layer in fields["layers"]:
            for name in ("sharpness", "information_share", "never_on", "always_on", "untaught"):
                if layer[name] is not None:
                    row[f"{layer['name']}.{name}"] = layer[name]
        for one in fields["at_iterations"]:
            row[f"error_{one['iters']}"], row[f"same_{one['iters']}"] = one["error"], one["same"]
        for name in ("error", "as_trained"):
            row[f"uniform_{name}"] = None if fields["uniform"] is None else fields["uniform"][name]
        row.pop("uniform", None)
        return row | {f"moves_{name}": value for name, value in fields["moves"].items()}


def _known(kind: type, fields: dict[str, Any]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in fields.items() if name in names}


def _rounded(value: Any) -> Any:
    """Return a value in JSON's types, its numbers with few digits; NaN and infinity become None."""
    if isinstance(value, dict):
        return {name: _rounded(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(one) for one in value]
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return value

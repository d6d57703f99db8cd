"""The plan of a sweep: everything that every worker must agree on. It is stored with the trials."""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from vbcaps.sweeps.space import (
    KINDS,
    Axis,
    Word,
    changed,
    check_name,
    check_space,
    flags_of,
    read_axis,
    read_fields,
    size_of,
)  # fmt: skip
from vbcaps.training.files import RunError
from vbcaps.training.recipe import Recipe
from vbcaps.weights.header import check_words, shortened

METHODS = ("tpe", "random", "grid")
SHARE, OF_OBJECTS = 0.1, 0.2  # of the training images, by default held out; of smallNORB, whole objects
TRIALS = 20
MOST_TRIALS = 10**6


@dataclass(frozen=True)
class Plan:
    """What a sweep tries, and how.

    Args:
        name: the name of the recipe, for the command that trains the best setting.
        base: the recipe with the fixed fields, as every trial trains it: a share of the training images is held out,
            and the test set is left alone.
        fixed: the fixed fields in words.
        axes: the fields that vary.
        method: one of ``METHODS``.
        trials: how many trials in all.
        seed: of the draws.
    """

    name: str
    base: Recipe
    fixed: dict[str, str]
    axes: tuple[Axis, ...]
    method: str = "tpe"
    trials: int = TRIALS
    seed: int = 0

    def recipe(self, params: dict[str, Word]) -> Recipe:
        """Return the recipe of a trial."""
        return changed(self.base, params)

    def size(self) -> float:
        """Return the number of different settings."""
        return size_of(self.axes, self.method == "grid")

    def train(self, params: dict[str, Word]) -> list[str]:
        """Return the command that trains a setting as the recipe says, on all training images."""
        return ["vbcaps", "train", self.name, *flags_of({**self.fixed, **params}, self.base.arch)]

    def to_json(self) -> dict[str, Any]:
        axes = [dataclasses.asdict(axis) for axis in self.axes]
        return dict(vars(self)) | dict(base=self.base.to_json(), axes=axes)

    @classmethod
    def from_json(cls, fields: Any, where: object = "the sweep") -> "Plan":
        """Return the plan in parsed JSON; ``where`` it was read is named in errors."""
        try:
            check_words(fields)
            axes = tuple(Axis(**axis | dict(words=tuple(axis["words"]))) for axis in fields["axes"])
            plan = cls(**fields | dict(base=Recipe.from_json(fields["base"]), axes=axes))
            plan.check()
            return plan
        except (TypeError, KeyError, ValueError, AttributeError, OverflowError, RecursionError) as error:
            raise RunError(
                f"the plan of {where} is damaged, or of a version of vbcaps that this one cannot read"
                + (f": {error}" if isinstance(error, ValueError) else "")
            ) from error

    def check(self) -> None:
        """Raise an error unless every field is of its type, and every axis gives valid recipes."""
        kinds = dict(name=str, fixed=dict, method=str, trials=int, seed=int)
        for field, kind in kinds.items():
            if type(getattr(self, field)) is not kind:
                raise ValueError(f"{field} must be of type {kind.__name__}, got {shortened(getattr(self, field))}")
        if self.method not in METHODS or not 1 <= self.trials <= MOST_TRIALS or not self.axes:
            raise ValueError(f"method {self.method!r}, {self.trials} trials and {len(self.axes)} axes make no sweep")
        if not all(isinstance(value, str) for value in self.fixed.values()):
            raise ValueError(f"fixed must have words, got {shortened(self.fixed)}")
        for axis in self.axes:
            if not isinstance(axis.field, str) or axis.kind not in KINDS:
                raise ValueError(f"an axis must have a field, and a kind of {KINDS}, got {shortened(axis)}")
            check_name(axis.field)
            if axis.kind == "choice":
                if not axis.words or not all(isinstance(word, str) for word in axis.words):
                    raise ValueError(f"the axis {axis.field} must have words, got {shortened(axis.words)}")
                continue
            if not all(type(x) in (int, float) and math.isfinite(x) for x in (axis.low, axis.high, axis.step)):
                raise ValueError(f"the axis {axis.field} must have numbers, got {shortened(axis)}")
            read_axis(axis.field, axis.kind, f"{axis.low!r},{axis.high!r},{axis.step!r}")
        check_space(self.base, self.axes)

    def differences(self, other: "Plan") -> list[str]:
        """Return what differs from another plan, but for the number of trials, which may grow."""
        mine, others = self.words(), other.words()
        return [
            f"{k} was {others.get(k)}, is now {mine.get(k)}" for k in {**others, **mine} if others.get(k) != mine.get(k)
        ]

    def words(self) -> dict[str, str]:
        """Return what the plan says, in words."""
        fields = {field: str(value) for field, value in self.base.to_json().items() if field != "data"}
        return fields | {axis.field: str(axis) for axis in self.axes} | dict(
            recipe=self.name, method=self.method, draws=str(self.seed)
        )  # fmt: skip


def make_plan(
    recipe: Recipe,
    fields: list[str],
    method: str = "tpe",
    trials: int | None = None,
    validation: float | None = None,
    seed: int = 0,
) -> tuple[Plan, list[str]]:
    """Return the plan of a sweep, and sentences about what was chosen for own images.

    Args:
        recipe: the recipe that the sweep changes.
        fields: such as ``["lr=log:1e-4,1e-2", "epochs=5"]``, see ``vbcaps.sweeps.space``.
        method: ``"tpe"`` learns from earlier trials, ``"random"`` draws, ``"grid"`` tries all.
        trials: how many; by default 20, of a grid all.
        validation: the share of each class of the training images that is held out and measures a trial.
        seed: of the draws.
    """
    if method not in METHODS:
        raise ValueError(f"method must be one of {METHODS}, got {method!r}")
    fixed, axes = read_fields(fields)
    if trials is not None and trials < 1:
        raise ValueError(f"trials must be at least 1, got {trials}")
    said: list[str] = []
    base = changed(recipe, dict(fixed))
    if base.data is None and base.dataset == "smallnorb":
        base = dataclasses.replace(base, match=0.0, hold_out="objects")  # its test set has other toys
    share = validation or base.validation or (OF_OBJECTS if base.hold_out == "objects" else SHARE)
    if validation is not None and not 0 < validation <= 0.9:
        raise ValueError(
            f"validation must be above 0 and at most 0.9: held-out images measure a trial; got {validation}"
        )
    base = dataclasses.replace(base, match=0.0, validation=share, test=False)
    if base.data is not None:
        from vbcaps.training.own_images import for_own_images

        base, said = for_own_images(base, {*fixed, *(axis.field for axis in axes), "validation", "test"})
    check_space(base, axes)
    plan = Plan(recipe.name, base, fixed, axes, method, trials or TRIALS, seed)
    if trials is None and method == "grid":
        plan = dataclasses.replace(plan, trials=int(plan.size()))
    return plan, said

"""The plan of a sweep: everything that every worker must agree on. It is stored with the trials."""

import dataclasses
from dataclasses import dataclass
from typing import Any

from vbcaps.sweeps.space import Axis, Word, changed, check_space, flags_of, read_fields, size_of
from vbcaps.training.files import RunError
from vbcaps.training.recipe import Recipe

METHODS = ("tpe", "random", "grid")
SHARE, OF_OBJECTS = 0.1, 0.2  # of the training images, by default held out; of smallNORB, whole objects
TRIALS = 20


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
    def from_json(cls, fields: dict[str, Any]) -> "Plan":
        try:
            axes = tuple(Axis(**axis | dict(words=tuple(axis["words"]))) for axis in fields["axes"])
            return cls(**fields | dict(base=Recipe.from_json(fields["base"]), axes=axes))
        except (TypeError, KeyError, ValueError) as error:
            raise RunError(f"the sweep was begun by a version of vbcaps that this one cannot read: {error}") from error

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

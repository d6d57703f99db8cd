"""The runs recorded in results/, as the figures read them: at whatever depth, so with those of every series."""

import dataclasses
import re
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from vbcaps.disk import RESULT
from vbcaps.training.files import RunError, read_json
from vbcaps.training.recipe import EM_ONLY, PRIOR, VB_ONLY, Recipe
from vbcaps.training.recipes import RECIPES
from vbcaps.training.runfolder import read_metrics, read_recipe


class MissingRecords(RunError):
    """Raised when results/ does not hold what a figure shows. The message says which command makes it."""


@dataclasses.dataclass(frozen=True)
class Record:
    """A recorded run. Its files are read when they are asked for."""

    folder: Path
    recipe: Recipe

    @cached_property
    def result(self) -> dict[str, Any] | None:
        """The result, or None for a run that did not finish."""
        path = self.folder / "result.json"
        return read_json(path, RESULT) if path.exists() else None

    @cached_property
    def environment(self) -> dict[str, Any]:
        return read_json(self.folder / "environment.json")

    @cached_property
    def metrics(self) -> list[dict[str, float | None]]:
        return read_metrics(self.folder)

    def error(self, of: str = "test") -> float | None:
        """Return the error in %, on the test set or on what is ``familiar``; None if the run was not tested on it."""
        evaluation = None if self.result is None else self.result[of]
        return None if evaluation is None else 100 * evaluation["error"]

    def curve(self, column: str) -> dict[int, float]:
        """Return a column of ``metrics.csv`` in % by epoch, where it has a value."""
        rows = [(row["epoch"], row[column]) for row in self.metrics]
        return {int(epoch): 100 * value for epoch, value in rows if epoch is not None and value is not None}


def read_records(results: Path) -> list[Record]:
    """Return every run in ``results``, in the order of their folders, where the tenth follows the ninth."""
    if not results.is_dir():
        raise MissingRecords(f"there is no folder {results}: figures are drawn from a checkout's results/ (--results)")

    def order(path: Path) -> list[tuple[int, str]]:
        return [(int(word or 0), word) if word.isdigit() else (0, word) for word in re.split(r"(\d+)", str(path))]

    folders = sorted((path.parent for path in results.rglob("recipe.json")), key=order)
    return [Record(folder, read_recipe(folder)) for folder in folders]


def found(records: Iterable[Record], wanted: Callable[[Recipe], bool], series: str) -> list[Record]:
    """Return the records with a wanted recipe, or raise an error that names the series which makes them."""
    some = [record for record in records if wanted(record.recipe)]
    if not some:
        raise MissingRecords(missing(series))
    return some


def missing(series: str, what: str = "runs for this figure") -> str:
    """Return a message that says how the records of a figure are made."""
    command = f"python tools/series.py {series}"
    return f"results/ has no {what}: `{command}` makes them, and `{command} --record` puts them into results/"


def errors_of(records: Iterable[Record]) -> list[float]:
    """Return the test errors in % of the runs that were tested."""
    return [error for record in records if (error := record.error()) is not None]


def settings(recipe: Recipe, *free: str) -> Recipe:
    """Return the recipe without its name, its seed and the fields in ``free``, to compare it with others."""
    defaults = {field: getattr(Recipe, field) for field in free}
    return dataclasses.replace(recipe, **defaults | dict(name="", seed=0, save_seconds=0.0))


def shared(recipe: Recipe) -> Recipe:
    """Return the settings that VB and EM share. Priors are among them, since EM has none: VB's must be as usual."""
    of_one = [field for field in (*VB_ONLY, *EM_ONLY) if field not in (*PRIOR, "learn")]
    return settings(recipe, "routing", *of_one)


def of_today(recipe: Recipe) -> bool:
    """Return whether a recorded recipe is still as recipes.py has it."""
    return recipe.name in RECIPES and settings(RECIPES[recipe.name]()) == settings(recipe)


def scale(recipe: Recipe) -> str:
    """Return the scale of a recipe: ``"laptop"``, or ``"full"`` for the recipes of the paper's networks."""
    return "laptop" if recipe.name.endswith("_laptop") else "full"

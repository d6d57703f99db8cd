"""The runs recorded in results/: read, grouped by recipe, and as the commands that make them again.

Runs whose recipes differ only in their seeds belong together. A recipe that was changed by flags, or in recipes.py
since, is another recipe; the present recipe with flags reproduces it. A run whose recipe is no longer in recipes.py
belongs to an earlier version; its commit reproduces it.
"""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vbcaps.training.recipe import Recipe
from vbcaps.training.recipes import RECIPES

NEVER_FLAGS = ("name", "seed", "save_seconds")  # fields in which the runs of one row may differ


class Run(NamedTuple):
    """A recorded run of one seed."""

    folder: Path  # within results/
    recipe: Recipe
    environment: dict[str, Any]
    result: dict[str, Any] | None  # None: it did not finish
    crops: dict[int, dict[str, Any]]  # tests on the mean of so many crops


Group = list[Run]  # differing in their seeds alone


def read_runs(results: Path) -> list[Run]:
    paths = sorted([*results.glob("*/recipe.json"), *results.glob("*/seed*/recipe.json")])
    runs = [read_run(path.parent, results) for path in paths]
    there: dict[float, Path] = {}
    for run in runs:
        seconds = run.result["seconds"] if run.result is not None else -1.0
        if seconds in there:
            raise ValueError(f"{run.folder} and {there[seconds]} are one run, recorded twice: remove one")
        there |= {seconds: run.folder} if run.result is not None else {}
    return runs


def read_run(folder: Path, results: Path) -> Run:
    def read(name: str) -> dict[str, Any]:
        return json.loads((folder / name).read_text())

    recipe = Recipe.from_json(read("recipe.json"))
    result = read("result.json") if (folder / "result.json").exists() else None
    crops = {one["crops"]: one for one in (read(path.name) for path in folder.glob("crops*.json"))}
    return Run(folder.relative_to(results), recipe, read("environment.json"), result, crops)


def groups(runs: Iterable[Run]) -> list[Group]:
    """Return runs by recipe, in the order of recipes.py; a recipe as it is comes before the same with flags."""
    by_recipe: dict[Recipe, Group] = {}
    for run in sorted(runs, key=lambda run: (run.recipe.seed, run.folder)):
        by_recipe.setdefault(dataclasses.replace(run.recipe, seed=0, save_seconds=0.0), []).append(run)
    order = {name: k for k, name in enumerate(RECIPES)}
    return sorted(by_recipe.values(), key=lambda group: (order.get(name_of(group), len(order)), flags(group[0].recipe)))


def name_of(group: Group) -> str:
    return group[0].recipe.name


def of_earlier_version(group: Group) -> bool:
    return name_of(group) not in RECIPES


def commits(group: Group) -> list[str]:
    """Return the commits that a group ran from, in the order of its runs."""
    environments = [one for run in group for one in (run.environment, *run.environment.get("resumed", []))]
    return list(dict.fromkeys(one["commit"] for one in environments))


# --- a recipe as a command -------------------------------------------------------------------------------------------


def flags(recipe: Recipe, leave_out: Sequence[str] = ()) -> str:
    """Return the flags with which `vbcaps train` changes the present recipe of that name into this one.

    A recipe of an earlier version has none: today's command line does not have it.
    """
    if recipe.name not in RECIPES:
        return ""
    base, words = RECIPES[recipe.name](), []
    if recipe.epochs != base.epochs:  # with --epochs the schedule follows
        base, words = base.with_epochs(recipe.epochs), [f"--epochs {recipe.epochs}"]
    for field in dataclasses.fields(Recipe):
        value = getattr(recipe, field.name)
        if field.name in (*NEVER_FLAGS, *leave_out) or value == getattr(base, field.name):
            continue
        name = field.name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        else:
            parts = value if isinstance(value, tuple) else () if value is None else (value,)
            words.append(f"--{name} {','.join(map(str, parts)) or 'none'}")
    return " ".join(words)


def command(group: Group) -> str:
    """Return a command for each unbroken series of seeds."""
    checkout = f"git checkout {commits(group)[0]} && " if of_earlier_version(group) else ""
    first = " ".join(filter(None, [f"{checkout}vbcaps train", name_of(group), flags(group[0].recipe)]))
    series: list[list[int]] = []
    for seed in sorted({run.recipe.seed for run in group}):
        if not series or seed != series[-1][-1] + 1:
            series.append([])
        series[-1].append(seed)
    return "; ".join(
        first + (f" --seed {some[0]}" if some[0] else "") + (f" --seeds {len(some)}" if len(some) > 1 else "")
        for some in series
    )

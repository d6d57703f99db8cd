"""Cross-validation: ``fit_folds`` trains a recipe once for each fold, and summarises the tests of all folds."""

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from vbcaps.training.evaluate import Evaluation
from vbcaps.training.files import RunError, inner_folder, write_json
from vbcaps.training.loop import Options, fit
from vbcaps.training.recipe import Recipe
from vbcaps.training.recipes import recipe as named_recipe
from vbcaps.training.runfolder import fold_folders
from vbcaps.weights.model import Model

FILE = "folds.json"
MEASURES = ("error", "balanced_accuracy", "macro_f1", "macro_auc")


def fit_folds(
    recipe: Recipe | str,
    folder: str | Path,
    folds: int | None = None,
    *,
    groups: str | None = None,
    **options: Unpack[Options],
) -> list[Model]:
    """Train a recipe once for each fold of its training images, and return the model of each fold.

    Each fold is tested on the part that it does not train on; the official test set is left alone. The folds have the
    same share of each class, as far as groups allow it. The images of a group are never in both parts, nor in both the
    training images and the share ``validation`` that chooses the epoch.

    Args:
        recipe: a ``Recipe`` or the name of one.
        folder: receives a folder for each run, ``fold1``, ``fold2`` and so on, and ``folds.json``, the summary.
        folds: how many, at least 2; by default the recipe's.
        groups: which images belong together: a table of files and groups, see ``vbcaps.data.groups``; by default the
            recipe's. Images in memory have their groups in ``Split.groups``.
        options: the keyword arguments of ``fit``; with ``resume`` the finished folds are not repeated.

    Returns:
        The models, in the order of their folds; ``model.result.test`` is the test of the part that was held out.

    Example:
        >>> import vbcaps
        >>> models = vbcaps.fit_folds("default", "runs/five", 5)  # doctest: +SKIP
        >>> sum(model.result.test.count for model in models)  # doctest: +SKIP
        8000
    """
    recipe, folder = named_recipe(recipe) if isinstance(recipe, str) else recipe, Path(folder)
    recipe = replace(recipe, folds=recipe.folds if folds is None else folds, groups=groups or recipe.groups, fold=0)
    if recipe.folds < 2:
        raise ValueError(f"folds must be at least 2, got {recipe.folds}")
    resume = bool(options.get("resume"))
    if resume and not folder.is_dir():
        raise RunError(f"there is no run to resume in {folder}")
    if resume and (folder / "recipe.json").exists():
        raise RunError(f"{folder} is one run: resume it without folds (`fit`)")
    if not resume and (there := fold_folders(folder)):
        raise RunError(f"{folder} already has {there[0].name}: resume it, or choose another folder")
    models = []
    for k in range(1, recipe.folds + 1):
        place = inner_folder(folder / f"fold{k}")
        options["resume"] = resume and place.is_dir()
        models.append(fit(replace(recipe, fold=k), place, **options))
    write_json(folder / FILE, summary_of([model.result.test for model in models if model.result and model.result.test]))
    return models


def summary_of(tests: list[Evaluation]) -> dict[str, Any]:
    """Return the mean and standard deviation of each measure over the folds, and the error of all images together.

    Args:
        tests: one for each fold.
    """
    found: dict[str, Any] = dict(folds=len(tests))
    for name in MEASURES:
        values = [getattr(test, name) for test in tests]
        known = [value for value in values if value is not None]
        both = dict(mean=statistics.mean(known), std=statistics.stdev(known)) if len(known) > 1 else None
        found[name] = dict(values=values) | (both or dict(mean=None, std=None))
    tables = zip(*(test.confusion for test in tests), strict=True)
    confusion = [[sum(cells) for cells in zip(*rows, strict=True)] for rows in tables]
    count = sum(test.count for test in tests)
    wrong = count - sum(row[k] for k, row in enumerate(confusion))
    return found | dict(count=count, pooled_error=wrong / count, confusion=confusion)

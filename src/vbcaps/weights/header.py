"""The checks of what the header of a weights file says: names of classes, view, and other facts.

A file may come from anybody. What is read here is printed, computed with, and given to constructors, so each field is
held to its type and its range first. Every error is a ``ValueError`` that names the field, the value and what is
allowed.
"""

import dataclasses
import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from vbcaps.data import View
from vbcaps.health.record import Health
from vbcaps.training.recipe import OBEYED, Recipe
from vbcaps.weights.tensors import first_twice


def check_classes(classes: Sequence[Any]) -> None:
    """Raise an error unless the names of classes are different words that can be printed."""
    if isinstance(classes, str) or not isinstance(classes, Sequence) or not classes:
        raise ValueError(f"classes must be a list of names, got {shortened(classes)}")
    for name in classes:
        if not isinstance(name, str) or OBEYED.search(name):
            raise ValueError(f"a class must have a name without control characters, got {shortened(name)}")
    if (twice := first_twice(classes)) is not None:
        raise ValueError(f"classes must have different names, got {shortened(twice)} twice")


def view_of_header(fields: Any, recipe: Recipe, in_channels: int) -> View:
    """Return the view that a header has, for the network's input."""
    if not isinstance(fields, dict):
        raise ValueError(f"view must have fields, got {shortened(fields)}")
    kinds = typing.get_type_hints(View)
    for name, value in fields.items():
        if name in kinds:
            _check(f"view.{name}", value, kinds[name])
    view = View.from_json(fields)
    if view.crop != recipe.crop:
        raise ValueError(f"view.crop must be {recipe.crop}, the side of the network's input, got {view.crop}")
    for name in ("mean", "std", "low", "high"):
        if len(getattr(view, name)) not in (0, in_channels):
            raise ValueError(f"view.{name} must have a number for each of {in_channels} channels, got {fields[name]}")
    if not 0 <= view.pad <= 64:
        raise ValueError(f"view.pad must lie from 0 to 64, got {view.pad}")
    return view


def _check(name: str, value: Any, kind: Any) -> None:
    """Raise an error unless a value from JSON is of a field's type."""
    if isinstance(kind, types.UnionType):
        if value is not None:
            _check(name, value, typing.get_args(kind)[0])
        return
    if dataclasses.is_dataclass(kind):
        if not isinstance(value, dict):
            raise ValueError(f"{name} must have fields, got {shortened(value)}")
        hints = typing.get_type_hints(kind)
        for field in dataclasses.fields(kind):
            if field.name in value:
                _check(f"{name}.{field.name}", value[field.name], hints[field.name])
            elif field.default is dataclasses.MISSING:
                raise ValueError(f"{name} must have a field {field.name!r}, got {shortened(value)}")
        return
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise ValueError(f"{name} must be a list, got {shortened(value)}")
        for one in value:
            _check(name, one, typing.get_args(kind)[0])
        return
    if kind is float:
        _check_number(name, value, -math.inf, math.inf)
    elif type(value) is not kind:
        raise ValueError(f"{name} must be of type {kind.__name__}, got {shortened(value)}")


def _check_number(name: str, value: Any, low: float, high: float) -> None:
    if type(value) not in (int, float) or not math.isfinite(value) or not low <= value <= high:
        within = "" if math.isinf(high) else f" from {low:g} to {high:g}"
        raise ValueError(f"{name} must be a finite number{within}, got {shortened(value)}")


# The numbers among the other facts, with their least and greatest values.
NUMBERS: Mapping[str, tuple[float, float]] = dict(
    epoch=(0, math.inf), validation_error=(0, 1), test_error=(0, 1), reconstruction=(0, math.inf),
    temperature=(1e-3, 1e3),
)  # fmt: skip


def check_about(about: Any) -> None:
    """Raise an error unless the other facts of a header are of the types and ranges that a model works with."""
    if not isinstance(about, dict):
        raise ValueError(f"metadata must have fields, got {shortened(about)}")
    for name, (low, high) in NUMBERS.items():
        if about.get(name) is not None:
            _check_number(name, about[name], low, high)
    for name in ("version", "commit", "data", "trained"):
        if not isinstance(about.get(name, ""), str):
            raise ValueError(f"{name} must be a word, got {shortened(about[name])}")
    began = about.get("began_with")
    if began is not None and not (isinstance(began, dict) and isinstance(began.get("weights"), str)):
        raise ValueError(f"began_with must have a field 'weights', got {shortened(began)}")
    _check_familiar(about.get("familiar"))
    if (health := about.get("health")) is not None:
        _check("health", health, Health)
        if not health["votes_by_rank"]:
            raise ValueError("health.votes_by_rank must have a number for each class, got []")
    check_words(about)


def _check_familiar(familiar: Any) -> None:
    if familiar is None:
        return
    if not isinstance(familiar, dict) or not isinstance(familiar.get("quantiles"), dict):
        raise ValueError(f"familiar must have a field 'quantiles', got {shortened(familiar)}")
    for name, numbers in familiar["quantiles"].items():
        if not isinstance(numbers, list) or len(numbers) < 2:
            raise ValueError(f"the quantiles of {shortened(name)} must be a list of numbers, got {shortened(numbers)}")
        for number in numbers:
            _check_number(f"a quantile of {shortened(name)}", number, -math.inf, math.inf)
        if sorted(numbers) != numbers:
            raise ValueError(f"the quantiles of {shortened(name)} must rise, got {shortened(numbers)}")


def check_words(fields: Any) -> None:
    """Raise an error if a word in parsed JSON has a character that a terminal obeys."""
    if isinstance(fields, dict):
        for name, value in fields.items():
            check_words(name)
            check_words(value)
    elif isinstance(fields, list):
        for value in fields:
            check_words(value)
    elif isinstance(fields, str) and OBEYED.search(fields):
        raise ValueError(f"a header must have words without control characters, got {shortened(fields)}")


def shortened(value: Any) -> str:
    """Return a value as Python writes it, with escape sequences spelled out and at most 60 characters."""
    said = ascii(value)
    return said if len(said) <= 60 else f"{said[:57]}..."

"""The command line's flags for a recipe: one flag for each field of the dataclass, with its type and help."""

import dataclasses
import inspect
import os
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_origin

import typer

from vbcaps.training.recipe import CHOICES, Recipe, field_types, nearest
from vbcaps.training.recipes import RECIPES, recipe
from vbcaps.training.words import value_of, without_none

NOT_FLAGS = ("name",)  # it is the argument RECIPE
GROUPS = dict(
    dataset="Data", crop="Images", network="Network and routing", loss="Training"
)  # by the first field of each
NONE = object()  # the value of the word `none`, because None means that the flag was not given
WORDS: dict[type, str] = {int: "INT", float: "NUMBER", str: "TEXT"}


def recipe_flags(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command that ends in ``**fields`` one option for each field of ``Recipe``."""
    *own, rest = inspect.signature(command).parameters.values()
    if rest.kind is not inspect.Parameter.VAR_KEYWORD:
        raise TypeError(f"{command.__name__} must end in **fields, got {rest}")
    kinds, group, flags = field_types(), "", []
    for field in dataclasses.fields(Recipe):
        group = GROUPS.get(field.name, group)
        if field.name not in NOT_FLAGS:
            flags.append(_flag(field, kinds[field.name], group))
    command.__signature__ = inspect.Signature([*own, *flags])  # type: ignore[attr-defined]
    command.__annotations__ |= {flag.name: flag.annotation for flag in flags}
    return command


def given(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields that the user named on the command line."""
    return {field: None if value is NONE else value for field, value in fields.items() if value is not None}


def changed(name: str, fields: dict[str, Any]) -> Recipe:
    """Return the recipe of that name with fields changed; a bad name or value ends the program with a hint."""
    if name not in RECIPES:
        hint = f"; your own images are given as --data {name}" if os.path.isdir(name) else nearest(name, RECIPES)
        raise typer.BadParameter(
            f"there is no recipe {name!r}{hint} (`vbcaps recipes` lists them)", param_hint="RECIPE"
        )
    try:
        return recipe(name, **fields)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=f"recipe '{name}'") from error


def _flag(field: dataclasses.Field, kind: Any, group: str) -> inspect.Parameter:
    name = "--" + field.name.replace("_", "-")
    # The default is the recipe's, so none is shown.
    about: dict[str, Any] = dict(help=field.metadata["help"], rich_help_panel=group, show_default=False)
    annotation: Any
    if kind is bool:
        annotation = Annotated[bool | None, typer.Option(f"{name}/--no{name[1:]}", metavar="", **about)]
    else:
        one, optional = without_none(kind)
        about |= dict(metavar=_metavar(one), parser=parser_of(kind))
        words = [*CHOICES.get(field.name, ()), *(["none"] if optional else [])]
        about["help"] += f" ({', '.join(words)})" if words else ""
        annotation = Annotated[str | None, typer.Option(name, **about)]
    return inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _metavar(kind: Any) -> str:
    return f"{WORDS[get_args(kind)[0]]},..." if get_origin(kind) is tuple else WORDS[kind]


def parser_of(kind: Any) -> Callable[[Any], Any]:
    """Return a function from a word to a value of that type; the recipe checks whether the value is allowed."""

    def parse(text: Any) -> Any:
        if not isinstance(text, str):  # typer calls this again with the parsed value
            return text
        try:
            value = value_of(text, kind)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None
        return NONE if value is None else value

    return parse

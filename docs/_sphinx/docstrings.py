"""A Sphinx extension: docstrings with $mathematics$ and `names` as the library writes them, for autodoc and napoleon.

It runs before napoleon, which reads the sections ``Args:``, ``Returns:``, ``Shape:`` and ``Example:``.
"""

import dataclasses
import importlib
import re
from typing import Any

from sphinx.application import Sphinx

LAZY = ("vbcaps", "vbcaps.data")  # packages that import a name when it is first asked for
PARTS = re.compile(
    r"(?P<code>``.+?``)|\$(?P<math>[^$]+)\$|(?P<role>:[\w:]+:`[^`]+`)|`(?P<name>[^`]+)`|(?P<odd>[*|]|(?<=\w)_(?!\w))",
    re.DOTALL,
)


def convert(text: str) -> str:
    """Return reStructuredText for prose: formulas as mathematics, names as references, and stray marks as they are."""

    def replace(match: re.Match[str]) -> str:
        if match["math"]:
            return f":math:`{' '.join(match['math'].split())}`"
        if match["name"]:
            name = match["name"]
            return f":py:obj:`{name} <.{name}>`" if name.replace(".", "").isidentifier() else f"``{name}``"
        return "\\" + match["odd"] if match["odd"] else match[0]

    return PARTS.sub(replace, text)


def prose_and_examples(lines: list[str]) -> list[tuple[bool, str]]:
    """Split a docstring into runs of lines: prose, and what must stay as it is (examples and literal blocks)."""
    runs: list[tuple[bool, list[str]]] = []
    example, literal = False, -1  # the indentation of the line that ended in `::`
    for line in lines:
        indent = len(line) - len(line.lstrip())
        if line.lstrip().startswith(">>>"):
            example = True
        elif not line.strip():
            example = False
        elif literal >= 0 and indent <= literal:
            literal = -1
        prose = not example and literal < 0
        if not runs or runs[-1][0] != prose:
            runs.append((prose, []))
        runs[-1][1].append(line)
        if prose and line.rstrip().endswith("::"):
            literal = indent
    return [(prose, "\n".join(run)) for prose, run in runs]


def on_docstring(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Rewrite a docstring in place."""
    text = "\n".join(convert(run) if prose else run for prose, run in prose_and_examples(lines))
    lines[:] = text.split("\n")
    if name == "vbcaps.training.recipe.Recipe":
        lines += ["", *table_of_fields(obj), ""]


def table_of_fields(recipe: type) -> list[str]:
    """Return a table of the recipe's fields, their defaults and what they mean."""
    rows = [".. list-table::", "   :header-rows: 1", "", "   * - field", "     - default", "     - meaning"]
    for field in dataclasses.fields(recipe):
        rows += [
            f"   * - ``{field.name}``",
            f"     - ``{field.default!r}``",
            f"     - {convert(field.metadata['help'])}",
        ]
    return rows


def on_member(app: Sphinx, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Leave out the fields of a NamedTuple, which its docstring explains under ``Args:``."""
    return True if (getattr(obj, "__doc__", None) or "").startswith("Alias for field number") else None


def on_signature(app: Sphinx, what: str, name: str, *rest: Any) -> tuple[str, None] | None:
    """Leave out the sixty arguments of a recipe, which the table of its fields has."""
    return ("", None) if name == "vbcaps.training.recipe.Recipe" else None


def setup(app: Sphinx) -> dict[str, bool]:
    for package in LAZY:
        module = importlib.import_module(package)
        for name in module.__all__:
            getattr(module, name)
    app.connect("autodoc-process-docstring", on_docstring, priority=400)
    app.connect("autodoc-process-signature", on_signature)
    app.connect("autodoc-skip-member", on_member)
    return dict(parallel_read_safe=True, parallel_write_safe=True)

"""The format of `--help`: flags without a metavar, and plain text in a narrow window."""

import shutil
from typing import Any

from typer.core import TyperCommand, TyperGroup

FRAMED = 70  # least columns for options in frames; in fewer, typer cuts off their names


class _Help:
    """Mix this into typer's command or group."""

    rich_markup_mode: Any

    def get_help_option(self, ctx: Any) -> Any:
        option = super().get_help_option(ctx)  # type: ignore[misc]
        if option is not None:
            option.metavar = ""  # else "<bool>"
        return option

    def format_help(self, ctx: Any, formatter: Any) -> None:
        if shutil.get_terminal_size().columns < FRAMED:
            self.rich_markup_mode = None
        super().format_help(ctx, formatter)  # type: ignore[misc]


class Command(_Help, TyperCommand):
    """A command of `vbcaps`."""


class Group(_Help, TyperGroup):
    """`vbcaps` itself, or `vbcaps data`."""

"""Bars that show how far a download is."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from vbcaps.cli.report import console, say


@contextmanager
def bars() -> Iterator[Callable[[str, int, int | None], None]]:
    """Show a bar for each file that is fetched, or a line in a pipe; yield the function that is told of progress."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as shown:
        tasks: dict[str, Any] = {}

        def progress(name: str, done: int, total: int | None) -> None:
            if name not in tasks:
                tasks[name] = shown.add_task(name, total=total)
                if not console.is_terminal:
                    say(f"fetching {name}")
            shown.update(tasks[name], completed=done, total=total)

        yield progress

"""``vbcaps figures``: draw the figures of the paper's analyses from recorded runs."""

from pathlib import Path
from typing import Annotated

import typer

from vbcaps.cli.report import complain, say, table
from vbcaps.training.files import RunError
from vbcaps.training.recipe import nearest

ALL = "all"


def figures(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="one of the figures, or all; without it they are listed")
    ] = None,
    results: Annotated[Path, typer.Option(metavar="FOLDER", help="recorded runs, results/ of a checkout")] = Path(
        "results"
    ),
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="write the PNG files here")] = Path("figures"),
) -> None:
    """Draw the figures of the paper's analyses from recorded runs, and from nothing else."""
    from vbcaps.figures.catalogue import FIGURES
    from vbcaps.figures.run import NoMatplotlib

    if name is None:
        rows = table("figure", "what")
        for one, figure in FIGURES.items():
            rows.add_row(one, figure.help)
        say(rows, "`vbcaps figures NAME` draws one, `vbcaps figures all` draws all of them")
        return
    if name != ALL and name not in FIGURES:
        raise typer.BadParameter(
            f"there is no figure {name!r}{nearest(name, [*FIGURES, ALL])}; they are {', '.join(FIGURES)}",
            param_hint="NAME",
        )
    failed = False
    for one in FIGURES if name == ALL else [name]:
        try:
            say(*(f"drew {path}" for path in FIGURES[one].draw(results, out)))
        except (RunError, NoMatplotlib) as error:  # without its records a figure is left out, the others are drawn
            failed = True
            complain(f"{one}: {error}")
    if failed:
        raise typer.Exit(1)

"""``vbcaps explore``: the page in the browser."""

from typing import Annotated

import typer

from vbcaps.cli.arguments import DataFolder, clear_errors
from vbcaps.cli.report import console, say


def explore(
    model: Annotated[
        str | None,
        typer.Argument(metavar="[MODEL]", help="the network to begin with: a name, the folder of a run, or a file"),
    ] = None,
    port: Annotated[
        int | None, typer.Option(metavar="INT", min=1, max=65535, help="serve the page here; default: 7860, if free")
    ] = None,
    no_open: Annotated[bool, typer.Option("--no-open", metavar="", help="do not open the page in the browser")] = False,
    data_folder: DataFolder = None,
) -> None:
    """Show in the browser how capsules route an image: votes, posteriors, and what they say of it."""
    with clear_errors():
        from vbcaps.explore.answers import Explorer
        from vbcaps.explore.networks import Networks
        from vbcaps.explore.server import serve

        with console.status("reading the networks"):
            explorer = Explorer(Networks(model, data_folder))
        serve(explorer, port, lambda address: say(f"the explorer is at {address}; Ctrl-C ends it"), not no_open)

"""``vbcaps weights``: where the files of the trained networks are, and fetching them."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from vbcaps.cli.fetching import bars
from vbcaps.cli.help import Command, Group
from vbcaps.cli.report import complain, percent, say, table

weights_app = typer.Typer(cls=Group, no_args_is_help=True, help="List, fetch and find trained networks.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="see `vbcaps weights list`")]


@contextmanager
def clear_errors() -> Iterator[None]:
    """End the program with a message on errors that the user can fix; unlike that of other commands without PyTorch."""
    from vbcaps.training.files import RunError

    try:
        yield
    except RunError as error:
        complain(str(error))
        raise typer.Exit(1) from error


@weights_app.command("list", cls=Command)
def list_weights() -> None:
    """List the trained networks: their data, test errors and sizes, what their capsules do, and where the files are."""
    with clear_errors():
        from vbcaps.weights import find

        rows = table("network", "dataset", "where", numbers=("test error", "MB", "most votes"), spare=["most votes"])
        for name, fields in find.published().items():
            found = find.present(name)
            where = "to be fetched" if found is None else found[1].title
            most = (fields.health or {}).get("most_votes")
            votes = "-" if most is None else f"{100 * most:.0f}%"
            rows.add_row(name, fields.dataset, where, percent(fields.test_error), f"{fields.size / 1e6:.2f}", votes)
        say(
            rows,
            "most votes: the share of answers whose class has the most votes; `vbcaps health NAME` says more",
            f"what is fetched goes to {find.cache_folder()}",
        )


@weights_app.command("fetch", cls=Command)
def fetch(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="see `vbcaps weights list`")] = None,
    everything: Annotated[bool, typer.Option("--all", metavar="", help="fetch every network")] = False,
) -> None:
    """Fetch trained networks that are not here yet; `vbcaps.load` does so by itself."""
    with clear_errors():
        from vbcaps.weights import find

        if everything == bool(names):
            raise typer.BadParameter("give the names of networks, or --all", param_hint="NAME")
        with bars() as progress:
            files = [find.named_file(known(name), progress) for name in names or find.list_models()]
        say(*map(str, files))


@weights_app.command("path", cls=Command)
def path(name: Name) -> None:
    """Print the path of a network's file, and fetch nothing."""
    with clear_errors():
        from vbcaps.training.files import RunError
        from vbcaps.weights import find

        found = find.present(known(name))
        if found is None:
            raise RunError(f"the weights {name} are not here yet: vbcaps weights fetch {name}")
        say(str(found[0]))


def known(name: str) -> str:
    """Return the name of a trained network; any other name is an error that has the nearest."""
    from vbcaps.training.files import RunError
    from vbcaps.training.recipe import nearest
    from vbcaps.weights.find import list_models

    if name not in list_models():
        raise RunError(f"there is no trained network {name!r}{nearest(name, list_models())}: see vbcaps weights list")
    return name

"""``vbcaps routing``: draw how a capsule network came to its answer for one image."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vbcaps.cli.arguments import Device, check_device, clear_errors
from vbcaps.cli.report import complain, percent, say
from vbcaps.cli.runs import newest_run

if TYPE_CHECKING:
    from vbcaps import Model

SMALL = "fashion_laptop"  # the network where there is no run


def routing(
    image: Annotated[Path, typer.Argument(metavar="IMAGE", help="a picture of any size, or a .npy file of one image")],
    name: Annotated[
        Path | None,
        typer.Option(
            "--model", metavar="NAME", help=f"a name as {SMALL}, a run or a weights file; else the newest run in runs/"
        ),
    ] = None,
    label: Annotated[
        str | None,
        typer.Option("--class", metavar="NAME", help="draw the votes and the pose of this class; else the predicted"),
    ] = None,
    out: Annotated[
        Path,
        typer.Option(
            "--out", "-o", metavar="FILE", help="the figure: PNG, PDF or SVG by its suffix; its folder is made"
        ),
    ] = Path("routing.png"),
    device: Device = "auto",
) -> None:
    """Draw the routing of an image: the parts that classes took, their votes, and the pose."""
    with clear_errors():
        from vbcaps.figures.run import NoMatplotlib, check_format

        check_format(out)
        if not image.is_file():
            raise ValueError(f"{image} is no file: IMAGE is one picture, or a .npy file of one image")
        from vbcaps.figures.routing import routing

        model = model_named(name, device)
        if not bool(model.predict(image).isfinite().all()):
            raise ValueError(
                f"the numbers of {model.name} are not finite: its training diverged, or its file is damaged"
            )
        try:
            drawn = routing(model, image, out, label=label)
        except (NoMatplotlib, OSError) as error:
            complain(f"no figure: {error}")
            raise typer.Exit(1) from error
        scores = model.predict(image)[0]
        sure = " and ".join(percent(p) for p in scores.topk(model.recipe.objects).values.tolist())
        say(f"{model.together(scores)}, probability {sure}", f"drew {drawn}")


def model_named(name: Path | None, device: str) -> "Model":
    """Return a model, the newest run or, without any run, a small network of the package; print which it is."""
    import vbcaps
    from vbcaps.training.files import RunError

    if name is None:
        try:
            name = newest_run()
        except RunError:
            name = Path(SMALL)
    model = vbcaps.load(name, device=check_device(device))
    say(f"weights {model.name}: {model.origin()}")
    return model

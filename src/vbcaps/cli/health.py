"""``vbcaps health``: what the capsules of a trained network do, on a page."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from vbcaps.cli.arguments import DataFolder, Device, check_device, check_fits, check_outputs, clear_errors
from vbcaps.cli.report import console, draw, percent, save_text, say, table
from vbcaps.cli.uncertainty import some_of

if TYPE_CHECKING:
    from vbcaps.health import Health

NONE = "-"


def health(
    weights: Annotated[
        Path, typer.Argument(metavar="MODEL", help="a weights file, the folder of a run, or a name such as fashion")
    ],
    limit: Annotated[
        int, typer.Option("--images", metavar="INT", min=0, help="use so many test images at random; 0: all")
    ] = 300,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="write every number as JSON")] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="draw votes, sharpness and iterations: PNG, PDF or SVG by its suffix"),
    ] = None,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="write weights that keep this record")] = None,
    data_folder: DataFolder = None,
    device: Device = "auto",
) -> None:
    """Say what a network's capsules do: who gets the votes, how sharp routing is, what poses tell."""
    with clear_errors():
        import torch

        import vbcaps
        from vbcaps.figures.run import check_format
        from vbcaps.health.network import stack_of
        from vbcaps.training.files import RunError
        from vbcaps.training.loop import prepare

        check_outputs(json_file, plot, save)
        if plot is not None:
            check_format(plot)
        model = vbcaps.load(weights, device=check_device(device))
        stack_of(model.net)  # raise its error before any data are read
        say(f"weights {model.name}: {model.origin()}")
        recipe = model.recipe
        with console.status(escape(f"reading {recipe.data or recipe.dataset}")):
            data = prepare(recipe, data_folder, torch.device("cpu"))
        check_fits(model, data, weights)
        test = some_of(data.test, limit)
        if not len(test.labels):
            raise RunError(f"there are no test images of {recipe.data or recipe.dataset}")
        images = f"{len(test.labels):,} test images of {recipe.data or recipe.dataset}"
        with console.status("measuring") as status:
            found = model.health(
                test.images,
                test.labels,
                of=images,
                progress=lambda stage: status.update(f"measuring {stage} of {len(test.labels):,} images"),
            )
        say_health(found, f"{images} ({data.source})")
        if save is not None:
            model.about["health"] = found.to_json()
            say(f"wrote {model.save(save)}")
        if json_file is not None:
            about_it = dict(weights=model.name, trained=model.origin(), source=data.source)
            save_text(json_file, json.dumps(about_it | found.to_json(), indent=2) + "\n")
        if plot is not None:
            from vbcaps.figures.health import overview

            draw(lambda: overview(found, model.name, plot))


def say_health(found: "Health", images: str) -> None:
    """Print what was found as sentences, and the numbers by layer and by iterations."""
    from vbcaps.health.findings import findings

    say(f"on {images}:", "", *(f"- {sentence}." for sentence in findings(found)), "")
    names = ("types", "sharp", "by the image", "nats", "never on", "always on", "no gradient")
    rows = table("layer", numbers=names, spare=["nats"])
    for one in found.layers:
        shares = (NONE if x is None else f"{100 * x:.1f}%" for x in (one.sharpness, one.information_share))
        nats = NONE if one.information is None else f"{one.information:.3f}"
        rows.add_row(one.name, str(one.types), *shares, nats, *map(str, (one.never_on, one.always_on, one.untaught)))
    say(rows, "")
    rows = table("iterations", numbers=("error", "same answers"))
    for point in found.at_iterations:
        trained = " (as trained)" if point.iters == found.iters else ""
        error = NONE if point.error is None else percent(point.error)
        rows.add_row(f"{point.iters}{trained}", error, f"{100 * point.same:.1f}%")
    say(rows)

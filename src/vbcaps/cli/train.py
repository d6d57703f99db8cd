"""``vbcaps train``: a recipe, its fields as flags, and what happens around ``vbcaps.training.loop.fit``."""

import dataclasses
import os
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from vbcaps.cli.flags import changed, given, recipe_flags
from vbcaps.cli.main import RUNS, DataFolder, Device, check_device, clear_errors
from vbcaps.cli.progress import Display
from vbcaps.cli.report import complain, draw_run, say_results
from vbcaps.training.recipe import Recipe

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
@recipe_flags
def train(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="see `vbcaps recipes`; default where not given")
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="of the run; else runs/RECIPE-SEED")] = None,
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="PATH", help="begin with trained weights: a name, a run's folder or a file"),
    ] = None,
    resume: Annotated[Path | None, typer.Option(metavar="FOLDER", help="go on with the run in this folder")] = None,
    seeds: Annotated[int, typer.Option(metavar="INT", min=1, help="train this many seeds, from --seed upwards")] = 1,
    device: Device = "auto",
    data_folder: DataFolder = None,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="write TensorBoard's event files, too")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="print nothing but errors")] = False,
    **fields: Any,
) -> None:
    """Train a network as a recipe says. Every field of the recipe is a flag.

    vbcaps train

    vbcaps train smallnorb_fast --seeds 5

    vbcaps train --data photos --epochs 20

    vbcaps train --from fashion --data photos
    """
    if resume is not None and out is not None:
        raise typer.BadParameter("a resumed run stays in its folder: leave --out away", param_hint="--out")
    if resume is not None and source is not None:
        raise typer.BadParameter(
            "a resumed run has its weights; --from cannot be combined with --resume, drop one of them",
            param_hint="--from",
        )
    wanted = given(fields)
    chosen = None if recipe is None and (resume or source) is not None else changed(recipe or "default", wanted)
    quiet = quiet or os.environ.get("RANK", "0") != "0"  # of the processes that torchrun starts, the first one talks
    with clear_errors():
        from vbcaps.training.loop import Interrupted, Options, fit, fit_seeds

        check_device(device)
        if resume is not None and chosen is None:
            chosen = dataclasses.replace(recipe_of(resume), **wanted)
        if source is not None and chosen is None:
            chosen = fine_tuning_of(source, wanted)
        assert chosen is not None
        folder = (
            resume
            or out
            or free_folder(RUNS / f"{Path(chosen.data).name if chosen.data else chosen.name}-{chosen.seed}")
        )
        try:
            with Display(quiet, seeds) as display:
                options = Options(
                    weights=source,
                    data_folder=data_folder,
                    device=device,
                    resume=resume is not None,
                    tensorboard=tensorboard,
                    on_event=display,
                )
                one = seeds == 1
                models = [fit(chosen, folder, **options)] if one else fit_seeds(chosen, folder, seeds, **options)
        except Interrupted as stop:
            again = f"vbcaps train --resume {shlex.quote(str(folder))}" + (f" --seeds {seeds}" if seeds > 1 else "")
            complain(f"interrupted; what was done is saved. Go on with: {again}")
            raise typer.Exit(stop.code) from None
        if os.environ.get("RANK", "0") == "0":
            for model in models:
                draw_run(model, data_folder)
        if not quiet:
            say_results([model.result for model in models if model.result is not None])


def fine_tuning_of(source: str, wanted: dict[str, Any]) -> Recipe:
    """Return the recipe that fine-tunes weights: their network and input, a short schedule, and the fields given."""
    from vbcaps.weights.file import read_weights
    from vbcaps.weights.find import weights_file
    from vbcaps.weights.transfer import fine_tuning

    return fine_tuning(read_weights(weights_file(source)).recipe, **wanted)


def recipe_of(folder: Path) -> Recipe:
    """Of a run, or of the first of several seeds in one folder."""
    from vbcaps.training.runfolder import read_recipe, seed_folders

    return read_recipe([*seed_folders(folder), folder][0])


def free_folder(wanted: Path) -> Path:
    """``runs/default-0``, or where that exists ``runs/default-0-2`` and so on: no run overwrites another."""
    folder, k = wanted, 1
    while folder.exists():
        k += 1
        folder = wanted.with_name(f"{wanted.name}-{k}")
    return folder

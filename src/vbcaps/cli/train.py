"""``vbcaps train``: run ``vbcaps.training.loop.fit`` with a recipe, whose fields are flags."""

import dataclasses
import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vbcaps.cli.arguments import Cache, DataFolder, Device, check_device, clear_errors, use_cache
from vbcaps.cli.flags import changed, given, recipe_flags
from vbcaps.cli.help import Command
from vbcaps.cli.progress import Display
from vbcaps.cli.report import complain, draw_run, say, say_results
from vbcaps.cli.runs import RUNS, new_run, set_latest
from vbcaps.training.recipe import Recipe
from vbcaps.training.runfolder import resolved

if TYPE_CHECKING:
    from vbcaps.training.events import Event, Hook

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command(cls=Command)
@recipe_flags
def train(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="see `vbcaps recipes`; without one: default")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="write the run here; default: runs/RECIPE-1, -2, ...")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="resume the run in this folder, for example runs/latest")
    ] = None,
    source: Annotated[
        str | None,
        typer.Option("--from", metavar="PATH", help="begin with trained weights: a name, a run's folder or a file"),
    ] = None,
    seeds: Annotated[int, typer.Option(metavar="INT", min=1, help="train this many seeds, from --seed upwards")] = 1,
    device: Device = "auto",
    data_folder: DataFolder = None,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", metavar="", help="also write TensorBoard's event files")
    ] = False,
    hook: Annotated[
        str | None,
        typer.Option("--on-event", metavar="MODULE:FUNCTION", help="call this function with every event of the run"),
    ] = None,
    cache: Cache = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", metavar="", help="print nothing but errors")] = False,
    **fields: Any,
) -> None:
    """Train a network as a recipe says. Every field of the recipe is a flag.

    vbcaps train

    vbcaps train smallnorb_fast --seeds 5

    vbcaps train --data photos --epochs 20

    vbcaps train --from fashion --data photos
    """
    if resume is not None and out is not None:
        raise typer.BadParameter("--out cannot be used with --resume: a resumed run stays in its folder")
    if resume is not None and source is not None:
        raise typer.BadParameter("--from cannot be used with --resume: a resumed run has its weights")
    use_cache(cache)
    wanted = given(fields)
    chosen = None if recipe is None and (resume or source) is not None else changed(recipe or "default", wanted)
    first = os.environ.get("RANK", "0") == "0"  # of torchrun's processes only the first writes and prints
    quiet = quiet or not first
    with clear_errors():
        from vbcaps.training.folds import fit_folds
        from vbcaps.training.loop import Interrupted, Options, fit, fit_seeds

        check_device(device)
        follow = following(hook)
        if resume is not None:
            resume = resolved(resume)
        if chosen is None and source is not None:
            chosen = fine_tuning_of(source, wanted)
        elif chosen is None:
            assert resume is not None
            chosen = dataclasses.replace(recipe_of(resume), **wanted)
        if resume is None and chosen.data is not None:
            from vbcaps.training.own_images import for_own_images

            of_source = ("crop", "image_size", "epochs") if source is not None and recipe is None else ()
            chosen, sentences = for_own_images(chosen, {*wanted, *of_source})
            for sentence in () if quiet else sentences:
                say(f"{chosen.data}: {sentence}")
        every = chosen.folds > 0 and not chosen.fold
        if every and seeds > 1:
            raise ValueError(f"--seeds {seeds} cannot be combined with all folds: choose one with --fold")
        name = Path(chosen.data).resolve().name if chosen.data else chosen.name
        try:
            with new_run(name, resume or out, first) as folder, Display(quiet, seeds) as display:

                def on_event(event: "Event") -> None:
                    if event.kind == "start" and folder.parent == RUNS:
                        set_latest(folder)
                    if event.kind == "start" and every and not quiet and event.recipe is not None:
                        say(f"fold {event.recipe.fold} of {event.recipe.folds}")
                    display(event)
                    follow(event)

                options = Options(
                    weights=source,
                    data_folder=data_folder,
                    device=device,
                    resume=resume is not None,
                    tensorboard=tensorboard,
                    on_event=on_event,
                )
                if every:
                    models = fit_folds(chosen, folder, **options)
                elif seeds > 1:
                    models = fit_seeds(chosen, folder, seeds, **options)
                else:
                    models = [fit(chosen, folder, **options)]
        except Interrupted as stop:
            again = f"vbcaps train --resume {shlex.quote(str(folder))}" + (f" --seeds {seeds}" if seeds > 1 else "")
            complain(f"interrupted; the run is saved. Continue it with: {again}")
            raise typer.Exit(stop.code) from None
        if first:
            for model in models:
                draw_run(model, data_folder)
        if not quiet:
            say_results([model.result for model in models if model.result is not None])


def following(words: str | None) -> "Hook":
    """Return the hook that ``--on-event`` names; its exceptions end the run with a sentence."""
    from vbcaps.training.events import named_hook
    from vbcaps.training.files import RunError

    if words is None:
        return lambda event: None
    hook = named_hook(words)

    def follow(event: "Event") -> None:
        try:
            hook(event)
        except Exception as error:
            where = f"{event.folder} is saved, and --resume continues it"
            raise RunError(f"--on-event {words} raised {type(error).__name__}: {error}; {where}") from error

    return follow


def fine_tuning_of(source: str, wanted: dict[str, Any]) -> Recipe:
    """Return the recipe that fine-tunes weights: their network and input, a short schedule, and the fields given."""
    from vbcaps.weights.file import read_weights
    from vbcaps.weights.find import weights_file
    from vbcaps.weights.transfer import fine_tuning

    return fine_tuning(read_weights(weights_file(source)).recipe, **wanted)


def recipe_of(folder: Path) -> Recipe:
    """Return the recipe of a run, or that of the first of several seeds or of all folds in one folder."""
    from vbcaps.training.runfolder import fold_folders, read_recipe, seed_folders

    if folds := fold_folders(folder):
        return dataclasses.replace(read_recipe(folds[0]), fold=0)
    return read_recipe([*seed_folders(folder), folder][0])

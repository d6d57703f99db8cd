"""``vbcaps sweep``: train a recipe with many settings, and show which is best."""

import shlex
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vbcaps.cli.arguments import DataFolder, Device, check_device, clear_errors
from vbcaps.cli.flags import changed
from vbcaps.cli.progress import Display
from vbcaps.cli.report import complain, duration, percent, say, table
from vbcaps.cli.runs import new_run

if TYPE_CHECKING:
    from vbcaps.sweeps.study import Study, Trial

SWEEPS = Path("sweeps")


def sweep(
    recipe: Annotated[str | None, typer.Argument(metavar="RECIPE", help="see `vbcaps recipes`")] = None,
    fields: Annotated[
        list[str] | None,
        typer.Option(
            "--field",
            metavar="NAME=VALUES",
            help="a field of the recipe that varies: log:LOW,HIGH, uniform:LOW,HIGH, int:LOW,HIGH, choice:A,B; or that "
            "is set: NAME=VALUE. In a grid, a third number says how many points a range has (int: its step). filters "
            "and types1 to types3 are the numbers of arch",
        ),
    ] = None,
    method: Annotated[
        str, typer.Option(metavar="NAME", help="tpe learns from earlier trials; random; grid tries all")
    ] = "tpe",
    trials: Annotated[
        int | None, typer.Option(metavar="INT", min=1, help="how many in all; default: 20, or the whole grid")
    ] = None,
    validation: Annotated[
        float | None,
        typer.Option(
            metavar="NUMBER",
            help="measure a trial on this share of the training images, held out; default: that of the recipe, else "
            "0.1 (smallNORB: 0.2 of its objects). The test set is never used",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="INT", min=0, help="seed of the draws of settings")] = 0,
    out: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="keep the sweep here; default: sweeps/RECIPE-1, -2, ...")
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(
            metavar="URL", help="keep the trials in a PostgreSQL database that several machines share; needs --out"
        ),
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="continue or join the sweep in this folder")
    ] = None,
    show: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="show the trials of a sweep, and train none")
    ] = None,
    device: Device = "auto",
    data_folder: DataFolder = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", metavar="", help="print nothing but errors")] = False,
) -> None:
    """Train a recipe with many settings on a part of the training images, and find the best one.

    --resume in other terminals adds workers. If one is killed, another continues its trial.

    vbcaps sweep fashion_laptop --field lr=log:1e-4,1e-2 --field routing=choice:vb,em --trials 20

    vbcaps sweep --resume sweeps/fashion_laptop-1

    vbcaps sweep --show sweeps/fashion_laptop-1
    """
    joins = resume or show
    if resume is not None and show is not None:
        raise typer.BadParameter("--resume and --show cannot be combined: give one of them")
    if joins is not None and (recipe is not None or fields or out is not None):
        raise typer.BadParameter(f"the sweep in {joins} has its recipe and fields: leave RECIPE, --field and --out out")
    if storage is not None and joins is None and out is None:
        raise typer.BadParameter("--storage needs --out FOLDER, whose name is that of the sweep in the database")
    with clear_errors():
        from vbcaps.sweeps.plan import make_plan
        from vbcaps.sweeps.study import open_sweep

        check_device(device)
        if show is not None:
            study = open_sweep(show, storage=storage)
            say_trials(study, study.trials())
            return
        plan = None
        if joins is None:
            plan, said = make_plan(changed(recipe or "default", {}), fields or [], method, trials, validation, seed)
            for sentence in () if quiet else said:
                say(f"{plan.base.data}: {sentence}")
        place = nullcontext(resume) if resume is not None else new_run(recipe or "default", out, root=SWEEPS)
        with place as folder:
            assert folder is not None
            study = open_sweep(folder, plan, storage)
            if resume is not None and trials is not None:
                study.extend(trials)
            train_trials(study, device, data_folder, quiet)


def train_trials(study: "Study", device: str, data_folder: Path | None, quiet: bool) -> None:
    """Work on a sweep, and show its trials at the end."""
    from vbcaps.sweeps.worker import work
    from vbcaps.training.loop import Interrupted

    axes = ", ".join(f"{axis.field}={axis}" for axis in study.plan.axes)
    if not quiet:
        count = int(min(study.plan.trials, study.plan.size()))
        say(f"{study.folder}: {count} trials of {study.plan.name}, {axes}, by {study.plan.method}")
    try:
        with Display(quiet) as display:
            trials = work(
                study, device=device, data_folder=data_folder, on_event=display,
                say=(lambda sentence: None) if quiet else say,
            )  # fmt: skip
    except (Interrupted, KeyboardInterrupt) as stop:
        again = f"vbcaps sweep --resume {shlex.quote(str(study.folder))}"
        complain(f"interrupted; the trials are kept. Continue with: {again}")
        raise typer.Exit(stop.code if isinstance(stop, Interrupted) else 130) from None
    finally:
        study.close()
    if not quiet:
        say_trials(study, trials)


def say_trials(study: "Study", trials: list["Trial"]) -> None:
    """Print a table of the trials, the best first, and the command that trains the best setting in full."""
    axes = study.plan.axes
    rows = table("trial", "state", *(axis.field for axis in axes), numbers=("error", "epoch", "time"), spare=["time"])
    for one in trials:
        words = (f"{x:.3g}" if isinstance(x := one.params.get(axis.field, ""), float) else str(x) for axis in axes)
        seconds = one.about.get("seconds")
        error = "" if one.error is None else percent(one.error)
        epoch = str(one.about.get("best_epoch", ""))
        rows.add_row(str(one.number), one.state, *words, error, epoch, "" if seconds is None else duration(seconds))
    held = f"error on {study.plan.base.validation:.0%} of the training images, which were held out"
    say(rows, held)
    for one in trials:
        if one.state == "failed":
            say(f"trial {one.number} failed: {one.about.get('error', 'its worker died')}")
    best = next((one for one in trials if one.state == "done"), None)
    if best is None:
        say("no trial has ended yet")
        return
    say(f"best: trial {best.number}, {percent(best.error or 0.0)}, in {study.run_folder(best.number)}")
    say(f"train it on all training images, and test it once: {shlex.join(study.plan.train(best.params))}")

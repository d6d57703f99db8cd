"""The command line: ``vbcaps train | eval | predict | recipes | data``. It parses, calls and prints.

PyTorch takes seconds to import, so a command imports what needs it when it is run. `train`, whose flags are made from
the recipe, is a program of its own (``vbcaps.cli.train``).
"""

import dataclasses
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from vbcaps.cli.help import Command, Group
from vbcaps.cli.report import complain, console, draw, percent, say, say_evaluation, table
from vbcaps.cli.runs import newest_run, resolved
from vbcaps.data import FACTS

if TYPE_CHECKING:
    import torch

    from vbcaps.training.recipe import Recipe
    from vbcaps.training.runlog import Data

app = typer.Typer(cls=Group, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
data_app = typer.Typer(cls=Group, no_args_is_help=True, help="List, fetch and check datasets.")
app.add_typer(data_app, name="data")

DRAWN = 60  # images in the picture of `predict`

DataFolder = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="folder of the datasets; default: VBCAPS_DATA, or the user's cache"),
]
Device = Annotated[str, typer.Option(metavar="NAME", help="auto (a GPU where there is one), cpu, cuda or cuda:1")]
DatasetName = Annotated[str, typer.Argument(metavar="DATASET", help="see `vbcaps data list`")]


def main() -> None:
    # Threads that spin while they wait make a CPU step five times slower as soon as another program wants the cores.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when PyTorch is imported
    app(prog_name="vbcaps")


def say_version(wanted: bool) -> None:
    if wanted:
        from vbcaps import __version__

        say(f"vbcaps {__version__}")
        raise typer.Exit


@app.callback()
def vbcaps(
    version: Annotated[
        bool, typer.Option("--version", metavar="", callback=say_version, is_eager=True, help="print the version")
    ] = False,
) -> None:
    """Capsule routing via Variational Bayes: train, test and use capsule networks.

    `vbcaps train` alone trains a small one on images that come with the package.
    """


@app.command(
    add_help_option=False,
    context_settings=dict(ignore_unknown_options=True, allow_extra_args=True),
    no_args_is_help=False,
)
def train(context: typer.Context) -> None:
    """Train a network as a recipe says. Every field of the recipe is a flag."""
    from vbcaps.cli.train import app

    app(context.args, prog_name="vbcaps train")


@app.command("eval", cls=Command)
def evaluate_weights(
    weights: Annotated[Path, typer.Argument(help="a weights file, the folder of a run, or a name as smallnorb")],
    crops: Annotated[int, typer.Option(metavar="INT", help="average over 1, 5 or a square number of crops")] = 1,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="test on your own images, one folder for each class: on all of them, or on those in test/; of the "
            "folder it was trained on, on what was held out",
        ),
    ] = None,
    data_folder: DataFolder = None,
    device: Device = "auto",
    picture: Annotated[Path | None, typer.Option(metavar="FILE", help="draw the confusion matrix, as PNG")] = None,
    record: Annotated[
        bool, typer.Option("--record", metavar="", help="write what several crops give beside result.json")
    ] = False,
) -> None:
    """Test a network: its error with a 95% interval, and by class. The recipe is in the weights file."""
    if record and data is not None:
        raise typer.BadParameter("a run's record is of its recipe's data: leave --data away", param_hint="--record")
    with clear_errors():
        from vbcaps.figures.run import confusion
        from vbcaps.training.checkpoint import RunError, crops_file, environment, load_weights, write_json
        from vbcaps.training.loop import evaluate, prepare

        place, file = check_device(device), weights_file(weights)
        recorded = crops_file(file, crops) if record else None
        net, recipe, classes, view, about = load_weights(file, place)
        with console.status(escape(f"reading {data or recipe.data or recipe.dataset}")):
            if data is None:
                there = prepare(recipe, data_folder, place)
            else:
                recipe, there = own_images(recipe, data, about, place)
        has, needs = (there.classes, there.test.images.shape[1]), (classes, net.in_channels)
        if has != needs:
            raise RunError(
                f"{weights} tells {', '.join(classes)} apart in images of {net.in_channels} channels; "
                f"the data have {', '.join(there.classes)} in {has[1]}"
            )
        try:
            with console.status(f"testing {len(there.test.labels):,} images"):
                evaluation = evaluate(net, there.test, view, classes, crops=crops)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--crops") from error
        say_evaluation(evaluation, f"{recipe.name}, tested on {recipe.data or recipe.dataset} ({there.source})")
        if crops == 1 and data is None and about.get("test_error") is not None:
            say(f"the weights file says {percent(about['test_error'])}")
        if recorded is not None:
            about_it = dict(weights=file.name, source=there.source, environment=environment(place, 1))
            write_json(recorded, evaluation.to_json() | about_it)
            say(f"wrote {recorded}")
        if picture is not None:
            draw(lambda: confusion(evaluation.to_json(), picture))


def own_images(
    recipe: "Recipe", folder: Path, about: dict[str, Any], device: "torch.device"
) -> tuple["Recipe", "Data"]:
    """The recipe with a folder of images to test on, and these: all, but of what it was trained on what was held out.

    The sum of the training images tells, since a folder may have moved; weights without one are known by the path.
    """
    from vbcaps.data import DataError
    from vbcaps.training.loop import prepare

    was, total = recipe.data, about.get("data")
    same = was is not None and Path(was).resolve() == folder.resolve()
    recipe = dataclasses.replace(
        recipe, data=str(folder), image_size=side_of(recipe), viewpoint=None, match=0.0, hold_out="images"
    )
    if was is not None:
        with suppress(DataError):  # too few to hold one out: of its training images there were enough
            there = prepare(recipe, None, device)
            if there.sum == total or (total is None and same):
                return recipe, there
        if same:
            complain(f"{folder} is not as it was when the network was trained: all that is there is tested")
    return recipe, prepare(recipe, None, device, whole=True)


def side_of(recipe: "Recipe") -> int:
    """Of the images that its view crops or frames."""
    return recipe.image_size or (recipe.crop if recipe.data else FACTS[recipe.dataset].side)


@app.command(cls=Command)
def predict(
    images: Annotated[list[Path], typer.Argument(metavar="IMAGE...", help="images of any size, or folders of them")],
    weights: Annotated[
        Path | None, typer.Option(metavar="PATH", help="weights file, run folder or name; else the newest run in runs/")
    ] = None,
    picture: Annotated[Path, typer.Option(metavar="FILE", help="the images with their classes, as PNG")] = Path(
        "predictions.png"
    ),
    device: Device = "auto",
) -> None:
    """Say what images show: the class of each, its probability, and a picture of the first of them."""
    with clear_errors():
        from vbcaps.data import image_files, read_images
        from vbcaps.figures.run import predictions
        from vbcaps.training.checkpoint import RunError, load_weights
        from vbcaps.training.loop import predict_scores

        place = check_device(device)
        path = weights_file(weights or newest_run())
        net, recipe, classes, view, _ = load_weights(path, place)
        if net.in_channels not in (1, 3):
            raise RunError(f"{path} looks at {net.in_channels} channels at once; an image file has 1 or 3")
        files = [file for image in images for file in image_files(image) if file.resolve() != picture.resolve()]
        if not files:
            raise RunError(f"{picture} is the picture that is drawn: name another with --picture, or other images")
        pixels = read_images(files, side_of(recipe), net.in_channels)
        scores = predict_scores(net, pixels, view).cpu()
        rows = table("image", "class", numbers=("probability", "next"))
        for file, score in zip(files, scores, strict=True):
            (first, second), (j, k) = (x.tolist() for x in score.topk(2))
            rows.add_row(str(file), classes[j], percent(first), f"{classes[k]} {percent(second)}")
        say(rows, f"by {path}")
        if len(files) > DRAWN:
            say(f"the picture has the first {DRAWN} of {len(files):,}")
        draw(lambda: predictions(pixels[:DRAWN].numpy(), scores[:DRAWN].numpy(), classes, picture))


@app.command(cls=Command)
def recipes(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="show this one, its fields and their values")
    ] = None,
) -> None:
    """List the recipes, one for each experiment of the paper and the default; or show the fields of one."""
    from vbcaps.training.recipes import EXPERIMENTS, RECIPES, parameters

    if recipe is not None:
        show_recipe(recipe)
        return
    rows = table("recipe", "network", "routing", numbers=("parameters", "epochs", "paper"), spare=["parameters"])
    for name, make in RECIPES.items():
        one = make()
        if name.endswith("_fast"):
            continue
        network = ",".join(map(str, one.arch)) + ("" if one.stem == "conv" else f" {one.stem}")
        twin = f"/{RECIPES[f'{name}_fast']().epochs}" if f"{name}_fast" in RECIPES else ""
        routing = one.routing if one.network == "caps" else one.network
        rows.add_row(
            name, network, routing, f"{parameters(name):,}", f"{one.epochs}{twin}", EXPERIMENTS[name].paper or ""
        )
    say(
        rows,
        "paper: its test error in %; epochs: of NAME / of its fast twin, NAME_fast; `vbcaps recipes NAME` shows more",
    )


def show_recipe(name: str) -> None:
    """Print every field that the recipe uses, its value and its meaning."""
    from vbcaps.cli.flags import changed
    from vbcaps.training.recipe import not_for
    from vbcaps.training.recipes import experiment_of, parameters

    chosen = changed(name, {})
    rows = table("field", "value", "meaning")
    for field in dataclasses.fields(chosen):
        if field.name not in not_for(chosen.network, chosen.routing):
            value = getattr(chosen, field.name)
            words = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
            rows.add_row(field.name, words, field.metadata["help"])
    paper = experiment_of(name).paper
    say(rows, f"{parameters(name):,} parameters" + (f", the paper's test error {paper}%" if paper else ""))
    say(f"`vbcaps train {name}` takes each field as a flag, for example --epochs {chosen.epochs}")


@data_app.command("list", cls=Command)
def list_data(data_folder: DataFolder = None) -> None:
    """List the datasets, and whether their files are there."""
    with clear_errors():
        from vbcaps import data

        folder = data.data_folder(data_folder)
        rows = table("dataset", "what", "files")
        for name, facts in FACTS.items():
            there = "in the package" if name == "sample" else "yes" if (folder / name).is_dir() else "no"
            rows.add_row(name, facts.about, there)
        say(rows, f"files are in {folder}, one folder for each dataset; `vbcaps data fetch DATASET` fetches them")


@data_app.command("fetch", cls=Command)
def fetch_data(dataset: DatasetName, data_folder: DataFolder = None) -> None:
    """Fetch the official files of a dataset, and check them."""
    with clear_errors():
        from vbcaps import data

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, console=console, disable=not console.is_terminal) as bars:
            tasks: dict[str, Any] = {}

            def progress(name: str, done: int, total: int | None) -> None:
                if name not in tasks:
                    tasks[name] = bars.add_task(name, total=total)
                    if not console.is_terminal:
                        say(f"fetching {name}")
                bars.update(tasks[name], completed=done, total=total)

            rows = data.fetch(known_dataset(dataset), data_folder, progress)
        say(*(f"{row.state:8s} {row.path}" for row in rows))


@data_app.command("check", cls=Command)
def check_data(dataset: DatasetName, data_folder: DataFolder = None) -> None:
    """Check the official files of a dataset against their published sums."""
    with clear_errors():
        from vbcaps import data

        rows = data.check(known_dataset(dataset), data_folder)
        say(*(f"{row.state:8s} {row.path}" + (f": {row.note}" if row.note else "") for row in rows))
        states = {row.state for row in rows}
        if "damaged" in states or ("missing" in states and "present" not in states):
            raise typer.Exit(1)


@contextmanager
def clear_errors() -> Iterator[None]:
    """End the program with a message on errors that the user can mend; any other is a bug and shows its traceback.

    Throughout the package a ``ValueError`` is about an argument: as on any command line, that is exit code 2.
    """
    from vbcaps.data import DataError
    from vbcaps.training.checkpoint import RunError
    from vbcaps.training.loop import NonFinite

    try:
        yield
    except (DataError, RunError, NonFinite) as error:
        complain(str(error))
        raise typer.Exit(1) from error
    except ValueError as error:
        complain(str(error))
        raise typer.Exit(2) from error


def check_device(name: str) -> "torch.device":
    from vbcaps.training.loop import pick_device

    try:
        return pick_device(name)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--device") from error


def known_dataset(name: str) -> str:
    from vbcaps.training.recipe import nearest

    if name not in FACTS:
        raise typer.BadParameter(
            f"there is no dataset {name!r}{nearest(name, FACTS)} (`vbcaps data list`)", param_hint="DATASET"
        )
    return name


def weights_file(path: Path) -> Path:
    """The file itself; the weights of a run, the best where a validation share chose them, else the last; or, by their
    name, weights that come with the package."""
    path = resolved(path)
    for file in (path, path / "best.safetensors", path / "last.safetensors"):
        if file.is_file():
            return file
    from vbcaps.training.checkpoint import RunError, seed_folders
    from vbcaps.weights.shipped import names, shipped_file

    name = str(path)
    if path.exists() or path.suffix or len(path.parts) > 1:
        if seeds := seed_folders(path):
            raise RunError(f"{path} has a run for each seed: choose one, as {seeds[0]}")
        file = path / "last.safetensors" if path.is_dir() else path
        return shipped_file(name) if name in names() else file
    try:
        return shipped_file(name)
    except RunError as error:
        raise RunError(f"{name} is neither a file nor the folder of a run, and {error}") from None

"""The command line: ``vbcaps train``, ``eval``, ``predict``, ``uncertainty``, ``reconstruct`` and others.

Commands parse, call and print. PyTorch takes seconds to import, so each command imports modules that need it only when
it runs. `train`, whose flags come from the recipe, is a separate program (``vbcaps.cli.train``).
"""

import csv
import dataclasses
import io
import json
import os
import sys
from contextlib import chdir, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from vbcaps.cli.arguments import (
    Cache,
    DataFolder,
    Device,
    check_device,
    check_fits,
    check_outputs,
    clear_errors,
    read_named,
    use_cache,
)
from vbcaps.cli.explore import explore
from vbcaps.cli.export import export
from vbcaps.cli.fetching import bars
from vbcaps.cli.figures import figures
from vbcaps.cli.health import health
from vbcaps.cli.help import Command, Group
from vbcaps.cli.report import (
    complain,
    console,
    draw,
    evaluation_csv,
    percent,
    save_text,
    say,
    say_evaluation,
    table,
)  # fmt: skip
from vbcaps.cli.routing import routing
from vbcaps.cli.runs import newest_run
from vbcaps.cli.sweep import sweep
from vbcaps.cli.uncertainty import uncertainty
from vbcaps.cli.weights import weights_app
from vbcaps.data import FACTS
from vbcaps.weights import fetch

if TYPE_CHECKING:
    import torch

    from vbcaps import Model
    from vbcaps.training.recipe import Recipe
    from vbcaps.training.runlog import Data

app = typer.Typer(cls=Group, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
data_app = typer.Typer(cls=Group, no_args_is_help=True, help="List, fetch and check datasets.")
app.add_typer(data_app, name="data")
app.add_typer(weights_app, name="weights")
app.command("figures", cls=Command)(figures)
app.command("explore", cls=Command)(explore)
app.command("export", cls=Command)(export)
app.command("health", cls=Command)(health)
app.command("routing", cls=Command)(routing)
app.command("sweep", cls=Command)(sweep)
app.command("uncertainty", cls=Command)(uncertainty)

DRAWN = 60  # images in the picture of `predict`

DatasetName = Annotated[str, typer.Argument(metavar="DATASET", help="see `vbcaps data list`")]


def main() -> None:
    # Threads that spin while they wait make a CPU step five times slower if another program uses the cores. To wake one
    # that sleeps takes longer than many a pass, so GCC's threads spin for some microseconds first. Both variables are
    # read when PyTorch is imported.
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
        os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    pass_over_matplotlibrc()
    fetch.show = bars
    open_streams()
    app(prog_name="vbcaps")


def pass_over_matplotlibrc() -> None:
    """Keep Matplotlib from obeying a file in the working folder, which may be a stranger's: it can have TeX started."""
    if os.path.lexists("matplotlibrc"):
        with suppress(ImportError, OSError), chdir(Path(__file__).parent):
            import matplotlib  # noqa: F401  (it reads its settings when it is imported)


def open_streams() -> None:
    """Open the standard streams that are closed, as by ``>&-``: else a file would get their number, and the output."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


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
    for stream in (sys.stdout, sys.stderr):  # names of files, and signs such as ±, that the stream cannot encode
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


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
    weights: Annotated[Path, typer.Argument(help="a weights file, the folder of a run, or a name such as smallnorb")],
    crops: Annotated[int, typer.Option(metavar="INT", help="average over 1, 5 or a square number of crops")] = 1,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="test on your own images, one folder for each class: all of them, or those in test/; of a folder that "
            "the network was trained on, those that were held out",
        ),
    ] = None,
    cache: Cache = None,
    data_folder: DataFolder = None,
    device: Device = "auto",
    csv_file: Annotated[
        Path | None,
        typer.Option("--csv", metavar="FILE", help="write the measures of each class and the confusion matrix"),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="write the same, and the measures of all, as JSON")
    ] = None,
    picture: Annotated[Path | None, typer.Option(metavar="FILE", help="draw the confusion matrix, as PNG")] = None,
    ordinal: Annotated[
        bool, typer.Option("--ordinal", metavar="", help="the classes are ordered: also print the quadratic kappa")
    ] = False,
    save: Annotated[
        bool, typer.Option("--save", metavar="", help="write the result on several crops beside result.json")
    ] = False,
) -> None:
    """Test a network: its error with a 95% interval, and the precision, recall, F1 and AUC of each class.

    The recipe is in the weights file.
    """
    if save and data is not None:
        raise typer.BadParameter(
            "a run keeps tests of its recipe's data; --save cannot be combined with --data, drop one of them",
            param_hint="--save",
        )
    use_cache(cache)
    with clear_errors():
        import vbcaps
        from vbcaps.figures.run import confusion
        from vbcaps.training.environment import environment
        from vbcaps.training.files import write_json
        from vbcaps.training.loop import evaluate, prepare
        from vbcaps.training.runfolder import crops_file
        from vbcaps.weights.find import weights_file

        check_outputs(csv_file, json_file)
        place, file = check_device(device), weights_file(weights)
        kept = crops_file(file, crops) if save else None
        model = vbcaps.load(file, device=place)
        recipe, about = model.recipe, model.about
        with console.status(escape(f"reading {data or recipe.data or recipe.dataset}")):
            if data is None:
                there = prepare(recipe, data_folder, place)
            else:
                if recipe.objects > 1:
                    raise ValueError(
                        f"{weights} names {recipe.objects} objects in an image, and the images in {data} show one "
                        "each: test it without --data"
                    )
                recipe, there = own_images(recipe, data, about, place)
        check_fits(model, there, weights)
        try:
            with console.status(f"testing {len(there.test.labels):,} images"):
                evaluation = evaluate(model, there.test, crops=crops)
        except ValueError as error:
            raise typer.BadParameter(str(error), param_hint="--crops") from error
        what = f"{recipe.name}, tested on {recipe.data or recipe.dataset} ({there.source})"
        say_evaluation(evaluation, what, ordinal)
        if crops == 1 and data is None and about.get("test_error") is not None:
            say(f"the weights file says {percent(about['test_error'])}")
        if kept is not None:
            about_it = dict(weights=file.name, source=there.source, environment=environment(place, 1))
            write_json(kept, evaluation.to_json() | about_it)
            say(f"wrote {kept}")
        if csv_file is not None:
            save_text(csv_file, evaluation_csv(evaluation))
        if json_file is not None:
            about_it = dict(weights=model.name, trained=model.origin(), source=there.source)
            save_text(json_file, json.dumps(evaluation.to_json() | about_it, indent=2) + "\n")
        if picture is not None:
            draw(lambda: confusion(evaluation.to_json(), picture))


def own_images(
    recipe: "Recipe", folder: Path, about: dict[str, Any], device: "torch.device"
) -> tuple["Recipe", "Data"]:
    """Return the recipe with a folder of images to test on, and these images.

    All images are tested, except in the folder that the network was trained on: there, only those that were held out.
    The checksum of the training images identifies this folder, which may have moved; for weights without a checksum,
    the path does.
    """
    from vbcaps.data import DataError
    from vbcaps.training.loop import prepare
    from vbcaps.weights.inputs import side_of

    was, total = recipe.data, about.get("data")
    same = was is not None and Path(was).resolve() == folder.resolve()
    recipe = dataclasses.replace(
        recipe, data=str(folder), image_size=side_of(recipe), viewpoint=None, match=0.0, hold_out="images"
    )
    if was is not None:
        with suppress(DataError):  # too few images to hold any out, so the network was not trained on them
            there = prepare(recipe, None, device)
            if there.sum == total or (total is None and same):
                return recipe, there
        if same:
            complain(f"{folder} has changed since the network was trained: all its images are tested")
    return recipe, prepare(recipe, None, device, whole=True)


@app.command(cls=Command)
def predict(
    images: Annotated[
        list[Path],
        typer.Argument(metavar="IMAGE...", help="pictures of any size, folders of pictures, or .npy files of arrays"),
    ],
    weights: Annotated[
        Path | None, typer.Option(metavar="PATH", help="weights file, run folder or name; else the newest run in runs/")
    ] = None,
    csv_file: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="write the probability of every class")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="write the same as JSON")] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="draw the images with their classes, as PNG")
    ] = None,
    device: Device = "auto",
) -> None:
    """Classify images: print the class of each, and its probability; or all the objects that a network names."""
    with clear_errors():
        import vbcaps
        from vbcaps.figures.run import predictions

        check_outputs(csv_file, json_file)
        place = check_device(device)
        model = vbcaps.load(weights or newest_run(), device=place)
        say(f"weights {model.name}: {model.origin()}")
        names, pixels = read_named(model, images, picture)
        scores = model.predict(pixels)
        objects = model.recipe.objects
        rows = table("image", "class" if objects == 1 else "objects", numbers=("probability", "next"))
        for name, score in zip(names, scores, strict=True):
            best = score.argsort(descending=True, stable=True).tolist()
            sure = " ".join(percent(float(score[j])) for j in best[:objects])
            after = [f"{model.classes[j]} {percent(float(score[j]))}" for j in best[objects : objects + 1]]
            rows.add_row(name, model.together(score), sure, *after or [""])
        say(rows)
        for file, pack in ((csv_file, as_csv), (json_file, as_json)):
            if file is not None:
                save_text(file, pack(model, names, scores))
        if picture is not None:
            if len(names) > DRAWN:
                say(f"the picture has the first {DRAWN} of {len(names):,}")
            shown = model.view.as_bytes(pixels[:DRAWN]).numpy(), scores[:DRAWN].numpy()
            draw(lambda: predictions(*shown, model.classes, picture, objects=objects))


def as_csv(model: "Model", names: list[str], scores: "torch.Tensor") -> str:
    """Return a table of images: name, class, its probability, and the probability of every class; for each of several
    objects a class and a probability."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    objects = model.recipe.objects
    numbers = [""] if objects == 1 else [f" {k + 1}" for k in range(objects)]
    heads = [f"{what}{number}" for number in numbers for what in ("class", "probability")]
    writer.writerow(["image", *heads, *model.classes])
    for name, score in zip(names, scores, strict=True):
        best = score.topk(objects).indices.tolist()
        cells = [cell for j in best for cell in (model.classes[j], f"{score[j].item():.6f}")]
        writer.writerow([name, *cells, *(f"{p:.6f}" for p in score.tolist())])
    return text.getvalue()


def as_json(model: "Model", names: list[str], scores: "torch.Tensor") -> str:
    """Return the weights, the classes, and for each image its class, or the classes of its objects, and the probability
    of every class."""
    objects = model.recipe.objects

    def answer(score: "torch.Tensor") -> dict[str, Any]:
        best = [model.classes[j] for j in score.topk(objects).indices.tolist()]
        return dict(objects=best) if objects > 1 else {"class": best[0]}

    rows = [
        dict(
            image=name,
            **answer(score),
            probabilities=dict(zip(model.classes, score.tolist(), strict=True)),
        )
        for name, score in zip(names, scores, strict=True)
    ]
    content = dict(weights=model.name, trained=model.origin(), classes=model.classes, predictions=rows)
    return json.dumps(content, indent=2) + "\n"


@app.command(cls=Command)
def recipes(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="show this one, its fields and their values")
    ] = None,
) -> None:
    """List the recipes, one for each experiment of the paper and the default; or show the fields of one."""
    from vbcaps.training.recipes import EXPERIMENTS, RECIPES, parameters, parent

    if recipe is not None:
        show_recipe(recipe)
        return
    rows = table("recipe", "network", "routing", numbers=("parameters", "epochs", "paper"), spare=["parameters"])
    for name, make in RECIPES.items():
        one = make()
        if parent(name) != name:
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
        f"for a laptop, a few minutes each: {', '.join(name for name in RECIPES if name.endswith('_laptop'))}",
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

        with bars() as progress:
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


def known_dataset(name: str) -> str:
    from vbcaps.data.medmnist_table import MULTI_LABEL
    from vbcaps.data.official import OFFICIAL
    from vbcaps.training.recipe import nearest

    if name not in OFFICIAL and name not in MULTI_LABEL:
        raise typer.BadParameter(
            f"there is no dataset {name!r}{nearest(name, FACTS)} (`vbcaps data list`)", param_hint="DATASET"
        )
    return name


from vbcaps.cli import vae as _vae  # noqa: E402, F401  (it adds its commands to ``app``)

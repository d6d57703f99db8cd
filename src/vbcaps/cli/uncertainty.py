"""``vbcaps uncertainty``: how far the probabilities of a network, and its scores of uncertainty, can be trusted.

Axes: n image, c channel, h height, w width.
"""

import csv
import io
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.markup import escape

from vbcaps.cli.arguments import DataFolder, Device, check_device, check_fits, check_outputs, clear_errors, read_named
from vbcaps.cli.report import Table, console, draw, percent, save_text, say, table
from vbcaps.data import FACTS

if TYPE_CHECKING:
    from torch import Tensor

    from vbcaps import Model
    from vbcaps.data import Split
    from vbcaps.training.runlog import Data
    from vbcaps.uncertainty import Look

SEED = 0  # of the images that are used where there are more
DRAWN = 6  # scores whose curves are in the picture, those with the least risk
SAME = dict.fromkeys(("sample", "fashion-mnist"), ("sample", "fashion-mnist")) | {"affnist": ("affnist", "mnist")}
NONE = "-"  # in place of a measure that these images do not have


def uncertainty(
    weights: Annotated[
        Path, typer.Argument(metavar="MODEL", help="a name such as smallnorb, the folder of a run, or a weights file")
    ],
    images: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[IMAGE...]", help="score these pictures, folders or .npy files, not the test set"),
    ] = None,
    strangers: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="datasets or folders of images of other things, with commas, to be told"),
    ] = None,
    limit: Annotated[
        int, typer.Option("--images", metavar="INT", min=0, help="use so many images of each set at random; 0: all")
    ] = 4000,
    densities: Annotated[
        str | None,
        typer.Option(metavar="NAMES", help="fit densities of features, as class_caps.m, to training images first"),
    ] = None,
    per_class: Annotated[
        bool,
        typer.Option(
            "--per-class", metavar="", help="fit these densities with a covariance for each class, not one for all"
        ),
    ] = False,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="write weights with these densities")] = None,
    csv_file: Annotated[
        Path | None, typer.Option("--csv", metavar="FILE", help="write every score of each IMAGE")
    ] = None,
    picture: Annotated[
        Path | None, typer.Option(metavar="FILE", help="draw calibration, and the error by coverage, as PNG")
    ] = None,
    data_folder: DataFolder = None,
    device: Device = "auto",
) -> None:
    """Measure calibration and scores of uncertainty on the test set; or score images."""
    check_options(images, strangers, save, densities, csv_file, picture)
    if per_class and densities is None:
        raise typer.BadParameter("it is about the densities of --densities: give their names", param_hint="--per-class")
    with clear_errors():
        import torch

        import vbcaps
        from vbcaps.training.loop import prepare
        from vbcaps.uncertainty.scores import needs_one_answer

        check_outputs(save, csv_file)
        model = vbcaps.load(weights, device=check_device(device))
        say(f"weights {model.name}: {model.origin()}")
        needs_one_answer(model)
        names = [] if strangers is None else [name.strip() for name in strangers.split(",")]
        for name in names:
            check_stranger(model, name)
        data = None
        if not images or densities is not None:
            with console.status(escape(f"reading {model.recipe.data or model.recipe.dataset}")):
                data = prepare(model.recipe, data_folder, torch.device("cpu"))
            check_fits(model, data, weights)
        if data is not None and densities is not None:
            fit(model, some_of(data.train, limit), [name.strip() for name in densities.split(",")], not per_class)
            if save is not None:
                say(f"wrote {model.save(save)}")
        if images:
            say_images(model, images, csv_file)
        elif data is not None:
            measure(model, data, names, limit, data_folder, picture)


def check_options(
    images: list[Path] | None,
    strangers: str | None,
    save: Path | None,
    densities: str | None,
    csv_file: Path | None,
    picture: Path | None,
) -> None:
    """Raise an error for options that do not go together."""
    for name, value in (("--strangers", strangers), ("--picture", picture)):
        if images and value is not None:
            raise typer.BadParameter(
                "it needs the test set: it cannot be combined with IMAGE, drop one of them", param_hint=name
            )
    if csv_file is not None and not images:
        raise typer.BadParameter("it writes the scores of images: name them after MODEL", param_hint="--csv")
    if save is not None and densities is None:
        raise typer.BadParameter(
            "it writes weights with the densities that --densities fits: give their names", param_hint="--save"
        )


def check_stranger(model: "Model", name: str) -> None:
    """Raise an error for a name of nothing, and for the data that the network is made for."""
    from vbcaps.training.recipe import nearest

    def refuse(why: str) -> typer.BadParameter:
        return typer.BadParameter(f"{why} (`vbcaps data list` lists datasets)", param_hint="--strangers")

    if not name:
        raise refuse("a name is empty: give datasets or folders of images with commas between them")
    if name not in FACTS and not Path(name).is_dir():
        raise refuse(f"{name!r} is neither a dataset nor a folder of images{nearest(name, FACTS)}")
    folder, dataset = model.recipe.data, model.recipe.dataset
    own = name in SAME.get(dataset, (dataset,)) if folder is None else Path(name).resolve() == Path(folder).resolve()
    if own:
        raise refuse(f"{name!r} are this network's own images, no strangers: name others")


def some_of(split: "Split", limit: int) -> "Split":
    """Return at most ``limit`` images of a split at random, the same each time; all where it is 0."""
    return split.take(chosen(len(split.labels), limit))


def chosen(count: int, limit: int) -> "Tensor":
    import torch

    order = torch.randperm(count, generator=torch.Generator().manual_seed(SEED))
    return order[: limit or count].sort().values


def fit(model: "Model", train: "Split", names: list[str], tied: bool) -> None:
    """Fit densities to training images; an unknown feature is an error before the network looks at all of them."""
    from vbcaps.uncertainty import fit_densities, look
    from vbcaps.uncertainty.scores import joined

    features = look(model, train.images[:1]).features
    for name in names:
        joined(features, name.split("+"))
    before = {name: model.densities[name] for name in names if name in model.densities}
    with console.status(f"fitting densities to {len(train.labels):,} training images"):
        fit_densities(model, train.images, train.labels, names, tied=tied)
    say(f"densities of {', '.join(names)}, {covariance(tied)}, fitted to {len(train.labels):,} training images")
    for name, density in before.items():
        say(f"the density of {name} in the weights, {covariance(density.tied)}, is replaced")


def covariance(tied: bool) -> str:
    return "one covariance for all classes" if tied else "a covariance for each class"


def looked(model: "Model", images: "Tensor", what: str) -> "Look":
    """Let the network look at images, while a line says so."""
    from vbcaps.uncertainty import look

    with console.status(escape(f"looking at {len(images):,} images{what}")):
        return look(model, images, features=bool(model.densities))


# --- the test set ----------------------------------------------------------------------------------------------------


def measure(
    model: "Model", data: "Data", names: list[str], limit: int, data_folder: Path | None, picture: Path | None
) -> None:
    """Print how good probabilities and scores are on test images, and how scores tell strangers."""
    from vbcaps.uncertainty.scores import scores_of

    test = some_of(data.test, limit)
    seen = looked(model, test.images, "")
    wrong = seen.logits.argmax(1) != test.labels
    familiar = scores_of(model, seen)
    strange = {}
    for name in names:
        pixels = strange_images(model, name, limit, data_folder)
        strange[name] = scores_of(model, looked(model, pixels, f" of {name}"))
    recipe, count = model.recipe, len(test.labels)
    which = "the test set" if count == len(data.test.labels) else f"{count:,} of {len(data.test.labels):,} test images"
    say(f"{recipe.name}, {which} of {recipe.data or recipe.dataset} ({data.source})")
    say(calibration(seen.logits, test.labels, model.temperature), about_temperature(model), "")
    say(of_scores(familiar, wrong, strange), *about_posterior(model))
    say(
        "errors: AUROC with which a score finds wrong answers; risk: mean error over all shares of images answered",
        *(["AUROC, AUPR and FPR95 are those of telling strangers from test images"] if strange else []),
    )
    if picture is not None:
        draw(lambda: draw_measures(seen.logits, test.labels, model.temperature, familiar, picture))


def calibration(logits: "Tensor", labels: "Tensor", temperature: float) -> Table:
    """Return the measures of the probabilities, without the temperature and, if there is one, with it."""
    from vbcaps.uncertainty import brier, ece, nll
    from vbcaps.uncertainty.metrics import BINS

    columns = {"T = 1": logits.softmax(1)}
    if temperature != 1:
        columns[f"T = {temperature:.3g}"] = (logits / temperature).softmax(1)
    rows = table("measure", numbers=list(columns))
    parts = [*columns.values()]
    rows.add_row("error", *(percent(float((p.argmax(1) != labels).double().mean())) for p in parts))
    rows.add_row(f"ECE, {BINS} bins", *(percent(ece(p, labels)) for p in parts))
    rows.add_row("adaptive ECE", *(percent(ece(p, labels, adaptive=True)) for p in parts))
    rows.add_row("NLL", *(f"{nll(p, labels):.4f}" for p in parts))
    rows.add_row("Brier score", *(f"{brier(p, labels):.4f}" for p in parts))
    return rows


def about_temperature(model: "Model") -> str:
    """Return a sentence that says where the temperature comes from."""
    if "temperature" not in model.about:
        return "there is no temperature: training with a --validation share fits one"
    source = model.about.get("temperature_from", "held-out images")
    said = f"temperature {model.temperature:.3g}, fitted on {source}"
    if "test" not in source:
        return said
    return f"{said}: these flatter it, since that half is judged, too; results/temperatures.csv judges the other half"


def about_posterior(model: "Model") -> list[str]:
    """Return a sentence for a network without a posterior, whose scores are left out."""
    from vbcaps.uncertainty.scores import needs_posterior

    try:
        needs_posterior(model)
    except ValueError as error:
        return [str(error)]
    return []


def of_scores(familiar: dict[str, "Tensor"], wrong: "Tensor", strange: dict[str, dict[str, "Tensor"]]) -> Table:
    """Return what each score is worth: for finding errors, and for telling each set of strangers."""
    from vbcaps.uncertainty import aupr, auroc, fpr95, risk_coverage

    headings = [heading for name in strange for heading in (f"{name}: AUROC", "AUPR", "FPR95")]
    rows = table("score", numbers=("errors", "risk", *headings))
    both = bool(wrong.any()) and not bool(wrong.all())
    for name, score in familiar.items():
        found = f"{auroc(score[~wrong], score[wrong]):.3f}" if both else NONE
        cells = [f"{measure(score, other[name]):.3f}" for other in strange.values() for measure in (auroc, aupr, fpr95)]
        rows.add_row(name, found, percent(risk_coverage(score, wrong).area()), *cells)
    return rows


def strange_images(model: "Model", name: str, limit: int, data_folder: Path | None) -> "Tensor":
    """Return images of other things in the network's size and channels; two channels get the grey image twice."""
    from vbcaps.data import image_files, load_dataset
    from vbcaps.weights.inputs import PICTURES, read_pixels, side_of

    channels, side = model.net.in_channels, side_of(model.recipe)
    planes = channels if channels in PICTURES else 1
    with console.status(escape(f"reading {name}")):
        if name in FACTS:
            found = some_of(load_dataset(name, data_folder).test, limit).images
            pixels = read_pixels(found if found.shape[1] in PICTURES else found[:, :1], side, planes)
        else:
            files = image_files(Path(name))
            pixels = read_pixels([files[k] for k in chosen(len(files), limit).tolist()], side, planes)
    pixels = pixels.expand(-1, channels, -1, -1)
    return model.view.from_bytes(pixels)


def draw_measures(
    logits: "Tensor", labels: "Tensor", temperature: float, familiar: dict[str, "Tensor"], path: Path
) -> Path:
    """Draw reliability without and with the temperature, and the curves of the scores with the least risk."""
    from vbcaps.figures.uncertainty import overview
    from vbcaps.uncertainty import reliability, risk_coverage

    bins = {"without a temperature": reliability(logits.softmax(1), labels)}
    if temperature != 1:
        bins[f"temperature {temperature:.3g}"] = reliability((logits / temperature).softmax(1), labels)
    wrong = logits.argmax(1) != labels
    curves = {name: risk_coverage(score, wrong) for name, score in familiar.items()}
    best = sorted(curves, key=lambda name: curves[name].area())[:DRAWN]
    return overview(bins, {name: curves[name] for name in best}, path)


# --- images ----------------------------------------------------------------------------------------------------------


def say_images(model: "Model", images: list[Path], csv_file: Path | None) -> None:
    """Print class, probability and scores of each image, and write all scores where asked."""

    from vbcaps.uncertainty.scores import OF_ALL, scores_of

    names, pixels = read_named(model, images, None)
    seen = looked(model, pixels, "")
    probability, answer = (seen.logits / model.temperature).softmax(1).max(1)
    classes = [model.classes[j] for j in answer.tolist()]
    found = scores_of(model, seen)
    shown = [name for name in found if name != "max_softmax"]  # it is 1 - the probability
    spare = [name for name in shown if name not in OF_ALL and not name.startswith("density.")]
    rows = table("image", "class", numbers=("probability", *shown), spare=spare)
    for k, (name, label) in enumerate(zip(names, classes, strict=True)):
        rows.add_row(name, label, percent(float(probability[k])), *(f"{float(found[one][k]):.4g}" for one in shown))
    say(rows, "a score is larger for an image that is less familiar (`vbcaps.uncertainty.scores` says how)")
    say(*about_posterior(model))
    if csv_file is not None:
        save_text(csv_file, as_csv(names, classes, probability, found))


def as_csv(names: list[str], classes: list[str], probability: "Tensor", found: dict[str, "Tensor"]) -> str:
    """Return a table of images: name, class, its probability, and every score."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["image", "class", "probability", *found])
    for k, (name, label) in enumerate(zip(names, classes, strict=True)):
        writer.writerow([name, label, *(f"{float(x[k]):.6g}" for x in (probability, *found.values()))])
    return text.getvalue()

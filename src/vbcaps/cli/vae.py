"""``vbcaps reconstruct``, ``tweak`` and ``sample``: what a Capsule-VAE does beside classifying."""

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vbcaps.cli.help import Command
from vbcaps.cli.main import Device, app, check_device, clear_errors, read_named
from vbcaps.cli.report import draw, say, table
from vbcaps.cli.runs import newest_run

if TYPE_CHECKING:
    from vbcaps import Model

Weights = Annotated[
    Path | None,
    typer.Option(
        metavar="PATH", help="weights file, run folder or name, such as vae_mnist; else the newest run in runs/"
    ),
]
DRAWN = 60  # images in the picture of `reconstruct`


@app.command(cls=Command)
def reconstruct(
    images: Annotated[
        list[Path],
        typer.Argument(metavar="IMAGE...", help="pictures of any size, folders of pictures, or .npy files of arrays"),
    ],
    weights: Weights = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="draw images and reconstructions, as PNG")] = Path(
        "reconstructions.png"
    ),
    device: Device = "auto",
) -> None:
    """Decode images again from the pose of their class capsule: print the squared error of each, and draw them."""
    with clear_errors():
        from vbcaps.figures.vae import reconstructions

        model = vae(weights, device)
        names, pixels = read_named(model, images, out)
        seen, decoded, scores = model.view.test(pixels), model.reconstruct(pixels), model.predict(pixels)
        rows = table("image", "class", numbers=("squared error a pixel",))
        for name, score, x, y in zip(names, scores, seen, decoded, strict=True):
            rows.add_row(name, model.classes[int(score.argmax())], f"{(x - y).square().mean():.4f}")
        say(rows)
        if len(names) > DRAWN:
            say(f"the picture has the first {DRAWN} of {len(names):,}")
        draw(lambda: reconstructions(model, pixels[:DRAWN], out))


@app.command(cls=Command)
def tweak(
    image: Annotated[Path, typer.Argument(metavar="IMAGE", help="a picture of any size, or a .npy file of one image")],
    entry: Annotated[
        int | None, typer.Option(metavar="INT", help="move only this entry of the pose, from 0 to 15; else all")
    ] = None,
    values: Annotated[
        str | None,
        typer.Option(
            metavar="NUMBER,...",
            help="numbers added to an entry; else from -3 to 3 of its standard deviations in training images",
        ),
    ] = None,
    label: Annotated[
        str | None, typer.Option("--class", metavar="NAME", help="decode the capsule of this class; else the predicted")
    ] = None,
    weights: Weights = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="draw a row for each entry, as PNG")] = Path("tweaks.png"),
    device: Device = "auto",
) -> None:
    """Decode an image with entries of its pose moved, and draw what changes."""
    moved = None if values is None else numbers(values)
    with clear_errors():
        from vbcaps.figures.vae import entries

        model = vae(weights, device)
        draw(lambda: entries(model, model.read(image), out, entry, moved, label))


@app.command(cls=Command)
def sample(
    weights: Weights = None,
    count: Annotated[int, typer.Option(metavar="INT", min=1, help="samples of each class")] = 12,
    source: Annotated[
        str, typer.Option(metavar="TEXT", help="draw poses like those of each class, or from the prior (class, prior)")
    ] = "class",
    seed: Annotated[int, typer.Option(metavar="INT", min=0, help="seed of the draws")] = 0,
    out: Annotated[Path, typer.Option(metavar="FILE", help="draw a row for each class, as PNG")] = Path("samples.png"),
    device: Device = "auto",
) -> None:
    """Decode poses that no image had, and draw samples of every class."""
    with clear_errors():
        from vbcaps.figures.vae import samples

        model = vae(weights, device)
        draw(lambda: samples(model, out, count, source, seed))


def vae(weights: Path | None, device: str) -> "Model":
    """Return the model of weights, and print where it comes from; a model without a decoder is an error."""
    import vbcaps
    from vbcaps.weights.decode import vae_of

    model = vbcaps.load(weights or newest_run(), device=check_device(device))
    vae_of(model)
    say(f"weights {model.name}: {model.origin()}")
    return model


def numbers(words: str) -> list[float]:
    try:
        found = [float(word) for word in words.split(",")]
    except ValueError:
        found = [math.nan]
    if not all(map(math.isfinite, found)):
        raise typer.BadParameter(
            f"values must be finite numbers with commas between them, such as -0.5,0,0.5; got {words!r}",
            param_hint="--values",
        )
    return found

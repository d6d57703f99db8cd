"""``vbcaps export``: write a network as one file that other programs run."""

from pathlib import Path
from typing import Annotated

import typer

from vbcaps.cli.arguments import clear_errors
from vbcaps.cli.report import console, say


def export(
    name: Annotated[Path, typer.Argument(metavar="MODEL", help="a name such as smallnorb, a run or a weights file")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="the file, such as net.onnx or net.pt2")],
    format: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="onnx or torch-export; else what the suffix of FILE says, .onnx or .pt2"),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--input", metavar="TYPE", help="images of uint8 (the default), or of float32 from 0 to 1"),
    ] = None,
    side: Annotated[
        int | None, typer.Option(metavar="INT", help="side of the images, if the network takes more than one")
    ] = None,
) -> None:
    """Export a network with its preprocessing: from images to probabilities, as ONNX or PyTorch's exported program."""
    with clear_errors():
        from vbcaps.weights.export import export

        with console.status(f"exporting to {out}"):
            done = export(name, out, format=format, dtype=dtype, side=side)
        images, scores = done.facts["input"], done.facts["output"]
        say(
            f"images {' '.join(map(str, images['shape']))}, {images['dtype']} with values {images['values']}, to "
            f"probabilities {' '.join(map(str, scores['shape']))}",
            f"they differ from PyTorch's by at most {done.difference:.1e}",
            f"wrote {done.path}",
        )

"""What commands share: arguments, reading images by name, and errors that end the program."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vbcaps.cli.report import complain

if TYPE_CHECKING:
    import torch

    from vbcaps import Model
    from vbcaps.training.runlog import Data

DataFolder = Annotated[
    Path | None,
    typer.Option(metavar="FOLDER", help="folder of the datasets; default: VBCAPS_DATA, or the user's cache"),
]
Cache = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="keep the decoded images of a large folder here; default: VBCAPS_CACHE, or `decoded` beside the datasets",
    ),
]
Device = Annotated[str, typer.Option(metavar="NAME", help="auto (a GPU where there is one), cpu, cuda or cuda:1")]


def use_cache(folder: Path | None) -> None:
    """Let this program keep decoded images in a folder."""
    if folder is not None:
        os.environ["VBCAPS_CACHE"] = str(folder)


def check_outputs(*files: Path | None) -> None:
    """Raise an error for a file that cannot be written, before anything is computed and another file is written."""
    from vbcaps.training.files import RunError

    for file in files:
        if file is None:
            continue
        if os.path.isdir(file):
            raise RunError(f"cannot write {file}: it is a folder")
        if not os.path.isdir(file.parent):
            raise RunError(f"cannot write {file}: there is no folder {file.parent}")


def check_fits(model: "Model", data: "Data", weights: Path) -> None:
    """Raise an error if the data have other classes or channels than the model."""
    from vbcaps.training.files import RunError

    channels, there = model.net.in_channels, data.test.images.shape[1]
    if bool(model.view.low) != bool(data.view.low):
        kinds = "8 bits", "more than 8 bits"
        trained, given = (kinds[bool(view.low)] for view in (model.view, data.view))
        raise RunError(f"{weights} was trained on images of {trained}; the data have {given}: save them alike")
    if (data.classes, there) != (model.classes, channels):
        raise RunError(
            f"{weights} tells {', '.join(model.classes)} apart in images of {channels} channels; "
            f"the data have {', '.join(data.classes)} in {there}"
        )


def read_named(model: "Model", images: list[Path], picture: Path | None) -> tuple[list[str], "torch.Tensor"]:
    """Return the name of each image and their pixels, without the file that the picture will be drawn to."""
    from vbcaps.data import image_files
    from vbcaps.training.files import RunError
    from vbcaps.weights.inputs import together

    names: list[str] = []
    parts: list[torch.Tensor] = []
    for image in images:
        if image.suffix.lower() == ".npy":
            parts.append(model.read(image))
            count = len(parts[-1])
            names += [str(image)] if count == 1 else [f"{image}[{k}]" for k in range(count)]
            continue
        files = [file for file in image_files(image) if picture is None or file.resolve() != picture.resolve()]
        if files:
            parts.append(model.read(files))
            names += map(str, files)
    if not names:
        raise RunError(f"{picture} is the picture that is drawn: name another with --picture, or other images")
    return names, together(parts)


@contextmanager
def clear_errors() -> Iterator[None]:
    """End the program with a message on errors that the user can fix; any other error is a bug and shows its traceback.

    Throughout the package a ``ValueError`` concerns an argument, so it ends the program with exit code 2.
    """
    from vbcaps.data import DataError
    from vbcaps.training.files import RunError
    from vbcaps.training.loop import NonFinite

    try:
        yield
    except (DataError, RunError, NonFinite) as error:
        complain(str(error))
        raise typer.Exit(1) from error
    except ValueError as error:
        complain(str(error))
        raise typer.Exit(2) from error
    except OSError as error:
        if error.filename is None:
            raise
        complain(f"cannot use {os.fsdecode(error.filename)}: {error.strerror}")
        raise typer.Exit(1) from error


def check_device(name: str) -> "torch.device":
    from vbcaps.training.loop import pick_device

    try:
        return pick_device(name)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--device") from error

"""The folder of a run, and weights files: what is written, so that it is never half written, and read again.

    recipe.json         what was trained
    environment.json    with what: commit, command, versions, device; the same under "resumed" each time it went on
    metrics.csv         a row for each epoch
    state.safetensors   all that is needed to go on, with the position and the rows so far as JSON in its header
    last.safetensors    weights; their recipe, classes and view are in the header, so the file is enough to use them
    best.safetensors    the same with the lowest validation error, where there is a validation share
    result.json         the last to be written: the run is finished
    crops5.json         a test of the same weights on the mean of 5 crops, where `vbcaps eval --record` made one

A file is written beside its place and moved there, so at every moment it is the old one or the new one.
"""

import csv
import dataclasses
import functools
import io
import json
import os
import platform
import subprocess
import sys
import threading
import zlib
from pathlib import Path
from typing import Any, NamedTuple

try:
    import fcntl
except ImportError:  # Windows: folders are not locked there
    fcntl = None  # type: ignore[assignment]

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse_tensors
from safetensors.torch import save as serialise
from torch import Tensor

import vbcaps
from vbcaps.data import Split, View
from vbcaps.models import Network, current_names
from vbcaps.training.recipe import Recipe

COLUMNS = ("epoch", "loss", "train_error", "validation_error", "lr", "seconds", "images_per_second")
FREE = ("save_seconds", "data")  # fields that may differ when a run goes on; the data have a sum of their own
WEIGHTS, STATE = "vbcaps weights 1", "vbcaps state 1"


class RunError(Exception):
    """A run folder or weights file that cannot be used. The message says what to do."""


# --- files -----------------------------------------------------------------------------------------------------------


def write(path: Path, content: bytes) -> None:
    """Replace a file in one step; a reader, or a crash, finds the old one or the new one."""
    beside = path.with_name(f".{path.name}.part")
    try:
        with open(beside, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise RunError(f"cannot write {path}: {error.strerror}; what was there before is unchanged") from error


class Writer:
    """Writes files while the run goes on: the disk takes its time, which a GPU's epoch of a second should not wait for.

    The files of one call are written in their order, and only after those of the call before, so that what a crash
    leaves is what it would leave without a thread. What went wrong is raised by the next ``writer()`` or ``wait()``.
    """

    def __init__(self) -> None:
        self.thread: threading.Thread | None = None
        self.error: Exception | None = None

    def __call__(self, files: dict[Path, bytes]) -> None:
        self.wait()
        self.thread = threading.Thread(target=self.work, args=(files,))
        self.thread.start()

    def work(self, files: dict[Path, bytes]) -> None:
        try:
            for path, content in files.items():
                write(path, content)
        except Exception as error:
            self.error = error

    def wait(self) -> None:
        """Until everything is on the disk."""
        if self.thread is not None:
            self.thread.join()
        self.thread, error, self.error = None, self.error, None
        if error is not None:
            raise error


def write_json(path: Path, content: Any) -> None:
    write(path, (json.dumps(content, indent=2) + "\n").encode())


def read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError:
        raise RunError(f"there is no {path}: not the folder of a run") from None
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise RunError(f"cannot read {path}: it has no fields")
    return content


def lock(folder: Path) -> int | None:
    """Keep every other run out of the folder until what this returns is closed, or the process ends."""
    if fcntl is None:
        return None
    held = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        raise RunError(f"{folder} is in use by another run: wait for its end, or choose another folder") from None
    except OSError:  # a file system that has no locks
        pass
    return held


def check_writable(folder: Path, size: int) -> None:
    """Make the folder and see that ``size`` bytes fit, now rather than after the first epoch."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".room.part"
        try:
            with open(probe, "wb") as file:
                file.write(bytes(size))
                file.flush()
                os.fsync(file.fileno())
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        needs = f"a run needs about {size / 1e6:.0f} MB there"
        raise RunError(f"cannot write in {folder}: {error.strerror}; {needs}, choose another folder") from error


def read_recipe(folder: Path) -> Recipe:
    try:
        return Recipe.from_json(read_json(Path(folder) / "recipe.json"))
    except (ValueError, TypeError) as error:
        raise RunError(f"{folder}/recipe.json: {error}") from error


def seed_folders(folder: Path) -> list[Path]:
    """Where a folder has a run for each of several seeds, theirs in order; none where it is a run itself."""
    if (folder / "recipe.json").exists():
        return []
    found = [path.parent for path in folder.glob("seed*/recipe.json") if path.parent.name[4:].isdigit()]
    return sorted(found, key=lambda path: int(path.name[4:]))


def read_result(folder: Path) -> dict[str, Any]:
    return read_json(Path(folder) / "result.json")


def crops_file(weights: Path, crops: int) -> Path:
    """Where a test of a run's weights on several crops belongs: beside its test on one crop, which there must be."""
    if crops < 2:
        raise RunError(f"the test on one crop is in result.json already: crops must be above 1, got {crops}")
    folder = weights.parent
    result = read_result(folder)
    if result["test"] is None or result["weights"] != weights.name:
        raise RunError(f"{folder}/result.json has no test of {weights.name}: only of tested weights more is recorded")
    return folder / f"crops{crops}.json"


def read_metrics(folder: Path) -> list[dict[str, float | None]]:
    """The rows of metrics.csv; None where a column is empty."""
    path = Path(folder) / "metrics.csv"
    try:
        with open(path, newline="") as file:
            return [{k: float(v) if v else None for k, v in row.items()} for row in csv.DictReader(file)]
    except (OSError, ValueError) as error:
        raise RunError(f"cannot read {path}: {error}") from error


def pack_metrics(rows: list[dict[str, Any]]) -> bytes:
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue().encode()


# --- what is in a safetensors file -----------------------------------------------------------------------------------


def pack(tensors: dict[str, Tensor], about: dict[str, Any]) -> bytes:
    """A safetensors file with ``about`` as JSON in its header: one string, for several would come in any order."""
    contents = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    return serialise(contents, {"vbcaps": json.dumps(about)})


def unpack(content: bytes, what: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What ``pack`` was given, ``about`` empty for another program's file; nothing in it is executed."""
    try:
        tensors = parse_tensors(content)
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        about = json.loads(header.get("__metadata__", {}).get("vbcaps", "{}"))
    except (SafetensorError, ValueError, KeyError) as error:
        raise RunError(f"{what} is damaged or no safetensors file: {error}") from error
    if not isinstance(about, dict):
        raise RunError(f"{what} is damaged: its header has no fields")
    return tensors, about


def fingerprint(*splits: Split | None) -> str:
    """A checksum of images and labels, so that a run does not go on with other data."""
    total = 0
    for split in splits:
        if split is not None:
            for x in (split.images, split.labels):
                total = zlib.crc32(x.cpu().contiguous().numpy().data, total)
    return f"{total:08x}"


def check_same(saved: dict[str, Any], recipe: Recipe, folder: Path) -> None:
    """An error that names the fields in which the recipe of a folder differs from the one that is to go on."""
    try:
        saved = Recipe.from_json(saved).to_json()  # with what has come to recipes since, as it is without
    except (TypeError, ValueError) as error:
        raise RunError(f"{folder} has a recipe that vbcaps {vbcaps.__version__} cannot read: {error}") from error
    mine = recipe.to_json()
    other = [k for k in mine if k not in FREE and saved[k] != mine[k]]
    if other:
        lines = "; ".join(f"{k} was {saved[k]!r}, is now {mine[k]!r}" for k in other)
        raise RunError(f"{folder} is a run of another recipe ({lines}): resume it as it was, or choose another folder")


# --- weights ---------------------------------------------------------------------------------------------------------


class Weights(NamedTuple):
    """A weights file: the network with its weights, and all it takes to use it."""

    net: Network
    recipe: Recipe
    classes: tuple[str, ...]
    view: View
    metadata: dict[str, Any]  # epoch, validation and test error, sum of the data, version, commit


def pack_weights(net: Network, recipe: Recipe, classes: tuple[str, ...], view: View, **metadata: Any) -> bytes:
    """Weights, with recipe, classes and view as JSON in the header; ``metadata`` as well."""
    about = dict(
        format=WEIGHTS,
        recipe=recipe.to_json(),
        classes=list(classes),
        view=dataclasses.asdict(view),
        in_channels=net.in_channels,
        metadata=dict(metadata, version=vbcaps.__version__, commit=commit()),
    )
    return pack(net.state_dict(), about)


def load_weights(path: str | Path, device: str | torch.device = "cpu") -> Weights:
    """The network of a weights file, in eval mode; an error for a file of anything else."""
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        kept, last = (path.parent / name for name in ("state.safetensors", "last.safetensors"))
        begun = kept.exists() and not last.exists()
        hint = f"; its run has not come to the end of an epoch: vbcaps train --resume {path.parent}" if begun else ""
        raise RunError(f"cannot read the weights {path}: {error.strerror}{hint}") from error
    tensors, about = unpack(content, str(path))
    if about.get("format") != WEIGHTS:
        kind = "a saved state: use last.safetensors beside it" if about.get("format") == STATE else "another program's"
        raise RunError(f"{path} has no vbcaps weights, it is {kind}")
    try:
        recipe, view, classes = (
            Recipe.from_json(about["recipe"]),
            View.from_json(about["view"]),
            tuple(about["classes"]),
        )
        metadata, net = about["metadata"], recipe.net(about["in_channels"], len(classes))
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{path} has a header that this version ({vbcaps.__version__}) cannot read: {error}") from error
    put(net.state_dict(), tensors, str(path))
    return Weights(net.to(device).eval(), recipe, classes, view, metadata)


def put(places: dict[str, Tensor], tensors: dict[str, Tensor], what: str) -> None:
    """Copy ``tensors``, of this or an earlier version, into those of the same name; an error where they differ."""
    tensors = current_names(tensors)
    wrong = [f"{k} is missing" for k in places if k not in tensors]
    wrong += [f"{k} is not known" for k in tensors if k not in places]
    wrong += [
        f"{k} is {tuple(tensors[k].shape)}, the network's {tuple(places[k].shape)}"
        for k in places
        if k in tensors and tensors[k].shape != places[k].shape
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise RunError(f"{what} is of another network: {'; '.join(wrong[:3])}{more}")
    with torch.no_grad():
        for name, place in places.items():
            place.copy_(tensors[name])


# --- where it ran ----------------------------------------------------------------------------------------------------


@functools.cache
def commit() -> str:
    """Of the source this runs from; of VBCAPS_COMMIT where it is no repository."""
    if named := os.environ.get("VBCAPS_COMMIT"):
        return named
    here = Path(__file__).parent
    try:
        git = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty"], capture_output=True, text=True, timeout=10
        )
        tracked = subprocess.run(["git", "-C", str(here), "ls-files", "--error-unmatch", __file__], capture_output=True)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return git.stdout.strip() if git.returncode == 0 == tracked.returncode else "unknown"


def environment(device: torch.device, processes: int) -> dict[str, Any]:
    """The note is whatever VBCAPS_NOTE says, such as that other runs shared the GPU."""
    import safetensors

    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return dict(
        vbcaps=vbcaps.__version__,
        commit=commit(),
        command=[Path(sys.argv[0]).name, *sys.argv[1:]],
        device=gpu or platform.processor() or platform.machine(),
        device_type=device.type,
        processes=processes,
        threads=torch.get_num_threads(),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        torch=torch.__version__,
        cuda=torch.version.cuda,
        cudnn=torch.backends.cudnn.version() if device.type == "cuda" else None,
        safetensors=safetensors.__version__,
        note=os.environ.get("VBCAPS_NOTE", ""),
    )


def went_on(first: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """The environment in which a run began, with that in which it goes on; the same one twice is there once."""
    resumed = first.get("resumed", [])
    return first | dict(resumed=resumed if now in resumed else [*resumed, now])

"""The folder of a run: its files, and how to read them.

    recipe.json         the recipe
    environment.json    commit, command, versions, device and initial weights; "resumed" lists the environments in which
                        the run was resumed
    metrics.csv         a row for each epoch; that of a VAE also has the parts of its loss
    state.safetensors   everything that a run needs to resume; its header has the position and the rows so far as JSON
    state.before.safetensors  the state before that, until the run is finished
    last.safetensors    the last weights; the header has their recipe, classes and view, so the file alone is usable
    best.safetensors    the weights that are best in validation, if there is a validation share
    result.json         the result, written last: its presence means that the run is finished
    crops5.json         a test of the same weights on the mean of 5 crops, if `vbcaps eval --save` made one

Nothing here needs PyTorch.
"""

import csv
import hashlib
import io
import os
import re
from itertools import islice
from pathlib import Path
from typing import Any

from vbcaps import disk
from vbcaps.training.files import RunError, read_json
from vbcaps.training.recipe import RANGES, Recipe

STATE, BEFORE = "state.safetensors", "state.before.safetensors"
SUMMED = {"recipe.json": disk.RECIPE, "metrics.csv": disk.METRICS}
MOST_EPOCHS = int(RANGES["epochs"][1])
LATEST = "latest"  # the name in runs/ that leads to the run begun last
# Each run has these columns; a VAE has more, the names of which its rows give.
COLUMNS = ("epoch", "loss", "train_error", "validation_error", "lr", "seconds", "images_per_second")


def read_recipe(folder: Path) -> Recipe:
    """Return the recipe of a run."""
    path = Path(folder) / "recipe.json"
    check_sum(path)
    try:
        return Recipe.from_json(read_json(path))
    except (ValueError, TypeError) as error:
        raise RunError(f"{folder}/recipe.json: {error}") from error


def seed_folders(folder: Path) -> list[Path]:
    """Return the runs of several seeds in a folder, in the order of seeds, or [] if the folder is a run itself."""
    return [] if (folder / "recipe.json").exists() else numbered(folder, "seed")


def fold_folders(folder: Path) -> list[Path]:
    """Return the runs of a cross-validation in a folder, in the order of folds, or []."""
    return numbered(folder, "fold")


def numbered(folder: Path, word: str) -> list[Path]:
    """Return the runs in a folder whose names are a word and a number in ASCII digits, in the order of the numbers."""
    found = [path.parent for path in folder.glob(f"{word}*/recipe.json")]
    named = [path for path in found if re.fullmatch(r"[0-9]{1,10}", path.name.removeprefix(word))]
    return sorted(named, key=lambda path: int(path.name.removeprefix(word)))


def read_result(folder: Path) -> dict[str, Any]:
    """Return the fields of ``result.json``."""
    return read_json(Path(folder) / "result.json", disk.RESULT)


def sums_of(folder: Path) -> dict[str, str]:
    """Return the checksums of the files of a finished run that no other file could check, for ``result.json``."""
    found = {}
    for name, limit in SUMMED.items():
        try:
            found[name] = sum_of(folder / name, limit)
        except OSError as error:
            raise RunError(f"cannot read {folder / name}: {error.strerror}") from error
    return found


def sum_of(path: Path, limit: int) -> str:
    """Return the SHA-256 of a text, whatever the ends of its lines."""
    return hashlib.sha256(disk.read_bytes(path, limit).replace(b"\r\n", b"\n")).hexdigest()


def check_sum(path: Path) -> None:
    """Raise an error for a file of a finished run that has changed since; earlier versions recorded no checksums."""
    try:
        sums = read_result(path.parent).get("sums")
        known = sums.get(path.name) if isinstance(sums, dict) else None
        if known is None or sum_of(path, SUMMED[path.name]) == known:
            return
    except (RunError, OSError):  # no result yet, or one that tells of its damage where it is read
        return
    raise RunError(f"{path} is damaged or was changed: its SHA-256 is not the one in result.json, {ascii(known)[:80]}")


def crops_file(weights: Path, crops: int) -> Path:
    """Return the file for a test of a run's weights on several crops, beside ``result.json``.

    Args:
        weights: a weights file in a run's folder; ``result.json`` there must have a test of it on one crop.
        crops: how many crops, above 1.
    """
    if crops < 2:
        raise RunError(f"the test on one crop is in result.json already: crops must be above 1, got {crops}")
    folder = weights.parent
    result = read_result(folder)
    if result["test"] is None or result["weights"] != weights.name:
        raise RunError(f"{folder}/result.json has no test of {weights.name}: only a test of tested weights is saved")
    return folder / f"crops{crops}.json"


def read_metrics(folder: Path) -> list[dict[str, float | None]]:
    """Return the rows of ``metrics.csv``; a value is None where its column is empty."""
    path = Path(folder) / "metrics.csv"
    check_sum(path)
    try:
        table = csv.DictReader(lines(disk.read_bytes(path, disk.METRICS)))
        rows = [{k: float(v) if v else None for k, v in row.items()} for row in islice(table, MOST_EPOCHS + 1)]
    except (ValueError, TypeError):
        raise RunError(f"cannot read {path}: it has something else in the place of a number") from None
    except (OSError, csv.Error) as error:
        raise RunError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error
    if len(rows) > MOST_EPOCHS:
        raise RunError(f"cannot read {path}: it has more than {MOST_EPOCHS:,} rows, the most epochs of a run")
    return rows


def lines(content: bytes) -> io.TextIOWrapper:
    """Return the lines of a table, which are not all decoded at once."""
    return io.TextIOWrapper(io.BytesIO(content), "utf-8", newline="")


def pack_metrics(rows: list[dict[str, Any]]) -> bytes:
    """Return ``metrics.csv`` with these rows."""
    text = io.StringIO(newline="")
    table = csv.DictWriter(text, list(rows[0]) if rows else COLUMNS, lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    return text.getvalue().encode()


def resolved(path: Path) -> Path:
    """Return the run that ``runs/latest`` leads to; return any other path unchanged."""
    if path.name != LATEST or not (path.is_symlink() or path.is_file()):
        return path
    try:
        name = os.readlink(path) if path.is_symlink() else disk.read_text(path, 4096).strip()
    except UnicodeDecodeError:
        raise RunError(f"cannot read {path}: it is no text; remove it") from None
    except OSError as error:
        raise RunError(f"cannot read {path}: {error.strerror}; remove it") from error
    if not name or "\0" in name:
        raise RunError(f"cannot read {path}: it names no run; remove it")
    return path.with_name(name) if Path(name).name == name else path.parent / name

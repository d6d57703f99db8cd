"""Groups of images that belong together, such as all images of a patient: no group is on both sides of a split."""

import csv
import io
from pathlib import Path

import torch
from torch import Tensor

from vbcaps import disk
from vbcaps.data.dataset import DataError, Split

TABLES = (".csv", ".tsv")
OF_FILES = ("file", "filename", "path", "image", "name")  # names of the column that has the files
COLUMNS = dict(instance=0, elevation=1, azimuth=2, lighting=3)  # of smallNORB's info
FOLDER = "folder"
EXPECTED = "groups must be a table of files and groups, FILE.csv or FILE.csv:COLUMN, or `folder` for CLASS/GROUP/image"


def groups_of_files(words: str, root: Path, paths: list[Path]) -> Tensor:
    """Return the number of the group of each of your own images.

    Args:
        words: ``patients.csv``, ``patients.csv:COLUMN``, or ``folder``: images lie in ``CLASS/GROUP/``, and a group
            may have images of several classes.
        root: the folder of the images.
        paths: the images.
    """
    if words == FOLDER:
        names: list[str | None] = [_folder_of(path, root) for path in paths]
    else:
        table = _read(words)
        names = [_find(table, path, root) for path in paths]
        missing = [path for path, name in zip(paths, names, strict=True) if name is None]
        if missing:
            more = f" and of {len(missing) - 1} others" if len(missing) > 1 else ""
            raise DataError(f"{words}: has no group of {missing[0].relative_to(root)}{more}")
    numbers = {name: k for k, name in enumerate(dict.fromkeys(names))}
    return torch.tensor([numbers[name] for name in names])


def groups_of_info(words: str, split: Split, name: str) -> Tensor:
    """Return the groups of smallNORB's images: toys (``instance``), or images with the same value of another column."""
    if split.info is None:
        raise DataError(f"groups are for your own images and for smallNORB: {name} does not say which belong together")
    if words not in COLUMNS:
        raise DataError(f"{name}: groups must be one of {tuple(COLUMNS)}, got {words!r}")
    values = split.info[:, COLUMNS[words]]
    return split.labels * 100 + values if words == "instance" else values  # toys are numbered within their class


def _folder_of(path: Path, root: Path) -> str:
    inner = path.relative_to(root).parts[:-1]
    classes = inner[1:] if inner[0] in ("train", "test", "val", "valid", "validation") else inner
    if len(classes) < 2:
        raise DataError(f"groups='folder': {path} lies in the folder of its class; expected CLASS/GROUP/{path.name}")
    return classes[1]


def _read(words: str) -> dict[str, str]:
    """Return the group of each file in a table."""
    file, column = Path(words), ""
    if file.suffix.lower() not in TABLES:
        head, _, column = words.rpartition(":")
        file = Path(head)
    if file.suffix.lower() not in TABLES:
        raise DataError(f"{EXPECTED}, got {words!r}")
    try:
        with io.TextIOWrapper(disk.opened(file, disk.TABLE), "utf-8-sig", newline="") as stream:
            first = stream.readline()
            stream.seek(0)
            rows = list(csv.reader(stream, delimiter=max(",;\t", key=first.count)))
    except UnicodeDecodeError as error:
        raise DataError(f"cannot read the groups in {file}: it is no text in UTF-8") from error
    except (OSError, csv.Error) as error:
        raise DataError(f"cannot read the groups in {file}: {getattr(error, 'strerror', None) or error}") from error
    if len(rows) < 2 or len(rows[0]) < 2:
        raise DataError(f"{file}: expected a heading such as file,patient and a row for each image")
    heading = [name.strip() for name in rows[0]]
    of_file = next((k for k, name in enumerate(heading) if name.lower() in OF_FILES), 0)
    others = [name for k, name in enumerate(heading) if k != of_file]
    if column and column not in others:
        raise DataError(f"{file}: has no column {column!r}: its columns are {', '.join(others)}")
    if not column and len(others) > 1:
        raise DataError(f"{file}: has the columns {', '.join(others)}: say which, {file}:{others[0]}")
    at = heading.index(column or others[0])
    table: dict[str, str] = {}
    for number, row in enumerate(rows[1:], 2):
        if not any(row):
            continue
        if len(row) <= max(at, of_file) or not row[at].strip():
            raise DataError(f"{file}, line {number}: has no group")
        name, group = row[of_file].strip().replace("\\", "/").removeprefix("./"), row[at].strip()
        if table.setdefault(name, group) != group:
            raise DataError(f"{file}, line {number}: {name} is in two groups, {table[name]} and {group}")
    return table


def _find(table: dict[str, str], path: Path, root: Path) -> str | None:
    """Return the group of a file, which the table names by its path in the folder or by its name alone."""
    inner = path.relative_to(root).as_posix()
    for key in (inner, inner.partition("/")[2], path.name, path.stem):
        if key in table:
            return table[key]
    return None

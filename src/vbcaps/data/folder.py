"""Your own images: a folder of class folders.

Either ``train`` and ``test`` (or ``val``), each with one folder for every class, or the class folders alone, of which a
class-balanced fifth is held out for the test. Beside ``train`` and ``test``, ``val`` chooses the best epoch.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vbcaps.data.dataset import DataError, Dataset, Split
from vbcaps.data.errors import written
from vbcaps.data.groups import groups_of_files
from vbcaps.data.opening import TURNS, decoding, opened
from vbcaps.data.pixels import SUFFIXES, Form, Header, decode, fit_picture, form_of, read_header
from vbcaps.data.splits import held_out, hold_out
from vbcaps.data.stored import Images, Progress, all_of, entry_of, in_memory, mapped, store, workers

TEST_NAMES = ("test", "val", "valid", "validation")
NO_CLASSES = ("__MACOSX",)  # a folder in archives that were made on a Mac
SYSTEM_FILES = ("thumbs.db", "desktop.ini")
SIZE, TEST_FRACTION, SEED = 32, 0.2, 0
DEEPEST = 100  # folders, one in another
BLOCK = 4096  # images whose headers are read before more are asked for
LAYOUT = "expected one folder for each class with images in it, or train/ and test/ with such folders"
Files = dict[str, list[Path]]  # images by class
T = TypeVar("T")


class Survey(NamedTuple):
    """The content of a folder of images, as file names and image headers tell it."""

    classes: tuple[str, ...]
    train: tuple[int, ...]  # images of each class, after the test images have been held out
    validation: int  # images in a folder of their own
    test: int
    side: int  # median over all images of the shorter side, in pixels
    form: Form  # channels and dtype
    left_out: tuple[str, ...]  # sentences about files that are not read


def survey(root: Path, axes: str = "auto", whole: bool = False) -> Survey:
    """Survey a folder that ``image_folder`` can read; raise the same errors, except for damaged pixels and groups."""
    with listing(root):
        parts = _parts(root)
    paths = _paths(parts)
    headers = _headers(paths, axes)
    sides = sorted(min(header.height, header.width) for header in headers)
    counts = {name: [len(members) for members in files.values()] for name, files in parts.items()}
    if "test" not in parts and not whole:
        _check_enough(root, parts["train"])
        counts["test"] = [held_out(count, TEST_FRACTION) for count in counts["train"]]
        counts["train"] = [count - held for count, held in zip(counts["train"], counts["test"], strict=True)]
    validation, test = (sum(counts.get(name, [])) for name in ("validation", "test"))
    with listing(root):
        left_out = tuple(_left_out(root, paths))
    side, form = sides[len(sides) // 2], form_of(paths, headers)
    return Survey(tuple(parts["train"]), tuple(counts["train"]), validation, test, side, form, left_out)


def image_folder(
    root: Path,
    size: int | None = None,
    whole: bool = False,
    axes: str = "auto",
    progress: Progress | None = None,
    groups: str | None = None,
) -> Dataset:
    """Read images at ``size`` (32): the shorter side is resized to it, the longer cropped; grey if all images are grey.

    Images that are small in all are in memory; others are decoded once to a file (``vbcaps.data.stored``), from which
    only those of the present batch are read.

    Args:
        root: the folder.
        size: height and width of the images.
        whole: class folders alone are not divided: all their images are both the training set and the test set.
        axes: where the channels of arrays are, see ``vbcaps.data.pixels.channel_axis``.
        progress: is told how many images have been decoded, where this takes long.
        groups: says which images belong together, see ``vbcaps.data.groups``.
    """
    size = size or SIZE
    with listing(root):
        parts = _parts(root)
    paths, begin = _paths(parts), 0
    together = None if groups is None else groups_of_files(groups, root, paths)
    images = _images_of(root, paths, size, axes, progress)
    splits = {}
    for name, files in parts.items():
        labels = torch.tensor([label for label, members in enumerate(files.values()) for _ in members])
        here = slice(begin, begin + len(labels))
        splits[name] = Split(images[here], labels, groups=None if together is None else together[here])
        begin += len(labels)
    train, test = splits["train"], splits.get("test")
    if test is None and whole:
        test = train
    elif test is None:
        _check_enough(root, parts["train"])
        train, test = hold_out(train, TEST_FRACTION, SEED)
    name = root.name or str(root)
    return Dataset(name, train, test, tuple(parts["train"]), f"the images in {name}", splits.get("validation"))


@contextmanager
def listing(root: Path) -> Iterator[None]:
    """Turn the error of a folder that cannot be listed into one that names it."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{error.filename or root}: cannot be listed ({error.strerror})") from error


def _images_of(root: Path, paths: list[Path], size: int, axes: str, progress: Progress | None) -> Tensor:
    with listing(root):
        entry = entry_of(root, paths, size, axes)
    found = mapped(entry, len(paths), size)
    if found is None:
        form = form_of(paths, _headers(paths, axes))
        if len(paths) * form.channels * size * size * np.dtype(form.dtype).itemsize <= in_memory():
            return torch.stack(_each(lambda path: torch.from_numpy(decode(path, size, form, axes)), paths))
        found = store(entry, paths, size, form, axes, progress)
    return cast(Tensor, Images(found))  # it has a tensor's methods


def _headers(paths: list[Path], axes: str) -> list[Header]:
    return _each(lambda path: read_header(path, axes), paths)


def _paths(parts: dict[str, Files]) -> list[Path]:
    return [path for files in parts.values() for members in files.values() for path in members]


def _parts(root: Path) -> dict[str, Files]:
    """Return the files of ``train`` and, where they have folders, of ``test`` and ``validation``."""
    train = root / "train"
    others = [root / name for name in TEST_NAMES if (root / name).is_dir()]
    if not train.is_dir() or not others:
        return dict(train=_class_files(train if train.is_dir() else root))
    parts = dict(train=_class_files(train))
    for name, folder in zip(("test", "validation"), others, strict=False):
        parts[name] = _class_files(folder)
        if parts[name].keys() != parts["train"].keys():
            differ = ", ".join(sorted(parts[name].keys() ^ parts["train"].keys()))
            raise DataError(f"{root}: the classes of train and {folder.name} differ: {differ}")
    return parts


def _check_enough(root: Path, files: Files) -> None:
    if single := [name for name, members in files.items() if len(members) < 2]:
        raise DataError(f"{root / single[0]}: has one image only, but one is needed to train and one to test")


def _left_out(root: Path, taken: list[Path]) -> Iterator[str]:
    """Return sentences that say which files of a folder are not read, with one example each."""
    known = set(taken)
    files = [path for path in walked(root) if path.is_file() and path not in known]
    files = [path for path in files if not _hidden(path.relative_to(root)) and path.name.lower() not in SYSTEM_FILES]
    images = [path for path in files if path.suffix.lower() in SUFFIXES]
    others = [path for path in files if path.suffix.lower() not in SUFFIXES]
    if images:
        yield f"{_count(images, 'image')} in no class folder, left out: {images[0]}"
    if others:
        yield f"{_count(others, 'file')} of no known image format, left out: {others[0]}"


def _count(paths: list[Path], what: str) -> str:
    return f"{len(paths)} {what}{'s' if len(paths) > 1 else ''}"


def _hidden(path: Path) -> bool:
    return any(name.startswith(".") or name in NO_CLASSES for name in path.parts)


def image_files(path: Path) -> list[Path]:
    """Return the images in a folder and in its folders, in order; a path to a file is returned as it is."""
    if not path.is_dir():
        return [path]
    with listing(path):
        files = _images(path)
    if files:
        return files
    raise DataError(f"{path}: has no images ({', '.join(sorted(SUFFIXES))})")


def read_images(paths: list[Path], size: int, channels: int) -> Tensor:
    """Read image files as uint8 ``n channels size size``."""
    return torch.stack(_each(lambda path: read_image(path, size, channels), paths))


def read_image(path: Path, size: int, channels: int, frame: int | None = None) -> Tensor:
    """Read an image file as uint8 ``channels size size``, see ``fit_image``."""
    with opened(path) as file:
        if file is not None:
            with decoding(file, TURNS):
                return fit_image(file, size, channels, str(path), frame)
    return torch.from_numpy(decode(path, size, Form(channels, "uint8")))


def fit_image(image: Image.Image, size: int, channels: int, name: str, frame: int | None = None) -> Tensor:
    """Return a picture as uint8 ``channels size size``: upright, on white where transparent, 16 bits as 8.

    Args:
        image: of any size: the shorter side is resized to ``size``, the longer cropped.
        size: height and width of the result.
        channels: 1 for grey, 3 for colour.
        name: the name of the picture in errors.
        frame: an image of exactly this height and width keeps them.
    """
    return torch.from_numpy(fit_picture(image, size, channels, name, frame))


def _class_files(folder: Path) -> Files:
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder")
    visible = (path for path in sorted(folder.iterdir()) if not _hidden(Path(path.name)))
    folders = [path for path in visible if path.is_dir()]
    _check_folders(folder, folders)
    files = {path.name: _images(path) for path in folders}
    if not files:
        loose = "; its images are in no class folder" if _images(folder) else ""
        raise DataError(f"{folder}: has no class folders: {LAYOUT}{loose}")
    if len(files) == 1:
        (name,) = files
        deeper = [path.name for path in sorted((folder / name).iterdir()) if path.is_dir() and not _hidden(path)]
        hint = f"; did you mean {folder / name}?" if len(deeper) > 1 else ""
        raise DataError(f"{folder}: has one class only, {name}: {LAYOUT}{hint}")
    if empty := [name for name, members in files.items() if not members]:
        raise DataError(f"{folder / empty[0]}: has no images ({', '.join(sorted(SUFFIXES))}): {LAYOUT}")
    return files


def _check_folders(folder: Path, folders: list[Path]) -> None:
    """Check that class folders have names that can be printed, and that links among them lead to other folders."""
    own = {folder.resolve(): folder}
    for path in folders:
        if written(path.name) != path.name or set(path.name) & {"\t", "\n"}:
            raise DataError(f"{path}: the name of a class has characters that cannot be printed: rename the folder")
        leads = path.resolve()
        if leads in own or folder.resolve().is_relative_to(leads):
            raise DataError(f"{path}: is a link to {own.get(leads, leads)}, which is no class of its own: remove it")
        own[leads] = path


def _images(folder: Path) -> list[Path]:
    """Return the images in a folder and in its folders, but for hidden ones, such as an editor's copies."""
    paths = (path for path in walked(folder) if path.suffix.lower() in SUFFIXES and path.is_file())
    return [path for path in paths if not _hidden(path.relative_to(folder))]


def walked(folder: Path) -> list[Path]:
    """Return all that is in a folder and in its folders, in order, but not what is behind a link to a folder.

    A folder that cannot be listed raises ``OSError``, unless it is a hidden one.
    """
    found: list[Path] = []
    left = [(folder, 0)]
    while left:
        here, depth = left.pop()
        if depth > DEEPEST:
            raise DataError(f"{folder}: has folders more than {DEEPEST} deep, one in another: {LAYOUT}")
        try:
            with os.scandir(here) as entries:
                listed = list(entries)
        except OSError:
            if _hidden(here.relative_to(folder)):
                continue
            raise
        for entry in listed:
            found.append(here / entry.name)
            if entry.is_dir(follow_symlinks=False):
                left.append((found[-1], depth + 1))
    return sorted(found)


def _each(function: Callable[[Path], T], paths: list[Path]) -> list[T]:
    """Call a function for every path, in threads: Pillow decodes outside Python's lock.

    One error names all paths that raise a ``DataError``, so that the user can fix them together.
    """

    def call(path: Path) -> T | DataError:
        try:
            return function(path)
        except DataError as error:
            return error

    found: list[T | DataError] = []
    with ThreadPoolExecutor(workers()) as pool:
        for begin in range(0, len(paths), BLOCK):  # a call that waits takes two kilobytes
            found.extend(pool.map(call, paths[begin : begin + BLOCK]))
    errors = [one for one in found if isinstance(one, DataError)]
    if errors:
        raise all_of([str(error) for error in errors]) from errors[0]
    return [one for one in found if not isinstance(one, DataError)]

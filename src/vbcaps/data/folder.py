"""Your own images: a folder of class folders.

Either ``train`` and ``test`` (or ``val``), each with one folder for every class, or the class folders alone, of which a
class-balanced fifth is held out for the test. Beside ``train`` and ``test``, ``val`` chooses the best epoch.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

from vbcaps.data.dataset import DataError, Dataset, Split
from vbcaps.data.splits import held_out, hold_out

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
TEST_NAMES = ("test", "val", "valid", "validation")
NO_CLASSES = ("__MACOSX",)  # a folder in archives that were made on a Mac
SYSTEM_FILES = ("thumbs.db", "desktop.ini")
SHOWN = 5  # how many unreadable files an error names
SIZE, TEST_FRACTION, SEED = 32, 0.2, 0
GREY = {"1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L", "I;16N"}
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
    left_out: tuple[str, ...]  # sentences about files that are not read


def survey(root: Path) -> Survey:
    """Survey a folder that ``image_folder`` can read; raise the same errors, except for damaged pixels."""
    parts = _parts(root)
    paths = [path for files in parts.values() for members in files.values() for path in members]
    sides = sorted(_each(_shorter_side, paths))
    counts = {name: [len(members) for members in files.values()] for name, files in parts.items()}
    if "test" not in parts:
        _check_enough(root, parts["train"])
        counts["test"] = [held_out(count, TEST_FRACTION) for count in counts["train"]]
        counts["train"] = [count - held for count, held in zip(counts["train"], counts["test"], strict=True)]
    validation, test = (sum(counts.get(name, [])) for name in ("validation", "test"))
    left_out = tuple(_left_out(root, paths))
    return Survey(tuple(parts["train"]), tuple(counts["train"]), validation, test, sides[len(sides) // 2], left_out)


def image_folder(root: Path, size: int | None = None, whole: bool = False) -> Dataset:
    """Read images at ``size`` (32): the shorter side is resized to it, the longer cropped; grey if all images are grey.

    With ``whole`` class folders alone are not divided: all their images are both the training set and the test set.
    """
    size = size or SIZE
    parts = _parts(root)
    paths = [path for files in parts.values() for members in files.values() for path in members]
    channels = 1 if all(_each(is_grey, paths)) else 3
    splits = {name: _read(files, size, channels) for name, files in parts.items()}
    train, test = splits["train"], splits.get("test")
    if test is None and whole:
        test = train
    elif test is None:
        _check_enough(root, parts["train"])
        train, test = hold_out(train, TEST_FRACTION, SEED)
    name = root.name or str(root)
    return Dataset(name, train, test, tuple(parts["train"]), f"the images in {name}", splits.get("validation"))


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
    files = [path for path in sorted(root.rglob("*")) if path.is_file() and path not in known]
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


def _shorter_side(path: Path) -> int:
    with _opened(path) as image:
        return min(image.size)


def image_files(path: Path) -> list[Path]:
    """Return the images in a folder and in its folders, in order; a path to a file is returned as it is."""
    if not path.is_dir():
        return [path]
    if files := _images(path):
        return files
    raise DataError(f"{path}: has no images ({', '.join(sorted(SUFFIXES))})")


def read_images(paths: list[Path], size: int, channels: int) -> Tensor:
    """Read image files as uint8 ``n channels size size``."""
    return torch.stack(_each(lambda path: read_image(path, size, channels), paths))


def read_image(path: Path, size: int, channels: int, frame: int | None = None) -> Tensor:
    """Read an image file as uint8 ``channels size size``, see ``fit_image``."""
    with _opened(path) as file:
        return fit_image(file, size, channels, str(path), frame)


def fit_image(image: Image.Image, size: int, channels: int, name: str, frame: int | None = None) -> Tensor:
    """Return a picture as uint8 ``channels size size``: upright, on white where transparent, 16 bits as 8.

    Args:
        image: of any size: the shorter side is resized to ``size``, the longer cropped.
        size: height and width of the result.
        channels: 1 for grey, 3 for colour.
        name: the name of the picture in errors.
        frame: an image of exactly this height and width keeps them.
    """
    size = size if frame is None or image.size != (frame, frame) else frame
    kind = image.format  # a copy does not have it
    image = ImageOps.exif_transpose(image)
    if image.mode == "F" or (image.mode == "I" and kind == "TIFF"):
        raise DataError(f"{name}: pixels of 32 bits have no agreed range: save it with 8 or 16 bits")
    if image.mode.startswith("I"):  # 16 bits of grey, which Pillow's own conversion would clip
        image = Image.fromarray((np.clip(np.asarray(image), 0, 65535) // 257).astype(np.uint8))
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    image = ImageOps.fit(image.convert("L" if channels == 1 else "RGB"), (size, size), Image.Resampling.BILINEAR)
    return torch.from_numpy(np.array(image)).view(size, size, channels).permute(2, 0, 1).contiguous()


def is_grey(path: Path) -> bool:
    with _opened(path) as image:
        return image.mode in GREY


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    try:
        with Image.open(path) as image:
            yield image
    except UnidentifiedImageError as error:  # its message names the path
        raise DataError(f"{path}: cannot be read as an image") from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{path}: cannot be read as an image ({error})") from error


def _class_files(folder: Path) -> Files:
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder")
    visible = (path for path in sorted(folder.iterdir()) if not _hidden(Path(path.name)))
    files = {path.name: _images(path) for path in visible if path.is_dir()}
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


def _images(folder: Path) -> list[Path]:
    """Return the images in a folder and in its folders, but for hidden ones, such as an editor's copies."""
    paths = (path for path in sorted(folder.rglob("*")) if path.suffix.lower() in SUFFIXES and path.is_file())
    return [path for path in paths if not _hidden(path.relative_to(folder))]


def _read(files: Files, size: int, channels: int) -> Split:
    paths = [path for members in files.values() for path in members]
    labels = [label for label, members in enumerate(files.values()) for _ in members]
    return Split(read_images(paths, size, channels), torch.tensor(labels))


def _each(function: Callable[[Path], T], paths: list[Path]) -> list[T]:
    """Call a function for every path, in threads: Pillow decodes outside Python's lock.

    One error names all paths that raise a ``DataError``, so that the user can fix them together.
    """

    def call(path: Path) -> T | DataError:
        try:
            return function(path)
        except DataError as error:
            return error

    with ThreadPoolExecutor() as pool:
        found = list(pool.map(call, paths))
    errors = [one for one in found if isinstance(one, DataError)]
    if errors:
        more = f"; and {len(errors) - SHOWN} more" if len(errors) > SHOWN else ""
        raise DataError("; ".join(map(str, errors[:SHOWN])) + more) from errors[0]
    return [one for one in found if not isinstance(one, DataError)]

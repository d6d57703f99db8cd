"""Your own images: a folder of class folders.

Either ``train`` and ``test`` (or ``val``), each with one folder for every class, or the class folders alone, of which a
class-balanced fifth is held out for the test; or all are the test, where nothing is trained on them.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from vbcaps.data.dataset import DataError, Dataset, Split
from vbcaps.data.splits import hold_out

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".pbm", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
TEST_NAMES = ("test", "val", "valid", "validation")
SIZE, TEST_FRACTION, SEED = 32, 0.2, 0
GREY = {"1", "L", "LA", "La", "I", "I;16", "I;16B", "I;16L", "I;16N"}
LAYOUT = "expected one folder for each class with images in it, or train/ and test/ with such folders"
Files = dict[str, list[Path]]  # images by class
T = TypeVar("T")


def image_folder(root: Path, size: int | None = None, whole: bool = False) -> Dataset:
    """Images of ``size`` (32): the shorter side is resized to it, the longer cropped. Grey if all are, else colour.

    With ``whole`` class folders alone are not shared out: all their images are both the training set and the test.
    """
    size = size or SIZE
    train_folder = root / "train"
    test_folder = next((root / name for name in TEST_NAMES if (root / name).is_dir()), None)
    if train_folder.is_dir() and test_folder is not None:
        parts = [_class_files(train_folder), _class_files(test_folder)]
        if parts[0].keys() != parts[1].keys():
            differ = ", ".join(sorted(parts[0].keys() ^ parts[1].keys()))
            raise DataError(f"{root}: the classes of train and {test_folder.name} differ: {differ}")
    else:
        parts = [_class_files(train_folder if train_folder.is_dir() else root)]
    paths = [path for files in parts for members in files.values() for path in members]
    channels = 1 if all(_each(is_grey, paths)) else 3
    splits = [_read(files, size, channels) for files in parts]
    classes = tuple(parts[0])
    if len(splits) == 1 and whole:
        splits = [splits[0], splits[0]]
    elif len(splits) == 1:
        if single := [name for name, members in parts[0].items() if len(members) < 2]:
            raise DataError(f"{root / single[0]}: one image only, but there must be one to train and one to test")
        splits = [*hold_out(splits[0], TEST_FRACTION, SEED)]
    return Dataset(root.name or str(root), splits[0], splits[1], classes, f"the images in {root.name or root}")


def image_files(path: Path) -> list[Path]:
    """The images in a folder and in its folders, in order; what is no folder is itself."""
    if not path.is_dir():
        return [path]
    if files := _images(path):
        return files
    raise DataError(f"{path}: has no images ({', '.join(sorted(SUFFIXES))})")


def read_images(paths: list[Path], size: int, channels: int) -> Tensor:
    """Image files as uint8 ``n channels size size``."""
    return torch.stack(_each(lambda path: read_image(path, size, channels), paths))


def read_image(path: Path, size: int, channels: int) -> Tensor:
    """Return one image file as uint8 ``channels size size``; see ``fit_image``."""
    try:
        with Image.open(path) as file:
            return fit_image(file, size, channels, str(path))
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{path}: cannot be read as an image ({error})") from error


def fit_image(image: Image.Image, size: int, channels: int, name: str) -> Tensor:
    """Return a picture as uint8 ``channels size size``: upright, on white where transparent, 16 bits as 8.

    Args:
        image: of any size: the shorter side is resized to ``size``, the longer cropped.
        size: height and width of the result.
        channels: 1 for grey, 3 for colour.
        name: of the picture, in errors.
    """
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
    try:
        with Image.open(path) as image:
            return image.mode in GREY
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataError(f"{path}: cannot be read as an image ({error})") from error


def _class_files(folder: Path) -> Files:
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder")
    visible = (path for path in sorted(folder.iterdir()) if not path.name.startswith("."))
    files = {path.name: _images(path) for path in visible if path.is_dir()}
    if not files:
        raise DataError(f"{folder}: has no class folders: {LAYOUT}")
    if len(files) == 1:
        raise DataError(f"{folder}: has one class only, {next(iter(files))}: {LAYOUT}")
    if empty := [name for name, members in files.items() if not members]:
        raise DataError(f"{folder / empty[0]}: has no images ({', '.join(sorted(SUFFIXES))}): {LAYOUT}")
    return files


def _images(folder: Path) -> list[Path]:
    """In it and in its folders; what is hidden, as an editor's copies are, is not looked at."""
    paths = (path for path in sorted(folder.rglob("*")) if path.suffix.lower() in SUFFIXES and path.is_file())
    return [path for path in paths if not any(part.startswith(".") for part in path.relative_to(folder).parts)]


def _read(files: Files, size: int, channels: int) -> Split:
    paths = [path for members in files.values() for path in members]
    labels = [label for label, members in enumerate(files.values()) for _ in members]
    return Split(read_images(paths, size, channels), torch.tensor(labels))


def _each(function: Callable[[Path], T], paths: list[Path]) -> list[T]:
    """In threads: Pillow decodes outside Python's lock."""
    with ThreadPoolExecutor() as pool:
        return list(pool.map(function, paths))

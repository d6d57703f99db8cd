"""One harness for every reader: whole files of its format, and the public call that reads them."""

import dataclasses
import io
import json
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import numpy as np
import odd
import official_files as official
import tiny
import torch
from mutations import layers, mutated
from PIL import Image

import vbcaps
from vbcaps.data import DataError, View, image_files, load_dataset, read_image
from vbcaps.data.folder import survey
from vbcaps.data.pixels import decode, read_header
from vbcaps.training.checkpoint import State, pack_state, unpack_state
from vbcaps.training.files import RunError
from vbcaps.training.runfolder import read_metrics, read_recipe, read_result
from vbcaps.weights.file import pack_weights
from vbcaps.weights.inputs import read_pixels
from vbcaps.weights.values import read_values

MB = 1 << 20
SAVED = tiny.recipe()


class Harness(NamedTuple):
    """How a reader is tried."""

    make: Callable[[Path], object]  # writes whole files to a folder
    read: Callable[[Path, Path], object]  # is given the folder and the file that was changed
    errors: tuple[type[Exception], ...] = (DataError,)
    bound: int = 256 * MB  # resident beyond what was before
    change: Callable[[Path, Random], Path] | None = None  # changes the folder in another way than by one file
    slow: int = 1  # how many times fewer changes are tried where all readers are


def dataset(name: str, **options: Any) -> Callable[[Path, Path], object]:
    return lambda root, changed: load_dataset(name, root, **options)


# --- images


def make_images(root: Path) -> None:
    """One image of each format and mode that is read."""
    grey, colour = official.pixels(24, 30), official.pixels(24, 30, 3)
    pictures = dict(
        grey=Image.fromarray(grey), colour=Image.fromarray(colour), palette=Image.fromarray(colour).quantize(8),
        clear=Image.fromarray(official.pixels(24, 30, 4)), bit=Image.fromarray(grey).convert("1"),
        deep=Image.fromarray(official.pixels(24, 30).astype(np.uint16) * 257),
    )  # fmt: skip
    kinds = dict(
        png=("grey", "colour", "palette", "clear", "bit", "deep"), jpg=("grey", "colour"), gif=("palette",),
        bmp=("colour", "palette"), webp=("colour", "clear"), ppm=("colour",), tif=("colour", "deep", "palette"),
    )  # fmt: skip
    for suffix, modes in kinds.items():
        for mode in modes:
            pictures[mode].save(root / f"{mode}.{suffix}")
    frames = [Image.fromarray(official.pixels(24, 30, seed=k)) for k in range(3)]
    for suffix in ("gif", "webp", "png", "tif"):
        frames[0].save(root / f"frames.{suffix}", save_all=True, append_images=frames[1:])
    exif = Image.Exif()
    exif[0x0112] = 6
    pictures["colour"].save(root / "turned.jpg", exif=exif)
    pictures["colour"].save(root / "packed.tif", compression="tiff_lzw")
    import tifffile

    cube = official.pixels(5, 24, 30)
    tifffile.imwrite(root / "cube.tif", cube, photometric="minisblack")
    tifffile.imwrite(root / "floats.tif", cube.astype(np.float32), photometric="minisblack", compression="zlib")
    np.save(root / "cube.npy", cube)
    np.save(root / "floats.npy", cube.astype(">f8"))


def read_as_own(root: Path, changed: Path) -> object:
    """Read a file as `vbcaps train --data` does."""
    return decode(changed, 16, read_header(changed, "chw").form, "chw")


def read_to_predict(root: Path, changed: Path) -> object:
    """Read a file as `vbcaps predict` does, for networks of bytes and of floats."""
    random = Random(changed.stat().st_size)
    if random.random() < 0.3:
        return read_image(changed, 16, 3) if changed.suffix != ".npy" else None
    if random.random() < 0.3:
        return read_values(changed, 16, 5, "chw")
    return read_pixels(changed, 16, 1)


# --- folders


def make_folder(root: Path) -> None:
    (root / "secret.png").write_bytes(b"not in the folder of images")
    for part in ("train", "test"):
        for name in ("dark", "light"):
            (root / "photos" / part / name).mkdir(parents=True)
            for k in range(2):
                Image.fromarray(official.pixels(9, 8, 3)).save(root / "photos" / part / name / f"{k}.png")


NAMES = (
    "\x1b[2J", "a\nb", "\u202e", b"\xff\xfe".decode("utf-8", "surrogateescape"), "x" * 250, " ", "..png", "-rf",
    "train", "val", "$\\frac", "[red]", "a.png", "A.PNG", "b.npy", "c.tif", "d.gif", ".hidden", "__MACOSX",
)  # fmt: skip
PLACES = (".", "..", "none", "self", "/dev/zero", "/dev/null", "../../../../secret.png", "/")


def _write(path: Path, content: bytes, size: int = 0) -> None:
    """Write a new file; what is there, as a link that leads elsewhere, is an error."""
    with path.open("xb") as file:
        file.write(content)
        file.truncate(max(size, len(content)))


def _array(rows: int) -> bytes:
    file = io.BytesIO()
    np.save(file, np.zeros((rows, 8)))
    return file.getvalue()


def change_folder(root: Path, random: Random) -> Path:
    """Rename, link, remove and add things in a folder of images."""
    for _ in range(1 + int(random.expovariate(0.7))):
        paths = sorted((root / "photos").rglob("*")) or [root / "photos"]
        path, other = random.choice(paths), random.choice(paths)
        name = random.choice(NAMES)
        beside = (path if path.is_dir() else path.parent) / name
        if path.is_symlink() or other.is_symlink() or os.path.lexists(beside):
            continue  # nothing is written through a link, which may lead out of the folder
        with suppress(OSError):
            random.choice(
                [
                    lambda path=path, beside=beside: path.rename(path.with_name(beside.name)),
                    lambda path=path: shutil.rmtree(path) if path.is_dir() else path.unlink(),
                    lambda beside=beside, other=other: beside.symlink_to(other),
                    lambda beside=beside: beside.symlink_to(random.choice(PLACES)),
                    lambda beside=beside: os.mkfifo(beside),
                    lambda beside=beside: beside.mkdir(),
                    lambda beside=beside: _write(beside, random.randbytes(random.choice([0, 1, 100]))),
                    lambda path=path, beside=beside: _write(beside, path.read_bytes() if path.is_file() else b""),
                    lambda beside=beside: _write(beside, b"", 1 << 25),
                    lambda beside=beside: _write(beside.with_suffix(".npy"), _array(random.choice([0, 1, 8]))),
                ]
            )()
    return root / "photos"


def read_folder(root: Path, changed: Path) -> object:
    survey(root / "photos", "chw")
    image_files(root / "photos")
    return load_dataset(root / "photos", size=8, axes="chw")


# --- weights, states, recipes, flags


def make_weights(root: Path) -> None:
    torch.manual_seed(0)
    net = SAVED.net(1, 3)
    density = vbcaps.uncertainty.Density(
        torch.full((3,), 1 / 3).log(), torch.zeros(3, 3), torch.eye(3)[None], torch.zeros(3), torch.ones(3)
    )
    about = dict(temperature=1.5, familiar=dict(images="some", quantiles=dict(energy=[0.0, 1.0])))
    view = View(crop=20, standardise="dataset", mean=(0.2,), std=(0.3,))
    content = pack_weights(net, SAVED, tiny.CLASSES, view, about, dict(logits=density))
    (root / "last.safetensors").write_bytes(content)


def make_state(root: Path) -> None:
    row = dict(epoch=1, loss=1.0, train_error=0.5, validation_error=None, lr=0.1, seconds=1.0, images_per_second=9.0)
    state = State(SAVED.to_json(), "00000000", 1, 0, [row], row, 1.0, 0.0)
    tensors = {"net.weight": torch.ones(3, 4), "optimiser.step": torch.tensor(3)}
    (root / "state.safetensors").write_bytes(pack_state(tensors, state))


def make_recipe(root: Path) -> None:
    (root / "recipe.json").write_text(json.dumps(SAVED.to_json()))
    (root / "result.json").write_text(json.dumps(dict(test=dict(error=0.5), weights="last.safetensors", seconds=1.0)))
    (root / "metrics.csv").write_text("epoch,loss,train_error,validation_error\n1,0.5,0.25,\n2,0.25,0.125,0.5\n")


def read_run(root: Path, changed: Path) -> object:
    readers = {"recipe.json": read_recipe, "result.json": read_result, "metrics.csv": read_metrics}
    return readers[changed.name](root)


class Reached(Exception):
    """Raised in the place of a training, so that flags that are fine are told from those that are refused."""


def change_flags(root: Path, random: Random) -> Path:
    """Write a command line: some flags of `vbcaps train`, with values that fit and values that do not."""
    from vbcaps.training.recipe import CHOICES, Recipe
    from vbcaps.training.recipes import RECIPES

    values = [
        "0", "1", "-1", "3", "0.5", "1e-3", "1e999", "nan", "inf", "", "none", "auto", "true", "\x1b[2J", "a" * 300,
        "4,2,2,2", "4,2,2", ",", "1" * 40, "0x10", "１", "-", "--", "../x", "cpu", "smallnorb",
    ]  # fmt: skip
    words = [random.choice([*RECIPES, "", "nothing", "\x1b[2J"])] if random.random() < 0.7 else []
    fields = [field.name for field in dataclasses.fields(Recipe)]
    for _ in range(int(random.expovariate(0.4))):
        name = random.choice([*fields, "out", "resume", "from", "seeds", "device", "data-folder", "cache", "wrong"])
        value = random.choice([*map(str, CHOICES.get(name, ())), *values])
        flag = f"--{name.replace('_', '-')}"
        words += random.choice([[flag, value], [flag, value], [f"{flag}={value}"], [flag]])
    path = root / "words.json"
    path.write_text(json.dumps(words))
    return path


def read_flags(root: Path, changed: Path) -> object:
    """Parse the words as the program does; raise ``ValueError`` where it refuses them with a sentence."""
    from typer.testing import CliRunner

    from vbcaps.cli.train import app
    from vbcaps.training import loop

    def reached(*_: object, **__: object) -> None:
        raise Reached

    os.chdir(root)
    kept, loop.fit, loop.fit_seeds = (loop.fit, loop.fit_seeds), reached, reached
    try:
        done = CliRunner().invoke(app, json.loads(changed.read_text()), prog_name="vbcaps train")
    finally:
        loop.fit, loop.fit_seeds = kept
    if isinstance(done.exception, Reached) or (done.exit_code == 0 and done.exception is None):
        return None
    if not isinstance(done.exception, SystemExit) and done.exception is not None:
        raise done.exception
    left = sorted(path.name for path in root.iterdir() if path != changed)
    if left:
        raise AssertionError(f"refused after {left} had been written")
    raise ValueError(f"{changed.name}: {done.output}")


def make_flags(root: Path) -> None:
    (root / "words.json").write_text("[]")


def make_cifar(root: Path, version: str) -> None:
    official.make_cifar(root / "cifar10", version, packed=True, n=1)


def make_cifar_unpacked(root: Path) -> None:
    official.make_cifar(root / "cifar10", "python", packed=False, n=1)


def make_arrays(root: Path) -> None:
    """smallNORB as arrays, one of them packed."""
    import lzma

    folder = root / "smallnorb"
    folder.mkdir()
    for part in ("train", "test"):
        np.save(folder / f"{part}_images_48.npy", official.pixels(10, 2, 8, 8))
        np.save(folder / f"{part}_labels.npy", np.arange(10) % 5)
        np.save(folder / f"{part}_info.npy", official.norb_info(10))
    path = folder / "train_images_48.npy"
    path.with_suffix(".npy.xz").write_bytes(lzma.compress(path.read_bytes(), preset=0))
    path.unlink()


def make_affnist(root: Path) -> None:
    official.make_affnist(root / "affnist" / "test.mat.zip", n=3)
    official.make_idx(root / "mnist")


HARNESSES: dict[str, Harness] = {
    "idx": Harness(lambda root: official.make_idx(root / "mnist"), dataset("mnist")),
    "norb": Harness(lambda root: official.make_norb(root / "smallnorb", n=10, size=8), dataset("smallnorb", size=8)),
    "mat": Harness(lambda root: official.make_svhn(root / "svhn", n=3), dataset("svhn")),
    "mat_zip": Harness(make_affnist, dataset("affnist"), bound=1024 * MB),
    "tar": Harness(partial(make_cifar, version="binary"), dataset("cifar10")),
    "pickle": Harness(make_cifar_unpacked, dataset("cifar10")),
    "pickle_tar": Harness(partial(make_cifar, version="python"), dataset("cifar10")),
    "npy": Harness(make_arrays, dataset("smallnorb", size=8)),
    "npz": Harness(lambda root: official.make_medmnist(root / "breastmnist"), dataset("breastmnist")),
    "sheets": Harness(lambda root: official.make_sheets(root / "svhn", n=70), dataset("svhn")),
    "images": Harness(make_images, read_as_own, bound=1024 * MB),
    "predict": Harness(make_images, read_to_predict, (DataError, ValueError, TypeError), bound=1024 * MB),
    "folders": Harness(make_folder, read_folder, change=change_folder),
    "weights": Harness(make_weights, lambda root, changed: vbcaps.load(changed), (RunError,)),
    "state": Harness(make_state, lambda root, changed: unpack_state(changed.read_bytes(), str(changed)), (RunError,)),
    "recipes": Harness(make_recipe, read_run, (RunError,)),
    "runs": Harness(odd.make_run, odd.use_run, (RunError,), change=odd.change("run"), slow=10),
    "sweeps": Harness(odd.make_sweep, odd.use_sweep, (RunError,), 512 * MB, odd.change("sweep"), slow=10),
    "hubs": Harness(odd.make_hub, odd.use_hub, (RunError,), change=odd.change("hub"), slow=10),
    "caches": Harness(odd.make_cache, odd.use_cache, (RunError, DataError), change=odd.change("cache"), slow=10),
    "flags": Harness(make_flags, read_flags, (ValueError,), change=change_flags),
}


class Case:
    """The files of a harness in a folder, of which one is changed, read, and put back."""

    def __init__(self, harness: Harness, folder: Path):
        self.harness, self.folder = harness, folder
        self.clear()
        self.files = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
        self.layers = {path: layers(path.name, content) for path, content in self.files.items()}
        for path in self.files:  # imports what is imported late
            with suppress(*harness.errors):
                self.read(path)

    def clear(self) -> None:
        """Write the folder anew, with whole files."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        self.harness.make(self.folder)

    def change(self, seed: int) -> Path:
        """Change the folder in the way that a seed says; return what was changed."""
        random = Random(seed)
        if self.harness.change is not None:
            self.clear()
            return self.harness.change(self.folder, random)
        path = random.choice(list(self.files))
        path.write_bytes(mutated(self.layers[path], random))
        return path

    def put(self, name: str, content: bytes) -> Path:
        """Write a file of the corpus."""
        path = next((path for path in self.files if path.name == name), self.folder / name)
        path.write_bytes(content)
        return path

    def put_back(self, path: Path) -> None:
        if path in self.files:
            path.write_bytes(self.files[path])
        elif self.harness.change is None:
            path.unlink()

    def read(self, changed: Path) -> object:
        return self.harness.read(self.folder, changed)

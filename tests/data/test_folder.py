"""Folders of images as people have them."""

import errno
import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import official_files as official
import pytest
import torch
from PIL import Image

from vbcaps.data import DataError, image_files, load_dataset, read_image
from vbcaps.data.folder import survey
from vbcaps.data.pixels import Form, decode, read_header

RED, GREEN = (250, 0, 0), (0, 250, 0)


def save(path: Path, colour: tuple[int, ...] | int, size: tuple[int, int] = (40, 30)) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L" if isinstance(colour, int) else "RGB", size, colour).save(path)


def colours(root: Path, n: int = 10) -> None:
    for k in range(n):
        save(root / "red" / f"{k}.png", (250, k, 0), (20 + k, 40))
        save(root / "green" / f"{k}.jpg", (k, 250, 0))


def test_class_folders_alone(tmp_path):
    colours(tmp_path)
    (tmp_path / "red" / "notes.txt").write_text("not an image")
    (tmp_path / "red" / ".hidden.png").write_text("not an image either")
    (tmp_path / ".cache").mkdir()
    data = load_dataset(tmp_path, size=16)
    assert data.classes == ("green", "red")
    assert data.train.images.shape == (16, 3, 16, 16)
    assert data.test.labels.bincount().tolist() == [2, 2]
    for split in (data.train, data.test):
        brightest = split.images.float().mean((2, 3)).argmax(1)
        assert torch.equal(split.labels, 1 - brightest)  # label 1 is red, channel 0
    again = load_dataset(str(tmp_path), size=16)
    assert torch.equal(again.test.images, data.test.images)
    assert load_dataset(tmp_path).train.images.shape[2:] == (32, 32)


@pytest.mark.parametrize("name", ["test", "val"])
def test_split_by_the_user(tmp_path, name):
    colours(tmp_path / "train", n=3)
    colours(tmp_path / name, n=2)
    data = load_dataset(tmp_path)
    assert (data.train.labels.tolist(), data.test.labels.tolist()) == ([0] * 3 + [1] * 3, [0] * 2 + [1] * 2)
    save(tmp_path / name / "blue" / "0.png", (0, 0, 255))
    with pytest.raises(DataError, match=f"classes of train and {name} differ: blue"):
        load_dataset(tmp_path)


def test_what_is_hidden_is_not_looked_at(tmp_path):
    colours(tmp_path)
    before = load_dataset(tmp_path)
    shutil.copytree(tmp_path / "red", tmp_path / "green" / ".ipynb_checkpoints" / "below")
    shutil.copy(next((tmp_path / "red").iterdir()), tmp_path / "green" / ".1.png")
    after = load_dataset(tmp_path)
    assert torch.equal(after.train.images, before.train.images)
    assert torch.equal(after.train.labels, before.train.labels)


def test_train_folder_alone_is_split(tmp_path):
    colours(tmp_path / "train", n=5)
    assert load_dataset(tmp_path).test.labels.tolist() == [0, 1]


def test_grey_if_all_are(tmp_path):
    for k in range(3):
        save(tmp_path / "dark" / f"{k}.png", 10 + k)
        save(tmp_path / "light" / f"{k}.png", 200 + k)
    assert load_dataset(tmp_path).train.images.shape[1] == 1
    save(tmp_path / "light" / "3.png", RED)
    assert load_dataset(tmp_path).train.images.shape[1] == 3


def test_the_shorter_side_is_resized_and_the_longer_cropped(tmp_path):
    image = np.zeros((20, 60, 3), np.uint8)
    image[:, 20:40] = RED
    Image.fromarray(image).save(tmp_path / "wide.png")
    assert torch.equal(read_image(tmp_path / "wide.png", 20, 3), torch.from_numpy(image[:, 20:40]).permute(2, 0, 1))
    assert (read_image(tmp_path / "wide.png", 10, 3)[0, 1:9, 1:9] == 250).all()


def test_exif_orientation(tmp_path):
    """A photograph that the camera says to turn: the red top is stored on the left."""
    upright = Image.new("RGB", (32, 32), GREEN)
    upright.paste(RED, (0, 0, 32, 16))
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise to see it upright
    upright.rotate(90).save(tmp_path / "photo.png", exif=exif)
    assert torch.equal(read_image(tmp_path / "photo.png", 32, 3), torch.from_numpy(np.array(upright)).permute(2, 0, 1))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_is_white(tmp_path, mode):
    image = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    image.paste((0, 0, 0, 255), (0, 0, 8, 4))  # black above, nothing below
    image.convert(mode).save(tmp_path / "a.png")
    seen = read_image(tmp_path / "a.png", 8, 1)
    assert (seen[0, :4] == 0).all()
    assert (seen[0, 4:] == 255).all()


def test_palette(tmp_path):
    image = Image.new("RGB", (8, 8), RED)
    image.paste(GREEN, (4, 0, 8, 8))
    image.quantize(4).save(tmp_path / "p.gif")
    assert torch.equal(read_image(tmp_path / "p.gif", 8, 3), torch.from_numpy(np.array(image)).permute(2, 0, 1))


@pytest.mark.parametrize("suffix", ["png", "tif"])
def test_16_bits(tmp_path, suffix):
    values = np.array([[0, 257, 128 * 257, 65535]] * 4, np.uint16)
    Image.fromarray(values).save(tmp_path / f"deep.{suffix}")
    assert read_image(tmp_path / f"deep.{suffix}", 4, 1)[0, 0].tolist() == [0, 1, 128, 255]


def test_one_bit_and_cmyk(tmp_path):
    Image.new("1", (8, 8), 1).save(tmp_path / "bit.png")
    assert (read_image(tmp_path / "bit.png", 8, 1) == 255).all()
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(tmp_path / "print.jpg")
    red = read_image(tmp_path / "print.jpg", 8, 3).float().mean((1, 2))
    assert red[0] > 200 > 60 > red[1:].max()


@pytest.mark.parametrize("kind", [np.float32, np.int32])
def test_pixels_of_32_bits_are_refused(tmp_path, kind):
    Image.fromarray(np.full((4, 4), 200, kind)).save(tmp_path / "f.tif")
    with pytest.raises(DataError, match=r"f\.tif: pixels of 32 bits have no agreed range"):
        read_image(tmp_path / "f.tif", 4, 1)


def damaged(root: Path, how) -> Path:
    path = root / "red" / "bad.png"
    Image.fromarray(official.pixels(40, 40, 3)).save(path)
    how(path)
    return path


@pytest.mark.parametrize("how", [official.cut, official.page, official.flip, lambda path: path.write_bytes(b"")])
def test_an_unreadable_image_is_named(tmp_path, how):
    colours(tmp_path)
    damaged(tmp_path, how)
    with pytest.raises(DataError, match=r"red.bad\.png: cannot be read as an image"):
        load_dataset(tmp_path)


def test_folders_that_are_no_dataset(tmp_path):
    with pytest.raises(DataError, match="has no class folders: expected one folder for each class"):
        load_dataset(tmp_path)
    save(tmp_path / "loose.png", RED)
    with pytest.raises(DataError, match="has no class folders"):
        load_dataset(tmp_path)
    save(tmp_path / "red" / "0.png", RED)
    with pytest.raises(DataError, match="has one class only, red"):
        load_dataset(tmp_path)
    (tmp_path / "green").mkdir()
    with pytest.raises(DataError, match=r"green: has no images \(\.bmp, "):
        load_dataset(tmp_path)
    save(tmp_path / "green" / "0.png", GREEN)
    save(tmp_path / "green" / "1.png", GREEN)
    with pytest.raises(DataError, match="red: has one image only"):
        load_dataset(tmp_path)
    shutil.copy(tmp_path / "red" / "0.png", tmp_path / "red" / "1.png")
    assert load_dataset(tmp_path).test.labels.tolist() == [0, 1]


def test_a_folder_of_its_own_chooses_the_best_epoch(tmp_path):
    for name, n in dict(train=4, val=3, test=2).items():
        colours(tmp_path / name, n=n)
    data = load_dataset(tmp_path)
    assert data.validation is not None
    assert [len(split.labels) for split in (data.train, data.validation, data.test)] == [8, 6, 4]
    save(tmp_path / "val" / "blue" / "0.png", (0, 0, 255))
    with pytest.raises(DataError, match="classes of train and val differ: blue"):
        load_dataset(tmp_path)


def test_a_survey_counts_what_is_then_loaded(tmp_path):
    colours(tmp_path / "photos", n=7)  # widths of 20 to 26 by 40, and 40 by 30
    found, data = survey(tmp_path / "photos"), load_dataset(tmp_path / "photos")
    assert found.classes == data.classes
    assert list(found.train) == data.train.labels.bincount().tolist()
    assert (found.test, found.validation) == (len(data.test.labels), 0)
    assert found.side == sorted([*range(20, 27), *[30] * 7])[7]
    colours(tmp_path / "parted" / "train", n=4)
    colours(tmp_path / "parted" / "test", n=3)
    colours(tmp_path / "parted" / "val", n=2)
    found = survey(tmp_path / "parted")
    assert (found.train, found.validation, found.test) == ((4, 4), 4, 6)


def test_files_that_are_not_read_are_told_of(tmp_path):
    colours(tmp_path, n=3)
    assert survey(tmp_path).left_out == ()
    for path in ("__MACOSX/red/._1.png", "red/Thumbs.db", ".DS_Store"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(b"")
    assert survey(tmp_path).left_out == ()
    save(tmp_path / "stray.png", 7)
    for k in range(2):
        (tmp_path / "red" / f"{k}.heic").write_bytes(b"")
    images, others = survey(tmp_path).left_out
    assert images == f"1 image in no class folder, left out: {tmp_path / 'stray.png'}"
    assert others == f"2 files of no known image format, left out: {tmp_path / 'red' / '0.heic'}"
    assert len(load_dataset(tmp_path).train.labels) == 4


def test_all_damaged_files_are_named_at_once(tmp_path):
    colours(tmp_path, n=9)
    for k in range(7):
        (tmp_path / "red" / f"{k}.png").write_bytes(b"no image")
    for read in (survey, load_dataset):
        with pytest.raises(DataError) as caught:
            read(tmp_path)
        assert all(f"red/{k}.png: cannot be read as an image" in str(caught.value) for k in range(5))
        assert str(caught.value).endswith("; and 2 more")


def test_a_folder_too_far_up_is_pointed_down(tmp_path):
    colours(tmp_path / "up" / "photos", n=3)
    with pytest.raises(DataError, match=r"has one class only, photos: .*did you mean .*up/photos"):
        load_dataset(tmp_path / "up")


def test_grey_of_ten_bits(tmp_path):
    """A PGM file may say that 1023 is white; Pillow scales to 65535."""
    (tmp_path / "a.pgm").write_bytes(b"P5\n9 8\n1023\n" + np.full((8, 9), 1023, ">u2").tobytes())
    header = read_header(tmp_path / "a.pgm", "auto")
    assert header.form == Form(1, "uint16")
    assert decode(tmp_path / "a.pgm", 8, header.form).tolist() == np.full((1, 8, 8), 65535).tolist()
    assert read_image(tmp_path / "a.pgm", 8, 1).unique().tolist() == [255]


def unreadable(monkeypatch, folder: Path) -> None:
    """Refuse to list a folder, as the system does unless one is root."""
    scandir, iterdir = os.scandir, Path.iterdir

    def refuse(path: object) -> None:
        if Path(os.fspath(path)) == folder:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", lambda path=".": refuse(path) or scandir(path))
    monkeypatch.setattr(Path, "iterdir", lambda path: refuse(path) or iterdir(path))


@pytest.mark.parametrize("inner", [".", "deeper", "deeper/yet"])
def test_a_folder_that_cannot_be_listed_is_named(tmp_path, monkeypatch, inner):
    colours(tmp_path, 2)
    folder = tmp_path / "red" / inner
    folder.mkdir(parents=True, exist_ok=True)
    save(tmp_path / "red" / "more.png", (255, 0, 0))
    unreadable(monkeypatch, folder)
    for read in (load_dataset, survey, lambda path: image_files(path / "red")):
        with pytest.raises(DataError, match=rf"{re.escape(str(folder))}: cannot be listed \(Permission denied\)"):
            read(tmp_path)


def test_a_hidden_folder_that_cannot_be_listed_is_passed_over(tmp_path, monkeypatch):
    colours(tmp_path, 2)
    (tmp_path / "red" / ".cache").mkdir()
    unreadable(monkeypatch, tmp_path / "red" / ".cache")
    assert load_dataset(tmp_path).classes == ("green", "red")


def test_three_thousand_folders_one_in_another_are_refused(tmp_path):
    colours(tmp_path, 2)
    here = os.open(".", os.O_RDONLY)
    os.chdir(tmp_path / "red")
    try:
        for _ in range(3000):  # a path of so many names is too long for the system, so one goes down step by step
            os.mkdir("d")
            os.chdir("d")
        os.fchdir(here)
        for read in (load_dataset, survey, lambda path: image_files(path / "red")):
            with pytest.raises(DataError, match=r"red: has folders more than 100 deep, one in another"):
                read(tmp_path)
    finally:
        os.fchdir(here)
        os.close(here)
        subprocess.run(["rm", "-rf", str(tmp_path / "red")], check=True)

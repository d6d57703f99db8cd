"""MedMNIST, on files made in the official format, with every kind of fault in them."""

import hashlib
import io
import zipfile
from pathlib import Path

import numpy as np
import official_files as official
import pytest
import torch

from vbcaps.data import FACTS, DataError, check, fetch, load_dataset
from vbcaps.data.medmnist_table import TABLE
from vbcaps.data.official import OFFICIAL
from vbcaps.data.resize import resize
from vbcaps.training.loop import prepare
from vbcaps.training.recipe import Recipe
from vbcaps.training.recipes import recipe


@pytest.mark.parametrize("name", TABLE)
def test_a_file_becomes_three_splits(tmp_path, name):
    arrays = official.make_medmnist(tmp_path / name)
    data = load_dataset(name, tmp_path)
    assert data.validation is not None
    for part, split in dict(train=data.train, val=data.validation, test=data.test).items():
        images, labels = arrays[f"{part}_images"], arrays[f"{part}_labels"]
        images = images[:, None] if images.ndim == 3 else images.transpose(0, 3, 1, 2)
        assert torch.equal(split.images, torch.from_numpy(np.ascontiguousarray(images)))
        assert split.labels.tolist() == labels[:, 0].tolist()
    facts = FACTS[name]
    assert (data.train.images.shape[1:], len(data.classes)) == ((facts.channels, 28, 28), facts.classes)
    assert "not the published one" in data.source


def test_the_table_is_of_one_piece():
    sums = [md5 for one in TABLE.values() for md5 in one.md5]
    assert len(set(sums)) == len(sums) == 44
    assert all(len(md5) == 32 and set(md5) <= set("0123456789abcdef") for md5 in sums)
    assert all(f"{sum(one.counts):,}" in one.about for one in TABLE.values())
    (file,) = OFFICIAL["bloodmnist_64"]
    assert file.addresses[0] == "https://zenodo.org/records/10519652/files/bloodmnist_64.npz?download=1"


def test_larger_images_come_from_a_larger_file(tmp_path):
    official.make_medmnist(tmp_path / "organamnist")
    with pytest.raises(
        DataError, match=r"organamnist_64\.npz is missing: fetch it with `vbcaps data fetch organamnist_64"
    ):
        load_dataset("organamnist", tmp_path, size=40)
    large = official.make_medmnist(tmp_path / "organamnist", side=64)
    at_64, at_40 = (load_dataset("organamnist", tmp_path, size=size) for size in (64, 40))
    assert torch.equal(at_64.test.images[:, 0], torch.from_numpy(large["test_images"]))
    assert torch.equal(at_40.validation.images, resize(at_64.validation.images, 40))
    assert load_dataset("organamnist", tmp_path, size=20).train.images.shape == (24, 1, 20, 20)


def test_the_published_file_is_told_by_its_sum(tmp_path, monkeypatch):
    official.make_medmnist(tmp_path / "breastmnist")
    sum_of = hashlib.md5((tmp_path / "breastmnist" / "breastmnist.npz").read_bytes()).hexdigest()
    monkeypatch.setitem(TABLE, "breastmnist", TABLE["breastmnist"]._replace(md5=(sum_of, *["0" * 32] * 3)))
    assert load_dataset("breastmnist", tmp_path).source == "original files"


def test_several_labels_of_an_image_are_refused(tmp_path):
    for refused in (
        lambda: load_dataset("chestmnist", tmp_path), lambda: fetch("chestmnist", tmp_path),
        lambda: check("chestmnist", tmp_path),
    ):  # fmt: skip
        with pytest.raises(DataError, match="may show several of its 14 findings"):
            refused()
    with pytest.raises(ValueError, match=r"dataset must be one of .* may show several of its 14 findings"):
        Recipe(dataset="chestmnist")
    arrays = official.make_medmnist(tmp_path / "breastmnist")
    arrays["val_labels"] = np.zeros((9, 14), np.uint8)
    np.savez(tmp_path / "breastmnist" / "breastmnist.npz", **arrays)
    with pytest.raises(DataError, match=r"val_labels must be whole numbers, one for each of 9 images"):
        load_dataset("breastmnist", tmp_path)


def rewritten(path: Path, name: str, content: bytes | None) -> None:
    """Write an archive again with other bytes of one array, or without it."""
    with zipfile.ZipFile(path) as archive:
        members = {one: archive.read(one) for one in archive.namelist()}
    members[f"{name}.npy"] = content
    with zipfile.ZipFile(path, "w") as archive:
        for one, data in members.items():
            if data is not None:
                archive.writestr(one, data)


def packed(array: np.ndarray, pickles: bool = False) -> bytes:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=pickles)
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("val_images", None, "has no array val_images"),
        ("train_images", packed(np.zeros((24, 28, 27), np.uint8)), r"must be uint8 n h w of 28 x 28 pixels"),
        ("train_images", packed(np.zeros((24, 28, 28, 3), np.uint8)), r"got uint8 \(24, 28, 28, 3\)"),
        ("train_images", packed(np.zeros((24, 28, 28), np.float32)), "got float32"),
        ("test_labels", packed(np.zeros((11, 1), np.uint8)), "one for each of 12 images"),
        ("test_labels", packed(np.full((12, 1), 2, np.uint8)), "labels must be 0 to 1, got 2"),
        ("test_labels", packed(np.array([[{}]] * 12, object), pickles=True), "other things than plain numbers"),
        (
            "train_images",
            packed(np.zeros((24, 28, 28), np.uint8))[:-9],
            r"train_images: an array of \(24, 28, 28\) of uint8 does not take",
        ),
        ("train_images", b"\x93NUMPY\x09\x00 nonsense", r"train_images: it ends within its header.*fetch it again"),
    ],
)
def test_what_is_no_official_file_is_an_error(tmp_path, name, content, message):
    official.make_medmnist(tmp_path / "breastmnist")
    path = tmp_path / "breastmnist" / "breastmnist.npz"
    rewritten(path, name, content)
    with pytest.raises(DataError, match=message):
        load_dataset("breastmnist", tmp_path)


def test_a_header_that_asks_for_terabytes_allocates_nothing(tmp_path):
    official.make_medmnist(tmp_path / "breastmnist")
    path = tmp_path / "breastmnist" / "breastmnist.npz"
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, dict(descr="|u1", fortran_order=False, shape=(1 << 40, 28, 28)))
    rewritten(path, "train_images", header.getvalue() + bytes(64))
    with pytest.raises(DataError, match="does not take the"):
        load_dataset("breastmnist", tmp_path)


def test_its_own_validation_images_choose_the_epoch(tmp_path):
    official.make_medmnist(tmp_path / "bloodmnist")
    data = prepare(recipe("medmnist_small"), tmp_path, torch.device("cpu"))
    assert [len(split.labels) for split in (data.train, data.validation, data.test)] == [24, 9, 12]
    assert torch.equal(data.validation.images, load_dataset("bloodmnist", tmp_path).validation.images)
    official.make_medmnist(tmp_path / "organcmnist")
    other = prepare(recipe("medmnist_small", dataset="organcmnist"), tmp_path, torch.device("cpu"))
    assert (other.train.images.shape[1], len(other.classes)) == (1, 11)

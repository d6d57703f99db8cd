"""Splits that keep groups of images together: the folds of a cross-validation, and shares that are held out."""

import re

import numpy as np
import pytest
import torch
from PIL import Image

from vbcaps.data import DataError, Dataset, Split, divide, hold_out, load_dataset
from vbcaps.data.groups import groups_of_info


def patients(count: int = 24, classes: int = 3, seed: int = 0) -> Split:
    """Images of patients, 2 to 7 of each, mostly of one class; the first pixel is the number of the image."""
    generator = np.random.default_rng(seed)
    groups = np.repeat(np.arange(count), generator.integers(2, 8, count))
    labels = np.where(
        generator.random(len(groups)) < 0.8, groups % classes, generator.integers(0, classes, len(groups))
    )
    images = torch.zeros(len(groups), 1, 8, 8, dtype=torch.uint8)
    images[:, 0, 0, 0] = torch.arange(len(groups)) % 256
    order = torch.from_numpy(generator.permutation(len(groups)))
    return Split(images, torch.from_numpy(labels), groups=torch.from_numpy(groups)).take(order)


def shares(split: Split, classes: int = 3) -> torch.Tensor:
    return split.labels.bincount(minlength=classes) / len(split.labels)


@pytest.mark.parametrize("grouped", [True, False])
def test_folds_are_disjoint_complete_and_stratified_and_keep_groups_together(grouped):
    split = patients() if grouped else patients()._replace(groups=None)
    seen = []
    for fold in range(1, 5):
        train, held = divide(split, 4, fold, seed=3)
        seen += held.images[:, 0, 0, 0].tolist()
        assert sorted([*train.images[:, 0, 0, 0].tolist(), *held.images[:, 0, 0, 0].tolist()]) == list(
            range(len(split.labels))
        )
        if grouped:
            assert not set(train.groups.tolist()) & set(held.groups.tolist())
        assert (shares(held) - shares(split)).abs().max() < (0.15 if grouped else 0.04)
        again = divide(split, 4, fold, seed=3)[1]
        assert torch.equal(again.images, held.images)
    assert sorted(seen) == list(range(len(split.labels)))
    if not grouped:  # with groups, the balance of classes comes before chance
        assert not torch.equal(divide(split, 4, 1, seed=4)[1].labels, divide(split, 4, 1, seed=3)[1].labels)


@pytest.mark.parametrize("fraction", [0.2, 0.5, 0.75])
def test_a_share_that_is_held_out_keeps_groups_together(fraction):
    split = patients(60)
    train, held = hold_out(split, fraction, 0)
    assert not set(train.groups.tolist()) & set(held.groups.tolist())
    assert len(held.labels) / len(split.labels) == pytest.approx(fraction, abs=0.05)
    assert (shares(held) - shares(split)).abs().max() < 0.1


def test_what_cannot_be_divided_is_an_error():
    split = patients(3)
    with pytest.raises(DataError, match="4 parts need as many groups, and there are 3 groups"):
        divide(split, 4, 1)
    with pytest.raises(ValueError, match=r"fold must be 1 to folds, .* got fold=5 of folds=4"):
        divide(split, 4, 5)
    few = Split(torch.zeros(6, 1, 4, 4, dtype=torch.uint8), torch.tensor([0, 0, 0, 0, 0, 1]))
    with pytest.raises(DataError, match="leaves no images of class 1 to train on: the class has too few images"):
        [divide(few, 2, fold) for fold in (1, 2)]
    one = Split(few.images, torch.tensor([0, 1, 0, 1, 0, 1]), groups=torch.tensor([0, 1, 0, 1, 2, 1]))
    with pytest.raises(DataError, match="holding groups out leaves no images of class"):
        [hold_out(one, 0.34, seed) for seed in range(9)]
    with pytest.raises(DataError, match=r"6 images need as many int64 groups, got torch.float32 \(6,\)"):
        Dataset("x", few._replace(groups=torch.zeros(6)), few, ("a", "b"), "made")


@pytest.fixture
def folder(tmp_path):
    for name in ("cat", "dog"):
        for patient in range(5):
            place = tmp_path / "photos" / name / f"p{patient}"
            place.mkdir(parents=True)
            for k in range(3):
                Image.new("L", (16, 16), patient * 10 + k + 100 * (name == "dog")).save(
                    place / f"{name}{patient}{k}.png"
                )
    return tmp_path / "photos"


def test_groups_of_own_images_are_read_from_folders_and_tables(folder, tmp_path):
    by_folder = load_dataset(folder, size=16, whole=True, groups="folder").train
    assert by_folder.groups.bincount().tolist() == [6] * 5
    assert torch.equal(by_folder.images[:, 0, 0, 0] // 10 % 10, by_folder.groups)
    files = sorted(folder.rglob("*.png"))
    table, rows = tmp_path / "patients.csv", [(path, path.parent.name) for path in files]
    for words, text in {
        "patients.csv": "file,patient\n" + "".join(f"{path.relative_to(folder)},{p}\n" for path, p in rows),
        "patients.csv:who": "age;who;Name\n" + "".join(f"40;{p};{path.name}\n" for path, p in rows),
        "patients.csv:patient": "image,patient,x\n" + "".join(f"{path.stem},{p},0\n\n" for path, p in rows),
    }.items():
        table.write_text(text)
        found = load_dataset(folder, size=16, whole=True, groups=str(tmp_path / words)).train
        assert torch.equal(found.groups, by_folder.groups), words
    halves = load_dataset(folder, size=16, groups="folder")  # class folders alone: the test images are whole patients
    assert not set(halves.train.groups.tolist()) & set(halves.test.groups.tolist())
    assert len(halves.test.labels) == 6


@pytest.mark.parametrize(
    ("text", "words", "wrong"),
    [
        ("file,patient\ncat/p0/cat00.png,1\n", "", "has no group of cat/p0/cat01.png and of 28 others"),
        ("file,patient,age\nx,1,2\n", "", "has the columns patient, age: say which, "),
        ("file,patient\nx,1\n", ":who", "has no column 'who': its columns are patient"),
        ("file,patient\nx\n", "", "line 2: has no group"),
        ("file,patient\nx,1\nx,2\n", "", "line 3: x is in two groups, 1 and 2"),
        ("nothing", "", "expected a heading such as file,patient and a row for each image"),
    ],
)
def test_a_table_that_lacks_something_is_an_error(folder, tmp_path, text, words, wrong):
    table = tmp_path / "patients.csv"
    table.write_text(text)
    with pytest.raises(DataError, match=re.escape(wrong)):
        load_dataset(folder, size=16, groups=f"{table}{words}")


def test_words_that_name_no_groups_are_an_error(folder, tmp_path):
    with pytest.raises(DataError, match=r"groups must be a table .* or `folder` for CLASS/GROUP/image, got 'patient'"):
        load_dataset(folder, size=16, groups="patient")
    with pytest.raises(DataError, match=r"cannot read the groups in .*nowhere.csv"):
        load_dataset(folder, size=16, groups=str(tmp_path / "nowhere.csv"))
    Image.new("L", (16, 16)).save(folder / "cat" / "loose.png")
    with pytest.raises(DataError, match=r"loose.png lies in the folder of its class; expected CLASS/GROUP/loose.png"):
        load_dataset(folder, size=16, groups="folder")
    with pytest.raises(DataError, match="sample does not say which belong together"):
        load_dataset("sample", groups="instance")


def test_toys_are_groups():
    info = torch.tensor([[4, 0, 2, 1], [4, 1, 6, 0], [6, 0, 2, 1]])
    split = Split(torch.zeros(3, 2, 8, 8, dtype=torch.uint8), torch.tensor([0, 1, 1]), info)
    assert groups_of_info("instance", split, "smallnorb").unique().shape == (3,)
    assert groups_of_info("elevation", split, "smallnorb").tolist() == [0, 1, 0]
    with pytest.raises(DataError, match=r"groups must be one of .*, got 'toy'"):
        groups_of_info("toy", split, "smallnorb")

"""The defaults for a folder of your own images."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

from vbcaps.training.loop import prepare
from vbcaps.training.own_images import EPOCHS, STEPS, fitting_batch, for_own_images
from vbcaps.training.recipe import Recipe
from vbcaps.training.recipes import RECIPES, recipe


def photos(folder: Path, count: int, size: tuple[int, int] = (10, 12)) -> Path:
    for name in ("cat", "dog", "owl"):
        (folder / name).mkdir(parents=True)
        for k in range(count):
            Image.new("RGB", size, (k, 0, 0)).save(folder / name / f"{k}.png")
    return folder


def own(folder: Path, name: str = "default", **fields: object) -> tuple[Recipe, str]:
    made, said = for_own_images(replace(recipe(name), data=str(folder)).with_fields(**fields), fields)
    return made, " ".join(said)


def test_what_is_said_is_what_is_trained_on(tmp_path):
    made, said = own(photos(tmp_path, 65))
    data = prepare(made, None, torch.device("cpu"))
    assert data.validation is not None
    counts = [len(split.labels) for split in (data.train, data.validation, data.test)]
    assert counts == [126, 30, 39]
    assert "126 images to train on, 30 to choose the best epoch, 39 to test" in said
    assert data.train.images.shape[1:] == (3, made.crop, made.crop)
    assert made.test
    assert not made.flip


def test_few_images_get_small_batches_and_many_epochs(tmp_path):
    made, said = own(photos(tmp_path, 20))
    assert (made.batch, made.epochs, made.validation) == (8, STEPS // 6, 0)  # 48 images
    assert "48 images to train on, 12 to test" in said
    assert "too few images to choose the best epoch: the last is tested; --validation 0.2 chooses" in said
    assert made.warmup / made.epochs == pytest.approx(recipe("default").warmup / recipe("default").epochs)
    assert "few images: batches of 8 and 100 epochs" in said
    assert [fitting_batch(images, 32) for images in (3, 39, 64, 100, 128, 10_000)] == [8, 8, 16, 16, 32, 32]
    made, _ = own(photos(tmp_path / "six", 2), epochs=3, batch=5, warmup=1.0)
    assert (made.batch, made.epochs, made.warmup) == (5, 3, 1.0)
    assert own(tmp_path / "six")[0].epochs == EPOCHS


@pytest.mark.parametrize(
    ("size", "side"), [((300, 200), 48), ((40, 50), 40), ((8, 9), 28), ((50, 47), 44), ((28, 28), 28)]
)
def test_the_networks_input_follows_from_the_images(tmp_path, size, side):
    made, said = own(photos(tmp_path, 6, size))
    assert (made.crop, made.image_size) == (side, None)
    assert f"network input {side}x{side}" in said
    assert ("in the median" in said) == (side != min(size))
    assert own(tmp_path, crop=32)[0].crop == 32
    assert own(tmp_path, image_size=36)[0].crop == recipe("default").crop


def test_what_is_asked_for_stays(tmp_path):
    photos(tmp_path, 20)
    made, _ = own(tmp_path, flip=True, validation=0.5)
    assert (made.flip, made.validation, made.test) == (True, 0.5, False)
    assert own(tmp_path, validation=0.5, test=True)[0].test
    assert own(tmp_path, validation=0.0)[0].validation == 0


def test_a_recipes_own_share_is_not_for_few_images(tmp_path):
    """`default` and the laptop twins hold images of their datasets out, and test."""
    photos(tmp_path, 20)
    for name in ("default", "fashion_laptop"):
        assert recipe(name).validation > 0
        made, said = own(tmp_path, name)
        assert (made.validation, made.test) == (0, False)
        assert "the last is tested" in said


def test_a_folder_called_val_chooses_the_best_epoch(tmp_path):
    for name, count in dict(train=6, val=2, test=3).items():
        photos(tmp_path / name, count)
    made, said = own(tmp_path)
    assert made.validation == 0
    assert "18 images to train on, 6 to choose the best epoch, 9 to test" in said
    data = prepare(made, None, torch.device("cpu"))
    assert data.validation is not None
    assert [len(split.labels) for split in (data.train, data.validation, data.test)] == [18, 6, 9]


def test_overlapping_objects_move_on_a_canvas_that_is_larger_than_they_are(tmp_path):
    folder = photos(tmp_path, 6, (36, 36))
    for given, sizes in (({}, (44, 34)), (dict(crop=36), (36, 28)), (dict(image_size=20), (36, 20))):
        made, said = own(folder, "overlap_laptop", **given)
        assert (made.crop, made.image_size) == sizes
        assert ("each of 2 objects is" in said) == ("image_size" not in given)
        assert prepare(made, None, torch.device("cpu")).test.images.shape[2:] == (made.crop, made.crop)


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in RECIPES
        if not (recipe(name).viewpoint or recipe(name).match or recipe(name).hold_out != "images")
    ],
)
def test_every_recipe_that_is_of_no_viewpoint_can_be_trained_on_them(tmp_path, name):
    made, _ = own(photos(tmp_path, 6, (36, 36)), name)
    data = prepare(made, None, torch.device("cpu"))
    shown = data.train if made.objects == 1 else data.test  # of which each is put together from several
    x = data.view.train(shown.images[:2], torch.rand(2, data.view.draws))
    assert x.shape[2:] == (made.crop, made.crop)
    assert not made.flip

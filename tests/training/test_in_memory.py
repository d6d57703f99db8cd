"""Training on images in memory, ``fit(recipe, folder, data=Dataset(...))``."""

from dataclasses import replace

import pytest
import tiny
import torch

from vbcaps.data import DataError, Dataset, Split
from vbcaps.training.files import RunError
from vbcaps.training.loop import fit
from vbcaps.weights.model import load


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def of_side(side: int, data: Dataset) -> Dataset:
    """The same images in a black frame."""
    room = torch.nn.ZeroPad2d((0, side - 22, 0, side - 22))
    return replace(
        data, **{k: getattr(data, k)._replace(images=room(getattr(data, k).images)) for k in ("train", "test")}
    )


def test_images_in_memory_are_trained_on_and_tested_as_those_of_files_are(tmp_path):
    recipe = tiny.recipe(epochs=2)
    with tiny.in_place_of_data():
        from_files = fit(recipe, tmp_path / "files", device="cpu")
    model = fit(recipe, tmp_path / "memory", data=tiny.dataset(), device="cpu")
    assert model.result.test == from_files.result.test
    assert all(torch.equal(x, y) for x, y in zip(model.net.parameters(), from_files.net.parameters(), strict=True))
    assert (model.recipe.data, model.recipe.image_size, model.classes) == ("tiny", 22, tiny.CLASSES)
    again = load(tmp_path / "memory")
    assert torch.equal(again.predict(tiny.split(30, 2).images), from_files.predict(tiny.split(30, 2).images))
    assert "on the images in tiny" in repr(again)


def test_a_network_remembers_the_side_of_images_in_memory(tmp_path):
    data = of_side(24, tiny.dataset())
    model = fit(tiny.recipe(image_size=None, epochs=1), tmp_path / "run", data=data, device="cpu")
    assert model.recipe.image_size == 24
    assert torch.equal(model.read(data.test.images), data.test.images)
    resized = fit(tiny.recipe(epochs=1), tmp_path / "resized", data=data, device="cpu")
    assert resized.read(data.test.images).shape == (30, 1, 22, 22)


def test_resuming_needs_the_same_images(tmp_path):
    class Stop(Exception):
        pass

    def stop(event):
        if event.kind == "epoch" and event.epoch == 1:
            raise Stop

    recipe, data = tiny.recipe(epochs=2), tiny.dataset()
    with pytest.raises(Stop):
        fit(recipe, tmp_path, data=data, device="cpu", on_event=stop)
    other = replace(data, train=tiny.split(48, 3))
    with pytest.raises(RunError, match="trained on other images than the present ones"):
        fit(recipe, tmp_path, data=other, device="cpu", resume=True)
    assert fit(recipe, tmp_path, data=data, device="cpu", resume=True).result.epochs == 2


def test_without_test_images_nothing_is_tested(tmp_path):
    data = tiny.dataset()
    alone = replace(data, test=data.test.take(torch.arange(0)))
    result = fit(tiny.recipe(epochs=1), tmp_path / "all", data=alone, device="cpu").result
    assert result.test is None
    assert result.validation is None
    held = fit(tiny.recipe(epochs=1, validation=0.2, test=True), tmp_path / "held", data=alone, device="cpu").result
    assert held.test is None
    assert held.validation is not None


def test_a_validation_set_of_its_own_chooses_the_epoch(tmp_path):
    data = replace(tiny.dataset(), validation=tiny.split(12, 5))
    result = fit(tiny.recipe(epochs=2, image_size=20), tmp_path, data=data, device="cpu").result
    assert result.best_epoch is not None


def test_images_of_several_sizes_need_a_size(tmp_path):
    images = torch.zeros(6, 1, 22, 30, dtype=torch.uint8)
    wide = replace(tiny.dataset(), test=Split(images, torch.arange(6) % 3))
    with pytest.raises(DataError, match=r"tiny: images must be square and of one size.*\(22, 22\), \(22, 30\)"):
        fit(tiny.recipe(image_size=None), tmp_path, data=wide, device="cpu")

"""Pictures of a Capsule-VAE show what its model decodes."""

import matplotlib.axes
import numpy as np
import pytest
import tiny
import torch
from PIL import Image

import vbcaps
from vbcaps.figures.vae import SPREAD, deviations_of, entries, overview, reconstructions, samples

IMAGES = tiny.split(5, 0).images


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    recipe = tiny.recipe(network="vae", standardise="none", decoder=8)
    net = recipe.net(1, 3)
    for _ in range(30):
        net(torch.rand(16, 1, 20, 20))
    net.fit_codes(torch.arange(1, 17) * torch.randn(300, 16), torch.arange(300) % 3)
    return vbcaps.Model(net, recipe, tiny.CLASSES, recipe.view()).eval()


@pytest.fixture
def sheets(monkeypatch):
    """The arrays that are drawn."""
    drawn, imshow = [], matplotlib.axes.Axes.imshow

    def keep(axes, sheet, **options):
        drawn.append(sheet)
        return imshow(axes, sheet, **options)

    monkeypatch.setattr(matplotlib.axes.Axes, "imshow", keep)
    return drawn


def tile(sheet, row, column, side=20):
    return sheet[row * (side + 1) : row * (side + 1) + side, column * (side + 1) : column * (side + 1) + side]


def test_each_image_stands_above_its_reconstruction(model, sheets, tmp_path):
    path = reconstructions(model, IMAGES, tmp_path / "r.png")
    Image.open(path).verify()
    (sheet,) = sheets
    assert sheet.shape == (41, 104)
    np.testing.assert_allclose(tile(sheet, 0, 2), model.view.test(IMAGES)[2, 0], atol=1e-6)
    np.testing.assert_allclose(tile(sheet, 1, 2), model.reconstruct(IMAGES)[2, 0], atol=1e-4)


def test_each_class_has_a_row_of_samples(model, sheets, tmp_path):
    samples(model, tmp_path / "s.png", count=4, seed=3)
    np.testing.assert_allclose(tile(sheets[0], 2, 1), model.sample(2, 4, seed=5)[1, 0], atol=1e-6)


def test_each_entry_has_a_row_of_steps(model, sheets, tmp_path):
    entries(model, IMAGES[0], tmp_path / "e.png")
    (sheet,) = sheets
    assert sheet.shape == (16 * 21 - 1, len(SPREAD) * 21 - 1)
    spread = deviations_of(model, IMAGES[0])
    j = int(model.predict(IMAGES[0])[0].argmax())
    np.testing.assert_allclose(spread, (model.net.code_root[j] @ model.net.code_root[j].T).diagonal().sqrt(), rtol=1e-5)
    by_hand = model.tweak(IMAGES[0], 7, [SPREAD[-1] * spread[7]])
    np.testing.assert_allclose(tile(sheet, 7, len(SPREAD) - 1), by_hand[0, 0], atol=1e-6)
    entries(model, IMAGES[0], tmp_path / "one.png", entry=3, values=[-1.0, 1.0], label="top")
    assert sheets[1].shape == (20, 41)
    by_hand = model.tweak(IMAGES[0], 3, [1.0], label="top")
    np.testing.assert_allclose(tile(sheets[1], 0, 1), by_hand[0, 0], atol=1e-6)


def test_the_overview_has_the_three_pictures(model, sheets, tmp_path):
    overview(model, IMAGES, tmp_path / "o.png", seed=4)
    of_images, of_samples, of_entries = sheets
    np.testing.assert_allclose(tile(of_images, 1, 3), model.reconstruct(IMAGES)[3, 0], atol=1e-4)
    np.testing.assert_allclose(tile(of_samples, 1, 2), model.sample(1, 5, seed=5)[2, 0], atol=1e-6)
    by_hand = model.tweak(IMAGES[4], 0, [SPREAD[0] * deviations_of(model, IMAGES[4])[0]])
    np.testing.assert_allclose(tile(of_entries, 0, 0), by_hand[0, 0], atol=1e-5)


def test_the_overview_says_which_image_is_misread(model, monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr("vbcaps.figures.vae.save", lambda figure, path: drawn.append(figure) or path)
    read = model.predict(IMAGES).argmax(1).tolist()
    labels = [*read[:-1], (read[-1] + 1) % 3]
    overview(model, IMAGES, tmp_path / "o.png", labels=labels)
    first, _, third = drawn[0].axes
    assert [text.get_text() for text in first.texts if text.get_text()] == [f"read as {tiny.CLASSES[read[-1]]}"]
    assert [label.get_text() for label in third.get_xticklabels()] == [
        "-3 sd", "-2 sd", "-1 sd", "as it is", "+1 sd", "+2 sd", "+3 sd"
    ]  # fmt: skip
    overview(model, IMAGES, tmp_path / "o.png")
    assert not any(text.get_text() for text in drawn[1].axes[0].texts)


def test_nothing_is_left_over_beside_the_images(model, monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr("vbcaps.figures.vae.save", lambda figure, path: drawn.append(figure) or path)
    entries(model, IMAGES[0], tmp_path / "e.png")
    overview(model, IMAGES, tmp_path / "o.png")
    for figure in drawn:
        figure.canvas.draw()
        width, height = figure.get_size_inches()
        boxes = [axes.get_position() for axes in figure.axes]  # after the aspect was applied
        assert (1 - max(box.x1 for box in boxes)) * width == pytest.approx(0.08, abs=0.03)
        assert min(box.y0 for box in boxes) * height == pytest.approx(0.07, abs=0.03)
    _, left, right = drawn[1].axes
    assert left.get_position().y0 == pytest.approx(right.get_position().y0, abs=0.01)

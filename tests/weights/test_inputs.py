"""Images of any kind become the same bytes; what is ambiguous or unusable is an error that says so."""

import dataclasses

import numpy as np
import pytest
import torch
from PIL import Image

from vbcaps.data import DataError, read_image
from vbcaps.data.mnist import DIGITS
from vbcaps.training.evaluate import Scorer
from vbcaps.training.recipes import RECIPES
from vbcaps.weights.inputs import frame_of, read_pixels, side_of, together
from vbcaps.weights.model import Model

RANDOM = np.random.default_rng(0)
COLOUR = RANDOM.integers(0, 256, (40, 30, 3), dtype=np.uint8)  # h w c
GREY = COLOUR[..., 0]
PAIRS = RANDOM.integers(0, 256, (5, 2, 40, 30), dtype=np.uint8)  # smallNORB's


@pytest.fixture
def picture(tmp_path):
    Image.fromarray(COLOUR).save(tmp_path / "a.png")
    return tmp_path / "a.png"


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("side", [24, 50])
def test_a_colour_image_is_the_same_in_every_shape(picture, channels, side):
    expected = read_image(picture, side, channels)[None]
    np.save(picture.with_suffix(".npy"), COLOUR)
    for image in (
        picture, str(picture), picture.parent / "a.npy", Image.open(picture), COLOUR, COLOUR[None],
        COLOUR.transpose(2, 0, 1)[None], torch.from_numpy(COLOUR), torch.from_numpy(COLOUR).permute(2, 0, 1)[None],
        COLOUR / 255, COLOUR.astype(np.float32), torch.from_numpy(COLOUR).double() / 255, np.flip(COLOUR[::-1], 0),
        [COLOUR], (picture,),
    ):  # fmt: skip
        assert torch.equal(read_pixels(image, side, channels), expected), type(image)
    if channels == 3:
        assert torch.equal(read_pixels(COLOUR.transpose(2, 0, 1), side, 3), expected)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_grey_image_is_the_same_in_every_shape(tmp_path, channels):
    Image.fromarray(GREY).save(tmp_path / "a.png")
    expected = read_image(tmp_path / "a.png", 24, channels)[None]
    for image in (GREY, GREY[None], GREY[..., None], GREY[None, None], GREY[None, ..., None], GREY / 255.0):
        assert torch.equal(read_pixels(image, 24, channels), expected), image.shape
    assert torch.equal(read_pixels(np.stack([GREY] * 4), 24, channels), expected.expand(4, -1, -1, -1))
    assert torch.equal(read_pixels(tmp_path, 24, channels), expected)  # a folder


def test_images_of_the_right_size_stay_as_they_are():
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    assert torch.equal(read_pixels(images, 32, 3), images)
    assert torch.equal(read_pixels(images.permute(0, 2, 3, 1), 32, 3), images)
    assert torch.equal(read_pixels(images / 255, 32, 3), images)
    grey = images[:, :1].repeat(10, 1, 1, 1)
    for n in (1, 2, 3, 40):
        assert torch.equal(read_pixels(grey[:n], 32, 1), grey[:n])


def test_images_of_two_channels():
    found = read_pixels(PAIRS, 24, 2)
    assert found.shape == (5, 2, 24, 24)
    assert torch.equal(read_pixels(PAIRS.transpose(0, 2, 3, 1), 24, 2), found)
    assert torch.equal(read_pixels(PAIRS[1], 24, 2), found[1:2])
    assert torch.equal(read_pixels(PAIRS[1].transpose(1, 2, 0), 24, 2), found[1:2])
    assert torch.equal(found[:, 1:], read_pixels(PAIRS[:, 1:], 24, 1))


def test_a_list_may_hold_images_of_every_kind(picture):
    found = read_pixels([picture, Image.open(picture), COLOUR, GREY, np.stack([GREY] * 4)], 24, 3)
    assert found.shape == (8, 3, 24, 24)
    assert torch.equal(found[0], found[2])
    assert torch.equal(found[3], found[7])


def test_the_floats_of_a_call_have_one_range():
    dark, light = np.full((24, 24), 0.5), np.full((24, 24), 200.0)
    assert read_pixels(dark, 24, 1).unique().tolist() == [128]
    assert read_pixels([dark, light], 24, 1).unique().tolist() == [0, 200]
    assert read_pixels(np.full((24, 24), 1.0, np.float16), 24, 1).unique().tolist() == [255]
    assert read_pixels([dark, np.full((24, 24), 7, np.uint8)], 24, 1).unique().tolist() == [7, 128]


@pytest.mark.parametrize(
    ("images", "channels", "error", "message"),
    [
        (np.zeros((2, 0, 24), np.uint8), 1, ValueError, r"must not be empty, got shape \(2, 0, 24\)"),
        (np.zeros((0, 24, 3), np.uint8), 3, ValueError, r"must not be empty, got shape \(0, 24, 3\)"),
        (np.zeros((0, 24), np.uint8), 1, ValueError, r"must not be empty, got shape \(0, 24\)"),
        (np.zeros((24, 24), np.int64), 1, TypeError, "must be uint8 or float, got int64"),
        (torch.zeros(24, 24, dtype=torch.bool), 1, TypeError, "must be uint8 or float, got bool"),
        (np.array(["a"]), 1, TypeError, "must be uint8 or float, got <U1"),
        (np.full((24, 24), np.nan), 1, ValueError, "got NaN or infinity"),
        (np.full((24, 24), np.inf), 1, ValueError, "got NaN or infinity"),
        (np.full((24, 24), -0.1), 1, ValueError, r"got values from -0.1 to -0.1: `predict` standardises"),
        (np.full((24, 24), 256.0), 1, ValueError, "got values from 256 to 256"),
        (np.full((24, 24), 1.5), 1, ValueError, "got values from 1.5 to 1.5, which may be either"),
        (COLOUR.transpose(2, 0, 1), 1, ValueError, r"\(3, 40, 30\) may be one image in colour or three in grey"),
        (np.zeros((4, 3, 24, 1), np.uint8), 3, ValueError, "may be n c h w or n h w c"),
        (np.zeros((3, 24, 3), np.uint8), 3, ValueError, r"with 1 or 3 channels, got shape \(3, 24, 3\)"),
        (np.zeros((24, 24, 4), np.uint8), 3, ValueError, "give RGBA as PIL images, or as RGB"),
        (np.zeros((2, 24, 24, 4), np.uint8), 3, ValueError, r"1 or 3 channels.*; give RGBA as PIL"),
        (np.zeros(24, np.uint8), 1, ValueError, r"must be h w, h w c, .* got shape \(24,\)"),
        (np.zeros((1, 1, 1, 24, 24), np.uint8), 1, ValueError, "must be h w, h w c"),
        (GREY, 2, ValueError, r"must be h w c, c h w, n h w c or n c h w with 2 channels, got shape \(40, 30\)"),
        (COLOUR, 2, ValueError, r"with 2 channels, got shape \(40, 30, 3\)"),
        (PAIRS, 3, ValueError, r"must have 1 or 3 channels, n c h w or n h w c, got shape \(5, 2, 40, 30\)"),
        (Image.fromarray(COLOUR), 2, ValueError, "a PIL image has 1 or 3 channels, and this network looks at 2"),
        ("a.png", 2, ValueError, r"a.png: a picture file has 1 or 3 channels"),
        ("none.png", 1, DataError, "none.png: cannot be read as an image"),
        ("none.npy", 1, ValueError, "none.npy: cannot be read as a NumPy array"),
        ([[1, 2], [3, 4]], 1, TypeError, "got a list in a list"),
        (3, 1, TypeError, "a path, or a list of these, got int"),
    ],
)
def test_what_is_ambiguous_or_unusable_is_an_error(images, channels, error, message):
    with pytest.raises(error, match=message):
        read_pixels(images, 24, channels)


def test_a_file_of_objects_is_not_executed(tmp_path):
    np.save(tmp_path / "a.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="cannot be read as a NumPy array"):
        read_pixels(tmp_path / "a.npy", 24, 1)


def test_the_side_of_an_image_is_that_of_the_recipes_training_images():
    assert side_of(RECIPES["affnist"]()) == 28
    assert side_of(RECIPES["cifar10"]()) == 32
    assert side_of(RECIPES["smallnorb_fast"]()) == 36
    assert side_of(dataclasses.replace(RECIPES["default"](), data="photos")) == 28


# --- a view that places small images in a frame, as that of affNIST --------------------------------------------------


@pytest.fixture(scope="module")
def framed():
    """A network of affNIST: it trains on digits of 28, and its test images fill the frame of 40."""
    recipe = dataclasses.replace(RECIPES["affnist"](), arch=(4, 2, 2, 2), standardise="none")
    torch.manual_seed(0)
    return Model(recipe.net(1, 10).eval(), recipe, DIGITS, recipe.view())


def test_images_as_large_as_the_frame_are_taken_as_they_are(framed, tmp_path):
    large = torch.randint(0, 256, (4, 1, 40, 40), dtype=torch.uint8)
    np.save(tmp_path / "a.npy", large.numpy())
    for k, image in enumerate(large):
        Image.fromarray(image[0].numpy()).save(tmp_path / f"{k}.png")
    files = [tmp_path / f"{k}.png" for k in range(4)]
    for images in (large, large[:, 0], large / 255, tmp_path / "a.npy", files, [Image.open(file) for file in files]):
        assert torch.equal(framed.read(images), large)
    colour = large.expand(-1, 3, -1, -1)
    assert framed.read(colour).shape == large.shape
    expected = Scorer(framed.net, large, framed.view, 10)()  # what `vbcaps eval` measures
    torch.testing.assert_close(framed.predict(large), expected, rtol=1e-4, atol=1e-6)


def test_smaller_images_are_framed_and_others_resized_as_before(framed):
    small = torch.randint(0, 256, (3, 1, 28, 28), dtype=torch.uint8)
    assert torch.equal(framed.read(small), small)
    assert framed.read(COLOUR).shape == (1, 1, 28, 28)
    assert framed.read(np.zeros((40, 41), np.uint8)).shape == (1, 1, 28, 28)
    cropping = RECIPES["fashion_laptop"]().view()
    assert frame_of(cropping) is None


@pytest.mark.parametrize("side", [27, 28])
def test_images_of_both_sizes_may_be_given_together(framed, side):
    small, large = (torch.randint(1, 256, (2, 1, n, n), dtype=torch.uint8) for n in (side, 40))
    both = together([small, large])
    assert both.shape == (4, 1, 40, 40)
    assert torch.equal(framed.view.test(both), torch.cat([framed.view.test(small), framed.view.test(large)]))
    if side == 28:
        assert torch.equal(framed.read([small, large]), both)

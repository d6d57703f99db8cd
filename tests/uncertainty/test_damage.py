"""Damage to images: what each kind does, by hand."""

import math

import pytest
import torch
from scipy.ndimage import gaussian_filter

from vbcaps.uncertainty.damage import LEVELS, damage


@pytest.fixture
def images():
    return torch.randint(0, 256, (3, 2, 20, 16), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


@pytest.mark.parametrize("kind", LEVELS)
def test_no_damage_leaves_images_as_they_are_and_more_damage_changes_more(images, kind):
    assert torch.equal(damage(images, kind, 0), images)
    first, last = (damage(images, kind, level) for level in (LEVELS[kind][0], LEVELS[kind][-2]))
    near, far = ((one.float() - images.float()).abs().mean() for one in (first, last))
    assert 0 < near < far
    assert first.dtype == torch.uint8
    assert torch.equal(damage(images, kind, LEVELS[kind][0]), first)  # the same every time


def test_half_a_turn_reverses_both_axes(images):
    assert torch.equal(damage(images, "rotate", 180), images.flip(2, 3))


def test_a_quarter_turn_of_a_square_is_a_transposition():
    image = torch.arange(16, dtype=torch.uint8).reshape(1, 1, 4, 4) * 10
    assert torch.equal(damage(image, "rotate", 90)[0, 0], torch.rot90(image[0, 0], 1)) or torch.equal(
        damage(image, "rotate", 90)[0, 0], torch.rot90(image[0, 0], -1)
    )


def test_blur_is_a_gaussian_filter(images):
    expected = gaussian_filter(images[0, 0].double().numpy(), 1.5, mode="nearest", truncate=5 / 1.5)
    found = damage(images, "blur", 1.5)[0, 0]
    assert (found.double() - torch.from_numpy(expected)).abs().max() <= 1.0  # rounding to bytes


def test_noise_has_the_standard_deviation_asked_for_and_another_seed_other_noise():
    grey = torch.full((50, 1, 20, 20), 128, dtype=torch.uint8)
    noisy = damage(grey, "noise", 0.1)
    assert (noisy.float() / 255).std().item() == pytest.approx(0.1, rel=0.03)
    assert not torch.equal(damage(grey, "noise", 0.1, seed=1), noisy)


def test_a_square_of_the_share_asked_for_is_hidden_in_each_image():
    white = torch.full((30, 1, 20, 20), 255, dtype=torch.uint8)
    hidden = damage(white, "occlude", 0.3) == 128
    side = round(20 * math.sqrt(0.3))
    assert hidden.sum((1, 2, 3)).tolist() == [side * side] * 30
    assert len({tuple(one.nonzero()[0].tolist()) for one in hidden}) > 10  # at many places


def test_bad_arguments_are_said(images):
    with pytest.raises(ValueError, match="kind must be one of"):
        damage(images, "melt", 1)
    with pytest.raises(ValueError, match="images must be uint8 n c y x"):
        damage(images.float(), "blur", 1)
    with pytest.raises(ValueError, match="level must be a number of at least 0, got -1"):
        damage(images, "blur", -1)

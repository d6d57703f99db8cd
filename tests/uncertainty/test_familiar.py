"""The share of familiar images that score lower, against NumPy and SciPy."""

import numpy as np
import pytest
import torch
from scipy.stats import percentileofscore

import vbcaps
from vbcaps.uncertainty import percentiles, remember_familiar, scores


@pytest.fixture
def model():
    return vbcaps.load("fashion_laptop")


def test_percentiles_are_those_of_the_images(model, tmp_path):
    familiar = torch.randn(3000, generator=torch.Generator().manual_seed(0)) ** 3
    remember_familiar(model, {"energy": familiar}, "3,000 numbers")
    asked = torch.tensor([-20.0, -1.0, -0.1, 0.0, 0.3, 2.0, 50.0])
    got = percentiles(vbcaps.load(model.save(tmp_path / "kept.safetensors")), {"energy": asked, "other": asked})
    want = [percentileofscore(familiar.numpy(), x) / 100 for x in asked.numpy()]
    assert list(got) == ["energy"]
    np.testing.assert_allclose(got["energy"].numpy(), want, atol=0.01)


def test_scores_without_spread_have_percentiles(model):
    remember_familiar(model, {"energy": torch.ones(5)}, "five equal numbers")
    got = percentiles(model, {"energy": torch.tensor([0.0, 1.0, 2.0])})["energy"]
    assert got[0] == 0
    assert got[2] == 1
    assert got.isfinite().all()


def test_no_scores_are_an_error_and_no_memory_gives_none(model):
    with pytest.raises(ValueError, match="at least one image"):
        remember_familiar(model, {"energy": torch.ones(0)}, "nothing")
    model.about.pop("familiar", None)
    assert percentiles(model, {"energy": torch.ones(2)}) == {}


@pytest.mark.parametrize("name", vbcaps.list_models())
def test_networks_in_the_package_remember_familiar_images(name):
    model = vbcaps.load(name)
    side, channels = model.view.crop, model.net.in_channels
    noise = torch.randint(0, 256, (8, channels, side, side), dtype=torch.uint8)
    got = percentiles(model, scores(model, noise))
    density = next(score for score in got if score.startswith("density."))
    assert got[density].median() > 0.9, "noise is strange to every network"
    assert model.about["familiar"]["images"]

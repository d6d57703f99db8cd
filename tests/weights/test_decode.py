"""What a Capsule-VAE does with a user's images: reconstruct, tweak, sample; and what another model says."""

import re

import numpy as np
import pytest
import tiny
import torch

import vbcaps

IMAGES = tiny.split(7, 0).images


def model_of(**fields):
    torch.manual_seed(0)
    recipe = tiny.recipe(**dict(network="vae", standardise="none", decoder=8) | fields)
    net = recipe.net(1, 3)
    for _ in range(30):
        net(torch.rand(16, 1, 20, 20))
    return vbcaps.Model(net, recipe, tiny.CLASSES, recipe.view())


@pytest.fixture(scope="module")
def model():
    return model_of()


def test_reconstructions_are_the_decoded_posterior_means(model):
    model.train()
    decoded = model.reconstruct(IMAGES, batch_size=3)
    assert model.net.training
    model.eval()
    with torch.no_grad():
        out = model(model.view.test(IMAGES))
    torch.testing.assert_close(decoded, out.images.clamp(0, 1), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model.codes(IMAGES), out.mean, rtol=1e-4, atol=1e-5)
    assert decoded.shape == (7, 1, 20, 20)
    assert 0 <= float(decoded.min()) <= float(decoded.max()) <= 1
    assert not decoded.requires_grad
    floats = np.asarray(IMAGES[0, 0]) / 255  # one image as a person has it
    torch.testing.assert_close(model.reconstruct(floats), decoded[:1], rtol=1e-4, atol=1e-5)
    of_class = model.reconstruct(IMAGES, label="bottom")
    assert torch.equal(of_class, model.reconstruct(IMAGES, label=2))
    with torch.no_grad():
        expected = model.net(model.view.test(IMAGES), torch.full((7,), 2)).images.clamp(0, 1)
    torch.testing.assert_close(of_class, expected, rtol=1e-4, atol=1e-5)


def test_a_tweak_moves_one_entry_of_the_pose(model):
    model.eval()
    frames = model.tweak(IMAGES[0], 5, [-1.0, 0.0, 2.0], label="top")
    assert frames.shape == (3, 1, 20, 20)
    torch.testing.assert_close(frames[1:2], model.reconstruct(IMAGES[0], label="top"))
    code = model.codes(IMAGES[0], label="top")
    code[:, 5] += 2
    with torch.no_grad():
        expected = model.net.decoder(code, torch.tensor([0])).clamp(0, 1)
    torch.testing.assert_close(frames[2:], expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(model.tweak(IMAGES[0], np.int64(5), np.array([-1.0, 0.0, 2.0]), label=np.int64(0)), frames)


def test_samples_follow_their_seed(model):
    first, again, other = (model.sample("middle", 4, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.shape == (4, 1, 20, 20)
    assert torch.equal(first, model.sample(1, 4, seed=1))
    assert torch.equal(first, model.sample(np.int64(1), 4, seed=1))
    torch.manual_seed(3)
    free = model.sample(1, 4, source="prior")
    torch.manual_seed(3)
    assert torch.equal(free, model.sample(1, 4, source="prior"))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m.tweak(IMAGES, 0, [0.0]), "tweak moves the pose of one image, got 7: give them one by one"),
        (lambda m: m.tweak(IMAGES[0], 16, [0.0]), "entry must be a pose entry from 0 to 15, got 16"),
        (lambda m: m.tweak(IMAGES[0], True, [0.0]), "entry must be a pose entry from 0 to 15, got True"),
        (lambda m: m.tweak(IMAGES[0], 0, []), "values must be numbers that are added to the pose entry, got none"),
        (lambda m: m.tweak(IMAGES[0], 0, [0.0, float("nan")]), "values must be finite numbers"),
        (lambda m: m.tweak(IMAGES[0], 0, torch.tensor([float("inf")])), "added to the pose entry, got inf"),
        (lambda m: m.sample(np.int64(3)), "or a number from 0 to 2; got"),
        (lambda m: m.sample("botom"), "or a number from 0 to 2; got 'botom'; did you mean 'bottom'?"),
        (lambda m: m.sample(3), "label must be one of top, middle, bottom, or a number from 0 to 2; got 3"),
        (lambda m: m.sample(0, 0), "count must be at least 1, got 0"),
        (lambda m: m.sample(0, source="posterior"), "source must be one of ('class', 'prior'), got 'posterior'"),
        (lambda m: m.reconstruct(IMAGES, batch_size=0), "batch_size must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_decoded_is_an_error(model, call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call(model)


@pytest.mark.parametrize(
    "fields", [dict(network="caps"), dict(network="cnn", iters=3, backend="auto")], ids=["caps", "cnn"]
)
def test_a_network_without_a_decoder_says_where_to_get_one(fields):
    kind = {"caps": "CapsNet", "cnn": "ConvNet"}[fields["network"]]
    other = model_of(**fields, decoder=64)
    for call in (
        lambda: other.reconstruct(IMAGES),
        lambda: other.codes(IMAGES),
        lambda: other.tweak(IMAGES[0], 0, [0.0]),
        lambda: other.sample(0),
    ):
        with pytest.raises(ValueError, match=f"tiny is a {kind} without a decoder: load a Capsule-VAE.*vae_mnist"):
            call()


def test_it_predicts_and_prints_like_any_other(model):
    scores = model.predict(IMAGES)
    torch.testing.assert_close(scores.sum(1), torch.ones(7))
    assert "CapsVAE {4,2,2,2}, VB routing in 2 iterations" in repr(model)

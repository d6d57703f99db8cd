"""A trained network as one object: predict, save, print."""

import numpy as np
import pytest
import tiny
import torch

import vbcaps
from vbcaps.inference import probabilities
from vbcaps.training.evaluate import Scorer
from vbcaps.training.files import RunError


@pytest.fixture(scope="module")
def model():
    """Random weights and statistics of random images: every class is answered."""
    torch.manual_seed(0)
    recipe = tiny.recipe(standardise="image")
    net = recipe.net(1, 3)
    for _ in range(30):
        net(torch.randn(16, 1, 20, 20))
    return vbcaps.Model(net, recipe, tiny.CLASSES, recipe.view(), dict(test_error=0.25))


IMAGES = tiny.split(23, 0).images


def test_predict_gives_probabilities_of_the_network_in_eval_mode(model):
    model.train()
    model.net.stem.eval()  # frozen, say
    scores = model.predict(IMAGES)
    assert [module.training for module in (model, model.net, model.net.stem)] == [True, True, False]
    model.eval()
    with torch.no_grad():
        expected = probabilities(model(model.view.test(IMAGES)))
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-6)
    assert scores.dtype == torch.float32
    assert not scores.requires_grad
    torch.testing.assert_close(scores.sum(1), torch.ones(23))


@pytest.mark.parametrize("batch_size", [1, 7, 23])
def test_batches_of_any_size_give_the_same(model, batch_size):
    found, expected = model.predict(IMAGES, batch_size=batch_size), model.predict(IMAGES)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_it_predicts_what_a_test_counts(model):
    expected = Scorer(model.net, IMAGES, model.view, 3, crops=5)()
    torch.testing.assert_close(model.predict(IMAGES, crops=5), expected, rtol=1e-4, atol=1e-6)


def test_predict_takes_images_of_any_kind_and_size(model):
    one = np.zeros((60, 41, 3), np.uint8)
    assert model.predict(one).shape == (1, 3)
    assert model.predict([one, one[:50, :40] / 255, IMAGES]).shape == (25, 3)
    assert torch.equal(model.predict(model.read(one)), model.predict(one))  # what is read may be read again
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        model.predict(one, batch_size=0)


def test_a_network_in_float64_predicts_too(model):
    scores = vbcaps.Model(tiny.recipe().net(1, 3).double(), tiny.recipe(), tiny.CLASSES, model.view).predict(IMAGES)
    assert scores.dtype == torch.float32


def test_gradients_go_through_a_call_and_not_through_predict(model):
    x = torch.randn(2, 1, 20, 20, requires_grad=True)
    model(x).logits.sum().backward()
    assert x.grad is not None
    with torch.inference_mode():
        model.predict(IMAGES)


def test_it_is_saved_and_read_to_the_same_bits(model, tmp_path):
    path = model.save(tmp_path / "mine.safetensors")
    again = vbcaps.load(path)
    assert again.state_dict().keys() == model.state_dict().keys()
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in model.state_dict().items())
    assert (again.recipe, again.classes, again.view) == (model.recipe, model.classes, model.view)
    assert again.about == model.about
    assert torch.equal(again.predict(IMAGES), model.eval().predict(IMAGES))
    assert again.save(tmp_path / "again").read_bytes() == path.read_bytes()
    with pytest.raises(RunError, match="cannot write"):
        model.save(tmp_path / "none" / "mine")


def test_loading_leaves_the_random_numbers_alone():
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    vbcaps.load("fashion_small")
    assert torch.equal(torch.rand(3), expected)


def test_it_prints_what_a_person_wants_to_know(model):
    assert str(vbcaps.load("smallnorb")).splitlines() == [
        "smallnorb",
        "  tells apart animal, human, airplane, truck, car",
        "  network     CapsNet {64,16,16,16}, VB routing in 3 iterations, 169,802 parameters",
        "  input       2 channels of 32 x 32, out of images of 36 x 36",
        "  test error  1.49% on smallnorb",
        f"  trained     100 epochs of smallnorb_fast, published with vbcaps {vbcaps.__version__}, commit c099da7",
        "  to use it   model.predict(images)",
    ]
    said = repr(model)
    assert "tiny" in said
    assert "not trained yet" in said
    assert "(stem): ConvStem" in repr(model.net)
    recipe = tiny.recipe(network="cnn", iters=3, backend="auto", data="photos")
    many = tuple(f"class{k}" for k in range(40))
    said = str(vbcaps.Model(recipe.net(1, 40), recipe, many, recipe.view(), dict(epoch=1)))
    assert "class11 and 28 more" in said
    assert "ConvNet {4,2,2,2}, " in said
    assert "1 epoch of tiny" in said


def test_weights_that_were_changed_by_hand_do_not_claim_the_error_of_those_before(tmp_path):
    model = vbcaps.load("fashion_small")
    assert "test error  5.33%" in str(model)
    with torch.no_grad():
        next(model.parameters()).add_(0.1)
    assert "test error" not in str(model)
    assert "by hand, begun with fashion_small" in str(model)
    kept = vbcaps.load(model.save(tmp_path / "mine.safetensors"))
    assert "test_error" not in kept.about
    assert "begun with fashion_small" in str(kept)
    assert "trained by hand since" in str(kept)
    other = vbcaps.load("fashion_small", num_classes=3)
    with torch.no_grad():
        next(other.parameters()).add_(0.1)
    assert other.origin() == "by hand, begun with fashion_small"
    assert vbcaps.load(other.save(tmp_path / "other.safetensors")).about["began_with"] == dict(weights="fashion_small")


def test_it_tells_its_classes_and_device():
    model = vbcaps.load("fashion_small")
    assert model.num_classes == len(model.classes) == 10
    assert model.device == torch.device("cpu")

"""What networks do with no images at all, and with numbers of another kind than their weights."""

import re
import warnings

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F

from vbcaps import CapsNet, CapsVAE
from vbcaps.data import View
from vbcaps.heads import BackboneCapsNet, CapsHead
from vbcaps.layers import Capsules, ConvCaps, PrimaryCaps
from vbcaps.losses import activation_nll_loss, cross_entropy, evidence_loss, spread_loss, vae_loss
from vbcaps.models import ConvNet
from vbcaps.routing import ROUTINGS
from vbcaps.weights.model import Model

NONE = torch.zeros(0, dtype=torch.int64)
TINY = dict(arch=(4, 2, 2, 2), in_channels=1, num_classes=3, image_size=20)


def images(count: int, **options: object) -> torch.Tensor:
    return torch.rand(count, 1, 20, 20, **options)


def assert_like_torch(net: torch.nn.Module, x: torch.Tensor, *outputs: torch.Tensor) -> None:
    """Hold outputs of no images to what ``nn.Conv2d`` does: gradients of the right shape, all of them 0."""
    sum(out.sum() for out in outputs).backward()
    assert x.grad.shape == x.shape
    for name, parameter in net.named_parameters():
        assert parameter.grad is not None or "decoder" in name, name
        assert parameter.grad is None or not parameter.grad.any(), name


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("backend", ["reference", "plain", "cpu", "triton", "auto"])
@pytest.mark.parametrize("routing", sorted(ROUTINGS))
def test_no_images_through_a_network(routing, backend, training):
    net = CapsNet(**TINY, routing=routing, backend=backend).train(training)
    before = {name: x.clone() for name, x in net.state_dict().items() if "batches" not in name}
    x = images(0, requires_grad=True)
    out = net(x)
    assert (out.logits.shape, out.activations.shape, out.poses.shape) == ((0, 3), (0, 3), (0, 3, 4, 4))
    assert out.posterior.m.shape[:2] == (0, 3)
    assert_like_torch(net, x, out.logits, out.poses, out.activations)
    after = net.state_dict()
    assert all(torch.equal(x, after[name]) for name, x in before.items())  # running statistics above all


def test_no_images_through_the_other_networks():
    for net, x in (
        (ConvNet(**TINY), images(0, requires_grad=True)),
        (CapsHead(8, 3, caps=(4, 4)), torch.zeros(0, 8, 30, 30, requires_grad=True)),
        (
            BackboneCapsNet(torch.nn.Conv2d(1, 4, 3), 3, caps=(4,), in_channels=1, image_size=20),
            images(0, requires_grad=True),
        ),
    ):
        out = net(x)
        assert out.logits.shape == (0, 3)
        assert_like_torch(net, x, out.logits, out.activations)


def test_no_images_through_a_vae():
    vae = CapsVAE(**TINY)
    x = images(0, requires_grad=True)
    for label in (None, NONE):
        out = vae(x, label)
        assert out.images.shape == (0, 1, 20, 20)
    assert_like_torch(vae, x, out.images, out.logits)
    vae.eval()
    assert vae.sample(NONE).shape == (0, 1, 20, 20)
    assert vae.tweak(images(0), 0, [1.0, 2.0]).shape == (2, 0, 1, 20, 20)
    assert vae_loss(images(0), out).total.isnan()


def test_losses_of_no_images_are_nan_as_those_of_torch():
    scores = torch.zeros(0, 3, requires_grad=True)
    weight = torch.ones(3)
    posterior = CapsNet(**TINY)(images(0)).posterior
    assert F.cross_entropy(scores, NONE).isnan()
    for loss in (
        cross_entropy(scores, NONE),
        cross_entropy(scores, NONE, weight=weight),
        activation_nll_loss(scores, NONE),
        spread_loss(scores, NONE, 0.5),
        evidence_loss(posterior, NONE),
        evidence_loss(posterior, torch.zeros(0, 3)),
    ):
        assert loss.isnan()


def test_predict_of_no_images():
    recipe = tiny.recipe()
    model = Model(recipe.net(1, 3), recipe, tiny.CLASSES, View(crop=20))
    wide = Model(recipe.net(1, 3), recipe, tiny.CLASSES, View(crop=20, low=(0.0,), high=(900.0,)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for nothing in ([], np.zeros((0, 22, 22), np.uint8), np.zeros((0, 9, 7)), torch.zeros(0, 1, 22, 22)):
            for crops in (1, 5):
                assert model.predict(nothing, crops=crops).shape == (0, 3)
            if getattr(nothing, "dtype", None) != np.uint8:
                assert wide.predict(nothing).shape == (0, 3)
    alone = model.predict(np.full((1, 22, 22), 0.5))
    assert torch.equal(model.predict([np.full((22, 22), 0.5), np.zeros((0, 22, 22))]), alone)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_network_in_16_bits_says_at_the_door_what_to_do(dtype):
    words = re.escape(
        f"the weights are {dtype}, and routing needs float32: keep the network in float32 (net.float()), and run it "
        f"under torch.autocast('cpu', dtype={dtype})"
    )
    for net, x in (
        (CapsNet(**TINY), images(2)),
        (CapsVAE(**TINY), images(2)),
        (CapsHead(8, 3), torch.rand(2, 8, 7, 7)),
        (ConvCaps(2, 3), Capsules(torch.rand(1, 4, 4, 2), torch.rand(1, 4, 4, 2, 4, 4))),
    ):
        net.to(dtype)
        moved = Capsules(*(part.to(dtype) for part in x[:2])) if isinstance(x, Capsules) else x.to(dtype)
        for given in (x, moved):
            with pytest.raises(TypeError, match=words):
                net(given)
    recipe = tiny.recipe()
    with pytest.raises(TypeError, match=words):
        Model(recipe.net(1, 3), recipe, tiny.CLASSES, View(crop=20)).to(dtype).predict(np.zeros((22, 22), np.uint8))
    net = CapsNet(**TINY).eval()
    with torch.autocast("cpu", dtype=dtype):  # what the message says works, with images of 32 and of 16 bits
        assert net(images(2)).logits.dtype == torch.float32
        net(images(2).to(dtype))


@pytest.mark.parametrize("network", [CapsNet, CapsVAE, ConvNet])
def test_images_of_another_dtype_than_the_weights(network):
    for net, x, give in (
        (network(**TINY), images(2).double(), "images.float()"),
        (network(**TINY).double(), images(2), "images.double()"),
        (network(**TINY), images(2).half(), "images.float()"),
    ):
        kind = next(net.parameters()).dtype
        with pytest.raises(
            TypeError, match=re.escape(f"images must be {kind} as the weights are, got {x.dtype}: give {give}")
        ):
            net(x)
        net(x.to(kind))
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(TypeError, match=r"images must be torch\.float32"):
        network(**TINY)(images(2).double())
    with pytest.raises(TypeError, match=r"x must be torch.float32 as the weights are, got torch.float64: give x.float"):
        PrimaryCaps(4, 2)(torch.rand(1, 4, 5, 5).double())

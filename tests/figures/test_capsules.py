"""The picture of capsules, and the parts of an image that it shows."""

import pytest
import torch
from PIL import Image

from vbcaps import CapsNet, Model
from vbcaps.figures.capsules import capsules, parts_of_class, shares_of_children
from vbcaps.training.recipe import Recipe

pytest.importorskip("matplotlib")


def model(**fields):
    recipe = Recipe(arch=(4, 3, 3, 3), crop=24, dataset="sample", standardise="none", **fields)
    torch.manual_seed(0)
    return Model(recipe.net(1, 4), recipe, ("a", "b", "c", "d"), recipe.view())


@pytest.mark.parametrize("routing", ["vb", "em", "dynamic"])
def test_what_a_class_holds_is_divided_among_the_parts_of_the_image(routing):
    torch.manual_seed(0)
    net = CapsNet((4, 3, 3, 3), 1, 4, 24, routing).eval()
    with torch.no_grad():
        trace = net.trace(torch.randn(1, 1, 24, 24))
    layer = trace.layers["conv_caps2"]
    L = len(layer.fields.child)
    held = shares_of_children(layer, torch.eye(L * 3)[4].reshape(L, 3))  # of type 1 in field 1
    a, r = layer.activations[0, 1], layer.iterations[-1].r[0, 1, :, 1]
    expected = torch.zeros(len(held)).index_add(0, layer.fields.child[1], a * r / (a * r).sum())
    torch.testing.assert_close(held, expected)
    for j in range(4):
        parts = parts_of_class(trace, j)
        assert parts.shape == trace.layers["conv_caps1"].children.activations.shape[1:3]
        assert parts.min() >= 0
        assert parts.sum() == pytest.approx(1, abs=1e-5)
    first, last = (torch.stack([parts_of_class(trace, j, t) for j in range(4)]) for t in (0, -1))
    torch.testing.assert_close(first, first[:1].expand_as(first))  # before routing all classes hold the same
    assert routing == "dynamic" or not torch.allclose(last[0], last[1], atol=1e-7)


@pytest.mark.parametrize("routing", ["vb", "em"])
def test_the_picture_is_drawn_and_leaves_the_network_as_it_was(routing, tmp_path):
    made = model(routing=routing).train()
    before = {name: x.clone() for name, x in made.state_dict().items()}
    path = capsules(made, torch.randint(0, 256, (28, 28), dtype=torch.uint8), tmp_path / "c.png", truth="$a")
    with Image.open(path) as picture:
        assert picture.width > 900
        assert len(picture.convert("L").getcolors()) > 50
    assert made.training
    assert all(torch.equal(x, before[name]) for name, x in made.state_dict().items())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_picture_of_a_network_on_a_gpu_is_drawn(tmp_path):
    one = model().to("cuda")
    assert capsules(one, torch.randint(0, 256, (24, 24), dtype=torch.uint8), tmp_path / "a.png").exists()


def test_several_images_or_a_network_without_capsules_are_an_error(tmp_path):
    images = torch.zeros(2, 28, 28, dtype=torch.uint8)
    with pytest.raises(ValueError, match="of one image"):
        capsules(model(), images, tmp_path / "c.png")
    with pytest.raises(ValueError, match="a network that has capsules"):
        capsules(model(network="cnn", loss_on="logits"), images[0], tmp_path / "c.png")

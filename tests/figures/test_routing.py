"""The figure of an image's routing: what is drawn is what the trace and the model say."""

import re

import matplotlib
import numpy as np
import pytest
import torch
from PIL import Image

from vbcaps import Model
from vbcaps.figures import routing as figure_of
from vbcaps.figures.routing import routing, seen_by, trace_of
from vbcaps.trace import cloud_of, parts_of
from vbcaps.training.recipe import Recipe

pytest.importorskip("matplotlib")
CLASSES = ("a", "b", "$c", "d")


def model(channels=1, **fields):
    fields = dict(network="caps", arch=(4, 3, 3, 3), crop=24, dataset="sample", standardise="none") | fields
    recipe = Recipe(**fields)
    torch.manual_seed(0)
    return Model(recipe.net(channels, 4), recipe, CLASSES, recipe.view()).eval()


def image(channels=1):
    return torch.randint(0, 256, (1, channels, 28, 28), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved, as matplotlib's objects."""
    figures = []

    def keep(figure, path):
        figures.append(figure)
        return save(figure, path)

    save = figure_of.save
    monkeypatch.setattr(figure_of, "save", keep)
    return figures


def panels(figure, steps, shown):
    """The axes by name: image, pose, heat maps ``t j``, clouds ``t``."""
    left, right = figure.subfigs
    grid = np.array(right.axes[: steps * (shown + 1)]).reshape(steps, shown + 1)
    return left.axes[0], left.axes[1], grid[:, :-1], grid[:, -1]


@pytest.mark.parametrize("routing_name", ["vb", "em", "dynamic"])
@pytest.mark.parametrize("iters", [2, 3])
def test_the_numbers_drawn_are_those_of_trace_and_predict(routing_name, iters, drawn, tmp_path):
    made, pixels = model(routing=routing_name, iters=iters), image()
    routing(made, pixels, tmp_path / "r.png")
    seen, pose, heats, clouds = panels(drawn[0], iters, 3)
    trace, probabilities = trace_of(made, made.net, pixels), made.predict(pixels)[0]
    best = probabilities.argsort(descending=True)[:3].tolist()
    assert np.array_equal(seen.images[0].get_array(), seen_by(made, pixels)[0])
    for t in range(iters):
        for column, j in enumerate(best):
            expected = 100 * parts_of(trace, "class_caps", 0, j, t).numpy()
            np.testing.assert_allclose(heats[t, column].images[0].get_array(), expected, rtol=1e-6)
            if t == 0:
                name = f"{CLASSES[j]}\n{100 * float(probabilities[j]):.1f}%"
                assert heats[0, column].get_title() == name
    assert len({one.images[0].get_clim() for one in heats.flat}) == 1  # one scale

    cloud = cloud_of(trace, "class_caps", 0, best[0])
    for t, one in enumerate(clouds):
        circles = one.collections[0]
        np.testing.assert_allclose(circles.get_offsets(), cloud.votes.numpy(), rtol=1e-6)
        area = circles.get_sizes()
        np.testing.assert_allclose(area / area.max(), (cloud.weight[t] / cloud.weight[t].max()).numpy(), rtol=1e-5)
        np.testing.assert_allclose(np.ravel(one.lines[0].get_data()), cloud.mean[t].numpy())
        assert (one.get_xlim(), one.get_ylim()) == (clouds[0].get_xlim(), clouds[0].get_ylim())
        for outline, spread in (
            (one.lines[1].get_xydata() if len(one.lines) > 1 else None, cloud.spread),
            (one.patches[0].get_xy() if one.patches else None, cloud.spread_of_mean),
        ):
            assert (outline is None) == (spread is None)
            if outline is not None:  # every point lies two standard deviations from the mean
                x = outline - cloud.mean[t].numpy()
                np.testing.assert_allclose(np.einsum("pa,ab,pb->p", x, np.linalg.inv(spread[t].numpy()), x), 4)
    sizes = [one.collections[0].get_sizes() for one in clouds]
    scale = cloud.weight.max() / max(size.max() for size in sizes)  # the same area means the same weight in every row
    np.testing.assert_allclose(np.stack(sizes) * float(scale), cloud.weight.numpy(), rtol=1e-5, atol=1e-9)

    q = trace.layers["class_caps"].iterations[-1]
    variance = dict(vb=lambda: q.variance(), em=lambda: q.var, dynamic=lambda: None)[routing_name]()
    written = [text.get_text().replace("\N{MINUS SIGN}", "-") for text in pose.texts]
    for d, text in enumerate(written):
        numbers = [float(x) for x in re.findall(r"-?[\d.]+", text)]
        expected = [q.m[0, best[0], d].item()]
        expected += [] if variance is None else [variance[0, best[0], d].sqrt().item()]
        assert numbers == pytest.approx(expected, abs=0.0051)
    if routing_name == "vb":
        layer = trace.layers["class_caps"]
        for t, q in enumerate(layer.iterations):
            bound = float(q.elbo(layer.activations, layer.votes).total)
            assert f"={bound:.0f}$" in heats[t, 0].get_ylabel()
    else:
        assert heats[0, 0].get_ylabel() == "iteration 1"


def test_the_class_that_is_asked_for_comes_first(drawn, tmp_path):
    made, pixels = model(), image()
    probabilities = made.predict(pixels)[0]
    least = int(probabilities.argmin())
    for label in (least, CLASSES[least]):
        routing(made, pixels, tmp_path / "r.png", label=label)
        _, pose, heats, clouds = panels(drawn[-1], 3, 3)
        first = f"{CLASSES[least]}\n{100 * float(probabilities[least]):.1f}%"
        assert heats[0, 0].get_title() == first
        assert int(probabilities.argmax()) == [*CLASSES].index(heats[0, 1].get_title().split("\n")[0])
        trace = trace_of(made, made.net, pixels)
        np.testing.assert_allclose(pose.images[0].get_array().ravel(), trace.output.posterior.m[0, least].numpy())
        cloud = cloud_of(trace, "class_caps", 0, least)
        np.testing.assert_allclose(clouds[0].collections[0].get_offsets(), cloud.votes.numpy(), rtol=1e-6)


@pytest.mark.parametrize(
    ("channels", "fields"),
    [(2, {}), (3, dict(stem="residual")), (1, dict(iters=1)), (1, dict(precision="full")), (1, dict(network="vae"))],
)
def test_networks_of_all_kinds_are_drawn(channels, fields, tmp_path):
    if fields.get("network") == "vae":
        fields = fields | dict(decoder=8, eta=0.1)
    made = model(channels, **fields)
    routing(made, image(channels), tmp_path / "r.png", truth="$a")
    with Image.open(tmp_path / "r.png") as picture:
        assert picture.width == 2100  # 7 inches at 300 dots
        assert len(picture.convert("L").getcolors()) > 50


def test_an_image_of_one_value_is_drawn(tmp_path):
    assert routing(model(), torch.zeros(28, 28, dtype=torch.uint8), tmp_path / "r.png").exists()


@pytest.mark.parametrize(("name", "start"), [("r.png", b"\x89PNG"), ("r.PDF", b"%PDF"), ("r.svg", b"<?xml")])
def test_the_suffix_says_the_format(name, start, tmp_path):
    before = dict(matplotlib.rcParams)
    written = routing(model(), image(), tmp_path / "new" / name).read_bytes()
    assert written.startswith(start)
    assert b"/Type3" not in written
    assert (name != "r.PDF") or b"/FontFile2" in written
    assert dict(matplotlib.rcParams) == before


def test_the_network_stays_as_it_was(tmp_path):
    made = model().train()
    before = {name: x.clone() for name, x in made.state_dict().items()}
    routing(made, image(), tmp_path / "r.png")
    assert made.training
    assert all(torch.equal(x, before[name]) for name, x in made.state_dict().items())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_figure_of_a_network_on_a_gpu_is_drawn(tmp_path):
    assert routing(model().to("cuda"), image(), tmp_path / "r.png").exists()


def test_what_cannot_be_drawn_is_an_error_before_anything_is_computed(tmp_path, monkeypatch):
    made = model()
    with pytest.raises(ValueError, match="of one image, got 2: give one of them"):
        routing(made, torch.zeros(2, 28, 28, dtype=torch.uint8), tmp_path / "r.png")
    with pytest.raises(ValueError, match="is a CNN, which has no routing: draw a capsule network"):
        routing(model(network="cnn", loss_on="logits"), image(), tmp_path / "r.png")
    monkeypatch.setattr(Model, "read", None)
    with pytest.raises(ValueError, match=r"must end in .png, .pdf or .svg, got .*r.jpg"):
        routing(made, image(), tmp_path / "r.jpg")
    with pytest.raises(ValueError, match="label must be one of a, b"):
        routing(made, image(), tmp_path / "r.png", label="e")
    assert not list(tmp_path.iterdir())

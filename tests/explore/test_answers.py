"""What the explorer shows: the numbers of ``predict``, ``scores`` and ``trace``, from one trace for all panels."""

import base64
import io
import threading

import numpy as np
import pytest
import torch
from PIL import Image

import vbcaps
from vbcaps.explore.answers import KEPT, POINTS, Explorer
from vbcaps.explore.networks import FIRST, Networks
from vbcaps.explore.pictures import CHANGES, Refused, as_png, changed, read_changes
from vbcaps.trace import cloud_of, parts_of
from vbcaps.uncertainty import percentiles, scores
from vbcaps.vae import capsules_of

CLOSE = dict(rtol=2e-5, atol=1e-6)


@pytest.fixture(scope="module")
def explorer():
    return Explorer(Networks(data_folder="no/such/folder"))


def scene(model=FIRST, sample=3, **changes):
    return dict(model=model, image=dict(sample=sample), changes=changes)


def pixels_of(explorer, sent):
    images = explorer.networks.images(sent["model"]).pixels
    number = sent["image"]["sample"]
    return changed(images[number : number + 1], read_changes(sent["changes"]))


def decoded(png):
    return np.array(Image.open(io.BytesIO(base64.b64decode(png))))


# --- networks --------------------------------------------------------------------------------------------------------


def test_every_network_of_the_package_can_be_chosen(explorer):
    catalogue = explorer.catalogue()
    assert sorted(one["name"] for one in catalogue["models"]) == vbcaps.list_models()
    assert catalogue["models"][0]["name"] == catalogue["model"] == FIRST
    assert [one["name"] for one in catalogue["changes"]] == list(CHANGES)


def test_twins_are_equal_networks_that_route_otherwise(explorer):
    twins = explorer.about(FIRST)["twins"]
    assert [(one["name"], one["routing"]) for one in twins] == [
        ("fashion_em_laptop", "em"), ("fashion_dynamic_laptop", "dynamic"), ("fashion_cnn_laptop", None)
    ]  # fmt: skip
    assert explorer.about("fashion_em_laptop")["twins"][0]["name"] == FIRST, "not the one trained for evidence"
    assert explorer.about("svhn")["twins"] == []


def test_a_vae_is_found_by_its_images(explorer):
    assert [explorer.networks.vae(name) for name in (FIRST, "fashion", "vae_mnist", "affnist", "svhn")] == [
        "vae_fashion", "vae_fashion", "vae_mnist", None, None
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["fashion_laptop", "cifar10_residual", "smallnorb", "affnist"])
def test_layers_are_those_of_a_trace(explorer, name):
    about = explorer.about(name)
    for layer in about["layers"]:
        sent = scene(name) | dict(parent=dict(layer=layer["name"], position=0, type=0))
        positions = layer["rows"] * layer["columns"]
        assert np.shape(explorer.routing(sent)["activations"]) == (positions, layer["types"])


def test_the_page_knows_the_rule_and_the_softness_of_a_network(explorer):
    names = ("fashion_laptop", "fashion", "fashion_em_laptop", "fashion_cnn_laptop")
    found = [(explorer.about(name)["printed_rule"], explorer.about(name)["softness"]) for name in names]
    assert found == [(False, 1.0), (True, 1.0), (False, 1.0), (False, 1.0)]


def test_the_sheet_has_the_samples(explorer):
    samples = explorer.about(FIRST)["samples"]
    sheet, tile = decoded(samples["sheet"]), samples["tile"]
    number = samples["classes"][4]["samples"][5]
    row, column = divmod(number, samples["columns"])
    cut = sheet[row * tile : (row + 1) * tile, column * tile : (column + 1) * tile]
    assert np.array_equal(cut, decoded(explorer.look(scene(sample=number))["picture"]))
    assert samples["note"] == ""


def test_smaller_images_are_framed_as_predict_frames_them(explorer):
    model = vbcaps.load("affnist")
    images = explorer.networks.images("affnist").pixels
    assert images.shape[2:] == (40, 40)
    inside = images[:5, :, 6:34, 6:34]
    torch.testing.assert_close(model.predict(images[:5]), model.predict(inside))


def test_where_the_images_of_a_network_are_missing_the_page_says_so(explorer):
    samples = explorer.about("svhn")["samples"]
    assert "vbcaps data fetch svhn" in samples["note"]
    assert "never seen" in samples["note"]
    assert len(samples["classes"]) == 10


def test_a_run_of_ones_own_comes_first(tmp_path):
    path = vbcaps.load("fashion_em_laptop").save(tmp_path / "mine.safetensors")
    networks = Networks(path)
    assert networks.sorted()[0] == networks.first
    assert str(tmp_path) not in str(Explorer(networks).catalogue()), "a page must not learn paths"
    assert networks.first == "mine"
    with pytest.raises(Refused, match="there is no network"):
        networks.model(str(path))


def test_a_file_with_the_name_of_a_shipped_network_does_not_replace_it(tmp_path):
    path = vbcaps.load("fashion_em_laptop").save(tmp_path / "smallnorb.safetensors")
    networks = Networks(path)
    assert networks.first == "smallnorb-2"
    assert networks.models["smallnorb"].classes[0] == "animal"
    (tmp_path / "run" / "seed3").mkdir(parents=True)
    last = vbcaps.load("fashion_em_laptop").save(tmp_path / "run" / "seed3" / "last.safetensors")
    assert Networks(last).first == "run-seed3"


def test_a_network_that_diverged_is_refused_in_words(tmp_path):
    model = vbcaps.load("fashion_laptop")
    with torch.no_grad():
        model.net.class_caps.weight.fill_(1e38)  # a file with NaN would not be loaded
    explorer = Explorer(Networks(model.save(tmp_path / "broken.safetensors")))
    for answer in (explorer.look, explorer.routing):
        with pytest.raises(Refused, match="not finite"):
            answer(scene("broken") | dict(parent=CLASS))


# --- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [FIRST, "fashion_em_laptop", "fashion_cnn_laptop", "vae_fashion", "smallnorb_small"])
def test_the_answer_is_that_of_predict(explorer, name):
    sent = scene(name, rotate=25, blur=0.7)
    found, pixels = explorer.look(sent), pixels_of(explorer, sent)
    want = vbcaps.load(name).predict(pixels)[0]
    np.testing.assert_allclose(found["answer"]["probabilities"], want, **CLOSE)
    for twin in found["twins"]:
        want = vbcaps.load(twin["name"]).predict(pixels)[0]
        np.testing.assert_allclose(twin["probabilities"], want, **CLOSE)


def test_scores_and_gauge_are_those_of_the_library(explorer):
    sent = scene(noise=0.3)
    found, model = explorer.look(sent), vbcaps.load(FIRST)
    want = scores(model, pixels_of(explorer, sent))
    places = percentiles(model, want)
    assert {row["name"] for row in found["scores"]} == set(want)
    assert found["scores"][0]["name"] == found["gauge"]["score"]
    for row in found["scores"]:
        assert row["value"] == pytest.approx(float(want[row["name"]]), rel=1e-4, abs=1e-6)
        assert row["percentile"] == pytest.approx(float(places[row["name"]]), abs=1e-5)
        assert row["title"]
        assert row["symbol"]
    assert found["gauge"]["score"].startswith("density.")
    assert f"{100 * found['gauge']['percentile']:.0f}% of 2,000 test images" in found["gauge"]["sentence"]


def test_strangers_move_the_gauge(explorer):
    familiar = [explorer.look(scene(sample=k))["gauge"]["percentile"] for k in range(0, 200, 20)]
    strange = [explorer.look(scene(sample=k, noise=0.6))["gauge"]["percentile"] for k in range(0, 200, 20)]
    assert np.median(familiar) < 0.8
    assert np.median(strange) > 0.95


def test_the_interval_holds_samples_of_the_posterior(explorer):
    answer = explorer.look(scene())["answer"]
    low, p, high = (np.array(answer[key]) for key in ("low", "probabilities", "high"))
    assert (low <= high).all()
    assert ((high - low) > 0).any()
    assert answer == explorer.look(scene())["answer"], "the same image has the same interval"
    best = p.argmax()
    assert low[best] <= p[best] + 0.3
    for name in ("fashion_em_laptop", "fashion_cnn_laptop"):
        assert explorer.look(scene(name))["answer"]["low"] is None


@pytest.mark.parametrize(
    ("layer", "position", "type"), [("class_caps", 0, 7), ("conv_caps1", 11, 2), ("conv_caps2", 8, 0)]
)
def test_routing_is_that_of_a_trace(explorer, layer, position, type):
    sent = scene(rotate=-40) | dict(parent=dict(layer=layer, position=position, type=type))
    found = explorer.routing(sent)
    assert len(found["networks"]) == (3 if layer == "class_caps" else 1)
    for one in found["networks"]:
        model = vbcaps.load(one["name"])
        net = capsules_of(model.net)
        with torch.no_grad():
            trace = net.trace(model.view.test(pixels_of(explorer, sent)))
        cloud = cloud_of(trace, layer, position, type)
        for t in range(model.recipe.iters):
            np.testing.assert_allclose(one["parts"][t], parts_of(trace, layer, position, type, t), **CLOSE)
        for key, want in cloud._asdict().items():
            if want is None:
                assert one["cloud"][key] is None
            else:
                np.testing.assert_allclose(one["cloud"][key], want, rtol=1e-4, atol=1e-5)
        q = trace.layers[layer].iterations[-1]
        rows = q.m[0] if layer == "class_caps" else q.m[0, position]
        np.testing.assert_allclose(one["pose"], rows[type], **CLOSE)
        if one["routing"] == "vb":
            part = trace.layers[layer]
            bounds = [q.elbo(part.activations, part.votes) for q in part.iterations]
            np.testing.assert_allclose([b["total"] for b in one["elbo"]], [float(b.total) for b in bounds], rtol=1e-4)
            deviation = q.variance().sqrt()[0]
            rows = deviation if layer == "class_caps" else deviation[position]
            np.testing.assert_allclose(one["deviation"], rows[type], **CLOSE)
        else:
            assert one["elbo"] is None


def test_one_trace_serves_all_panels(explorer, monkeypatch):
    sent = scene(sample=9, rotate=7)
    net, traced = capsules_of(explorer.networks.models[FIRST].net), []
    trace = net.trace
    monkeypatch.setattr(net, "trace", lambda x: traced.append(1) or trace(x))
    for type in range(3):
        explorer.routing(sent | dict(parent=dict(layer="class_caps", position=0, type=type)))
    explorer.routing(sent | dict(parent=dict(layer="conv_caps1", position=3, type=0)))
    assert len(traced) == 1
    for sample in range(KEPT + 3):
        explorer.trace(FIRST, explorer.networks.images(FIRST).pixels[sample : sample + 1])
    assert len(explorer.traces) == KEPT


def test_a_sweep_has_the_pose_of_each_frame(explorer):
    found = explorer.sweep(scene(right=5) | dict(sweep="rotate", type=2))
    assert len(found["values"]) == len(found["poses"]) == POINTS
    middle = POINTS // 2
    assert found["values"][middle] == 0
    at_rest = explorer.routing(scene(right=5) | dict(parent=dict(layer="class_caps", position=0, type=2)))["networks"][
        0
    ]
    np.testing.assert_allclose(found["poses"][middle], at_rest["pose"], rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(found["deviations"][middle], at_rest["deviation"], rtol=1e-3, atol=1e-4)
    want = explorer.look(scene(right=5))["answer"]["probabilities"][2]
    assert found["probabilities"][middle] == pytest.approx(want, rel=1e-3, abs=1e-5)
    assert np.ptp(found["poses"], axis=0).max() > 0.01, "the pose must move"


def test_what_is_decoded_is_that_of_reconstruct_and_tweak(explorer):
    sent, model = scene("fashion"), vbcaps.load("vae_fashion")
    pixels = pixels_of(explorer, sent)
    found = explorer.decode(sent | dict(entries=[0.0] * 16, type=None))
    want = (model.reconstruct(pixels)[0, 0] * 255).round().byte().numpy()
    assert np.abs(decoded(found["picture"]).astype(int) - want).max() <= 1
    np.testing.assert_allclose(found["mean"], model.codes(pixels)[0], rtol=1e-3, atol=1e-4)
    entries = [0.0] * 16
    entries[5] = 0.8
    moved = explorer.decode(sent | dict(entries=entries, type=4))
    want = (model.tweak(pixels, 5, [0.8], label=4)[0, 0] * 255).round().byte().numpy()
    assert np.abs(decoded(moved["picture"]).astype(int) - want).max() <= 1
    assert moved["class"] == 4


def test_a_picture_of_ones_own_is_seen_as_predict_sees_it(explorer):
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randint(0, 256, (1, 1, 28, 28), dtype=torch.uint8, generator=generator)
    found = explorer.look(dict(model=FIRST, image=dict(pixels=as_png(pixels[0])), changes={}))
    np.testing.assert_allclose(found["answer"]["probabilities"], vbcaps.load(FIRST).predict(pixels)[0], **CLOSE)
    assert np.array_equal(decoded(found["picture"]), pixels[0, 0])


def test_many_pages_at_once_get_their_own_answers(explorer):
    sent = [
        scene(sample=k, rotate=k) | dict(parent=dict(layer="class_caps", position=0, type=k % 10)) for k in range(20)
    ]
    alone = [(explorer.look(one), explorer.routing(one)) for one in sent]
    found = [None] * 20

    def ask(k):
        found[k] = explorer.look(sent[k]), explorer.routing(sent[k])

    threads = [threading.Thread(target=ask, args=(k,)) for k in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for (look, routing), (look_alone, routing_alone) in zip(found, alone, strict=True):
        assert look | dict(milliseconds=0) == look_alone | dict(milliseconds=0)
        assert routing == routing_alone


# --- refusals --------------------------------------------------------------------------------------------------------

CLASS = dict(layer="class_caps", position=0, type=0)


@pytest.mark.parametrize(
    ("answer", "sent", "words"),
    [
        ("look", {}, "there is no network None"),
        ("look", scene("../../etc/passwd"), "there is no network"),
        ("look", dict(model=FIRST), "image must be"),
        ("look", dict(model=FIRST, image=dict(sample=1, pixels="")), "image must be"),
        ("look", scene(sample=200), "sample must be a whole number from 0 to 199"),
        ("look", scene(sample=-1), "sample must be"),
        ("look", scene(sample=1.5), "sample must be"),
        ("look", scene(sample=True), "sample must be"),
        ("look", scene(rotate=1e9), "rotate must be a number from -180 to 180"),
        ("routing", scene(), "parent must be"),
        ("routing", scene() | dict(parent=dict(CLASS, layer="stem")), "parent must be"),
        ("routing", scene() | dict(parent=dict(CLASS, type=10)), "type must lie from 0 to 9"),
        ("routing", scene() | dict(parent=dict(CLASS, position=1)), "position must lie from 0 to 0"),
        ("routing", scene("fashion_cnn_laptop") | dict(parent=CLASS), "is a CNN"),
        ("sweep", scene() | dict(sweep="blur", type=0), "sweep must be one of rotate, right, down"),
        ("sweep", scene() | dict(sweep="rotate", type=10), "type must be"),
        ("sweep", scene("fashion_cnn_laptop") | dict(sweep="rotate", type=0), "is a CNN"),
        ("decode", scene("svhn") | dict(entries=[0] * 16), "there is no Capsule-VAE for svhn; there are vae_fashion"),
        ("decode", scene() | dict(entries=[0] * 15), "16 pose entries, got 15"),
        ("decode", scene() | dict(entries=[0] * 15 + [float("nan")]), "between -1000 and 1000"),
        ("decode", scene() | dict(entries="0"), "list of numbers"),
        ("decode", scene() | dict(entries=[0] * 16, type=10), "type must be"),
    ],
)
def test_what_cannot_be_shown_is_refused_in_words(explorer, answer, sent, words):
    with pytest.raises(Refused, match=words):
        getattr(explorer, answer)(sent)

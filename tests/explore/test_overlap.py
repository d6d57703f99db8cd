"""The explorer of a network that names overlapping objects: pairs to choose from, and what each object took."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from vbcaps.data import load_dataset, overlapping
from vbcaps.explore.answers import Explorer
from vbcaps.explore.networks import Networks
from vbcaps.trace import frame_of_parts, parts_of
from vbcaps.training.recipe import Recipe
from vbcaps.vae import capsules_of
from vbcaps.weights.model import Model

CLOSE = dict(rtol=1e-4, atol=1e-5)
SETTINGS: dict = dict(dataset="sample", objects=2, crop=36, loss_on="logits", standardise="image")


@pytest.fixture(scope="module")
def networks(tmp_path_factory):
    """A capsule network and its CNN with random weights."""
    folder, split = tmp_path_factory.mktemp("explore"), load_dataset("sample").train
    torch.manual_seed(0)
    for name, fields in dict(pairs={}, cnn=dict(network="cnn", arch=(16, 16, 16, 16))).items():
        recipe = Recipe(**dict(name=name, arch=(8, 4, 4, 4)) | SETTINGS | fields)
        net = recipe.net(1, 10)
        with torch.no_grad():
            net(recipe.view().test(overlapping(split.take(torch.arange(64)), 2, 36).images))
        classes = load_dataset("sample").classes
        Model(net.eval(), recipe, classes, recipe.view()).save(folder / f"{name}.safetensors")
    found = Networks(folder / "pairs.safetensors", "no/such/folder")
    found.models["cnn"] = Networks(folder / "cnn.safetensors", "no/such/folder").models["cnn"]
    return found


@pytest.fixture(scope="module")
def explorer(networks):
    return Explorer(networks)


def scene(name, sample=3):
    return dict(model=name, image=dict(sample=sample), changes={})


def test_the_samples_are_pairs_with_their_true_classes(explorer, networks):
    about, images = explorer.about("pairs"), networks.images("pairs")
    test = overlapping(load_dataset("sample").test, 2, 36)
    assert images.pixels.shape[1:] == (1, 36, 36)
    assert (about["objects"], about["samples"]["title"]) == (2, "200 images of 2 test images each")
    assert "2 overlapping objects" in about["title"]
    for k in (0, 57, 199):
        (at,) = [i for i, one in enumerate(test.images) if torch.equal(one, images.pixels[k])]
        assert about["samples"]["truths"][k] == " + ".join(images.classes[j] for j in test.labels[at].tolist())
        group = about["samples"]["classes"][int(test.labels[at, 0])]
        assert k in group["samples"]
    assert explorer.about("fashion_laptop")["samples"]["truths"][25] == networks.images("fashion_laptop").classes[1]
    assert about["vae"] is None


def test_each_object_that_is_named_has_the_parts_that_its_capsule_took(explorer, networks):
    found, model = explorer.look(scene("pairs")), networks.models["pairs"]
    pixels = networks.images("pairs").pixels[3:4]
    scores = model.predict(pixels)[0]
    np.testing.assert_allclose(found["answer"]["probabilities"], scores, **CLOSE)
    assert [one["type"] for one in found["taken"]["objects"]] == scores.topk(2).indices.tolist()
    net = capsules_of(model.net)
    with torch.no_grad():
        trace = net.trace(model.view.test(pixels))
    for one in found["taken"]["objects"]:
        np.testing.assert_allclose(one["parts"], parts_of(trace, "class_caps", 0, one["type"]), **CLOSE)
    assert tuple(found["taken"]["frame"].values()) == frame_of_parts(net)
    assert found["scores"] == []
    assert found["answer"]["low"] is None
    assert explorer.look(scene("cnn"))["taken"] is None
    assert explorer.look(scene("fashion_laptop"))["taken"] is None


def test_the_page_names_all_objects_and_draws_what_each_took(networks):
    pytest.importorskip("selenium", reason="the browser's tests need Selenium: pip install 'vbcaps[test]'")
    sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
    browser = importlib.import_module("browser")
    if browser.missing():
        pytest.skip(browser.missing())
    model, images = networks.models["pairs"], networks.images("pairs")
    best = model.predict(images.pixels[57:58])[0].topk(2).indices.tolist()
    with browser.serving(networks) as address, browser.chromium() as driver:
        driver.get_log("browser")
        browser.visit(driver, address, "#model=pairs&sample=57")
        said = driver.find_element("css selector", "#bars").text
        assert " + ".join(model.classes[j] for j in best) in said
        truth = " + ".join(images.classes[j] for j in images.labels[57].tolist())
        assert driver.find_element("css selector", "#truth").text == f"In the image: {truth}"
        drawn = driver.find_elements("css selector", "[data-taken]")
        assert [int(one.get_attribute("data-class")) for one in drawn] == best
        with torch.no_grad():
            trace = capsules_of(model.net).trace(model.view.test(images.pixels[57:58]))
        for one, j in zip(drawn, best, strict=True):
            values = json.loads(one.get_attribute("data-taken"))
            np.testing.assert_allclose(values, parts_of(trace, "class_caps", 0, j), **CLOSE)
        driver.execute_script("arguments[0].dispatchEvent(new MouseEvent('click', {bubbles: true}))", drawn[1])
        browser.settle(driver)
        assert driver.execute_script("return window.explorer.parent.type") == best[1]
        assert "class is in the image" in driver.find_element("css selector", "#answer-says").text
        assert [line for line in driver.get_log("browser") if line["level"] == "SEVERE"] == []

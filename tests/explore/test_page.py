"""The explorer's page in a real browser: what is drawn is what the library computes.

Without Chromium the tests are skipped with a word that says how to get it.
"""

import base64
import copy
import dataclasses
import importlib
import io
import json
import math
import re
import sys
import time
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vbcaps.explore.networks import FIRST, Networks
from vbcaps.explore.pictures import changed, from_png, read_changes
from vbcaps.trace import cloud_of, frame_of_parts, parts_of, receptive_field
from vbcaps.vae import capsules_of

pytest.importorskip("selenium", reason="the browser's tests need Selenium: pip install 'vbcaps[test]'")
sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))  # as for `python tools/screenshots.py`
browser = importlib.import_module("browser")
pytestmark = pytest.mark.skipif(browser.missing() is not None, reason=str(browser.missing()))

CLOSE = dict(rtol=1e-4, atol=1e-5)


@pytest.fixture(scope="module")
def networks():
    return Networks(data_folder="no/such/folder")


@pytest.fixture(scope="module")
def downloads(tmp_path_factory):
    return tmp_path_factory.mktemp("downloads")


@pytest.fixture(scope="module")
def served(networks, downloads):
    with browser.serving(networks) as address, browser.chromium(downloads=downloads) as driver:
        yield driver, address


class Page:
    """A page of the explorer at a link, and what it shows."""

    def __init__(self, driver, address, networks):
        self.driver, self.address, self.networks = driver, address, networks

    def open(self, link="", *names):
        browser.visit(self.driver, self.address, link, *names)
        self.settle(*names)

    def settle(self, *names):
        browser.settle(self.driver, *names)

    def run(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def one(self, selector):
        return self.driver.find_element("css selector", selector)

    def slide(self, name, value, *names):
        """Move a slider as a user does, and wait for the answer."""
        script = (
            "const [one, value] = [document.querySelector(`input[name=${arguments[0]}]`), arguments[1]];"
            "one.value = value; one.dispatchEvent(new Event('input', { bubbles: true }))"
        )
        self.run(script, name, value)
        self.settle(*names)

    def probabilities(self):
        bars = self.driver.find_elements("css selector", "#bars [data-probability]")
        return [float(bar.get_attribute("data-probability")) for bar in bars]

    def picture(self, selector="#picture image"):
        href = self.one(selector).get_attribute("href")
        return np.array(Image.open(io.BytesIO(base64.b64decode(href.partition(",")[2]))))

    def pixels(self):
        """Return what the page asks about, by the state that it holds."""
        state = self.run("return window.explorer.state")
        model = self.networks.models[state["model"]]
        if "pixels" in state["image"]:
            original = from_png(state["image"]["pixels"], 28, model.net.in_channels)
        else:
            number = state["image"]["sample"]
            original = self.networks.images(state["model"]).pixels[number : number + 1]
        return changed(original, read_changes(state["changes"]))

    def upload(self, path):
        self.one("[data-source=upload]").click()
        self.one("#upload input[type=file]").send_keys(str(path))

    def error(self):
        return self.one("#error").text


@pytest.fixture
def page(served, networks):
    driver, address = served
    driver.get_log("browser")
    one = Page(driver, address, networks)
    yield one
    # A request that was refused is a line of Chromium's own; anything else is a defect of the page.
    severe = [line["message"] for line in driver.get_log("browser") if line["level"] == "SEVERE"]
    assert [line for line in severe if "Failed to load resource" not in line] == []


def trace_of(page, name=FIRST):
    model = page.networks.models[name]
    with torch.no_grad():
        return capsules_of(model.net).trace(model.view.test(page.pixels()))


# --- what is shown ---------------------------------------------------------------------------------------------------


def test_the_page_is_useful_at_once(page):
    page.open()
    assert FIRST in page.run("return document.title")
    want = page.networks.models[FIRST].predict(page.pixels())[0]
    np.testing.assert_allclose(page.probabilities(), want, **CLOSE)
    assert np.array_equal(page.picture(), page.pixels()[0, 0])
    answer = page.networks.models[FIRST].classes[int(want.argmax())]
    assert answer in page.one("#parent-class select").find_element("css selector", "option").text


def test_a_slider_changes_picture_probabilities_and_gauge(page):
    page.open("#sample=23")
    before = page.probabilities()
    page.slide("rotate", 70)
    page.slide("noise", 0.2)
    assert np.array_equal(page.picture(), page.pixels()[0, 0])
    want = page.networks.models[FIRST].predict(page.pixels())[0]
    np.testing.assert_allclose(page.probabilities(), want, **CLOSE)
    assert np.abs(np.array(before) - want.numpy()).max() > 0.05
    look = page.run("return window.explorer.answers.look")
    shown = float(page.one("#gauge").get_attribute("data-percentile"))
    assert shown == look["gauge"]["percentile"] > 0.5


def test_many_moves_end_with_the_last(page):
    page.open("#sample=5")
    for degrees in range(-30, 31, 4):
        page.run(
            "const one = document.querySelector('input[name=rotate]'); one.value = arguments[0];"
            "one.dispatchEvent(new Event('input', { bubbles: true }))",
            degrees,
        )
    page.settle()
    assert page.run("return window.explorer.state.changes.rotate") == 30
    want = page.networks.models[FIRST].predict(page.pixels())[0]
    np.testing.assert_allclose(page.probabilities(), want, **CLOSE)


@pytest.mark.parametrize("name", [FIRST, "fashion_em_laptop", "fashion_dynamic_laptop"])
def test_heat_maps_are_the_parts_of_the_trace(page, name):
    page.open("#sample=61&type=6&right=10")
    trace = trace_of(page, name)
    for t in range(2):
        heat = page.one(f'[data-heat="{name},{t + 1}"]')
        want = parts_of(trace, "class_caps", 0, 6, t).numpy()
        np.testing.assert_allclose(json.loads(heat.get_attribute("data-values")), want, **CLOSE)
        cells = page.run(
            "return [...arguments[0].querySelectorAll('rect')].map((one) => ['x', 'y', 'width', 'height',"
            "'fill-opacity'].map((key) => Number(one.getAttribute(key))))",
            heat,
        )
        cells = np.array(cells).reshape(*want.shape, 5)
        top, left, bottom, right = frame_of_parts(capsules_of(page.networks.models[name].net))
        np.testing.assert_allclose(cells[0, 0, :2], [left, top], atol=0.02)
        np.testing.assert_allclose(cells[-1, -1, :2] + cells[-1, -1, 2:4], [right, bottom], atol=0.02)
        for row, column in np.ndindex(want.shape):  # each cell lies where its capsule does
            x, y, width, height = cells[row, column, :4]
            assert [(y - top) / height, (x - left) / width] == pytest.approx([row, column], abs=0.05)
        most = np.unravel_index(want.argmax(), want.shape)
        assert cells[(*most, 4)] == cells[..., 4].max(), "the brightest cell is where most was taken"


def test_clouds_and_their_ellipses_are_those_of_the_posterior(page):
    page.open("#sample=61&type=6")
    cloud = cloud_of(trace_of(page), "class_caps", 0, 6)
    ratios = []
    for t in range(2):
        inner = f'[data-cloud="{FIRST},{t + 1}"]'
        radii = page.run(
            f"return [...document.querySelectorAll('{inner} circle')].map((one) => Number(one.getAttribute('r')))"
        )
        weight = cloud.weight[t].numpy()
        largest = float(cloud.weight.max())
        scale = max(radii) / math.sqrt(weight.max() / largest)
        np.testing.assert_allclose(radii, scale * np.sqrt(weight / largest), atol=0.02, err_msg="areas are weights")
        for which, covariance in (("spread", cloud.spread), ("spread_of_mean", cloud.spread_of_mean)):
            ellipse = page.one(f'{inner} [data-ellipse="{which}"]')
            axes = [float(ellipse.get_attribute(key)) for key in ("rx", "ry")]
            want = 2 * np.sqrt(np.linalg.eigvalsh(covariance[t].numpy())[::-1])
            ratios.append(np.array(axes) / want)
    np.testing.assert_allclose(ratios, np.full((4, 2), ratios[0][0]), rtol=0.02, err_msg="one scale for all iterations")


def test_a_parent_of_a_layer_is_chosen_by_a_click(page):
    page.open("#sample=12&layer=conv_caps1")
    assert page.run("return window.explorer.state.type") is not None, "the most active one"
    page.one('[data-parent="7,3"]').click()
    page.settle()
    trace = trace_of(page)
    heat = page.one(f'[data-heat="{FIRST},2"]')
    want = parts_of(trace, "conv_caps1", 7, 3)
    np.testing.assert_allclose(json.loads(heat.get_attribute("data-values")), want, **CLOSE)
    box = page.run(
        "const one = document.querySelector('#picture .field:not(.below)'), all = document.getElementById('picture');"
        "return [...['x', 'y', 'width', 'height'].map((key) => Number(one.getAttribute(key))),"
        "Number(all.getAttribute('width'))]"
    )
    x, y, width, height, side = (28 * value / box[4] for value in box)
    field = receptive_field(capsules_of(page.networks.models[FIRST].net), "conv_caps1", 7)
    np.testing.assert_allclose([y, x, y + height, x + width], field, atol=0.4)
    assert side == 28


def test_the_elbo_is_that_of_the_library(page):
    page.open("#sample=12")
    layer = trace_of(page).layers["class_caps"]
    for t, q in enumerate(layer.iterations):
        shown = page.one(f'[data-elbo="total,{t + 1}"]').text.replace("−", "-")
        assert float(shown) == pytest.approx(float(q.elbo(layer.activations, layer.votes).total), rel=0.02, abs=0.01)


def test_pose_curves_and_decoder(page):
    page.open("#sample=41&view=pose&type=4", "shown", "routed", "swept", "decoded")
    q = trace_of(page).layers["class_caps"].iterations[-1]
    shown = [float(page.one(f'[data-entry="{d}"]').get_attribute("data-value")) for d in range(16)]
    np.testing.assert_allclose(shown, q.m[0, 4], **CLOSE)
    lines = [page.one(f'[data-curve="{d}"]').get_attribute("d") for d in range(16)]
    heights = np.array([[float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", line)] for line in lines])
    poses = np.array(page.run("return window.explorer.answers.sweep.poses")).T
    moves = poses - poses.mean(1, keepdims=True)
    drawn = heights.mean(1, keepdims=True) - heights  # up is less
    assert np.corrcoef(moves.ravel(), drawn.ravel())[0, 1] > 0.999
    page.slide("entry5", 0.9, "shown", "routed", "swept", "decoded")
    model = page.networks.models["vae_fashion"]
    moved = page.run("return window.explorer.state.entries[5]")  # the slider ends at three deviations
    assert moved > 0.2
    want = (model.tweak(page.pixels(), 5, [moved], label=4)[0, 0] * 255).round().numpy()
    pictures = page.run("return [...document.querySelectorAll('#decoded image')].map((o) => o.getAttribute('href'))")
    shown = [np.array(Image.open(io.BytesIO(base64.b64decode(one.partition(",")[2])))) for one in pictures]
    assert np.array_equal(shown[0], page.pixels()[0, 0])
    assert np.abs(shown[1].astype(int) - want).max() <= 1


# --- links -----------------------------------------------------------------------------------------------------------


def test_a_link_restores_the_view(page):
    page.open("#sample=88&rotate=-33&layer=conv_caps2&position=4&type=2&theme=dark&heat=1")
    page.slide("down", -12)
    time.sleep(0.3)  # the link follows after a moment
    first = page.run("return [location.hash, window.explorer.state, window.explorer.answers.routing]")
    page.open(first[0])
    again = page.run("return [location.hash, window.explorer.state, window.explorer.answers.routing]")
    assert again == first
    assert page.run("return document.documentElement.dataset.theme") == "dark"
    assert first[1]["changes"]["down"] == -12
    assert page.one("input[name=down]").get_attribute("value") == "-12"


@pytest.mark.parametrize(
    "link",
    [
        "#model=../../etc/passwd", "#sample=99999", "#pixels=AAAA", "#layer=nothing",
        "#layer=conv_caps1&position=999",
        "#rotate=NaN", "#rotate=1e9", "#vae=99:1", "#__proto__=1", "#valueOf=1",
        "#toString=1", "#<script>alert(1)</script>", "#model=%00&sample=-1",
    ],
)  # fmt: skip
def test_a_bad_link_falls_back_with_a_word(page, link):
    page.open(link)
    assert page.error()
    want = page.networks.models[FIRST].predict(page.pixels())[0]
    np.testing.assert_allclose(page.probabilities(), want, **CLOSE)


# --- images of one's own ---------------------------------------------------------------------------------------------


def test_an_upload_is_seen_as_predict_sees_it_and_a_link_restores_it(page, tmp_path):
    path = tmp_path / "mine.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (50, 70, 3), dtype=np.uint8)).save(path)
    page.open()
    page.upload(path)
    wait_for(page, "return 'pixels' in window.explorer.state.image")
    page.settle()
    want = page.networks.models[FIRST].predict(path)[0]
    np.testing.assert_allclose(page.probabilities(), want, **CLOSE)
    time.sleep(0.3)
    page.open(page.run("return location.hash"))
    np.testing.assert_allclose(page.probabilities(), want, **CLOSE)


def test_an_image_of_ones_own_stays_when_the_network_changes(page, tmp_path):
    path = tmp_path / "mine.png"
    Image.fromarray(np.random.default_rng(1).integers(0, 256, (48, 48, 3), dtype=np.uint8)).save(path)
    page.open()
    page.upload(path)
    wait_for(page, "return 'pixels' in window.explorer.state.image")
    page.run(
        "const one = document.getElementById('model'); one.value = 'svhn_small'; one.dispatchEvent(new Event('change'))"
    )
    wait_for(page, "return window.explorer.model.name === 'svhn_small' && window.explorer.answers.look !== null")
    page.settle()
    want = page.networks.models["svhn_small"].predict(path)[0]
    np.testing.assert_allclose(page.probabilities(), want, **CLOSE)
    assert page.error() == ""


def test_a_refused_decoding_leaves_the_image(page):
    from vbcaps.explore.pictures import as_png

    pixels = as_png(torch.randint(0, 256, (1, 28, 28), dtype=torch.uint8)).replace("+", "-").replace("/", "_")
    page.open(f"#pixels={pixels.rstrip('=')}&view=pose&vae=0:5000", "shown", "routed", "swept", "decoded")
    assert "vae=0:5000" in page.error()
    assert "pixels" in page.run("return window.explorer.state.image")


def test_the_sentence_tells_what_each_network_draws(page):
    for name in (FIRST, "fashion_em_laptop", "fashion_dynamic_laptop"):
        page.open(f"#model={name}")
        words = page.one("#routing-says").text
        assert "Dynamic has neither" in words
        assert "EM its variance" in words
    page.open("#model=fashion_laptop&layer=conv_caps1")
    assert "EM" not in page.one("#routing-says").text


def test_the_sentence_warns_of_the_printed_rule(page):
    for name, warned in ((FIRST, False), ("fashion", True), ("fashion_evidence", False)):
        page.open(f"#model={name}")
        assert ("fewest votes" in page.one("#routing-says").text) == warned, name


def test_the_entropy_of_a_soft_assignment_counts_more_than_once(page, networks):
    soft = copy.copy(networks.models[FIRST])
    soft.recipe = dataclasses.replace(soft.recipe, temper=0.25)
    networks.models["soft"] = soft
    try:
        page.open("#model=soft", "routed")
        assert "+ 4 H[q(z)]" in page.one("#routes").text
        page.open(f"#model={FIRST}", "routed")
        assert "+ H[q(z)]" in page.one("#routes").text
    finally:
        del networks.models["soft"]


def test_a_bad_upload_is_explained_and_the_page_goes_on(page, tmp_path):
    page.open()
    for name, content, words in (("a.png", b"this is no picture", "no picture"), ("b.png", b"", "empty")):
        path = tmp_path / name
        path.write_bytes(content)
        page.upload(path)
        wait_for(page, "return document.getElementById('error').textContent.includes(arguments[0])", words)
    page.slide("rotate", 15)
    want = page.networks.models[FIRST].predict(page.pixels())[0]
    np.testing.assert_allclose(page.probabilities(), want, **CLOSE)


def test_a_drawing_is_seen(page):
    from selenium.webdriver import ActionChains

    page.open("#model=vae_mnist")
    page.one("[data-source=draw]").click()
    canvas = page.one("#draw canvas")
    (
        ActionChains(page.driver).move_to_element_with_offset(canvas, 0, -60).click_and_hold()
        .move_by_offset(0, 60).move_by_offset(0, 60).release().perform()
    )  # fmt: skip
    wait_for(page, "return 'pixels' in window.explorer.state.image")
    time.sleep(0.5)
    page.settle()
    pixels = page.pixels()
    assert int(pixels[0, 0, 14, 14]) > 200, "the stroke runs through the middle"
    assert int(pixels[0, 0, 14, 3]) == 0
    np.testing.assert_allclose(page.probabilities(), page.networks.models["vae_mnist"].predict(pixels)[0], **CLOSE)
    assert int(np.argmax(page.probabilities())) == 1


def wait_for(page, script, *arguments, seconds=30):
    end = time.monotonic() + seconds
    while not page.run(script, *arguments):
        assert time.monotonic() < end, f"the page did not come to: {script}"
        time.sleep(0.05)


# --- saving, keys, themes --------------------------------------------------------------------------------------------


def test_a_panel_is_saved_as_it_is_drawn(page, downloads):
    page.open("#sample=30")
    for kind in ("json", "svg", "png"):
        page.one(f'[data-save="routing,{kind}"]').click()
    files = {kind: downloads / f"vbcaps-{FIRST}-routing.{kind}" for kind in ("json", "svg", "png")}
    end = time.monotonic() + 30
    while not all(path.exists() and path.stat().st_size for path in files.values()):
        assert time.monotonic() < end, "the files were not written"
        time.sleep(0.1)
    saved = json.loads(files["json"].read_text())
    assert saved["scene"]["image"] == dict(sample=30)
    assert saved["data"]["networks"] == page.run("return window.explorer.answers.routing.networks")
    drawing = files["svg"].read_text()
    root = ET.fromstring(drawing)
    links = [value for one in root.iter() for key, value in one.attrib.items() if key.endswith("href")]
    assert links
    assert all(link.startswith("data:image/png") for link in links), "the file needs no other"
    assert "class=" not in drawing or "<style" in drawing or "fill=" in drawing
    picture = np.array(Image.open(files["png"]).convert("L"))
    assert picture.shape[1] == pytest.approx(2 * float(root.get("width")), abs=2)
    assert picture.std() > 10


def test_the_page_is_used_with_keys_alone(page):
    from selenium.webdriver import Keys

    page.open("#sample=3")
    for _ in range(80):
        page.driver.switch_to.active_element.send_keys(Keys.TAB)
        focused = page.driver.switch_to.active_element
        assert page.run("return getComputedStyle(arguments[0]).outlineStyle", focused) != "none", "focus is seen"
        if focused.get_attribute("name") == "rotate":
            break
    assert focused.get_attribute("name") == "rotate"
    focused.send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    page.settle()
    assert page.run("return window.explorer.state.changes.rotate") == 2
    assert np.array_equal(page.picture(), page.pixels()[0, 0])


def test_every_control_has_a_name(page):
    page.open("#view=pose", "shown", "routed", "swept", "decoded")
    nameless = page.run(
        "return [...document.querySelectorAll('button, input, select, canvas, svg[role]')].filter((one) =>"
        "!one.getAttribute('aria-label') && !one.textContent.trim() && !one.labels?.length && !one.title)"
        ".map((one) => one.outerHTML.slice(0, 80))"
    )
    assert nameless == []


def test_the_theme_changes_and_text_stays_readable(page):
    page.open("#theme=light")
    for theme in ("light", "dark"):
        assert page.run("return document.documentElement.dataset.theme") == theme
        colours = page.run(
            "return ['color', 'background-color'].map((key) => getComputedStyle(arguments[0]).getPropertyValue(key))",
            page.one("#image"),
        )
        words, ground = (brightness(colour) for colour in colours)
        assert (max(words, ground) + 0.05) / (min(words, ground) + 0.05) > 7
        page.one("#theme").click()


def brightness(colour: str) -> float:
    """Return the relative luminance of a colour as CSS writes it (WCAG 2)."""
    parts = [float(part) / 255 for part in re.findall(r"[\d.]+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))


def test_the_first_screen_has_image_answer_and_routing(page):
    page.open()
    for selector in ("#picture", "#bars", "#routes", "input[name=occlude]"):
        bottom = page.run("return arguments[0].getBoundingClientRect().top", page.one(selector))
        assert bottom < 720, f"{selector} is seen at 1280x720 without scrolling"
    assert page.run("return document.documentElement.scrollWidth") <= 1280


def test_the_pictures_of_the_docs_are_those_of_the_script():
    screenshots = importlib.import_module("screenshots")
    page = (Path(__file__).parents[2] / "docs/explore.md").read_text()
    names = {picture[0] for picture in screenshots.PICTURES}
    assert names == set(re.findall(r"!\[[^\]]*\]\(([^)]+\.png)\)", page))

"""The record of health that every training of capsules leaves in its weights, its result and its model card."""

import json
from dataclasses import replace

import planted
import pytest
import tiny
import torch

import vbcaps
from vbcaps.cli import report
from vbcaps.data import Dataset
from vbcaps.health import Health
from vbcaps.health.findings import findings
from vbcaps.training import health as after
from vbcaps.training.loop import fit
from vbcaps.weights.card import card_text

CNN = dict(network="cnn", iters=3, backend="auto")


@pytest.fixture(autouse=True)
def tiny_data():
    with tiny.in_place_of_data():
        yield


def test_the_record_is_in_the_result_in_the_weights_and_in_the_card(tmp_path):
    model = fit(tiny.recipe(epochs=2), tmp_path / "run", device="cpu")
    found, test = model.result.health, tiny.dataset().test
    assert (found.of, found.images) == ("30 test images of sample", 30)
    assert found == replace(vbcaps.load(tmp_path / "run").health(test.images, test.labels), of=found.of)
    kept = vbcaps.load(tmp_path / "run").about["health"]
    assert kept == found.to_json() == json.loads((tmp_path / "run" / "result.json").read_text())["health"]
    again = fit(tiny.recipe(epochs=2), tmp_path / "run", device="cpu", resume=True)  # reads the result
    assert again.result.health == Health.from_json(kept)
    card = card_text(again, "me/mine", None)
    assert "## What its capsules do\n\nMeasured on 30 test images of sample:\n\n- " in card
    assert all(f"- {sentence}." in card for sentence in findings(again.result.health))
    with torch.no_grad():
        again.net.class_caps.weight.mul_(2)
    assert "It was not measured, or its weights have changed since" in card_text(again, "me/mine", None)


def test_training_says_the_first_finding(tmp_path):
    model = fit(tiny.recipe(epochs=1), tmp_path / "run", device="cpu")
    with report.console.capture() as captured:
        report.say_results([model.result])
    assert f"{findings(model.result.health)[0]}; `vbcaps health` says more" in captured.get()


def test_held_out_images_come_first(tmp_path):
    model = fit(tiny.recipe(epochs=1, validation=0.25), tmp_path / "held", device="cpu")
    assert model.result.health.of == "12 held-out images of sample"
    assert model.result.health.error == pytest.approx(model.result.validation)


def test_few_images_and_none(tmp_path):
    whole = tiny.dataset()
    for count in (0, 1):
        few = Dataset("few", whole.train, whole.test.take(torch.arange(count)), tiny.CLASSES, "made up")
        found = fit(tiny.recipe(epochs=1), tmp_path / f"{count}", data=few, device="cpu").result.health
        assert found is None if count == 0 else found.images == 1
        assert ("health" in vbcaps.load(tmp_path / f"{count}").about) == (count > 0)


def test_at_most_so_many_images_the_same_each_time(tmp_path, monkeypatch):
    monkeypatch.setattr(after, "IMAGES", 10)
    one, other = (fit(tiny.recipe(epochs=1), tmp_path / k, device="cpu").result.health for k in "ab")
    assert one == other
    assert one.of == "10 test images of sample"


def test_a_cnn_has_none(tmp_path):
    model = fit(tiny.recipe(epochs=1, **CNN), tmp_path / "cnn", device="cpu")
    assert model.result.health is None
    assert "health" not in vbcaps.load(tmp_path / "cnn").about
    assert "What its capsules do" not in card_text(model, "me/mine", None)


def test_results_and_files_of_earlier_versions_are_read(tmp_path):
    fit(tiny.recipe(epochs=1), tmp_path / "run", device="cpu")
    path = tmp_path / "run" / "result.json"
    fields = json.loads(path.read_text())
    del fields["health"]
    path.write_text(json.dumps(fields))
    assert fit(tiny.recipe(epochs=1), tmp_path / "run", device="cpu", resume=True).result.health is None
    old = vbcaps.load("fashion_laptop")
    assert "health" not in old.about
    assert "`vbcaps health` measures it" in card_text(old, "fashion_laptop", None)


def test_a_kept_record_survives_saving(tmp_path):
    model = vbcaps.load("fashion_laptop")
    model.about["health"] = planted.RECORD
    assert vbcaps.load(model.save(tmp_path / "w.safetensors")).about["health"] == planted.RECORD

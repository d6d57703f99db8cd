"""The record of the shipped networks' health: its rows, its table, and the list of published networks that reads it."""

import csv
import sys
from pathlib import Path

import planted
import pytest
import tiny
import torch

import vbcaps
from vbcaps.health import Health

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import health
import published

ROOT = Path(__file__).parents[2]


def row(name: str, **changes: object) -> dict[str, object]:
    return dict(network=name) | Health.from_json(planted.RECORD | changes).row() | dict(source="made up", commit="abc")


def test_a_row_takes_the_place_of_the_last_and_the_table_has_all(tmp_path):
    file = tmp_path / "health.csv"
    for one in (row("b"), row("a", tightest=None, uniform=None), row("b", most_votes=0.5)):
        health.record(file, one)
    assert [(one["network"], one["most_votes"]) for one in health.read(file)] == [("a", "0.98"), ("b", "0.5")]
    page = health.with_table(f"before\n{health.BEGIN}\nold\n{health.END}\nafter\n", file)
    assert "old" not in page
    assert page.startswith("before\n")
    assert page.endswith("after\n")
    assert "| `a` | released | 98 | 0 |  | 15.8 (13.9) | 0.43 | 80 | 60 | 97 |  |" in page
    assert "| `b` | released | 50 | 0 | 97 | 15.8 (13.9) | 0.43 | 80 | 60 | 97 | 50 (9) |" in page
    assert health.with_table(page, file) == page


def test_the_page_has_the_table_of_the_record():
    page = health.PAGE.read_text()
    assert health.with_table(page, health.RECORD) == page


def test_every_shipped_network_with_capsules_is_in_the_record():
    names = {one["network"] for one in health.read(health.RECORD)}
    assert names <= {*vbcaps.list_models()}
    kept = {name for name in vbcaps.list_models() if "cnn" not in name}
    assert kept == names


def test_a_network_is_measured_on_its_own_test_images(monkeypatch):
    torch.manual_seed(0)
    recipe, train = tiny.recipe(arch=(8, 4, 4, 4), dataset="mnist"), tiny.dataset().train
    view = recipe.view().fit(train)
    net = recipe.net(1, 3)
    net(view.test(train.images))
    model = vbcaps.Model(net.eval(), recipe, tiny.CLASSES, view)
    monkeypatch.setattr(vbcaps, "load", lambda name: model)
    with tiny.in_place_of_data():
        found = health.measure("mine", None, 12)
    assert (found["network"], found["images"], found["of"]) == ("mine", 12, "12 test images of mnist")
    assert found["source"] == "made up"
    model.net = vbcaps.ConvNet((4, 2, 2, 2), 1, 3, 20)
    assert health.measure("cnn", None, 12) is None


def test_the_list_has_the_health_of_the_file_or_else_of_the_record(tmp_path, monkeypatch):
    monkeypatch.setattr(published, "HEALTH", tmp_path / "none.csv")
    found = published.health_of("a", dict(health=planted.RECORD))["health"]
    whole = Health.from_json(planted.RECORD).row()
    assert found == {name: whole[name] for name in published.MEASURES}
    assert published.health_of("a", {}) == {}
    health.record(tmp_path / "health.csv", row("a", tightest=None))
    monkeypatch.setattr(published, "HEALTH", tmp_path / "health.csv")
    del whole["tightest"]
    assert published.health_of("a", {})["health"] == {name: whole[name] for name in published.MEASURES if name in whole}
    assert published.health_of("b", {}) == {}


def test_the_record_says_what_the_listed_networks_do():
    rows = {one["network"]: one for one in csv.DictReader((ROOT / "results" / "health.csv").open(newline=""))}
    details = vbcaps.list_models(details=True)
    assert {*details} == {*vbcaps.list_models()}
    for name, one in rows.items():
        assert details[name].health["most_votes"] == pytest.approx(float(one["most_votes"]))
    assert details["fashion_cnn_laptop"].health is None

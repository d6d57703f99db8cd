"""The sweep of rules, softness and priors: its settings, its measures and its table."""

import csv
import json
import sys
from pathlib import Path

import pytest
import tiny
import torch

from vbcaps.training.recipes import recipe
from vbcaps.weights.model import Model

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import agreement


def model(**fields):
    torch.manual_seed(0)
    one, train = tiny.recipe(arch=(8, 4, 4, 4), **fields), tiny.dataset().train
    view = one.view().fit(train)
    return Model(one.net(1, 3), one, tiny.CLASSES, view)


@pytest.mark.parametrize("stage", agreement.STAGES)
def test_every_setting_is_a_valid_recipe_that_holds_images_out(stage):
    settings = agreement.STAGES[stage]()
    found = [agreement.recipe_of(name, fields, 3) for name, fields in settings]
    assert all(one.validation >= 0.125 and one.seed == 3 and not one.test for one in found)
    assert len(set(found)) == len(found)


def test_the_sweep_has_every_rule_of_the_library():
    assert set(agreement.RULES) == {"agreement", "information", "released", "paper"}
    assert {fields.get("activation") for _, fields in agreement.first()} >= set(agreement.RULES)


def test_measures_leave_the_network_as_it_was():
    one, test = model(iters=2, psi0=1e4), tiny.dataset().test
    with torch.no_grad():
        one.net.class_caps.weight.mul_(300)  # votes far apart
    row = agreement.measure(one, test.images, test.labels)
    assert {module.iters for module in one.net.modules() if hasattr(module, "iters")} == {2}
    assert row["error"] == row["error_2"]
    assert 0.01 < row["sharpness"] < 1
    assert row["most_votes"] + row["fewest_votes"] <= 1
    uniform = agreement.measure(model(iters=1), test.images, test.labels)
    assert uniform["sharpness"] == pytest.approx(0, abs=1e-5)
    cnn = agreement.measure(model(network="cnn", iters=3, backend="auto"), test.images, test.labels)
    assert cnn.keys() == {"error"}


def test_gathering_writes_one_row_for_each_file(tmp_path, monkeypatch):
    monkeypatch.setattr(agreement, "RESULTS", tmp_path)
    rows = tmp_path / "rows"
    rows.mkdir()
    for k, row in enumerate((dict(recipe="default", seed=0), dict(recipe="default", seed=1, temper=0.25))):
        (rows / f"{k}.json").write_text(json.dumps(row))
    agreement.gather("first", rows)
    with open(tmp_path / "agreement_first.csv", newline="") as file:
        assert list(csv.DictReader(file)) == [
            dict(recipe="default", seed="0", temper=""), dict(recipe="default", seed="1", temper="0.25")
        ]  # fmt: skip


def test_the_demonstration_has_the_settings_that_the_sweep_chose():
    assert agreement.strong()  # the stage that has them
    one = recipe("default")
    assert (one.activation, one.temper, one.nu0, one.psi0, one.iters) == ("agreement", 0.25, 1000.0, 0.03, 3)
    chosen = dict(iters=3, activation="agreement", temper=0.25, alpha0=1.0, nu0=1e3, psi0=0.03)
    assert chosen in [fields for _, fields in agreement.strong()]

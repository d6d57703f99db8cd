"""The experiment on uncertainty, on a tiny problem."""

import csv
import sys
from pathlib import Path

import pytest
import tiny
import torch

from vbcaps import fit

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import densities
import temperatures
import uncertainty


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    with tiny.in_place_of_data():
        for seed, fields in ((0, {}), (1, {}), (2, dict(network="cnn", arch=(4, 4, 4, 4), backend="auto", iters=3))):
            fit(
                tiny.recipe(seed=seed, validation=0.25, test=True, epochs=2, **fields),
                folder / f"s{seed}",
                device="cpu",
            )
    return folder


@pytest.fixture
def tables(tmp_path, monkeypatch):
    """Small tables, strangers and damage; the data of all recipes are the tiny ones."""
    monkeypatch.setattr(uncertainty, "TABLE", tmp_path / "uncertainty.csv")
    monkeypatch.setattr(uncertainty, "CURVES", tmp_path / "curves.csv")
    monkeypatch.setattr(uncertainty, "STRANGERS", {"sample": ("noise",)})
    monkeypatch.setattr(uncertainty, "CHOICE", ("sample", "noise"))
    monkeypatch.setattr(uncertainty, "LEVELS", {"noise": (0.1, 0.5)})
    monkeypatch.setattr(uncertainty, "load_dataset", lambda *_: tiny.dataset())
    monkeypatch.setattr("vbcaps.training.loop.load_dataset", tiny.dataset)
    return tmp_path


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_a_network_is_measured_once(runs, tables, capsys):
    words = [str(runs / "s0"), str(runs / "s2"), "--write"]
    uncertainty.main(words)
    rows = read(tables / "uncertainty.csv")
    tests = {(row["seeds"], row["test"]) for row in rows}
    of_vb = {("0", one) for one in ("calibration", "errors", "strangers", "damage", "evidence", "choice")}
    assert of_vb - {("0", "errors")} <= tests
    assert ("2", "evidence") not in tests  # a CNN has no votes
    scores = {row["score"] for row in rows if row["seeds"] == "0" and row["test"] == "strangers"}
    assert {
        "max_softmax",
        "elbo",
        "density class_caps.kappa, per class",
        "density class_caps.m and max_softmax",
    } <= scores
    assert {row["score"] for row in rows if row["seeds"] == "2"} >= {"density features", "density features, per class"}
    undamaged = [row for row in rows if row["against"] == "noise 0" and row["measure"] == "auroc"]
    assert {float(row["value"]) for row in undamaged} == {0.5}
    assert all(0 <= float(row["value"]) <= 1 for row in rows if row["measure"] in ("auroc", "ece", "error", "fpr95"))
    before = (tables / "uncertainty.csv").read_bytes()
    uncertainty.main(words)
    assert (tables / "uncertainty.csv").read_bytes() == before
    assert "recorded already" in capsys.readouterr().out


def test_an_ensemble_is_measured_by_the_mean_of_its_members(runs, tables):
    uncertainty.main(["--ensemble", str(runs / "s0"), str(runs / "s1"), "--write"])
    rows = read(tables / "uncertainty.csv")
    assert {row["seeds"] for row in rows} == {"0+1"}
    assert {row["score"] for row in rows if row["test"] == "strangers"} == {"max_softmax", "entropy", "disagreement"}


def test_one_command_measures_every_run_of_a_folder_and_each_ensemble_that_is_complete(runs, tables, monkeypatch):
    (runs / "unfinished").mkdir(exist_ok=True)
    monkeypatch.setattr(uncertainty, "MEMBERS", 2)
    uncertainty.main(["--all", str(runs), "--write"])
    rows = read(tables / "uncertainty.csv")
    assert {row["seeds"] for row in rows} == {"0", "1", "2", "0+1"}  # the CNN is alone
    assert uncertainty.in_folder(runs)[-1] == [runs / "s0", runs / "s1"]
    monkeypatch.setattr(uncertainty, "MEMBERS", 5)
    assert uncertainty.in_folder(runs) == [[runs / "s0"], [runs / "s1"], [runs / "s2"]]


def test_what_is_no_finished_run_is_named(runs, tables, tmp_path, capsys):
    file = runs / "s0" / "best.safetensors"
    for words, message in (
        ([file], f"{file}: not the folder of a finished run, which has a result.json"),
        ([runs / "s0", runs / "s9"], f"{runs / 's9'}: not the folder of a finished run"),
        ([], "give the folders of finished runs, or --all and a folder"),
        (["--all", runs, runs / "s0"], "give the folders of finished runs, or --all and a folder"),
        (["--all", tmp_path], f"{tmp_path} has no folder of a finished run"),
        (["--ensemble", runs / "s0"], "an --ensemble has at least two RUNs"),
    ):
        with pytest.raises(SystemExit):
            uncertainty.main([str(word) for word in words])
        assert message in capsys.readouterr().err


def test_a_run_without_a_held_out_share_is_refused(tmp_path, tables, capsys):
    with tiny.in_place_of_data():
        fit(tiny.recipe(epochs=1, warmup=0.0), tmp_path / "run", device="cpu")
    with pytest.raises(SystemExit):
        uncertainty.main([str(tmp_path / "run")])
    assert "has no held-out share" in capsys.readouterr().err


def test_a_temperature_goes_into_the_header_and_leaves_the_bits_of_the_weights(runs, tmp_path):
    from vbcaps import load

    path = tmp_path / "w.safetensors"
    path.write_bytes((runs / "s0" / "best.safetensors").read_bytes())
    before = load(path)
    temperatures.put_into(path, 2.5)
    after = load(path)
    assert after.temperature == 2.5
    assert after.about["temperature_from"] == "half of the test images"
    assert all(
        torch.equal(a, b) for a, b in zip(before.state_dict().values(), after.state_dict().values(), strict=True)
    )
    assert after.about["test_error"] == before.about["test_error"]


def test_a_temperature_of_held_out_images_is_judged_on_all_test_images_and_stays(runs, tmp_path, monkeypatch):
    from vbcaps import load
    from vbcaps.uncertainty import ece, look

    path = tmp_path / "w.safetensors"
    path.write_bytes((runs / "s0" / "best.safetensors").read_bytes())
    model, before = load(path), path.read_bytes()
    monkeypatch.setattr(temperatures, "weights_file", lambda name: tmp_path / f"{name}.safetensors")
    monkeypatch.setattr(temperatures, "TABLE", tmp_path / "t.csv")
    monkeypatch.setattr(temperatures.vbcaps, "load", lambda _: load(path))
    with tiny.in_place_of_data():
        temperatures.main(["w", "--write"])
    (row,) = read(tmp_path / "t.csv")
    test = tiny.dataset().test
    p = (look(model, test.images).logits / model.temperature).softmax(1)
    assert (row["fitted_on"], row["judged_on"], row["images"]) == ("held-out images", "all test images", "30")
    assert float(row["temperature"]) == pytest.approx(model.temperature, rel=1e-4)
    assert float(row["ece"]) == pytest.approx(ece(p, test.labels), rel=1e-3)
    assert path.read_bytes() == before


@pytest.mark.parametrize(("run", "name"), [("s0", "density.conv_caps1.m"), ("s2", "density.features")])
def test_a_density_goes_into_the_file_of_a_network(runs, tables, tmp_path, monkeypatch, run, name):
    from vbcaps import load
    from vbcaps.uncertainty import scores

    path = tmp_path / "w.safetensors"
    path.write_bytes((runs / run / "best.safetensors").read_bytes())
    before = load(path)
    monkeypatch.setattr(densities, "weights_file", lambda name: tmp_path / f"{name}.safetensors")
    monkeypatch.setattr(densities.vbcaps, "load", lambda _: load(path))
    densities.main(["w"])
    after = load(path)
    images = tiny.dataset().test.images
    assert name in scores(after, images)
    assert name not in scores(before, images)
    assert after.temperature == before.temperature
    assert after.sum == before.sum


def test_a_networks_rows_replace_its_earlier_ones(tmp_path):
    row = dict.fromkeys(temperatures.HEAD, "1")
    temperatures.record(tmp_path / "t.csv", [row | dict(network="b", temperature="2")])
    temperatures.record(tmp_path / "t.csv", [row | dict(network="a", temperature="3")])
    temperatures.record(tmp_path / "t.csv", [row | dict(network="b", temperature="4")])
    assert [(one["network"], one["temperature"]) for one in read(tmp_path / "t.csv")] == [("a", "3"), ("b", "4")]

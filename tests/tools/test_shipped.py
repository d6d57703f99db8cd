"""The density of the shipped networks: how it is chosen, that it is in their files, and what it costs."""

import csv
import sys
from pathlib import Path

import pytest
import tiny
import torch

import vbcaps

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import densities
import shipped
import shipped_table
import uncertainty

from vbcaps.figures.trust import of_posterior, read_measures

ROOT = Path(__file__).parents[2]


def rows(**values):
    """Rows of two networks: (on the pair for the choice, on a stranger) of each score."""
    return [
        dict(network=network, test=test, against="mnist", score=score, measure="auroc", value=str(value + shift))
        for score, both in values.items()
        for test, value in zip(("choice", "strangers"), both, strict=True)
        for network, shift in (("a", 0.0), ("b", 0.02))
    ]


def test_a_density_is_chosen_on_the_pair_for_it_alone(tmp_path):
    made = rows(max_softmax=(0.9, 0.9)) + [
        row | dict(score=row["score"].replace("_of_", " "))
        for row in rows(density_of_logits=(0.8, 0.5), density_of_features=(0.7, 0.9))
    ]
    assert shipped_table.chosen_density(made) == "density logits"
    assert shipped_table.over_networks(made, "strangers")["density features"] == pytest.approx(0.91)
    with open(tmp_path / "shipped.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, list(made[0]))
        writer.writeheader()
        writer.writerows(made)
    (table,) = shipped_table.on_shipped(tmp_path / "shipped.csv")
    assert shipped_table.on_shipped(tmp_path / "none.csv") == []
    assert "| `b` | MNIST, training images | 92.0 | 82.0 | 72.0 |" in table
    assert "| mean of the networks | strangers | 91.0 | 51.0 | 91.0 |" in table


def test_a_network_is_measured_once(tmp_path, monkeypatch, capsys):
    with tiny.in_place_of_data():
        model = vbcaps.fit(tiny.recipe(epochs=1), tmp_path / "run", device="cpu")
    monkeypatch.setattr(shipped, "TABLE", tmp_path / "shipped.csv")
    monkeypatch.setattr(shipped.vbcaps, "load", lambda _: model)
    monkeypatch.setattr(shipped, "TRAIN", 20)
    monkeypatch.setattr(shipped, "STRANGERS", {"sample": ("noise",)})
    monkeypatch.setattr(uncertainty, "load_dataset", lambda *_: tiny.dataset())
    monkeypatch.setattr("vbcaps.training.loop.load_dataset", tiny.dataset)
    uncertainty.some_of.cache_clear()
    shipped.main(["one", "--write"])
    with open(tmp_path / "shipped.csv", newline="") as file:
        found = list(csv.DictReader(file))
    uncertainty.some_of.cache_clear()
    assert {(row["test"], row["against"]) for row in found} == {("choice", "cifar10"), ("strangers", "noise")}
    scores = {row["score"] for row in found}
    assert {"max_softmax", "energy", "elbo", "density class_caps.kappa, per class", "density conv_caps1.m"} <= scores
    assert len(scores) == 3 + len(shipped.CANDIDATES)
    assert {row["images"] for row in found if row["test"] == "strangers"} == {str(len(tiny.dataset().test.labels))}
    capsys.readouterr()
    shipped.main(["one", "--write"])
    assert "recorded already" in capsys.readouterr().out


def test_the_networks_have_the_density_that_the_recorded_choices_give():
    measures = read_measures(ROOT / "results")
    (of_five,) = densities.OWN.values()
    assert measures.best("", of_posterior) == f"density {of_five[0]}, per class"
    assert of_five[1] is False
    with open(ROOT / "results" / "shipped.csv", newline="") as file:
        features, tied = densities.FEATURES["vb"]
        assert shipped_table.chosen_density(list(csv.DictReader(file))) == f"density {features}" + (
            "" if tied else ", per class"
        )


@pytest.mark.parametrize("name", vbcaps.list_models())
def test_a_density_is_the_only_one_and_small(name):
    model = vbcaps.load(name)
    kind = "cnn" if model.recipe.network == "cnn" else model.recipe.routing
    features, tied = densities.OWN.get(name, densities.FEATURES[kind])
    assert {one: density.tied for one, density in model.densities.items()} == {features: tied}
    (density,) = model.densities.values()
    stored = vbcaps.uncertainty.density.pack_densities(model.densities)
    assert sum(x.numel() * x.element_size() for x in stored.values()) < 400_000
    assert density.whiten.isfinite().all()


def test_half_precision_keeps_the_scores():
    x, y = torch.randn(500, 40), torch.arange(500) % 4
    density = vbcaps.uncertainty.fit_density(x, y, 4)
    torch.testing.assert_close(densities.half(density).log_prob(x), density.log_prob(x), rtol=2e-3, atol=0.02)

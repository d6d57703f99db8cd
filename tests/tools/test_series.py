"""A series: which runs it has, that none is made twice, that it goes on after a stop or a failure, what is recorded."""

import dataclasses
import importlib
import itertools
import json
import os
import signal
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch

from vbcaps.models import CapsNet
from vbcaps.training import loop
from vbcaps.training.files import lock
from vbcaps.training.learner import NonFinite
from vbcaps.training.runfolder import read_recipe, sums_of

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))  # as for `python tools/series.py`
series, recorded, votes = (importlib.import_module(name) for name in ("series", "recorded", "votes"))

SMALL = {k: v for k, v in dataclasses.asdict(tiny.recipe(epochs=2)).items() if k not in ("name", "seed")}


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Make a series of two settings of a tiny recipe; return what is printed."""
    monkeypatch.setattr("vbcaps.training.environment.commit", lambda: "abc1234")
    settings = [("default", SMALL | dict(lr=lr)) for lr in (0.01, 0.02)]
    monkeypatch.setattr(series, "SERIES", dict(pair=lambda scale: settings, votes=lambda scale: settings[:1]))
    monkeypatch.setattr(series.Job, "folder", property(lambda job: f"lr{job.fields['lr']}-seed{job.seed}"))

    def go(*words, name="pair"):
        with tiny.in_place_of_data():
            series.main([name, "--out", str(tmp_path / "runs"), *words], tmp_path / "results")
        return capsys.readouterr().out.splitlines()

    return go


@pytest.fixture
def fits(monkeypatch):
    """The folders that ``fit`` was called for, in order."""
    seen, fit = [], loop.fit

    def noted(one, folder, **options):
        seen.append(folder.name)
        return fit(one, folder, **options)

    monkeypatch.setattr(loop, "fit", noted)
    return seen


# --- what a series has -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", series.SCALES)
def test_recipes_of_a_series_are_there_and_differ(scale):
    for name in series.SERIES:
        recipes = [series.key(job.recipe) for job in series.jobs(name, scale, 2)]
        assert len(set(recipes)) == len(recipes), name
        assert len({job.folder for job in series.jobs(name, scale, 2)}) == len(recipes)


def test_priors_are_the_papers_16_settings_and_the_learned_one():
    learned, *grid = [job.recipe for job in series.jobs("priors", "laptop", 1)]
    assert learned.learn == ("alpha0",)
    assert {(one.alpha0, one.psi0) for one in grid} == {(a, p) for a in (0.01, 0.1, 1, 10) for p in (0.01, 0.1, 1, 10)}
    assert len(grid) == 16
    assert not any(one.learn for one in grid)
    assert {one.dataset for one in [learned, *grid]} == {"fashion-mnist"}


@pytest.mark.parametrize("fields", [fields for _, fields in series.priors("fast")], ids=str)
def test_every_prior_trains_without_nan(fields, tmp_path):
    with tiny.in_place_of_data():
        model = loop.fit(tiny.recipe(epochs=2, **fields), tmp_path)
    assert np.isfinite(model.result.loss)
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@pytest.mark.parametrize("scale", series.SCALES)
def test_iterations_are_1_to_5_of_vb_and_em_at_one_rate(scale):
    recipes = [job.recipe for job in series.jobs("iterations", scale, 1)]
    assert len({one.lr for one in recipes}) == 1
    assert {(one.routing, one.iters) for one in recipes} == set(itertools.product(("vb", "em"), (1, 2, 3, 4, 5)))


@pytest.mark.parametrize("scale", series.SCALES)
def test_curves_compare_vb_and_em_alike_and_validate(scale):
    recipes = [job.recipe for job in series.jobs("curves", scale, 1)]
    assert all(one.validation > 0 and one.test for one in recipes)
    for vb, em in zip(recipes[::2], recipes[1::2], strict=True):
        assert (vb.dataset, vb.lr, vb.epochs, vb.optimiser) == (em.dataset, em.lr, em.epochs, em.optimiser)
    assert {(one.dataset, one.routing) for one in recipes} == {
        (dataset, routing) for dataset in ("smallnorb", "fashion-mnist", "svhn", "cifar10") for routing in ("vb", "em")
    }


def test_all_of_seed_0_comes_first():
    assert [job.seed for job in series.jobs("votes", "laptop", 3)] == [0, 1, 2]
    seeds = [job.seed for job in series.jobs("priors", "laptop", 2)]
    assert seeds == [0] * 17 + [1] * 17


def test_a_folder_has_the_fields_that_differ_in_its_name():
    assert series.Job("fashion_fast", dict(alpha0=0.1, learn=("alpha0",)), 2).folder == (
        "fashion_fast-alpha0=0.1-learn=alpha0-seed2"
    )


def test_only_takes_the_recipes_whose_names_begin_so():
    found = {job.base for job in series.jobs("uncertainty", "laptop", 1, "mnist")}
    assert found == {f"mnist{network}_laptop" for network in ("", "_em", "_dynamic", "_cnn")}
    with pytest.raises(SystemExit, match="no recipe of the series votes begins with 'svhn'"):
        series.main(["votes", "--only", "svhn"])


def test_an_unknown_series_suggests_the_nearest():
    with pytest.raises(SystemExit, match="no series 'prior'; did you mean 'priors'"):
        series.main(["prior"])


# --- making ----------------------------------------------------------------------------------------------------------


def test_runs_are_made_once(run, fits, tmp_path):
    assert "to be made" in run("--list", "--seeds", "1")[0]
    first = run("--seeds", "1")
    assert fits == ["lr0.01-seed0", "lr0.02-seed0"]
    assert all("% test error" in line for line in first)
    assert first[1].startswith("2/2  lr0.02-seed0")
    again = run("--seeds", "2")
    assert fits[2:] == ["lr0.01-seed1", "lr0.02-seed1"]
    assert "made in" in again[0]
    assert "made in" not in again[2]
    assert read_recipe(tmp_path / "runs/series/pair/lr0.02-seed1").lr == 0.02


def test_seeds_that_are_trained_together_are_the_same_runs(run, fits, tmp_path):
    run("--seeds", "1")
    assert ["made in" in line for line in run("--seeds", "2", "--together")] == [True, False, True, False]
    assert run("--seeds", "3", "--together")[2].startswith("5/6  lr0.01-seed2")
    one, two = (read_recipe(tmp_path / f"runs/series/pair/lr0.02-seed{seed}") for seed in (0, 2))
    assert two == dataclasses.replace(one, seed=2)
    run("--seeds", "5", "--together")  # two that are new, at the same time
    alone = tmp_path / "alone"
    with tiny.in_place_of_data():
        loop.fit(dataclasses.replace(one, seed=4), alone)
    together = tmp_path / "runs/series/pair/lr0.02-seed4"
    assert (alone / "last.safetensors").read_bytes() == (together / "last.safetensors").read_bytes()


def test_of_seeds_that_are_trained_together_the_one_that_fails_is_written_down(run, fits, monkeypatch, tmp_path):
    fit_all, fit = loop.fit_all, loop.fit

    def all_but_seed_1(recipes, folders, **options):
        good = [(one, folder) for one, folder in zip(recipes, folders, strict=True) if one.seed != 1]
        fit_all([one for one, _ in good], [folder for _, folder in good], **options)
        raise NonFinite("the loss is not finite")

    def not_seed_1(one, folder, **options):
        if one.seed == 1:
            (folder / "recipe.json").write_text(json.dumps(one.to_json()))
            raise NonFinite("the loss is not finite")
        return fit(one, folder, **options)

    monkeypatch.setattr(loop, "fit_all", all_but_seed_1)
    monkeypatch.setattr(loop, "fit", not_seed_1)
    lines = run("--seeds", "3", "--together")
    assert ["failed" in line for line in lines] == [False, True, False] * 2


def write_recipe(folder, fields):
    """Change the recipe of a finished run as if it had been trained with it."""
    (folder / "recipe.json").write_text(json.dumps(fields))
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps(result | dict(sums=sums_of(folder))))


def test_a_recorded_run_of_another_series_and_name_is_not_made_again(run, fits, tmp_path):
    run("--seeds", "1")
    elsewhere = tmp_path / "results" / "series" / "other" / "same"
    elsewhere.parent.mkdir(parents=True)
    (tmp_path / "runs/series/pair/lr0.01-seed0").rename(elsewhere)
    fields = json.loads((elsewhere / "recipe.json").read_text())
    write_recipe(elsewhere, fields | dict(name="default_twin"))
    assert "recorded in series/other/same" in run("--seeds", "1")[0]
    assert len(fits) == 2


def test_a_stopped_series_goes_on_where_it_was(run, fits, monkeypatch, tmp_path):
    def stop(event):
        if event.kind == "step" and event.epoch == 2:
            os.kill(os.getpid(), signal.SIGINT)

    watch = series.with_watcher
    monkeypatch.setattr(series, "with_watcher", lambda *_: dict(on_event=stop))
    with pytest.raises(SystemExit) as stopped:
        run("--seeds", "1")
    assert stopped.value.code == 130
    assert fits == ["lr0.01-seed0"]
    monkeypatch.setattr(series, "with_watcher", watch)
    assert "begun" in run("--list", "--seeds", "1")[0]
    assert "test error" in run("--seeds", "1")[0]
    environment = json.loads((tmp_path / "runs/series/pair/lr0.01-seed0/environment.json").read_text())
    assert "resumed" in environment  # it did not begin again


def test_a_run_that_is_not_finite_is_written_down_and_the_series_goes_on(run, fits, monkeypatch, tmp_path):
    fit = loop.fit

    def fail(one, folder, **options):
        if one.lr == 0.01:
            folder.mkdir(exist_ok=True)
            for name, content in (("recipe.json", one.to_json()), ("environment.json", dict(commit="abc1234"))):
                (folder / name).write_text(json.dumps(content))
            raise NonFinite("the loss is not finite at epoch 1, step 3")
        return fit(one, folder, **options)

    monkeypatch.setattr(loop, "fit", fail)
    first, second = run("--seeds", "1")
    assert "failed: the loss is not finite at epoch 1, step 3" in first
    assert "test error" in second
    assert "failed" in run("--seeds", "1")[0]
    assert fits == ["lr0.02-seed0"]
    run("--record", "--seeds", "1")
    (group,) = recorded.groups([recorded.read_run(tmp_path / "results/series/pair/lr0.01-seed0", tmp_path / "results")])
    assert group[0].result is None
    assert "not finite" in (tmp_path / "results/series/pair/lr0.01-seed0/failed.json").read_text()


def test_a_run_that_another_process_makes_is_left_alone(run, fits, tmp_path):
    folder = tmp_path / "runs/series/pair/lr0.01-seed0"
    folder.mkdir(parents=True)
    held = lock(folder)
    assert "another process" in run("--seeds", "1")[0]
    os.close(held)
    assert fits == ["lr0.02-seed0"]


def test_a_run_that_cannot_be_made_is_reported_and_the_others_follow(run, fits, tmp_path, capsys):
    folder = tmp_path / "runs/series/pair/lr0.01-seed0"
    folder.mkdir(parents=True)
    other = tiny.recipe(name="default", lr=0.5)
    (folder / "recipe.json").write_text(json.dumps(other.to_json()))
    (folder / "state.safetensors").write_bytes(b"no state")
    with pytest.raises(SystemExit, match="1 of 2 runs could not be made"):
        run("--seeds", "1")
    lines = capsys.readouterr().out.splitlines()
    assert "not made" in lines[0]
    assert "test error" in lines[1]


# --- recording -------------------------------------------------------------------------------------------------------


def test_what_ended_is_recorded_once_and_without_weights(run, tmp_path):
    run("--seeds", "1")
    assert run("--record", "--seeds", "1")[-1] == "2 runs are new in pair"
    folder = tmp_path / "results/series/pair/lr0.01-seed0"
    assert {path.name for path in folder.iterdir()} == {"recipe.json", "environment.json", "metrics.csv", "result.json"}
    assert run("--record", "--seeds", "1")[-1] == "0 runs are new in pair"
    assert recorded.read_runs(tmp_path / "results") == []  # the tables have no rows of series


def test_a_run_of_a_recipe_that_was_otherwise_is_kept_beside_the_new_one(run, tmp_path):
    run("--seeds", "1")
    run("--record", "--seeds", "1")
    path = tmp_path / "results/series/pair/lr0.01-seed0/recipe.json"
    was = json.loads(path.read_text()) | dict(weight_decay=0.5)  # recorded when the recipe was so
    write_recipe(path.parent, was)
    assert run("--record", "--seeds", "1")[-1] == "1 runs are new in pair"
    assert json.loads(path.read_text()) == was
    again = read_recipe(path.parent.with_name("lr0.01-seed0-2"))
    assert again.weight_decay != 0.5


def test_changed_source_is_not_recorded(run, monkeypatch, tmp_path):
    monkeypatch.setattr("vbcaps.training.environment.commit", lambda: "abc1234-dirty")
    run("--seeds", "1")
    with pytest.raises(SystemExit, match="abc1234-dirty"):
        run("--record", "--seeds", "1")
    assert not (tmp_path / "results").exists()


# --- votes -----------------------------------------------------------------------------------------------------------


def test_distances_are_those_of_the_trace(monkeypatch):
    torch.manual_seed(0)
    net = CapsNet((4, 2, 2, 2), in_channels=1, num_classes=3, image_size=20, backend="reference").eval()
    images = tiny.split(6, 3).images[..., :20, :20].float()

    model = SimpleNamespace(net=net, view=SimpleNamespace(test=lambda x: x / 255), eval=lambda: None)
    monkeypatch.setattr(votes, "BATCH", 4)
    found = votes.distances(model, images)
    with torch.no_grad():
        trace = net.trace(images / 255).layers["class_caps"]
    V = trace.votes.mean(0)
    for t, q in enumerate(trace.iterations):
        m = q.m.mean(0)
        for j in range(3):
            expected = [float(((V[i, j] - m[j]) ** 2).sum()) for i in range(len(V))]
            np.testing.assert_allclose(found[t, j], expected, rtol=1e-3)


def test_votes_are_measured_after_each_epoch_also_when_the_run_was_killed_before(run, monkeypatch, tmp_path):
    monkeypatch.setattr(votes, "SHOWN", ("top", "bottom"))
    run("--seeds", "1", name="votes")
    folder = tmp_path / "runs/series/votes/lr0.01-seed0"
    kept = dict(np.load(folder / "votes.npz"))
    assert kept["epochs"].tolist() == [1, 2]
    assert kept["distances"].shape[:4] == (2, 2, 2, 3)  # epochs, classes, iterations, capsules
    assert kept["classes"].tolist() == list(tiny.CLASSES)
    assert kept["images"].tolist() == [10, 10]
    assert not np.allclose(kept["distances"][0], kept["distances"][1])
    run("--record", "--seeds", "1", name="votes")
    assert (tmp_path / "results/series/votes/lr0.01-seed0/votes.npz").exists()

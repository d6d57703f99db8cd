"""Cross-validation: every image is tested once by a network that saw neither it nor its group."""

import json
import re
from pathlib import Path

import pytest
import tiny
import torch
from PIL import Image
from typer.testing import CliRunner

import vbcaps
from vbcaps.cli.main import app
from vbcaps.data import Dataset, Split
from vbcaps.training.files import RunError
from vbcaps.training.folds import fit_folds, summary_of
from vbcaps.training.loop import fit, prepare
from vbcaps.training.runfolder import fold_folders, read_recipe


@pytest.fixture(autouse=True)
def _tiny():
    with tiny.in_place_of_data():
        yield


def test_every_fold_is_trained_and_tested_on_its_own_part(tmp_path):
    recipe = tiny.recipe(epochs=1, validation=0.25)
    models = fit_folds(recipe, tmp_path / "run", 3, device="cpu")
    assert [model.result.test.count for model in models] == [
        16
    ] * 3  # of 48 training images; 30 others are the test set
    assert [model.recipe.fold for model in models] == [1, 2, 3]
    assert all(model.result.validation is not None for model in models)
    summary = json.loads((tmp_path / "run" / "folds.json").read_text())
    errors = torch.tensor([model.result.test.error for model in models], dtype=torch.float64)
    assert summary["error"] == dict(
        values=errors.tolist(), mean=pytest.approx(float(errors.mean())), std=pytest.approx(float(errors.std()))
    )
    assert (summary["folds"], summary["count"]) == (3, 48)
    assert summary["pooled_error"] == pytest.approx(float(errors.mean()))  # parts of one size
    tested = [prepare(model.recipe, None, torch.device("cpu")).test.images for model in models]
    everything = torch.cat(tested).flatten(1).unique(dim=0)
    assert torch.equal(everything, tiny.dataset().train.images.flatten(1).unique(dim=0))
    alone = fit(read_recipe(tmp_path / "run" / "fold2"), tmp_path / "alone", device="cpu")
    assert alone.result.test == models[1].result.test

    (tmp_path / "run" / "fold3" / "result.json").unlink()
    said = []
    again = fit_folds(recipe, tmp_path / "run", 3, device="cpu", resume=True, on_event=lambda e: said.append(e.kind))
    assert [model.result.test.confusion for model in again] == [model.result.test.confusion for model in models]
    assert said.count("note") == 3
    assert "epoch" not in said
    with pytest.raises(RunError, match="run already has fold1: resume it, or choose another folder"):
        fit_folds(recipe, tmp_path / "run", 3, device="cpu")


def test_groups_are_on_one_side_of_every_part(tmp_path):
    made = tiny.split(60, 1)
    groups = torch.arange(60) // 4
    data = Dataset("patients", made._replace(groups=groups), tiny.split(6, 2), tiny.CLASSES, "made")
    for model in fit_folds(tiny.recipe(epochs=1, validation=0.3), tmp_path, 2, data=data, device="cpu"):
        parts = prepare(model.recipe, None, torch.device("cpu"), dataset=data)
        sides = [set(part.groups.tolist()) for part in (parts.train, parts.validation, parts.test)]
        assert all(sides)
        assert not sides[0] & sides[1]
        assert not (sides[0] | sides[1]) & sides[2]


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        (dict(folds=1), "folds must be 0 or at least 2, and fold at most folds, got 1 and 0"),
        (dict(folds=3, fold=4), "got 3 and 4"),
        (dict(fold=1), "got 0 and 1"),
        (dict(folds=3, dataset="affnist", image_size=None), "got folds=3"),
        (dict(dataset="smallnorb", hold_out="objects", groups="instance"), "hold_out must be 'images', got 'objects'"),
    ],
)
def test_fields_that_do_not_go_together_are_errors(fields, wrong):
    with pytest.raises(ValueError, match=re.escape(wrong)):
        tiny.recipe(**fields)


def test_what_cannot_be_folded_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="fold must be 1 to 3, got 0: `fit_folds` trains all folds"):
        fit(tiny.recipe(folds=3), tmp_path, device="cpu")
    with pytest.raises(ValueError, match="folds must be at least 2, got 0"):
        fit_folds(tiny.recipe(), tmp_path)
    with pytest.raises(RunError, match="there is no run to resume in"):
        fit_folds(tiny.recipe(), tmp_path / "none", 2, resume=True)
    with pytest.raises(ValueError, match="groups of images in memory are in their Split"):
        fit_folds(tiny.recipe(), tmp_path / "x", 2, groups="a.csv", data=tiny.dataset(), device="cpu")


def test_a_measure_that_a_fold_lacks_is_left_out():
    with_all = vbcaps.training.evaluate.summary(torch.eye(3), torch.arange(3), tiny.CLASSES)
    one = vbcaps.training.evaluate.summary(torch.eye(3)[:1], torch.tensor([1]), tiny.CLASSES)
    found = summary_of([with_all, with_all, one])
    assert found["macro_auc"] == dict(values=[1.0, 1.0, None], mean=1.0, std=0.0)
    assert found["error"]["mean"] == pytest.approx(1 / 3)
    assert found["pooled_error"] == pytest.approx(1 / 7)
    assert found["confusion"][1] == [1, 2, 0]


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """Two classes of six patients with four images each, told apart by where a bar lies."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vbcaps.training.loop.load_dataset", vbcaps.data.load_dataset)
    images, labels, *_ = tiny.split(72, 1)
    counts = [0, 0, 0]
    for image, label in zip(images, labels.tolist(), strict=True):
        if label == 2:
            continue
        place = Path("photos") / tiny.CLASSES[label] / f"p{counts[label] // 4}"
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image[0].numpy()).save(place / f"{counts[label]}.png")
        counts[label] += 1


def test_the_command_trains_all_folds_of_patients_and_one_alone(photos):
    words = [
        "--data",
        "photos",
        "--groups",
        "folder",
        "--epochs",
        "1",
        "--arch",
        "4,2,2,2",
        "--iters",
        "1",
        "--device",
        "cpu",
        "--crop",
        "20",
    ]
    done = CliRunner().invoke(app, ["train", "--folds", "2", *words, "--out", "run"], env={"COLUMNS": "160"})
    said = " ".join(done.output.split())
    assert done.exit_code == 0, said
    assert "2 classes (middle, top): about 24 images to train on" in said
    assert "to test in each of 2 folds" in said
    assert "fold 1 of 2" in said
    assert "over 2 folds" in said
    assert len(fold_folders(Path("run"))) == 2
    tests = [vbcaps.load(folder) for folder in fold_folders(Path("run"))]
    assert tests[0].recipe.groups == "folder"
    again = CliRunner().invoke(app, ["train", "--resume", "run", "--device", "cpu"])
    assert again.exit_code == 0, again.output
    assert "over 2 folds" in again.output
    whole = CliRunner().invoke(app, ["eval", "run", "--device", "cpu"])
    assert f"run has a run for each fold: choose one, as {Path('run/fold1')}" in " ".join(whole.output.split())
    one = CliRunner().invoke(app, ["train", "--folds", "2", "--fold", "2", *words, "--out", "one", "--quiet"])
    assert (one.exit_code, one.output) == (0, "")
    said = CliRunner().invoke(app, ["eval", "one", "--device", "cpu"]).output
    assert "the weights file says" in said
    wrong = CliRunner().invoke(app, ["train", "--folds", "2", *words, "--seeds", "2"])
    assert wrong.exit_code == 2
    assert "choose one with --fold" in wrong.output


def test_a_split_of_positions_keeps_its_meaning():
    """``Split`` gained a fourth part, which the three before it do not move."""
    split = Split(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.tensor([0, 1]), torch.zeros(2, 4))
    assert split.take(torch.tensor([1])).info.shape == (1, 4)
    assert split.to("cpu").groups is None

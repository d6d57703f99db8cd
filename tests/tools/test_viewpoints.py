"""Choices for Table 2, compared on toys that are held out of the training set."""

import importlib
import sys
from pathlib import Path

import official_files
import pytest
import tiny
import torch

from vbcaps import Model
from vbcaps.data import Dataset, Split
from vbcaps.data.affnist import affine_digits
from vbcaps.training.learner import NEVER, Learner
from vbcaps.training.loop import evaluate, scorer
from vbcaps.training.recipes import recipe

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))  # as for `python tools/viewpoints.py`
choices, viewpoints = (importlib.import_module(name) for name in ("choices", "viewpoints"))

NAME = "smallnorb_elevation_fast"


@pytest.fixture
def data(monkeypatch):
    """Toys of three classes, told apart by a bar as they are in ``tiny``; its test set must not be looked at."""
    train = tiny.split(270, 1)
    unseen = Split(torch.zeros(3, 1, 22, 22, dtype=torch.uint8), torch.arange(3), torch.zeros(3, 4, dtype=torch.int64))
    info = torch.from_numpy(official_files.norb_info(270)).long()
    info[:, 0] = torch.arange(270) // 3 % 5  # so that each class has every toy
    info[:, 1] = torch.arange(270) // 15 % 9
    made = Dataset("smallnorb", Split(train.images, train.labels, info), unseen, tiny.CLASSES, "made up")
    monkeypatch.setattr("vbcaps.data.load_dataset", lambda *_: made)
    return made


@pytest.fixture
def job(data):
    made = tiny.recipe(name=NAME, dataset="smallnorb", viewpoint="elevation", split=1, epochs=9)
    return choices.Job("lr=0.01", made, 0.4, None, "cpu", until=float("inf"))


def test_a_row_has_both_errors_after_each_epoch(job, monkeypatch):
    scored = []

    def watch(learner, split, names):
        scored.append((learner, split))
        return scorer(learner, split, names)

    monkeypatch.setattr("vbcaps.training.loop.scorer", watch)
    row = viewpoints.run(job, stop=6)
    (learner, familiar), (_, novel) = scored
    train = learner.train
    assert [len(split.labels) for split in (train, familiar, novel)] == [3 * 3 * 3 * 2, 3 * 2 * 3 * 2, 3 * 2 * 6 * 2]
    assert set(train.info[:, 1].tolist()) == set(familiar.info[:, 1].tolist()) == {0, 1, 2}
    assert set(novel.info[:, 1].tolist()) == {3, 4, 5, 6, 7, 8}
    for label in range(3):
        toys, others = (set(s.info[s.labels == label, 0].tolist()) for s in (train, familiar))
        assert (len(toys), len(others)) == (3, 2)
        assert not toys & others
        assert others == set(novel.info[novel.labels == label, 0].tolist())
    errors = [[float(error) for error in row[key].split()] for key in ("familiar", "novel")]
    assert [len(curve) for curve in errors] == [6, 6]
    for split, curve in zip((familiar, novel), errors, strict=True):
        again = evaluate(Model(learner.weights, learner.recipe, tiny.CLASSES, learner.view), split)
        assert curve[-1] == pytest.approx(100 * again.error, abs=0.01)
    assert learner.epoch == 6
    assert (row["choice"], row["split"], row["held"], row["epochs"], row["note"]) == ("lr=0.01", 1, 0.4, 9, "")


def test_of_digits_affine_maps_of_those_held_out_are_novel(monkeypatch):
    train, asked = tiny.split(60, 1), []
    made = Dataset("mnist", train, tiny.split(3, 2), tiny.CLASSES, "made up")
    monkeypatch.setattr("vbcaps.data.load_dataset", lambda name, *_: asked.append(name) or made)
    fields: dict = dict(name="affnist_matched_fast", dataset="affnist", image_size=None, crop=40, place=True)
    recipe = tiny.recipe(split=1, epochs=2, **fields)
    classes, rest, held, novel = viewpoints.parts_of(choices.Job("", recipe, 0.2, None, "cpu", until=float("inf")))
    assert (asked, classes) == (["mnist"], tiny.CLASSES)  # not affNIST: its images are of the test
    assert [len(part.labels) for part in (rest, held, novel)] == [48, 12, 12 * viewpoints.MAPS]
    found = [{image.numpy().tobytes() for image in part.images} for part in (train, rest, held)]
    assert found[1] | found[2] == found[0]
    assert not found[1] & found[2]
    assert torch.equal(novel.images, affine_digits(held.images, viewpoints.MAPS))
    assert torch.equal(novel.labels, torch.cat([held.labels] * viewpoints.MAPS))


def test_a_run_that_fails_says_when_and_keeps_what_it_has(job, monkeypatch):
    totals = Learner.totals
    monkeypatch.setattr(Learner, "totals", lambda self: totals(self)._replace(bad=3 if self.epoch == 2 else NEVER))
    row = viewpoints.run(job, stop=9)
    assert row["note"] == "not finite in epoch 3"
    assert len(row["familiar"].split()) == len(row["novel"].split()) == 2


def test_a_recipe_without_viewpoints_is_refused():
    with pytest.raises(SystemExit, match="smallnorb_fast has nothing novel; smallnorb_azimuth_fast"):
        viewpoints.main(["--base", "smallnorb_fast"])
    with pytest.raises(SystemExit, match="no field 'zom'; did you mean 'zoom'"):
        viewpoints.main(["zom=0.2"])
    with pytest.raises(SystemExit, match=r"held must be above 0 and at most 0\.9, got 1\.5"):
        viewpoints.main(["--held", "1.5"])
    with pytest.raises(SystemExit, match="stop must be at least 1, got 0"):
        viewpoints.main(["--stop", "0"])


def test_its_own_choices_change_fields_that_there_are():
    base = recipe(NAME)
    assert [choice for choice in viewpoints.CHOICES if choices.changed(base, choice) == base] == [""]

"""Rare classes: their weights in the loss, how often an epoch takes their images, and when a run stops early."""

import json

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.utils.class_weight import compute_class_weight

from vbcaps.data import Dataset
from vbcaps.losses import activation_nll_loss, cross_entropy, evidence_loss, spread_loss
from vbcaps.training.imbalance import class_weights, quotas
from vbcaps.training.learner import Learner, epoch_plan
from vbcaps.training.loop import fit
from vbcaps.training.recipe import Recipe
from vbcaps.training.runfolder import read_metrics, read_result
from vbcaps.weights.model import load

COUNTS = [40, 5, 3]


def rare(seed=1):
    """48 images of the tiny problem, of which 40, 5 and 3 are of its classes."""
    many = tiny.split(150, seed)
    index = [(many.labels == c).nonzero()[:count, 0] for c, count in enumerate(COUNTS)]
    return many.take(torch.cat(index))


def dataset():
    return Dataset("rare", rare(), tiny.split(30, 2), tiny.CLASSES, "made up")


def learner_of(**fields):
    recipe, train = tiny.recipe(**fields), rare()
    return Learner(recipe, train, recipe.view().fit(train), 3)


# --- weights in the loss ---------------------------------------------------------------------------------------------


def test_balanced_weights_are_scikit_learns_and_their_mean_over_the_images_is_one():
    labels = rare().labels.numpy()
    expected = compute_class_weight("balanced", classes=np.arange(3), y=labels)
    assert class_weights("balanced", COUNTS) == pytest.approx(expected.tolist())
    for words in ("balanced", "1,5,20"):
        weights = class_weights(words, COUNTS)
        assert sum(w * n for w, n in zip(weights, COUNTS, strict=True)) == pytest.approx(48)
    assert weights[2] / weights[0] == pytest.approx(20)
    assert class_weights("none", COUNTS) is None
    assert class_weights("balanced", [4, 0, 4])[::2] == [1, 1]  # a class without images changes nothing


def test_weights_are_those_of_the_images_as_they_are_drawn():
    assert learner_of(class_weights="balanced", balance=1.0).class_weights.tolist() == pytest.approx([1, 1, 1])
    half = learner_of(class_weights="balanced", balance=0.5).class_weights
    assert 1 < half[2] / half[0] < 40 / 3


@pytest.mark.parametrize("words", ["1,5", "1,2,3,4"])
def test_there_is_a_weight_for_each_class(words):
    with pytest.raises(ValueError, match=f"a number for each of 3 classes, got '{words}'"):
        learner_of(class_weights=words)


@pytest.mark.parametrize("words", ["", "some", "1,-2", "1,0", "1,inf", "1,,2"])
def test_impossible_weights(words):
    with pytest.raises(ValueError, match="class_weights must be none, balanced, or numbers above 0"):
        Recipe(class_weights=words)


def test_a_weighted_loss_is_the_mean_of_weighted_losses_of_single_images():
    torch.manual_seed(0)
    logits, y, w = torch.randn(6, 3), torch.tensor([0, 0, 0, 0, 1, 2]), torch.tensor([0.5, 2.0, 7.0])
    a = logits.sigmoid()
    each = {
        cross_entropy: [w[t] * F.cross_entropy(x[None], t[None]) for x, t in zip(logits, y, strict=True)],
        activation_nll_loss: [w[t] * F.cross_entropy(x[None], t[None]) for x, t in zip(a, y, strict=True)],
    }
    assert cross_entropy(logits, y, weight=w) == pytest.approx(sum(each[cross_entropy]) / 6)
    assert activation_nll_loss(a, y, weight=w) == pytest.approx(sum(each[activation_nll_loss]) / 6)
    alone = [w[t] * spread_loss(x[None], t[None], 0.5) for x, t in zip(a, y, strict=True)]
    assert spread_loss(a, y, 0.5, weight=w) == pytest.approx(sum(alone) / 6)
    halves = [cross_entropy(logits[k::2], y[k::2], weight=w) for k in range(2)]  # as two processes have them
    assert sum(halves) / 2 == pytest.approx(cross_entropy(logits, y, weight=w))
    shares = 0.7 * F.one_hot(y, 3) + 0.3 * F.one_hot(y.roll(1), 3)  # as mixup blends targets
    blended = 0.7 * cross_entropy(logits, y, weight=w) + 0.3 * cross_entropy(logits, y.roll(1), weight=w)
    assert cross_entropy(logits, shares, weight=w) == pytest.approx(blended)
    out = tiny.recipe().net(1, 3)(torch.randn(6, 1, 20, 20))
    parts = [out.posterior._replace(alpha=alpha[None]) for alpha in out.posterior.alpha]
    alone = [evidence_loss(part, t[None]) for part, t in zip(parts, y, strict=True)]
    expected = sum(w[t] * one for t, one in zip(y, alone, strict=True)) / 6
    torch.testing.assert_close(evidence_loss(out.posterior, y, weight=w), expected)
    soft = evidence_loss(out.posterior, F.one_hot(y, 3).float(), weight=w)
    torch.testing.assert_close(soft, expected)


@pytest.mark.parametrize(
    "fields",
    [
        dict(),
        dict(loss_on="activations"),
        dict(loss="spread", loss_on="activations"),
        dict(mixup=0.4),
        dict(evidence=1.0, norm_logit=False),
    ],
)
def test_a_step_has_the_weights_in_its_loss(fields):
    plain, equal, weighted = (learner_of(class_weights=words, **fields) for words in ("none", "1,1,1", "1,1,99"))
    for learner in (plain, equal, weighted):
        learner.begin()
        learner()
    assert equal.totals().loss == pytest.approx(plain.totals().loss, rel=1e-5)
    assert weighted.totals().loss != pytest.approx(plain.totals().loss, rel=0.2)


# --- how often an epoch takes an image -------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    counts=st.lists(st.integers(0, 60), min_size=2, max_size=6).filter(any),
    balance=st.floats(0, 1),
    seed=st.integers(0, 2**32 - 1),
)
def test_an_epoch_takes_its_quota_of_each_class_and_no_image_twice_more_than_another(counts, balance, seed):
    wanted = quotas(counts, balance)
    assert sum(wanted) == sum(counts)
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    members = [(labels == c).nonzero()[:, 0] for c in range(len(counts))]
    order, u = epoch_plan(seed, 3, len(labels), 2, (members, wanted))
    assert u.shape == (len(labels), 2)
    times = torch.bincount(order, minlength=len(labels))
    for of_class, count in zip(members, wanted, strict=True):
        assert times[of_class].sum() == count
        if len(of_class):
            assert times[of_class].max() - times[of_class].min() <= 1
    assert torch.equal(order, epoch_plan(seed, 3, len(labels), 2, (members, wanted))[0])
    pairs = [(n, q) for n, q in zip(counts, wanted, strict=True) if n]
    assert all(q <= p for (n, q) in pairs for (m, p) in pairs if n < m)  # no rare class overtakes a common one


def test_balance_runs_from_the_images_as_they_are_to_classes_alike():
    assert quotas(COUNTS, 0.0) == COUNTS
    assert quotas(COUNTS, 1.0) == [16, 16, 16]
    middle = quotas(COUNTS, 0.5)
    assert [n / middle[0] for n in middle] == pytest.approx([(n / 40) ** 0.5 for n in COUNTS], abs=0.05)
    learner = learner_of(balance=1.0)
    learner.begin()
    seen = learner.train.labels[learner.order.flatten()]
    assert torch.bincount(seen).tolist() == [16, 16, 16]
    first = learner.order.clone()
    learner.epoch = 1
    learner.begin()
    assert set(learner.order.flatten().tolist()) != set(first.flatten().tolist())  # other images of the large class


@pytest.mark.parametrize("fields", [dict(class_weights="balanced"), dict(balance=1.0)])
def test_a_stopped_run_goes_on_with_the_same_bits(tmp_path, fields):
    recipe, options = tiny.recipe(**fields), dict(device="cpu", data=dataset())
    whole = fit(recipe, tmp_path / "whole", **options)

    def stop(event):
        if event.kind == "step" and (event.epoch, event.step) == (2, 3):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(recipe, tmp_path / "part", on_event=stop, **options)
    part = fit(recipe, tmp_path / "part", resume=True, **options)
    for name, value in whole.net.state_dict().items():
        assert torch.equal(value, part.net.state_dict()[name]), name


# --- early stopping --------------------------------------------------------------------------------------------------


def test_a_run_that_gets_no_better_stops_and_says_so(tmp_path):
    notes, recipe = [], tiny.recipe(epochs=9, lr=1e-9, validation=0.25, test=True, patience=2)
    options = dict(device="cpu", data=tiny.dataset())
    model = fit(recipe, tmp_path / "whole", on_event=notes.append, **options)
    errors = [row["validation_error"] for row in read_metrics(tmp_path / "whole")]
    first = errors.index(min(errors))
    assert len(errors) == first + 1 + 2 < 9
    assert (model.result.epochs, model.result.stopped_early) == (len(errors), True)
    assert read_result(tmp_path / "whole")["stopped_early"] is True
    said = [event.message for event in notes if event.kind == "note"]
    assert f"stopped after epoch {len(errors)}: 2 epochs were no better" in said
    assert model.result.test is not None

    def stop(event):
        if event.kind == "epoch" and event.epoch == len(errors):  # the last: what remains is to choose and test
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(recipe, tmp_path / "part", on_event=stop, **options)
    part = fit(recipe, tmp_path / "part", resume=True, **options)
    assert part.result.test == model.result.test
    again = fit(recipe, tmp_path / "part", resume=True, **options)  # which reads result.json
    assert (again.result.stopped_early, again.result.epochs) == (True, len(errors))
    for name, value in model.net.state_dict().items():
        assert torch.equal(value, part.net.state_dict()[name]), name


def test_patience_that_is_never_lost_changes_nothing(tmp_path):
    options = dict(device="cpu", data=tiny.dataset())
    runs = [fit(tiny.recipe(validation=0.25, patience=p), tmp_path / f"{p}", **options) for p in (0, 3)]
    assert [run.result.stopped_early for run in runs] == [None, False]
    a, b = (run.net.state_dict() for run in runs)
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_the_balanced_error_chooses_the_epoch_where_that_is_asked(tmp_path):
    recipe = tiny.recipe(epochs=6, validation=0.4, choose_by="balanced_error", batch=4)
    result = fit(recipe, tmp_path / "run", device="cpu", data=dataset()).result
    rows = read_metrics(tmp_path / "run")
    column = [row["validation_balanced_error"] for row in rows]
    best = max(k for k, error in enumerate(column) if error == min(column))
    assert result.best_epoch == best + 1
    assert result.validation == rows[best]["validation_error"]
    assert column != [row["validation_error"] for row in rows]
    assert load(tmp_path / "run").about["epoch"] == result.best_epoch
    assert json.loads((tmp_path / "run" / "result.json").read_text())["best_epoch"] == best + 1


@pytest.mark.parametrize("fields", [dict(patience=3), dict(choose_by="balanced_error")])
def test_without_images_that_choose_there_is_nothing_to_wait_for(fields, tmp_path):
    with pytest.raises(ValueError, match=f"{next(iter(fields))}=.* needs images that choose the epoch"):
        fit(tiny.recipe(**fields), tmp_path / "run", device="cpu", data=tiny.dataset())
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="match ends the training"):
        Recipe(dataset="affnist", match=0.01, **fields)

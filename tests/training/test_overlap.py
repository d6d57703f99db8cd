"""Training on overlapping objects: what a step sees, the measures, and the model that comes out."""

import dataclasses
import json

import numpy as np
import pytest
import tiny
import torch
import torch.nn.functional as F
from sklearn.metrics import precision_score, recall_score, roc_auc_score

from vbcaps.data import DataError, Split, overlapping
from vbcaps.training.evaluate import by_overlap, evaluate, summary
from vbcaps.training.learner import Learner
from vbcaps.training.loop import fit, prepare, temperature_of
from vbcaps.training.measures import answers, wrong
from vbcaps.training.recipe import Recipe
from vbcaps.training.recipes import RECIPES, recipe
from vbcaps.training.runfolder import read_metrics
from vbcaps.weights.model import load

SEVERAL: dict = dict(objects=2, crop=26)
CNN: dict = dict(network="cnn", iters=3, backend="auto")


def learner_of(device="cpu", **fields):
    one, train = tiny.recipe(**SEVERAL | fields), tiny.split(48, 1).to(device)
    return Learner(one, train, one.view().fit(train), 3)


# --- the recipe ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        (dict(dataset="cifar10"), "dataset must be one of .'mnist', 'fashion-mnist', 'sample'., got objects=2"),
        (dict(loss_on="activations"), "need loss_on='logits', got objects=2 with loss_on='activations'"),
        (dict(loss="spread", loss_on="activations"), "need loss='nll', got objects=2 with loss='spread'"),
        (dict(mixup=0.2), "need mixup=0.0, got objects=2 with mixup=0.2"),
        (dict(class_weights="balanced"), "need class_weights='none', got objects=2"),
        (dict(balance=0.5), "need balance=0.0, got objects=2 with balance=0.5"),
        (dict(network="vae", standardise="none"), "network='vae' decodes one object of each image, got objects=2"),
        (dict(objects=5), "objects must lie from 1 to 4, got 5"),
    ],
)
def test_what_several_objects_cannot_have(fields, error):
    with pytest.raises(ValueError, match=error):
        Recipe(**dict(objects=2, dataset="mnist", loss_on="logits") | fields)


@pytest.mark.parametrize("name", [name for name in RECIPES if name.startswith("overlap")])
def test_the_recipes_differ_from_each_other_in_their_task_and_network_alone(name):
    one = recipe(name)
    two = recipe(name.replace("_three", "").replace("_fashion", ""))
    assert one.objects == (3 if "_three" in name else 2)
    assert one.dataset == ("fashion-mnist" if "fashion" in name else "mnist")
    assert dataclasses.replace(one, name="", dataset="mnist", objects=2) == dataclasses.replace(two, name="")
    assert (one.crop, one.pad, one.loss_on, one.flip) == (36, 0, "logits", False)


# --- a step ----------------------------------------------------------------------------------------------------------


def test_a_step_sees_new_pairs_in_each_epoch_and_the_same_again_when_it_is_repeated():
    learner = learner_of()
    learner.begin()
    x, y, target, _ = learner.images(learner.k)
    assert x.shape == (8, 1, 26, 26)
    assert torch.equal(y, target)
    assert torch.equal(y[:, 0], learner.train.labels[learner.order[0]])
    assert bool((y[:, 0] != y[:, 1]).all())
    assert torch.equal(learner.images(learner.k)[0], x)
    learner.epoch = 1
    learner.begin()
    again = learner.images(learner.k)
    assert not torch.equal(again[0], x)
    other = learner_of()
    other.epoch = 1
    other.begin()
    assert torch.equal(other.images(other.k)[0], again[0])


@pytest.mark.parametrize("fields", [{}, dict(routing="em"), dict(routing="dynamic"), CNN, dict(objects=3)])
def test_the_loss_of_a_step_is_the_binary_cross_entropy_of_its_classes(fields):
    learner = learner_of(**fields)
    learner.begin()
    x, y, target, u = learner.images(learner.k)
    out = learner.forward(x, y, u)
    hot = torch.zeros(8, 3)
    for row, classes in zip(hot, y.tolist(), strict=True):
        row[classes] = 1
    expected = F.binary_cross_entropy(out.logits.sigmoid(), hot, reduction="none").sum(1).mean()
    torch.testing.assert_close(learner.loss(out, x, target)[0], expected, rtol=1e-4, atol=1e-5)


def test_evidence_counts_for_all_objects_alike():
    learner = learner_of(evidence=0.7, norm_logit=False)
    plain = learner_of(norm_logit=False)
    for one in (learner, plain):
        one.begin()
    x, y, target, u = learner.images(learner.k)
    out = learner.forward(x, y, u)
    alpha = out.posterior.alpha
    E_ln_pi = torch.digamma(alpha) - torch.digamma(alpha.sum(1, keepdim=True))
    expected = plain.loss(out, x, target)[0] - 0.7 * E_ln_pi.gather(1, y).mean(1).mean()
    torch.testing.assert_close(learner.loss(out, x, target)[0], expected)


def test_a_step_counts_the_images_whose_objects_it_does_not_name():
    learner = learner_of()
    learner.begin()
    x, y, _, u = learner.images(learner.k)
    with torch.no_grad():
        best = learner.forward(x, y, u).logits.topk(2).indices
    bad = sum(set(a) != set(b) for a, b in zip(best.tolist(), y.tolist(), strict=True))
    learner = learner_of()
    learner.begin()
    learner()
    assert learner.totals().error == pytest.approx(bad / 8)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("objects", [2, 3])
def test_a_captured_epoch_equals_an_eager_one_and_sees_the_images_of_a_cpu(objects):
    fields = dict(objects=objects, backend="auto", arch=(8, 4, 4, 4), ema=0.9)
    captured, eager, on_cpu = (learner_of(device, **fields) for device in ("cuda", "cuda", "cpu"))
    for one in (captured, eager, on_cpu):
        one.begin()
    for _ in range(6):
        k = eager.k.cpu()
        together, labels = (x.cpu() for x in eager.images(eager.k)[:2])
        torch.testing.assert_close(together, on_cpu.images(k)[0], rtol=1e-4, atol=1e-5)
        assert torch.equal(labels, on_cpu.images(k)[1])
        captured()
        eager.work()
        eager.step += 1
    assert captured.totals().loss == pytest.approx(eager.totals().loss, rel=1e-4)
    assert captured.totals().error == eager.totals().error


# --- measures --------------------------------------------------------------------------------------------------------


def drawn(count=200, classes=6, objects=3):
    generator = torch.Generator().manual_seed(3)
    scores = torch.rand(count, classes, generator=generator)
    order = torch.rand(count, classes, generator=generator)
    order += 0.5 * scores  # some answers are right
    return scores, order.topk(objects).indices


def test_an_image_is_wrong_unless_its_highest_classes_are_its_objects():
    scores, labels = drawn()
    best = [set(row.argsort(descending=True)[:3].tolist()) for row in scores]
    expected = [one != set(label) for one, label in zip(best, labels.tolist(), strict=True)]
    assert wrong(scores, labels).tolist() == expected
    assert 0 < sum(expected) < len(expected)
    alone = torch.randint(0, 6, (200,))
    assert torch.equal(wrong(scores, alone), scores.argmax(1) != alone)
    assert torch.equal(wrong(scores, alone[:, None]), scores.argmax(1) != alone)


def test_each_object_stands_beside_an_answer():
    scores, labels = drawn()
    given = answers(scores, labels)
    for row, objects, gave in zip(scores, labels.tolist(), given.tolist(), strict=True):
        best = row.argsort(descending=True)[:3].tolist()
        assert sorted(gave) == sorted(best)
        assert [j for j in objects if j in best] == [b for a, b in zip(objects, gave, strict=True) if a == b]
        missed = sorted((j for j in objects if j not in best), key=lambda j: -row[j])
        spare = [j for j in best if j not in objects]
        assert [dict(zip(objects, gave, strict=True))[j] for j in missed] == spare


def test_the_measures_by_class_are_scikit_learns_of_many_labels():
    scores, labels = drawn()
    names = [f"c{j}" for j in range(6)]
    truth, said = np.zeros((200, 6), int), np.zeros((200, 6), int)
    np.put_along_axis(truth, labels.numpy(), 1, 1)
    np.put_along_axis(said, scores.topk(3).indices.numpy(), 1, 1)
    found = summary(scores, labels, names)
    assert (found.objects, found.count) == (3, 200)
    assert found.error == pytest.approx((truth != said).any(1).mean())
    assert found.objects_found == pytest.approx((truth & said).sum() / truth.sum())
    for j, row in enumerate(found.per_class):
        assert row["count"] == truth[:, j].sum()
        assert row["error"] == pytest.approx(1 - row["recall"])
        assert row["recall"] == pytest.approx(recall_score(truth[:, j], said[:, j]))
        assert row["precision"] == pytest.approx(precision_score(truth[:, j], said[:, j]))
        assert row["auc"] == pytest.approx(roc_auc_score(truth[:, j], scores[:, j]))
    assert found.macro_auc == pytest.approx(roc_auc_score(truth, scores, average="macro"))
    assert (found.kappa, found.quadratic_kappa) == (None, None)


def test_the_error_of_the_fourths_that_overlap_least_to_most():
    shared = torch.tensor([0.4, 0.1, 0.3, 0.2, 0.0, 0.5, 0.6, 0.7])
    bad = torch.tensor([0, 1, 0, 0, 0, 0, 1, 1]).bool()
    rows = by_overlap(bad, shared)
    assert [(row["least"], row["most"]) for row in rows] == [(0.0, 0.1), (0.2, 0.3), (0.4, 0.5), (0.6, 0.7)]
    assert [row["error"] for row in rows] == [0.5, 0.0, 0.0, 1.0]
    scores, labels = drawn()
    total = summary(scores, labels, list("abcdef"), shared=torch.rand(200))
    assert sum(row["count"] * row["error"] for row in total.by_overlap) == pytest.approx(200 * total.error)


# --- a run -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("overlap") / "run"
    with tiny.in_place_of_data():
        return fit(tiny.recipe(**SEVERAL, validation=0.25, test=True, epochs=4), folder, device="cpu")


def test_a_run_learns_and_its_files_have_all_measures(run):
    rows = read_metrics(run.result.folder)
    assert rows[-1]["loss"] < rows[0]["loss"]
    test = json.loads((run.result.folder / "result.json").read_text())["test"]
    assert test["objects"] == 2
    assert test["count"] == 30
    assert len(test["by_overlap"]) == 4
    assert run.result.test.error < 2 / 3  # chance names one of three pairs
    assert run.result.validation == min(row["validation_error"] for row in rows)


def test_the_model_gives_the_probability_that_each_class_is_there(run):
    model = load(run.result.folder)
    with tiny.in_place_of_data():
        data = prepare(model.recipe, None, torch.device("cpu"))
    pairs = data.test
    assert pairs.images.shape == (30, 1, 26, 26)
    scores = model.predict(pairs.images)
    with torch.no_grad():
        logits = model.eval()(model.view.test(pairs.images)).logits
    torch.testing.assert_close(scores, (logits / model.temperature).sigmoid())
    again = evaluate(model, pairs)
    assert (again.error, again.by_overlap) == (run.result.test.error, run.result.test.by_overlap)
    assert model.together(torch.tensor([0.9, 0.2, 0.8])) == "top + bottom"
    assert "names 2 of  top, middle, bottom" in repr(model)
    assert "2 overlapping objects in an image" in repr(model)


def test_the_temperature_is_the_best_of_held_out_pairs(run):
    with tiny.in_place_of_data():
        data = prepare(run.recipe, None, torch.device("cpu"))
    learner = Learner(run.recipe, data.train, data.view, 3)
    learner.weights.load_state_dict(run.net.state_dict())
    found = temperature_of(learner, data.validation, data.classes)
    assert run.temperature == pytest.approx(found, rel=1e-3)
    with torch.no_grad():
        logits = run.eval()(run.view.test(data.validation.images)).logits.double()
    hot = torch.zeros_like(logits).scatter(1, data.validation.labels, 1)

    def nll(t):
        return float(F.binary_cross_entropy_with_logits(logits / t, hot))

    assert nll(found) <= min(nll(found * 1.02), nll(found / 1.02))


@pytest.mark.parametrize("fields", [{}, CNN])
def test_a_stopped_run_goes_on_with_the_same_bits(tmp_path, fields):
    one, options = tiny.recipe(**SEVERAL, **fields), dict(device="cpu")

    def stop(event):
        if event.kind == "step" and (event.epoch, event.step) == (2, 3):
            raise KeyboardInterrupt

    with tiny.in_place_of_data():
        whole = fit(one, tmp_path / "whole", **options)
        with pytest.raises(KeyboardInterrupt):
            fit(one, tmp_path / "part", on_event=stop, **options)
        part = fit(one, tmp_path / "part", resume=True, **options)
    for name, value in whole.net.state_dict().items():
        assert torch.equal(value, part.net.state_dict()[name]), name
    assert whole.result.test == part.result.test


def test_held_out_pairs_are_made_of_held_out_images_and_the_view_is_fitted_to_pairs():
    with tiny.in_place_of_data():
        data = prepare(tiny.recipe(**SEVERAL, validation=0.25), None, torch.device("cpu"))
    assert len(data.train.labels) + len(data.validation.labels) == 48
    assert data.train.labels.ndim == 1
    assert data.validation.labels.shape == (12, 2)
    of_pairs = overlapping(data.train, 2, 26).images.float().mean() / 255
    assert data.view.mean[0] == pytest.approx(float(of_pairs), rel=1e-3)


def test_of_a_network_that_names_several_objects_fine_tuning_makes_one_that_names_one(run, tmp_path):
    from vbcaps.weights.transfer import fine_tuning

    one = dataclasses.replace(fine_tuning(run.recipe, epochs=1), backend="reference")
    assert (one.objects, one.image_size, one.crop) == (1, 26, 26)
    tuned = fit(one, tmp_path / "tuned", weights=run, data=tiny.dataset(), device="cpu")
    assert tuned.net.class_caps.bias is None
    assert tuned.predict(tiny.split(2, 0).images).sum(1).tolist() == pytest.approx([1, 1], abs=1e-5)


def test_too_few_classes_say_so(tmp_path):
    split = tiny.split(12, 1)
    two = Split(split.images[split.labels < 2], split.labels[split.labels < 2])
    from vbcaps.data import Dataset

    data = Dataset("two", two, two, ("a", "b"), "made up")
    with pytest.raises(DataError, match="3 objects of different classes need as many classes of images, got 2"):
        fit(tiny.recipe(**SEVERAL | dict(objects=3)), tmp_path / "run", data=data, device="cpu")

"""Measures of a test: scikit-learn's numbers, and what is said where a number is not defined."""

import json
import threading
import warnings

import numpy as np
import pytest
import torch
from sklearn import metrics

from vbcaps.training.distributed import Group
from vbcaps.training.evaluate import Evaluation, summary

NAMES = ("a", "b", "c", "d")


def made_up(count=400, classes=4, seed=0):
    """Scores that are right more often than not, of classes of very different sizes."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.tensor([100.0, 10.0, 3.0, 30.0])[:classes]
    labels = torch.multinomial(sizes, count, replacement=True, generator=generator)
    logits = torch.randn(count, classes, generator=generator) + 1.5 * torch.eye(classes)[labels]
    return logits.softmax(1), labels


@pytest.fixture(autouse=True)
def no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_the_numbers_are_scikit_learns():
    scores, labels = made_up()
    found, truth, answer = summary(scores, labels, NAMES), labels.numpy(), scores.argmax(1).numpy()
    rows = {name: [row[name] for row in found.per_class] for name in ("precision", "recall", "f1", "auc")}
    assert rows["precision"] == pytest.approx(metrics.precision_score(truth, answer, average=None))
    assert rows["recall"] == pytest.approx(metrics.recall_score(truth, answer, average=None))
    assert rows["f1"] == pytest.approx(metrics.f1_score(truth, answer, average=None))
    auc = dict(y_score=scores.double().numpy() / scores.double().numpy().sum(1, keepdims=True), multi_class="ovr")
    assert rows["auc"] == pytest.approx(metrics.roc_auc_score(truth, **auc, average=None))
    assert found.macro_auc == pytest.approx(metrics.roc_auc_score(truth, **auc, average="macro"))
    assert found.balanced_accuracy == pytest.approx(metrics.balanced_accuracy_score(truth, answer))
    assert found.balanced_error == pytest.approx(1 - found.balanced_accuracy)
    assert found.macro_f1 == pytest.approx(metrics.f1_score(truth, answer, average="macro"))
    assert found.weighted_f1 == pytest.approx(metrics.f1_score(truth, answer, average="weighted"))
    assert found.kappa == pytest.approx(metrics.cohen_kappa_score(truth, answer))
    assert found.quadratic_kappa == pytest.approx(metrics.cohen_kappa_score(truth, answer, weights="quadratic"))
    assert found.confusion == metrics.confusion_matrix(truth, answer).tolist()


def test_the_numbers_are_those_of_their_definitions():
    """Six images by hand: a is found twice and missed once; b is found once and missed for c; c is found."""
    scores = torch.tensor(
        [[0.7, 0.2, 0.1], [0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.1, 0.3, 0.6], [0.0, 0.8, 0.2], [0, 0, 1]]
    )
    found = summary(scores, torch.tensor([0, 0, 0, 1, 1, 2]), NAMES[:3])
    assert [row["precision"] for row in found.per_class] == pytest.approx([1, 1 / 2, 1 / 2])
    assert [row["recall"] for row in found.per_class] == pytest.approx([2 / 3, 1 / 2, 1])
    assert [row["f1"] for row in found.per_class] == pytest.approx([4 / 5, 1 / 2, 2 / 3])
    # Of b's 2 times 4 pairs with the others 6 are ordered rightly, and one is tied.
    assert [row["auc"] for row in found.per_class] == pytest.approx([1, 6.5 / 8, 1])


def test_what_is_not_defined_is_left_open_without_a_warning():
    scores = torch.eye(4)[torch.tensor([0, 0, 1, 1, 0])]
    found = summary(scores, torch.tensor([0, 0, 1, 2, 2]), NAMES)
    a, b, c, d = found.per_class
    assert (c["precision"], c["recall"], c["f1"]) == (None, 0, 0)  # never predicted, but there
    assert (d["precision"], d["recall"], d["f1"], d["auc"]) == (None, None, None, None)  # neither
    assert found.balanced_accuracy == pytest.approx((1 + 1 + 0) / 3)
    assert found.macro_f1 == pytest.approx((a["f1"] + b["f1"] + 0) / 3)
    assert "NaN" not in json.dumps(found.to_json())


def test_images_of_one_class_that_are_all_found_have_no_auc_and_no_kappa():
    found = summary(torch.eye(2)[torch.zeros(3).long()], torch.zeros(3).long(), NAMES[:2])
    assert (found.error, found.balanced_accuracy, found.macro_f1) == (0, 1, 1)
    assert (found.macro_auc, found.kappa, found.quadratic_kappa) == (None, None, None)


def test_a_validation_costs_no_measures_but_its_balanced_error():
    scores, labels = made_up()
    plain = summary(scores, labels, NAMES, measured=False)
    assert plain.balanced_accuracy is None
    assert "auc" not in plain.per_class[0]
    assert plain.balanced_error == pytest.approx(1 - metrics.balanced_accuracy_score(labels, scores.argmax(1)))


def test_a_result_of_an_earlier_version_is_read():
    old = dict(
        error=0.5, interval=[0.1, 0.9], count=2, crops=1, confusion=[[1, 0], [1, 0]],
        per_class=[dict(name="a", count=1, error=0.0, interval=[0.0, 0.8])],
    )  # fmt: skip
    found = Evaluation.from_json(old)
    assert found.balanced_accuracy is None
    assert found.balanced_error == 0.5
    assert Evaluation.from_json(json.loads(json.dumps(found.to_json()))) == found


class Together(Group):
    """A process that stands for itself in a thread: sums are taken over all threads."""

    def sum(self, x):
        parts, barrier = self.shared
        parts[self.rank] = x
        barrier.wait()
        total = sum(parts.values())
        barrier.wait()
        return total


def test_processes_with_different_numbers_of_images_measure_them_all():
    scores, labels = made_up(101)
    found, shared = {}, ({}, threading.Barrier(2))

    def work(rank):
        group = Together(rank, 2)
        group.shared = shared
        found[rank] = summary(scores[rank::2], labels[rank::2], NAMES, group=group)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    alone = summary(scores, labels, NAMES)
    assert found[0] == found[1]
    assert found[0].confusion == alone.confusion
    np.testing.assert_allclose([row["auc"] for row in found[0].per_class], [row["auc"] for row in alone.per_class])
    assert found[0].macro_f1 == pytest.approx(alone.macro_f1)

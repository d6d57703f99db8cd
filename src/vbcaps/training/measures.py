"""Measures of a test beside its error: precision, recall, F1, AUC and agreement, as scikit-learn defines them.

A measure that is not defined, such as the recall of a class without images, is None and takes no part in a mean.
scikit-learn takes a second to import, so it is imported where it is needed.

Axes: n image, c class.
"""

import math
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor


def wrong(scores: Tensor, labels: Tensor) -> Tensor:
    """Return whether the k highest classes of an image are not its k objects, ``n``.

    Args:
        scores: of each class, ``n c``.
        labels: the class of each image, ``n``; or the classes of its k different objects, ``n k``.

    >>> wrong(torch.tensor([[0.9, 0.1, 0.8], [0.9, 0.1, 0.8]]), torch.tensor([[2, 0], [0, 1]])).tolist()
    [False, True]
    """
    if labels.ndim == 1:
        return scores.argmax(1) != labels
    highest = scores.topk(labels.shape[1]).indices
    return (highest[:, :, None] != labels[:, None, :]).all(1).any(1)


def answers(scores: Tensor, labels: Tensor) -> Tensor:
    """Return the answer for each object, ``n k``: the k highest classes, each beside an object.

    An object that is among them is its own answer. The other answers are given to the other objects: the highest to the
    object that has the highest score, and so on.

    >>> answers(torch.tensor([[0.9, 0.1, 0.8, 0.7]]), torch.tensor([[3, 0]])).tolist()
    [[2, 0]]
    """
    if labels.ndim == 1:
        return scores.argmax(1)[:, None]
    highest = scores.topk(labels.shape[1]).indices  # n k
    same = highest[:, :, None] == labels[:, None, :]
    found, right = same.any(1), same.any(2)
    # Missed objects in the order of their scores stand beside wrong answers, which are in that order already.
    missed = scores.gather(1, labels).masked_fill(found, -math.inf).argsort(dim=1, descending=True, stable=True)
    given = highest.gather(1, right.int().argsort(dim=1, stable=True))  # wrong answers first
    return torch.where(found, labels, torch.empty_like(labels).scatter(1, missed, given))


def of_classes(confusion: list[list[int]], scores: Tensor, labels: Tensor) -> list[dict[str, float | None]]:
    """Return precision, recall, F1 and AUC of each class.

    The precision of a class that is never predicted, the recall of a class without images, and the F1 of a class that
    is neither predicted nor there are None. The AUC is that of one class against all others, None without images on
    both sides.

    Args:
        confusion: counts ``c c``, the truth in rows and the answer in columns.
        scores: the probability of each class, ``n c``.
        labels: the classes of the images, ``n``; or of their k objects, ``n k``.
    """
    from sklearn.metrics import precision_recall_fscore_support, roc_auc_score

    classes = range(len(confusion))
    truth, answer, count = _cells(confusion)
    precision, recall, f1, _ = precision_recall_fscore_support(
        truth, answer, labels=list(classes), sample_weight=count, zero_division=np.nan
    )
    found = scores.double().cpu().numpy()
    there = [(labels.view(len(labels), -1) == j).any(1).cpu().numpy() for j in classes]
    auc = [roc_auc_score(has, found[:, j]) if 0 < has.sum() < len(has) else math.nan for j, has in enumerate(there)]
    columns = dict(precision=precision, recall=recall, f1=f1, auc=auc)
    return [{name: _or_none(values[j]) for name, values in columns.items()} for j in classes]


def of_all(confusion: list[list[int]], rows: list[dict[str, Any]]) -> dict[str, float | None]:
    """Return balanced accuracy, macro and weighted F1, macro AUC, and Cohen's kappa, plain and quadratic.

    Args:
        confusion: counts ``c c``, the truth in rows and the answer in columns.
        rows: a row for each class with its ``count``, ``recall``, ``f1`` and ``auc``.
    """
    from sklearn.metrics import cohen_kappa_score

    truth, answer, count = _cells(confusion)
    labels = list(range(len(confusion)))
    with warnings.catch_warnings(), np.errstate(invalid="ignore"):  # all images and answers of one class: undefined
        warnings.simplefilter("ignore")
        plain, quadratic = (
            cohen_kappa_score(truth, answer, labels=labels, weights=weights, sample_weight=count)
            for weights in (None, "quadratic")
        )
    images = [(row["f1"], row["count"]) for row in rows if row["f1"] is not None]
    return dict(
        balanced_accuracy=mean([row["recall"] for row in rows]),
        macro_f1=mean([row["f1"] for row in rows]),
        weighted_f1=sum(f1 * count for f1, count in images) / sum(count for _, count in images),
        macro_auc=mean([row["auc"] for row in rows]),
        kappa=_or_none(plain),
        quadratic_kappa=_or_none(quadratic),
    )


def balanced_error(confusion: list[list[int]]) -> float:
    """Return the mean error of the classes that have images.

    >>> balanced_error([[98, 0], [1, 1]])
    0.25
    """
    errors = [1 - row[j] / sum(row) for j, row in enumerate(confusion) if sum(row)]
    return sum(errors) / len(errors)


def mean(values: list[float | None]) -> float | None:
    """Return the mean of the values that are defined, or None."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _cells(confusion: list[list[int]]) -> tuple[list[int], list[int], list[int]]:
    """Return truth, answer and count of each cell that is not empty, as scikit-learn takes them."""
    cells = [(j, k, count) for j, row in enumerate(confusion) for k, count in enumerate(row) if count]
    truth, answer, count = (list(column) for column in zip(*cells, strict=True))
    return truth, answer, count


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else float(value)

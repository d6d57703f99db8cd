"""Measures of a test beside its error: precision, recall, F1, AUC and agreement, as scikit-learn defines them.

A measure that is not defined, such as the recall of a class without images, is None and takes no part in a mean.
scikit-learn takes a second to import, so it is imported where it is needed.

Axes: n image, c class.
"""

import math
import warnings
from typing import Any

import numpy as np
from torch import Tensor


def of_classes(confusion: list[list[int]], scores: Tensor, labels: Tensor) -> list[dict[str, float | None]]:
    """Return precision, recall, F1 and AUC of each class.

    The precision of a class that is never predicted, the recall of a class without images, and the F1 of a class that
    is neither predicted nor there are None. The AUC is that of one class against all others, None without images on
    both sides.

    Args:
        confusion: counts ``c c``, the truth in rows and the answer in columns.
        scores: the probability of each class, ``n c``.
        labels: the classes of the images, ``n``.
    """
    from sklearn.metrics import precision_recall_fscore_support, roc_auc_score

    classes = range(len(confusion))
    truth, answer, count = _cells(confusion)
    precision, recall, f1, _ = precision_recall_fscore_support(
        truth, answer, labels=list(classes), sample_weight=count, zero_division=np.nan
    )
    true, found = labels.cpu().numpy(), scores.double().cpu().numpy()
    auc = [roc_auc_score(true == j, found[:, j]) if 0 < (true == j).sum() < len(true) else math.nan for j in classes]
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

"""How good probabilities and uncertainty scores are: one function, one measure.

Axes: n image, c class, b bin. Errors and probabilities are shares from 0 to 1. A score of uncertainty is larger for an
image that is less familiar.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

BINS = 15  # of calibration errors, as in Guo et al. (2017)
ROUNDED = 1e-3  # how far the probabilities of an image may be from the sum 1


class Reliability(NamedTuple):
    """Images sorted into bins by the probability of their answer; bins without images have confidence and accuracy 0.

    Args:
        confidence: mean probability of the answer, ``b``.
        accuracy: share of right answers, ``b``.
        images: number of images, ``b``.
    """

    confidence: Tensor
    accuracy: Tensor
    images: Tensor

    def error(self) -> float:
        """Return the mean over images of the gap between confidence and accuracy of their bin."""
        gap = (self.confidence - self.accuracy).abs()
        return float((gap * self.images).sum() / self.images.sum())


def reliability(probabilities: Tensor, labels: Tensor, bins: int = BINS, adaptive: bool = False) -> Reliability:
    """Sort images into bins by the probability of their answer.

    Args:
        probabilities: ``n c``.
        labels: ``n`` of int64.
        bins: the number of bins.
        adaptive: bins that hold equally many images, in place of bins that are equally wide.

    Example:
        >>> found = reliability(torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.4, 0.6]]), torch.tensor([0, 1, 1]), bins=2)
        >>> found.images.tolist(), [round(x, 2) for x in found.confidence.tolist()]
        ([0, 3], [0.0, 0.77])
    """
    _check(probabilities, labels)
    if bins < 1:
        raise ValueError(f"bins must be at least 1, got {bins}")
    confidence, answer = probabilities.double().max(1)
    right = (answer == labels).double()
    if adaptive:
        rank = confidence.argsort(stable=True).argsort(stable=True)
        bin_of = rank * bins // len(rank)
    else:  # (0, 1/b], (1/b, 2/b], ...: certainty belongs to the last bin
        bin_of = ((confidence * bins).ceil().long() - 1).clamp(0, bins - 1)
    sums = confidence.new_zeros(3, bins)
    sums.index_add_(1, bin_of, torch.stack([confidence, right, torch.ones_like(right)]))
    count = sums[2]
    return Reliability(sums[0] / count.clamp_min(1), sums[1] / count.clamp_min(1), count.long())


def ece(probabilities: Tensor, labels: Tensor, bins: int = BINS, adaptive: bool = False) -> float:
    r"""Return the expected calibration error $\sum_b \frac{n_b}{n} |acc_b - conf_b|$.

    Example:
        >>> ece(torch.tensor([[0.9, 0.1], [0.8, 0.2]]), torch.tensor([0, 0]))  # right, and less sure than it could be
        0.1500...
    """
    return reliability(probabilities, labels, bins, adaptive).error()


def nll(probabilities: Tensor, labels: Tensor) -> float:
    r"""Return the negative log likelihood $-\frac1n \sum_n \ln p_{n y_n}$, with probabilities of at least 1e-12.

    Example:
        >>> round(nll(torch.tensor([[0.9, 0.1], [0.5, 0.5]]), torch.tensor([0, 0])), 3)  # (ln 1/0.9 + ln 2) / 2
        0.399
    """
    _check(probabilities, labels)
    right = probabilities.double().gather(1, labels[:, None])
    return float(-right.clamp_min(1e-12).log().mean())


def brier(probabilities: Tensor, labels: Tensor) -> float:
    r"""Return the Brier score $\frac1n \sum_n \sum_c (p_{nc} - [c = y_n])^2$, from 0 to 2.

    Example:
        >>> round(brier(torch.tensor([[0.9, 0.1], [0.5, 0.5]]), torch.tensor([0, 0])), 2)  # (0.02 + 0.5) / 2
        0.26
    """
    _check(probabilities, labels)
    target = torch.nn.functional.one_hot(labels, probabilities.shape[1])
    return float((probabilities.double() - target).square().sum(1).mean())


class RiskCoverage(NamedTuple):
    """The error among the most certain images, for every share of images that is answered.

    Args:
        coverage: share of the images that is answered, ``n``, rising to 1.
        risk: error among these images, ``n``.
    """

    coverage: Tensor
    risk: Tensor

    def area(self) -> float:
        """Return the mean risk over all coverages: small if the errors are the last to be answered."""
        return float(self.risk.mean())


def risk_coverage(score: Tensor, wrong: Tensor) -> RiskCoverage:
    """Answer images from the most certain on, and return the error so far.

    Args:
        score: uncertainty of each image, ``n``. Images with the same score share their errors evenly.
        wrong: whether the answer is wrong, ``n`` of bool.

    Example:
        >>> curve = risk_coverage(torch.tensor([0.1, 0.2, 0.9, 0.8]), torch.tensor([False, False, True, False]))
        >>> curve.risk
        tensor([0.0000, 0.0000, 0.0000, 0.2500], dtype=torch.float64)
    """
    score, wrong = _finite(score, "score"), wrong.double().flatten().cpu()
    if score.shape != wrong.shape:
        raise ValueError(f"score and wrong must be as long as each other, got {len(score)} and {len(wrong)}")
    levels, level_of, counts = score.unique(return_inverse=True, return_counts=True)
    mean_wrong = torch.zeros_like(levels).index_add_(0, level_of, wrong) / counts
    answered = torch.arange(1, len(score) + 1, dtype=torch.float64)
    return RiskCoverage(answered / len(score), mean_wrong[level_of.sort().values].cumsum(0) / answered)


def auroc(familiar: Tensor, strange: Tensor) -> float:
    """Return the probability that a strange image has a higher score than a familiar one; ties count half.

    Example:
        >>> auroc(torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.25, 0.9]))
        0.8333...
    """
    familiar, strange = _two(familiar, strange)
    low, high = (torch.searchsorted(familiar.sort().values, strange, right=right) for right in (False, True))
    return float((low + high).double().mean() / (2 * len(familiar)))


def aupr(familiar: Tensor, strange: Tensor) -> float:
    """Return the average precision with which falling scores find the strange images.

    Example:
        >>> aupr(torch.tensor([0.1, 0.2]), torch.tensor([0.3, 0.15]))
        0.8333...
    """
    familiar, strange = _two(familiar, strange)
    levels, counts_of = torch.cat([strange, familiar]).unique(return_inverse=True)
    found = torch.zeros(2, len(levels), dtype=torch.float64)
    found[0].index_add_(0, counts_of[: len(strange)], torch.ones(len(strange), dtype=torch.float64))
    found[1].index_add_(0, counts_of[len(strange) :], torch.ones(len(familiar), dtype=torch.float64))
    true, false = found.flip(1).cumsum(1)  # from the highest score down
    return float((true / (true + false) * found.flip(1)[0]).sum() / len(strange))


def fpr95(familiar: Tensor, strange: Tensor) -> float:
    """Return the share of strange images that pass where 95% of the familiar ones do.

    Example:
        >>> fpr95(torch.linspace(0, 1, 101), torch.tensor([0.5, 0.94, 0.99, 2.0]))
        0.5
    """
    familiar, strange = _two(familiar, strange)
    passes = familiar.sort().values[-(-95 * len(familiar) // 100) - 1]  # the lowest score that 95% do not exceed
    return float((strange <= passes).double().mean())


def surprise(score: Tensor, reference: Tensor) -> Tensor:
    """Return minus the log of the share of reference images with a score at least as high, ``n``.

    Surprises have one unit whatever the score, so that those of several scores may be added (Fisher's method).

    Args:
        score: of the images that are judged, ``n``.
        reference: the same score of familiar images that the network was not trained on.

    Example:
        >>> surprise(torch.tensor([0.0, 0.35, 9.0]), torch.tensor([0.1, 0.2, 0.3, 0.4]))
        tensor([-0.0000,  0.9163,  1.6094])
    """
    score, reference = _finite(score, "score"), _finite(reference, "reference")
    above = len(reference) - torch.searchsorted(reference.sort().values, score)
    return -((above + 1) / (len(reference) + 1)).log()


def check_labels(labels: Any, classes: int | None = None) -> None:
    """Raise an error if labels are not a tensor of int64, or, where the number of classes is given, out of range."""
    if not isinstance(labels, Tensor) or labels.dtype != torch.int64:
        kind = str(labels.dtype).removeprefix("torch.") if isinstance(labels, Tensor) else type(labels).__name__
        raise TypeError(
            f"labels must be a tensor of int64, the number of each image's class, got {kind}: "
            "torch.as_tensor(labels).long() makes one"
        )
    if classes is None or len(labels) == 0:
        return
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        raise ValueError(
            f"labels must lie from 0 to {classes - 1}, got {low} to {high}: leave out images of other classes"
        )


def _check(probabilities: Tensor, labels: Tensor) -> None:
    check_labels(labels)
    if probabilities.ndim != 2 or labels.shape != probabilities.shape[:1] or len(labels) == 0:
        raise ValueError(
            "expected probabilities (n, classes) and labels (n,) of at least one image, got "
            f"{tuple(probabilities.shape)} and {tuple(labels.shape)}"
        )
    if not bool(probabilities.isfinite().all()):
        raise ValueError("probabilities must be finite, got NaN or infinity")
    total = probabilities.double().sum(1)
    if float(probabilities.min()) < 0 or float((total - 1).abs().max()) > ROUNDED:
        raise ValueError(
            "the probabilities of an image must be at least 0 and sum to 1, got sums from "
            f"{float(total.min()):.4g} to {float(total.max()):.4g}: give logits.softmax(1) or model.predict(images)"
        )
    check_labels(labels, probabilities.shape[1])


def _two(familiar: Tensor, strange: Tensor) -> tuple[Tensor, Tensor]:
    return _finite(familiar, "familiar"), _finite(strange, "strange")


def _finite(score: Tensor, name: str) -> Tensor:
    score = score.detach().double().flatten().cpu()
    if len(score) == 0:
        raise ValueError(
            f"{name} must have at least one score, got none: is the set of images empty? Score at least one image"
        )
    if bool(score.isnan().any()):
        raise ValueError(f"{name} must not hold NaN")
    return score

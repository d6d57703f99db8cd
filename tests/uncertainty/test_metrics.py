"""Each measure against scikit-learn, or against the same sentence written as a loop over images."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.calibration import calibration_curve
from sklearn.metrics import average_precision_score, brier_score_loss, log_loss, roc_auc_score, roc_curve

from vbcaps.uncertainty import aupr, auroc, brier, ece, fpr95, nll, reliability, risk_coverage, surprise

SCORES = st.lists(st.sampled_from([-2.0, -0.5, 0.0, 0.25, 1.0, 3.0]) | st.floats(-3, 3), min_size=1, max_size=40)


def answers(n=400, c=4, seed=0):
    """Probabilities that are too sure, and labels."""
    gen = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, c, generator=gen)
    labels = torch.multinomial(logits.softmax(1), 1, generator=gen)[:, 0]
    return (3 * logits.double()).softmax(1), labels


def truth_and_scores(familiar, strange):
    return np.array([0] * len(familiar) + [1] * len(strange)), np.array([*familiar, *strange])


@settings(max_examples=150, deadline=None)
@given(SCORES, SCORES)
def test_detection_of_strangers_is_scikit_learns_ties_included(familiar, strange):
    truth, scores = truth_and_scores(familiar, strange)
    one, other = torch.tensor(familiar, dtype=torch.float64), torch.tensor(strange, dtype=torch.float64)
    assert auroc(one, other) == pytest.approx(roc_auc_score(truth, scores), abs=1e-12)
    assert aupr(one, other) == pytest.approx(average_precision_score(truth, scores), abs=1e-12)
    passed, kept, _ = roc_curve(1 - truth, -scores, drop_intermediate=False)  # familiar images are the positives
    assert fpr95(one, other) == pytest.approx(passed[kept >= 0.95 - 1e-12].min(), abs=1e-12)


def test_detection_is_better_for_scores_that_are_larger_for_strangers():
    gen = torch.Generator().manual_seed(0)
    low, high = torch.randn(300, generator=gen), 2 + torch.randn(200, generator=gen)
    assert auroc(low, high) > 0.9 > 0.1 > auroc(high, low)
    assert aupr(low, high) > 0.85
    assert fpr95(low, high) < 0.5 < fpr95(high, low)
    assert auroc(low, low) == 0.5
    assert auroc(torch.zeros(3), torch.tensor([math.inf, 0.0])) == 0.75  # an energy may overflow, and ranks first


def test_nll_and_brier_are_scikit_learns():
    p, y = answers()
    assert nll(p, y) == pytest.approx(log_loss(y.numpy(), p.numpy(), labels=range(4)), rel=1e-6)
    by_class = [brier_score_loss((y == c).numpy(), p[:, c].numpy()) for c in range(4)]
    assert brier(p, y) == pytest.approx(sum(by_class), rel=1e-6)
    assert brier(torch.tensor([[0.0, 1.0]]), torch.tensor([0])) == 2
    assert nll(torch.tensor([[0.0, 1.0]]), torch.tensor([0])) == pytest.approx(-math.log(1e-12))  # and not infinite


@pytest.mark.parametrize("bins", [1, 5, 15])
def test_reliability_and_ece_are_those_of_scikit_learns_calibration_curve(bins):
    p, y = answers()
    confidence, answer = p.max(1)
    right = (answer == y).numpy()
    accuracy, mean = calibration_curve(right, confidence.numpy(), n_bins=bins)
    counts, _ = np.histogram(confidence.numpy(), bins=bins, range=(0, 1))
    found, used = reliability(p, y, bins), counts > 0
    assert found.images.tolist() == counts.tolist()
    assert found.accuracy[used].numpy() == pytest.approx(accuracy)
    assert found.confidence[used].numpy() == pytest.approx(mean)
    assert not found.accuracy[~used].any()
    expected = (np.abs(accuracy - mean) * counts[used]).sum() / len(y)
    assert ece(p, y, bins) == pytest.approx(expected)
    assert bins == 1 or expected > 0.1


def test_certainty_is_in_the_last_bin_and_an_edge_in_the_lower_one():
    p = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.75, 0.25]])
    assert reliability(p, torch.tensor([0, 0, 0]), bins=4).images.tolist() == [0, 1, 1, 1]


@pytest.mark.parametrize(("count", "bins"), [(400, 15), (37, 5), (4, 7)])
def test_adaptive_ece_is_the_mean_gap_of_equal_parts_of_the_sorted_images(count, bins):
    p, y = answers(count)
    confidence, answer = p.max(1)
    rows = sorted((float(s), float(a == t)) for s, a, t in zip(confidence, answer, y, strict=True))
    total = 0.0
    for b in range(bins):
        part = rows[-(-b * count // bins) : -(-(b + 1) * count // bins)]
        if part:
            total += abs(sum(s for s, _ in part) - sum(a for _, a in part))
    assert ece(p, y, bins, adaptive=True) == pytest.approx(total / count)
    sizes = reliability(p, y, bins, adaptive=True).images
    assert int(sizes.max() - sizes.min()) <= 1


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.sampled_from([0.0, 0.5, 1.0]) | st.floats(0, 1), st.booleans()), min_size=1, max_size=30))
def test_risk_coverage_is_a_loop_over_answered_images(rows):
    """Of images with the same score, an average over their orders is answered."""
    score = torch.tensor([s for s, _ in rows], dtype=torch.float64)
    wrong = torch.tensor([w for _, w in rows])
    risks = []
    for k in range(1, len(rows) + 1):
        level = sorted(s for s, _ in rows)[k - 1]
        before = [w for s, w in rows if s < level]
        ties = [w for s, w in rows if s == level]
        risks.append((sum(before) + (k - len(before)) * sum(ties) / len(ties)) / k)
    curve = risk_coverage(score, wrong)
    assert curve.risk.tolist() == pytest.approx(risks)
    assert curve.coverage.tolist() == pytest.approx([k / len(rows) for k in range(1, len(rows) + 1)])
    assert curve.area() == pytest.approx(sum(risks) / len(risks))
    assert float(curve.risk[-1]) == pytest.approx(float(wrong.double().mean()))


@settings(max_examples=50, deadline=None)
@given(SCORES, SCORES)
def test_surprise_counts_the_reference_images_with_as_high_a_score(judged, reference):
    found = surprise(torch.tensor(judged, dtype=torch.float64), torch.tensor(reference, dtype=torch.float64))
    shares = [(sum(r >= s for r in reference) + 1) / (len(reference) + 1) for s in judged]
    assert found.tolist() == pytest.approx([-math.log(share) for share in shares])


def test_what_no_measure_can_be_taken_of_is_an_error_that_names_it():
    some, none, p, y = torch.rand(3), torch.empty(0), torch.full((3, 2), 0.5), torch.tensor([0, 1, 1])
    for measure in (auroc, aupr, fpr95):
        with pytest.raises(ValueError, match=r"strange must have at least one score.*empty\? Score at least one"):
            measure(some, none)
        with pytest.raises(ValueError, match="familiar must have at least one score"):
            measure(none, some)
        with pytest.raises(ValueError, match="strange must not hold NaN"):
            measure(some, torch.tensor([0.0, math.nan]))
    for measure in (ece, nll, brier):
        with pytest.raises(ValueError, match=r"expected probabilities .* of at least one image"):
            measure(p[:0], y[:0])
        with pytest.raises(ValueError, match=r"got \(3, 2\) and \(2,\)"):
            measure(p, y[:2])
        with pytest.raises(ValueError, match="probabilities must be finite"):
            measure(p * math.nan, y)
        with pytest.raises(ValueError, match="labels must lie from 0 to 1, got 0 to 2: leave out images of other"):
            measure(p, torch.tensor([0, 1, 2]))
        with pytest.raises(TypeError, match=r"labels must be a tensor of int64.*, got list: torch.as_tensor"):
            measure(p, [0, 1, 1])
        with pytest.raises(TypeError, match=r"labels must be a tensor of int64.*, got float32"):
            measure(p, y.float())
        for wrong in (p + 0.001, 2 * p, p - torch.tensor([0.6, -0.6])):
            with pytest.raises(ValueError, match="must be at least 0 and sum to 1, got sums from"):
                measure(wrong, y)
        measure(p + 0.0004, y)  # rounded
    with pytest.raises(ValueError, match="bins must be at least 1, got 0"):
        ece(p, y, bins=0)
    with pytest.raises(ValueError, match="score must not hold NaN"):
        risk_coverage(torch.tensor([math.nan]), torch.tensor([True]))
    with pytest.raises(ValueError, match="as long as each other, got 3 and 2"):
        risk_coverage(some, torch.tensor([True, False]))


def test_surprise_is_minus_the_log_of_the_share_that_is_at_least_as_high():
    reference = torch.tensor([0.1, 0.2, 0.2, 0.4])
    expected = [-math.log((sum(r >= s for r in reference.tolist()) + 1) / 5) for s in (0.0, 0.2, 0.3, 1.0)]
    assert surprise(torch.tensor([0.0, 0.2, 0.3, 1.0]), reference).tolist() == pytest.approx(expected, rel=1e-6)
    with pytest.raises(ValueError, match="reference must have at least one score"):
        surprise(reference, reference[:0])

"""Each loss against its formula, written out by hand."""

import itertools
import math
import re

import pytest
import torch

from vbcaps.losses import (
    VAELoss,
    activation_nll_loss,
    binary_cross_entropy,
    evidence_loss,
    spread_loss,
    spread_margin,
    total_loss,
    vae_loss,
)
from vbcaps.prior import Prior
from vbcaps.routing import Mixture, Posterior
from vbcaps.vae import Reconstruction


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def problem(n, classes):
    return 3 * torch.randn(n, classes, dtype=torch.float64), torch.randint(classes, (n,))


def reconstruction(images, mean, var):
    return Reconstruction(None, None, None, None, images, None, None, mean, var)


@pytest.mark.parametrize(("n", "classes"), [(1, 1), (4, 5), (7, 10)])
def test_activation_nll_is_minus_the_log_share_of_the_target(n, classes):
    logits, target = problem(n, classes)
    activations, total = logits.sigmoid(), 0.0
    for row, t in zip(activations.tolist(), target.tolist(), strict=True):
        total -= math.log(math.exp(row[t]) / sum(math.exp(a) for a in row))
    assert activation_nll_loss(activations, target).item() == pytest.approx(total / n, rel=1e-12)


@pytest.mark.parametrize("classes", [1, 2, 5, 10])
def test_activation_nll_cannot_fall_below_its_bound(classes):
    """ln(1 + (C - 1)/e): a sure network reaches it."""
    bound = math.log(1 + (classes - 1) / math.e)
    logits, target = problem(64, classes)
    activations = logits.sigmoid()
    each = [activation_nll_loss(activations[k : k + 1], target[k : k + 1]).item() for k in range(64)]
    assert min(each) >= bound - 1e-12
    sure = torch.nn.functional.one_hot(target, classes).double()
    assert activation_nll_loss(sure, target).item() == pytest.approx(bound, abs=1e-12)
    if classes == 5:
        assert bound == pytest.approx(0.905, abs=5e-4)


def test_binary_cross_entropy_is_the_log_likelihood_of_independent_classes():
    logits, _ = problem(5, 6)
    target, total = torch.rand(5, 6).topk(3).indices, 0.0
    for row, classes in zip(logits.tolist(), target.tolist(), strict=True):
        p = [1 / (1 + math.exp(-z)) for z in row]
        total -= sum(math.log(p[j] if j in classes else 1 - p[j]) for j in range(6))  # a sum over classes
    assert binary_cross_entropy(logits, target).item() == pytest.approx(total / 5, rel=1e-12)
    bernoulli = torch.distributions.Bernoulli(logits=logits)
    hot = torch.zeros(5, 6, dtype=torch.float64).scatter(1, target, 1)
    torch.testing.assert_close(binary_cross_entropy(logits, target), -bernoulli.log_prob(hot).sum(1).mean())
    huge = torch.tensor([[1e4, -1e4]], requires_grad=True)
    loss = binary_cross_entropy(huge, torch.tensor([[1]]))
    loss.backward()
    assert loss.item() == 2e4
    assert huge.grad.tolist() == [[1.0, -1.0]]
    for wrong, error in ((target[:2], ValueError), (target[:, 0], ValueError), (target.double(), TypeError)):
        with pytest.raises(error, match=r"expected \(n, num_classes\) scores|target must be class numbers as int64"):
            binary_cross_entropy(logits, wrong)


def posterior(alpha):
    n, j = alpha.shape
    other = torch.ones(n, j, dtype=alpha.dtype)
    prior = Prior(dtype=alpha.dtype)()
    return Posterior(alpha, other[..., None], other, other[..., None], other, other[:, None], prior)


def test_evidence_loss_is_the_expected_surprise_of_the_class_under_a_dirichlet():
    alpha, target = 5 * torch.rand(6, 4, dtype=torch.float64) + 0.1, torch.randint(4, (6,))
    draws = torch.distributions.Dirichlet(alpha).sample((40_000,))
    expected = -draws[:, torch.arange(6), target].log().mean()
    assert evidence_loss(posterior(alpha), target).item() == pytest.approx(expected.item(), rel=0.02)


def test_evidence_loss_of_blended_labels_is_the_blend_of_the_losses():
    alpha = 5 * torch.rand(1, 4, dtype=torch.float64) + 0.1
    one, other = (evidence_loss(posterior(alpha), torch.tensor([j])) for j in (0, 3))
    blend = torch.tensor([[0.25, 0.0, 0.0, 0.75]], dtype=torch.float64)
    torch.testing.assert_close(evidence_loss(posterior(alpha), blend), 0.25 * one + 0.75 * other)


def test_evidence_is_counted_by_vb_alone():
    with pytest.raises(ValueError, match="evidence is counted by VB routing alone, got Mixture"):
        evidence_loss(Mixture(*torch.zeros(3, 1, 1)), torch.tensor([0]))


@pytest.mark.parametrize(("n", "classes"), [(1, 1), (4, 5), (7, 10)])
@pytest.mark.parametrize("margin", [0.0, 0.2, 0.9])
def test_spread_sums_squared_shortfalls_over_wrong_classes(n, classes, margin):
    logits, target = problem(n, classes)
    a = logits.sigmoid()
    total = 0.0
    for k, j in itertools.product(range(n), range(classes)):
        t = target[k].item()
        if j != t:
            total += max(0.0, margin - (a[k, t] - a[k, j]).item()) ** 2
    for m in (margin, torch.tensor(margin, dtype=torch.float64)):
        assert spread_loss(a, target, m).item() == pytest.approx(total / n, rel=1e-12, abs=1e-15)


def test_spread_is_zero_with_zero_gradient_once_the_margin_is_kept():
    a = torch.tensor([[0.95, 0.04, 0.0], [0.1, 0.05, 1.0]], requires_grad=True)
    target = torch.tensor([0, 2])
    loss = spread_loss(a, target, 0.9)
    loss.backward()
    assert loss == 0
    assert torch.equal(a.grad, torch.zeros(2, 3))
    assert spread_loss(a, target.flip(0), 0.9) > 1


def test_spread_gradient_is_right():
    logits, target = problem(4, 5)
    a = logits.sigmoid().requires_grad_()
    assert torch.autograd.gradcheck(lambda a: spread_loss(a, target, 0.5), (a,))


def test_margin_grows_linearly_then_stays():
    assert [spread_margin(s, 10) for s in (0, 5, 10, 11, 1000)] == pytest.approx([0.2, 0.55, 0.9, 0.9, 0.9])
    assert spread_margin(-3, 10) == pytest.approx(0.2)
    assert spread_margin(1, 4, low=0.1, high=0.5) == pytest.approx(0.2)
    assert spread_margin(1, 1) == pytest.approx(0.9)


def test_vae_loss_is_divergence_plus_squared_error():
    n, d = 3, 4
    x, images = torch.randn(2, n, 2, 5, 4, dtype=torch.float64)
    mean, var = torch.randn(n, d, dtype=torch.float64), torch.rand(n, d, dtype=torch.float64) + 0.1
    divergence = error = 0.0
    for k in range(n):
        for mu, s2 in zip(mean[k].tolist(), var[k].tolist(), strict=True):
            divergence += 0.5 * (s2 + mu**2 - math.log(s2) - 1) / n
        error += (
            sum((p - q) ** 2 for p, q in zip(x[k].flatten().tolist(), images[k].flatten().tolist(), strict=True)) / n
        )
    loss = vae_loss(x, reconstruction(images, mean, var))
    assert loss.divergence.item() == pytest.approx(divergence, rel=1e-12)
    assert loss.reconstruction.item() == pytest.approx(error, rel=1e-12)
    assert loss.total.item() == pytest.approx(divergence + error, rel=1e-12)


def test_vae_divergence_is_the_kl_to_a_standard_normal():
    mean, var = torch.randn(3, 16, dtype=torch.float64), torch.rand(3, 16, dtype=torch.float64) + 0.1
    normal = torch.distributions.Normal
    kl = torch.distributions.kl_divergence(normal(mean, var.sqrt()), normal(torch.zeros_like(mean), 1.0))
    x = torch.zeros(3, 1, 2, 2)
    torch.testing.assert_close(vae_loss(x, reconstruction(x, mean, var)).divergence, kl.sum(-1).mean())
    at_rest = vae_loss(x, reconstruction(x, torch.zeros_like(mean), torch.ones_like(var)))
    assert at_rest.total == 0


def test_total_is_classification_plus_eta_times_vae():
    classification, vae = torch.tensor(1.5), VAELoss(torch.tensor(20.0), torch.tensor(5.0), torch.tensor(15.0))
    assert total_loss(classification) is classification
    assert total_loss(classification, vae).item() == pytest.approx(1.52)
    assert total_loss(classification, vae, eta=0.1).item() == pytest.approx(3.5)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda s, t: activation_nll_loss(s[0], t),
            ValueError,
            "(n, num_classes) activations with (n,) targets, got (5,) and (4,)",
        ),
        (
            lambda s, t: activation_nll_loss(s, t[:3]),
            ValueError,
            "(n, num_classes) activations with (n,) targets, got (4, 5) and (3,)",
        ),
        (
            lambda s, t: activation_nll_loss(s, t.float()),
            ValueError,
            "shares (n, num_classes) like the activations, got (4,) for (4, 5)",
        ),
        (
            lambda s, t: activation_nll_loss(s[0], s[0]),
            ValueError,
            "shares (n, num_classes) like the activations, got (5,) for (5,)",
        ),
        (
            lambda s, t: activation_nll_loss(s, t.int()),
            TypeError,
            "target must be class numbers as int64 (long), got torch.int32",
        ),
        (lambda s, t: spread_loss(s, t.float(), 0.2), TypeError, "target must be class numbers as int64 (long), got"),
        (
            lambda s, t: spread_loss(s, s, 0.2),
            ValueError,
            "(n, num_classes) activations with (n,) targets, got (4, 5) and (4, 5)",
        ),
        (lambda s, t: spread_margin(3, 0), ValueError, "steps must be at least 1, got 0"),
        (
            lambda s, t: vae_loss(torch.zeros(2, 1, 3, 3), reconstruction(torch.zeros(2, 1, 4, 4), s, s)),
            ValueError,
            "x has shape (2, 1, 3, 3), its reconstruction (2, 1, 4, 4)",
        ),
    ],
)
def test_losses_refuse_bad_arguments(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call(*problem(4, 5))


def test_smoothing_gives_a_share_of_the_label_to_all_classes():
    activations, target = torch.rand(6, 4, dtype=torch.float64), torch.arange(6) % 4
    label = 0.8 * torch.nn.functional.one_hot(target, 4) + 0.2 / 4
    expected = -(label * activations.log_softmax(1)).sum(1).mean()
    torch.testing.assert_close(activation_nll_loss(activations, target, label_smoothing=0.2), expected)
    torch.testing.assert_close(activation_nll_loss(activations, label), expected)  # as shares given by hand
    with pytest.raises(ValueError, match="label_smoothing must be at least 0 and below 1, got 1"):
        activation_nll_loss(activations, target, label_smoothing=1.0)

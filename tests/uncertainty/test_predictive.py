"""The temperature against SciPy's minimiser, and the posterior's probabilities against direct draws."""

import math

import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize_scalar
from torch.distributions import Dirichlet, Gamma, Gumbel

from vbcaps import Capsules, ClassCaps, Prior
from vbcaps.uncertainty import fit_temperature, mean_field_probabilities, sampled_probabilities
from vbcaps.uncertainty.predictive import COOLEST, HOTTEST

RULES = ("agreement", "released", "paper")
D = 4  # pose entries
DRAWS = 20000

# --- the temperature -------------------------------------------------------------------------------------------------


def sure(factor, n=500, c=5, seed=0):
    """Logits whose softmax would be right without the factor, and labels."""
    gen = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(n, c, generator=gen)
    return factor * logits, torch.multinomial(logits.softmax(1), 1, generator=gen)[:, 0]


@pytest.mark.parametrize("factor", [0.2, 1.0, 7.0])
def test_the_temperature_is_the_one_scipy_finds(factor):
    z, y = sure(factor)
    best = minimize_scalar(
        lambda t: float(F.cross_entropy(z.double() / math.exp(t), y)),
        bounds=(math.log(COOLEST), math.log(HOTTEST)), method="bounded", options=dict(xatol=1e-8),
    )  # fmt: skip
    assert fit_temperature(z, y) == pytest.approx(math.exp(best.x), rel=2e-4)
    assert fit_temperature(z, y) == pytest.approx(factor, rel=0.2)


@pytest.mark.parametrize("factor", [0.3, 1.0, 4.0])
def test_the_temperature_of_several_objects_is_that_of_their_sigmoids(factor):
    gen = torch.Generator().manual_seed(1)
    z = 2 * torch.randn(500, 6, generator=gen)
    y = (z + Gumbel(0.0, 1.0).sample(z.shape)).topk(2).indices
    hot = torch.zeros(500, 6).scatter(1, y, 1).double()
    best = minimize_scalar(
        lambda t: float(F.binary_cross_entropy_with_logits(factor * z.double() / math.exp(t), hot)),
        bounds=(math.log(COOLEST), math.log(HOTTEST)), method="bounded", options=dict(xatol=1e-8),
    )  # fmt: skip
    assert fit_temperature(factor * z, y) == pytest.approx(math.exp(best.x), rel=2e-4)


def test_log_probabilities_have_the_temperature_of_their_logits():
    z, y = sure(3.0)
    assert fit_temperature(z.double().log_softmax(1), y) == pytest.approx(fit_temperature(z, y), rel=1e-6)


def test_the_temperature_ends_at_its_bounds():
    z, y = 10 * torch.eye(3).repeat(4, 1), torch.arange(3).repeat(4)
    assert fit_temperature(z, y) == pytest.approx(COOLEST)  # perfectly told apart: as sure as may be
    assert fit_temperature(z, (y + 1) % 3) == pytest.approx(HOTTEST)  # always wrong


def test_what_no_temperature_fits_is_an_error():
    z, y = sure(1.0)
    for logits, labels in ((z[:0], y[:0]), (z, y[1:]), (z[0], y[:5])):
        with pytest.raises(
            ValueError, match=r"fitted to logits \(n, classes\) and labels \(n,\) or \(n, k\) of at least one"
        ):
            fit_temperature(logits, labels)
    for labels in (y + 3, y - 1):
        with pytest.raises(ValueError, match=r"labels must lie from 0 to \d, got .*: leave out images"):
            fit_temperature(z, labels)
    for labels in (y.tolist(), y.float()):
        with pytest.raises(TypeError, match=r"labels must be a tensor of int64, .*, got (list|float32)"):
            fit_temperature(z, labels)
    for wrong in (math.nan, -math.inf):  # the logarithm of a probability that was rounded to 0
        z[3, 0] = wrong
        with pytest.raises(ValueError, match="logits must be finite"):
            fit_temperature(z, y)


# --- the posterior's noise -------------------------------------------------------------------------------------------


@torch.no_grad()
def class_layer(rule, seed=0, norm_logit=True, **prior):
    """Return a layer with offsets, scale and running statistics at random, and its output for two images."""
    torch.manual_seed(seed)
    options = dict(activation=rule, prior=Prior(dim=D, **prior))
    layer = ClassCaps(2, 3, pose_size=2, routing_options=options, norm_logit=norm_logit, backend="reference").eval()
    caps = Capsules(torch.rand(2, 3, 2, 2), torch.randn(2, 3, 2, 2, 2, 2))
    layer.scale.fill_(1.7)
    layer.routing.beta_a.normal_()
    layer.routing.beta_u.normal_()
    if norm_logit:
        layer.norm_a.running_var.fill_(1 - layer.norm_a.eps)
        raw = layer(caps).logits / layer.scale + layer.norm_a.running_mean
        layer.norm_a.running_mean.normal_(std=0.3).add_(raw.mean(0))
        layer.norm_a.running_var.uniform_(0.5, 1.5).mul_(0.3 if rule == "released" else 9)
    for parameter in layer.parameters():
        parameter.requires_grad_(False)
    return layer, layer(caps), layer.trace(caps)


def logits_of(layer, trace, ln_pi, lndet):
    """Activate class capsules as the paper and the released code write it, then BatchNorm and the factor."""
    q, beta_a, beta_u = trace.iterations[-1], layer.routing.beta_a, layer.routing.beta_u
    r_j = (trace.activations[..., None] * q.r).sum(1)
    if layer.routing.activation == "agreement":
        raw = beta_a + (ln_pi + lndet / 2 - beta_u) * r_j
    elif layer.routing.activation == "paper":
        raw = beta_a - (beta_u + ln_pi + lndet) * r_j
    else:
        raw = beta_a - (ln_pi.exp() * 0.5 * (D * math.log(2 * math.pi * math.e) - lndet) + beta_u)
    norm = layer.norm_a
    return layer.scale * (raw if norm is None else (raw - norm.running_mean) / (norm.running_var + norm.eps).sqrt())


def drawn(trace, count=DRAWS):
    """Draw ln pi and ln|Lambda| of every class capsule."""
    q = trace.iterations[-1]
    ln_pi = Dirichlet(q.alpha).sample((count,)).log()
    lndet = Gamma((q.nu / 2)[..., None].expand_as(q.psi), 1 / (2 * q.psi)).sample((count,)).log().sum(-1)
    return ln_pi, lndet


@pytest.mark.parametrize(
    ("rule", "temperature", "norm_logit"),
    [
        ("agreement", 1.0, True),
        ("released", 1.0, True),
        ("released", 2.0, True),
        ("paper", 1.0, True),
        ("released", 1.0, False),
    ],
)
def test_sampled_probabilities_are_the_mean_over_direct_draws(rule, temperature, norm_logit):
    layer, out, trace = class_layer(rule, norm_logit=norm_logit)
    found = sampled_probabilities(layer, out, samples=DRAWS, temperature=temperature)
    expected = (logits_of(layer, trace, *drawn(trace)) / temperature).softmax(-1).mean(0)
    torch.testing.assert_close(found, expected, rtol=0, atol=0.012)
    torch.testing.assert_close(found.sum(1), torch.ones(2))
    assert float((found - (out.logits / temperature).softmax(1)).abs().max()) > 0.03  # the draws make a difference


@pytest.mark.parametrize("rule", RULES)
def test_a_posterior_of_no_variance_gives_the_softmax(rule):
    layer, out, _ = class_layer(rule, alpha0=1e6, nu0=1e6)
    expected = out.logits.softmax(1)
    assert expected.max() > 0.4
    torch.testing.assert_close(sampled_probabilities(layer, out, samples=200), expected, rtol=0, atol=5e-3)
    torch.testing.assert_close(mean_field_probabilities(layer, out), expected, rtol=0, atol=5e-3)


@pytest.mark.parametrize("rule", RULES)
def test_the_mean_field_is_the_delta_method_at_the_expectations(rule):
    """Slopes by autograd, variances from draws, and the probit approximation as written."""
    layer, out, trace = class_layer(rule)
    ln_pi, lndet = drawn(trace)
    at = [x.mean(0).requires_grad_() for x in (ln_pi, lndet)]
    slopes = torch.autograd.grad(logits_of(layer, trace, *at).sum(), at)
    var = sum(slope.square() * x.var(0) for slope, x in zip(slopes, (ln_pi, lndet), strict=True))
    for temperature in (1.0, 3.0):
        expected = (out.logits / (temperature**2 + math.pi * var / 8).sqrt()).softmax(1)
        torch.testing.assert_close(mean_field_probabilities(layer, out, temperature), expected, rtol=0, atol=0.005)
    assert float((mean_field_probabilities(layer, out) - out.logits.softmax(1)).abs().max()) > 0.03


def test_where_the_posterior_is_narrow_the_mean_fields_variance_is_that_of_drawn_logits():
    """The released rule is not linear in ln pi; the printed one is, and the delta method exact."""
    layer, out, trace = class_layer("released", alpha0=100.0, nu0=100.0)
    var = logits_of(layer, trace, *drawn(trace)).var(0)
    expected = (out.logits / (0.01 + math.pi * var / 8).sqrt()).softmax(1)  # T = 0.1: the variance decides
    torch.testing.assert_close(mean_field_probabilities(layer, out, 0.1), expected, rtol=0, atol=0.01)
    for factor in (0.5, 2.0):  # another variance gives other probabilities
        other = (out.logits / (0.01 + factor * math.pi * var / 8).sqrt()).softmax(1)
        assert float((other - expected).abs().max()) > 0.02


def test_other_layers_have_no_such_probabilities():
    caps = Capsules(torch.rand(2, 3, 2, 2), torch.randn(2, 3, 2, 2, 2, 2))
    for routing in ("em", "dynamic"):
        layer = ClassCaps(2, 3, pose_size=2, routing=routing).eval()
        for method in (sampled_probabilities, mean_field_probabilities):
            with pytest.raises(ValueError, match="need VB routing: other routings have no posterior; use the softmax"):
                method(layer, layer(caps))
    layer = ClassCaps(2, 3, pose_size=2, routing_options=dict(activation="information")).eval()
    for method in (sampled_probabilities, mean_field_probabilities):
        with pytest.raises(ValueError, match="activation='information' is a divergence of the whole posterior"):
            method(layer, layer(caps))
    full = ClassCaps(2, 3, pose_size=2, routing_options=dict(prior=Prior(dim=4, precision="full"))).eval()
    for method in (sampled_probabilities, mean_field_probabilities):
        with pytest.raises(ValueError, match="need a diagonal precision, 'gamma' or 'wishart'; got 'full'"):
            method(full, full(caps))
    layer, out, _ = class_layer("released")
    with pytest.raises(ValueError, match="samples must be at least 1, got 0"):
        sampled_probabilities(layer, out, samples=0)
    with pytest.raises(ValueError, match="need VB routing"):
        sampled_probabilities(layer, out._replace(posterior=None))

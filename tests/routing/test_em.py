"""EM routing: the printed procedure, gradients, extremes, and the collapse of variance that VB does not share."""

import math

import literal
import numpy as np
import pytest
import torch

from vbcaps import Prior
from vbcaps.routing import EMRouting, em_routing, vb_routing
from vbcaps.routing.em import LEAST_VAR
from vbcaps.routing.vb import update_q_parameters

F64 = torch.float64
BETA_A, BETA_U = torch.tensor([0.3, -2.0, 1.0], dtype=F64), torch.tensor([-0.5, 0.8, 0.1], dtype=F64)
SCHEDULES = pytest.mark.parametrize(
    "schedule",
    [
        dict(temperature=0.01, growth=0.95, min_var=1e-4),
        dict(temperature=1.0, growth=0.5, min_var=1e-2),
        dict(temperature=3.0, growth=0.1, min_var=1e-8),
    ],
    ids=["default", "warm", "cold"],
)


@SCHEDULES
@pytest.mark.parametrize(("size", "stride"), [((4, 4), (1, 1)), ((5, 5), (2, 2)), ((4, 7), (1, 2))])
@pytest.mark.parametrize("iters", [1, 2, 3])
def test_routing_equals_a_literal_procedure(schedule, size, stride, iters):
    a, V, child = literal.random_problem(iters, size=size, stride=stride)
    assert len(child.unique()) < child.numel()
    options = dict(iters=iters, beta_a=BETA_A, beta_u=BETA_U, **schedule)
    logit, q = em_routing(a, V, child, **options)
    expected = literal.em_routing(a.numpy(), V.numpy(), child.numpy(), **options)
    np.testing.assert_allclose(logit, expected.logit, rtol=1e-8, atol=1e-9)
    for name in q._fields:
        np.testing.assert_allclose(getattr(q, name), getattr(expected, name), rtol=1e-8, atol=1e-10, err_msg=name)


def test_activations_take_part_in_routing():
    """Unlike VB, EM activates inside the loop: an offset that silences a parent takes its children away."""
    a, V, child = literal.random_problem(0)
    beta_a = torch.tensor([0.0, 0.0, -200.0], dtype=F64)
    quiet = em_routing(a, V, child, beta_a=beta_a, temperature=1.0, growth=0.5)[1].r[..., 2]
    even = em_routing(a, V, child, temperature=1.0, growth=0.5)[1].r[..., 2]
    assert quiet.max() < 1e-12 < even.max()


@pytest.mark.parametrize("iters", [1, 2, 3])
def test_the_inverse_temperature_grows_with_the_iterations(iters):
    """With equal votes the cost stays what it is, and the logit is the schedule times it."""
    a, V, child = torch.ones(1, 1, 4, dtype=F64), torch.zeros(1, 1, 4, 2, 3, dtype=F64), torch.arange(4)[None]
    logit, _ = em_routing(a, V, child, iters=iters, beta_a=5.0, beta_u=0.7, temperature=0.02, growth=0.8, min_var=1e-4)
    cost = 3 * (0.7 + 0.5 * np.log(1e-4)) * 2.0
    assert logit.flatten().tolist() == pytest.approx([0.02 * (1 - 0.8**iters) * (5.0 - cost)] * 2)


@pytest.mark.parametrize("iters", [1, 3])
def test_gradcheck(iters):
    a, V, child = literal.random_problem(2, size=(3, 4), dim=2, batch=1)

    def route(a, V, beta_a, beta_u):
        options = dict(temperature=1.0, growth=0.5, min_var=0.05)
        logit, q = em_routing(a, V, child, iters=iters, beta_a=beta_a, beta_u=beta_u, **options)
        return logit, *(q if iters > 1 else q[:2])

    assert torch.autograd.gradcheck(route, [literal.leaf(x) for x in (0.1 + a, V, BETA_A, BETA_U)])


@pytest.mark.parametrize("dim", [1, 4, 16])
@pytest.mark.parametrize("case", literal.extreme_inputs())
def test_extreme_inputs_give_finite_outputs_and_gradients(case, dim):
    a, V, child = literal.extreme_inputs(dim=dim)[case]
    a, V = literal.leaf(a), literal.leaf(V)
    module = EMRouting(V.shape[3], dim)
    logit, q = module(a, V, child)
    literal.assert_finite_with_gradients((logit, *q), [a, V, *module.parameters()])


# --- variance collapse ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("min_var", [1e-3, 1e-6, 1e-9])
@pytest.mark.parametrize("precision", ["gamma", "wishart", "full"])
def test_a_parent_with_one_child_collapses_under_em_and_not_under_vb(min_var, precision):
    V = torch.tensor([0.5, -1.0, 2.0], dtype=F64).view(1, 1, 1, 1, 3)
    a, child = torch.ones(1, 1, 1, dtype=F64), torch.zeros(1, 1, dtype=torch.int64)
    _, em = em_routing(a, V, child, min_var=min_var)
    torch.testing.assert_close(em.var, torch.full_like(em.var, min_var))
    prior = Prior(Psi0=2.0, nu0=5.0, dim=3, precision=precision, dtype=F64)
    _, vb = vb_routing(a, V, child, prior)
    # Psi_j <= Psi0 and nu_j = nu0 + 1: the precision cannot pass (nu0 + 1) Psi0.
    assert (1 / vb.variance() <= (5.0 + 1) * 2.0).all()
    assert (vb.variance() < 10).all()


@pytest.mark.parametrize("precision", ["gamma", "wishart", "full"])
def test_a_parent_that_comes_to_own_one_child_collapses_under_em_and_not_under_vb(precision):
    """Seven votes for parent 0 agree and one lies far off; for parent 1 only that one is near the others' mean."""
    gen = torch.Generator().manual_seed(0)
    V = torch.empty(1, 1, 8, 2, 4, dtype=F64)
    V[0, 0, :, 0] = 0.3 * torch.randn(8, 4, generator=gen, dtype=F64)
    V[0, 0, 0, 0] += 30
    V[0, 0, :, 1] = 20 * torch.randn(8, 4, generator=gen, dtype=F64)
    V[0, 0, 0, 1] = V[0, 0, 1:, 1].mean(0)
    a, child = torch.ones(1, 1, 8, dtype=F64), torch.arange(8)[None]
    for min_var in (1e-4, 1e-8):
        _, em = em_routing(a, V, child, iters=30, min_var=min_var)
        assert em.r[0, 0, 0, 1] > 0.999
        assert em.r[0, 0, 1:, 1].max() < 1e-3
        torch.testing.assert_close(em.var[0, 0, 1], torch.full((4,), min_var, dtype=F64), rtol=1e-6, atol=0)
    prior = Prior(dim=4, precision=precision, dtype=F64)
    p = prior()
    inv_Psi0 = p.inv_Psi0.diagonal() if precision == "full" else p.inv_Psi0
    same = update_q_parameters(em.r, a, V, p, precision)
    for q in (same, vb_routing(a, V, child, prior, iters=30)[1]):
        assert (1 / q.variance() <= (p.nu0 + q.r.sum(2)[..., None]) / inv_Psi0 + 1e-9).all()
    assert (same.variance()[0, 0, 1] > 0.1).all()


def test_a_variance_too_small_for_float32_is_refused():
    a, V, child = literal.random_problem(3, dtype=torch.float32)
    a, V = 0 * a, V.requires_grad_()
    logit, q = em_routing(a, V, child, min_var=LEAST_VAR)
    (logit.sum() + q.m.sum() + q.var.log().sum()).backward()
    assert V.grad.isfinite().all()
    for wrong in (LEAST_VAR / 2, 0.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="min_var must be a number of at least 1e-12"):
            em_routing(a, V, child, min_var=wrong)
        with pytest.raises(ValueError, match="min_var must be a number of at least 1e-12"):
            EMRouting(3, 4, min_var=wrong)


# --- the module -------------------------------------------------------------------------------------------------


def test_module_is_the_function_with_its_own_parameters():
    a, V, child = literal.random_problem(3)
    schedule = dict(temperature=1.0, growth=0.5, min_var=1e-2)
    module = EMRouting(3, 4, iters=2, **schedule).double()
    with torch.no_grad():
        module.beta_a.copy_(BETA_A)
        module.beta_u.copy_(BETA_U)
    (logit, q), (expected, p) = (
        module(a, V, child),
        em_routing(a, V, child, iters=2, beta_a=BETA_A, beta_u=BETA_U, **schedule),
    )
    for x, y in zip((logit, *q), (expected, *p), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(temperature=0.0), "temperature must lie between"),
        (dict(temperature=float("nan")), "temperature must lie between"),
        (dict(growth=0.0), "growth must lie between"),
        (dict(growth=1.0), "growth must lie between"),
        (dict(min_var=0.0), "min_var must be a number of at least"),
        (dict(min_var=-1e-4), "min_var must be a number of at least"),
        (dict(iters=0), "iters must be"),
    ],
)
def test_wrong_options_raise_an_error_that_names_them(options, message):
    with pytest.raises(ValueError, match=message):
        EMRouting(3, 4, **options)

"""VB routing: scikit-learn, the printed algorithm, exact evidence, the ELBO's climb, gradients, extremes, posterior."""

import itertools
import math
from types import SimpleNamespace

import literal
import numpy as np
import pytest
import scipy.stats
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.mixture import BayesianGaussianMixture
from torch.distributions import Dirichlet, Gamma, MultivariateNormal, Normal, Wishart, kl_divergence

from vbcaps import Prior
from vbcaps.distributions import expected_log_pi
from vbcaps.routing import Posterior, VBRouting, vb_routing
from vbcaps.routing.fields import softmax_over_parents
from vbcaps.routing.vb import ACTIVATIONS, expected_logdet, expected_mahalanobis, update_q_parameters

F64 = torch.float64
PRECISIONS = pytest.mark.parametrize("precision", ["gamma", "wishart", "full"])
RULES = pytest.mark.parametrize(
    ("precision", "activation"),
    [
        (precision, rule)
        for precision in ("gamma", "wishart", "full")
        for rule in ACTIVATIONS
        if (precision, rule) != ("wishart", "information")  # no distribution, so no divergence
    ],
)
SOFT = pytest.mark.parametrize("temper", [1.0, 1 / 16])


def random_spd(gen, *batch, dim):
    A = torch.randn(*batch, dim, dim, generator=gen, dtype=F64)
    return A @ A.mT / dim + 0.3 * torch.eye(dim, dtype=F64)


def random_prior(seed, precision, parents, dim, learn=(), excess=0.0):
    """A float64 prior with other values for each type, and the same as arrays for ``literal.vb_routing``."""
    gen = torch.Generator().manual_seed(seed)

    def positive(*shape):
        return 0.2 + 2 * torch.rand(*shape, generator=gen, dtype=F64)

    alpha0, kappa0, nu0 = positive(parents), positive(parents), dim - 1 + excess + positive(parents)
    m0 = torch.randn(parents, dim, generator=gen, dtype=F64)
    Psi0 = random_spd(gen, parents, dim=dim) if precision == "full" else positive(parents, dim)
    prior = Prior(alpha0, m0, kappa0, Psi0, nu0, dim=dim, precision=precision, learn=learn, dtype=F64)
    Psi0 = Psi0 if precision == "full" else torch.diag_embed(Psi0)
    arrays = dict(alpha0=alpha0, m0=m0, kappa0=kappa0, Psi0=Psi0, nu0=nu0)
    return prior, SimpleNamespace(**{name: value.numpy() for name, value in arrays.items()})


# --- scikit-learn -----------------------------------------------------------------------------------------------


class Mixture:
    """One field whose parents see the same votes: a Gaussian mixture. The same one here and in scikit-learn."""

    def __init__(self, seed, precision, points=40, K=3, dim=3):
        rng = np.random.default_rng(seed)
        self.precision, self.K = precision, K
        self.X = (
            rng.normal(size=(points, dim)) * rng.uniform(0.5, 2, dim)
            + rng.normal(scale=2, size=(K, dim))[rng.integers(K, size=points)]
        )
        alpha0, kappa0, nu0 = rng.uniform(0.05, 3), rng.uniform(0.05, 3), dim - 1 + rng.uniform(0.1, 5)
        m0, B = rng.normal(size=dim), rng.normal(size=(dim, dim))
        inv_Psi0 = B @ B.T + 0.5 * np.eye(dim) if precision == "full" else rng.uniform(0.3, 3, dim)
        Psi0 = np.linalg.inv(inv_Psi0) if precision == "full" else 1 / inv_Psi0
        self.prior = Prior(
            alpha0, torch.from_numpy(m0), kappa0, torch.from_numpy(Psi0), nu0, dim=dim, precision=precision, dtype=F64
        )
        self.sklearn = BayesianGaussianMixture(
            n_components=K,
            covariance_type="full" if precision == "full" else "diag",
            reg_covar=0.0,
            weight_concentration_prior_type="dirichlet_distribution",
            weight_concentration_prior=alpha0,
            mean_precision_prior=kappa0,
            mean_prior=m0,
            degrees_of_freedom_prior=nu0,
            covariance_prior=inv_Psi0,
        )
        self.sklearn._check_parameters(self.X)
        self.V = torch.from_numpy(self.X)[None, None, :, None].expand(1, 1, points, K, dim)
        self.a, self.child = torch.ones(1, 1, points, dtype=F64), torch.arange(points)[None]
        self.start = rng.dirichlet(np.full(K, 0.5), size=points).clip(1e-9)
        self.start /= self.start.sum(1, keepdims=True)

    def assert_posterior(self, q):
        """The posterior is the one scikit-learn's last M-step found; it keeps Psi_j^-1 divided by nu_j."""
        gmm = self.sklearn
        nu = gmm.degrees_of_freedom_
        inv_Psi = gmm.covariances_ * nu.reshape(-1, *[1] * (gmm.covariances_.ndim - 1))
        psi = np.linalg.inv(inv_Psi) if self.precision == "full" else 1 / inv_Psi
        expected = (gmm.weight_concentration_, gmm.means_, gmm.mean_precision_, psi, nu)
        for name, value in zip(Posterior._fields, expected, strict=False):
            np.testing.assert_allclose(getattr(q, name)[0, 0], value, rtol=1e-6, atol=1e-9, err_msg=name)

    def e_step(self, q):
        ln_p = 0.5 * (expected_logdet(q, self.precision)[:, :, None] - expected_mahalanobis(self.V, q))
        return softmax_over_parents(expected_log_pi(q.alpha)[:, :, None] + ln_p, self.child, len(self.X))


@pytest.mark.parametrize("precision", ["full", "wishart"])
@pytest.mark.parametrize("seed", range(6))
def test_updates_equal_scikit_learn_from_any_start(precision, seed):
    mix = Mixture(seed, precision)
    r = torch.from_numpy(mix.start)[None, None]
    for _ in range(4):
        q = update_q_parameters(r, mix.a, mix.V, mix.prior(), precision)
        mix.sklearn._m_step(mix.X, np.log(r[0, 0].numpy()))
        mix.assert_posterior(q)
        r = mix.e_step(q)
        _, ln_r = mix.sklearn._estimate_log_prob_resp(mix.X)
        np.testing.assert_allclose(r[0, 0], np.exp(ln_r), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("precision", ["full", "wishart"])
@pytest.mark.parametrize("iters", [1, 2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_routing_equals_scikit_learn_from_equal_responsibilities(precision, iters, seed):
    mix = Mixture(seed, precision)
    ln_r = np.full((len(mix.X), mix.K), -math.log(mix.K))
    for t in range(iters):
        mix.sklearn._m_step(mix.X, ln_r)
        if t < iters - 1:
            _, ln_r = mix.sklearn._estimate_log_prob_resp(mix.X)
    _, q = vb_routing(mix.a, mix.V, mix.child, mix.prior, iters=iters)
    mix.assert_posterior(q)
    np.testing.assert_allclose(q.r[0, 0], np.exp(ln_r), rtol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_elbo_gains_what_scikit_learns_lower_bound_gains(seed):
    mix = Mixture(seed, "full")
    r = torch.from_numpy(mix.start)[None, None]
    ours, theirs = [], []
    for _ in range(6):
        q = update_q_parameters(r, mix.a, mix.V, mix.prior(), "full")
        mix.sklearn._m_step(mix.X, np.log(r[0, 0].numpy()))
        ours.append(q.elbo(mix.a, mix.V).total.item())
        theirs.append(mix.sklearn._compute_lower_bound(np.log(r[0, 0].numpy()), 0.0))
        r = mix.e_step(q)
    np.testing.assert_allclose(np.diff(ours), np.diff(theirs), rtol=1e-6, atol=1e-8)
    assert ours[-1] > ours[0] + 1


# --- the printed algorithm --------------------------------------------------------------------------------------


@RULES
@SOFT
@pytest.mark.parametrize(("size", "stride"), [((4, 4), (1, 1)), ((5, 5), (2, 2)), ((4, 7), (1, 2))])
@pytest.mark.parametrize("iters", [1, 2, 3])
def test_routing_equals_a_literal_algorithm_1(precision, activation, temper, size, stride, iters):
    a, V, child = literal.random_problem(iters, size=size, stride=stride, batch=1 + iters % 2)
    assert len(child.unique()) < child.numel()
    prior, arrays = random_prior(7, precision, 3, 4)
    beta_a, beta_u = torch.tensor([0.3, -0.2, 1.0], dtype=F64), torch.tensor([-0.5, 0.8, 0.1], dtype=F64)
    options = dict(iters=iters, activation=activation, temper=temper, beta_a=beta_a, beta_u=beta_u)
    logit, q = vb_routing(a, V, child, prior, **options)
    expected = literal.vb_routing(a.numpy(), V.numpy(), child.numpy(), arrays, precision=precision, **options)
    np.testing.assert_allclose(logit, expected.logit, rtol=1e-9, atol=1e-10)
    for name in Posterior._fields[:-2]:
        value = getattr(expected, name)
        value = np.diagonal(value, axis1=-2, axis2=-1) if name == "psi" and precision != "full" else value
        np.testing.assert_allclose(getattr(q, name), value, rtol=1e-9, atol=1e-11, err_msg=name)


# --- the evidence lower bound -----------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["gamma", "full"])
@pytest.mark.parametrize("seed", range(3))
def test_with_one_parent_the_elbo_is_the_log_evidence(precision, seed):
    """Then q is the exact posterior, and the evidence a product of Student's t, one vote after the other."""
    dim, votes = 3, 8
    prior, p = random_prior(seed, precision, 1, dim)
    V = torch.randn(1, 1, votes, 1, dim, generator=torch.Generator().manual_seed(seed), dtype=F64)
    _, q = vb_routing(torch.ones(1, 1, votes, dtype=F64), V, torch.arange(votes)[None], prior, iters=1)
    m, kappa, inv_Psi, nu = p.m0[0], p.kappa0[0], np.linalg.inv(p.Psi0[0]), p.nu0[0]
    evidence = 0.0
    for v in V[0, 0, :, 0].numpy():
        spread = (kappa + 1) / kappa
        if precision == "full":
            df = nu - dim + 1
            evidence += scipy.stats.multivariate_t(m, inv_Psi * spread / df, df).logpdf(v)
        else:
            scale = np.sqrt(np.diag(inv_Psi) * spread / nu)
            evidence += scipy.stats.t(nu, m, scale).logpdf(v).sum()
        inv_Psi = inv_Psi + np.outer(v - m, v - m) / spread
        m, kappa, nu = (kappa * m + v) / (kappa + 1), kappa + 1, nu + 1
    bound = q.elbo(torch.ones(1, 1, votes, dtype=F64), V)
    assert bound.total.item() == pytest.approx(evidence, rel=1e-9)
    assert bound.assignment.item() == bound.responsibility.item() == bound.kl_pi.item() == 0
    np.testing.assert_allclose(q.m[0, 0, 0], m, rtol=1e-9)


LOGS = st.floats(-2, 2).map(lambda x: 10**x)


@pytest.mark.parametrize("precision", ["gamma", "full"])
@pytest.mark.parametrize("single_field", [True, False])
@pytest.mark.parametrize("temper", [1.0, 1 / 4, 1 / 16, 2.0])
@settings(max_examples=20, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**31 - 1),
    parents=st.integers(1, 4),
    dim=st.integers(1, 4),
    stride=st.integers(1, 2),
    scale=LOGS,
    alpha0=LOGS,
    kappa0=LOGS,
    Psi0=LOGS,
    excess=LOGS,
    m0=st.floats(-3, 3),
)
def test_elbo_never_falls(
    precision, single_field, temper, seed, parents, dim, stride, scale, alpha0, kappa0, Psi0, excess, m0
):  # fmt: skip
    """From the first iteration where one field sees each child, else from the second."""
    size = (3, 3) if single_field else (3 + stride, 3)
    a, V, child = literal.random_problem(
        seed, size=size, stride=(stride, 1), parents=parents, dim=dim, scale=scale, batch=2
    )
    nu0 = excess + (dim - 1 if precision == "full" else 0)
    prior = Prior(alpha0, m0, kappa0, Psi0, nu0, dim=dim, precision=precision, dtype=F64)
    bounds = [vb_routing(a, V, child, prior, iters=t, temper=temper)[1].elbo(a, V) for t in range(1, 7)]
    for b in bounds:
        terms = b.likelihood + b.assignment + b.responsibility - b.kl_pi - b.kl_parameters
        torch.testing.assert_close(b.total, terms, rtol=1e-12, atol=1e-9)
        assert (b.kl_pi > -1e-9).all()
        assert (b.kl_parameters > -1e-7).all()
        assert (b.responsibility > -1e-8).all()
    for before, after in itertools.pairwise(bounds if single_field else bounds[1:]):
        rounding = 1e-9 + 1e-11 * sum(term.abs() for term in after)
        assert (after.total - before.total >= -rounding).all()


def test_elbo_terms_equal_loops():
    a, V, child = literal.random_problem(5)
    prior, _ = random_prior(5, "full", 3, 4)
    _, q = vb_routing(a, V, child, prior, temper=0.25)
    bound = q.elbo(a, V)
    ln_pi, lndet, maha = expected_log_pi(q.alpha), expected_logdet(q, "full"), expected_mahalanobis(V, q)
    kl_pi, kl_parameters = q.kl()
    for n in range(len(V)):
        terms = dict.fromkeys(bound._fields[1:], 0.0)
        for l, j in itertools.product(range(4), range(3)):
            terms["kl_pi"] += kl_pi[n, l] / 3
            terms["kl_parameters"] += kl_parameters[n, l, j]
            for i in range(9):
                R = a[n, l, i] * q.r[n, l, i, j]
                terms["likelihood"] += R * (lndet[n, l, j] - 4 * math.log(2 * math.pi) - maha[n, l, i, j]) / 2
                terms["assignment"] += R * ln_pi[n, l, j]
                terms["responsibility"] -= 4 * R * q.r[n, l, i, j].log()
        for name, value in terms.items():
            torch.testing.assert_close(getattr(bound, name)[n], value, msg=name)


# --- the rules --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["gamma", "full"])
@pytest.mark.parametrize("iters", [1, 3])
def test_activation_rises_with_agreement_but_falls_by_the_printed_rule(precision, iters):
    """Two parents see the same votes but for their scatter; the prior expects more scatter than either has."""
    gen = torch.Generator().manual_seed(0)
    noise = torch.randn(1, 1, 40, 1, 4, generator=gen, dtype=F64)
    V = torch.cat([0.02 * noise, 0.2 * noise], 3) + 0.5  # the first parent's votes agree more
    prior = Prior(Psi0=0.5, dim=4, precision=precision, dtype=F64)
    for activation in ACTIVATIONS:
        a, child = torch.ones(1, 1, 40, dtype=F64), torch.arange(40)[None]
        logit, _ = vb_routing(a, V, child, prior, iters=iters, activation=activation)
        agreeing, scattered = logit[0, 0].tolist()
        assert (agreeing > scattered) == (activation != "paper"), activation


@pytest.mark.parametrize("activation", [rule for rule in ACTIVATIONS if rule != "released"])
def test_information_and_votes_are_zero_for_a_parent_without_votes(activation):
    a, V, child = literal.extreme_inputs(F64, dim=4)["no child of one field active"]
    logit, q = vb_routing(a, V, child, Prior(dim=4, dtype=F64), activation=activation, beta_a=0.25)
    empty = q.kappa == 1
    assert empty.any()
    torch.testing.assert_close(logit[empty], torch.full_like(logit[empty], 0.25))


def test_information_is_the_divergence_of_the_posterior():
    a, V, child = literal.random_problem(3)
    for precision in ("gamma", "full"):
        logit, q = vb_routing(a, V, child, random_prior(3, precision, 3, 4)[0], activation="information")
        torch.testing.assert_close(logit, q.kl()[1])


def test_softness_makes_shares_more_even():
    a, V, child = literal.random_problem(3)
    entropies = [vb_routing(a, V, child, Prior(dim=4, dtype=F64), temper=t)[1].r for t in (1.0, 0.25, 1 / 16)]
    sharp, soft, softer = (-torch.xlogy(r, r).sum() for r in entropies)
    assert sharp < soft < softer


# --- gradients --------------------------------------------------------------------------------------------------


def small_routing(precision, activation="released", iters=3, temper=1.0):
    """A module with everything learned away from zero, its inputs, and its parameters by name."""
    gen = torch.Generator().manual_seed(3)
    prior, _ = random_prior(3, precision, 2, 2, learn="all")
    module = VBRouting(2, 2, iters=iters, activation=activation, temper=temper, prior=prior).double()
    with torch.no_grad():
        for beta in (module.beta_a, module.beta_u):
            beta.copy_(torch.randn(2, generator=gen, dtype=F64))
    child = torch.tensor([[0, 1, 2], [2, 3, 1]])
    a = 0.2 + 0.7 * torch.rand(1, 2, 3, generator=gen, dtype=F64)
    V = torch.randn(1, 2, 3, 2, 2, generator=gen, dtype=F64)
    return module, a, V, child


@RULES
@SOFT
def test_gradcheck_of_routing_in_inputs_offsets_and_every_prior(precision, activation, temper):
    module, a, V, child = small_routing(precision, activation, temper=temper)
    names, values = zip(*module.named_parameters(), strict=True)
    assert {name.split(".")[-1] for name in names} == {
        "beta_a", "beta_u", "alpha0_raw", "m0_raw", "kappa0_raw", "Psi0_raw", "nu0_raw"
    }  # fmt: skip

    def route(a, V, *values):
        logit, q = torch.func.functional_call(module, dict(zip(names, values, strict=True)), (a, V, child))
        return logit, *q[:-2]

    leaves = [x.detach().clone().requires_grad_() for x in (a, V, *values)]
    assert torch.autograd.gradcheck(route, leaves)
    for name, grad in zip(("a", "V", *names), torch.autograd.grad(route(*leaves)[0].sin().sum(), leaves), strict=True):
        assert grad.abs().max() > 0, name


@PRECISIONS
def test_through_the_last_iteration_responsibilities_are_as_if_given(precision):
    module, a, V, child = small_routing(precision, "paper", iters=3)
    leaves = [x.requires_grad_() for x in (a, V)] + list(module.prior.parameters())
    expected_logit, expected = module(a, V, child)
    module.through = "last"
    logit, q = module(a, V, child)
    assert torch.equal(logit, expected_logit)
    assert all(torch.equal(x, y) for x, y in zip(q[:-2], expected[:-2], strict=True))
    given = update_q_parameters(q.r.detach(), a, V, module.prior(), precision)

    def gradients(of):
        return torch.autograd.grad(sum(x.sin().sum() for x in of[:5]), leaves, retain_graph=True)

    for x, y in zip(gradients(q), gradients(given), strict=True):
        torch.testing.assert_close(x, y)
    assert not torch.allclose(gradients(q)[1], gradients(expected)[1])
    with pytest.raises(ValueError, match=r"through must be one of .*, got 'first'"):
        VBRouting(2, through="first")


@pytest.mark.parametrize("precision", ["gamma", "full"])
def test_gradcheck_of_the_elbo_and_entropies(precision):
    module, a, V, child = small_routing(precision, iters=2)
    names, values = zip(*module.prior.named_parameters(prefix="prior"), strict=True)

    class Bound(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.routing, self.prior = module, module.prior

        def forward(self, a, V):
            _, q = self.routing(a, V, child)
            return *q.elbo(a, V), *q.entropy()

    bound = Bound()

    def terms(a, V, *values):
        return torch.func.functional_call(bound, dict(zip(names, values, strict=True)), (a, V))

    leaves = [x.detach().clone().requires_grad_() for x in (a, V, *values)]
    assert torch.autograd.gradcheck(terms, leaves)


# --- extremes ---------------------------------------------------------------------------------------------------


@RULES
@pytest.mark.parametrize("dim", [1, 4, 16])
@pytest.mark.parametrize("case", literal.extreme_inputs())
def test_extreme_inputs_give_finite_outputs_and_gradients(precision, activation, dim, case):
    a, V, child = literal.extreme_inputs(dim=dim)[case]
    a, V = literal.leaf(a), literal.leaf(V)
    prior = Prior(dim=dim, precision=precision, learn="all")
    module = VBRouting(V.shape[3], dim, activation=activation, prior=prior)
    logit, q = module(a, V, child)
    literal.assert_finite_with_gradients((logit, *q[:-2]), [a, V, *module.parameters()])


ENDS = (1e-6, 1e6)


@PRECISIONS
@pytest.mark.parametrize("ends", list(itertools.product(ENDS, repeat=4)), ids=lambda ends: "-".join(map(str, ends)))
@pytest.mark.parametrize("m0", [0.0, -1e6])
def test_priors_at_the_ends_of_the_legal_range_give_finite_outputs_and_gradients(precision, ends, m0):
    alpha0, kappa0, Psi0, excess = ends
    nu0 = excess + (0 if precision == "gamma" else 3)
    inputs = literal.extreme_inputs()
    cases = "no child of one field active", "poses of 1e4", "poses of 1e-6"
    rules = [rule for rule in ACTIVATIONS if (precision, rule) != ("wishart", "information")]
    for case, activation, learn in itertools.product(cases, rules, ((), "all")):
        a, V, child = inputs[case]
        a, V = literal.leaf(a), literal.leaf(V)
        prior = Prior(alpha0, m0, kappa0, Psi0, nu0, dim=4, precision=precision, learn=learn)
        logit, q = vb_routing(a, V, child, prior, activation=activation)
        literal.assert_finite_with_gradients((logit, *q[:-2]), [a, V, *prior.parameters()])


@PRECISIONS
@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("iters", [1, 3])
def test_a_field_that_no_child_activates_keeps_the_prior(precision, dtype, iters):
    a, V, child = literal.extreme_inputs(dtype, dim=4)["no child of one field active"]
    prior = random_prior(1, precision, 3, 4)[0].to(dtype)
    _, q = vb_routing(a, V, child, prior, iters=iters)
    p = prior()
    psi = torch.linalg.inv(p.inv_Psi0.double()) if precision == "full" else 1 / p.inv_Psi0
    for name, value in (("alpha", p.alpha0), ("kappa", p.kappa0), ("nu", p.nu0)):
        assert (getattr(q, name)[:, 1] == value).all(), name
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(q.m[:, 1], p.m0.expand(2, 3, 4), rtol=2 * eps, atol=0)
    near = max(30 * eps, 1e-12)
    torch.testing.assert_close(q.psi[:, 1], psi.expand(2, *psi.shape), rtol=near, atol=near)
    assert ((q.alpha[:, 0] - p.alpha0).abs() > 0.01).all()
    tolerance = 1e-4 if dtype == torch.float32 else 1e-12
    for kl in q.kl():
        assert kl[:, 1].abs().max() < tolerance
        assert (kl[:, 0] > 1e-3).all()


def test_full_precision_with_diagonal_votes_is_the_wishart_rule():
    """Where every scatter matrix is diagonal, the full model and the released code's diagonal one coincide."""
    axes = torch.tensor([[1.0, 0], [-1.0, 0], [0, 2.0], [0, -2.0]], dtype=F64)
    V, a = axes[None, None, :, None].expand(1, 1, 4, 2, 2), torch.ones(1, 1, 4, dtype=F64)
    results = [
        vb_routing(a, V, torch.arange(4)[None], Prior(dim=2, precision=p, dtype=F64)) for p in ("full", "wishart")
    ]
    torch.testing.assert_close(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1].psi, torch.diag_embed(results[1][1].psi))


# --- the posterior's methods ------------------------------------------------------------------------------------


def routed(precision, dtype=torch.float32, batch=2):
    a, V, child = literal.random_problem(2, dtype=dtype, batch=batch)
    prior = Prior(dim=4, precision=precision, dtype=dtype)
    V = V.requires_grad_()
    logit, q = vb_routing(a, V, child, prior)
    return prior, V, logit, q


@PRECISIONS
@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_results_have_the_shapes_and_dtype_of_the_votes(precision, dtype):
    _, _, logit, q = routed(precision, dtype)
    matrix = (2, 4, 3, 4, 4) if precision == "full" else (2, 4, 3, 4)
    shapes = [(2, 4, 3), (2, 4, 3, 4), (2, 4, 3), matrix, (2, 4, 3), (2, 4, 9, 3)]
    assert [x.shape for x in q[:-2]] == shapes
    assert logit.shape == (2, 4, 3)
    mu, Lambda = q.sample()
    assert (mu.shape, Lambda.shape) == (q.m.shape, q.psi.shape)
    assert q.variance().shape == q.m.shape
    for of_pi, of_parameters in (q.entropy(), q.kl()):
        assert (of_pi.shape, of_parameters.shape) == ((2, 4), (2, 4, 3))
    assert q.psi.dtype == (F64 if q.full else dtype)  # a matrix keeps what its determinant needs
    everything = (logit, *q._replace(psi=q.m)[:-2], q.temper, *q.prior, mu, Lambda, q.variance(), *q.entropy(), *q.kl())
    assert {x.dtype for x in everything} == {dtype}
    assert q.full == (precision == "full")


@PRECISIONS
@pytest.mark.parametrize("scale", [1.0, 1e4])
@pytest.mark.parametrize("given", [dict(), dict(alpha0=1e4), dict(nu0=1e6)], ids=str)
def test_entropies_divergences_and_the_bound_of_float32_are_those_of_float64(precision, scale, given):
    found = []
    for dtype in (torch.float32, F64):
        a, V, child = literal.random_problem(2, scale=scale)
        a, V = a.float().to(dtype), V.float().to(dtype)
        prior = Prior(dim=4, precision=precision, dtype=dtype, **given)
        _, q = vb_routing(a, V, child, prior)
        found.append([*q.entropy(), *q.kl(), q.elbo(a, V).total])
        assert (q.kl()[0] > -1e-6).all()  # of pi: of alphas that differ little from the prior's
    for single, double in zip(*found, strict=True):
        torch.testing.assert_close(single.double(), double, rtol=2e-3, atol=2e-3)


@PRECISIONS
def test_variance_is_one_over_the_mean_precision(precision):
    _, _, _, q = routed(precision, F64)
    mean = q.psi * (q.nu[..., None, None] if q.full else q.nu[..., None])
    precision_of_entry = torch.stack([mean[..., d, d] for d in range(4)], -1) if q.full else mean
    torch.testing.assert_close(q.variance() * precision_of_entry, torch.ones_like(q.m))


@PRECISIONS
def test_samples_have_the_posteriors_means_and_differ(precision):
    _, _, _, q = routed(precision, F64, batch=1)
    many = Posterior(*(x.detach().expand(4000, *x.shape[1:]) for x in q[:-2]), q.prior)
    torch.manual_seed(0)
    mu, Lambda = many.sample()
    mean = q.psi * (q.nu[..., None, None] if q.full else q.nu[..., None])
    for samples, expected in ((mu, q.m), (Lambda, mean)):
        z = (samples.mean(0) - expected[0]) / (samples.std(0) / math.sqrt(4000))
        assert z.abs().max() < 5
        assert not torch.equal(samples[0], samples[1])


@PRECISIONS
def test_samples_pass_gradients_to_the_votes(precision):
    _, V, _, q = routed(precision)
    for sample in q.sample():
        (grad,) = torch.autograd.grad(sample.sum(), V, retain_graph=True)
        assert grad.isfinite().all()
        assert grad.abs().max() > 0


@PRECISIONS
def test_variance_falls_with_agreement(precision):
    a, V, child = literal.random_problem(2)
    prior = Prior(dim=4, precision=precision, dtype=F64)
    spread, tight = (vb_routing(a, scale * V, child, prior, iters=1)[1] for scale in (1.0, 0.1))
    assert (tight.variance() < spread.variance()).all()


def log_prob(mu, Lambda, m, kappa, psi, nu):
    """Log density of a Gaussian-Gamma or Gaussian-Wishart, by torch.distributions."""
    if psi.ndim > m.ndim:
        normal = MultivariateNormal(m, precision_matrix=kappa[..., None, None] * Lambda)
        return normal.log_prob(mu) + Wishart(nu, covariance_matrix=psi).log_prob(Lambda)
    normal = Normal(m, (kappa[..., None] * Lambda).rsqrt())
    return (normal.log_prob(mu) + Gamma(nu[..., None] / 2, 1 / (2 * psi)).log_prob(Lambda)).sum(-1)


@pytest.mark.parametrize("precision", ["gamma", "full"])
def test_entropy_and_divergence_are_means_over_samples(precision):
    prior, _ = random_prior(4, precision, 3, 4, excess=4.0)
    a, V, child = literal.random_problem(4, batch=1)
    _, q = vb_routing(a, V, child, prior)
    p = prior()
    psi0 = torch.linalg.inv(p.inv_Psi0) if q.full else 1 / p.inv_Psi0
    torch.manual_seed(0)
    many = Posterior(*(x.expand(4000, *x.shape[1:]) for x in q[:-2]), q.prior)
    mu, Lambda = many.sample()
    ln_q = log_prob(mu, Lambda, many.m, many.kappa, many.psi, many.nu)
    ln_p = log_prob(mu, Lambda, p.m0.expand_as(mu), p.kappa0, psi0.expand_as(Lambda), p.nu0.expand(4000, 4, 3))
    for samples, expected in ((-ln_q, q.entropy()[1][0]), (ln_q - ln_p, q.kl()[1][0])):
        z = (samples.mean(0) - expected) / (samples.std(0) / math.sqrt(4000))
        assert z.abs().max() < 5
    pi, pi0 = Dirichlet(q.alpha), Dirichlet(p.alpha0)
    torch.testing.assert_close(q.entropy()[0], pi.entropy())
    torch.testing.assert_close(q.kl()[0], kl_divergence(pi, pi0))


@PRECISIONS
@pytest.mark.parametrize("case", literal.extreme_inputs())
def test_methods_of_extreme_posteriors_are_finite(precision, case):
    torch.manual_seed(0)
    a, V, child = literal.extreme_inputs()[case]
    prior = Prior(dim=4, precision=precision)
    _, q = vb_routing(a, V, child, prior)
    for value in (*q.sample(), q.variance(), *q.entropy(), *q.kl(), *q.elbo(a, V)):
        assert value.isfinite().all()


# --- the module, and errors -------------------------------------------------------------------------------------


@RULES
def test_module_is_the_function_with_its_own_parameters(precision, activation):
    module, a, V, child = small_routing(precision, activation, iters=2)
    logit, q = module(a, V, child)
    options = dict(iters=2, activation=activation, beta_a=module.beta_a, beta_u=module.beta_u)
    expected, p = vb_routing(a, V, child, module.prior, **options)
    for x, y in zip((logit, *q[:-2]), (expected, *p[:-2]), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)
    assert f"iters=2, activation={activation!r}" in repr(module)


def test_module_keeps_a_copy_of_its_prior():
    prior = Prior(dim=4, learn="all")
    one, two = VBRouting(3, 4, prior=prior), VBRouting(3, 4, prior=prior)
    assert not {id(p) for p in one.parameters()} & {id(p) for p in (*two.parameters(), *prior.parameters())}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(activation="sigmoid"), "activation must be one of .* got 'sigmoid'"),
        (dict(temper=0.0), "temper must be a number above 0 and at most 100, got 0.0"),
        (dict(temper=float("nan")), "temper must be a number above 0 and at most 100, got nan"),
        (
            dict(activation="information", prior=Prior(dim=4, precision="wishart")),
            "activation='information' needs precision='gamma' or 'full'",
        ),
        (dict(prior=Prior(dim=5)), r"dim=5"),
        (dict(iters=0), "iters"),
        (dict(prior=Prior(alpha0=torch.ones(2), dim=4)), "prior .*alpha0.* 2.* 3"),
        (dict(prior=Prior(Psi0=torch.ones(5, 4), dim=4)), "prior .*Psi0.* 5.* 3"),
        (dict(prior=Prior(nu0=torch.full((1,), 9.0), dim=4)), "prior .*nu0.* 1.* 3"),
    ],
)
def test_wrong_options_raise_an_error_that_names_them(options, message):
    a, V, child = literal.random_problem(0, dtype=torch.float32)
    with pytest.raises(ValueError, match=message):
        VBRouting(3, 4, **options)
    with pytest.raises(ValueError, match=message):
        vb_routing(a, V, child, **({"prior": Prior(dim=4)} | options))


def test_a_prior_per_type_does_not_multiply_a_single_parent():
    a, V, child = literal.random_problem(0, parents=1)
    with pytest.raises(ValueError, match=r"prior .*alpha0.* 3.* 1"):
        vb_routing(a, V, child, Prior(alpha0=torch.ones(3), dim=4))

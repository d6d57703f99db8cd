"""Each equation of distributions.py against scipy, torch.distributions, quadrature or Monte Carlo."""

import math

import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
from torch.distributions import Dirichlet, Gamma, MultivariateNormal, Normal, Wishart, kl_divergence

from vbcaps import distributions as dist

F64 = torch.float64
D = 4


def random_spd(gen, *batch, dim=D):
    A = torch.randn(*batch, dim, dim, generator=gen, dtype=F64)
    return A @ A.mT / dim + 0.2 * torch.eye(dim, dtype=F64)


def uniform(gen, low, high, *shape):
    return low + (high - low) * torch.rand(shape, generator=gen, dtype=F64)


def assert_mean(samples, expected, sigmas=5.0):
    """The mean over axis 0 lies within ``sigmas`` standard errors of ``expected``."""
    error = samples.std(0) / math.sqrt(len(samples))
    z = (samples.mean(0) - expected).abs() / error.clamp_min(1e-12)
    assert z.max() < sigmas, f"{z.max():.1f} standard errors away"


# --- special functions ------------------------------------------------------------------------------------------


@pytest.fixture(params=["eager", "exporting"])
def digamma_branch(request, monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: request.param == "exporting")


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 4e-6), (F64, 1e-12)])
def test_digamma_equals_scipy(digamma_branch, dtype, rtol):
    x = torch.logspace(-6, 6, 400, dtype=dtype)
    expected = torch.from_numpy(scipy.special.digamma(x.double().numpy()))
    torch.testing.assert_close(dist.digamma(x).double(), expected, rtol=rtol, atol=rtol)


def test_digamma_has_the_trigamma_gradient(digamma_branch):
    x = torch.logspace(-3, 4, 50, dtype=F64, requires_grad=True)
    (grad,) = torch.autograd.grad(dist.digamma(x).sum(), x)
    expected = torch.from_numpy(scipy.special.polygamma(1, x.detach().numpy()))
    torch.testing.assert_close(grad, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("dim", [1, 2, 5, 16])
def test_multivariate_digamma_is_the_slope_of_multigammaln(digamma_branch, dim):
    x = (dim - 1) / 2 + torch.tensor([0.3, 1.0, 7.5, 200.0], dtype=F64)
    h = 1e-4
    slope = [(scipy.special.multigammaln(v + h, dim) - scipy.special.multigammaln(v - h, dim)) / (2 * h) for v in x]
    torch.testing.assert_close(dist.multivariate_digamma(x, dim), torch.tensor(slope, dtype=F64), rtol=1e-6, atol=1e-6)
    sums = [sum(scipy.special.digamma(v - i / 2) for i in range(dim)) for v in x.tolist()]
    torch.testing.assert_close(dist.multivariate_digamma(x, dim), torch.tensor(sums, dtype=F64), rtol=1e-11, atol=1e-11)


# --- Cholesky ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, F64])
def test_cholesky_of_a_well_conditioned_matrix_is_the_plain_one(dtype):
    A = random_spd(torch.Generator().manual_seed(0), 50, dim=16).to(dtype)
    tolerance = 0 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(dist.cholesky(A), torch.linalg.cholesky(A), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("dim", [2, 4, 16])
@pytest.mark.parametrize("scale", [1e8, 1e16, 1e24])
def test_cholesky_never_fails_on_one_far_vote(dtype, dim, scale):
    """I + scale x x^T: the last pivots are lost to rounding, the matrix that is factorised stays within it."""
    gen = torch.Generator().manual_seed(dim)
    x = torch.randn(300, dim, generator=gen, dtype=dtype)
    A = (torch.eye(dim, dtype=dtype) + scale * x[:, :, None] * x[:, None, :]).requires_grad_()
    L = dist.cholesky(A)
    error = (L @ L.mT - A).abs().amax((-2, -1)) / A.diagonal(dim1=-2, dim2=-1).sum(-1)
    assert error.max() < 4 * dim * torch.finfo(dtype).eps
    (grad,) = torch.autograd.grad(dist.logdet(A).sum(), A)
    assert grad.isfinite().all()


def test_cholesky_never_fails_on_a_float64_copy_of_a_matrix_spoiled_by_float32():
    gen = torch.Generator().manual_seed(0)
    Q = torch.linalg.qr(torch.randn(300, 6, 6, generator=gen, dtype=F64)).Q
    A = Q * torch.logspace(-6, 6, 6, dtype=F64) @ Q.mT
    A = (0.5 * (A + A.mT)).float().double()
    assert torch.linalg.eigvalsh(A).min() < 0
    L = dist.cholesky(A)
    error = (L @ L.mT - A).abs().amax((-2, -1)) / A.diagonal(dim1=-2, dim2=-1).sum(-1)
    assert error.max() < 12 * torch.finfo(torch.float32).eps


def test_logdet_equals_numpy():
    A = random_spd(torch.Generator().manual_seed(1), 20)
    torch.testing.assert_close(dist.logdet(A), torch.from_numpy(np.linalg.slogdet(A.numpy())[1]), rtol=1e-10, atol=0)


# --- expectations -----------------------------------------------------------------------------------------------


def test_expected_log_pi_is_the_mean_of_log_samples():
    alpha = np.array([0.7, 2.0, 5.5])
    ln_pi = np.log(scipy.stats.dirichlet.rvs(alpha, size=40_000, random_state=0))
    assert_mean(torch.from_numpy(ln_pi), dist.expected_log_pi(torch.from_numpy(alpha)))
    # The slope of the log normaliser ln B(alpha) is E[ln pi].
    leaf = torch.tensor(alpha, requires_grad=True)
    (slope,) = torch.autograd.grad(leaf.lgamma().sum() - leaf.sum().lgamma(), leaf)
    torch.testing.assert_close(dist.expected_log_pi(leaf.detach()), slope)


def test_expected_logdet_gamma_equals_quadrature():
    psi, nu = torch.tensor([0.3, 1.7, 6.0], dtype=F64), torch.tensor(3.5, dtype=F64)
    law = [scipy.stats.gamma(nu.item() / 2, scale=2 * p) for p in psi.tolist()]
    expected = sum(g.expect(np.log) for g in law)
    assert dist.expected_logdet_gamma(psi.log(), nu).item() == pytest.approx(expected, rel=1e-7)
    assert [g.mean() for g in law] == pytest.approx((nu * psi).tolist())


def test_expected_logdet_wishart_is_the_mean_of_scipy_samples():
    Psi = random_spd(torch.Generator().manual_seed(2))
    nu = 5.5
    samples = scipy.stats.wishart.rvs(nu, Psi.numpy(), size=20_000, random_state=1)
    got = dist.expected_logdet_wishart(torch.logdet(Psi), torch.tensor(nu, dtype=F64), D)
    assert_mean(torch.from_numpy(np.linalg.slogdet(samples)[1]), got)


# --- Dirichlet --------------------------------------------------------------------------------------------------


def test_dirichlet_entropy_and_kl_equal_torch():
    gen = torch.Generator().manual_seed(3)
    alpha, alpha0 = uniform(gen, 0.1, 20, 10, 5), uniform(gen, 0.1, 5, 10, 5)
    torch.testing.assert_close(dist.dirichlet_entropy(alpha), Dirichlet(alpha).entropy())
    torch.testing.assert_close(dist.dirichlet_kl(alpha, alpha0), kl_divergence(Dirichlet(alpha), Dirichlet(alpha0)))
    scalar = torch.tensor(0.7, dtype=F64)
    same = kl_divergence(Dirichlet(alpha), Dirichlet(scalar.expand(10, 5)))
    torch.testing.assert_close(dist.dirichlet_kl(alpha, scalar), same)


# --- Gaussian-Gamma ---------------------------------------------------------------------------------------------


def gaussian_gamma_parameters(seed, *batch):
    gen = torch.Generator().manual_seed(seed)
    m, psi = uniform(gen, -2, 2, *batch, D), uniform(gen, 0.2, 3, *batch, D)
    return m, uniform(gen, 0.3, 8, *batch), psi, uniform(gen, 0.8, 12, *batch)


def gamma_law(psi, nu):
    return Gamma(nu[..., None].expand_as(psi) / 2, 1 / (2 * psi))


def over_gamma(law, f):
    """sum_d E[f(lambda_d, d)] by quadrature."""
    shape, scale = law.concentration.tolist(), (1 / law.rate).tolist()
    laws = [scipy.stats.gamma(*entry) for entry in zip(shape, [0.0] * len(scale), scale, strict=True)]
    return sum(g.expect(lambda lam, d=d: f(lam, d)) for d, g in enumerate(laws))


@pytest.mark.parametrize("seed", range(3))
def test_gaussian_gamma_entropy_is_that_of_the_gamma_plus_the_expected_one_of_the_normal(seed):
    _, kappa, psi, nu = gaussian_gamma_parameters(seed)
    law = gamma_law(psi, nu)
    normal = over_gamma(law, lambda lam, d: scipy.stats.norm(scale=(kappa.item() * lam) ** -0.5).entropy())
    expected = law.entropy().sum().item() + normal
    assert dist.gaussian_gamma_entropy(kappa, psi, nu).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_gaussian_gamma_kl_is_that_of_the_gammas_plus_the_expected_one_of_the_normals(seed):
    m, kappa, psi, nu = gaussian_gamma_parameters(seed)
    m0, kappa0, psi0, nu0 = gaussian_gamma_parameters(seed + 10)
    law = gamma_law(psi, nu)

    def normals(lam, d):
        q = Normal(m[d], (kappa * lam) ** -0.5)
        return kl_divergence(q, Normal(m0[d], (kappa0 * lam) ** -0.5)).item()

    expected = kl_divergence(law, gamma_law(psi0, nu0)).sum().item() + over_gamma(law, normals)
    got = dist.gaussian_gamma_kl(m, kappa, psi, nu, m0, kappa0, 1 / psi0, nu0)
    assert got.item() == pytest.approx(expected, rel=1e-5)


# --- Gaussian-Wishart -------------------------------------------------------------------------------------------


def gaussian_wishart_parameters(seed, *batch):
    gen = torch.Generator().manual_seed(seed)
    m, Psi = uniform(gen, -1, 1, *batch, D), random_spd(gen, *batch)
    return m, uniform(gen, 0.3, 8, *batch), Psi, uniform(gen, D, 12, *batch)


def scipy_precisions(Psi, nu, samples=4000):
    return torch.from_numpy(scipy.stats.wishart.rvs(nu.item(), Psi.numpy(), size=samples, random_state=0))


@pytest.mark.parametrize("seed", range(3))
def test_gaussian_wishart_entropy_is_that_of_the_wishart_plus_the_expected_one_of_the_normal(seed):
    m, kappa, Psi, nu = gaussian_wishart_parameters(seed)
    got = dist.gaussian_wishart_entropy(kappa, Psi, nu)
    of_wishart = scipy.stats.wishart.entropy(nu.item(), Psi.numpy())
    of_normal = MultivariateNormal(m, precision_matrix=kappa * scipy_precisions(Psi, nu)).entropy()
    assert_mean(of_normal, got - of_wishart)
    # The same mean in closed form: E[ln det Lambda] is the slope of the Wishart's log normaliser.
    slope = (scipy.special.multigammaln(nu / 2 + 1e-4, D) - scipy.special.multigammaln(nu / 2 - 1e-4, D)) / 2e-4
    E_lndet = slope + D * math.log(2) + np.linalg.slogdet(Psi.numpy())[1]
    closed = 0.5 * (D * math.log(2 * math.pi * math.e) - D * math.log(kappa) - E_lndet)
    assert got.item() == pytest.approx(of_wishart + closed, rel=1e-7)


@pytest.mark.parametrize("seed", range(3))
def test_gaussian_wishart_kl_is_that_of_the_wisharts_plus_the_expected_one_of_the_normals(seed):
    m, kappa, Psi, nu = gaussian_wishart_parameters(seed)
    m0, kappa0, Psi0, nu0 = gaussian_wishart_parameters(seed + 10)
    got = dist.gaussian_wishart_kl(m, kappa, Psi, nu, m0, kappa0, torch.linalg.inv(Psi0), nu0)
    of_wisharts = kl_divergence(Wishart(nu, covariance_matrix=Psi), Wishart(nu0, covariance_matrix=Psi0))

    def of_normals(Lambda):
        q, p = (MultivariateNormal(*x) for x in ((m, None, kappa * Lambda), (m0, None, kappa0 * Lambda)))
        return kl_divergence(q, p)

    assert_mean(of_normals(scipy_precisions(Psi, nu)), got - of_wisharts)
    # The normals' divergence is linear in Lambda, so that of the mean precision is its mean.
    torch.testing.assert_close(got, of_wisharts + of_normals(nu * Psi), rtol=1e-8, atol=0)


def test_one_pose_entry_makes_the_two_families_one():
    m, kappa, psi, nu = (x[..., :1] if x.ndim == 2 else x for x in gaussian_gamma_parameters(4, 6))
    m0, kappa0, psi0, nu0 = (x[..., :1] if x.ndim == 2 else x for x in gaussian_gamma_parameters(5, 6))
    full, full0 = psi[..., None], psi0[..., None]
    torch.testing.assert_close(
        dist.gaussian_wishart_entropy(kappa, full, nu), dist.gaussian_gamma_entropy(kappa, psi, nu)
    )
    torch.testing.assert_close(
        dist.gaussian_wishart_kl(m, kappa, full, nu, m0, kappa0, 1 / full0, nu0),
        dist.gaussian_gamma_kl(m, kappa, psi, nu, m0, kappa0, 1 / psi0, nu0),
    )
    torch.testing.assert_close(
        dist.expected_logdet_wishart(psi.log().sum(-1), nu, 1), dist.expected_logdet_gamma(psi.log(), nu)
    )


@pytest.mark.parametrize("family", ["gamma", "wishart"])
def test_divergence_from_itself_is_zero_and_else_positive(family):
    make, kl = {
        "gamma": (gaussian_gamma_parameters, dist.gaussian_gamma_kl),
        "wishart": (gaussian_wishart_parameters, dist.gaussian_wishart_kl),
    }[family]
    q, p = make(6, 20), make(7, 20)

    def prior(m, kappa, psi, nu):
        return m, kappa, (1 / psi if family == "gamma" else torch.linalg.inv(psi)), nu

    torch.testing.assert_close(kl(*q, *prior(*q)), torch.zeros(20, dtype=F64), rtol=0, atol=1e-10)
    assert (kl(*q, *prior(*p)) > 0).all()


# --- samples ----------------------------------------------------------------------------------------------------

SAMPLES = 40_000
M, KAPPA, NU = torch.tensor([0.5, -1.0, 2.0], dtype=F64), torch.tensor(2.5, dtype=F64), torch.tensor(11.0, dtype=F64)
PSI = torch.tensor([0.2, 0.5, 1.5], dtype=F64)
FULL_PSI = random_spd(torch.Generator().manual_seed(8), dim=3)
SAMPLERS = pytest.mark.parametrize(
    ("sample", "Psi"),
    [
        pytest.param(dist.sample_gaussian_gamma, PSI, id="gamma"),
        pytest.param(dist.sample_gaussian_wishart, FULL_PSI, id="wishart"),
    ],
)


def draw(sample, Psi, nu=NU, leaves=False):
    """SAMPLES draws, and their parameters with one copy per draw, so that each draw has a gradient of its own."""
    torch.manual_seed(0)
    copies = [x.expand(SAMPLES, *x.shape).clone().requires_grad_(leaves) for x in (M, KAPPA, Psi, nu)]
    return *sample(*copies), copies


def as_matrix(Lambda):
    return Lambda if Lambda.ndim == 3 else torch.diag_embed(Lambda)


@SAMPLERS
def test_sample_moments_are_the_distributions(sample, Psi):
    mu, Lambda, _ = draw(sample, Psi)
    assert_mean(mu, M)
    assert_mean(Lambda, NU * Psi)
    # E[Lambda^-1]: of the Wishart Psi^-1 / (nu - D - 1), of each Gamma 1 / (psi (nu - 2)).
    cov = torch.linalg.inv(Psi) / (NU - 4) if Psi.ndim == 2 else torch.diag(1 / (Psi * (NU - 2)))
    x = mu - M
    assert_mean(x[:, :, None] * x[:, None, :], cov / KAPPA)
    logdet = dist.expected_logdet_wishart(torch.logdet(Psi), NU, 3) if Psi.ndim == 2 else None
    logdet = dist.expected_logdet_gamma(Psi.log(), NU) if logdet is None else logdet
    assert_mean(torch.logdet(as_matrix(Lambda)), logdet)


@SAMPLERS
@pytest.mark.parametrize("nu", [2.3, 11.0])
def test_sample_laws_are_the_distributions(sample, Psi, nu):
    """Kolmogorov-Smirnov: of the precisions, and of the mean given the precision."""
    mu, Lambda, _ = draw(sample, Psi, torch.tensor(nu, dtype=F64))
    Lambda = as_matrix(Lambda)
    for d in range(3):
        scale = Psi[d, d] if Psi.ndim == 2 else Psi[d]
        assert scipy.stats.kstest((Lambda[:, d, d] / scale).numpy(), scipy.stats.chi2(nu).cdf).pvalue > 1e-4
    x = mu - M
    distance = KAPPA * torch.einsum("nd,nde,ne->n", x, Lambda, x)
    assert scipy.stats.kstest(distance.numpy(), scipy.stats.chi2(3).cdf).pvalue > 1e-4


@SAMPLERS
def test_gradients_of_samples_have_the_mean_of_the_analytic_ones(sample, Psi):
    """d E[Lambda] / d nu = Psi, d E[Lambda] / d Psi = nu, d E[mu] / d m = 1, d E[x^2] / d kappa = -E[x^2] / kappa."""
    mu, Lambda, (m, kappa, psi, nu) = draw(sample, Psi, leaves=True)
    weight = torch.tensor([0.3, 1.0, -0.7], dtype=F64)
    weight = weight.outer(weight) if Psi.ndim == 2 else weight
    by_psi, by_nu = torch.autograd.grad((weight * Lambda).sum(), (psi, nu), retain_graph=True)
    assert_mean(by_nu, (weight * Psi).sum())
    by_psi = 0.5 * (by_psi + by_psi.mT) if Psi.ndim == 2 else by_psi
    assert_mean(by_psi, NU * weight)

    (by_m,) = torch.autograd.grad(mu.sum(), m, retain_graph=True)
    torch.testing.assert_close(by_m, torch.ones_like(m))

    cov = torch.linalg.inv(Psi) / (NU - 4) if Psi.ndim == 2 else torch.diag(1 / (Psi * (NU - 2)))
    E_x2 = cov.diagonal() / KAPPA
    by_kappa, by_psi, by_nu = torch.autograd.grad((mu - M).square().sum(), (kappa, psi, nu))
    assert_mean(by_kappa, -E_x2.sum() / KAPPA)
    assert_mean(by_nu, -E_x2.sum() / (NU - (4 if Psi.ndim == 2 else 2)))
    if Psi.ndim == 1:
        assert_mean(by_psi, -E_x2 / Psi)
    else:  # d tr(Psi^-1) = -tr(Psi^-2 dPsi)
        inv = torch.linalg.inv(Psi)
        assert_mean(0.5 * (by_psi + by_psi.mT), -inv @ inv / (NU - 4) / KAPPA)


@SAMPLERS
@pytest.mark.parametrize("excess", [1e-5, 1e-3, 1.0, 1e6])
def test_samples_and_their_gradients_are_finite_for_any_legal_nu_in_float32(sample, Psi, excess):
    torch.manual_seed(0)
    nu = torch.tensor((2.0 if Psi.ndim == 2 else 0.0) + excess)
    leaves = [x.float().expand(500, *x.shape).clone().requires_grad_() for x in (M, KAPPA, Psi, nu)]
    mu, Lambda = sample(*leaves)
    assert mu.isfinite().all()
    assert Lambda.isfinite().all()
    for grad in torch.autograd.grad(mu.sum() + Lambda.sum(), leaves):
        assert grad.isfinite().all()


@pytest.mark.parametrize("shape", [0.1, 0.5, 1.0, 8.5, 20.0, 500.0, 1e5])
def test_a_gamma_number_from_a_uniform_one_is_scipys_quantile(shape):
    u = torch.tensor([1e-6, 0.01, 0.3, 0.5, 0.7, 0.99, 1 - 1e-6], dtype=torch.float64)
    a = torch.full_like(u, shape, requires_grad=True)
    x = dist.gamma_from_uniform(a, u)
    expected = scipy.stats.gamma.ppf(u.numpy(), shape)
    torch.testing.assert_close(x.detach(), torch.from_numpy(expected), rtol=1e-8, atol=1e-300)
    (slope,) = torch.autograd.grad(x.sum(), a)
    step = 1e-4 * shape
    by_hand = (scipy.stats.gamma.ppf(u.numpy(), shape + step) - scipy.stats.gamma.ppf(u.numpy(), shape - step)) / (
        2 * step
    )
    torch.testing.assert_close(slope, torch.from_numpy(by_hand), rtol=2e-3, atol=1e-12)


def test_normal_numbers_from_uniform_ones_are_finite_quantiles():
    u = torch.tensor([0.0, 0.1, 0.5, 0.9, 1 - 2**-24])
    z = dist.normal_from_uniform(u)
    assert z.isfinite().all()
    torch.testing.assert_close(z[1:], torch.from_numpy(scipy.stats.norm.ppf(u[1:].double().numpy())))

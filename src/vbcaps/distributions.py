r"""Expectations, entropies, divergences and samples of the distributions in VB routing: one function, one equation.

Symbols are the paper's. A diagonal precision is a product of Gaussian-Gamma factors
$N(\mu_d \mid m_d, (\kappa \lambda_d)^{-1}) \, Ga(\lambda_d \mid \nu/2, 1/(2 \psi_d))$, so that $E[\lambda] = \nu \psi$;
a full one is the Gaussian-Wishart $N(\mu \mid m, (\kappa \Lambda)^{-1}) \, Wi(\Lambda \mid \Psi, \nu)$, so that
$E[\Lambda] = \nu \Psi$.

Shapes: leading axes are free (``...``, in routing ``n l j``); ``d``, ``e`` are pose entries, D of them. So alpha is
``... j``, kappa and nu are ``...``, m and a diagonal psi ``... d``, a full Psi ``... d e``.
"""

import math

import torch
from torch import Tensor

LN2 = math.log(2.0)
LN2PI = math.log(2.0 * math.pi)


def digamma(x: Tensor) -> Tensor:
    r"""Return $\psi(x)$ for $x > 0$.

    ONNX has no digamma, so an exported graph carries the recurrence $\psi(x) = \psi(x + 1) - 1/x$ up to $x + 8$
    and the asymptotic series there (the fused kernels use the same one).
    """
    if not torch.compiler.is_exporting():
        return torch.digamma(x)
    shift = (1 / (x[..., None] + torch.arange(8, dtype=x.dtype, device=x.device))).sum(-1)
    y = x + 8
    u = 1 / (y * y)
    series = u * (1 / 12 - u * (1 / 120 - u * (1 / 252 - u * (1 / 240 - u / 132))))
    return y.log() - 0.5 / y - series - shift


def lgamma(x: Tensor) -> Tensor:
    r"""Return $\ln \Gamma(x)$ for $x > 0$; an exported graph carries recurrence and series, as in `digamma`."""
    if not torch.compiler.is_exporting():
        return torch.lgamma(x)
    shift = (x[..., None] + torch.arange(8, dtype=x.dtype, device=x.device)).log().sum(-1)
    y = x + 8
    u = 1 / (y * y)
    series = (1 / 12 - u * (1 / 360 - u * (1 / 1260 - u / 1680))) / y
    return (y - 0.5) * y.log() - y + 0.5 * LN2PI + series - shift


def multivariate_digamma(x: Tensor, dim: int) -> Tensor:
    r"""Return $\sum_{i=0}^{D-1} \psi(x - i/2)$, for $x > (D-1)/2$."""
    steps = torch.arange(dim, device=x.device, dtype=x.dtype) / 2
    return digamma(x.unsqueeze(-1) - steps).sum(-1)


def cholesky(A: Tensor) -> Tensor:
    r"""Return the lower factor of a positive definite A that rounding may have spoiled.

    $D \epsilon \operatorname{tr}(A)$, the size of that rounding, is added to the diagonal: with the epsilon of float64,
    which changes nothing in float32, and where A still has no factor with that of float32, from which a float64 A may
    have come too.
    """
    D = A.shape[-1]
    eye = torch.eye(D, dtype=A.dtype, device=A.device)
    trace = A.diagonal(dim1=-2, dim2=-1).sum(-1).detach()
    fine, coarse = (D * torch.finfo(dtype).eps * trace for dtype in (torch.float64, torch.float32))
    spoiled = torch.linalg.cholesky_ex(A.detach() + fine[..., None, None] * eye).info > 0
    jitter = torch.where(spoiled, coarse, fine)
    return torch.linalg.cholesky(A + jitter[..., None, None] * eye)


def logdet(A: Tensor) -> Tensor:
    r"""Return $\ln \det A = 2 \operatorname{tr} \ln L$ with $A = L L^T$ positive definite.

    Example:
        >>> logdet(torch.eye(3) * 2) / LN2
        tensor(3.0000)
    """
    return 2 * cholesky(A).diagonal(dim1=-2, dim2=-1).log().sum(-1)


# --- expectations (Algorithm 1, lines 20 to 22) -----------------------------------------------------------------


def expected_log_pi(alpha: Tensor) -> Tensor:
    r"""Return $E[\ln \pi_j] = \psi(\alpha_j) - \psi(\sum_j \alpha_j)$ for $\pi \sim Dir(\alpha)$, ``... j``.

    Example:
        >>> expected_log_pi(torch.ones(2))  # a uniform share
        tensor([-1.0000, -1.0000])
    """
    return digamma(alpha) - digamma(alpha.sum(-1, keepdim=True))


def expected_logdet_gamma(log_psi: Tensor, nu: Tensor) -> Tensor:
    r"""Return $E[\ln \det \operatorname{diag}(\lambda)] = \sum_d \psi(\nu/2) + \ln 2 + \ln \psi_d$.

    Here $\lambda_d \sim Ga(\nu/2, 1/(2 \psi_d))$. ``log_psi`` is ``... d``, the result ``...``.

    Example:
        >>> expected_logdet_gamma(torch.zeros(16), torch.tensor(17.0)).shape
        torch.Size([])
    """
    D = log_psi.shape[-1]
    return log_psi.sum(-1) + D * (digamma(nu / 2) + LN2)


def expected_logdet_wishart(logdet_psi: Tensor, nu: Tensor, dim: int) -> Tensor:
    r"""Return $E[\ln \det \Lambda] = \sum_{i=0}^{D-1} \psi((\nu - i)/2) + D \ln 2 + \ln \det \Psi$.

    Here $\Lambda \sim Wi(\Psi, \nu)$ is D x D with D = ``dim``.

    Example:
        >>> expected_logdet_wishart(torch.tensor(0.0), torch.tensor(17.0), dim=16).shape
        torch.Size([])
    """
    return multivariate_digamma(nu / 2, dim) + dim * LN2 + logdet_psi


# --- Dirichlet --------------------------------------------------------------------------------------------------


def dirichlet_entropy(alpha: Tensor) -> Tensor:
    r"""Return $H[Dir(\alpha)] = \ln B(\alpha) - \sum_j (\alpha_j - 1) E[\ln \pi_j]$.

    Example:
        >>> dirichlet_entropy(torch.ones(2))
        tensor(0.)
    """
    log_beta = torch.lgamma(alpha).sum(-1) - torch.lgamma(alpha.sum(-1))
    return log_beta - ((alpha - 1) * expected_log_pi(alpha)).sum(-1)


def dirichlet_kl(alpha: Tensor, alpha0: Tensor) -> Tensor:
    r"""Return $KL[Dir(\alpha) \,\|\, Dir(\alpha_0)]$.

    It is $\ln B(\alpha_0) - \ln B(\alpha) + \sum_j (\alpha_j - \alpha_{0j}) E[\ln \pi_j]$.

    Example:
        >>> dirichlet_kl(torch.tensor([3.0, 2.0]), torch.tensor(1.0)) > 0
        tensor(True)
    """
    alpha0 = alpha0.expand_as(alpha)
    log_beta = torch.lgamma(alpha).sum(-1) - torch.lgamma(alpha.sum(-1))
    log_beta0 = torch.lgamma(alpha0).sum(-1) - torch.lgamma(alpha0.sum(-1))
    return log_beta0 - log_beta + ((alpha - alpha0) * expected_log_pi(alpha)).sum(-1)


# --- Gaussian-Gamma: diagonal precision -------------------------------------------------------------------------


def gaussian_gamma_entropy(kappa: Tensor, psi: Tensor, nu: Tensor) -> Tensor:
    r"""Return $H[q(\mu, \lambda)] = \sum_d E[H[N(\cdot, (\kappa \lambda_d)^{-1})]] + H[Ga(\nu/2, 1/(2 \psi_d))]$.

    Example:
        >>> gaussian_gamma_entropy(torch.tensor(1.0), torch.ones(16), torch.tensor(17.0)).shape
        torch.Size([])
    """
    kappa, nu = kappa[..., None], nu[..., None]
    s, log_rate = nu / 2, -LN2 - psi.log()
    gaussian = 0.5 * (1 + LN2PI - kappa.log() - (digamma(s) - log_rate))
    gamma = s - log_rate + torch.lgamma(s) + (1 - s) * digamma(s)
    return (gaussian + gamma).sum(-1)


def gaussian_gamma_kl(
    m: Tensor, kappa: Tensor, psi: Tensor, nu: Tensor, m0: Tensor, kappa0: Tensor, inv_psi0: Tensor, nu0: Tensor
) -> Tensor:
    r"""Return $KL[q(\mu, \lambda) \,\|\, p(\mu, \lambda)]$ of two Gaussian-Gammas, summed over d.

    ``inv_psi0`` is $1/\psi_0$.

    Example:
        >>> m, psi, one = torch.zeros(16), torch.ones(16), torch.tensor(1.0)
        >>> gaussian_gamma_kl(m, one, psi, 17 * one, m + 1, one, 1 / psi, 17 * one)  # E[lambda]/2 for each entry
        tensor(136.)
    """
    kappa, nu, kappa0, nu0 = kappa[..., None], nu[..., None], kappa0[..., None], nu0[..., None]
    s, s0 = nu / 2, nu0 / 2
    ratio = psi * inv_psi0  # rate0 / rate
    gaussian = 0.5 * (kappa.log() - kappa0.log() + kappa0 / kappa - 1 + kappa0 * nu * psi * (m - m0) ** 2)
    gamma = (s - s0) * digamma(s) - lgamma(s) + lgamma(s0) - s0 * ratio.log() + s * (ratio - 1)
    return (gaussian + gamma).sum(-1)


def sample_gaussian_gamma(
    m: Tensor, kappa: Tensor, psi: Tensor, nu: Tensor, u: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    r"""Draw $\lambda \sim Ga(\nu/2, 1/(2 \psi))$, then $\mu \sim N(m, (\kappa \lambda)^{-1})$, differentiably.

    Args:
        m, kappa, psi, nu: the Gaussian-Gamma; m and psi ``... d``, kappa and nu ``...``.
        u: uniform numbers in [0, 1) that decide the draw, ``... 2d``; without them torch's random numbers.

    Returns:
        $\mu$ and $\lambda$, both ``... d``.

    Example:
        >>> m, psi, one = torch.zeros(5, 16), torch.ones(5, 16), torch.ones(5)
        >>> mu, lam = sample_gaussian_gamma(m, one, psi, 17 * one)
        >>> mu.shape, lam.shape
        (torch.Size([5, 16]), torch.Size([5, 16]))
    """
    shape = (nu / 2)[..., None].expand_as(psi)
    if u is None:
        noise, gamma = torch.randn_like(m), torch._standard_gamma(shape)
    else:
        of_mu, of_lambda = u.chunk(2, -1)
        noise, gamma = normal_from_uniform(of_mu).to(m.dtype), gamma_from_uniform(shape, of_lambda)
    # Shapes of 1e-3 and below underflow to 0 in float32; the smallest normal number keeps mu finite.
    lam = 2 * psi * gamma.clamp_min(torch.finfo(psi.dtype).tiny ** 0.5)
    mu = m + noise / (kappa[..., None] * lam).sqrt()
    return mu, lam


SMALLEST_UNIFORM = 1e-9  # uniform numbers of float32 are multiples of 2^-24, and may be 0


def normal_from_uniform(u: Tensor) -> Tensor:
    r"""Return $\Phi^{-1}(u)$ in float64: standard normal numbers from uniform ones.

    Example:
        >>> normal_from_uniform(torch.tensor([0.5, 0.975])).round(decimals=2)
        tensor([0.0000, 1.9600], dtype=torch.float64)
    """
    return torch.special.ndtri(u.double().clamp(SMALLEST_UNIFORM, 1 - SMALLEST_UNIFORM))


def gamma_from_uniform(shape: Tensor, u: Tensor) -> Tensor:
    r"""Return the quantile $F^{-1}(u)$ of $Ga(\text{shape}, 1)$, differentiably in the shape.

    Newton's method solves $\ln F(e^t) = \ln u$ for t (above the median $\ln(1 - F)$). Both sides are concave in t, so
    that the method converges from either side. It begins with the approximation of Wilson and Hilferty (1931).

    Example:
        >>> gamma_from_uniform(torch.tensor([1.0]), torch.tensor([0.5])).round(decimals=4)  # ln 2
        tensor([0.6931])
    """
    with torch.no_grad():
        a, p = shape.double(), u.double().clamp(SMALLEST_UNIFORM, 1 - SMALLEST_UNIFORM)
        root = 1 - 1 / (9 * a) + torch.special.ndtri(p) / (3 * a.sqrt())
        t = torch.where(root > 0.1, 3 * root.clamp_min(0.1).log() + a.log(), (p.log() + torch.lgamma(a + 1)) / a)
        for _ in range(8):
            t = t.clamp(-700, 700)
            slope = (a * t - t.exp() - torch.lgamma(a)).exp()  # dF/dt
            below, above = torch.special.gammainc(a, t.exp()), torch.special.gammaincc(a, t.exp())
            below, above = below.clamp_min(1e-300), above.clamp_min(1e-300)
            step = torch.where(p < 0.5, (p / below).log() * below, (above / (1 - p)).log() * above)
            t = t + torch.nan_to_num(step / slope).clamp(-5, 5)
        x = t.exp().to(shape.dtype)
        by_shape = torch._standard_gamma_grad(shape, x.clamp_min(torch.finfo(x.dtype).tiny))
    return x + by_shape * (shape - shape.detach())


# --- Gaussian-Wishart: full precision ---------------------------------------------------------------------------


def gaussian_wishart_entropy(kappa: Tensor, Psi: Tensor, nu: Tensor) -> Tensor:
    r"""Return $H[q(\mu, \Lambda)] = E[H[N(\cdot, (\kappa \Lambda)^{-1})]] + H[Wi(\Psi, \nu)]$.

    Example:
        >>> gaussian_wishart_entropy(torch.tensor(1.0), torch.eye(16), torch.tensor(17.0)).shape
        torch.Size([])
    """
    D = Psi.shape[-1]
    logdet_psi = logdet(Psi)
    gaussian = 0.5 * (D * (1 + LN2PI) - D * kappa.log() - expected_logdet_wishart(logdet_psi, nu, D))
    wishart = (
        0.5 * (D + 1) * logdet_psi
        + 0.5 * D * (D + 1) * LN2
        + torch.mvlgamma(nu / 2, D)
        - 0.5 * (nu - D - 1) * multivariate_digamma(nu / 2, D)
        + 0.5 * nu * D
    )
    return gaussian + wishart


def gaussian_wishart_kl(
    m: Tensor, kappa: Tensor, Psi: Tensor, nu: Tensor, m0: Tensor, kappa0: Tensor, inv_Psi0: Tensor, nu0: Tensor
) -> Tensor:
    r"""Return $KL[q(\mu, \Lambda) \,\|\, p(\mu, \Lambda)]$ of two Gaussian-Wisharts.

    ``inv_Psi0`` is $\Psi_0^{-1}$.

    Example:
        >>> m, Psi, one = torch.zeros(4), torch.eye(4), torch.tensor(1.0)
        >>> bool(gaussian_wishart_kl(m, one, Psi, 5 * one, m, one, Psi, 5 * one).abs() < 1e-4)
        True
    """
    D = Psi.shape[-1]
    distance = torch.einsum("...d,...de,...e->...", m - m0, Psi, m - m0)
    trace = (Psi * inv_Psi0).sum((-2, -1))  # tr(Psi0^-1 Psi), both symmetric
    logdet_ratio = logdet(Psi) + logdet(inv_Psi0)  # ln det Psi / det Psi0
    gaussian = 0.5 * (D * (kappa.log() - kappa0.log() + kappa0 / kappa - 1) + kappa0 * nu * distance)
    wishart = (
        0.5 * (nu - nu0) * multivariate_digamma(nu / 2, D)
        - 0.5 * nu0 * logdet_ratio
        + 0.5 * nu * (trace - D)
        + torch.mvlgamma(nu0 / 2, D)
        - torch.mvlgamma(nu / 2, D)
    )
    return gaussian + wishart


def sample_gaussian_wishart(m: Tensor, kappa: Tensor, Psi: Tensor, nu: Tensor) -> tuple[Tensor, Tensor]:
    r"""Draw $\Lambda = (L A)(L A)^T$ with $\Psi = L L^T$ and Bartlett's triangular A, then $\mu$, differentiably.

    Returns:
        $\mu$, ``... d``, and $\Lambda$, ``... d e``.

    Example:
        >>> m, Psi, one = torch.zeros(5, 4), torch.eye(4).expand(5, 4, 4), torch.ones(5)
        >>> mu, Lambda = sample_gaussian_wishart(m, one, Psi, 5 * one)
        >>> mu.shape, Lambda.shape
        (torch.Size([5, 4]), torch.Size([5, 4, 4]))
    """
    D = m.shape[-1]
    steps = torch.arange(D, dtype=m.dtype, device=m.device)
    chi2 = 2 * torch._standard_gamma((nu[..., None] - steps) / 2)
    tiny = torch.finfo(m.dtype).tiny ** 0.5
    A = torch.randn_like(Psi).tril(-1) + torch.diag_embed(chi2.clamp_min(tiny).sqrt())
    LA = cholesky(Psi) @ A
    noise = torch.randn_like(m)[..., None]
    # Lambda^-1/2 noise: (L A)^-T noise has covariance (L A A^T L^T)^-1.
    step = torch.linalg.solve_triangular(LA.transpose(-2, -1), noise, upper=True)[..., 0]
    return m + step / kappa[..., None].sqrt(), LA @ LA.transpose(-2, -1)

"""Variational Bayes routing: Algorithm 1 of De Sousa Ribeiro, Leontidis and Kollias (AAAI 2020).

Axes: n image, l parent position, i child slot in a receptive field, j parent type, d (e) pose entry.
"""

import copy
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from vbcaps.distributions import (
    LN2PI,
    cholesky,
    dirichlet_entropy,
    dirichlet_kl,
    expected_log_pi,
    expected_logdet_gamma,
    expected_logdet_wishart,
    gaussian_gamma_entropy,
    gaussian_gamma_kl,
    gaussian_wishart_entropy,
    gaussian_wishart_kl,
    logdet,
    sample_gaussian_gamma,
    sample_gaussian_wishart,
)
from vbcaps.prior import Prior, PriorValues
from vbcaps.routing.fields import check_iters, check_routing_inputs, softmax_over_parents

ACTIVATIONS = ("released", "paper")
THROUGH = ("all", "last")
Values = TypeVar("Values", "Posterior", PriorValues)


class Posterior(NamedTuple):
    """q(z) q(pi) prod_j q(mu_j, Lambda_j): what routing knows about each parent when it ends."""

    alpha: Tensor  # n l j    Dirichlet over the types of a field
    m: Tensor  # n l j d      mean
    kappa: Tensor  # n l j    precision scaling of the mean
    psi: Tensor  # n l j d    Psi_j: the diagonal, or n l j d e the full matrix, which is float64
    nu: Tensor  # n l j       degrees of freedom
    r: Tensor  # n l i j      responsibilities that the last update used; of kernels without a gradient

    @property
    def full(self) -> bool:
        return self.psi.ndim > self.m.ndim

    def sample(self) -> tuple[Tensor, Tensor]:
        """One differentiable draw of (mu, Lambda) per parent; Lambda is its diagonal where psi is."""
        draw = sample_gaussian_wishart if self.full else sample_gaussian_gamma
        mu, Lambda = draw(*(x.to(self.psi.dtype) for x in self[1:5]))
        return mu.to(self.m.dtype), Lambda.to(self.m.dtype)

    def variance(self) -> Tensor:
        """1 / diag(E[Lambda]), n l j d: the paper's sigma^2 of a capsule's pose."""
        psi = self.psi.diagonal(dim1=-2, dim2=-1) if self.full else self.psi
        return (1 / (self.nu[..., None] * psi)).to(self.m.dtype)

    def entropy(self) -> tuple[Tensor, Tensor]:
        """H[q(pi)] as n l, H[q(mu, Lambda)] as n l j; a diagonal psi is read as Gaussian-Gamma, as in ``kl``."""
        of_parameters = gaussian_wishart_entropy if self.full else gaussian_gamma_entropy
        q = in_float64(self)
        return self._rounded(dirichlet_entropy(q.alpha), of_parameters(q.kappa, q.psi, q.nu))

    def kl(self, prior: Prior) -> tuple[Tensor, Tensor]:
        """KL to the prior of q(pi) as n l, of q(mu, Lambda) as n l j."""
        of_parameters = gaussian_wishart_kl if self.full else gaussian_gamma_kl
        q, p = in_float64(self), in_float64(prior())
        return self._rounded(
            dirichlet_kl(q.alpha, p.alpha0),
            of_parameters(q.m, q.kappa, q.psi, q.nu, p.m0, p.kappa0, p.inv_Psi0, p.nu0),
        )

    def _rounded(self, of_pi: Tensor, of_parameters: Tensor) -> tuple[Tensor, Tensor]:
        return of_pi.to(self.m.dtype), of_parameters.to(self.m.dtype)


class ELBO(NamedTuple):
    """The evidence lower bound of each image and its terms, all ``n``; a child counts a_i times."""

    total: Tensor
    likelihood: Tensor  # E[ln p(v | z, mu, Lambda)]
    assignment: Tensor  # E[ln p(z | pi)]
    responsibility: Tensor  # H[q(z)]
    kl_pi: Tensor
    kl_parameters: Tensor


def vb_routing(
    a: Tensor,
    V: Tensor,
    child: Tensor,
    prior: Prior,
    *,
    children: int | None = None,
    iters: int = 3,
    activation: str = "released",
    through: str = "all",
    beta_a: Tensor | float = 0.0,
    beta_u: Tensor | float = 0.0,
) -> tuple[Tensor, Posterior]:
    """Route children to parents.

    Arguments:
        a: activations of the children, ``n l i``, in [0, 1].
        V: their votes, ``n l i j d``.
        child: ``l i`` (long), which lower capsule sits in slot i of field l; parents that see the same one compete.
        children: how many lower capsules there are; where not given, ``child`` is read, which makes a GPU wait.
        prior: the priors over pi, mu and Lambda, and with them the kind of precision.
        iters: how often q(pi, mu, Lambda) is updated.
        activation: the rule for the logit. ``"released"``, as in the authors' code: ``beta_a - (exp(E[ln pi_j]) H_j +
            beta_u)`` with the entropy ``H_j = D/2 ln(2 pi e) - E[ln|Lambda_j|]/2``. ``"paper"``, as printed:
            ``beta_a - (beta_u + E[ln pi_j] + E[ln|Lambda_j|]) r_j``, in which agreement lowers the activation.
        through: gradients go back through ``"all"`` iterations, or only through the ``"last"`` update of q(pi, mu,
            Lambda), as if the responsibilities it used were given.
        beta_a, beta_u: the offsets of that rule, a number or one per type ``j``.

    Returns:
        The logit of each parent's activation, ``n l j``, before BatchNorm and sigmoid; and the posterior.
    """
    children = check_routing_inputs(a, V, child, children, iters)
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {ACTIVATIONS}, got {activation!r}")
    check_through(through)
    check_prior(prior, *V.shape[3:])
    p, dtype = prior(), V.dtype
    if prior.precision == "full":  # float32 cannot factorise I + 1e8 x x^T
        a, V, p = a.double(), V.double(), in_float64(p)

    r = torch.full_like(V[..., 0], 1 / V.shape[3])  # n l i j
    for t in range(iters):
        q = update_q_parameters(r, a, V, p, prior.precision)
        E_ln_pi = expected_log_pi(q.alpha)
        E_lndet = expected_logdet(q, prior.precision)
        if t < iters - 1:  # nothing would read the last q(z)
            ln_p = 0.5 * (E_lndet[:, :, None] - expected_mahalanobis(V, q))
            r = softmax_over_parents(E_ln_pi[:, :, None] + ln_p, child, children)
            r = r.detach() if through == "last" else r

    if activation == "paper":
        r_j = (r * a[..., None]).sum(2)
        logit = beta_a - (beta_u + E_ln_pi + E_lndet) * r_j
    else:
        H = 0.5 * (V.shape[-1] * (1 + LN2PI) - E_lndet)
        logit = beta_a - (E_ln_pi.exp() * H + beta_u)
    psi = q.psi  # whose determinant float32 cannot keep either
    q = Posterior(*(value.to(dtype) for value in q))
    return logit.to(dtype), q._replace(psi=psi) if q.full else q


def update_q_parameters(r: Tensor, a: Tensor, V: Tensor, p: PriorValues, precision: str) -> Posterior:
    """Sufficient statistics and q*(pi, mu, Lambda).

    The paper centres the scatter at the votes' mean v~_j and adds kappa0 r_j / kappa_j (v~_j - m0)(v~_j - m0)^T.
    Centred at m_j it is the same matrix without 1/r_j, so a parent with r_j = 0 is the prior and not NaN.
    """
    R = r * a[..., None]  # n l i j
    r_j = R.sum(2)  # n l j
    alpha, kappa, nu = p.alpha0 + r_j, p.kappa0 + r_j, p.nu0 + r_j
    kappa0 = p.kappa0[..., None]
    m = (torch.einsum("nlij,nlijd->nljd", R, V) + kappa0 * p.m0) / kappa[..., None]
    X, x0 = V - m[:, :, None], p.m0 - m
    if precision == "full":
        S = torch.einsum("nlijd,nlije->nljde", R[..., None] * X, X)
        inv_Psi = p.inv_Psi0 + S + kappa0[..., None] * x0[..., :, None] * x0[..., None, :]
        psi = torch.cholesky_inverse(cholesky(inv_Psi))
    else:
        S = torch.einsum("nlij,nlijd->nljd", R, X.square())
        psi = 1 / (p.inv_Psi0 + S + kappa0 * x0.square())
    return Posterior(alpha, m, kappa, psi, nu, r)


def expected_logdet(q: Posterior, precision: str) -> Tensor:
    """E[ln det Lambda_j], ``n l j``, for the prior's kind of precision."""
    if precision == "gamma":
        return expected_logdet_gamma(q.psi.log(), q.nu)
    return expected_logdet_wishart(logdet(q.psi) if q.full else q.psi.log().sum(-1), q.nu, q.m.shape[-1])


def expected_mahalanobis(V: Tensor, q: Posterior) -> Tensor:
    """E[(v_ji - mu_j)^T Lambda_j (v_ji - mu_j)] = D/kappa_j + nu_j (v_ji - m_j)^T Psi_j (v_ji - m_j), ``n l i j``."""
    X = V - q.m[:, :, None]
    if q.full:
        distance = torch.einsum("nlijd,nlijd->nlij", torch.einsum("nlijd,nljde->nlije", X, q.psi), X)
        distance = q.nu[:, :, None] * distance
    else:
        distance = torch.einsum("nlijd,nljd->nlij", X.square(), q.nu[..., None] * q.psi)
    return V.shape[-1] / q.kappa[:, :, None] + distance


def elbo(a: Tensor, V: Tensor, q: Posterior, prior: Prior) -> ELBO:
    """The evidence lower bound that routing climbs.

    It is a bound from the second iteration on: the first responsibilities, 1/d_j, sum to one only for a child that
    a single field sees. For ``precision="wishart"`` it need not climb: that rule mixes two models. Its gradient goes
    through the responsibilities, too, which takes ``backend="reference"``.
    """
    dtype = V.dtype
    a, V, q = a.double(), V.double(), in_float64(q)
    E_lndet = expected_logdet(q, prior.precision)
    ln_p = 0.5 * (E_lndet[:, :, None] - V.shape[-1] * LN2PI - expected_mahalanobis(V, q))
    R = a[..., None] * q.r
    likelihood = (R * ln_p).sum((1, 2, 3))
    assignment = (R * expected_log_pi(q.alpha)[:, :, None]).sum((1, 2, 3))
    responsibility = -(a[..., None] * torch.xlogy(q.r, q.r)).sum((1, 2, 3))
    kl_pi, kl_parameters = (kl.flatten(1).sum(1) for kl in q.kl(prior))
    total = likelihood + assignment + responsibility - kl_pi - kl_parameters
    terms = (total, likelihood, assignment, responsibility, kl_pi, kl_parameters)
    return ELBO(*(term.to(dtype) for term in terms))


def in_float64(values: Values) -> Values:
    """Differences of large numbers, as entropies and divergences are, do not survive float32."""
    return type(values)(*(value.double() for value in values))


def check_through(through: str) -> None:
    if through not in THROUGH:
        raise ValueError(f"through must be one of {THROUGH}, got {through!r}")


def check_prior(prior: Prior, types: int, dim: int) -> None:
    if not isinstance(prior, Prior):
        raise TypeError(f"prior must be a Prior, as Prior(alpha0=0.1), got {type(prior).__name__}")
    if prior.dim != dim:
        raise ValueError(f"prior was made for dim={prior.dim}, the poses have {dim} entries")
    if wrong := {name: k for name, k in prior.types().items() if k != types}:
        raise ValueError(f"prior was made for other numbers of types ({wrong}); there are {types}")


class VBRouting(nn.Module):
    """``vb_routing`` with a prior and the learned offsets of its activation; the module keeps a copy of ``prior``."""

    def __init__(
        self,
        types: int,
        dim: int = 16,
        *,
        iters: int = 3,
        activation: str = "released",
        through: str = "all",
        prior: Prior | None = None,
    ):
        super().__init__()
        if activation not in ACTIVATIONS:
            raise ValueError(f"activation must be one of {ACTIVATIONS}, got {activation!r}")
        check_through(through)
        check_iters(iters)
        prior = Prior(dim=dim) if prior is None else copy.deepcopy(prior)
        check_prior(prior, types, dim)
        self.iters, self.activation, self.through, self.prior = iters, activation, through, prior
        self.beta_a = nn.Parameter(torch.zeros(types))
        self.beta_u = nn.Parameter(torch.zeros(types))

    def forward(self, a: Tensor, V: Tensor, child: Tensor, children: int | None = None) -> tuple[Tensor, Posterior]:
        return vb_routing(
            a,
            V,
            child,
            self.prior,
            children=children,
            iters=self.iters,
            activation=self.activation,
            through=self.through,
            beta_a=self.beta_a,
            beta_u=self.beta_u,
        )

    def extra_repr(self) -> str:
        return f"iters={self.iters}, activation={self.activation!r}, through={self.through!r}"

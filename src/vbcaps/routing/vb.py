"""Variational Bayes routing: Algorithm 1 of De Sousa Ribeiro, Leontidis and Kollias (AAAI 2020).

Axes: n image, l parent position, i child slot in a receptive field, j parent type, d (e) pose entry.
"""

import copy
from typing import Any, NamedTuple, TypeVar

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

ACTIVATIONS = ("agreement", "information", "released", "paper")
TIMES_VOTES = ("agreement", "paper")  # rules in which beta_u is multiplied by r_j, and so is no offset
LARGEST_TEMPER = 100.0
THROUGH = ("all", "last")
Values = TypeVar("Values", "Posterior", PriorValues)


class ELBO(NamedTuple):
    r"""The evidence lower bound of each image and its terms, all ``n``; a child counts $a_i$ times.

    Args:
        total: likelihood + assignment + responsibility - kl_pi - kl_parameters.
        likelihood: $E[\ln p(v \mid z, \mu, \Lambda)]$.
        assignment: $E[\ln p(z \mid \pi)]$.
        responsibility: $H[q(z)] / t$ with the softness t of the assignment.
        kl_pi: $KL[q(\pi) \,\|\, p(\pi)]$.
        kl_parameters: $KL[q(\mu, \Lambda) \,\|\, p(\mu, \Lambda)]$.
    """

    total: Tensor
    likelihood: Tensor
    assignment: Tensor
    responsibility: Tensor
    kl_pi: Tensor
    kl_parameters: Tensor


class Posterior(NamedTuple):
    r"""What VB routing knows about each parent: $q(z) q(\pi) \prod_j q(\mu_j, \Lambda_j)$, and the prior it began with.

    Class capsules have one field, and their posterior no axis l: read ``n j``, ``n j d`` and ``n i j``. Every method
    works with and without it. A diagonal psi is read as a Gaussian-Gamma by every method, also that of
    ``precision="wishart"``, whose rule for $E[\ln|\Lambda|]$ belongs to another distribution than its samples.

    Args:
        alpha: Dirichlet over the types of a field, ``n l j``.
        m: mean, ``n l j d``.
        kappa: precision scaling of the mean, ``n l j``.
        psi: $\Psi_j$, its diagonal ``n l j d``, or the full matrix ``n l j d e``, which is float64.
        nu: degrees of freedom, ``n l j``.
        r: responsibilities that the last update used, ``n l i j``; the fused kernels have no gradient of them.
        prior: the values of the layer's `Prior`.
        temper: the softness t of the assignment, a number, see `vb_routing`.

    Example:
        >>> from vbcaps import CapsNet
        >>> q = CapsNet(num_classes=5)(torch.randn(2, 2, 32, 32)).posterior
        >>> mu, precision = q.sample()
        >>> kl_pi, kl_pose = q.kl()
        >>> q.variance().shape, kl_pi.shape, kl_pose.shape
        (torch.Size([2, 5, 16]), torch.Size([2]), torch.Size([2, 5]))
    """

    alpha: Tensor
    m: Tensor
    kappa: Tensor
    psi: Tensor
    nu: Tensor
    r: Tensor
    prior: PriorValues
    temper: Tensor = torch.ones(())

    @property
    def full(self) -> bool:
        """Whether psi is a full matrix."""
        return self.psi.ndim > self.m.ndim

    def sample(self) -> tuple[Tensor, Tensor]:
        r"""Draw $(\mu, \Lambda)$ once for each parent, differentiably.

        Returns:
            $\mu$, ``n l j d``, and $\Lambda$ or its diagonal, in the shape of psi.
        """
        draw = sample_gaussian_wishart if self.full else sample_gaussian_gamma
        mu, Lambda = draw(*(x.to(self.psi.dtype) for x in (self.m, self.kappa, self.psi, self.nu)))
        return mu.to(self.m.dtype), Lambda.to(self.m.dtype)

    def variance(self) -> Tensor:
        r"""Return $1 / \operatorname{diag}(E[\Lambda])$, ``n l j d``: the paper's $\sigma^2$ of a capsule's pose."""
        psi = self.psi.diagonal(dim1=-2, dim2=-1) if self.full else self.psi
        return (1 / (self.nu[..., None] * psi)).to(self.m.dtype)

    def entropy(self) -> tuple[Tensor, Tensor]:
        r"""Return $H[q(\pi)]$, ``n l``, and $H[q(\mu, \Lambda)]$, ``n l j``."""
        of_parameters = gaussian_wishart_entropy if self.full else gaussian_gamma_entropy
        q = in_float64(self)
        return self._rounded(dirichlet_entropy(q.alpha), of_parameters(q.kappa, q.psi, q.nu))

    def kl(self) -> tuple[Tensor, Tensor]:
        r"""Return the divergence from the prior of $q(\pi)$, ``n l``, and of $q(\mu, \Lambda)$, ``n l j``."""
        of_parameters = gaussian_wishart_kl if self.full else gaussian_gamma_kl
        q = in_float64(self)
        p = q.prior
        return self._rounded(
            dirichlet_kl(q.alpha, p.alpha0),
            of_parameters(q.m, q.kappa, q.psi, q.nu, p.m0, p.kappa0, p.inv_Psi0, p.nu0),
        )

    def elbo(self, a: Tensor, V: Tensor) -> ELBO:
        r"""Return the evidence lower bound that routing climbs, of the children it routed.

        It is a bound from the second iteration on: the first responsibilities, $1/d_j$, sum to one only for a child
        that a single field sees. For ``precision="wishart"`` it need not climb. Its gradient goes through the
        responsibilities, too, which takes ``backend="reference"``. With ``temper`` t the entropy H[q(z)] counts 1/t
        times: q(z) proportional to the t-th power of $\pi_j p(v)$ maximises this bound, so no iteration lowers it.

        Args:
            a: activations of the children, ``n l i``.
            V: their votes, ``n l i j d``; `ConvCaps.trace` has both.
        """
        q = in_float64(self)
        a, V = a.double(), V.double()
        precision = "full" if self.full else "gamma"
        E_lndet = expected_logdet(q, precision)
        ln_p = 0.5 * (E_lndet[..., None, :] - V.shape[-1] * LN2PI - expected_mahalanobis(V, q))
        R = a[..., None] * q.r
        likelihood = (R * ln_p).flatten(1).sum(1)
        assignment = (R * expected_log_pi(q.alpha)[..., None, :]).flatten(1).sum(1)
        responsibility = -(a[..., None] * torch.xlogy(q.r, q.r)).flatten(1).sum(1) / self.temper
        kl_pi, kl_parameters = (kl.reshape(len(a), -1).sum(1) for kl in q.kl())
        total = likelihood + assignment + responsibility - kl_pi - kl_parameters
        terms = (total, likelihood, assignment, responsibility, kl_pi, kl_parameters)
        return ELBO(*(term.to(self.m.dtype) for term in terms))

    def _rounded(self, of_pi: Tensor, of_parameters: Tensor) -> tuple[Tensor, Tensor]:
        return of_pi.to(self.m.dtype), of_parameters.to(self.m.dtype)


def vb_routing(
    a: Tensor,
    V: Tensor,
    child: Tensor,
    prior: Prior,
    *,
    children: int | None = None,
    iters: int = 3,
    activation: str = "agreement",
    temper: float = 1.0,
    through: str = "all",
    beta_a: Tensor | float = 0.0,
    beta_u: Tensor | float = 0.0,
    history: list[Posterior] | None = None,
) -> tuple[Tensor, Posterior]:
    r"""Route children to parents: Algorithm 1.

    Args:
        a: activations of the children, ``n l i``, in [0, 1].
        V: their votes, ``n l i j d``.
        child: which lower capsule sits in slot i of field l, ``l i`` of int64; parents that see the same one compete.
        prior: the priors over $\pi$, $\mu$ and $\Lambda$, and with them the kind of precision.
        children: how many lower capsules there are; where not given, ``child`` is read, which makes a GPU wait.
        iters: how often $q(\pi, \mu, \Lambda)$ is updated.
        activation: the rule for the logit, see `activation_logit`.
        temper: the softness t of the assignment: q(z) is proportional to the t-th power of
            $e^{E[\ln \pi_j] + E[\ln p(v_{ji})]}$. At 1 it is Algorithm 1; below 1 children share themselves out more
            evenly, and more iterations change less (docs/settling.md).
        through: gradients go back through ``"all"`` iterations, or only through the ``"last"`` update of
            $q(\pi, \mu, \Lambda)$, as if the responsibilities it used were given.
        beta_a, beta_u: the offsets of that rule, a number or one for each type ``j``.
        history: a list to which the posterior after every iteration is appended.

    Returns:
        The logit of each parent's activation, ``n l j``, before BatchNorm and sigmoid; and the posterior.

    Example:
        >>> a, V = torch.rand(8, 1, 20), torch.randn(8, 1, 20, 5, 16)  # 20 children vote for 5 parents, in one field
        >>> logit, q = vb_routing(a, V, torch.arange(20)[None], Prior(), iters=3)
        >>> logit.shape, q.m.shape, q.elbo(a, V).total.shape
        (torch.Size([8, 1, 5]), torch.Size([8, 1, 5, 16]), torch.Size([8]))
    """
    children = check_routing_inputs(a, V, child, children, iters)
    check_rule(activation, temper, prior)
    check_through(through)
    check_prior(prior, *V.shape[3:])
    p, dtype = prior(), V.dtype
    if prior.precision == "full":  # float32 cannot factorise I + 1e8 x x^T
        a, V, p = a.double(), V.double(), in_float64(p)

    r, softness = torch.full_like(V[..., 0], 1 / V.shape[3]), V.new_full((), temper)  # n l i j
    for t in range(iters):
        q = update_q_parameters(r, a, V, p, prior.precision)._replace(temper=softness)
        E_ln_pi = expected_log_pi(q.alpha)
        E_lndet = expected_logdet(q, prior.precision)
        if history is not None:
            history.append(rounded(q, dtype))
        if t < iters - 1:  # nothing would read the last q(z)
            ln_p = 0.5 * (E_lndet[:, :, None] - expected_mahalanobis(V, q))
            r = softmax_over_parents(temper * (E_ln_pi[:, :, None] + ln_p), child, children)
            r = r.detach() if through == "last" else r

    logit = activation_logit(activation, q, (r * a[..., None]).sum(2), E_ln_pi, E_lndet, beta_a, beta_u)
    return logit.to(dtype), rounded(q, dtype)


def activation_logit(
    activation: str,
    q: Posterior,
    r_j: Tensor,
    E_ln_pi: Tensor,
    E_lndet: Tensor,
    beta_a: Tensor | float,
    beta_u: Tensor | float,
) -> Tensor:
    r"""Return the logit of each parent's activation, ``n l j``, by one of four rules.

    - ``"agreement"``: $\beta_a + (E[\ln \pi_j] + \frac12 E[\ln|\Lambda_j|] - \beta_u) \, r_j$, the rule of EM
      routing with expectations: it measures how many votes the parent took, times how closely they agree.
    - ``"information"``: $\beta_a - \beta_u + KL[q(\mu_j, \Lambda_j) \,\|\, p(\mu_j, \Lambda_j)]$: it measures how much
      the votes told about the parent's pose and precision, in nats; it rises with agreement where the prior expects
      more scatter.
    - ``"released"``, as in the authors' code: $\beta_a - (e^{E[\ln \pi_j]} H_j + \beta_u)$ with the entropy
      $H_j = \frac D2 \ln(2 \pi e) - \frac12 E[\ln|\Lambda_j|]$ of a vote: it measures how uncertain a vote is, times
      the parent's share of the votes.
    - ``"paper"``, as printed: $\beta_a - (\beta_u + E[\ln \pi_j] + E[\ln|\Lambda_j|]) \, r_j$: the first rule with the
      other sign and without the half, so votes that agree lower the activation.
    """
    if activation == "agreement":
        return beta_a + (E_ln_pi + 0.5 * E_lndet - beta_u) * r_j
    if activation == "paper":
        return beta_a - (beta_u + E_ln_pi + E_lndet) * r_j
    if activation == "information":
        p = q.prior
        of_parameters = gaussian_wishart_kl if q.full else gaussian_gamma_kl
        return beta_a - beta_u + of_parameters(q.m, q.kappa, q.psi, q.nu, p.m0, p.kappa0, p.inv_Psi0, p.nu0)
    H = 0.5 * (q.m.shape[-1] * (1 + LN2PI) - E_lndet)
    return beta_a - (E_ln_pi.exp() * H + beta_u)


def update_q_parameters(r: Tensor, a: Tensor, V: Tensor, p: PriorValues, precision: str) -> Posterior:
    r"""Return $q^*(\pi, \mu, \Lambda)$ for the responsibilities r, by its sufficient statistics.

    The paper centres the scatter at the votes' mean $\tilde v_j$ and adds
    $\frac{\kappa_0 r_j}{\kappa_j} (\tilde v_j - m_0)(\tilde v_j - m_0)^T$. Centred at $m_j$ it is the same matrix
    without $1/r_j$, so a parent with $r_j = 0$ is the prior and not NaN.
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
    return Posterior(alpha, m, kappa, psi, nu, r, p)


def expected_logdet(q: Posterior, precision: str) -> Tensor:
    r"""Return $E[\ln \det \Lambda_j]$, ``n l j``, for the prior's kind of precision."""
    if precision == "gamma":
        return expected_logdet_gamma(q.psi.log(), q.nu)
    return expected_logdet_wishart(logdet(q.psi) if q.full else q.psi.log().sum(-1), q.nu, q.m.shape[-1])


def expected_mahalanobis(V: Tensor, q: Posterior) -> Tensor:
    r"""Return $E[(v_{ji} - \mu_j)^T \Lambda_j (v_{ji} - \mu_j)]$, ``n l i j``.

    It is $D/\kappa_j + \nu_j (v_{ji} - m_j)^T \Psi_j (v_{ji} - m_j)$.
    """
    X = V - q.m[..., None, :, :]
    if q.full:
        distance = torch.einsum("...ijd,...ijd->...ij", torch.einsum("...ijd,...jde->...ije", X, q.psi), X)
        distance = q.nu[..., None, :] * distance
    else:
        distance = torch.einsum("...ijd,...jd->...ij", X.square(), q.nu[..., None] * q.psi)
    return V.shape[-1] / q.kappa[..., None, :] + distance


def rounded(q: Posterior, dtype: torch.dtype) -> Posterior:
    """Return the posterior as ``dtype``, except a full psi, whose determinant float32 cannot hold."""
    return to(q, dtype)._replace(psi=q.psi) if q.full else to(q, dtype)


def without_gradient(x: Tensor) -> Tensor:
    """Return x with the gradient 0: a parameter that has none would stop DistributedDataParallel."""
    return x.detach() + 0 * x


def in_float64(values: Values) -> Values:
    """Return the same in float64: entropies and divergences are differences of large numbers."""
    return to(values, torch.float64)


def to(values: Values, dtype: torch.dtype) -> Values:
    """Return the same with every tensor, those of the prior included, as ``dtype``."""
    changed: Any = (x.to(dtype) if isinstance(x, Tensor) else to(x, dtype) for x in values)
    return type(values)(*changed)


def check_rule(activation: str, temper: float, prior: Prior) -> None:
    """Raise an error unless the rule exists, the precision has it, and the softness is a number above 0."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {ACTIVATIONS}, got {activation!r}")
    if isinstance(temper, bool) or not isinstance(temper, int | float) or not 0 < temper <= LARGEST_TEMPER:
        raise ValueError(f"temper must be a number above 0 and at most {LARGEST_TEMPER:g}, got {temper!r}")
    if activation == "information" and isinstance(prior, Prior) and prior.precision == "wishart":
        raise ValueError(
            "activation='information' needs precision='gamma' or 'full': with 'wishart' the diagonal precision follows "
            "no distribution that has a divergence"
        )


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
    """`vb_routing` with a prior and the learned offsets of its activation.

    Args:
        types: how many types of parent there are.
        dim: entries of a pose.
        iters, activation, temper, through: see `vb_routing`.
        prior: the module keeps a copy of it; without one it is ``Prior(dim=dim)``.

    Example:
        >>> routing = VBRouting(types=5, iters=2, prior=Prior(alpha0=0.1, learn=["alpha0"]))
        >>> logit, q = routing(torch.rand(8, 1, 20), torch.randn(8, 1, 20, 5, 16), torch.arange(20)[None])
        >>> sorted(name for name, _ in routing.named_parameters())
        ['beta_a', 'beta_u', 'prior.alpha0_raw']
    """

    def __init__(
        self,
        types: int,
        dim: int = 16,
        *,
        iters: int = 3,
        activation: str = "agreement",
        temper: float = 1.0,
        through: str = "all",
        prior: Prior | None = None,
    ):
        super().__init__()
        check_through(through)
        check_iters(iters)
        prior = Prior(dim=dim) if prior is None else copy.deepcopy(prior)
        check_prior(prior, types, dim)
        check_rule(activation, temper, prior)
        self.iters, self.activation, self.temper, self.through = iters, activation, float(temper), through
        self.prior = prior
        self.normalised = False  # whether BatchNorm follows: capsule layers set it
        self.beta_a = nn.Parameter(torch.zeros(types))
        self.beta_u = nn.Parameter(torch.zeros(types))

    def forward(
        self,
        a: Tensor,
        V: Tensor,
        child: Tensor,
        children: int | None = None,
        history: list[Posterior] | None = None,
    ) -> tuple[Tensor, Posterior]:
        return vb_routing(
            a,
            V,
            child,
            self.prior,
            children=children,
            iters=self.iters,
            activation=self.activation,
            temper=self.temper,
            through=self.through,
            history=history,
            **self.offsets(),
        )

    def offsets(self) -> dict[str, Tensor]:
        """Return beta_a and beta_u, without a gradient where BatchNorm subtracts them.

        In training BatchNorm takes away what all parents of a type have in common: the true gradient of such an offset
        is 0. Rounding leaves about 1e-9, which Adam scales up to steps of full length. The offset then walks at random,
        faster than running statistics can follow, and the network is at chance in ``eval`` mode.
        """
        if not (self.training and self.normalised):
            return dict(beta_a=self.beta_a, beta_u=self.beta_u)
        beta_u = self.beta_u if self.activation in TIMES_VOTES else without_gradient(self.beta_u)
        return dict(beta_a=without_gradient(self.beta_a), beta_u=beta_u)

    def extra_repr(self) -> str:
        return f"iters={self.iters}, activation={self.activation!r}, temper={self.temper:g}, through={self.through!r}"

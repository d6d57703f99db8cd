"""The passes in PyTorch: the contract of ``Backend`` in as few lines as possible, for any device.

Each pass computes every vote of the layer, so it is slow. These passes exist to be read beside the kernels, and to
test the order of passes in float64.

The memory layout: poses are ``... n p r``, slots ``l i j n``, terms ``k l j n p r``.
"""

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vbcaps.distributions import (
    LN2PI,
    expected_log_pi,
    expected_logdet_gamma,
    expected_logdet_wishart,
    gaussian_gamma_kl,
)
from vbcaps.kernels.backend import (
    EMResultGrads,
    MomentGrads,
    Moments,
    Normaliser,
    NormedCapsules,
    PriorTensors,
    Running,
    ScoreSums,
    VBResult,
    VBResultGrads,
    VBRule,
    Votes,
)
from vbcaps.kernels.norm import plain_batch_norm, plain_parents, plain_primary
from vbcaps.routing.fields import Fields, softmax_over_parents


def floor(x: Tensor) -> float:
    """Return the least number by which sums of responsibilities are divided, as in routing/em.py."""
    return torch.finfo(x.dtype).tiny ** 0.5


def all_votes(v: Votes) -> Tensor:
    """Return every vote, ``l i j n p r``."""
    I = v.child.shape[1]
    W = v.W[torch.arange(I, device=v.W.device) % len(v.W)]
    V = torch.einsum("linpq,ijqr->lijnpr", v.pose[v.child], W)
    if v.coordinates is not None:
        V[..., :2, 3] += v.coordinates[:, None, None, :]
    return V


def all_shares(v: Votes, r: Tensor | None) -> Tensor:
    """Return R_ij = a_i r_ij, ``l i j n``."""
    a = v.a[v.child][:, :, None]
    J = v.W.shape[1]
    return a * r if r is not None else (a / J).expand(-1, -1, J, -1)


def sum_over_children(v: Votes, x: Tensor) -> Tensor:
    """Return the sums of ``l i n ...`` over the slots that hold each child, ``c n ...``."""
    out = x.new_zeros(len(v.a), *x.shape[2:])
    return out.index_add(0, v.child.flatten(), x.flatten(0, 1))


def of_types(x: Tensor) -> Tensor:
    """Return a prior's scalar, ``()`` or ``j``, in a shape that broadcasts against ``l j n``."""
    return x.view(-1, 1)


def of_poses(x: Tensor) -> Tensor:
    """Return a prior's vector, ``d`` or ``j d``, in a shape that broadcasts against ``l j n p r``."""
    return x.view(-1, 1, 4, 4)


class Plain:
    """The passes in PyTorch, see ``Backend``."""

    name = "plain"
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64)

    def refusal(self, a: Tensor, W: Tensor, fields: Fields, iters: int) -> str | None:
        return None

    # --- around the routing -----------------------------------------------------------------------------------------

    def convolve(self, conv: nn.Conv2d, x: Tensor) -> Tensor:
        return conv(x)

    def primary(self, x: Tensor, types: int, norm_a: Normaliser, norm_pose: Normaliser | None) -> NormedCapsules:
        return plain_primary(x, types, norm_a, norm_pose, lambda x: x)

    def parents(
        self, logit: Tensor, m: Tensor, norm_a: Normaliser | None, norm_pose: Normaliser | None
    ) -> NormedCapsules:
        return plain_parents(
            logit, m, norm_a, norm_pose, lambda norm, x: norm(x.flatten(0, 1).flatten(2)).reshape(x.shape)
        )

    def batch_norm(
        self, x: Tensor, running: Running, momentum: float, eps: float, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        return plain_batch_norm(x, running, momentum, eps, weight, bias)

    # --- memory -----------------------------------------------------------------------------------------------------

    def lay_poses(self, pose: Tensor) -> Tensor:
        return pose.transpose(0, 1).contiguous()

    def new_poses(self, like: Tensor, *shape: int) -> Tensor:
        return like.new_empty(*shape, 4, 4)

    def as_poses(self, x: Tensor) -> Tensor:
        return x

    def new_slots(self, v: Votes, T: int) -> Tensor:
        _, N, L, I, J = v.sizes
        return v.a.new_empty(T, L, I, J, N)

    def as_slots(self, x: Tensor, v: Votes) -> Tensor:
        return x.permute(3, 0, 1, 2)

    def new_terms(self, v: Votes, iters: int) -> Tensor:
        _, N, L, _, J = v.sizes
        return v.a.new_empty(4 * iters - 1, L, J, N, 4, 4)

    def parts(self, v: Votes) -> int:
        return 1

    # --- forward passes over votes ----------------------------------------------------------------------------------

    def prepared(self, v: Votes) -> AbstractContextManager[None]:
        return nullcontext()

    def moments(self, v: Votes, r: Tensor | None, k0: Tensor, m0: Tensor, rj: Tensor, m: Tensor, S: Tensor) -> None:
        V, R = all_votes(v), all_shares(v, r)
        k0, m0 = of_types(k0)[..., None, None], of_poses(m0)
        rj.copy_(R.sum(1))
        total = (k0 + rj[..., None, None]).clamp_min(floor(rj))
        m.copy_((torch.einsum("lijn,lijnpr->ljnpr", R, V) + k0 * m0) / total)
        S[0] = torch.einsum("lijn,lijnpr->ljnpr", R, (V - m[:, None]).square()) + k0 * (m0 - m).square()

    def scores(self, v: Votes, m: Tensor, lam: Tensor, K: Tensor, r: Tensor) -> None:
        distance = torch.einsum("ljnpr,lijnpr->lijn", lam, (all_votes(v) - m[:, None]).square())
        self._softmax(v, K[:, None] - 0.5 * distance, r)

    def agreements(self, v: Votes, w: Tensor, r: Tensor) -> None:
        self._softmax(v, torch.einsum("ljnpr,lijnpr->lijn", w, all_votes(v)), r)

    def _softmax(self, v: Votes, z: Tensor, r: Tensor) -> None:
        r.copy_(softmax_over_parents(z.permute(3, 0, 1, 2), v.child, len(v.a)).permute(1, 2, 3, 0))

    # --- backward passes over votes ---------------------------------------------------------------------------------

    def grad_responsibilities(
        self, v: Votes, m: Tensor, g: MomentGrads, r: Tensor | None, dR: Tensor, s: Tensor, da: Tensor, add: bool
    ) -> None:
        X = all_votes(v) - m[:, None]
        dR.copy_(g.gr[:, None] + (X * (g.gb[:, None] + g.gS[:, None] * X)).sum((-2, -1)))
        share = 1 / v.W.shape[1] if r is None else r
        s.copy_(sum_over_children(v, (share * dR).sum(2)))
        da.copy_(da + s if add else s)

    def grad_scores(self, v: Votes, m: Tensor, r: Tensor, s: Tensor, dR: Tensor, U: ScoreSums) -> None:
        X = all_votes(v) - m[:, None]
        dR.copy_(all_shares(v, r) * (dR - s[v.child][:, :, None]))
        U.U0[0] = dR.sum(1)
        U.U1[0] = torch.einsum("lijn,lijnpr->ljnpr", dR, X)
        U.U2[0] = torch.einsum("lijn,lijnpr->ljnpr", dR, X.square())

    def put_term(self, terms: Tensor, k: int, x: Tensor, iters: int) -> None:
        terms[k] = x

    def grad_votes(
        self,
        v: Votes,
        terms: Tensor,
        r: Tensor,
        dz: Tensor,
        iters: int,
        uniform: tuple[Tensor, MomentGrads] | None,
        da: Tensor,
    ) -> tuple[Tensor, Tensor]:
        if uniform is not None:
            self.grad_responsibilities(v, *uniform, None, self.new_slots(v, 1)[0], torch.empty_like(da), da, add=True)
        V, E, C = all_votes(v), terms[:-1:2], terms[1:-1:2]
        X = V + terms[-1][:, None]
        weights = [*(all_shares(v, r[t - 1] if t else None) for t in range(iters)), *dz[: iters - 1]]
        dV = torch.zeros_like(V)
        for k, s in enumerate(weights):
            dV += s[..., None, None] * (E[k][:, None] + C[k][:, None] * X)
        I, G = v.child.shape[1], len(v.W)
        W = v.W[torch.arange(I, device=V.device) % G]
        dpose = sum_over_children(v, torch.einsum("lijnpr,ijqr->linpq", dV, W))
        dW = torch.einsum("linpq,lijnpr->ijqr", v.pose[v.child], dV)
        return dpose, dW.unflatten(0, (I // G, G)).sum(0)

    # --- VB at a parent ---------------------------------------------------------------------------------------------

    def vb_update(
        self, moments: Moments, spread: Tensor, prior: PriorTensors, rule: VBRule, lam: Tensor, K: Tensor
    ) -> None:
        moments.S.copy_(spread.sum(0))
        q = VBParent(moments, prior, rule.wishart)
        E_ln_pi, E_lndet = q.expectations()
        lam.copy_(rule.temper * q.nu[..., None, None] * q.psi)
        K.copy_(rule.temper * (E_ln_pi + 0.5 * E_lndet - 8 / q.kappa))

    def vb_logit(
        self,
        moments: Moments,
        spread: Tensor,
        prior: PriorTensors,
        rule: VBRule,
        beta_a: Tensor,
        beta_u: Tensor,
        result: VBResult,
    ) -> None:
        moments.S.copy_(spread.sum(0))
        q = VBParent(moments, prior, rule.wishart)
        E_ln_pi, E_lndet = q.expectations()
        beta_a, beta_u = of_types(beta_a), of_types(beta_u)
        if rule.activation == "agreement":
            logit = beta_a + (E_ln_pi + 0.5 * E_lndet - beta_u) * moments.rj
        elif rule.activation == "paper":
            logit = beta_a - (beta_u + E_ln_pi + E_lndet) * moments.rj
        elif rule.activation == "information":
            logit = beta_a - beta_u + q.divergence(moments.m, prior)
        else:
            logit = beta_a - (E_ln_pi.exp() * 0.5 * (16 * (1 + LN2PI) - E_lndet) + beta_u)
        found = VBResult(logit, q.alpha, q.kappa, q.psi, q.nu, E_ln_pi, E_lndet)
        for room, x in zip(result, found, strict=True):
            room.copy_(x)

    def vb_grad(
        self,
        moments: Moments,
        last_m: Tensor,
        prior: PriorTensors,
        rule: VBRule,
        beta_u: Tensor,
        result: VBResultGrads | None,
        U: ScoreSums,
        g: MomentGrads,
        terms: Tensor,
        t: int,
        iters: int,
        gamma: Tensor | None,
    ) -> None:
        q = VBParent(moments, prior, rule.wishart)
        E_ln_pi, E_lndet = q.expectations()
        none, psi = torch.zeros_like(q.alpha), q.psi
        drj, dlam, dpsi, dm = none, torch.zeros_like(psi), torch.zeros_like(psi), torch.zeros_like(psi)
        dalpha, dkappa, dnu = none, none, none
        if result is None:  # K = t (E[ln pi] + E[ln det] / 2 - D / (2 kappa)), lam = t nu psi
            U0, U1, U2 = (rule.temper * x[0] for x in U)
            dE_ln_pi, dE_lndet = U0, 0.5 * U0
            dkappa = 8 / q.kappa.square() * U0
            dlam, dm = -0.5 * U2, q.nu[..., None, None] * psi * U1
        else:
            given = (result.m, result.alpha, result.kappa, result.psi, result.nu)
            dm, dalpha, dkappa, dpsi, dnu = (
                zero if x is None else x for x, zero in zip(given, (dm, none, none, dpsi, none), strict=True)
            )
            dE_ln_pi, dE_lndet = none, none
            if rule.activation == "agreement":  # logit = beta_a + (E[ln pi] + E[ln det] / 2 - beta_u) r_j
                dE_ln_pi, dE_lndet = moments.rj * result.logit, 0.5 * moments.rj * result.logit
                drj = (E_ln_pi + 0.5 * E_lndet - of_types(beta_u)) * result.logit
            elif rule.activation == "paper":  # logit = beta_a - (beta_u + E[ln pi] + E[ln det]) r_j
                dE_ln_pi = dE_lndet = -moments.rj * result.logit
                drj = -(of_types(beta_u) + E_ln_pi + E_lndet) * result.logit
            elif rule.activation == "information":  # logit = beta_a - beta_u + KL[q || prior]
                of_m, of_kappa, of_psi, of_nu = q.of_divergence(moments.m, prior)
                of_poses = result.logit[..., None, None]
                dm, dpsi = dm + of_poses * of_m, dpsi + of_poses * of_psi
                dkappa, dnu = dkappa + result.logit * of_kappa, dnu + result.logit * of_nu
            else:  # logit = beta_a - (exp(E[ln pi]) H + beta_u), H = D/2 ln(2 pi e) - E[ln det] / 2
                H = 0.5 * (16 * (1 + LN2PI) - E_lndet)
                dE_ln_pi, dE_lndet = -E_ln_pi.exp() * H * result.logit, 0.5 * E_ln_pi.exp() * result.logit
        of_all = trigamma(q.alpha.sum(1, keepdim=True)) * dE_ln_pi.sum(1, keepdim=True)
        dalpha = dalpha + trigamma(q.alpha) * dE_ln_pi - of_all
        steps = torch.arange(16 if rule.wishart else 1, dtype=psi.dtype, device=psi.device)
        of_nu = 0.5 * trigamma((q.nu[..., None] - steps) / 2).sum(-1) * (1 if rule.wishart else 16)
        dnu = dnu + of_nu * dE_lndet + (dlam * psi).sum((-2, -1))
        dpsi = dpsi + dE_lndet[..., None, None] / psi + dlam * q.nu[..., None, None]
        g.gb.copy_(dm / q.kappa[..., None, None])
        g.gS.copy_(-psi.square() * dpsi)
        g.gr.copy_(dalpha + dkappa + dnu + drj)
        lam = None if result is not None else rule.temper * q.nu[..., None, None] * psi
        self._put_terms(moments.m, last_m, g, lam, terms, t, iters)
        if gamma is not None:
            gamma.copy_(torch.stack([dalpha, dkappa, dnu]))

    # --- EM at a parent ---------------------------------------------------------------------------------------------

    def em_update(
        self,
        moments: Moments,
        spread: Tensor,
        beta_a: Tensor,
        beta_u: Tensor,
        inverse_temperature: float,
        min_var: float,
        lam: Tensor,
        K: Tensor,
    ) -> None:
        moments.S.copy_(spread.sum(0))
        q = EMParent(moments, beta_a, beta_u, inverse_temperature, min_var)
        lam.copy_(1 / q.var)
        K.copy_(F.logsigmoid(q.logit) - 0.5 * (q.var.log() + LN2PI).sum((-2, -1)))

    def em_logit(
        self,
        moments: Moments,
        spread: Tensor,
        beta_a: Tensor,
        beta_u: Tensor,
        inverse_temperature: float,
        min_var: float,
        logit: Tensor,
        var: Tensor,
    ) -> None:
        moments.S.copy_(spread.sum(0))
        q = EMParent(moments, beta_a, beta_u, inverse_temperature, min_var)
        logit.copy_(q.logit)
        var.copy_(q.var)

    def em_grad(
        self,
        moments: Moments,
        last_m: Tensor,
        beta_a: Tensor,
        beta_u: Tensor,
        inverse_temperature: float,
        min_var: float,
        result: EMResultGrads | None,
        U: ScoreSums,
        g: MomentGrads,
        terms: Tensor,
        t: int,
        iters: int,
        glogit: Tensor,
    ) -> None:
        q = EMParent(moments, beta_a, beta_u, inverse_temperature, min_var)
        inv_r = 1 / moments.rj.clamp_min(floor(moments.rj))
        lam, rj = 1 / q.var, moments.rj
        if result is None:  # K = ln sigmoid(logit) - sum_d (ln var + ln 2 pi) / 2, lam = 1 / var
            dlogit = U.U0[0] * (-q.logit).sigmoid()
            dvar = -0.5 * U.U0[0][..., None, None] * lam + 0.5 * U.U2[0] * lam.square()
            dm = lam * U.U1[0]
        else:
            dlogit = result.logit
            dvar = torch.zeros_like(lam) if result.var is None else result.var
            dm = torch.zeros_like(lam) if result.m is None else result.m
        # logit = inverse_temperature (beta_a - cost r_j), cost = D beta_u + sum_d ln(var) / 2, var = S / r_j + min_var
        glogit.copy_(inverse_temperature * dlogit)
        dvar = dvar - 0.5 * (rj * glogit)[..., None, None] * lam
        g.gb.copy_(dm * inv_r[..., None, None])
        g.gS.copy_(dvar * inv_r[..., None, None])
        through_var = inv_r * (dvar * moments.S * inv_r[..., None, None]).sum((-2, -1))
        g.gr.copy_(-q.cost * glogit - torch.where(rj < floor(rj), 0.0, through_var))
        self._put_terms(moments.m, last_m, g, None if result is not None else lam, terms, t, iters)

    def _put_terms(
        self, m: Tensor, last_m: Tensor, g: MomentGrads, lam: Tensor | None, terms: Tensor, t: int, iters: int
    ) -> None:
        """Write the terms that a parent adds to dV through moments t and scores t, around the last iteration's mean."""
        shift = last_m - m
        terms[2 * t], terms[2 * t + 1] = g.gb + 2 * g.gS * shift, 2 * g.gS
        if lam is None:
            terms[-1] = -m
        else:
            k = 2 * (iters + t)
            terms[k], terms[k + 1] = -lam * shift, -lam


class VBParent:
    """q(pi, mu, Lambda) of each parent."""

    def __init__(self, moments: Moments, prior: PriorTensors, wishart: bool):
        self.alpha, self.kappa, self.nu = (of_types(p) + moments.rj for p in (prior.alpha0, prior.kappa0, prior.nu0))
        self.psi = 1 / (of_poses(prior.inv_psi0) + moments.S)
        self.wishart = wishart

    def expectations(self) -> tuple[Tensor, Tensor]:
        """Return E[ln pi_j] and E[ln det Lambda_j], ``l j n``."""
        E_ln_pi = expected_log_pi(self.alpha.transpose(1, 2)).transpose(1, 2)
        ln_psi = self.psi.log().flatten(-2)
        if self.wishart:
            return E_ln_pi, expected_logdet_wishart(ln_psi.sum(-1), self.nu, 16)
        return E_ln_pi, expected_logdet_gamma(ln_psi, self.nu)

    def divergence(self, m: Tensor, prior: PriorTensors) -> Tensor:
        """Return KL[q(mu, Lambda) || prior], ``l j n``."""
        kappa0, nu0 = of_types(prior.kappa0), of_types(prior.nu0)
        m0, inv_psi0 = of_poses(prior.m0).flatten(-2), of_poses(prior.inv_psi0).flatten(-2)
        psi = self.psi.flatten(-2)
        return gaussian_gamma_kl(m.flatten(-2), self.kappa, psi, self.nu, m0, kappa0, inv_psi0, nu0)

    def of_divergence(self, m: Tensor, prior: PriorTensors) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the derivatives of ``divergence`` by m, kappa, psi and nu."""
        kappa0, nu0, gap = of_types(prior.kappa0), of_types(prior.nu0), m - of_poses(prior.m0)
        s, s0 = (0.5 * x[..., None, None] for x in (self.nu, nu0))
        of_m = 2 * s * kappa0[..., None, None] * self.psi * gap
        scale = of_poses(prior.inv_psi0) + kappa0[..., None, None] * gap.square()
        of_kappa = 8 * (1 / self.kappa - kappa0 / self.kappa.square())
        of_nu = 4 * (self.nu - nu0) * trigamma(self.nu / 2) + 0.5 * ((self.psi * scale).sum((-2, -1)) - 16)
        return of_m, of_kappa, s * scale - s0 / self.psi, of_nu


class EMParent:
    """The Gaussian of each parent, its cost and its logit."""

    def __init__(self, moments: Moments, beta_a: Tensor, beta_u: Tensor, inverse_temperature: float, min_var: float):
        self.var = moments.S / moments.rj.clamp_min(floor(moments.rj))[..., None, None] + min_var
        self.cost = 16 * of_types(beta_u) + 0.5 * self.var.log().sum((-2, -1))
        self.logit = inverse_temperature * (of_types(beta_a) - self.cost * moments.rj)


def trigamma(x: Tensor) -> Tensor:
    """Return psi'(x)."""
    return torch.polygamma(1, x)

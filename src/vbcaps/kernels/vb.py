"""VB routing with diagonal precision by a backend's passes: the fast twin of routing/vb.py.

`vb_routing_fused` takes children, poses and weights instead of votes, and returns the result of `vb_routing` on the
votes that they define.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vbcaps.kernels.backend import (
    Backend,
    MomentGrads,
    Moments,
    PriorTensors,
    VBResult,
    VBResultGrads,
    VBRule,
    Votes,
    backend_named,
)
from vbcaps.kernels.ops import Op
from vbcaps.kernels.order import (
    History,
    images_first,
    new_history,
    new_score_sums,
    poses_first,
    responsibilities,
    route,
    route_back,
)
from vbcaps.routing.vb import TIMES_VOTES, Posterior, VBRouting

D = 16


class VBCall(NamedTuple):
    """The inputs of the operator."""

    votes: Votes
    prior: PriorTensors
    rule: VBRule
    beta_a: Tensor  # j
    beta_u: Tensor  # j
    iters: int
    only_last: bool  # gradients go through the last iteration only


class VBState(NamedTuple):
    """The outputs of the operator."""

    logit: Tensor  # l j n
    alpha: Tensor  # l j n
    kappa: Tensor  # l j n
    psi: Tensor  # poses l j n
    nu: Tensor  # l j n
    E_ln_pi: Tensor  # l j n
    E_lndet: Tensor  # l j n
    m: Tensor  # from here on, History
    early_m: Tensor
    rj: Tensor
    S: Tensor
    r: Tensor

    @property
    def result(self) -> VBResult:
        """Return VB's result for each parent."""
        return VBResult(*(getattr(self, name) for name in VBResult._fields))

    @property
    def history(self) -> History:
        """Return the moments and responsibilities of every iteration."""
        return History(*(getattr(self, name) for name in History._fields))


def new_state(call: VBCall) -> VBState:
    """Allocate the operator's outputs."""
    v, run = call.votes, backend_named(call.votes.backend)
    _, N, L, _, J = v.sizes
    logit, alpha, kappa, nu, E_ln_pi, E_lndet = (v.a.new_empty(L, J, N) for _ in range(6))
    psi = run.new_poses(v.a, L, J, N)
    return VBState(logit, alpha, kappa, psi, nu, E_ln_pi, E_lndet, *new_history(run, v, call.iters))


class VBParents:
    """VB's updates of q(pi, mu, Lambda) and q(z) at its parents, see ``order.Parents``."""

    def __init__(self, run: Backend, call: VBCall, state: VBState):
        self.run, self.call, self.state, self.moments = run, call, state, state.history.moments
        self.k0, self.m0 = call.prior.kappa0, call.prior.m0
        self.lam, self.K = torch.empty_like(state.m), torch.empty_like(state.logit)

    def update(self, t: int, moments: Moments, spread: Tensor) -> None:
        call = self.call
        if t < call.iters - 1:
            self.run.vb_update(moments, spread, call.prior, call.rule, self.lam, self.K)
        else:
            self.run.vb_logit(moments, spread, call.prior, call.rule, call.beta_a, call.beta_u, self.state.result)

    def score(self, t: int, moments: Moments, r: Tensor) -> None:
        self.run.scores(self.call.votes, moments.m, self.lam, self.K, r)


def run_vb(call: VBCall) -> VBState:
    """Run VB routing."""
    run, state = backend_named(call.votes.backend), new_state(call)
    route(run, call.votes, VBParents(run, call, state), state.r, call.iters)
    return state


vb_route = Op("vbcaps::vb_route", VBCall, VBState, run_vb, new_state)


class VBBackCall(NamedTuple):
    """The inputs of the backward operator: the forward call, its history, and the gradients of its result."""

    call: VBCall
    history: History
    result: VBResultGrads
    prior: bool  # whether the prior needs a gradient


class VBBack(NamedTuple):
    """The outputs of the backward operator; the prior's gradients are empty if they were not asked for."""

    a: Tensor
    pose: Tensor
    W: Tensor
    alpha0: Tensor
    m0: Tensor
    kappa0: Tensor
    inv_psi0: Tensor
    nu0: Tensor


class VBParentGrads:
    """The gradients of VB's updates of q(pi, mu, Lambda), see ``order.ParentGrads``."""

    def __init__(self, run: Backend, given: VBBackCall):
        self.run, self.given = run, given
        call, v = given.call, given.call.votes
        T, (_, N, L, _, J) = call.iters, v.sizes
        self.gb, self.gS = run.new_poses(v.a, T, L, J, N), run.new_poses(v.a, T, L, J, N)
        self.gr = v.a.new_empty(L, J, N)
        self.U = new_score_sums(run, v)
        self.gamma = v.a.new_empty(3, T if given.prior else 0, L, J, N)  # of alpha, kappa, nu
        self.terms = run.new_terms(v, T)
        if call.only_last:  # earlier iterations contribute nothing
            for x in (self.gb, self.gS, self.gamma, self.terms):
                x.zero_()

    def back(self, t: int) -> None:
        given, call, history = self.given, self.given.call, self.given.history
        self.run.vb_grad(
            history.moments(t), history.m, call.prior, call.rule, call.beta_u,
            given.result if t == call.iters - 1 else None, self.U, self.moments(t)[1], self.terms, t, call.iters,
            self.gamma[:, t] if given.prior else None,
        )  # fmt: skip

    def moments(self, t: int) -> tuple[Tensor, MomentGrads]:
        return self.center(t), MomentGrads(self.gb[t], self.gS[t], self.gr)

    def center(self, t: int) -> Tensor:
        return self.given.history.moments(t).m

    def of_prior(self) -> PriorTensors:
        """Return the gradients of the prior, from those of every iteration's moments.

        m = (sum R V + kappa0 m0) / kappa minimises S = sum R (V - m)^2 + kappa0 (m0 - m)^2.
        """
        history, p, as_poses = self.given.history, self.given.call.prior, self.run.as_poses
        gb, gS = as_poses(self.gb), as_poses(self.gS)  # t l j n p r
        gap = p.m0.view(-1, 1, 4, 4) - as_poses(torch.cat([history.early_m, history.m[None]]))
        k0 = p.kappa0.view(-1, 1, 1, 1)
        dalpha0, dkappa0, dnu0 = (g.sum((0, 1, 3)) for g in self.gamma)
        dkappa0 = dkappa0 + (gap * (gb + gap * gS)).sum((0, 1, 3, 4, 5))
        dm0 = (k0 * (gb + 2 * gap * gS)).sum((0, 1, 3)).view(-1, D)
        dinv_psi0 = gS.sum((0, 1, 3)).view(-1, D)
        if self.given.call.rule.activation == "information":
            of_m0, of_kappa0, of_inv_psi0, of_nu0 = self.of_divergence()
            dm0, dkappa0, dinv_psi0, dnu0 = dm0 + of_m0, dkappa0 + of_kappa0, dinv_psi0 + of_inv_psi0, dnu0 + of_nu0
        return PriorTensors(
            dalpha0.sum_to_size(p.alpha0.shape),
            dm0.sum_to_size(p.m0.shape),
            dkappa0.sum_to_size(p.kappa0.shape),
            dinv_psi0.sum_to_size(p.inv_psi0.shape),
            dnu0.sum_to_size(p.nu0.shape),
        )

    def of_divergence(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the gradients that KL[q || prior] gives m0, kappa0, inv_psi0 and nu0 themselves, q kept fixed.

        They are ``j d``, ``j``, ``j d`` and ``j``.
        """
        call, as_poses = self.given.call, self.run.as_poses
        p, last, dlogit = call.prior, self.given.history.moments(call.iters - 1), self.given.result.logit
        kappa0, nu0 = p.kappa0.view(-1, 1), p.nu0.view(-1, 1)
        m0, inv_psi0 = p.m0.view(-1, 1, 4, 4), p.inv_psi0.view(-1, 1, 4, 4)
        s, s0 = 0.5 * (nu0 + last.rj), 0.5 * nu0  # l j n
        psi, gap = 1 / (inv_psi0 + as_poses(last.S)), as_poses(last.m) - m0  # l j n p r
        of_poses = (dlogit * s)[..., None, None] * psi
        dm0 = -2 * kappa0[..., None, None] * of_poses * gap
        dinv_psi0 = of_poses - (dlogit * s0)[..., None, None] / inv_psi0
        spread = (psi * gap.square()).sum((-2, -1))
        dkappa0 = dlogit * (0.5 * D * (1 / (kappa0 + last.rj) - 1 / kappa0) + s * spread)
        ratio = (psi * inv_psi0).log().sum((-2, -1))
        dnu0 = 0.5 * dlogit * (D * (torch.digamma(s0) - torch.digamma(s)) - ratio)
        dm0, dkappa0, dinv_psi0, dnu0 = (x.sum((0, 2)) for x in (dm0, dkappa0, dinv_psi0, dnu0))
        return dm0.view(-1, D), dkappa0, dinv_psi0.view(-1, D), dnu0


def run_vb_back(given: VBBackCall) -> VBBack:
    """Compute the gradients of VB routing."""
    call = given.call
    run = backend_named(call.votes.backend)
    parents = VBParentGrads(run, given)
    of_votes = route_back(run, call.votes, parents, given.history.r, call.iters, call.only_last)
    if given.prior:
        return VBBack(*of_votes, *parents.of_prior())
    return VBBack(*of_votes, *(call.votes.a.new_empty(0) for _ in PriorTensors._fields))


def new_back(given: VBBackCall) -> VBBack:
    """Allocate the outputs of the backward operator."""
    v, prior = given.call.votes, given.call.prior
    of_prior = [torch.empty_like(p) if given.prior else p.new_empty(0) for p in prior]
    return VBBack(torch.empty_like(v.a), torch.empty_like(v.pose), torch.empty_like(v.W), *of_prior)


vb_route_back = Op("vbcaps::vb_route_backward", VBBackCall, VBBack, run_vb_back, new_back)
vb_route_back.refuse_to_differentiate()


class VBKept(NamedTuple):
    """The tensors that the backward pass needs."""

    call: VBCall
    history: History
    E_ln_pi: Tensor  # l j n
    E_lndet: Tensor  # l j n


def keep(call: VBCall, state: VBState) -> VBKept:
    """Select the tensors that the backward pass needs."""
    return VBKept(call, state.history, state.E_ln_pi, state.E_lndet)


def differentiate(kept: VBKept, given: VBState, wanted: dict[str, bool]) -> dict[str, Tensor | None]:
    """Return the gradients of the operator's inputs, by name."""
    call, history, E_ln_pi, E_lndet = kept
    dlogit = torch.zeros_like(E_ln_pi) if given.logit is None else given.logit
    result = VBResultGrads(dlogit, given.m, given.alpha, given.kappa, given.psi, given.nu, E_ln_pi, E_lndet)
    prior = any(want for name, want in wanted.items() if name.startswith("prior_"))
    back = vb_route_back(VBBackCall(call, history, result, prior))
    made: dict[str, Tensor | None] = dict(votes_a=back.a, votes_pose=back.pose, votes_W=back.W)
    if prior:
        made |= {f"prior_{name}": getattr(back, name) for name in PriorTensors._fields}
    if wanted["beta_a"]:
        made["beta_a"] = dlogit.sum((0, 2))
    if wanted["beta_u"]:
        times_votes = call.rule.activation in TIMES_VOTES
        made["beta_u"] = -(dlogit * history.rj[-1] if times_votes else dlogit).sum((0, 2))
    return made


vb_route.differentiate(keep, differentiate)


def vb_routing_fused(routing: VBRouting, votes: Votes, posterior: bool) -> tuple[Tensor, Tensor, Posterior | None]:
    """Route like ``vb_routing``, without storing the votes.

    Args:
        routing: the module, for its prior, offsets and options.
        votes: the tensors from which the votes are computed.
        posterior: whether to return the posterior; leaving it out saves some copies.

    Returns:
        The logit ``n l j``, the means ``n l j p r``, and the posterior or None. The responsibilities of the posterior
        have no gradient: asking for it raises an error.
    """
    p = routing.prior()
    prior = PriorTensors(*(x.contiguous() for x in (p.alpha0, p.m0, p.kappa0, p.inv_Psi0, p.nu0)))
    rule = VBRule(routing.prior.precision == "wishart", routing.activation, routing.temper)
    beta_a, beta_u = routing.offsets().values()
    state = vb_route(VBCall(votes, prior, rule, beta_a, beta_u, routing.iters, only_last=routing.through == "last"))
    run = backend_named(votes.backend)
    logit, means = images_first(state.logit), poses_first(run, state.m)
    if not posterior:
        return logit, means, None
    r = responsibilities(run, state.r, votes)
    r = r.detach() if routing.through == "last" else r
    alpha, kappa, nu = (images_first(x) for x in (state.alpha, state.kappa, state.nu))
    psi = poses_first(run, state.psi).flatten(3)
    temper = state.logit.new_full((), routing.temper)
    return logit, means, Posterior(alpha, means.flatten(3), kappa, psi, nu, r, p, temper)

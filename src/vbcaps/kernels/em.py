"""EM routing by a backend's passes: the fast twin of routing/em.py. Its moments have no prior."""

from typing import NamedTuple

import torch
from torch import Tensor

from vbcaps.kernels.backend import Backend, EMResultGrads, MomentGrads, Moments, Votes, backend_named
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
from vbcaps.routing.em import EMRouting, Mixture

D = 16


class EMCall(NamedTuple):
    """The inputs of the operator."""

    votes: Votes
    beta_a: Tensor  # j
    beta_u: Tensor  # j
    iters: int
    temperature: float
    growth: float
    min_var: float

    def inverse_temperature(self, t: int) -> float:
        """Return the inverse temperature of iteration t."""
        return self.temperature * (1 - self.growth ** (t + 1))


class EMState(NamedTuple):
    """The outputs of the operator."""

    logit: Tensor  # l j n
    var: Tensor  # poses l j n
    m: Tensor  # from here on, History
    early_m: Tensor
    rj: Tensor
    S: Tensor
    r: Tensor

    @property
    def history(self) -> History:
        """Return the moments and responsibilities of every iteration."""
        return History(*(getattr(self, name) for name in History._fields))


def new_state(call: EMCall) -> EMState:
    """Allocate the operator's outputs."""
    v, run = call.votes, backend_named(call.votes.backend)
    _, N, L, _, J = v.sizes
    return EMState(v.a.new_empty(L, J, N), run.new_poses(v.a, L, J, N), *new_history(run, v, call.iters))


class EMParents:
    """EM's updates at its parents, the M-step and the E-step, see ``order.Parents``."""

    def __init__(self, run: Backend, call: EMCall, state: EMState):
        self.run, self.call, self.state, self.moments = run, call, state, state.history.moments
        self.k0, self.m0 = state.logit.new_zeros(()), state.logit.new_zeros(D)
        self.lam, self.K = torch.empty_like(state.m), torch.empty_like(state.logit)

    def update(self, t: int, moments: Moments, spread: Tensor) -> None:
        call, last = self.call, t == self.call.iters - 1
        step = self.run.em_logit if last else self.run.em_update
        room = (self.state.logit, self.state.var) if last else (self.lam, self.K)
        inverse_temperature = call.inverse_temperature(t)
        step(moments, spread, call.beta_a, call.beta_u, inverse_temperature, call.min_var, *room)

    def score(self, t: int, moments: Moments, r: Tensor) -> None:
        self.run.scores(self.call.votes, moments.m, self.lam, self.K, r)


def run_em(call: EMCall) -> EMState:
    """Run EM routing."""
    run, state = backend_named(call.votes.backend), new_state(call)
    route(run, call.votes, EMParents(run, call, state), state.r, call.iters)
    return state


em_route = Op("vbcaps::em_route", EMCall, EMState, run_em, new_state)


class EMKept(NamedTuple):
    """The tensors that the backward pass needs."""

    call: EMCall
    history: History


class EMBackCall(NamedTuple):
    """The inputs of the backward operator: the forward call, its history, and the gradients of its result."""

    call: EMCall
    history: History
    result: EMResultGrads


class EMBack(NamedTuple):
    """The outputs of the backward operator."""

    a: Tensor
    pose: Tensor
    W: Tensor
    beta_a: Tensor
    beta_u: Tensor


class EMParentGrads:
    """The gradients of the M-steps, see ``order.ParentGrads``."""

    def __init__(self, run: Backend, given: EMBackCall):
        self.run, self.given = run, given
        call, v = given.call, given.call.votes
        _, N, L, _, J = v.sizes
        self.g = MomentGrads(run.new_poses(v.a, L, J, N), run.new_poses(v.a, L, J, N), v.a.new_empty(L, J, N))
        # The gradient of beta_a in every iteration, because activations take part in routing.
        self.glogit = v.a.new_empty(call.iters, L, J, N)
        self.U = new_score_sums(run, v)
        self.terms = run.new_terms(v, call.iters)

    def back(self, t: int) -> None:
        given, call, history = self.given, self.given.call, self.given.history
        self.run.em_grad(
            history.moments(t), history.m, call.beta_a, call.beta_u, call.inverse_temperature(t), call.min_var,
            given.result if t == call.iters - 1 else None, self.U, self.g, self.terms, t, call.iters, self.glogit[t],
        )  # fmt: skip

    def moments(self, t: int) -> tuple[Tensor, MomentGrads]:
        return self.center(t), self.g

    def center(self, t: int) -> Tensor:
        return self.given.history.moments(t).m


def run_em_back(given: EMBackCall) -> EMBack:
    """Compute the gradients of EM routing."""
    call, history = given.call, given.history
    run = backend_named(call.votes.backend)
    parents = EMParentGrads(run, given)
    of_votes = route_back(run, call.votes, parents, history.r, call.iters)
    return EMBack(*of_votes, parents.glogit.sum((0, 1, 3)), -D * (parents.glogit * history.rj).sum((0, 1, 3)))


def new_back(given: EMBackCall) -> EMBack:
    """Allocate the outputs of the backward operator."""
    v, call = given.call.votes, given.call
    return EMBack(*map(torch.empty_like, (v.a, v.pose, v.W, call.beta_a, call.beta_u)))


em_route_back = Op("vbcaps::em_route_backward", EMBackCall, EMBack, run_em_back, new_back)
em_route_back.refuse_to_differentiate()


def keep(call: EMCall, state: EMState) -> EMKept:
    """Select the tensors that the backward pass needs."""
    return EMKept(call, state.history)


def differentiate(kept: EMKept, given: EMState, wanted: dict[str, bool]) -> dict[str, Tensor | None]:
    """Return the gradients of the operator's inputs, by name."""
    dlogit = torch.zeros_like(kept.history.rj[0]) if given.logit is None else given.logit
    back = em_route_back(EMBackCall(kept.call, kept.history, EMResultGrads(dlogit, given.m, given.var)))
    return dict(votes_a=back.a, votes_pose=back.pose, votes_W=back.W, beta_a=back.beta_a, beta_u=back.beta_u)


em_route.differentiate(keep, differentiate)


def em_routing_fused(routing: EMRouting, votes: Votes, posterior: bool) -> tuple[Tensor, Tensor, Mixture | None]:
    """Route like ``em_routing``, without storing the votes; see ``vb_routing_fused``."""
    beta_a, beta_u = routing.beta_a.contiguous(), routing.beta_u.contiguous()
    state = em_route(EMCall(votes, beta_a, beta_u, routing.iters, routing.temperature, routing.growth, routing.min_var))
    run = backend_named(votes.backend)
    logit, means = images_first(state.logit), poses_first(run, state.m)
    if not posterior:
        return logit, means, None
    r = responsibilities(run, state.r, votes)
    return logit, means, Mixture(means.flatten(3), poses_first(run, state.var).flatten(3), r)

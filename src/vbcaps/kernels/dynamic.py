"""Dynamic routing by a backend's passes: the fast twin of routing/dynamic.py.

Scores are linear in a vote here: b_ij is sum_d w_jd V_ijd, where w_j is the sum of the parent's poses so far. The
update of a parent is short, and written in plain PyTorch.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vbcaps.kernels.backend import Backend, MomentGrads, Moments, Votes, backend_named
from vbcaps.kernels.ops import Op
from vbcaps.kernels.order import images_first, new_score_sums, poses_first, responsibilities, route, route_back
from vbcaps.routing.dynamic import Agreement, DynamicRouting, squash

TINY = torch.finfo(torch.float32).tiny ** 0.5


class DynamicCall(NamedTuple):
    """The inputs of the operator."""

    votes: Votes
    iters: int


class DynamicState(NamedTuple):
    """The outputs of the operator: the result, and the sums of every iteration for the backward pass."""

    logit: Tensor  # l j n
    m: Tensor  # poses l j n
    r: Tensor  # slots t l i j n     responsibilities that iterations 1, 2, ... used
    s: Tensor  # poses t l j n       sums of votes
    w: Tensor  # poses t l j n       sums of the parents' poses


def new_state(call: DynamicCall) -> DynamicState:
    """Allocate the operator's outputs."""
    v, T, run = call.votes, call.iters, backend_named(call.votes.backend)
    _, N, L, _, J = v.sizes
    return DynamicState(
        v.a.new_empty(L, J, N), run.new_poses(v.a, L, J, N), run.new_slots(v, T - 1), run.new_poses(v.a, T, L, J, N),
        run.new_poses(v.a, T - 1, L, J, N),
    )  # fmt: skip


class DynamicParents:
    """Dynamic routing's update at its parents, which squashes the sum of the votes, see ``order.Parents``."""

    def __init__(self, run: Backend, call: DynamicCall, state: DynamicState):
        self.run, self.call, self.state = run, call, state
        self.k0, self.m0 = state.logit.new_zeros(()), state.logit.new_zeros(16)
        rj, mean = torch.empty_like(state.logit), torch.empty_like(state.m)
        self.now = Moments(rj, mean, torch.empty_like(state.m))

    def moments(self, t: int) -> Moments:
        return self.now

    def update(self, t: int, moments: Moments, spread: Tensor) -> None:
        state, as_poses = self.state, self.run.as_poses
        s_t = torch.mul(moments.rj[..., None, None], as_poses(moments.m), out=as_poses(state.s[t]))
        length2 = s_t.square().sum((3, 4))
        v_t = squash(s_t, length2[..., None, None], TINY)
        if t < self.call.iters - 1:
            as_poses(state.w[t]).copy_(v_t if t == 0 else v_t + as_poses(state.w[t - 1]))
        else:
            as_poses(state.m).copy_(v_t)
            torch.log(length2 + TINY, out=state.logit)

    def score(self, t: int, moments: Moments, r: Tensor) -> None:
        self.run.agreements(self.call.votes, self.state.w[t], r)


def run_dynamic(call: DynamicCall) -> DynamicState:
    """Run Dynamic routing."""
    run, state = backend_named(call.votes.backend), new_state(call)
    route(run, call.votes, DynamicParents(run, call, state), state.r, call.iters)
    return state


dynamic_route = Op("vbcaps::dynamic_route", DynamicCall, DynamicState, run_dynamic, new_state)


class DynamicKept(NamedTuple):
    """The tensors that the backward pass needs."""

    call: DynamicCall
    r: Tensor
    s: Tensor
    w: Tensor


class DynamicBackCall(NamedTuple):
    """The inputs of the backward operator."""

    kept: DynamicKept
    dlogit: Tensor  # l j n
    dm: Tensor | None  # poses l j n


class DynamicBack(NamedTuple):
    """The outputs of the backward operator."""

    a: Tensor
    pose: Tensor
    W: Tensor


class DynamicParentGrads:
    """The gradients of sums and poses, see ``order.ParentGrads``.

    The gradient of a vote is R_ij ds_j for every sum and dz_ij w_j for every score.
    """

    def __init__(self, run: Backend, given: DynamicBackCall):
        self.run, self.given = run, given
        v, self.T = given.kept.call.votes, given.kept.call.iters
        self.nothing = torch.zeros_like(given.kept.s[0])
        self.g = MomentGrads(torch.empty_like(self.nothing), self.nothing, torch.zeros_like(given.dlogit))
        self.U = new_score_sums(run, v)
        self.terms = run.new_terms(v, self.T).zero_()  # votes enter linearly and without a center
        self.dv = run.as_poses(self.nothing if given.dm is None else given.dm)

    def back(self, t: int) -> None:
        run, kept, last = self.run, self.given.kept, t == self.T - 1
        if not last:
            run.put_term(self.terms, 2 * (self.T + t), kept.w[t], self.T)
            dw = run.as_poses(self.U.U1).sum(0)
            self.dv = dw if t == self.T - 2 else self.dv + dw  # a pose is part of every score after it
        ds = grad_squash(run.as_poses(kept.s[t]), self.dv, self.given.dlogit if last else None)
        run.as_poses(self.g.gb).copy_(ds)
        run.put_term(self.terms, 2 * t, self.g.gb, self.T)

    def moments(self, t: int) -> tuple[Tensor, MomentGrads]:
        return self.nothing, self.g

    def center(self, t: int) -> Tensor:
        return self.nothing


def grad_squash(s: Tensor, dv: Tensor, dlogit: Tensor | None) -> Tensor:  # l j n p r
    """Return the gradient of s in v = f(|s|^2) s, f(x) = sqrt(x + tiny) / (1 + x), and in ln(|s|^2 + tiny)."""
    x = s.square().sum((3, 4), keepdim=True)
    root, whole = (x + TINY).sqrt(), 1 + x
    df = (0.5 / root - root / whole) / whole
    along = 2 * df * (s * dv).sum((3, 4), keepdim=True)
    if dlogit is not None:
        along = along + 2 * dlogit[..., None, None] / (x + TINY)
    return root / whole * dv + along * s


def run_dynamic_back(given: DynamicBackCall) -> DynamicBack:
    """Compute the gradients of Dynamic routing."""
    call = given.kept.call
    run = backend_named(call.votes.backend)
    return DynamicBack(*route_back(run, call.votes, DynamicParentGrads(run, given), given.kept.r, call.iters))


def new_back(given: DynamicBackCall) -> DynamicBack:
    """Allocate the outputs of the backward operator."""
    v = given.kept.call.votes
    return DynamicBack(*map(torch.empty_like, (v.a, v.pose, v.W)))


dynamic_route_back = Op("vbcaps::dynamic_route_backward", DynamicBackCall, DynamicBack, run_dynamic_back, new_back)
dynamic_route_back.refuse_to_differentiate()


def keep(call: DynamicCall, state: DynamicState) -> DynamicKept:
    """Select the tensors that the backward pass needs."""
    return DynamicKept(call, state.r, state.s, state.w)


def differentiate(kept: DynamicKept, given: DynamicState, wanted: dict[str, bool]) -> dict[str, Tensor | None]:
    """Return the gradients of the operator's inputs, by name."""
    _, N, L, _, J = kept.call.votes.sizes
    dlogit = kept.s.new_zeros(L, J, N) if given.logit is None else given.logit
    back = dynamic_route_back(DynamicBackCall(kept, dlogit, given.m))
    return dict(votes_a=back.a, votes_pose=back.pose, votes_W=back.W)


dynamic_route.differentiate(keep, differentiate)


def dynamic_routing_fused(
    routing: DynamicRouting, votes: Votes, posterior: bool
) -> tuple[Tensor, Tensor, Agreement | None]:
    """Route like ``dynamic_routing``, without storing the votes; see ``vb_routing_fused``."""
    state = dynamic_route(DynamicCall(votes, routing.iters))
    run = backend_named(votes.backend)
    logit, poses = images_first(state.logit), poses_first(run, state.m)
    if not posterior:
        return logit, poses, None
    return logit, poses, Agreement(poses.flatten(3), responsibilities(run, state.r, votes))

"""One order of passes for VB, EM and Dynamic routing, forward and backward.

``route`` and ``route_back`` call the passes of a backend in order. Each algorithm updates its parents between passes in
its own way: see ``vb.py``, ``em.py`` and ``dynamic.py``.
"""

import functools
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from vbcaps.kernels.backend import Backend, MomentGrads, Moments, ScoreSums, Votes


class History(NamedTuple):
    """The moments and responsibilities of every iteration, which the backward passes of VB and EM need."""

    m: Tensor  # poses l j n          of the last iteration
    early_m: Tensor  # poses t l j n  of the iterations before
    rj: Tensor  # t l j n
    S: Tensor  # poses t l j n
    r: Tensor  # slots t l i j n      responsibilities that iterations 1, 2, ... used

    def moments(self, t: int) -> Moments:
        """Return the moments of iteration t."""
        return Moments(self.rj[t], self.m if t == len(self.rj) - 1 else self.early_m[t], self.S[t])


def new_history(run: Backend, v: Votes, iters: int) -> History:
    """Allocate a history."""
    _, N, L, _, J = v.sizes
    poses = functools.partial(run.new_poses, v.a)
    return History(
        poses(L, J, N), poses(iters - 1, L, J, N), v.a.new_empty(iters, L, J, N), poses(iters, L, J, N),
        run.new_slots(v, iters - 1),
    )  # fmt: skip


class Parents(Protocol):
    """The updates that an algorithm makes at its parents in one forward pass."""

    k0: Tensor  # () or j     weight of m0 in the moments
    m0: Tensor  # d or j d

    def moments(self, t: int) -> Moments:
        """Return the tensors that receive the moments of iteration t."""

    def update(self, t: int, moments: Moments, spread: Tensor) -> None:
        """Compute the inputs of the scores or, at the last t, the result; ``spread`` holds the parts of S."""

    def score(self, t: int, moments: Moments, r: Tensor) -> None:
        """Write the responsibilities of the next iteration."""


def route(run: Backend, v: Votes, parents: Parents, r: Tensor, iters: int) -> None:
    """Run Algorithm 1, EM routing or Dynamic routing as passes over votes.

    Args:
        run: the backend that provides the passes.
        v: the tensors from which the votes are computed.
        parents: the updates of the parents between the passes.
        r: receives the responsibilities that iterations 1, 2, ... use, iters - 1 times slots l i j n.
        iters: the number of iterations.
    """
    u = run.parts(v)
    with run.prepared(v):
        for t in range(iters):
            moments = parents.moments(t)
            spread = moments.S[None] if u == 1 else run.new_poses(v.a, u, *moments.rj.shape)  # a single part is S
            run.moments(v, r[t - 1] if t else None, parents.k0, parents.m0, moments.rj, moments.m, spread)
            parents.update(t, moments, spread)
            if t < iters - 1:  # nothing would read the last responsibilities
                parents.score(t, moments, r[t])


class ParentGrads(Protocol):
    """The gradients that an algorithm computes at its parents in one backward pass."""

    terms: Tensor  # the terms that parents add to the gradients of votes
    U: ScoreSums  # receives the sums of the present iteration's score gradients

    def back(self, t: int) -> None:
        """Go back through the update of iteration t: from the result's gradients (the last t) or the sums ``U``."""

    def moments(self, t: int) -> tuple[Tensor, MomentGrads]:
        """Return the means m_j of iteration t and the gradients of its moments."""

    def center(self, t: int) -> Tensor:
        """Return the poses around which iteration t computed its scores."""


def route_back(
    run: Backend, v: Votes, parents: ParentGrads, r: Tensor, iters: int, only_last: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of activations (``c n``), poses (poses c n) and weights (``g j q r``).

    Args:
        run: the backend that provides the passes.
        v: the tensors from which the votes are computed.
        parents: the gradients of the parents' updates between the passes.
        r: the responsibilities that ``route`` wrote.
        iters: the number of iterations of ``route``.
        only_last: treat the responsibilities of the last iteration as constants.
    """
    da, s = torch.empty_like(v.a), torch.empty_like(v.a)
    dR = run.new_slots(v, iters - 1)  # becomes dz
    if only_last:
        dR.zero_()
    if iters == 1:
        da.zero_()
    first = iters - 1 if only_last else 0
    with run.prepared(v):
        parents.back(iters - 1)
        for t in range(iters - 1, max(first, 1) - 1, -1):
            run.grad_responsibilities(v, *parents.moments(t), r[t - 1], dR[t - 1], s, da, add=t < iters - 1)
            if t > first:
                run.grad_scores(v, parents.center(t - 1), r[t - 1], s, dR[t - 1], parents.U)
                parents.back(t - 1)
        uniform = parents.moments(0) if first == 0 else None
        return da, *run.grad_votes(v, parents.terms, r, dR, iters, uniform, da)


def new_score_sums(run: Backend, v: Votes) -> ScoreSums:
    """Allocate the sums of score gradients over the slots of each parent."""
    _, N, L, _, J = v.sizes
    u = run.parts(v)
    return ScoreSums(v.a.new_empty(u, L, J, N), run.new_poses(v.a, u, L, J, N), run.new_poses(v.a, u, L, J, N))


# --- views of results ------------------------------------------------------------------------------------------------


def images_first(x: Tensor) -> Tensor:
    """Return ``l j n`` as ``n l j``."""
    return x.permute(2, 0, 1)


def poses_first(run: Backend, x: Tensor) -> Tensor:
    """Return poses l j n as ``n l j p r``."""
    return run.as_poses(x).permute(2, 0, 1, 3, 4)


def responsibilities(run: Backend, r: Tensor, v: Votes) -> Tensor:
    """Return the responsibilities that the last iteration used, ``n l i j``: 1/J if there was only one iteration.

    The passes have no gradient of responsibilities, and asking for it raises an error. Compiled code asks for every
    gradient, so there the responsibilities are detached.
    """
    _, N, L, I, J = v.sizes
    last = run.as_slots(r[-1], v) if len(r) else r.new_full((), 1 / J)
    last = last.detach() if torch.compiler.is_compiling() else NoGradient.apply(last)
    return last.expand(N, L, I, J)


class NoGradient(torch.autograd.Function):
    """The identity, whose backward pass raises an error: any gradient would be wrong."""

    @staticmethod
    def forward(ctx: Any, r: Tensor) -> Tensor:
        return r.view_as(r)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError("fused routing has no gradient of its responsibilities; use backend='reference' to get one")

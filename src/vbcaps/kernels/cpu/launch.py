"""Calls of the C++ kernels: the passes of passes.cpp, and the updates of VB and EM at a parent.

The first call loads the library that was built with the package; or it compiles one, which takes seconds (library.py).
"""

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn

from vbcaps.kernels.backend import (
    EMResultGrads,
    MomentGrads,
    Moments,
    Normaliser,
    NormedCapsules,
    PriorTensors,
    Running,
    ScoreSums,
    TypeNorm,
    VBResult,
    VBResultGrads,
    VBRule,
    Votes,
)
from vbcaps.kernels.cpu import library as loader
from vbcaps.kernels.cpu.calls import call, given, prepared, vectors
from vbcaps.kernels.cpu.conv import convolve
from vbcaps.kernels.cpu.memory import MEMORY
from vbcaps.kernels.cpu.norm import normalise_parents, normalise_primary
from vbcaps.kernels.norm import plain_batch_norm
from vbcaps.kernels.plain import Plain
from vbcaps.kernels.triton import constant
from vbcaps.routing.fields import Fields
from vbcaps.routing.vb import ACTIVATIONS

PLAIN = Plain()
NOT_BUILT = "could not be built"


class Cpu:
    """The C++ kernels, see ``Backend``. Each entry of a pose is stored for all images together: poses are ``p r n``."""

    name = "cpu"
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)

    def refusal(self, a: Tensor, W: Tensor, fields: Fields, iters: int) -> str | None:
        if a.device.type != "cpu":
            return f"needs tensors on the CPU, got {a.device}"
        if why := why_no_library():
            return f"{NOT_BUILT}: {why}"
        return None

    # --- around the routing -----------------------------------------------------------------------------------------

    def convolve(self, conv: nn.Conv2d, x: Tensor) -> Tensor:
        return convolve(conv, x)

    def primary(self, x: Tensor, types: int, norm_a: Normaliser, norm_pose: Normaliser | None) -> NormedCapsules:
        n, channels, h, w = x.shape
        plans = plan(norm_a, n * h * w), plan(norm_pose, 16 * n * h * w)
        if channels != 17 * types or not serves(x, x, (norm_a, norm_pose), plans):
            return PLAIN.primary(x, types, norm_a, norm_pose)
        return normalise_primary(x, *plans)

    def parents(
        self, logit: Tensor, m: Tensor, norm_a: Normaliser | None, norm_pose: Normaliser | None
    ) -> NormedCapsules:
        n, L = logit.shape[:2]
        plans = plan(norm_a, n * L), plan(norm_pose, 16 * n * L)
        if m.shape[-2:] != (4, 4) or plans == (None, None) or not serves(logit, m, (norm_a, norm_pose), plans):
            return PLAIN.parents(logit, m, norm_a, norm_pose)
        return normalise_parents(logit, m, *plans)

    def batch_norm(
        self, x: Tensor, running: Running, momentum: float, eps: float, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        return plain_batch_norm(x, running, momentum, eps, weight, bias)

    # --- memory -----------------------------------------------------------------------------------------------------

    def lay_poses(self, pose: Tensor) -> Tensor:
        return pose.permute(1, 2, 3, 0).contiguous()

    def new_poses(self, like: Tensor, *shape: int) -> Tensor:
        *others, N = shape
        return MEMORY.empty(like, *others, 4, 4, N)

    def as_poses(self, x: Tensor) -> Tensor:
        return x.movedim(-1, -3)

    def new_slots(self, v: Votes, T: int) -> Tensor:
        _, _, L, I, _ = v.sizes
        _, units, blocks, width = vectors(v)
        return MEMORY.empty(v.a, T, L, blocks, I, units * width)

    def as_slots(self, x: Tensor, v: Votes) -> Tensor:
        _, N, _, _, J = v.sizes
        of_types, units, _, width = vectors(v)
        if of_types:
            return x[..., :J].transpose(0, 1)
        return x.unflatten(-1, (units, width)).permute(1, 4, 0, 2, 3).flatten(0, 1)[:N]

    def new_terms(self, v: Votes, iters: int) -> Tensor:
        _, units, blocks, width = vectors(v)
        return MEMORY.empty(v.a, len(v.child), blocks, units, (16 * (4 * iters - 1) + 1) * width)

    def parts(self, v: Votes) -> int:
        return 1

    # --- passes over votes ------------------------------------------------------------------------------------------

    def prepared(self, v: Votes) -> AbstractContextManager[None]:
        return prepared(v)

    def moments(self, v: Votes, r: Tensor | None, k0: Tensor, m0: Tensor, rj: Tensor, m: Tensor, S: Tensor) -> None:
        k0, m0 = given(k0), given(m0)
        call("moments", v, r, k0, k0.ndim, m0, 16 * (m0.ndim - 1), rj, m, S)

    def scores(self, v: Votes, m: Tensor, lam: Tensor, K: Tensor, r: Tensor) -> None:
        call("scores", v, m, lam, K, r)

    def agreements(self, v: Votes, w: Tensor, r: Tensor) -> None:
        call("agreements", v, w, r)

    def grad_responsibilities(
        self, v: Votes, m: Tensor, g: MomentGrads, r: Tensor | None, dR: Tensor, s: Tensor, da: Tensor, add: bool
    ) -> None:
        call("grad_responsibilities", v, m, *g, r, dR, s, da, add)

    def grad_scores(self, v: Votes, m: Tensor, r: Tensor, s: Tensor, dR: Tensor, U: ScoreSums) -> None:
        call("grad_scores", v, m, r, s, dR, *U)

    def put_term(self, terms: Tensor, k: int, x: Tensor, iters: int) -> None:
        L, J, _, _, N = x.shape
        call("put_term", given(x), terms, k, iters, L, J, N)

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
        dpose, dW = MEMORY.empty(v.pose, *v.pose.shape), v.W.new_empty(v.W.shape)
        gr = None if uniform is None else uniform[1].gr  # gb and gS are among the terms
        call("grad_votes", v, terms, r, dz, iters, gr, da, dpose, dW)
        return dpose, dW

    # --- VB at a parent; the only part of S is S itself ------------------------------------------------------------

    def vb_update(
        self, moments: Moments, spread: Tensor, prior: PriorTensors, rule: VBRule, lam: Tensor, K: Tensor
    ) -> None:
        sizes = (*moments.rj.shape, *_numbers(rule), torch.get_num_threads())
        call("vb_parent", moments.rj, moments.S, moments.m, prior, None, None, lam, K, *[None] * 7, *sizes)

    def vb_logit(
        self, moments: Moments, spread: Tensor, prior: PriorTensors, rule: VBRule, beta_a: Tensor, beta_u: Tensor,
        result: VBResult,
    ) -> None:  # fmt: skip
        (rj, m, S), betas = moments, (given(beta_a), given(beta_u))
        sizes = (*rj.shape, *_numbers(rule), torch.get_num_threads())
        call("vb_parent", rj, S, m, prior, *betas, None, None, *result, *sizes)

    def vb_grad(
        self, moments: Moments, last_m: Tensor, prior: PriorTensors, rule: VBRule, beta_u: Tensor,
        result: VBResultGrads | None, U: ScoreSums, g: MomentGrads, terms: Tensor, t: int, iters: int,
        gamma: Tensor | None,
    ) -> None:  # fmt: skip
        rj, m, S = moments
        sizes = (*rj.shape, *_numbers(rule), torch.get_num_threads())
        gammas = [None] * 3 if gamma is None else gamma
        last = result or [None] * 8
        call("vb_grad_parent", rj, S, m, last_m, prior, given(beta_u), *last, *U, *g, terms, iters, t, *gammas, *sizes)

    # --- EM at a parent ---------------------------------------------------------------------------------------------

    def em_update(
        self, moments: Moments, spread: Tensor, beta_a: Tensor, beta_u: Tensor, inverse_temperature: float,
        min_var: float, lam: Tensor, K: Tensor,
    ) -> None:  # fmt: skip
        sizes = (float(inverse_temperature), float(min_var), *moments.rj.shape, torch.get_num_threads())
        call("em_parent", moments.rj, moments.S, given(beta_a), given(beta_u), lam, K, None, None, *sizes)

    def em_logit(
        self, moments: Moments, spread: Tensor, beta_a: Tensor, beta_u: Tensor, inverse_temperature: float,
        min_var: float, logit: Tensor, var: Tensor,
    ) -> None:  # fmt: skip
        sizes = (float(inverse_temperature), float(min_var), *moments.rj.shape, torch.get_num_threads())
        call("em_parent", moments.rj, moments.S, given(beta_a), given(beta_u), None, None, logit, var, *sizes)

    def em_grad(
        self, moments: Moments, last_m: Tensor, beta_a: Tensor, beta_u: Tensor, inverse_temperature: float,
        min_var: float, result: EMResultGrads | None, U: ScoreSums, g: MomentGrads, terms: Tensor, t: int, iters: int,
        glogit: Tensor,
    ) -> None:  # fmt: skip
        rj, m, S = moments
        sizes = (float(inverse_temperature), float(min_var), *rj.shape, torch.get_num_threads())
        betas, last = (given(beta_a), given(beta_u)), result or [None] * 3
        call("em_grad_parent", rj, S, m, last_m, *betas, *last, *U, *g, terms, iters, t, glogit, *sizes)


def _numbers(rule: VBRule) -> tuple[bool, int, float]:
    """Return the rule as vb.cpp takes it."""
    return rule.wishart, ACTIVATIONS.index(rule.activation), rule.temper


def plan(norm: Normaliser | None, values: int) -> TypeNorm | None:
    """Return what a BatchNorm would do with so many values of each type, or None if none or only a call can do it."""
    return None if norm is None else norm.plan(values)


def serves(
    logit: Tensor, pose: Tensor, norms: tuple[Normaliser | None, ...], plans: tuple[TypeNorm | None, ...]
) -> bool:
    """Return whether norm.cpp can normalise these capsules."""
    for norm, planned in zip(norms, plans, strict=True):
        if norm is not None and (planned is None or planned.running.mean.dtype != torch.float32):
            return False
    at_hand = logit.dtype == pose.dtype == torch.float32 and logit.device.type == "cpu" and logit.numel() > 0
    return at_hand and why_no_library() is None


@constant
def why_no_library() -> str | None:
    """Return why there are no CPU kernels on this machine, or None if there are."""
    return loader.why_no_library()

"""Launches of the Triton kernels: the passes over votes, and what VB and EM do at a parent (vb_triton, em_triton)."""

import functools

import torch
import triton
from torch import Tensor

from vbcaps.routing.em_triton import em_grad_parent_kernel, em_parent_kernel
from vbcaps.routing.grads_triton import grad_pose_kernel, grad_weight_kernel
from vbcaps.routing.passes import Votes, triton_interprets
from vbcaps.routing.passes_triton import (
    grad_a_kernel,
    grad_R_kernel,
    grad_z_kernel,
    means_kernel,
    scores_kernel,
    softmax_kernel,
    spreads_kernel,
)
from vbcaps.routing.vb_triton import grad_parent_kernel, parent_kernel

LANES = 128  # of the kernels that have one lane per parent and image
GROUP = 4  # children that share a load of their parents' terms
WARPS = 16 if triton_interprets() else 2048  # to aim at: so many keep a large GPU busy, so few a test short


def row(N: int) -> int:
    """From row to row of N images in r: 32 bytes more than a multiple of the 128 that all banks hold."""
    return triton.cdiv(N, 32) * 32 + 8


def new_slots(like: Tensor, *shape: int) -> Tensor:
    """Room for numbers of slots, types and images, ``... n``."""
    return like.new_empty(*shape[:-1], row(shape[-1]))[..., : shape[-1]]


def as_slots(x: Tensor) -> Tensor:
    """x, or a copy, with rows as `new_slots` lays them out."""
    slots = new_slots(x, *x.shape)
    return x if x.stride() == slots.stride() else slots.copy_(x)


def parts(N: int, L: int, I: int, J: int) -> int:
    """Into how many parts the slots of a field are dealt, for sums over them."""
    warps = L * triton.cdiv(N, 8) * triton.cdiv(J, 4)
    parts = 1
    while parts < 8 and parts * warps < WARPS and 8 * parts < I:
        parts *= 2
    return triton.cdiv(I, triton.cdiv(I, parts))  # none is empty


def moments(v: Votes, r: Tensor | None, k0: Tensor, m0: Tensor, rj: Tensor, m: Tensor, S: Tensor) -> None:
    grid, sizes, options = _fields(v, len(S))
    sum_R, sum_RV = rj.new_empty(len(S), *rj.shape), torch.empty_like(S)
    means_kernel[grid](
        v.a, v.pose, v.W, v.place, v.child, r, sum_R, sum_RV, *sizes, FIRST=r is None, AHEAD=2, **options
    )
    spreads_kernel[grid](
        v.a, v.pose, v.W, v.place, v.child, r, k0, m0, sum_R, sum_RV, rj, m, S, *sizes, len(S),
        k0.ndim, 16 * (m0.ndim - 1), FIRST=r is None, AHEAD=2, maxnreg=96, **options,
    )  # fmt: skip


def scores(v: Votes, m: Tensor, lam: Tensor, K: Tensor, r: Tensor) -> None:
    C, N, _, _, J = v.sizes
    grid, sizes, options = _fields(v)
    scores_kernel[grid](v.pose, v.W, v.place, v.child, m, lam, K, r, *sizes, AHEAD=2, **options)
    softmax_kernel[(C, triton.cdiv(N, 8))](
        r, v.parents, v.seen, N, row(N), J, v.parents.shape[1], EVEN=J % 4 == 0, num_warps=1
    )


def grad_responsibilities(
    v: Votes,
    m: Tensor,
    gb: Tensor,
    gS: Tensor,
    gr: Tensor,
    r: Tensor | None,
    dR: Tensor,
    s: Tensor,
    da: Tensor,
    add: bool,
) -> None:
    C, N, _, _, J = v.sizes
    grid, sizes, options = _fields(v)
    grad_R_kernel[grid](
        v.pose, v.W, v.place, v.child, m, gb, gS, gr, dR, *sizes, AHEAD=2, maxnreg=96, **options
    )  # fmt: skip
    grad_a_kernel[(C, triton.cdiv(N, 8))](
        dR, r, v.parents, v.seen, s, da, N, row(N), J, v.parents.shape[1],
        FIRST=r is None, ADD=add, EVEN=J % 4 == 0, num_warps=1,
    )  # fmt: skip


def grad_scores(v: Votes, m: Tensor, r: Tensor, s: Tensor, dR: Tensor, U0: Tensor, U1: Tensor, U2: Tensor) -> None:
    grid, sizes, options = _fields(v, len(U0))
    grad_z_kernel[grid](
        v.a, v.pose, v.W, v.place, v.child, m, r, s, dR, U0, U1, U2, *sizes, AHEAD=3, **options
    )  # fmt: skip


def new_terms(v: Votes, iters: int) -> Tensor:
    """Room for what each parent adds to dV: E_t, C_t and -m, row by row; ``l g b p t n k r``."""
    _, N, L, _, J = v.sizes
    return v.a.new_empty(L, triton.cdiv(J, 4), triton.cdiv(N, 8), 4, 4 * iters - 1, 8, 4, 4)


def terms(coef: Tensor, t: int, iters: int) -> tuple[Tensor, Tensor | None]:
    """Where E, C of moments t stand, and those of scores t."""
    return coef[:, :, :, :, 2 * t :], None if t == iters - 1 else coef[:, :, :, :, 2 * (iters + t) :]


def grad_votes(v: Votes, m: Tensor, coef: Tensor, r: Tensor, dz: Tensor, iters: int) -> tuple[Tensor, Tensor]:
    C, N, L, I, J = v.sizes
    G, slots = len(v.W), L * I * J * row(N)
    dpose = torch.empty_like(v.pose)
    options = dict(GROUP=GROUP, T=iters, num_warps=1, **_weights(v))
    grad_pose_kernel[(C // v.types * triton.cdiv(v.types, GROUP), triton.cdiv(N, 8), 2)](
        v.a, v.pose, v.W, v.place, v.parents, v.seen, coef, r, dz, dpose,
        N, row(N), I, J, v.parents.shape[1], v.types, slots, **options,
    )  # fmt: skip
    grid = triton.cdiv(G, GROUP), 2 * triton.cdiv(J, 8)
    work = L * (I // G) * triton.cdiv(N, 4)
    rounds = triton.cdiv(work, triton.cdiv(4 * WARPS, grid[0] * grid[1]))
    pieces = triton.cdiv(work, rounds)
    dW = v.W.new_empty(pieces, *v.W.shape)
    grad_weight_kernel[(*grid, pieces)](
        v.a, v.pose, v.W, v.place, v.child, coef, r, dz, dW,
        N, row(N), L, I, J, G, rounds, slots, **options,
    )  # fmt: skip
    return dpose, dW.sum(0) if pieces > 1 else dW[0]


def _fields(v: Votes, parts: int | None = None) -> tuple[tuple[int, int, int], tuple[int, ...], dict[str, int | bool]]:
    """A program for a part of a field's slots, 8 images and up to 16 types; at least 16 slots where all may choose."""
    _, N, L, I, J = v.sizes
    groups = triton.cdiv(J, 4)
    warps = min(4, triton.next_power_of_2(groups))
    programs = L * triton.cdiv(N, 8) * triton.cdiv(groups, warps)
    if parts is None:
        parts = max(1, min(I // 16, triton.cdiv(2 * WARPS, programs * warps)))
    chunk = triton.cdiv(I, parts)
    grid = triton.cdiv(I, chunk), L, programs // L
    return grid, (N, row(N), I, J, chunk), dict(WARPS=warps, num_warps=warps, **_weights(v))


def _weights(v: Votes) -> dict[str, int | bool]:
    """SHARED: how many rows of weights all positions share, 0 where each slot has its own."""
    G = len(v.W)
    return dict(SHARED=0 if v.child.shape[1] == G else G, PLACE=v.place is not None, MMA=_has_tensor_cores(v.a.device))


@functools.cache
def _has_tensor_cores(device: torch.device) -> bool:
    """Whether `mma` of TF32 is there: NVIDIA since Ampere; not in Triton's interpreter."""
    return not triton_interprets() and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


# --- VB at a parent -----------------------------------------------------------------------------------------------

VBPrior = tuple[Tensor, Tensor, Tensor, Tensor]  # alpha0, kappa0, nu0, inv_psi0


def vb_parent(rj: Tensor, S: Tensor, prior: VBPrior, lam: Tensor, K: Tensor, wishart: bool) -> None:
    L, J, N = rj.shape
    parent_kernel[(triton.cdiv(L * J * N, LANES),)](
        rj, S, *prior, None, None, lam, K, *[None] * 7, L * J * N, len(S), N, J, *_strides(*prior),
        LAST=False, WISHART=wishart, PAPER=False, TYPES=triton.next_power_of_2(J), LANES=LANES,
    )  # fmt: skip


def vb_logit(
    rj: Tensor, S: Tensor, prior: VBPrior, beta_a: Tensor, beta_u: Tensor, logit: Tensor, alpha: Tensor, kappa: Tensor,
    psi: Tensor, nu: Tensor, E_ln_pi: Tensor, E_lndet: Tensor, wishart: bool, paper: bool,
) -> None:  # fmt: skip
    L, J, N = rj.shape
    parent_kernel[(triton.cdiv(L * J * N, LANES),)](
        rj, S, *prior, beta_a, beta_u, None, None, logit, alpha, kappa, psi, nu, E_ln_pi, E_lndet,
        L * J * N, len(S), N, J, *_strides(*prior),
        LAST=True, WISHART=wishart, PAPER=paper, TYPES=triton.next_power_of_2(J), LANES=LANES,
    )  # fmt: skip


def vb_grad_parent(
    rj: Tensor, S: Tensor, m: Tensor, last_m: Tensor, prior: VBPrior, beta_u: Tensor, last: tuple | None, U: tuple,
    gb: Tensor, gS: Tensor, gr: Tensor, coef: Tensor, score_coef: Tensor | None, gamma: Tensor | None,
    wishart: bool, paper: bool,
) -> None:  # fmt: skip
    """`last`: gradients of logit, m, alpha, kappa, psi, nu (None where there is none), and E[ln pi], E[ln det]."""
    L, J, N = rj.shape
    given = last or (None,) * 8
    has = {f"HAS_{k}": g is not None for k, g in zip(("M", "ALPHA", "KAPPA", "PSI", "NU"), given[1:6], strict=True)}
    grad_parent_kernel[(triton.cdiv(L * J * N, LANES),)](
        rj, S, m, last_m, *prior, beta_u, *given, *U, gb, gS, gr, coef, score_coef, coef[:, :, :, :, -1:],
        *((None, None, None) if gamma is None else gamma), L * J * N, len(S), N, J, coef.stride(3), *_strides(*prior),
        LAST=last is not None, WISHART=wishart, PAPER=paper, PRIOR=gamma is not None, TYPES=triton.next_power_of_2(J),
        LANES=LANES, **has,
    )  # fmt: skip


def _strides(alpha0: Tensor, kappa0: Tensor, nu0: Tensor, inv_psi0: Tensor) -> tuple[int, int, int, int]:
    """From one type's prior to the next: 0 where all types share it."""
    return alpha0.ndim, kappa0.ndim, nu0.ndim, 16 * (inv_psi0.ndim - 1)


# --- EM at a parent -----------------------------------------------------------------------------------------------


def em_parent(
    rj: Tensor, S: Tensor, beta_a: Tensor, beta_u: Tensor, lam: Tensor, K: Tensor, inverse_temperature: float,
    min_var: float,
) -> None:  # fmt: skip
    L, J, N = rj.shape
    em_parent_kernel[(triton.cdiv(L * J * N, LANES),)](
        rj, S, beta_a, beta_u, lam, K, None, None, L * J * N, len(S), N, J, inverse_temperature, min_var,
        LAST=False, LANES=LANES,
    )  # fmt: skip


def em_logit(
    rj: Tensor, S: Tensor, beta_a: Tensor, beta_u: Tensor, logit: Tensor, var: Tensor, inverse_temperature: float,
    min_var: float,
) -> None:  # fmt: skip
    L, J, N = rj.shape
    em_parent_kernel[(triton.cdiv(L * J * N, LANES),)](
        rj, S, beta_a, beta_u, None, None, logit, var, L * J * N, len(S), N, J, inverse_temperature, min_var,
        LAST=True, LANES=LANES,
    )  # fmt: skip


def em_grad_parent(
    rj: Tensor, S: Tensor, m: Tensor, last_m: Tensor, beta_a: Tensor, beta_u: Tensor, last: tuple | None, U: tuple,
    gb: Tensor, gS: Tensor, gr: Tensor, coef: Tensor, score_coef: Tensor | None, glogit: Tensor,
    inverse_temperature: float, min_var: float,
) -> None:  # fmt: skip
    """`last`: gradients of logit, m, var (None where there is none)."""
    L, J, N = rj.shape
    given = last or (None,) * 3
    em_grad_parent_kernel[(triton.cdiv(L * J * N, LANES),)](
        rj, S, m, last_m, beta_a, beta_u, *given, *U, gb, gS, gr, coef, score_coef, coef[:, :, :, :, -1:], glogit,
        L * J * N, len(S), N, J, coef.stride(3), inverse_temperature, min_var,
        LAST=last is not None, HAS_M=given[1] is not None, HAS_VAR=given[2] is not None, LANES=LANES,
    )  # fmt: skip

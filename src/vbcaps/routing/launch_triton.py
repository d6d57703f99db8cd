"""Launches of the Triton kernels: the passes of passes_triton.py, and what VB does at a parent (vb_triton.py)."""

import torch
import triton
from torch import Tensor

from vbcaps.routing.em_triton import em_grad_parent_kernel, em_parent_kernel
from vbcaps.routing.passes import Votes
from vbcaps.routing.passes_triton import (
    grad_a_kernel,
    grad_pose_kernel,
    grad_R_kernel,
    grad_weight_kernel,
    grad_z_kernel,
    moments_kernel,
    normaliser_kernel,
    scores_kernel,
)
from vbcaps.routing.vb_triton import grad_parent_kernel, parent_kernel

LANES = 128  # of the kernels that have one lane per parent and image


def moments(v: Votes, z: Tensor | None, ln_Z: Tensor, k0: Tensor, m0: Tensor, rj: Tensor, m: Tensor, S: Tensor) -> None:
    _, N, L, I, J = v.sizes
    split, warps = _split(v), _warps(J)
    moments_kernel[(L, triton.cdiv(J, warps), triton.cdiv(N, 32 // split))](
        v.a, v.pose, v.W, v.place, v.child, z, ln_Z, k0, m0, rj, m, S, N, I, J, k0.ndim, 16 * (m0.ndim - 1),
        FIRST=z is None, SPLIT=split, WARPS=warps, num_warps=warps, **_weights(v),
    )  # fmt: skip


def scores(v: Votes, m: Tensor, lam: Tensor, K: Tensor, z: Tensor, ln_Z: Tensor) -> None:
    C, N, L, I, J = v.sizes
    split, warps = _split(v), _warps(J)
    chunk = _chunk(I, split)
    scores_kernel[(L * triton.cdiv(I, chunk), triton.cdiv(J, warps), triton.cdiv(N, 32 // split))](
        v.pose, v.W, v.place, v.child, m, lam, K, z, N, I, J, chunk,
        SPLIT=split, WARPS=warps, num_warps=warps, **_weights(v),
    )  # fmt: skip
    warps = _warps(C)
    normaliser_kernel[(triton.cdiv(C, warps), triton.cdiv(N, 32 // split))](
        z, v.parents, v.seen, ln_Z, C, N, J, v.parents.shape[1], SPLIT=split, WARPS=warps, num_warps=warps
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
    C, N, L, I, J = v.sizes
    split, warps = _split(v), _warps(J)
    chunk = _chunk(I, split)
    grad_R_kernel[(L * triton.cdiv(I, chunk), triton.cdiv(J, warps), triton.cdiv(N, 32 // split))](
        v.pose, v.W, v.place, v.child, m, gb, gS, gr, dR, N, I, J, chunk,
        SPLIT=split, WARPS=warps, num_warps=warps, **_weights(v),
    )  # fmt: skip
    warps = _warps(C)
    grad_a_kernel[(triton.cdiv(C, warps), triton.cdiv(N, 32 // split))](
        dR, r, v.parents, v.seen, s, da, C, N, J, v.parents.shape[1],
        FIRST=r is None, ADD=add, SPLIT=split, WARPS=warps, num_warps=warps,
    )  # fmt: skip


def grad_scores(v: Votes, m: Tensor, r: Tensor, s: Tensor, dR: Tensor, U0: Tensor, U1: Tensor, U2: Tensor) -> None:
    _, N, L, I, J = v.sizes
    split, warps = _split(v), _warps(J)
    grad_z_kernel[(L, triton.cdiv(J, warps), triton.cdiv(N, 32 // split))](
        v.a, v.pose, v.W, v.place, v.child, m, r, s, dR, U0, U1, U2, N, I, J,
        SPLIT=split, WARPS=warps, num_warps=warps, **_weights(v),
    )  # fmt: skip


def new_terms(v: Votes, iters: int) -> Tensor:
    """Room for what each parent adds to dV: E_k, C_k and m, row by row; ``l j p k n r``."""
    _, N, L, _, J = v.sizes
    return v.a.new_empty(L, J, 4, 4 * iters - 1, N, 4)


def terms(coef: Tensor, t: int, iters: int) -> tuple[Tensor, Tensor | None]:
    """Where E, C of moments t stand, and those of scores t."""
    return coef[:, :, :, 2 * t :], None if t == iters - 1 else coef[:, :, :, 2 * (iters + t) :]


def grad_votes(v: Votes, m: Tensor, coef: Tensor, r: Tensor, dz: Tensor, iters: int) -> tuple[Tensor, Tensor]:
    C, N, L, I, J = v.sizes
    split, G = _split(v), v.W.shape[0]
    slots = L * I * J * N
    dpose = torch.empty_like(v.pose)
    pairs = C // v.types * triton.cdiv(v.types, 2)
    warps = _warps(pairs)
    grad_pose_kernel[(triton.cdiv(pairs, warps), triton.cdiv(N, 32 // split))](
        v.a, v.pose, v.W, v.place, v.parents, v.seen, coef, r, dz, dpose,
        N, I, J, C, v.parents.shape[1], slots,
        TYPES=v.types, T=iters, SPLIT=split, WARPS=warps, num_warps=warps, **_weights(v),
    )  # fmt: skip
    warps = _warps(triton.cdiv(G, 2))
    blocks = triton.cdiv(N, 32 // split)
    blocks = triton.cdiv(blocks, triton.cdiv(16384, G * J))  # of images a program: few, until some 8000 warps run
    pieces = triton.cdiv(triton.cdiv(N, 32 // split), blocks)
    dW = v.W.new_empty(pieces, *v.W.shape)
    grad_weight_kernel[(triton.cdiv(G, 2 * warps), J, pieces)](
        v.a, v.pose, v.W, v.place, v.child, coef, r, dz, dW, N, L, I, J, blocks, slots,
        T=iters, SPLIT=split, WARPS=warps, num_warps=warps, **_weights(v),
    )  # fmt: skip
    return dpose, dW.sum(0) if pieces > 1 else dW[0]


def _warps(work: int) -> int:
    return min(4, triton.next_power_of_2(work))


def _chunk(slots: int, split: int) -> int:
    """Slots per program: at least four rounds, so that the parents are not all it loads."""
    return triton.cdiv(triton.cdiv(slots, 4), 4 * split) * 4 * split


def _split(v: Votes) -> int:
    """Lanes of a warp per image: few, to read whole sectors; more where there are too few parents and images."""
    _, N, L, I, J = v.sizes
    split = 4
    while split < 32 and (32 // split > N or L * J * N * split < 65536) and split < I:
        split *= 2
    return split


def _weights(v: Votes) -> dict[str, int | bool]:
    return dict(G=v.W.shape[0], PLACE=v.place is not None)


# --- VB at a parent -----------------------------------------------------------------------------------------------

VBPrior = tuple[Tensor, Tensor, Tensor, Tensor]  # alpha0, kappa0, nu0, inv_psi0


def vb_parent(rj: Tensor, S: Tensor, prior: VBPrior, lam: Tensor, K: Tensor, wishart: bool) -> None:
    L, J, N = rj.shape
    parent_kernel[(triton.cdiv(L * J * N, LANES),)](
        rj, S, *prior, None, None, lam, K, *[None] * 7, L * J * N, N, J, *_strides(*prior),
        LAST=False, WISHART=wishart, PAPER=False, LANES=LANES,
    )  # fmt: skip


def vb_logit(
    rj: Tensor, S: Tensor, prior: VBPrior, beta_a: Tensor, beta_u: Tensor, logit: Tensor, alpha: Tensor, kappa: Tensor,
    psi: Tensor, nu: Tensor, E_ln_pi: Tensor, E_lndet: Tensor, wishart: bool, paper: bool,
) -> None:  # fmt: skip
    L, J, N = rj.shape
    parent_kernel[(triton.cdiv(L * J * N, LANES),)](
        rj, S, *prior, beta_a, beta_u, None, None, logit, alpha, kappa, psi, nu, E_ln_pi, E_lndet,
        L * J * N, N, J, *_strides(*prior), LAST=True, WISHART=wishart, PAPER=paper, LANES=LANES,
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
        rj, S, m, last_m, *prior, beta_u, *given, *U, gb, gS, gr, coef, score_coef, coef[:, :, :, -1:],
        *((None, None, None) if gamma is None else gamma), L * J * N, N, J, coef.stride(2), *_strides(*prior),
        LAST=last is not None, WISHART=wishart, PAPER=paper, PRIOR=gamma is not None, LANES=LANES, **has,
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
        rj, S, beta_a, beta_u, lam, K, None, None, L * J * N, N, J, inverse_temperature, min_var,
        LAST=False, LANES=LANES,
    )  # fmt: skip


def em_logit(
    rj: Tensor, S: Tensor, beta_a: Tensor, beta_u: Tensor, logit: Tensor, var: Tensor, inverse_temperature: float,
    min_var: float,
) -> None:  # fmt: skip
    L, J, N = rj.shape
    em_parent_kernel[(triton.cdiv(L * J * N, LANES),)](
        rj, S, beta_a, beta_u, None, None, logit, var, L * J * N, N, J, inverse_temperature, min_var,
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
        rj, S, m, last_m, beta_a, beta_u, *given, *U, gb, gS, gr, coef, score_coef, coef[:, :, :, -1:], glogit,
        L * J * N, N, J, coef.stride(2), inverse_temperature, min_var,
        LAST=last is not None, HAS_M=given[1] is not None, HAS_VAR=given[2] is not None, LANES=LANES,
    )  # fmt: skip

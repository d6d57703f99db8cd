"""Launches of the Triton kernels: the passes over votes, and what VB and EM do at a parent (vb_triton, em_triton)."""

import functools
import math

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from vbcaps.kernels.passes import Votes, triton_interprets
from vbcaps.kernels.triton.em import em_grad_parent_kernel, em_parent_kernel
from vbcaps.kernels.triton.gradients import (
    grad_a_kernel,
    grad_pose_kernel,
    grad_R_kernel,
    grad_weight_kernel,
    grad_z_kernel,
)
from vbcaps.kernels.triton.passes import means_kernel, scores_kernel, softmax_kernel, spreads_kernel
from vbcaps.kernels.triton.vb import grad_parent_kernel, parent_kernel

LANES = 32  # of the kernels that have one lane per parent and image
ROOM = 4  # programs of four warps that a multiprocessor holds at once, with up to 128 registers


def fours(I: int, types: int) -> int:
    """Of slots in a field: those of four types at one position go together."""
    return I // types * triton.cdiv(types, 4)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of the GPU; for Triton's interpreter so few that tests stay short, so many that fields are dealt out in parts."""
    return 1 if triton_interprets() else torch.cuda.get_device_properties(device).multi_processor_count


def best_chunk(programs: int, U: int, most: int, cost: int, device: torch.device) -> int:
    """How many of a field's U fours a program should take, where all fields as a whole would be so many programs.

    In up to `most` parts. A program costs `cost` fours beside; programs run in waves of as many as the GPU holds.
    """
    room = ROOM * multiprocessors(device)
    chunks = {triton.cdiv(U, parts) for parts in range(1, min(most, U) + 1)}
    return min(sorted(chunks), key=lambda c: triton.cdiv(programs * triton.cdiv(U, c), room) * (c + cost))


def parts(a: Tensor, L: int, I: int, J: int, types: int) -> int:
    """Into how many parts the slots of a field are dealt, for sums over them."""
    U, (programs, _) = fours(I, types), _programs(a.shape[1], L, J)
    return triton.cdiv(U, best_chunk(programs, U, 8, 4, a.device))


def moments(v: Votes, r: Tensor | None, k0: Tensor, m0: Tensor, rj: Tensor, m: Tensor, spread: Tensor) -> None:
    """`spread`: parts of S_j, to be added."""
    grid, sizes, options = _fields(v, len(spread))
    sum_R, sum_RV = rj.new_empty(len(spread), *rj.shape), torch.empty_like(spread)
    means_kernel[grid](v.a, v.pose, v.W, v.place, v.child, r, sum_R, sum_RV, *sizes, FIRST=r is None, **options)
    spreads_kernel[grid](
        v.a, v.pose, v.W, v.place, v.child, r, k0, m0, sum_R, sum_RV, rj, m, spread, *sizes,
        len(spread), k0.ndim, 16 * (m0.ndim - 1), FIRST=r is None, **options,
    )  # fmt: skip


def scores(v: Votes, m: Tensor, lam: Tensor, K: Tensor, r: Tensor) -> None:
    grid, sizes, options = _fields(v)
    scores_kernel[grid](v.pose, v.W, v.place, v.child, m, lam, K, r, *sizes, **options)
    children, sizes, options = _children(v)
    softmax_kernel[children](r, v.parents, v.seen, *sizes, **options)


def agreements(v: Votes, w: Tensor, r: Tensor) -> None:
    """The softmax of z_ij = sum_d w_jd V_ijd: that sum is how a responsibility answers to a gradient w of sum R V."""
    grid, sizes, options = _fields(v)
    nothing, none = torch.zeros_like(w), w.new_zeros(w.shape[:-2])
    grad_R_kernel[grid](v.pose, v.W, v.place, v.child, nothing, w, nothing, none, r, *sizes, maxnreg=128, **options)
    children, sizes, options = _children(v)
    softmax_kernel[children](r, v.parents, v.seen, *sizes, **options)


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
    grid, sizes, options = _fields(v)
    grad_R_kernel[grid](v.pose, v.W, v.place, v.child, m, gb, gS, gr, dR, *sizes, maxnreg=128, **options)
    children, sizes, options = _children(v)
    grad_a_kernel[children](dR, r, v.parents, v.seen, s, da, *sizes, FIRST=r is None, ADD=add, **options)


def grad_scores(v: Votes, m: Tensor, r: Tensor, s: Tensor, dR: Tensor, U0: Tensor, U1: Tensor, U2: Tensor) -> None:
    grid, sizes, options = _fields(v, len(U0))
    grad_z_kernel[grid](v.a, v.pose, v.W, v.place, v.child, m, r, s, dR, U0, U1, U2, *sizes, maxnreg=128, **options)


def new_terms(v: Votes, iters: int) -> Tensor:
    """Room for what each parent adds to dV: E_t, C_t and -m, row by row; ``l g b p t n k r``."""
    _, N, L, _, J = v.sizes
    return v.a.new_empty(L, triton.cdiv(J, 4), triton.cdiv(N, 8), 4, 4 * iters - 1, 8, 4, 4)


def terms(coef: Tensor, t: int, iters: int) -> tuple[Tensor, Tensor | None]:
    """Where E, C of moments t stand, and those of scores t."""
    return coef[:, :, :, :, 2 * t :], None if t == iters - 1 else coef[:, :, :, :, 2 * (iters + t) :]


def put_term(coef: Tensor, k: int, x: Tensor, iters: int) -> None:
    """Write the poses ``x: l j n r p`` as term k."""
    L, groups, blocks = coef.shape[:3]
    J, N = x.shape[1:3]
    x = F.pad(x, (0, 0, 0, 0, 0, 8 * blocks - N, 0, 4 * groups - J))
    coef[:, :, :, :, k].copy_(x.view(L, groups, 4, blocks, 8, 4, 4).permute(0, 1, 3, 6, 4, 2, 5))


def grad_votes(v: Votes, coef: Tensor, r: Tensor, dz: Tensor, iters: int) -> tuple[Tensor, Tensor]:
    C, N, L, I, J = v.sizes
    G, slots = len(v.W), dz[0].numel()
    dpose = torch.empty_like(v.pose)
    warps = math.gcd(4, fours(v.types, v.types))
    options = dict(T=iters, WARPS=warps, num_warps=warps, **_weights(v))
    grad_pose_kernel[(fours(C, v.types) // warps, triton.cdiv(N, 8), 2)](
        v.a, v.pose, v.W, v.place, v.parents, v.seen, coef, r, dz, dpose,
        N, I, v.parents.shape[1], slots, **options,
    )  # fmt: skip
    grid = fours(G, v.types) // warps, 2 * triton.cdiv(J, 8)
    work = L * (I // G) * triton.cdiv(N, 4)
    rounds = triton.cdiv(work, triton.cdiv(62 * multiprocessors(v.a.device), grid[0] * grid[1] * warps))
    pieces = triton.cdiv(work, rounds)
    dW = v.W.new_empty(pieces, *v.W.shape)
    grad_weight_kernel[(*grid, pieces)](
        v.a, v.pose, v.W, v.place, v.child, coef, r, dz, dW,
        N, L, I, G, rounds, slots, maxnreg=168, **options,
    )  # fmt: skip
    return dpose, dW.sum(0) if pieces > 1 else dW[0]


def _programs(N: int, L: int, J: int) -> tuple[int, int]:
    """How many programs, each for a field, 8 images and up to 16 types; and of how many warps."""
    groups = triton.cdiv(J, 4)
    warps = min(4, triton.next_power_of_2(groups))
    return L * triton.cdiv(N, 8) * triton.cdiv(groups, warps), warps


def _fields(v: Votes, parts: int | None = None) -> tuple[tuple[int, int, int], tuple[int, ...], dict[str, int | bool]]:
    """A program for a part of a field's fours; without sums over them, in as many parts as are best."""
    _, N, L, I, J = v.sizes
    U, (programs, warps) = fours(I, v.types), _programs(N, L, J)
    chunk = triton.cdiv(U, parts) if parts else best_chunk(programs, U, U, 2, v.a.device)
    grid = triton.cdiv(U, chunk), L, programs // L
    return grid, (N, I, U, chunk), dict(WARPS=warps, num_warps=warps, **_weights(v))


def _children(v: Votes) -> tuple[tuple[int, int], tuple[int, ...], dict[str, int]]:
    """A program of one warp for four children of a position and 8 images."""
    C, N, _, _, J = v.sizes
    return (fours(C, v.types), triton.cdiv(N, 8)), (N, v.parents.shape[1]), dict(J=J, TYPES=v.types, num_warps=1)


def _weights(v: Votes) -> dict[str, int | bool]:
    """SHARED: how many rows of weights all positions share, 0 where each slot has its own."""
    G, J = v.W.shape[:2]
    shared = 0 if v.child.shape[1] == G else G
    return dict(J=J, TYPES=v.types, SHARED=shared, PLACE=v.place is not None, MMA=_has_tensor_cores(v.a.device))


@functools.cache
def _has_tensor_cores(device: torch.device) -> bool:
    """Whether `mma` of TF32 is there: NVIDIA since Ampere; not in Triton's interpreter."""
    return not triton_interprets() and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


# --- VB at a parent -----------------------------------------------------------------------------------------------

VBPrior = tuple[Tensor, Tensor, Tensor, Tensor]  # alpha0, kappa0, nu0, inv_psi0


def vb_parent(
    rj: Tensor, spread: Tensor, prior: VBPrior, S: Tensor, lam: Tensor, K: Tensor, wishart: bool
) -> None:  # fmt: skip
    L, J, N = rj.shape
    parent_kernel[(triton.cdiv(L * J * N, LANES),)](
        rj, spread, *prior, None, None, S, lam, K, *[None] * 7, L * J * N, len(spread), N, J, *_strides(*prior),
        LAST=False, WISHART=wishart, PAPER=False, **_lanes(J),
    )  # fmt: skip


def vb_logit(
    rj: Tensor, spread: Tensor, prior: VBPrior, beta_a: Tensor, beta_u: Tensor, S: Tensor, logit: Tensor, alpha: Tensor,
    kappa: Tensor, psi: Tensor, nu: Tensor, E_ln_pi: Tensor, E_lndet: Tensor, wishart: bool, paper: bool,
) -> None:  # fmt: skip
    L, J, N = rj.shape
    parent_kernel[(triton.cdiv(L * J * N, LANES),)](
        rj, spread, *prior, beta_a, beta_u, S, None, None, logit, alpha, kappa, psi, nu, E_ln_pi, E_lndet,
        L * J * N, len(spread), N, J, *_strides(*prior),
        LAST=True, WISHART=wishart, PAPER=paper, **_lanes(J),
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
        *((None, None, None) if gamma is None else gamma),
        L * J * N, len(U[0]), N, J, coef.stride(3), *_strides(*prior),
        LAST=last is not None, WISHART=wishart, PAPER=paper, PRIOR=gamma is not None, **_lanes(J), **has,
    )  # fmt: skip


def _lanes(J: int) -> dict[str, int]:
    return dict(TYPES=triton.next_power_of_2(J), LANES=LANES, num_warps=1)


def _strides(alpha0: Tensor, kappa0: Tensor, nu0: Tensor, inv_psi0: Tensor) -> tuple[int, int, int, int]:
    """From one type's prior to the next: 0 where all types share it."""
    return alpha0.ndim, kappa0.ndim, nu0.ndim, 16 * (inv_psi0.ndim - 1)


# --- EM at a parent -----------------------------------------------------------------------------------------------


def em_parent(
    rj: Tensor, spread: Tensor, beta_a: Tensor, beta_u: Tensor, S: Tensor, lam: Tensor, K: Tensor,
    inverse_temperature: float, min_var: float,
) -> None:  # fmt: skip
    L, J, N = rj.shape
    em_parent_kernel[(triton.cdiv(L * J * N, LANES),)](
        rj, spread, beta_a, beta_u, S, lam, K, None, None, L * J * N, len(spread), N, J, inverse_temperature, min_var,
        LAST=False, LANES=LANES, num_warps=1,
    )  # fmt: skip


def em_logit(
    rj: Tensor, spread: Tensor, beta_a: Tensor, beta_u: Tensor, S: Tensor, logit: Tensor, var: Tensor,
    inverse_temperature: float, min_var: float,
) -> None:  # fmt: skip
    L, J, N = rj.shape
    em_parent_kernel[(triton.cdiv(L * J * N, LANES),)](
        rj, spread, beta_a, beta_u, S, None, None, logit, var,
        L * J * N, len(spread), N, J, inverse_temperature, min_var, LAST=True, LANES=LANES, num_warps=1,
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
        L * J * N, len(U[0]), N, J, coef.stride(3), inverse_temperature, min_var,
        LAST=last is not None, HAS_M=given[1] is not None, HAS_VAR=given[2] is not None,
        LANES=LANES, num_warps=1,
    )  # fmt: skip

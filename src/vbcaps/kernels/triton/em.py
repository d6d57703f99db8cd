"""The updates of EM routing at a parent, between the passes over votes (passes.py): forward and backward kernels.

The passes run without a prior, k0 = 0, so S_j / r_j is the variance of the votes about their mean m_j.
"""

import triton
import triton.language as tl

from vbcaps.kernels.triton.mma import load_pose, store_pose, store_rows
from vbcaps.kernels.triton.passes import axpy, mul, repeat, scale, sub, sum_parts, sum_pose_parts

SMALLEST = tl.constexpr(1.0842021724855044e-19)  # the least r_j in a divisor: sqrt(tiny), as in the reference


@triton.jit
def mixture(
    rj_ptr, S, beta_a_ptr, beta_u_ptr, at, N, J, inverse_temperature, min_var
):  # fmt: skip
    """Return r_j, 1/r_j, S_j / r_j, var, sum_d ln var_d, the cost per r_j, and the logit of each parent and image."""
    lj = at // N
    r_j = tl.load(rj_ptr + at)
    inv_r = 1 / tl.maximum(r_j, SMALLEST)
    spread = scale(inv_r, S)
    var = [spread[d] + min_var for d in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)]
    ln_var = tl.log(var[0])
    for d in tl.static_range(1, 16):
        ln_var += tl.log(var[d])
    cost = 16 * tl.load(beta_u_ptr + lj % J) + 0.5 * ln_var
    logit = inverse_temperature * (tl.load(beta_a_ptr + lj % J) - cost * r_j)
    return r_j, inv_r, spread, var, ln_var, cost, logit


@triton.jit
def em_parent_kernel(
    rj_ptr,  # l j n
    parts_ptr,  # parts l j n r p
    beta_a_ptr,  # j
    beta_u_ptr,  # j
    S_ptr,  # l j n r p
    lam_ptr,  # l j n r p
    K_ptr,  # l j n
    logit_ptr,  # l j n
    var_ptr,  # l j n r p
    total, PARTS, N, J, inverse_temperature, min_var, LAST: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Take an M-step; write the scores' precision lambda = 1 / var and constant K or, if LAST, logit and var."""
    at = tl.program_id(0) * LANES + tl.arange(0, LANES)
    on = at < total
    at = tl.minimum(at, total - 1)
    S = sum_pose_parts(parts_ptr, 16 * at, 16 * total, PARTS)
    store_pose(S_ptr + 16 * at, S, on)
    r_j, inv_r, spread, var, ln_var, cost, logit = mixture(
        rj_ptr, S, beta_a_ptr, beta_u_ptr, at, N, J, inverse_temperature, min_var
    )
    if LAST:
        tl.store(logit_ptr + at, logit, mask=on)
        store_pose(var_ptr + 16 * at, var, on)
    else:
        ln_activation = tl.minimum(logit, 0.0) - tl.log(1 + tl.exp(-tl.abs(logit)))
        tl.store(K_ptr + at, ln_activation - 0.5 * (ln_var + 16 * 1.8378770664093453), mask=on)
        lam = [1 / var[d] for d in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)]
        store_pose(lam_ptr + 16 * at, lam, on)


@triton.jit
def em_grad_parent_kernel(
    rj_ptr,  # l j n
    S_ptr,  # l j n r p
    m_ptr,  # l j n r p
    last_m_ptr,  # l j n r p
    beta_a_ptr,  # j
    beta_u_ptr,  # j
    dlogit_ptr,  # l j n
    dm_ptr,  # l j n r p
    dvar_ptr,  # l j n r p
    U0_ptr,  # parts l j n
    U1_ptr,  # parts l j n r p
    U2_ptr,  # parts l j n r p
    gb_ptr,  # l j n r p
    gS_ptr,  # l j n r p
    gr_ptr,  # l j n
    coef_ptr,  # l g b p t n k r
    score_coef_ptr,  # l g b p t n k r
    last_m_of_coef_ptr,  # l g b p t n k r
    glogit_ptr,  # l j n
    total, PARTS, N, J, row, inverse_temperature, min_var, LAST: tl.constexpr, HAS_M: tl.constexpr,
    HAS_VAR: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the moments, gb = dm / r_j, gS, gr, from those of logit, m and var (LAST) or scores.

    Also write the terms that the parent adds to the gradient of a vote (grad_vote), and the gradient glogit of beta_a.
    """
    at = tl.program_id(0) * LANES + tl.arange(0, LANES)
    on = at < total
    at = tl.minimum(at, total - 1)
    n, lj = at % N, at // N
    block = (lj // J * tl.cdiv(J, 4) + lj % J // 4) * tl.cdiv(N, 8) + n // 8
    term = block * 4 * row + (n % 8 * 4 + lj % J % 4) * 4
    S = load_pose(S_ptr + 16 * at)
    r_j, inv_r, spread, var, ln_var, cost, logit = mixture(
        rj_ptr, S, beta_a_ptr, beta_u_ptr, at, N, J, inverse_temperature, min_var
    )
    zero = tl.zeros_like(r_j)
    lam = [1 / var[d] for d in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)]
    if LAST:
        glogit = inverse_temperature * tl.load(dlogit_ptr + at)
        dln_var = -0.5 * r_j * glogit
        dvar = scale(dln_var, lam)
        if HAS_VAR:
            dvar = axpy(dvar, 1.0, load_pose(dvar_ptr + 16 * at))
        if HAS_M:
            gb = scale(inv_r, load_pose(dm_ptr + 16 * at))
        else:
            gb = repeat(zero)
        shift = repeat(zero)
    else:
        dK = sum_parts(U0_ptr, at, total, PARTS)
        e = tl.exp(-tl.abs(logit))
        glogit = inverse_temperature * dK * tl.where(logit < 0, 1.0, e) / (1 + e)  # (ln sigmoid)' = sigmoid(-logit)
        dln_var = -0.5 * (r_j * glogit + dK)
        U1 = sum_pose_parts(U1_ptr, 16 * at, 16 * total, PARTS)
        U2 = sum_pose_parts(U2_ptr, 16 * at, 16 * total, PARTS)
        dvar = [dln_var + 0.5 * lam[d] * U2[d] for d in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)]
        dvar = mul(lam, dvar)
        gb = scale(inv_r, mul(lam, U1))
        shift = sub(load_pose(last_m_ptr + 16 * at), load_pose(m_ptr + 16 * at))
        store_rows(score_coef_ptr + term, row, scale(-1.0, mul(lam, shift)), on)
        store_rows(score_coef_ptr + term + 128, row, scale(-1.0, lam), on)
    dinv_r = zero
    for d in tl.static_range(16):
        dinv_r += dvar[d] * spread[d]
    gr = -cost * glogit - tl.where(r_j < SMALLEST, 0.0, inv_r * dinv_r)
    gS = scale(inv_r, dvar)
    tl.store(gr_ptr + at, gr, mask=on)
    tl.store(glogit_ptr + at, glogit, mask=on)
    store_pose(gb_ptr + 16 * at, gb, on)
    store_pose(gS_ptr + 16 * at, gS, on)
    store_rows(coef_ptr + term, row, axpy(gb, 2.0, mul(gS, shift)), on)
    store_rows(coef_ptr + term + 128, row, scale(2.0, gS), on)
    if LAST:  # -m follows the terms
        store_rows(last_m_of_coef_ptr + term, row, scale(-1.0, load_pose(m_ptr + 16 * at)), on)

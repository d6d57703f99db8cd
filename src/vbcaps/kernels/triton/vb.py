"""The updates of VB routing at a parent, between the passes over votes (passes.py): forward and backward kernels."""

import triton
import triton.language as tl

from vbcaps.kernels.triton.mma import load_pose, load_rows, store_pose, store_rows
from vbcaps.kernels.triton.passes import add, axpy, mul, repeat, scale, sub, sum_parts, sum_pose_parts, sum_types
from vbcaps.routing.vb import ACTIVATIONS

AGREEMENT, INFORMATION, PAPER = (tl.constexpr(ACTIVATIONS.index(k)) for k in ("agreement", "information", "paper"))


@triton.jit
def digamma(x):
    """Return psi(x), x > 0: below 8 by recurrence from x + 8, then by its series (see distributions.digamma)."""
    shift = 1.0 / x
    for k in tl.static_range(1, 8):
        shift += 1.0 / (x + k)
    shift = tl.where(x < 8, shift, 0.0)
    y = tl.where(x < 8, x + 8, x)
    u = 1.0 / (y * y)
    series = u * (1 / 12 - u * (1 / 120 - u * (1 / 252 - u * (1 / 240 - u / 132))))
    return tl.log(y) - 0.5 / y - series - shift


@triton.jit
def trigamma(x):
    """Return psi'(x), x > 0, by the method of `digamma`."""
    shift = 1.0 / (x * x)
    for k in tl.static_range(1, 8):
        shift += 1.0 / ((x + k) * (x + k))
    shift = tl.where(x < 8, shift, 0.0)
    y = 1.0 / tl.where(x < 8, x + 8, x)
    u = y * y
    return shift + y + 0.5 * u + y * u * (1 / 6 - u * (1 / 30 - u * (1 / 42 - u / 30)))


@triton.jit
def log1p(x):
    """Return ln(1 + x), x > -1, to the last digits where x is small."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / (u - 1.0)))


@triton.jit
def shifted(x):
    """Return y, P and Q with ln Gamma(x) = (y - 1/2) ln y - y + ln(2 pi) / 2 + Q - ln P, by the method of `digamma`."""
    t = x * x + 7 * x
    P = tl.where(x < 8, t * (t + 6) * (t + 10) * (t + 12), 1.0)
    y = tl.where(x < 8, x + 8, x)
    u = 1.0 / (y * y)
    return y, P, (1 / 12 - u * (1 / 360 - u * (1 / 1260 - u / 1680))) / y


@triton.jit
def ln_gamma_fall(x, gap):
    """Return ln Gamma(x) - ln Gamma(x + gap), whose large parts cancel before they are computed."""
    y0, P0, Q0 = shifted(x)
    y, P, Q = shifted(x + gap)
    step = tl.where((x < 8) == (x + gap < 8), gap, y - y0)
    return step - (y0 - 0.5) * log1p(step / y0) - step * tl.log(y) + Q0 - Q + tl.log(P / P0)


@triton.jit
def digamma_of_nu(nu, WISHART: tl.constexpr):
    """Return sum_d psi(nu/2), or the Wishart's sum_d psi((nu - d)/2)."""
    if WISHART:
        s = digamma(nu / 2)
        for d in tl.static_range(1, 16):
            s += digamma((nu - d) / 2)
    else:
        s = 16 * digamma(nu / 2)
    return s


@triton.jit
def trigamma_of_nu(nu, WISHART: tl.constexpr):
    """Return the derivative of `digamma_of_nu`."""
    if WISHART:
        s = 0.5 * trigamma(nu / 2)
        for d in tl.static_range(1, 16):
            s += 0.5 * trigamma((nu - d) / 2)
    else:
        s = 8 * trigamma(nu / 2)
    return s


@triton.jit
def posterior(
    rj_ptr, S, alpha0_ptr, kappa0_ptr, nu0_ptr, inv_psi0_ptr, at, N, J,
    alpha0_stride, kappa0_stride, nu0_stride, inv_psi0_stride, TYPES: tl.constexpr,
):  # fmt: skip
    """Return r_j, alpha, sum_j alpha, kappa, nu and psi of each parent and image."""
    n, lj = at % N, at // N
    j, field = lj % J, lj // J * J
    r_j = tl.load(rj_ptr + at)
    k = tl.arange(0, TYPES)
    sum_alpha = sum_types(rj_ptr, field, n, N, J, TYPES)
    sum_alpha += tl.sum(tl.load(alpha0_ptr + k * alpha0_stride, mask=k < J, other=0.0), 0)
    alpha = r_j + tl.load(alpha0_ptr + j * alpha0_stride)
    kappa = r_j + tl.load(kappa0_ptr + j * kappa0_stride)
    nu = r_j + tl.load(nu0_ptr + j * nu0_stride)
    inv_psi = add(load_rows(inv_psi0_ptr + j * inv_psi0_stride), S)
    psi = [1.0 / inv_psi[d] for d in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)]
    return r_j, alpha, sum_alpha, kappa, nu, psi


@triton.jit
def excess(m_ptr, m0_ptr, m0_stride, kappa0_ptr, kappa0_stride, S, psi, at, N, J):
    """Return kappa0, m - m0, and psi (1 / psi0 + kappa0 (m - m0)^2) - 1, which is psi (kappa0 (m - m0)^2 - S)."""
    j = at // N % J
    kappa0 = tl.load(kappa0_ptr + j * kappa0_stride)
    gap = sub(load_pose(m_ptr + 16 * at), load_rows(m0_ptr + j * m0_stride))
    return kappa0, gap, mul(psi, sub(scale(kappa0, mul(gap, gap)), S))


@triton.jit
def divergence(r_j, kappa, nu, S, kappa0, nu0, inv_psi0, excess):
    """Return KL[q(mu, lambda) || prior] of each parent and image, from what r_j and S add to the prior."""
    ln_ratio, sum = log1p(S[0] / inv_psi0[0]), excess[0]  # ln psi0 / psi
    for d in tl.static_range(1, 16):
        ln_ratio += log1p(S[d] / inv_psi0[d])
        sum += excess[d]
    gaussian = 8 * (log1p(r_j / kappa0) - r_j / kappa)
    gamma = 16 * (0.5 * r_j * digamma(0.5 * nu) + ln_gamma_fall(0.5 * nu0, 0.5 * r_j))
    return gaussian + gamma + 0.5 * nu0 * ln_ratio + 0.5 * nu * sum


@triton.jit
def parent_kernel(
    rj_ptr,  # l j n
    parts_ptr,  # parts l j n r p
    m_ptr,  # l j n r p
    m0_ptr,  # d or j d
    alpha0_ptr,  # () or j
    kappa0_ptr,  # () or j
    nu0_ptr,  # () or j
    inv_psi0_ptr,  # d or j d
    beta_a_ptr,  # j
    beta_u_ptr,  # j
    S_ptr,  # l j n r p
    lam_ptr,  # l j n r p
    K_ptr,  # l j n
    logit_ptr,  # l j n
    alpha_ptr,  # l j n
    kappa_ptr,  # l j n
    psi_ptr,  # l j n r p
    nu_ptr,  # l j n
    E_ln_pi_ptr,  # l j n
    E_lndet_ptr,  # l j n
    total, PARTS, N, J, alpha0_stride, kappa0_stride, nu0_stride, inv_psi0_stride, m0_stride, temper,
    LAST: tl.constexpr, WISHART: tl.constexpr, RULE: tl.constexpr, TYPES: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Update q*(pi, mu, lambda); write the scores' precision lambda = nu psi and constant K, both times `temper`, or,
    if LAST, the result."""
    at = tl.program_id(0) * LANES + tl.arange(0, LANES)
    on = at < total
    at = tl.minimum(at, total - 1)
    S = sum_pose_parts(parts_ptr, 16 * at, 16 * total, PARTS)
    store_pose(S_ptr + 16 * at, S, on)
    r_j, alpha, sum_alpha, kappa, nu, psi = posterior(
        rj_ptr, S, alpha0_ptr, kappa0_ptr, nu0_ptr, inv_psi0_ptr, at, N, J,
        alpha0_stride, kappa0_stride, nu0_stride, inv_psi0_stride, TYPES,
    )  # fmt: skip
    E_ln_pi = digamma(alpha) - digamma(sum_alpha)
    E_lndet = tl.log(psi[0])
    for d in tl.static_range(1, 16):
        E_lndet += tl.log(psi[d])
    E_lndet += digamma_of_nu(nu, WISHART) + 16 * 0.6931471805599453
    if LAST:
        j = at // N % J
        beta_a = tl.load(beta_a_ptr + j)
        beta_u = tl.load(beta_u_ptr + j)
        if RULE == AGREEMENT:
            logit = beta_a + (E_ln_pi + 0.5 * E_lndet - beta_u) * r_j
        elif RULE == INFORMATION:
            kappa0, gap, more = excess(m_ptr, m0_ptr, m0_stride, kappa0_ptr, kappa0_stride, S, psi, at, N, J)
            nu0, inv_psi0 = tl.load(nu0_ptr + j * nu0_stride), load_rows(inv_psi0_ptr + j * inv_psi0_stride)
            logit = beta_a - beta_u + divergence(r_j, kappa, nu, S, kappa0, nu0, inv_psi0, more)
        elif RULE == PAPER:
            logit = beta_a - (beta_u + E_ln_pi + E_lndet) * r_j
        else:
            H = 0.5 * (16 * 2.8378770664093453 - E_lndet)
            logit = beta_a - (tl.exp(E_ln_pi) * H + beta_u)
        tl.store(logit_ptr + at, logit, mask=on)
        tl.store(alpha_ptr + at, alpha, mask=on)
        tl.store(kappa_ptr + at, kappa, mask=on)
        tl.store(nu_ptr + at, nu, mask=on)
        tl.store(E_ln_pi_ptr + at, E_ln_pi, mask=on)
        tl.store(E_lndet_ptr + at, E_lndet, mask=on)
        store_pose(psi_ptr + 16 * at, psi, on)
    else:
        lam = scale(temper * nu, psi)
        store_pose(lam_ptr + 16 * at, lam, on)
        tl.store(K_ptr + at, temper * (E_ln_pi + 0.5 * E_lndet - 8 / kappa), mask=on)


@triton.jit
def grad_parent_kernel(
    rj_ptr,  # l j n
    S_ptr,  # l j n r p
    m_ptr,  # l j n r p
    last_m_ptr,  # l j n r p
    m0_ptr,  # d or j d
    alpha0_ptr,  # () or j
    kappa0_ptr,  # () or j
    nu0_ptr,  # () or j
    inv_psi0_ptr,  # d or j d
    beta_u_ptr,  # j
    dlogit_ptr,  # l j n
    dm_ptr,  # l j n r p
    dalpha_ptr,  # l j n
    dkappa_ptr,  # l j n
    dpsi_ptr,  # l j n r p
    dnu_ptr,  # l j n
    E_ln_pi_ptr,  # l j n
    E_lndet_ptr,  # l j n
    U0_ptr,  # parts l j n
    U1_ptr,  # parts l j n r p
    U2_ptr,  # parts l j n r p
    gb_ptr,  # l j n r p
    gS_ptr,  # l j n r p
    gr_ptr,  # l j n
    coef_ptr,  # l g b p t n k r
    score_coef_ptr,  # l g b p t n k r
    last_m_of_coef_ptr,  # l g b p t n k r
    galpha_ptr,  # l j n
    gkappa_ptr,  # l j n
    gnu_ptr,  # l j n
    total, PARTS, N, J, row, alpha0_stride, kappa0_stride, nu0_stride, inv_psi0_stride, m0_stride, temper,
    LAST: tl.constexpr, WISHART: tl.constexpr, RULE: tl.constexpr, HAS_M: tl.constexpr, HAS_ALPHA: tl.constexpr,
    HAS_KAPPA: tl.constexpr, HAS_PSI: tl.constexpr, HAS_NU: tl.constexpr, PRIOR: tl.constexpr, TYPES: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Write the gradients of the moments, gb = dm / kappa, gS, gr, from those of logit and posterior (LAST) or scores.

    Also write the terms that the parent adds to the gradient of a vote (grad_vote).
    """
    at = tl.program_id(0) * LANES + tl.arange(0, LANES)
    on = at < total
    at = tl.minimum(at, total - 1)
    n, lj = at % N, at // N
    field = lj // J * J
    block = (lj // J * tl.cdiv(J, 4) + lj % J // 4) * tl.cdiv(N, 8) + n // 8
    term = block * 4 * row + (n % 8 * 4 + lj % J % 4) * 4
    S = load_pose(S_ptr + 16 * at)
    r_j, alpha, sum_alpha, kappa, nu, psi = posterior(
        rj_ptr, S, alpha0_ptr, kappa0_ptr, nu0_ptr, inv_psi0_ptr, at, N, J,
        alpha0_stride, kappa0_stride, nu0_stride, inv_psi0_stride, TYPES,
    )  # fmt: skip
    zero = tl.zeros_like(r_j)
    dalpha, dkappa, dnu, dr = zero, zero, zero, zero
    sum_dE_ln_pi = zero
    if LAST:
        dlogit = tl.load(dlogit_ptr + at)
        E_ln_pi = tl.load(E_ln_pi_ptr + at)
        E_lndet = tl.load(E_lndet_ptr + at)
        k = tl.arange(0, TYPES)[None, :]
        other = (field[:, None] + tl.minimum(k, J - 1)) * N + n[:, None]
        dlogit_k = tl.load(dlogit_ptr + other)
        if (RULE == AGREEMENT) | (RULE == PAPER):
            share = tl.load(rj_ptr + other)
        elif RULE == INFORMATION:
            share = tl.zeros_like(dlogit_k)
        else:
            share = (
                tl.exp(tl.load(E_ln_pi_ptr + other)) * 0.5 * (16 * 2.8378770664093453 - tl.load(E_lndet_ptr + other))
            )
        sum_dE_ln_pi = -tl.sum(tl.where(k < J, share * dlogit_k, 0.0), 1)
        if RULE == AGREEMENT:
            sum_dE_ln_pi = -sum_dE_ln_pi
            beta_u = tl.load(beta_u_ptr + lj % J)
            dE_ln_pi = r_j * dlogit
            dE_lndet = 0.5 * r_j * dlogit
            dr = (E_ln_pi + 0.5 * E_lndet - beta_u) * dlogit
        elif RULE == INFORMATION:
            dE_ln_pi = zero
            dE_lndet = zero
        elif RULE == PAPER:
            beta_u = tl.load(beta_u_ptr + lj % J)
            dE_ln_pi = -r_j * dlogit
            dE_lndet = -r_j * dlogit
            dr = -(beta_u + E_ln_pi + E_lndet) * dlogit
        else:
            dE_ln_pi = -tl.exp(E_ln_pi) * 0.5 * (16 * 2.8378770664093453 - E_lndet) * dlogit
            dE_lndet = 0.5 * tl.exp(E_ln_pi) * dlogit
        if HAS_ALPHA:
            dalpha += tl.load(dalpha_ptr + at)
        if HAS_KAPPA:
            dkappa += tl.load(dkappa_ptr + at)
        if HAS_NU:
            dnu += tl.load(dnu_ptr + at)
        gS = scale(-dE_lndet, psi)
        if HAS_PSI:
            dpsi = load_pose(dpsi_ptr + 16 * at)
            gS = sub(gS, mul(mul(psi, psi), dpsi))
        if HAS_M:
            dm = load_pose(dm_ptr + 16 * at)
            gb = scale(1 / kappa, dm)
        else:
            gb = repeat(zero)
        if RULE == INFORMATION:
            kappa0, gap, more = excess(m_ptr, m0_ptr, m0_stride, kappa0_ptr, kappa0_stride, S, psi, at, N, J)
            sum = more[0]
            for d in tl.static_range(1, 16):
                sum += more[d]
            gS = add(
                gS,
                [
                    -0.5 * dlogit * psi[d] * (r_j + nu * more[d])
                    for d in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
                ],
            )
            gb = axpy(gb, dlogit * nu * kappa0 / kappa, mul(psi, gap))
            dkappa += 8 * dlogit * r_j / (kappa * kappa)
            dnu += dlogit * (0.5 * sum + 4 * r_j * trigamma(0.5 * nu))
        shift = repeat(zero)
    else:
        dE_ln_pi = temper * sum_parts(U0_ptr, at, total, PARTS)
        for q in range(PARTS):
            sum_dE_ln_pi += sum_types(U0_ptr + q * total, field, n, N, J, TYPES)
        sum_dE_ln_pi = temper * sum_dE_ln_pi
        dE_lndet = 0.5 * dE_ln_pi
        dkappa += 8 / (kappa * kappa) * dE_ln_pi
        U1 = sum_pose_parts(U1_ptr, 16 * at, 16 * total, PARTS)
        U2 = sum_pose_parts(U2_ptr, 16 * at, 16 * total, PARTS)
        lam = scale(temper * nu, psi)
        gb = scale(1 / kappa, mul(lam, U1))
        gS = mul(psi, [0.5 * lam[d] * U2[d] - dE_lndet for d in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)])
        for d in tl.static_range(16):
            dnu -= 0.5 * temper * psi[d] * U2[d]
        m = load_pose(m_ptr + 16 * at)
        last_m = load_pose(last_m_ptr + 16 * at)
        shift = sub(last_m, m)
        E = scale(-1.0, mul(lam, shift))
        C = scale(-1.0, lam)
        store_rows(score_coef_ptr + term, row, E, on)
        store_rows(score_coef_ptr + term + 128, row, C, on)
    dalpha += trigamma(alpha) * dE_ln_pi - trigamma(sum_alpha) * sum_dE_ln_pi
    dnu += trigamma_of_nu(nu, WISHART) * dE_lndet
    tl.store(gr_ptr + at, dalpha + dkappa + dnu + dr, mask=on)
    store_pose(gb_ptr + 16 * at, gb, on)
    store_pose(gS_ptr + 16 * at, gS, on)
    E = axpy(gb, 2.0, mul(gS, shift))
    C = scale(2.0, gS)
    store_rows(coef_ptr + term, row, E, on)
    store_rows(coef_ptr + term + 128, row, C, on)
    if LAST:  # -m follows the terms
        store_rows(last_m_of_coef_ptr + term, row, scale(-1.0, load_pose(m_ptr + 16 * at)), on)
    if PRIOR:
        tl.store(galpha_ptr + at, dalpha, mask=on)
        tl.store(gkappa_ptr + at, dkappa, mask=on)
        tl.store(gnu_ptr + at, dnu, mask=on)

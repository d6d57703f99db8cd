"""The passes over votes that VB and EM routing share, as Triton kernels. No vote is ever written to memory.

Both algorithms are the same loop (README.md beside this file derives its gradients):

    moments   r_j = sum_i R_ij,  m_j = (sum_i R_ij V_ij + k0 m0) / (k0 + r_j),
              S_j = sum_i R_ij (V_ij - m_j)^2 + k0 (m0 - m_j)^2
    parent    (r_j, S_j) to (lambda_j, K_j)                      the algorithm's own, in vb_triton.py and em_triton.py
    scores    z_ij = K_j - 1/2 sum_d lambda_jd (V_ijd - m_jd)^2,  r_ij = softmax over all parents of the child

with R_ij = a_i r_ij. A vote V_ij = M_i W_ij is made again from its 16 + 16 numbers each time it is needed.

How memory lies. Images are innermost, so that a warp reads whole sectors; a pose is stored by rows of four, so that it
takes four 16-byte loads:

    a: c n    pose: c p n r    W: g j (p r)    r, z: l i j n    r_j, K: l j n    m, S, lambda: l j p n r

`child[l, i]` is the lower capsule in slot i of field l, `parents[c, s]` the s-th of the `seen[c]` slots (l I + i)
that hold capsule c, then -1.
Slot i uses the weights of row g = i mod G: G = I, or the number of child types where positions share weights.

A warp is 32/SPLIT images and SPLIT slots, whose sums meet by shuffles at the end: no shared memory, no barrier, no
atomics; the same bits every time. The warps of a program are neighbours that read the same poses, so that these come
from the nearest cache.
"""

import triton
import triton.language as tl


@triton.jit
def four(ptr):
    """Four neighbours in memory as four tensors, by one 16-byte load."""
    x = tl.load(ptr[:, None] + tl.arange(0, 4)[None, :])
    ac, bd = tl.split(tl.reshape(x, (x.shape[0], 2, 2)))
    a, c = tl.split(ac)
    b, d = tl.split(bd)
    return a, b, c, d


@triton.jit
def load_pose(ptr, stride):
    """Sixteen entries as a tuple: four rows, `stride` apart. Even a lane that is off must point to something."""
    a = four(ptr)
    b = four(ptr + stride)
    c = four(ptr + 2 * stride)
    d = four(ptr + 3 * stride)
    return a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3], c[0], c[1], c[2], c[3], d[0], d[1], d[2], d[3]


@triton.jit
def store_four(ptr, a, b, c, d, mask):
    x = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (a.shape[0], 4))
    tl.store(ptr[:, None] + tl.arange(0, 4)[None, :], x, mask=mask[:, None])


@triton.jit
def store_pose(ptr, stride, X, mask):
    store_four(ptr, X[0], X[1], X[2], X[3], mask)
    store_four(ptr + stride, X[4], X[5], X[6], X[7], mask)
    store_four(ptr + 2 * stride, X[8], X[9], X[10], X[11], mask)
    store_four(ptr + 3 * stride, X[12], X[13], X[14], X[15], mask)


@triton.jit
def product(P, W):
    """The 4x4 matrix product P W."""
    return [
        P[d - d % 4] * W[d % 4] + P[d - d % 4 + 1] * W[4 + d % 4] + P[d - d % 4 + 2] * W[8 + d % 4]
        + P[d - d % 4 + 3] * W[12 + d % 4]
        for d in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
    ]  # fmt: skip


@triton.jit
def add_product_right(A, on, X, W):
    """A + X W^T where `on`."""
    Y = [tl.where(on, X[d], 0.0) for d in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)]
    return [
        A[d] + Y[d - d % 4] * W[d % 4 * 4] + Y[d - d % 4 + 1] * W[d % 4 * 4 + 1] + Y[d - d % 4 + 2] * W[d % 4 * 4 + 2]
        + Y[d - d % 4 + 3] * W[d % 4 * 4 + 3]
        for d in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
    ]  # fmt: skip


@triton.jit
def add_product_left(A, on, P, X):
    """A + P^T X where `on`."""
    Y = [tl.where(on, X[d], 0.0) for d in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)]
    return [
        A[d] + P[d // 4] * Y[d % 4] + P[d // 4 + 4] * Y[d % 4 + 4] + P[d // 4 + 8] * Y[d % 4 + 8]
        + P[d // 4 + 12] * Y[d % 4 + 12]
        for d in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
    ]  # fmt: skip


@triton.jit
def repeat(x):
    return [x for d in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)]


@triton.jit
def add(A, B):
    return [A[d] + B[d] for d in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)]


@triton.jit
def sub(A, B):
    return [A[d] - B[d] for d in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)]


@triton.jit
def mul(A, B):
    return [A[d] * B[d] for d in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)]


@triton.jit
def scale(s, A):
    return [s * A[d] for d in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)]


@triton.jit
def axpy(A, s, X):
    """A + s X."""
    return [A[d] + s * X[d] for d in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)]


@triton.jit
def total(x, WARPS: tl.constexpr, SPLIT: tl.constexpr):
    """The sum over the SPLIT parts of an image, in each of their lanes."""
    s = tl.sum(tl.reshape(x, (WARPS, SPLIT, 32 // SPLIT)), 1, keep_dims=True)
    return tl.reshape(tl.broadcast_to(s, (WARPS, SPLIT, 32 // SPLIT)), (32 * WARPS,))


@triton.jit
def totals(X, WARPS: tl.constexpr, SPLIT: tl.constexpr):
    return [total(X[d], WARPS, SPLIT) for d in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)]


@triton.jit
def lanes(block, N, WARPS: tl.constexpr, SPLIT: tl.constexpr):
    """Of each lane: its warp, its part of SPLIT, its image, and whether there is one.

    Where there is none, the lane works on the last image and keeps nothing.
    """
    lane = tl.arange(0, 32 * WARPS)
    n = block * (32 // SPLIT) + lane % (32 // SPLIT)
    return lane // 32, lane % 32 // (32 // SPLIT), tl.minimum(n, N - 1), n < N


@triton.jit
def load_weight(W_ptr, i, j, J, G: tl.constexpr):
    return load_pose(W_ptr + (i % G * J + j) * 16, 4)


@triton.jit
def vote(P, W, place_ptr, i, PLACE: tl.constexpr):
    """V_ij = P W_ij, with the child's place added to the first two entries of the right-hand column."""
    V = product(P, W)
    if PLACE:
        y, x = tl.load(place_ptr + 2 * i), tl.load(place_ptr + 2 * i + 1)
        V = [
            V[d] + y if d == 3 else (V[d] + x if d == 7 else V[d])
            for d in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
        ]
    return V


@triton.jit
def load_vote(P, W_ptr, place_ptr, i, j, J, G: tl.constexpr, PLACE: tl.constexpr):
    return vote(P, load_weight(W_ptr, i, j, J, G), place_ptr, i, PLACE)


# --- forward ------------------------------------------------------------------------------------------------------


@triton.jit
def fetch(pose_ptr, W_ptr, child_ptr, c, l, i, ahead, j, n, N, I, J, G: tl.constexpr):
    """The pose of child c and the weight of its slot i, and which child comes `ahead` slots later.

    A loop over slots fetches for its next round before it works on this one, so that the work hides the wait.
    """
    i = tl.minimum(i, I - 1)
    after = tl.load(child_ptr + l * I + tl.minimum(i + ahead, I - 1)).to(tl.int32)
    return load_pose(pose_ptr + c * 16 * N + 4 * n, 4 * N), load_weight(W_ptr, i, j, J, G), after


@triton.jit
def moments_kernel(
    a_ptr, pose_ptr, W_ptr, place_ptr, child_ptr, z_ptr, ln_Z_ptr, k0_ptr, m0_ptr,
    rj_ptr, m_ptr, S_ptr,
    N, I, J, k0_stride, m0_stride,
    G: tl.constexpr, PLACE: tl.constexpr, FIRST: tl.constexpr, WARPS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """r_j, m_j, S_j of one parent type a warp; turns the scores z into responsibilities r where they stand."""
    l = tl.program_id(0)
    warp, part, n, here = lanes(tl.program_id(2), N, WARPS, SPLIT)
    exists = tl.program_id(1) * WARPS + warp < J
    j = tl.minimum(tl.program_id(1) * WARPS + warp, J - 1)
    k0 = tl.load(k0_ptr + j * k0_stride)
    m0 = load_pose(m0_ptr + j * m0_stride, 4)
    zero = tl.zeros((32 * WARPS,), tl.float32)
    sum_R, sum_RV = zero, repeat(zero)
    c = tl.load(child_ptr + l * I + tl.minimum(part, I - 1)).to(tl.int32)
    P, W, next_c = fetch(pose_ptr, W_ptr, child_ptr, c, l, part, SPLIT, j, n, N, I, J, G)
    for i0 in range(0, I, SPLIT):
        on = (i0 + part < I) & here
        i = tl.minimum(i0 + part, I - 1)
        at = ((l * I + i) * J + j) * N + n
        R = tl.load(a_ptr + c * N + n, mask=on, other=0.0)
        if FIRST:
            R /= J
        else:
            r = tl.exp(tl.load(z_ptr + at) - tl.load(ln_Z_ptr + c * N + n))
            R *= r
        c = next_c
        next_P, next_W, next_c = fetch(pose_ptr, W_ptr, child_ptr, c, l, i0 + part + SPLIT, SPLIT, j, n, N, I, J, G)
        if not FIRST:
            tl.store(z_ptr + at, r, mask=on & exists)
        sum_R += R
        sum_RV = axpy(sum_RV, R, vote(P, W, place_ptr, i, PLACE))
        P, W = next_P, next_W
    r_j = total(sum_R, WARPS, SPLIT)
    m = scale(1 / tl.maximum(k0 + r_j, 1e-19), axpy(totals(sum_RV, WARPS, SPLIT), k0, m0))
    S = repeat(zero)
    c = tl.load(child_ptr + l * I + tl.minimum(part, I - 1)).to(tl.int32)
    P, W, next_c = fetch(pose_ptr, W_ptr, child_ptr, c, l, part, SPLIT, j, n, N, I, J, G)
    for i0 in range(0, I, SPLIT):
        on = (i0 + part < I) & here
        i = tl.minimum(i0 + part, I - 1)
        R = tl.load(a_ptr + c * N + n, mask=on, other=0.0)
        if FIRST:
            R /= J
        else:
            R *= tl.load(z_ptr + ((l * I + i) * J + j) * N + n)
        c = next_c
        next_P, next_W, next_c = fetch(pose_ptr, W_ptr, child_ptr, c, l, i0 + part + SPLIT, SPLIT, j, n, N, I, J, G)
        X = sub(vote(P, W, place_ptr, i, PLACE), m)
        S = axpy(S, R, mul(X, X))
        P, W = next_P, next_W
    gap = sub(m0, m)
    S = axpy(totals(S, WARPS, SPLIT), k0, mul(gap, gap))
    on = here & (part == 0) & exists
    parent = (l * J + j) * N
    tl.store(rj_ptr + parent + n, r_j, mask=on)
    store_pose(m_ptr + parent * 16 + 4 * n, 4 * N, m, on)
    store_pose(S_ptr + parent * 16 + 4 * n, 4 * N, S, on)


@triton.jit
def scores_kernel(
    pose_ptr, W_ptr, place_ptr, child_ptr, m_ptr, lam_ptr, K_ptr,
    z_ptr,
    N, I, J, CHUNK,
    G: tl.constexpr, PLACE: tl.constexpr, WARPS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """z_ij of one parent type a warp and CHUNK of its slots."""
    chunks = tl.cdiv(I, CHUNK)
    l, start = tl.program_id(0) // chunks, tl.program_id(0) % chunks * CHUNK
    warp, part, n, here = lanes(tl.program_id(2), N, WARPS, SPLIT)
    here &= tl.program_id(1) * WARPS + warp < J
    j = tl.minimum(tl.program_id(1) * WARPS + warp, J - 1)
    parent = (l * J + j) * N
    m, lam = load_pose(m_ptr + parent * 16 + 4 * n, 4 * N), load_pose(lam_ptr + parent * 16 + 4 * n, 4 * N)
    K = tl.load(K_ptr + parent + n)
    c = tl.load(child_ptr + l * I + tl.minimum(start + part, I - 1)).to(tl.int32)
    P, W, c = fetch(pose_ptr, W_ptr, child_ptr, c, l, start + part, SPLIT, j, n, N, I, J, G)
    for i0 in range(start, tl.minimum(start + CHUNK, I), SPLIT):
        i = tl.minimum(i0 + part, I - 1)
        next_P, next_W, c = fetch(pose_ptr, W_ptr, child_ptr, c, l, i0 + part + SPLIT, SPLIT, j, n, N, I, J, G)
        V = vote(P, W, place_ptr, i, PLACE)
        distance = tl.zeros_like(K)
        for d in tl.static_range(16):
            x = V[d] - m[d]
            distance += lam[d] * x * x
        tl.store(z_ptr + ((l * I + i) * J + j) * N + n, K - 0.5 * distance, mask=(i0 + part < I) & here)
        P, W = next_P, next_W


@triton.jit
def normaliser_kernel(z_ptr, parents_ptr, seen_ptr, ln_Z_ptr, C, N, J, S, LANES: tl.constexpr):
    """ln Z of each child: ln sum exp z over the types and positions of its parents."""
    at = tl.program_id(0) * LANES + tl.arange(0, LANES)
    on = at < C * N
    c, n = tl.minimum(at, C * N - 1) // N, at % N
    seen = tl.max(tl.load(seen_ptr + c), 0)
    top = tl.full((LANES,), -float("inf"), tl.float32)
    for s in range(seen):
        slot = tl.load(parents_ptr + c * S + s)
        for j in range(J):
            z = tl.load(z_ptr + (slot * J + j) * N + n, mask=on & (slot >= 0), other=-float("inf"))
            top = tl.maximum(top, z)
    top = tl.where(top == -float("inf"), 0.0, top)  # a capsule that no field sees
    Z = tl.zeros((LANES,), tl.float32)
    for s in range(seen):
        slot = tl.load(parents_ptr + c * S + s)
        for j in range(J):
            z = tl.load(z_ptr + (slot * J + j) * N + n, mask=on & (slot >= 0), other=-float("inf"))
            Z += tl.exp(z - top)
    tl.store(ln_Z_ptr + at, top + tl.log(Z), mask=on)


# --- backward -----------------------------------------------------------------------------------------------------


@triton.jit
def grad_R_kernel(
    pose_ptr, W_ptr, place_ptr, child_ptr, m_ptr, gb_ptr, gS_ptr, gr_ptr,
    dR_ptr,
    N, I, J, CHUNK,
    G: tl.constexpr, PLACE: tl.constexpr, WARPS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """dR_ij = gr_j + sum_d x_d (gb_jd + gS_jd x_d), x = V_ij - m_j: how the moments answer to a responsibility."""
    chunks = tl.cdiv(I, CHUNK)
    l, start = tl.program_id(0) // chunks, tl.program_id(0) % chunks * CHUNK
    warp, part, n, here = lanes(tl.program_id(2), N, WARPS, SPLIT)
    here &= tl.program_id(1) * WARPS + warp < J
    j = tl.minimum(tl.program_id(1) * WARPS + warp, J - 1)
    parent = (l * J + j) * N
    m = load_pose(m_ptr + parent * 16 + 4 * n, 4 * N)
    gb, gS = load_pose(gb_ptr + parent * 16 + 4 * n, 4 * N), load_pose(gS_ptr + parent * 16 + 4 * n, 4 * N)
    gr = tl.load(gr_ptr + parent + n)
    c = tl.load(child_ptr + l * I + tl.minimum(start + part, I - 1)).to(tl.int32)
    P, W, c = fetch(pose_ptr, W_ptr, child_ptr, c, l, start + part, SPLIT, j, n, N, I, J, G)
    for i0 in range(start, tl.minimum(start + CHUNK, I), SPLIT):
        i = tl.minimum(i0 + part, I - 1)
        next_P, next_W, c = fetch(pose_ptr, W_ptr, child_ptr, c, l, i0 + part + SPLIT, SPLIT, j, n, N, I, J, G)
        V = vote(P, W, place_ptr, i, PLACE)
        dR = tl.zeros_like(gr)
        for d in tl.static_range(16):
            x = V[d] - m[d]
            dR += x * (gb[d] + gS[d] * x)
        tl.store(dR_ptr + ((l * I + i) * J + j) * N + n, gr + dR, mask=(i0 + part < I) & here)
        P, W = next_P, next_W


@triton.jit
def grad_a_kernel(
    dR_ptr, r_ptr, parents_ptr, seen_ptr, s_ptr, da_ptr, C, N, J, S, FIRST: tl.constexpr, ADD: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """s_c = sum over the child's parents of r dR: its share of da, and what the softmax takes off."""
    at = tl.program_id(0) * LANES + tl.arange(0, LANES)
    on = at < C * N
    c, n = tl.minimum(at, C * N - 1) // N, at % N
    sum_rdR = tl.zeros((LANES,), tl.float32)
    for s in range(tl.max(tl.load(seen_ptr + c), 0)):
        slot = tl.load(parents_ptr + c * S + s)
        for j in range(J):
            where = (slot * J + j) * N + n
            dR = tl.load(dR_ptr + where, mask=on & (slot >= 0), other=0.0)
            if FIRST:
                sum_rdR += dR / J
            else:
                sum_rdR += dR * tl.load(r_ptr + where, mask=on & (slot >= 0), other=0.0)
    tl.store(s_ptr + at, sum_rdR, mask=on)
    if ADD:
        sum_rdR += tl.load(da_ptr + at, mask=on, other=0.0)
    tl.store(da_ptr + at, sum_rdR, mask=on)


@triton.jit
def grad_z_kernel(
    a_ptr, pose_ptr, W_ptr, place_ptr, child_ptr, m_ptr, r_ptr, s_ptr, dR_ptr,
    U0_ptr, U1_ptr, U2_ptr,
    N, I, J,
    G: tl.constexpr, PLACE: tl.constexpr, WARPS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """dz_ij = r_ij a_i (dR_ij - s_i), written over dR_ij; U_k = sum_i dz_ij x^k, x = V_ij - m_j; one type a warp."""
    l = tl.program_id(0)
    warp, part, n, here = lanes(tl.program_id(2), N, WARPS, SPLIT)
    here &= tl.program_id(1) * WARPS + warp < J
    j = tl.minimum(tl.program_id(1) * WARPS + warp, J - 1)
    parent = (l * J + j) * N
    zero = tl.zeros((32 * WARPS,), tl.float32)
    m = load_pose(m_ptr + parent * 16 + 4 * n, 4 * N)
    U0, U1, U2 = zero, repeat(zero), repeat(zero)
    c = tl.load(child_ptr + l * I + tl.minimum(part, I - 1)).to(tl.int32)
    P, W, next_c = fetch(pose_ptr, W_ptr, child_ptr, c, l, part, SPLIT, j, n, N, I, J, G)
    for i0 in range(0, I, SPLIT):
        on = (i0 + part < I) & here
        i = tl.minimum(i0 + part, I - 1)
        at = ((l * I + i) * J + j) * N + n
        dz = tl.load(r_ptr + at) * tl.load(a_ptr + c * N + n) * (tl.load(dR_ptr + at) - tl.load(s_ptr + c * N + n))
        dz = tl.where(on, dz, 0.0)
        c = next_c
        next_P, next_W, next_c = fetch(pose_ptr, W_ptr, child_ptr, c, l, i0 + part + SPLIT, SPLIT, j, n, N, I, J, G)
        tl.store(dR_ptr + at, dz, mask=on)
        X = sub(vote(P, W, place_ptr, i, PLACE), m)
        U0 += dz
        U1 = axpy(U1, dz, X)
        U2 = axpy(U2, dz, mul(X, X))
        P, W = next_P, next_W
    on = here & (part == 0)
    tl.store(U0_ptr + parent + n, total(U0, WARPS, SPLIT), mask=on)
    store_pose(U1_ptr + parent * 16 + 4 * n, 4 * N, totals(U1, WARPS, SPLIT), on)
    store_pose(U2_ptr + parent * 16 + 4 * n, 4 * N, totals(U2, WARPS, SPLIT), on)


@triton.jit
def grad_votes(
    V, X, m_ptr, coef_ptr, r_ptr, dz_ptr, a, b, at_V, at_X, vector, stride, slots, poses, J, T: tl.constexpr,
):  # fmt: skip
    """dV of two votes for one parent: sum over the iterations of s_k (E_k + C_k (V - m)).

    s_k is R_ij = r_ij a_i in moments t = 0 .. T-1 and then dz_ij in scores t = 0 .. T-2; m is the last iteration's.
    """
    zero = tl.zeros_like(a)
    E, C, F, D = repeat(zero), repeat(zero), repeat(zero), repeat(zero)
    for k in tl.static_range(2 * T - 1):
        if k == 0:
            s, t = a / J, b / J
        elif k < T:
            s = a * tl.load(r_ptr + (k - 1) * slots + at_V)
            t = b * tl.load(r_ptr + (k - 1) * slots + at_X)
        else:
            s, t = tl.load(dz_ptr + (k - T) * slots + at_V), tl.load(dz_ptr + (k - T) * slots + at_X)
        coef = load_pose(coef_ptr + 2 * k * poses + vector, stride)
        E, F = axpy(E, s, coef), axpy(F, t, coef)
        coef = load_pose(coef_ptr + (2 * k + 1) * poses + vector, stride)
        C, D = axpy(C, s, coef), axpy(D, t, coef)
    m = load_pose(m_ptr + vector, stride)
    return add(E, mul(C, sub(V, m))), add(F, mul(D, sub(X, m)))


@triton.jit
def grad_pose_kernel(
    a_ptr, pose_ptr, W_ptr, place_ptr, parents_ptr, seen_ptr, m_ptr, coef_ptr, r_ptr, dz_ptr,
    dpose_ptr,
    N, I, J, CH, S, slots, poses,
    TYPES: tl.constexpr, G: tl.constexpr, PLACE: tl.constexpr, T: tl.constexpr, WARPS: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """dM_i = sum over the child's parents of dV_ij W_ij^T, for children c, d of one position, SPLIT pairs a warp."""
    warp, part, n, here = lanes(tl.program_id(1), N, WARPS, SPLIT)
    HALF: tl.constexpr = (TYPES + 1) // 2
    pair = (tl.program_id(0) * WARPS + warp) * SPLIT + part
    c = pair // HALF * TYPES + pair % HALF * 2
    here &= c < CH
    c = tl.minimum(c, CH - 1)
    step = tl.where(c % TYPES + 1 < TYPES, 1, 0)  # to d; 0 where an odd number of types leaves c alone
    P, Q = load_pose(pose_ptr + c * 16 * N + 4 * n, 4 * N), load_pose(pose_ptr + (c + step) * 16 * N + 4 * n, 4 * N)
    a_c, a_d = tl.load(a_ptr + c * N + n), tl.load(a_ptr + (c + step) * N + n)
    zero = tl.zeros((32 * WARPS,), tl.float32)
    dP, dQ = repeat(zero), repeat(zero)
    for s in range(tl.max(tl.load(seen_ptr + c), 0)):
        slot = tl.load(parents_ptr + c * S + s)
        on = slot >= 0
        slot = tl.maximum(slot, 0)
        l, i = slot // I, slot % I
        for j in range(J):
            W, X = load_weight(W_ptr, i, j, J, G), load_weight(W_ptr, i + step, j, J, G)
            at = (slot * J + j) * N + n
            dV, dX = grad_votes(
                vote(P, W, place_ptr, i, PLACE), vote(Q, X, place_ptr, i + step, PLACE), m_ptr, coef_ptr, r_ptr, dz_ptr,
                a_c, a_d, at, at + step * J * N, (l * J + j) * 16 * N + 4 * n, 4 * N, slots, poses, J, T,
            )  # fmt: skip
            dP, dQ = add_product_right(dP, on, dV, W), add_product_right(dQ, on, dX, X)
    store_pose(dpose_ptr + c * 16 * N + 4 * n, 4 * N, dP, here)
    store_pose(dpose_ptr + (c + step) * 16 * N + 4 * n, 4 * N, dQ, here & (step == 1))


@triton.jit
def grad_weight_kernel(
    a_ptr, pose_ptr, W_ptr, place_ptr, child_ptr, m_ptr, coef_ptr, r_ptr, dz_ptr,
    dW_ptr,
    N, L, I, J, slots, poses,
    G: tl.constexpr, PLACE: tl.constexpr, T: tl.constexpr, WARPS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """dW_gj = sum over images, fields and the slots that share it of M_i^T dV_ij; two rows g, h a warp."""
    j = tl.program_id(1)
    lane = tl.arange(0, 32 * WARPS)
    first = (tl.program_id(0) * WARPS + lane // 32) * 2
    g = tl.minimum(first, G - 1)
    step = tl.where(g + 1 < G, 1, 0)
    SHARED = I // G
    W, Y = load_weight(W_ptr, g, j, J, G), load_weight(W_ptr, g + step, j, J, G)
    zero = tl.zeros((32 * WARPS,), tl.float32)
    dW, dY = repeat(zero), repeat(zero)
    for block in range(tl.cdiv(N, 32 // SPLIT)):
        warp, part, n, here = lanes(block, N, WARPS, SPLIT)
        for q0 in range(0, L * SHARED, SPLIT):
            on = (q0 + part < L * SHARED) & here
            q = tl.minimum(q0 + part, L * SHARED - 1)
            l, i = q // SHARED, q % SHARED * G + g
            c = tl.load(child_ptr + l * I + i).to(tl.int32)
            d = tl.load(child_ptr + l * I + i + step).to(tl.int32)
            P, Q = load_pose(pose_ptr + c * 16 * N + 4 * n, 4 * N), load_pose(pose_ptr + d * 16 * N + 4 * n, 4 * N)
            at = ((l * I + i) * J + j) * N + n
            dV, dX = grad_votes(
                vote(P, W, place_ptr, i, PLACE), vote(Q, Y, place_ptr, i + step, PLACE), m_ptr, coef_ptr, r_ptr, dz_ptr,
                tl.load(a_ptr + c * N + n), tl.load(a_ptr + d * N + n), at, at + step * J * N,
                (l * J + j) * 16 * N + 4 * n, 4 * N, slots, poses, J, T,
            )  # fmt: skip
            dW, dY = add_product_left(dW, on, P, dV), add_product_left(dY, on, Q, dX)
    one = (lane % 32 == 0) & (first < G)
    store_pose(dW_ptr + (g * J + j) * 16, 4, totals(dW, WARPS, 32), one)
    store_pose(dW_ptr + ((g + step) * J + j) * 16, 4, totals(dY, WARPS, 32), one & (step == 1))

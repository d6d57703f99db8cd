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
def add_row_left(A, X, Y):
    """A + X^T Y for rows X, Y."""
    return [A[d] + X[d // 4] * Y[d % 4] for d in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)]


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
def load_share(a_ptr, z_ptr, ln_Z_ptr, c, at, n, N, FIRST: tl.constexpr):
    """a_i and ln r_ij = z_ij - ln Z_i of child c."""
    a = tl.load(a_ptr + c * N + n)
    return a, a if FIRST else tl.load(z_ptr + at + n) - tl.load(ln_Z_ptr + c * N + n)


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
    zero = tl.zeros((32 * WARPS,), tl.float32)
    sum_R, sum_RV = zero, repeat(zero)
    c = tl.load(child_ptr + l * I + tl.minimum(part, I - 1)).to(tl.int32)
    a, z = load_share(a_ptr, z_ptr, ln_Z_ptr, c, ((l * I + tl.minimum(part, I - 1)) * J + j) * N, n, N, FIRST)
    P, W, c = fetch(pose_ptr, W_ptr, child_ptr, c, l, part, SPLIT, j, n, N, I, J, G)
    for i0 in range(0, I, SPLIT):
        on = (i0 + part < I) & here
        i, next_i = tl.minimum(i0 + part, I - 1), tl.minimum(i0 + part + SPLIT, I - 1)
        next_a, next_z = load_share(a_ptr, z_ptr, ln_Z_ptr, c, ((l * I + next_i) * J + j) * N, n, N, FIRST)
        next_P, next_W, c = fetch(pose_ptr, W_ptr, child_ptr, c, l, next_i, SPLIT, j, n, N, I, J, G)
        if FIRST:
            R = tl.where(on, a / J, 0.0)
        else:
            r = tl.exp(z)
            tl.store(z_ptr + ((l * I + i) * J + j) * N + n, r, mask=on & exists)
            R = tl.where(on, a * r, 0.0)
        sum_R += R
        sum_RV = axpy(sum_RV, R, vote(P, W, place_ptr, i, PLACE))
        P, W, a, z = next_P, next_W, next_a, next_z
    r_j = total(sum_R, WARPS, SPLIT)
    k0 = tl.load(k0_ptr + j * k0_stride)
    m = axpy(totals(sum_RV, WARPS, SPLIT), k0, load_pose(m0_ptr + j * m0_stride, 4))
    m = scale(1 / tl.maximum(k0 + r_j, 1e-19), m)
    S = repeat(zero)
    c = tl.load(child_ptr + l * I + tl.minimum(part, I - 1)).to(tl.int32)
    a = tl.load(a_ptr + c * N + n)
    r = zero if FIRST else tl.load(z_ptr + ((l * I + tl.minimum(part, I - 1)) * J + j) * N + n)
    P, W, c = fetch(pose_ptr, W_ptr, child_ptr, c, l, part, SPLIT, j, n, N, I, J, G)
    for i0 in range(0, I, SPLIT):
        i, next_i = tl.minimum(i0 + part, I - 1), tl.minimum(i0 + part + SPLIT, I - 1)
        next_a = tl.load(a_ptr + c * N + n)
        next_r = r if FIRST else tl.load(z_ptr + ((l * I + next_i) * J + j) * N + n)
        next_P, next_W, c = fetch(pose_ptr, W_ptr, child_ptr, c, l, next_i, SPLIT, j, n, N, I, J, G)
        R = tl.where((i0 + part < I) & here, a / J if FIRST else a * r, 0.0)
        X = sub(vote(P, W, place_ptr, i, PLACE), m)
        S = axpy(S, R, mul(X, X))
        P, W, a, r = next_P, next_W, next_a, next_r
    gap = sub(load_pose(m0_ptr + j * m0_stride, 4), m)
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
def normaliser_kernel(
    z_ptr, parents_ptr, seen_ptr, ln_Z_ptr, CH, N, J, S, WARPS: tl.constexpr, SPLIT: tl.constexpr
):  # fmt: skip
    """ln Z of each child, one a warp: ln sum exp z over the types and positions of its parents."""
    warp, part, n, here = lanes(tl.program_id(1), N, WARPS, SPLIT)
    c = tl.program_id(0) * WARPS + warp
    here &= c < CH
    c = tl.minimum(c, CH - 1)
    seen = tl.max(tl.load(seen_ptr + c), 0)
    top = tl.full((32 * WARPS,), -float("inf"), tl.float32)
    for s in range(seen):
        slot = tl.load(parents_ptr + c * S + s)
        for j in range(0, J, SPLIT):
            on = (slot >= 0) & (j + part < J)
            z = tl.load(z_ptr + (slot * J + j + part) * N + n, mask=on, other=-float("inf"))
            top = tl.maximum(top, z)
    top = tl.max(tl.reshape(top, (WARPS, SPLIT, 32 // SPLIT)), 1, keep_dims=True)
    top = tl.reshape(tl.broadcast_to(top, (WARPS, SPLIT, 32 // SPLIT)), (32 * WARPS,))
    top = tl.where(top == -float("inf"), 0.0, top)  # a capsule that no field sees
    Z = tl.zeros((32 * WARPS,), tl.float32)
    for s in range(seen):
        slot = tl.load(parents_ptr + c * S + s)
        for j in range(0, J, SPLIT):
            on = (slot >= 0) & (j + part < J)
            Z += tl.exp(tl.load(z_ptr + (slot * J + j + part) * N + n, mask=on, other=-float("inf")) - top)
    tl.store(ln_Z_ptr + c * N + n, top + tl.log(total(Z, WARPS, SPLIT)), mask=here & (part == 0))


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
    dR_ptr, r_ptr, parents_ptr, seen_ptr, s_ptr, da_ptr, CH, N, J, S, FIRST: tl.constexpr, ADD: tl.constexpr,
    WARPS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """s_c = sum over the child's parents of r dR: its share of da, and what the softmax takes off; a child a warp."""
    warp, part, n, here = lanes(tl.program_id(1), N, WARPS, SPLIT)
    c = tl.program_id(0) * WARPS + warp
    here &= (c < CH) & (part == 0)
    c = tl.minimum(c, CH - 1)
    sum_rdR = tl.zeros((32 * WARPS,), tl.float32)
    for s in range(tl.max(tl.load(seen_ptr + c), 0)):
        slot = tl.load(parents_ptr + c * S + s)
        for j in range(0, J, SPLIT):
            on = (slot >= 0) & (j + part < J)
            at = (slot * J + j + part) * N + n
            dR = tl.load(dR_ptr + at, mask=on, other=0.0)
            if FIRST:
                sum_rdR += dR / J
            else:
                sum_rdR += dR * tl.load(r_ptr + at, mask=on, other=0.0)
    sum_rdR = total(sum_rdR, WARPS, SPLIT)
    tl.store(s_ptr + c * N + n, sum_rdR, mask=here)
    if ADD:
        sum_rdR += tl.load(da_ptr + c * N + n)
    tl.store(da_ptr + c * N + n, sum_rdR, mask=here)


@triton.jit
def load_gain(a_ptr, s_ptr, r_ptr, dR_ptr, c, at, n, N):
    """R_ij = a_i r_ij, and dR_ij - s_i, of child c."""
    return tl.load(a_ptr + c * N + n) * tl.load(r_ptr + at), tl.load(dR_ptr + at) - tl.load(s_ptr + c * N + n)


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
    at = ((l * I + tl.minimum(part, I - 1)) * J + j) * N + n
    c = tl.load(child_ptr + l * I + tl.minimum(part, I - 1)).to(tl.int32)
    R, gain = load_gain(a_ptr, s_ptr, r_ptr, dR_ptr, c, at, n, N)
    P, W, c = fetch(pose_ptr, W_ptr, child_ptr, c, l, part, SPLIT, j, n, N, I, J, G)
    for i0 in range(0, I, SPLIT):
        on = (i0 + part < I) & here
        i, next_i = tl.minimum(i0 + part, I - 1), tl.minimum(i0 + part + SPLIT, I - 1)
        next_at = ((l * I + next_i) * J + j) * N + n
        next_R, next_gain = load_gain(a_ptr, s_ptr, r_ptr, dR_ptr, c, next_at, n, N)
        next_P, next_W, c = fetch(pose_ptr, W_ptr, child_ptr, c, l, next_i, SPLIT, j, n, N, I, J, G)
        dz = tl.where(on, R * gain, 0.0)
        tl.store(dR_ptr + at, dz, mask=on)
        X = sub(vote(P, W, place_ptr, i, PLACE), m)
        U0 += dz
        U1 = axpy(U1, dz, X)
        U2 = axpy(U2, dz, mul(X, X))
        P, W, R, gain, at = next_P, next_W, next_R, next_gain, next_at
    on = here & (part == 0)
    tl.store(U0_ptr + parent + n, total(U0, WARPS, SPLIT), mask=on)
    store_pose(U1_ptr + parent * 16 + 4 * n, 4 * N, totals(U1, WARPS, SPLIT), on)
    store_pose(U2_ptr + parent * 16 + 4 * n, 4 * N, totals(U2, WARPS, SPLIT), on)


@triton.jit
def shares(r_ptr, dz_ptr, a, at, slots, J, T: tl.constexpr):
    """With what weight a vote enters each term: R_ij in moments t = 0 .. T-1, then dz_ij in scores t = 0 .. T-2."""
    s = (a / J,)
    for t in tl.static_range(T - 1):
        s += (a * tl.load(r_ptr + t * slots + at),)
    for t in tl.static_range(T - 1):
        s += (tl.load(dz_ptr + t * slots + at),)
    return s


@triton.jit
def load_terms(coef_ptr, parent, p, n, N, T: tl.constexpr):
    """Row p of E_0, C_0, E_1, C_1, ... and of the last m_j: the terms that a parent adds to dV."""
    coef = ()
    for k in tl.static_range(4 * T - 1):
        coef += four(coef_ptr + ((parent * 4 + p) * (4 * T - 1) + k) * 4 * N + 4 * n)
    return coef


@triton.jit
def row_of_grad(P, W, place, s, coef, on, T: tl.constexpr):
    """A row of dV = sum_k s_k (E_k + C_k (V - m)), V = P W with its place, from the same row of P and of the terms."""
    dV = ()
    for r in tl.static_range(4):
        V = P[0] * W[r] + P[1] * W[4 + r] + P[2] * W[8 + r] + P[3] * W[12 + r]
        if r == 3:
            V += place
        E, C = s[0] * coef[r], s[0] * coef[4 + r]
        for k in tl.static_range(1, 2 * T - 1):
            E += s[k] * coef[8 * k + r]
            C += s[k] * coef[8 * k + 4 + r]
        dV += (tl.where(on, E + C * (V - coef[8 * (2 * T - 1) + r]), 0.0),)
    return dV


@triton.jit
def load_place(place_ptr, i, p, zero, PLACE: tl.constexpr):
    """What the place of slot i adds to the end of row p of its votes."""
    place = zero
    if PLACE:
        column = tl.load(place_ptr + 2 * i + (p + zero.to(tl.int32)) % 2)
        place = tl.where(p + zero < 2, column, 0.0)
    return place


@triton.jit
def add_row_right(A, X, W):
    """A + X W^T for rows A, X."""
    return [
        A[q] + X[0] * W[4 * q] + X[1] * W[4 * q + 1] + X[2] * W[4 * q + 2] + X[3] * W[4 * q + 3] for q in (0, 1, 2, 3)
    ]


@triton.jit
def sum_of_parts(x, WARPS: tl.constexpr, SPLIT: tl.constexpr):
    """The sum over the SPLIT / 4 parts of each row and image, in each of their lanes."""
    s = tl.sum(tl.reshape(x, (WARPS, SPLIT // 4, 128 // SPLIT)), 1, keep_dims=True)
    return tl.reshape(tl.broadcast_to(s, (WARPS, SPLIT // 4, 128 // SPLIT)), (32 * WARPS,))


@triton.jit
def grad_pose_kernel(
    a_ptr, pose_ptr, W_ptr, place_ptr, parents_ptr, seen_ptr, coef_ptr, r_ptr, dz_ptr,
    dpose_ptr,
    N, I, J, CH, S, slots,
    TYPES: tl.constexpr, G: tl.constexpr, PLACE: tl.constexpr, T: tl.constexpr, WARPS: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """dM_i = sum over the child's parents of dV_ij W_ij^T, for two children c, d of one position a warp.

    A lane has one row p of their poses, and one in SPLIT / 4 parent types.
    """
    warp, part, n, here = lanes(tl.program_id(1), N, WARPS, SPLIT)
    p, first = part % 4, part // 4
    HALF: tl.constexpr = (TYPES + 1) // 2
    pair = tl.program_id(0) * WARPS + warp
    c = pair // HALF * TYPES + pair % HALF * 2
    here &= (c < CH) & (first == 0)
    c = tl.minimum(c, CH - 1)
    step = tl.where(c % TYPES + 1 < TYPES, 1, 0)  # to d; 0 where an odd number of types leaves c alone
    row_c = (c * 4 + p) * 4 * N + 4 * n
    row_d = row_c + step * 16 * N
    P, Q = four(pose_ptr + row_c), four(pose_ptr + row_d)
    a_c, a_d = tl.load(a_ptr + c * N + n), tl.load(a_ptr + (c + step) * N + n)
    zero = tl.zeros((32 * WARPS,), tl.float32)
    dP, dQ = [zero for q in (0, 1, 2, 3)], [zero for q in (0, 1, 2, 3)]
    for slot_number in range(tl.max(tl.load(seen_ptr + c), 0)):
        slot = tl.load(parents_ptr + c * S + slot_number)
        exists = slot >= 0
        slot = tl.maximum(slot, 0)
        l, i = slot // I, slot % I
        place = load_place(place_ptr, i, p, zero, PLACE)
        for j0 in range(0, J, SPLIT // 4):
            on = exists & (j0 + first < J)
            j = tl.minimum(j0 + first, J - 1)
            coef = load_terms(coef_ptr, l * J + j, p, n, N, T)
            at = (slot * J + j) * N + n
            W = load_weight(W_ptr, i, j, J, G)
            dV = row_of_grad(P, W, place, shares(r_ptr, dz_ptr, a_c, at, slots, J, T), coef, on, T)
            dP = add_row_right(dP, dV, W)
            W = load_weight(W_ptr, i + step, j, J, G)
            dV = row_of_grad(Q, W, place, shares(r_ptr, dz_ptr, a_d, at + step * J * N, slots, J, T), coef, on, T)
            dQ = add_row_right(dQ, dV, W)
    dP = [sum_of_parts(dP[q], WARPS, SPLIT) for q in (0, 1, 2, 3)]
    dQ = [sum_of_parts(dQ[q], WARPS, SPLIT) for q in (0, 1, 2, 3)]
    store_four(dpose_ptr + row_c, dP[0], dP[1], dP[2], dP[3], here)
    store_four(dpose_ptr + row_d, dQ[0], dQ[1], dQ[2], dQ[3], here & (step == 1))


@triton.jit
def grad_weight_kernel(
    a_ptr, pose_ptr, W_ptr, place_ptr, child_ptr, coef_ptr, r_ptr, dz_ptr,
    dW_ptr,
    N, L, I, J, BLOCKS, slots,
    G: tl.constexpr, PLACE: tl.constexpr, T: tl.constexpr, WARPS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """dW_gj = sum over images, fields and the slots that share it of M_i^T dV_ij; two rows g, h a warp.

    A program sums BLOCKS blocks of images; the sum over programs is left to the caller.
    """
    j = tl.program_id(1)
    lane = tl.arange(0, 32 * WARPS)
    first = (tl.program_id(0) * WARPS + lane // 32) * 2
    g = tl.minimum(first, G - 1)
    step = tl.where(g + 1 < G, 1, 0)
    SHARED = I // G
    W, X = load_weight(W_ptr, g, j, J, G), load_weight(W_ptr, g + step, j, J, G)
    zero = tl.zeros((32 * WARPS,), tl.float32)
    dW, dX = repeat(zero), repeat(zero)
    start = tl.program_id(2) * BLOCKS
    for block in range(start, tl.minimum(start + BLOCKS, tl.cdiv(N, 32 // SPLIT))):
        warp, part, n, here = lanes(block, N, WARPS, SPLIT)
        for q0 in range(0, L * SHARED, SPLIT):
            on = (q0 + part < L * SHARED) & here
            q = tl.minimum(q0 + part, L * SHARED - 1)
            l, i = q // SHARED, q % SHARED * G + g
            c = tl.load(child_ptr + l * I + i).to(tl.int32)
            d = tl.load(child_ptr + l * I + i + step).to(tl.int32)
            at = ((l * I + i) * J + j) * N + n
            s = shares(r_ptr, dz_ptr, tl.load(a_ptr + c * N + n), at, slots, J, T)
            t = shares(r_ptr, dz_ptr, tl.load(a_ptr + d * N + n), at + step * J * N, slots, J, T)
            for p in tl.static_range(4):
                place = load_place(place_ptr, i, p, zero, PLACE)
                coef = load_terms(coef_ptr, l * J + j, p, n, N, T)
                P = four(pose_ptr + (c * 16 + p * 4) * N + 4 * n)
                dW = add_row_left(dW, P, row_of_grad(P, W, place, s, coef, on, T))
                P = four(pose_ptr + (d * 16 + p * 4) * N + 4 * n)
                dX = add_row_left(dX, P, row_of_grad(P, X, place, t, coef, on, T))
    one = (lane % 32 == 0) & (first < G)
    at = tl.program_id(2) * G * J * 16
    store_pose(dW_ptr + at + (g * J + j) * 16, 4, totals(dW, WARPS, 32), one)
    store_pose(dW_ptr + at + ((g + step) * J + j) * 16, 4, totals(dX, WARPS, 32), one & (step == 1))

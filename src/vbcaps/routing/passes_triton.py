"""The passes over votes that VB and EM routing share, as Triton kernels. No vote is ever written to memory.

Both algorithms are the same loop (README.md beside this file derives its gradients):

    moments   r_j = sum_i R_ij,  m_j = (sum_i R_ij V_ij + k0 m0) / (k0 + r_j),
              S_j = sum_i R_ij (V_ij - m_j)^2 + k0 (m0 - m_j)^2
    parent    (r_j, S_j) to (lambda_j, K_j)                      the algorithm's own, in vb_triton.py and em_triton.py
    scores    z_ij = K_j - 1/2 sum_d lambda_jd (V_ijd - m_jd)^2,  r_ij = softmax over all parents of the child

with R_ij = a_i r_ij. A vote V_ij = M_i W_ij is made again each time it is needed (mma_triton.py).

How memory lies. Images are innermost, so that a warp reads whole sectors; a pose is stored by rows of four, so that it
takes four 16-byte loads:

    a: c n    pose: c p n r    W: g j (p r)    r, z, dR: l i j n    r_j, K: l j n    m, S, lambda: l j p n r

`child[l, i]` is the lower capsule in slot i of field l, `parents[c, s]` the s-th of the `seen[c]` slots (l I + i)
that hold capsule c, then -1. Rows of r are NS apart, a little more than N images, so that those that a warp reads
together are in different banks.
Slot i uses the weights of row g = i mod G: G = I, or the number of child types where positions share weights (SHARED).

A warp has 8 images and 4 types of parents, and goes over slots; the warps of a program have other types, and so read
the same poses. Programs deal the slots of a field out in PARTS, whose sums are added where they are read, in a fixed
order: no atomics, no barriers; the same bits every time.
"""

import triton
import triton.language as tl

from vbcaps.routing.mma_triton import eight, half_product, load_block, load_pose, product_plain, two


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
def lanes(block, group, N, J, WARPS: tl.constexpr):
    """The lanes of a program, the image and type of each, and whether there are such.

    Where there are not, the lane works on the last and keeps nothing.
    """
    lane = tl.arange(0, 32 * WARPS)
    n, j = block * 8 + lane % 32 // 4, (group * WARPS + lane // 32) * 4 + lane % 4
    return lane, tl.minimum(n, N - 1), tl.minimum(j, J - 1), (n < N) & (j < J)


@triton.jit
def fetch(makings, c, i, J, SHARED: tl.constexpr, MMA: tl.constexpr):
    """M_c, and W_ij of its slot i, for `add_vote`.

    Loops over slots take AHEAD of them a round. Each has registers of its own, filled again as soon as they were used,
    so that the work on the others hides the wait.
    """
    pose_ptr, W_ptr, pose_at, weight_at, N = makings
    W_ptr += (i % SHARED if SHARED else i) * J * 16
    pose_ptr += c * 16 * N
    if MMA:
        P = tl.load(pose_ptr + pose_at), tl.load(pose_ptr + 4 * N + pose_at)
        P += tl.load(pose_ptr + 8 * N + pose_at), tl.load(pose_ptr + 12 * N + pose_at)
        return P + two(W_ptr + weight_at)
    else:
        return load_block(pose_ptr + pose_at, 4 * N, 4, 4, 1), load_block(W_ptr + weight_at, 4, 4, 4, 1)


@triton.jit
def lane_offsets(lane, n, j, J, MMA: tl.constexpr):
    """Where in a pose and in a row of weights a lane reads."""
    if MMA:
        column = tl.minimum(j // 4 * 4 + lane % 32 // 8, J - 1)
        return 4 * n + lane % 4, column * 16 + lane % 4 * 4 + lane // 4 % 2 * 2
    else:
        return 4 * n, 16 * j


@triton.jit
def own_part(pose_ptr, W_ptr, N, NS, I, J, CHUNK, WARPS: tl.constexpr, MMA: tl.constexpr):
    """Of a program (part, field, images and types): image and type of each lane, its slots, where r is, for `fetch`."""
    blocks = tl.cdiv(N, 8)
    lane, n, j, here = lanes(tl.program_id(2) % blocks, tl.program_id(2) // blocks, N, J, WARPS)
    start = tl.program_id(0) * CHUNK
    makings = (pose_ptr, W_ptr) + lane_offsets(lane, n, j, J, MMA) + (N,)
    own = tl.program_id(1) * I * J * NS + j * NS + n
    return n, j, here, start, tl.minimum(start + CHUNK, I), own, makings


@triton.jit
def load_child(child_ptr, l, i, end, I):
    return tl.load(child_ptr + l * I + tl.minimum(i, end - 1)).to(tl.int32)


@triton.jit
def add_vote(A, made, place_ptr, i, PLACE: tl.constexpr, MMA: tl.constexpr):
    """A + V_ij, V_ij = M_i W_ij with the child's place added to the first two entries of the right-hand column."""
    if PLACE:
        y, x = tl.load(place_ptr + 2 * i), tl.load(place_ptr + 2 * i + 1)
        A = [
            A[d] + y if d == 3 else (A[d] + x if d == 7 else A[d])
            for d in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
        ]
    if MMA:
        top, bottom, W = (made[0], made[1]), (made[2], made[3]), (made[4], made[5])
        return half_product(A[:8], top, W, MMA) + half_product(A[8:], bottom, W, MMA)
    else:
        V = tl.reshape(product_plain(made[0], made[1]), (made[0].shape[0], 2, 8))
        top, bottom = tl.split(tl.permute(V, (0, 2, 1)))
        return add(A, eight(top) + eight(bottom))


@triton.jit
def sum_parts(ptr, at, part_size, PARTS):
    """The sum of PARTS numbers, `part_size` apart."""
    s = tl.load(ptr + at)
    for q in range(1, PARTS):
        s += tl.load(ptr + q * part_size + at)
    return s


@triton.jit
def sum_pose_parts(ptr, at, stride, part_size, PARTS):
    s = load_pose(ptr + at, stride)
    for q in range(1, PARTS):
        x = load_pose(ptr + q * part_size + at, stride)
        s = (
            s[0] + x[0], s[1] + x[1], s[2] + x[2], s[3] + x[3], s[4] + x[4], s[5] + x[5], s[6] + x[6], s[7] + x[7],
            s[8] + x[8], s[9] + x[9], s[10] + x[10], s[11] + x[11], s[12] + x[12], s[13] + x[13], s[14] + x[14],
            s[15] + x[15],
        )  # fmt: skip
    return s


@triton.jit
def sum_types(x_ptr, field, n, N, J, TYPES: tl.constexpr):
    """The sum over the J types of a field; TYPES: the power of two from J on."""
    k = tl.arange(0, TYPES)
    return tl.sum(tl.load(x_ptr + (field[:, None] + k[None, :]) * N + n[:, None], mask=k[None, :] < J, other=0.0), 1)


# --- forward ------------------------------------------------------------------------------------------------------


@triton.jit
def load_share(a_ptr, r_ptr, c, i, own, n, N, NS, J, FIRST: tl.constexpr):
    """a_i and r_ij of child c in slot i."""
    a = tl.load(a_ptr + c * N + n)
    return (a,) if FIRST else (a, tl.load(r_ptr + i * J * NS + own))


@triton.jit
def share(loaded, i, end, J, FIRST: tl.constexpr):
    """R_ij = a_i r_ij; 0 behind the last slot."""
    R = loaded[0] / J if FIRST else loaded[0] * loaded[1]
    return tl.where(i < end, R, 0.0)


@triton.jit
def means_kernel(
    a_ptr, pose_ptr, W_ptr, place_ptr, child_ptr, r_ptr,
    sum_R_ptr, sum_RV_ptr,
    N, NS, I, J, CHUNK,
    SHARED: tl.constexpr, PLACE: tl.constexpr, FIRST: tl.constexpr, AHEAD: tl.constexpr, WARPS: tl.constexpr,
    MMA: tl.constexpr,
):  # fmt: skip
    """Part of sum_i R_ij and sum_i R_ij V_ij: CHUNK slots of one position."""
    l, L = tl.program_id(1), tl.num_programs(1)
    n, j, here, start, end, own, makings = own_part(pose_ptr, W_ptr, N, NS, I, J, CHUNK, WARPS, MMA)
    zero = tl.zeros((32 * WARPS,), tl.float32)
    sum_R, sum_RV = zero, repeat(zero)
    SIZE: tl.constexpr = (6 if MMA else 2) + (1 if FIRST else 2)
    loaded, c = (), ()
    for k in tl.static_range(AHEAD):
        i = tl.minimum(start + k, end - 1)
        child = load_child(child_ptr, l, i, end, I)
        loaded += fetch(makings, child, i, J, SHARED, MMA) + load_share(a_ptr, r_ptr, child, i, own, n, N, NS, J, FIRST)
        c += (load_child(child_ptr, l, i + AHEAD, end, I),)
    for i0 in range(start, end, AHEAD):
        new, new_c = (), ()
        for k in tl.static_range(AHEAD):
            made = loaded[k * SIZE : (k + 1) * SIZE]
            R = share(made[6 if MMA else 2 :], i0 + k, end, J, FIRST)
            sum_R += R
            V = add_vote(repeat(zero), made[: 6 if MMA else 2], place_ptr, tl.minimum(i0 + k, end - 1), PLACE, MMA)
            sum_RV = axpy(sum_RV, R, V)
            i = tl.minimum(i0 + k + AHEAD, end - 1)
            new += fetch(makings, c[k], i, J, SHARED, MMA) + load_share(a_ptr, r_ptr, c[k], i, own, n, N, NS, J, FIRST)
            new_c += (load_child(child_ptr, l, i + AHEAD, end, I),)
        loaded, c = new, new_c
    parent = ((tl.program_id(0) * L + l) * J + j) * N
    tl.store(sum_R_ptr + parent + n, sum_R, mask=here)
    store_pose(sum_RV_ptr + parent * 16 + 4 * n, 4 * N, sum_RV, here)


@triton.jit
def spreads_kernel(
    a_ptr, pose_ptr, W_ptr, place_ptr, child_ptr, r_ptr, k0_ptr, m0_ptr, sum_R_ptr, sum_RV_ptr,
    rj_ptr, m_ptr, S_ptr,
    N, NS, I, J, CHUNK, PARTS, k0_stride, m0_stride,
    SHARED: tl.constexpr, PLACE: tl.constexpr, FIRST: tl.constexpr, AHEAD: tl.constexpr, WARPS: tl.constexpr,
    MMA: tl.constexpr,
):  # fmt: skip
    """r_j and m_j, and part of S_j."""
    l, L = tl.program_id(1), tl.num_programs(1)
    n, j, here, start, end, own, makings = own_part(pose_ptr, W_ptr, N, NS, I, J, CHUNK, WARPS, MMA)
    SIZE: tl.constexpr = (6 if MMA else 2) + (1 if FIRST else 2)
    loaded, c = (), ()
    for k in tl.static_range(AHEAD):
        i = tl.minimum(start + k, end - 1)
        child = load_child(child_ptr, l, i, end, I)
        loaded += fetch(makings, child, i, J, SHARED, MMA) + load_share(a_ptr, r_ptr, child, i, own, n, N, NS, J, FIRST)
        c += (load_child(child_ptr, l, i + AHEAD, end, I),)
    parent, size = (l * J + j) * N, L * J * N
    k0, m0 = tl.load(k0_ptr + j * k0_stride), load_pose(m0_ptr + j * m0_stride, 4)
    r_j = sum_parts(sum_R_ptr, parent + n, size, PARTS)
    m = axpy(sum_pose_parts(sum_RV_ptr, parent * 16 + 4 * n, 4 * N, 16 * size, PARTS), k0, m0)
    minus_m = scale(-1 / tl.maximum(k0 + r_j, 1e-19), m)
    first = tl.program_id(0) == 0
    gap = add(m0, minus_m)
    S = scale(tl.where(first, k0, 0.0), mul(gap, gap))
    tl.store(rj_ptr + parent + n, r_j, mask=here & first)
    store_pose(m_ptr + parent * 16 + 4 * n, 4 * N, scale(-1.0, minus_m), here & first)
    for i0 in range(start, end, AHEAD):
        new, new_c = (), ()
        for k in tl.static_range(AHEAD):
            made = loaded[k * SIZE : (k + 1) * SIZE]
            R = share(made[6 if MMA else 2 :], i0 + k, end, J, FIRST)
            X = add_vote(minus_m, made[: 6 if MMA else 2], place_ptr, tl.minimum(i0 + k, end - 1), PLACE, MMA)
            S = axpy(S, R, mul(X, X))
            i = tl.minimum(i0 + k + AHEAD, end - 1)
            new += fetch(makings, c[k], i, J, SHARED, MMA) + load_share(a_ptr, r_ptr, c[k], i, own, n, N, NS, J, FIRST)
            new_c += (load_child(child_ptr, l, i + AHEAD, end, I),)
        loaded, c = new, new_c
    store_pose(S_ptr + (tl.program_id(0) * size + parent) * 16 + 4 * n, 4 * N, S, here)


@triton.jit
def scores_kernel(
    pose_ptr, W_ptr, place_ptr, child_ptr, m_ptr, lam_ptr, K_ptr,
    z_ptr,
    N, NS, I, J, CHUNK,
    SHARED: tl.constexpr, PLACE: tl.constexpr, AHEAD: tl.constexpr, WARPS: tl.constexpr, MMA: tl.constexpr,
):  # fmt: skip
    """z_ij of CHUNK slots of one position."""
    l = tl.program_id(1)
    n, j, here, start, end, own, makings = own_part(pose_ptr, W_ptr, N, NS, I, J, CHUNK, WARPS, MMA)
    SIZE: tl.constexpr = 6 if MMA else 2
    loaded, c = (), ()
    for k in tl.static_range(AHEAD):
        i = tl.minimum(start + k, end - 1)
        loaded += fetch(makings, load_child(child_ptr, l, i, end, I), i, J, SHARED, MMA)
        c += (load_child(child_ptr, l, i + AHEAD, end, I),)
    parent = (l * J + j) * N
    minus_m = scale(-1.0, load_pose(m_ptr + parent * 16 + 4 * n, 4 * N))
    lam = load_pose(lam_ptr + parent * 16 + 4 * n, 4 * N)
    K = tl.load(K_ptr + parent + n)
    for i0 in range(start, end, AHEAD):
        new, new_c = (), ()
        for k in tl.static_range(AHEAD):
            i = tl.minimum(i0 + k, end - 1)  # behind the last slot, this one again
            X = add_vote(minus_m, loaded[k * SIZE : (k + 1) * SIZE], place_ptr, i, PLACE, MMA)
            distance = tl.zeros_like(K)
            for d in tl.static_range(16):
                distance += lam[d] * X[d] * X[d]
            tl.store(z_ptr + i * J * NS + own, K - 0.5 * distance, mask=here)
            i = tl.minimum(i0 + k + AHEAD, end - 1)
            new += fetch(makings, c[k], i, J, SHARED, MMA)
            new_c += (load_child(child_ptr, l, i + AHEAD, end, I),)
        loaded, c = new, new_c


@triton.jit
def load_type(ptr, on, other, EVEN: tl.constexpr):
    return tl.load(ptr) if EVEN else tl.load(ptr, mask=on, other=other)


@triton.jit
def softmax_kernel(z_ptr, parents_ptr, seen_ptr, N, NS, J, S, EVEN: tl.constexpr):
    """r_ij = exp(z_ij - ln Z_i), written over z_ij: over the types and positions of a child's parents; a child a warp.

    EVEN: the types come in fours.
    """
    c = tl.program_id(0)
    lane, n, k, here = lanes(tl.program_id(1), 0, N, 4, 1)
    own = k * NS + n
    seen = tl.load(seen_ptr + c)
    top = tl.full((32,), -3e38, tl.float32)
    for s in range(seen):
        row = z_ptr + tl.load(parents_ptr + c * S + s) * J * NS
        for j in range(0, J, 4):
            top = tl.maximum(top, load_type(row + j * NS + own, j + k < J, -3e38, EVEN))
    top = tl.max(tl.reshape(top, (8, 4)), 1, keep_dims=True)
    top = tl.reshape(tl.broadcast_to(top, (8, 4)), (32,))
    Z = tl.zeros((32,), tl.float32)
    for s in range(seen):
        row = z_ptr + tl.load(parents_ptr + c * S + s) * J * NS
        for j in range(0, J, 4):
            z = load_type(row + j * NS + own, j + k < J, -3e38, EVEN)
            Z += tl.exp(z - top)
    Z = tl.sum(tl.reshape(Z, (8, 4)), 1, keep_dims=True)
    inverse = 1 / tl.reshape(tl.broadcast_to(Z, (8, 4)), (32,))
    for s in range(seen):
        row = z_ptr + tl.load(parents_ptr + c * S + s) * J * NS
        for j in range(0, J, 4):
            z = load_type(row + j * NS + own, j + k < J, -3e38, EVEN)
            tl.store(row + j * NS + own, tl.exp(z - top) * inverse, mask=here if EVEN else here & (j + k < J))


# --- backward -----------------------------------------------------------------------------------------------------


@triton.jit
def grad_R_kernel(
    pose_ptr, W_ptr, place_ptr, child_ptr, m_ptr, gb_ptr, gS_ptr, gr_ptr,
    dR_ptr,
    N, NS, I, J, CHUNK,
    SHARED: tl.constexpr, PLACE: tl.constexpr, AHEAD: tl.constexpr, WARPS: tl.constexpr, MMA: tl.constexpr,
):  # fmt: skip
    """dR_ij = gr_j + sum_d x_d (gb_jd + gS_jd x_d), x = V_ij - m_j: how the moments answer to a responsibility."""
    l = tl.program_id(1)
    n, j, here, start, end, own, makings = own_part(pose_ptr, W_ptr, N, NS, I, J, CHUNK, WARPS, MMA)
    SIZE: tl.constexpr = 6 if MMA else 2
    loaded, c = (), ()
    for k in tl.static_range(AHEAD):
        i = tl.minimum(start + k, end - 1)
        loaded += fetch(makings, load_child(child_ptr, l, i, end, I), i, J, SHARED, MMA)
        c += (load_child(child_ptr, l, i + AHEAD, end, I),)
    parent = (l * J + j) * N
    minus_m = scale(-1.0, load_pose(m_ptr + parent * 16 + 4 * n, 4 * N))
    gb, gS = load_pose(gb_ptr + parent * 16 + 4 * n, 4 * N), load_pose(gS_ptr + parent * 16 + 4 * n, 4 * N)
    gr = tl.load(gr_ptr + parent + n)
    for i0 in range(start, end, AHEAD):
        new, new_c = (), ()
        for k in tl.static_range(AHEAD):
            i = tl.minimum(i0 + k, end - 1)  # behind the last slot, this one again
            X = add_vote(minus_m, loaded[k * SIZE : (k + 1) * SIZE], place_ptr, i, PLACE, MMA)
            dR = gr
            for d in tl.static_range(16):
                dR += X[d] * (gb[d] + gS[d] * X[d])
            tl.store(dR_ptr + i * J * NS + own, dR, mask=here)
            i = tl.minimum(i0 + k + AHEAD, end - 1)
            new += fetch(makings, c[k], i, J, SHARED, MMA)
            new_c += (load_child(child_ptr, l, i + AHEAD, end, I),)
        loaded, c = new, new_c


@triton.jit
def grad_a_kernel(
    dR_ptr, r_ptr, parents_ptr, seen_ptr, s_ptr, da_ptr, N, NS, J, S, FIRST: tl.constexpr, ADD: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    """s_c = sum over the child's parents of r dR: its share of da, and what the softmax takes off; a child a warp."""
    c = tl.program_id(0)
    lane, n, k, here = lanes(tl.program_id(1), 0, N, 4, 1)
    own = k * NS + n
    here &= k == 0
    sum_rdR = tl.zeros((32,), tl.float32)
    for s in range(tl.load(seen_ptr + c)):
        row = tl.load(parents_ptr + c * S + s) * J * NS
        for j in range(0, J, 4):
            dR = load_type(dR_ptr + row + j * NS + own, j + k < J, 0.0, EVEN)
            if FIRST:
                sum_rdR += dR / J
            else:
                sum_rdR += dR * load_type(r_ptr + row + j * NS + own, j + k < J, 0.0, EVEN)
    sum_rdR = tl.sum(tl.reshape(sum_rdR, (8, 4)), 1, keep_dims=True)
    sum_rdR = tl.reshape(tl.broadcast_to(sum_rdR, (8, 4)), (32,))
    tl.store(s_ptr + c * N + n, sum_rdR, mask=here)
    if ADD:
        sum_rdR += tl.load(da_ptr + c * N + n)
    tl.store(da_ptr + c * N + n, sum_rdR, mask=here)


@triton.jit
def load_gain(a_ptr, s_ptr, r_ptr, dR_ptr, c, i, own, n, N, NS, J):
    """a_i, r_ij, dR_ij and s_i of child c in slot i."""
    at = i * J * NS + own
    return tl.load(a_ptr + c * N + n), tl.load(r_ptr + at), tl.load(dR_ptr + at), tl.load(s_ptr + c * N + n)


@triton.jit
def grad_z_kernel(
    a_ptr, pose_ptr, W_ptr, place_ptr, child_ptr, m_ptr, r_ptr, s_ptr, dR_ptr,
    U0_ptr, U1_ptr, U2_ptr,
    N, NS, I, J, CHUNK,
    SHARED: tl.constexpr, PLACE: tl.constexpr, AHEAD: tl.constexpr, WARPS: tl.constexpr, MMA: tl.constexpr,
):  # fmt: skip
    """dz_ij = r_ij a_i (dR_ij - s_i), written over dR_ij, and part of U_k = sum_i dz_ij x^k, x = V_ij - m_j."""
    l, L = tl.program_id(1), tl.num_programs(1)
    n, j, here, start, end, own, makings = own_part(pose_ptr, W_ptr, N, NS, I, J, CHUNK, WARPS, MMA)
    SIZE: tl.constexpr = 10 if MMA else 6
    loaded, c = (), ()
    for k in tl.static_range(AHEAD):
        i = tl.minimum(start + k, end - 1)
        child = load_child(child_ptr, l, i, end, I)
        loaded += load_gain(a_ptr, s_ptr, r_ptr, dR_ptr, child, i, own, n, N, NS, J)
        loaded += fetch(makings, child, i, J, SHARED, MMA)
        c += (load_child(child_ptr, l, i + AHEAD, end, I),)
    zero = tl.zeros((32 * WARPS,), tl.float32)
    minus_m = scale(-1.0, load_pose(m_ptr + (l * J + j) * N * 16 + 4 * n, 4 * N))
    U0, U1, U2 = zero, repeat(zero), repeat(zero)
    for i0 in range(start, end, AHEAD):
        new, new_c = (), ()
        for k in tl.static_range(AHEAD):
            made = loaded[k * SIZE : (k + 1) * SIZE]
            i = tl.minimum(i0 + k, end - 1)
            dz = made[0] * made[1] * (made[2] - made[3])
            tl.store(dR_ptr + i * J * NS + own, dz, mask=here & (i0 + k < end))
            dz = tl.where(i0 + k < end, dz, 0.0)
            X = add_vote(minus_m, made[4:], place_ptr, i, PLACE, MMA)
            U0 += dz
            dzX = scale(dz, X)
            U1 = add(U1, dzX)
            U2 = add(U2, mul(dzX, X))
            i = tl.minimum(i0 + k + AHEAD, end - 1)
            new += load_gain(a_ptr, s_ptr, r_ptr, dR_ptr, c[k], i, own, n, N, NS, J)
            new += fetch(makings, c[k], i, J, SHARED, MMA)
            new_c += (load_child(child_ptr, l, i + AHEAD, end, I),)
        loaded, c = new, new_c
    parent = ((tl.program_id(0) * L + l) * J + j) * N
    tl.store(U0_ptr + parent + n, U0, mask=here)
    store_pose(U1_ptr + parent * 16 + 4 * n, 4 * N, U1, here)
    store_pose(U2_ptr + parent * 16 + 4 * n, 4 * N, U2, here)

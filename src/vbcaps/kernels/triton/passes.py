"""The passes over votes that VB and EM routing share, as Triton kernels. No kernel writes a vote to memory.

Both algorithms run the same loop (routing/README.md derives its gradients):

    moments   r_j = sum_i R_ij,  m_j = (sum_i R_ij V_ij + k0 m0) / (k0 + r_j),
              S_j = sum_i R_ij (V_ij - m_j)^2 + k0 (m0 - m_j)^2
    parent    (r_j, S_j) to (lambda_j, K_j)                      differs by algorithm, see vb.py and em.py
    scores    z_ij = K_j - 1/2 sum_d lambda_jd (V_ijd - m_jd)^2,  r_ij = softmax over all parents of the child

with R_ij = a_i r_ij. Every pass recomputes the votes V_ij = M_i W_ij that it needs (mma.py).

Memory layout. A pose is 16 adjacent numbers, column by column, as tensor cores take it. Slots are stored in quads of
four child types at one position, so a lane reads the responsibilities of a quad by one load. Parent types are stored in
groups of four, too, j = 4 g + k, so that a warp reads one contiguous piece. Where the number of types is no multiple of
four, the last quad or group is padded:

    a: c n    pose: c n r p    W: i j p r    r, z, dR: l u g n k 4    r_j, K: l j n    m, S, lambda: l j n r p

`child[l, i]` is the child capsule in slot i of field l. `parents[c, s]` is the s-th of the `seen[c]` slots (l I + i)
that hold capsule c; the rest of its row is -1. Where positions share weights, slot i uses row i mod SHARED of them.

A warp has 8 images and 4 parent types, and loops over quads u of slots. The warps of a program have different types and
so read the same poses. The quads of a field are split into PARTS, one per program. The kernel that reads the partial
sums adds them in a fixed order, without atomics or barriers, so the result is the same in every run.
"""

import triton
import triton.language as tl

from vbcaps.kernels.triton.mma import (
    eight,
    four,
    half_product,
    load_block,
    load_pose,
    load_rows,
    product_plain,
    store_four,
    store_pose,
    two,
)


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
    """Return A + s X."""
    return [A[d] + s * X[d] for d in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)]


@triton.jit
def lanes(block, group, N, J, WARPS: tl.constexpr):
    """Return the lanes of a program, each lane's image and type, and whether these exist.

    A lane whose image or type does not exist works on the last one and stores nothing.
    """
    lane = tl.arange(0, 32 * WARPS)
    n, j = block * 8 + lane % 32 // 4, (group * WARPS + lane // 32) * 4 + lane % 4
    return lane, tl.minimum(n, N - 1), tl.minimum(j, J - 1), (n < N) & (j < J)


@triton.jit
def own_part(pose_ptr, W_ptr, N, U, CHUNK, J: tl.constexpr, WARPS: tl.constexpr, MMA: tl.constexpr):
    """Return each lane's image and type, its range of slot quads, its offset into r, and the arguments of `fetch`.

    The axes of the grid are: part, field, images and types.
    """
    blocks = tl.cdiv(N, 8)
    lane, n, j, here = lanes(tl.program_id(2) % blocks, tl.program_id(2) // blocks, N, J, WARPS)
    if MMA:
        column = tl.minimum(j // 4 * 4 + lane % 32 // 8, J - 1)
        pose_at, weight_at = 16 * n + lane % 4 * 4, column * 16 + lane % 4 * 4 + lane // 4 % 2 * 2
    else:
        pose_at, weight_at = 16 * n, 16 * j
    start = tl.program_id(0) * CHUNK
    own = ((tl.program_id(1) * U * ((J + 3) // 4) + j // 4) * N + n) * 16 + j % 4 * 4
    return n, j, here, start, tl.minimum(start + CHUNK, U), own, (pose_ptr + pose_at, W_ptr + weight_at, N)


@triton.jit
def first_slot(u, TYPES: tl.constexpr):
    """Return the first slot of quad u of a field, and the offset of its last slot."""
    t = u % ((TYPES + 3) // 4) * 4
    return u // ((TYPES + 3) // 4) * TYPES + t, tl.minimum(TYPES - t, 4) - 1


@triton.jit
def nth(k: tl.constexpr, last, TYPES: tl.constexpr):
    """Return k, or the last slot of a quad that has fewer slots."""
    return k if TYPES % 4 == 0 else tl.minimum(k, last)


@triton.jit
def fetch(makings, c, i, J: tl.constexpr, SHARED: tl.constexpr, MMA: tl.constexpr):
    """Load M_c, and W_ij of its slot i, for `add_vote`."""
    pose_ptr, W_ptr, N = makings
    W_ptr += (i % SHARED if SHARED else i) * J * 16
    pose_ptr += c * 16 * N
    if MMA:
        return four(pose_ptr) + two(W_ptr)
    else:
        return load_block(pose_ptr, 1, 4, 4, 4), load_block(W_ptr, 4, 4, 4, 1)


@triton.jit
def fetch_four(makings, c, u, J: tl.constexpr, TYPES: tl.constexpr, SHARED: tl.constexpr, MMA: tl.constexpr):
    """Load M and W for the slots of quad u, whose first child is c.

    A loop over quads fetches the next quad at the end of each round. One wait for memory then serves four slots; the
    compiler would put each load just before its use.
    """
    i, last = first_slot(u, TYPES)
    made = ()
    for k in tl.static_range(4):
        step = nth(k, last, TYPES)
        made += fetch(makings, c + step, i + step, J, SHARED, MMA)
    return made


@triton.jit
def load_child(child_ptr, u, end, I, TYPES: tl.constexpr):
    """Load the first child of quad u of the program's field, or of the last quad if u is past the end."""
    i, _ = first_slot(tl.minimum(u, end - 1), TYPES)
    return tl.load(child_ptr + tl.program_id(1) * I + i).to(tl.int32)


@triton.jit
def load_children(x_ptr, c, u, n, N, TYPES: tl.constexpr):
    """Load a number for each child of quad u, whose first child is c."""
    _, last = first_slot(u, TYPES)
    x = ()
    for k in tl.static_range(4):
        x += (tl.load(x_ptr + (c + nth(k, last, TYPES)) * N + n),)
    return x


@triton.jit
def add_vote(
    A, made, k: tl.constexpr, coords_ptr, u, TYPES: tl.constexpr, COORDS: tl.constexpr, MMA: tl.constexpr
):  # fmt: skip
    """Return A + V_ij for slot k of quad u: V_ij = M_i W_ij with the child's coordinates added to two entries."""
    if COORDS:
        i, last = first_slot(u, TYPES)
        at = coords_ptr + 2 * (i + nth(k, last, TYPES))
        y, x = tl.load(at), tl.load(at + 1)
        A = [
            A[d] + y if d == 3 else (A[d] + x if d == 7 else A[d])
            for d in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
        ]
    if MMA:
        P, W = made[6 * k : 6 * k + 4], made[6 * k + 4 : 6 * k + 6]
        return half_product(A[:8], P[:2], W, MMA) + half_product(A[8:], P[2:], W, MMA)
    else:
        M, W = made[2 * k], made[2 * k + 1]
        V = tl.reshape(product_plain(M, W), (M.shape[0], 2, 8))
        top, bottom = tl.split(tl.permute(V, (0, 2, 1)))
        return add(A, eight(top) + eight(bottom))


@triton.jit
def sum_parts(ptr, at, part_size, PARTS):
    """Return the sum of PARTS numbers that lie `part_size` apart."""
    s = tl.load(ptr + at)
    for q in range(1, PARTS):
        s += tl.load(ptr + q * part_size + at)
    return s


@triton.jit
def sum_pose_parts(ptr, at, part_size, PARTS):
    s = load_pose(ptr + at)
    for q in range(1, PARTS):
        x = load_pose(ptr + q * part_size + at)
        s = (
            s[0] + x[0], s[1] + x[1], s[2] + x[2], s[3] + x[3], s[4] + x[4], s[5] + x[5], s[6] + x[6], s[7] + x[7],
            s[8] + x[8], s[9] + x[9], s[10] + x[10], s[11] + x[11], s[12] + x[12], s[13] + x[13], s[14] + x[14],
            s[15] + x[15],
        )  # fmt: skip
    return s


@triton.jit
def sum_types(x_ptr, field, n, N, J, TYPES: tl.constexpr):
    """Return the sum over the J types of a field; TYPES is the least power of two that is not below J."""
    k = tl.arange(0, TYPES)
    return tl.sum(tl.load(x_ptr + (field[:, None] + k[None, :]) * N + n[:, None], mask=k[None, :] < J, other=0.0), 1)


@triton.jit
def load_shares(a_ptr, r_ptr, c, u, own, n, N, J: tl.constexpr, TYPES: tl.constexpr, FIRST: tl.constexpr):
    """Load a_i and (unless FIRST) r_ij of quad u."""
    a = load_children(a_ptr, c, u, n, N, TYPES)
    return a if FIRST else a + four(r_ptr + u * ((J + 3) // 4) * 16 * N + own)


@triton.jit
def share(loaded, k: tl.constexpr, u, J: tl.constexpr, TYPES: tl.constexpr, FIRST: tl.constexpr):
    """Return R_ij = a_i r_ij of slot k of quad u, or 0 if the slot does not exist."""
    R = loaded[k] / J if FIRST else loaded[k] * loaded[4 + k]
    _, last = first_slot(u, TYPES)
    return R if TYPES % 4 == 0 else tl.where(k <= last, R, 0.0)


@triton.jit
def means_kernel(
    a_ptr,  # c n
    pose_ptr,  # c n r p
    W_ptr,  # g j q r
    coords_ptr,  # i 2
    child_ptr,  # l i
    r_ptr,  # l u g n k 4
    sum_R_ptr,  # parts l j n
    sum_RV_ptr,  # parts l j n r p
    N, I, U, CHUNK, J: tl.constexpr, TYPES: tl.constexpr, SHARED: tl.constexpr, COORDS: tl.constexpr,
    FIRST: tl.constexpr, WARPS: tl.constexpr, MMA: tl.constexpr,
):  # fmt: skip
    """Write partial sums of R_ij and R_ij V_ij over CHUNK quads of one position."""
    l, L = tl.program_id(1), tl.num_programs(1)
    n, j, here, start, end, own, makings = own_part(pose_ptr, W_ptr, N, U, CHUNK, J, WARPS, MMA)
    zero = tl.zeros((32 * WARPS,), tl.float32)
    sum_R, sum_RV = zero, repeat(zero)
    c = load_child(child_ptr, start, end, I, TYPES)
    made = fetch_four(makings, c, start, J, TYPES, SHARED, MMA)
    loaded = load_shares(a_ptr, r_ptr, c, start, own, n, N, J, TYPES, FIRST)
    c = load_child(child_ptr, start + 1, end, I, TYPES)
    for u in range(start, end):
        for k in tl.static_range(4):
            R = share(loaded, k, u, J, TYPES, FIRST)
            sum_R += R
            sum_RV = axpy(sum_RV, R, add_vote(repeat(zero), made, k, coords_ptr, u, TYPES, COORDS, MMA))
        next = tl.minimum(u + 1, end - 1)
        made = fetch_four(makings, c, next, J, TYPES, SHARED, MMA)
        loaded = load_shares(a_ptr, r_ptr, c, next, own, n, N, J, TYPES, FIRST)
        c = load_child(child_ptr, u + 2, end, I, TYPES)
    parent = (tl.program_id(0) * L + l) * J * N + j * N + n
    tl.store(sum_R_ptr + parent, sum_R, mask=here)
    store_pose(sum_RV_ptr + parent * 16, sum_RV, here)


@triton.jit
def spreads_kernel(
    a_ptr,  # c n
    pose_ptr,  # c n r p
    W_ptr,  # g j q r
    coords_ptr,  # i 2
    child_ptr,  # l i
    r_ptr,  # l u g n k 4
    k0_ptr,  # () or j
    m0_ptr,  # d or j d
    sum_R_ptr,  # parts l j n
    sum_RV_ptr,  # parts l j n r p
    rj_ptr,  # l j n
    m_ptr,  # l j n r p
    S_ptr,  # l j n r p
    N, I, U, CHUNK, PARTS, k0_stride, m0_stride, J: tl.constexpr, TYPES: tl.constexpr, SHARED: tl.constexpr,
    COORDS: tl.constexpr, FIRST: tl.constexpr, WARPS: tl.constexpr, MMA: tl.constexpr,
):  # fmt: skip
    """Write r_j and m_j, and partial sums of S_j."""
    l, L = tl.program_id(1), tl.num_programs(1)
    n, j, here, start, end, own, makings = own_part(pose_ptr, W_ptr, N, U, CHUNK, J, WARPS, MMA)
    c = load_child(child_ptr, start, end, I, TYPES)
    made = fetch_four(makings, c, start, J, TYPES, SHARED, MMA)
    loaded = load_shares(a_ptr, r_ptr, c, start, own, n, N, J, TYPES, FIRST)
    c = load_child(child_ptr, start + 1, end, I, TYPES)
    parent, size = (l * J + j) * N + n, L * J * N
    k0, m0 = tl.load(k0_ptr + j * k0_stride), load_rows(m0_ptr + j * m0_stride)
    r_j = sum_parts(sum_R_ptr, parent, size, PARTS)
    m = axpy(sum_pose_parts(sum_RV_ptr, parent * 16, 16 * size, PARTS), k0, m0)
    minus_m = scale(-1 / tl.maximum(k0 + r_j, 1e-19), m)
    first = tl.program_id(0) == 0
    gap = add(m0, minus_m)
    S = scale(tl.where(first, k0, 0.0), mul(gap, gap))
    tl.store(rj_ptr + parent, r_j, mask=here & first)
    store_pose(m_ptr + parent * 16, scale(-1.0, minus_m), here & first)
    for u in range(start, end):
        for k in tl.static_range(4):
            X = add_vote(minus_m, made, k, coords_ptr, u, TYPES, COORDS, MMA)
            S = axpy(S, share(loaded, k, u, J, TYPES, FIRST), mul(X, X))
        next = tl.minimum(u + 1, end - 1)
        made = fetch_four(makings, c, next, J, TYPES, SHARED, MMA)
        loaded = load_shares(a_ptr, r_ptr, c, next, own, n, N, J, TYPES, FIRST)
        c = load_child(child_ptr, u + 2, end, I, TYPES)
    store_pose(S_ptr + (tl.program_id(0) * size + parent) * 16, S, here)


@triton.jit
def scores_kernel(
    pose_ptr,  # c n r p
    W_ptr,  # g j q r
    coords_ptr,  # i 2
    child_ptr,  # l i
    m_ptr,  # l j n r p
    lam_ptr,  # l j n r p
    K_ptr,  # l j n
    z_ptr,  # l u g n k 4
    N, I, U, CHUNK, J: tl.constexpr, TYPES: tl.constexpr, SHARED: tl.constexpr, COORDS: tl.constexpr,
    WARPS: tl.constexpr, MMA: tl.constexpr,
):  # fmt: skip
    """Write z_ij for CHUNK quads of one position."""
    n, j, here, start, end, own, makings = own_part(pose_ptr, W_ptr, N, U, CHUNK, J, WARPS, MMA)
    made = fetch_four(makings, load_child(child_ptr, start, end, I, TYPES), start, J, TYPES, SHARED, MMA)
    c = load_child(child_ptr, start + 1, end, I, TYPES)
    parent = (tl.program_id(1) * J + j) * N + n
    minus_m, lam = scale(-1.0, load_pose(m_ptr + parent * 16)), load_pose(lam_ptr + parent * 16)
    K = tl.load(K_ptr + parent)
    for u in range(start, end):
        z = ()
        for k in tl.static_range(4):
            X = add_vote(minus_m, made, k, coords_ptr, u, TYPES, COORDS, MMA)
            distance = tl.zeros_like(K)
            for d in tl.static_range(16):
                distance += lam[d] * X[d] * X[d]
            z += (K - 0.5 * distance,)
        store_four(z_ptr + u * ((J + 3) // 4) * 16 * N + own, z, here)
        made = fetch_four(makings, c, tl.minimum(u + 1, end - 1), J, TYPES, SHARED, MMA)
        c = load_child(child_ptr, u + 2, end, I, TYPES)


@triton.jit
def own_children(parents_ptr, seen_ptr, N, S, TYPES: tl.constexpr):
    """Return the children, images, lanes and parents of a program that has four children of one position and 8 images.

    These are: the first child, the offset of the last one, each lane's image and its number k among the image's four
    lanes, whether the image exists, the number of the children's parents, and the pointer to these.
    """
    c, last = first_slot(tl.program_id(0), TYPES)
    _, n, k, here = lanes(tl.program_id(1), 0, N, 4, 1)
    return c, last, n, k, here, tl.load(seen_ptr + c), parents_ptr + c * S


@triton.jit
def row_of(slot, N, J: tl.constexpr, TYPES: tl.constexpr):
    """Return the offset into r of the quad whose first slot is `slot` (l I + i)."""
    return (slot // TYPES * ((TYPES + 3) // 4) + slot % TYPES // 4) * ((J + 3) // 4) * 16 * N


@triton.jit
def load_types(ptr, g: tl.constexpr, k, J: tl.constexpr, other: tl.constexpr):
    """Load four slots of the lane's type 4 g + k, or `other` if this type does not exist."""
    if J % 4 == 0:
        return four(ptr)
    else:
        x, on = four(ptr + (tl.minimum(4 * g + k, J - 1) - 4 * g - k) * 4), 4 * g + k < J
        return (
            tl.where(on, x[0], other),
            tl.where(on, x[1], other),
            tl.where(on, x[2], other),
            tl.where(on, x[3], other),
        )


@triton.jit
def sum_lanes(x):
    """Return the sum over the four types of an image, in each of its lanes."""
    s = tl.sum(tl.reshape(x, (8, 4)), 1, keep_dims=True)
    return tl.reshape(tl.broadcast_to(s, (8, 4)), (32,))


@triton.jit
def max_lanes(x):
    s = tl.max(tl.reshape(x, (8, 4)), 1, keep_dims=True)
    return tl.reshape(tl.broadcast_to(s, (8, 4)), (32,))


@triton.jit
def softmax_kernel(
    z_ptr,  # l u g n k 4
    parents_ptr,  # c s
    seen_ptr,  # c
    N, S, J: tl.constexpr, TYPES: tl.constexpr,
):  # fmt: skip
    """Write r_ij = exp(z_ij - ln Z_i) over z_ij, four children per warp; Z_i sums over parent types and positions."""
    c, _, n, k, here, seen, parents_ptr = own_children(parents_ptr, seen_ptr, N, S, TYPES)
    own = z_ptr + n * 16 + k * 4
    low = tl.full((32,), -3e38, tl.float32)
    t0, t1, t2, t3 = low, low, low, low
    for s in range(seen):
        row = own + row_of(tl.load(parents_ptr + s), N, J, TYPES)
        for g in tl.static_range((J + 3) // 4):
            z = load_types(row + g * 16 * N, g, k, J, -3e38)
            t0, t1 = tl.maximum(t0, z[0]), tl.maximum(t1, z[1])
            t2, t3 = tl.maximum(t2, z[2]), tl.maximum(t3, z[3])
    t0, t1, t2, t3 = max_lanes(t0), max_lanes(t1), max_lanes(t2), max_lanes(t3)
    zero = tl.zeros((32,), tl.float32)
    Z0, Z1, Z2, Z3 = zero, zero, zero, zero
    for s in range(seen):
        row = own + row_of(tl.load(parents_ptr + s), N, J, TYPES)
        for g in tl.static_range((J + 3) // 4):
            z = load_types(row + g * 16 * N, g, k, J, -3e38)
            Z0, Z1 = Z0 + tl.exp(z[0] - t0), Z1 + tl.exp(z[1] - t1)
            Z2, Z3 = Z2 + tl.exp(z[2] - t2), Z3 + tl.exp(z[3] - t3)
    Z0, Z1, Z2, Z3 = 1 / sum_lanes(Z0), 1 / sum_lanes(Z1), 1 / sum_lanes(Z2), 1 / sum_lanes(Z3)
    for s in range(seen):
        row = own + row_of(tl.load(parents_ptr + s), N, J, TYPES)
        for g in tl.static_range((J + 3) // 4):
            z = load_types(row + g * 16 * N, g, k, J, -3e38)
            r = tl.exp(z[0] - t0) * Z0, tl.exp(z[1] - t1) * Z1, tl.exp(z[2] - t2) * Z2, tl.exp(z[3] - t3) * Z3
            store_four(row + g * 16 * N, r, here)  # 0 where there is no such type

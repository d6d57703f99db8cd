"""The backward passes over votes, as Triton kernels; passes.py has the forward passes and describes axes and memory.

The kernels compute the gradients of responsibilities and scores iteration by iteration (routing/README.md), and those
of poses and weights at the end: dM_i = sum_lj dV_ij W_ij^T and dW_ij = sum_nl M_i^T dV_ij. They compute the gradient
of a vote where they use it, from the terms that its parent adds to it:

    dV_ij = sum_k s_kij (E_kj + C_kj (V_ij - m_j))

The weights s are R_ij for each of the T moments and dz_ij for each of the T - 1 scores. A parent's E, C and m are
4 T - 1 poses, too many to load for one vote. A warp therefore loads two rows of them and uses them for four children of
one position, which share their parents; the other warps of a program have other children there and find the same terms
in the first-level cache. Gradients of weights are computed likewise, with images and types, rows and columns exchanged.

Memory layout: coef is l g b p t n k r, t over E_0, C_0, E_1, ..., -m, types in groups g of 4, images in blocks b of 8,
so that a warp loads contiguous numbers.
"""

import triton
import triton.language as tl

from vbcaps.kernels.triton.mma import (
    contract,
    finish,
    four,
    half_product,
    load_block,
    load_pose,
    store_four,
    store_pose,
    tf32_part,
    two,
)
from vbcaps.kernels.triton.passes import (
    add,
    add_vote,
    fetch_four,
    first_slot,
    load_child,
    load_children,
    load_types,
    mul,
    nth,
    own_children,
    own_part,
    repeat,
    row_of,
    scale,
    share,
    sum_lanes,
)

# --- responsibilities and scores --------------------------------------------------------------------------------


@triton.jit
def grad_R_kernel(
    pose_ptr,  # c n r p
    W_ptr,  # g j q r
    coords_ptr,  # i 2
    child_ptr,  # l i
    m_ptr,  # l j n r p
    gb_ptr,  # l j n r p
    gS_ptr,  # l j n r p
    gr_ptr,  # l j n
    dR_ptr,  # l u g n k 4
    N, I, U, CHUNK, J: tl.constexpr, TYPES: tl.constexpr, SHARED: tl.constexpr, COORDS: tl.constexpr,
    WARPS: tl.constexpr, MMA: tl.constexpr,
):  # fmt: skip
    """Write the gradient of R_ij through the moments: dR_ij = gr_j + sum_d x_d (gb_jd + gS_jd x_d), x = V_ij - m_j."""
    n, j, here, start, end, own, makings = own_part(pose_ptr, W_ptr, N, U, CHUNK, J, WARPS, MMA)
    made = fetch_four(makings, load_child(child_ptr, start, end, I, TYPES), start, J, TYPES, SHARED, MMA)
    c = load_child(child_ptr, start + 1, end, I, TYPES)
    parent = (tl.program_id(1) * J + j) * N + n
    minus_m = scale(-1.0, load_pose(m_ptr + parent * 16))
    gb, gS, gr = load_pose(gb_ptr + parent * 16), load_pose(gS_ptr + parent * 16), tl.load(gr_ptr + parent)
    for u in range(start, end):
        dR = ()
        for k in tl.static_range(4):
            X = add_vote(minus_m, made, k, coords_ptr, u, TYPES, COORDS, MMA)
            s = gr
            for d in tl.static_range(16):
                s += X[d] * (gb[d] + gS[d] * X[d])
            dR += (s,)
        store_four(dR_ptr + u * ((J + 3) // 4) * 16 * N + own, dR, here)
        made = fetch_four(makings, c, tl.minimum(u + 1, end - 1), J, TYPES, SHARED, MMA)
        c = load_child(child_ptr, u + 2, end, I, TYPES)


@triton.jit
def grad_a_kernel(
    dR_ptr,  # l u g n k 4
    r_ptr,  # l u g n k 4
    parents_ptr,  # c s
    seen_ptr,  # c
    s_ptr,  # c n
    da_ptr,  # c n
    N, S, J: tl.constexpr, TYPES: tl.constexpr, FIRST: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """Write s_c, the sum of r dR over a child's parents, and write it to da or add it; four children per warp.

    grad_z_kernel subtracts s_c from dR, as the gradient of the softmax demands.
    """
    c, last, n, k, here, seen, parents_ptr = own_children(parents_ptr, seen_ptr, N, S, TYPES)
    own = n * 16 + k * 4
    zero = tl.zeros((32,), tl.float32)
    s0, s1, s2, s3 = zero, zero, zero, zero
    for s in range(seen):
        row = own + row_of(tl.load(parents_ptr + s), N, J, TYPES)
        for g in tl.static_range((J + 3) // 4):
            dR = load_types(dR_ptr + row + g * 16 * N, g, k, J, 0.0)
            if FIRST:
                s0, s1, s2, s3 = s0 + dR[0] / J, s1 + dR[1] / J, s2 + dR[2] / J, s3 + dR[3] / J
            else:
                r = load_types(r_ptr + row + g * 16 * N, g, k, J, 0.0)
                s0, s1, s2, s3 = s0 + dR[0] * r[0], s1 + dR[1] * r[1], s2 + dR[2] * r[2], s3 + dR[3] * r[3]
    s0, s1, s2, s3 = sum_lanes(s0), sum_lanes(s1), sum_lanes(s2), sum_lanes(s3)
    sum_rdR = tl.where(k < 2, tl.where(k == 0, s0, s1), tl.where(k == 2, s2, s3))  # lane k stores the sum of child k
    here &= k <= last
    at = (c + tl.minimum(k, last)) * N + n
    tl.store(s_ptr + at, sum_rdR, mask=here)
    if ADD:
        sum_rdR += tl.load(da_ptr + at)
    tl.store(da_ptr + at, sum_rdR, mask=here)


@triton.jit
def load_gains(a_ptr, s_ptr, r_ptr, dR_ptr, c, u, own, n, N, J: tl.constexpr, TYPES: tl.constexpr):
    """Load a_i, r_ij, dR_ij and s_i of quad u."""
    at = u * ((J + 3) // 4) * 16 * N + own
    return (
        load_children(a_ptr, c, u, n, N, TYPES) + four(r_ptr + at) + four(dR_ptr + at)
        + load_children(s_ptr, c, u, n, N, TYPES)
    )  # fmt: skip


@triton.jit
def grad_z_kernel(
    a_ptr,  # c n
    pose_ptr,  # c n r p
    W_ptr,  # g j q r
    coords_ptr,  # i 2
    child_ptr,  # l i
    m_ptr,  # l j n r p
    r_ptr,  # l u g n k 4
    s_ptr,  # c n
    dR_ptr,  # l u g n k 4
    U0_ptr,  # parts l j n
    U1_ptr,  # parts l j n r p
    U2_ptr,  # parts l j n r p
    N, I, U, CHUNK, J: tl.constexpr, TYPES: tl.constexpr, SHARED: tl.constexpr, COORDS: tl.constexpr,
    WARPS: tl.constexpr, MMA: tl.constexpr,
):  # fmt: skip
    """Write dz_ij = r_ij a_i (dR_ij - s_i) over dR_ij, and partial sums U_k = sum_i dz_ij x^k, x = V_ij - m_j."""
    l, L = tl.program_id(1), tl.num_programs(1)
    n, j, here, start, end, own, makings = own_part(pose_ptr, W_ptr, N, U, CHUNK, J, WARPS, MMA)
    c = load_child(child_ptr, start, end, I, TYPES)
    made = fetch_four(makings, c, start, J, TYPES, SHARED, MMA)
    loaded = load_gains(a_ptr, s_ptr, r_ptr, dR_ptr, c, start, own, n, N, J, TYPES)
    c = load_child(child_ptr, start + 1, end, I, TYPES)
    zero = tl.zeros((32 * WARPS,), tl.float32)
    minus_m = scale(-1.0, load_pose(m_ptr + ((l * J + j) * N + n) * 16))
    U0, U1, U2 = zero, repeat(zero), repeat(zero)
    for u in range(start, end):
        dz = ()
        for k in tl.static_range(4):
            dz += (share(loaded, k, u, J, TYPES, False) * (loaded[8 + k] - loaded[12 + k]),)
        store_four(dR_ptr + u * ((J + 3) // 4) * 16 * N + own, dz, here)
        for k in tl.static_range(4):
            X = add_vote(minus_m, made, k, coords_ptr, u, TYPES, COORDS, MMA)
            U0 += dz[k]
            dzX = scale(dz[k], X)
            U1 = add(U1, dzX)
            U2 = add(U2, mul(dzX, X))
        next = tl.minimum(u + 1, end - 1)
        made = fetch_four(makings, c, next, J, TYPES, SHARED, MMA)
        loaded = load_gains(a_ptr, s_ptr, r_ptr, dR_ptr, c, next, own, n, N, J, TYPES)
        c = load_child(child_ptr, u + 2, end, I, TYPES)
    parent = ((tl.program_id(0) * L + l) * J + j) * N + n
    tl.store(U0_ptr + parent, U0, mask=here)
    store_pose(U1_ptr + parent * 16, U1, here)
    store_pose(U2_ptr + parent * 16, U2, here)


# --- poses and weights --------------------------------------------------------------------------------------------


@triton.jit
def load_shares(r_ptr, dz_ptr, at, slots, T: tl.constexpr):
    """Load r of each iteration but the first, then dz: 2 (T - 1) times four slots."""
    x = ()
    for t in tl.static_range(T - 1):
        x += four(r_ptr + t * slots + at)
    for t in tl.static_range(T - 1):
        x += four(dz_ptr + t * slots + at)
    return x


@triton.jit
def shares(loaded, a, k: tl.constexpr, on, J: tl.constexpr, T: tl.constexpr):
    """Return the weight of slot k in each term: R_ij in moments t = 0 .. T-1, then dz_ij in scores t = 0 .. T-2."""
    a = tl.where(on, a, 0.0)
    s = (a / J,)
    for t in tl.static_range(T - 1):
        s += (a * loaded[4 * t + k],)
    for t in tl.static_range(T - 1):
        s += (tl.where(on, loaded[4 * (T - 1 + t) + k], 0.0),)
    return s


@triton.jit
def grad_vote(X, s, terms, T: tl.constexpr, MMA: tl.constexpr):
    """Return dV_he = sum_k s_k (E_khe + C_khe X_he), X = V - m, h < 2, e < 4."""
    if MMA:
        dV = ()
        for d in tl.static_range(8):
            E, C = s[0] * terms[d], s[0] * terms[8 + d]
            for k in tl.static_range(1, 2 * T - 1):
                E += s[k] * terms[16 * k + d]
                C += s[k] * terms[16 * k + 8 + d]
            dV += (E + C * X[d],)
    else:
        dV = s[0][:, None, None] * (terms[0] + terms[1] * X)
        for k in tl.static_range(1, 2 * T - 1):
            dV += s[k][:, None, None] * (terms[2 * k] + terms[2 * k + 1] * X)
    return dV


@triton.jit
def at_coords(X, y, x, y_at: tl.constexpr, x_at: tl.constexpr, MMA: tl.constexpr):
    """Return X with y and x added to two of its entries."""
    if MMA:
        out = ()
        for d in tl.static_range(8):
            out += (X[d] + y if d == y_at else (X[d] + x if d == x_at else X[d]),)
        return out
    else:
        entry, zero = tl.reshape(tl.arange(0, 8), (1, 2, 4)), tl.zeros((X.shape[0],), tl.float32)
        y, x = (zero + y)[:, None, None], (zero + x)[:, None, None]
        return X + tl.where(entry == y_at, y, 0.0) + tl.where(entry == x_at, x, 0.0)


@triton.jit
def grad_pose_kernel(
    a_ptr,  # c n
    pose_ptr,  # c n r p
    W_ptr,  # g j q r
    coords_ptr,  # i 2
    parents_ptr,  # c s
    seen_ptr,  # c
    coef_ptr,  # l g b p t n k r
    r_ptr,  # t l u g n k 4
    dz_ptr,  # t l u g n k 4
    dpose_ptr,  # c n r p
    N, I, S, slots, J: tl.constexpr, TYPES: tl.constexpr, SHARED: tl.constexpr, COORDS: tl.constexpr, T: tl.constexpr,
    WARPS: tl.constexpr, MMA: tl.constexpr,
):  # fmt: skip
    """Write rows 2 half, 2 half + 1 of dM for four children of one position; a warp has 8 images and 4 parent types."""
    half = tl.program_id(2)
    warp, lane = tl.arange(0, 32 * WARPS) // 32, tl.arange(0, 32 * WARPS) % 32
    n = tl.program_id(1) * 8 + lane // 4
    here = (n < N) & (lane % 4 < 2)
    n = tl.minimum(n, N - 1)
    ACC: tl.constexpr = 4 if MMA else 1
    acc = ()
    for k in tl.static_range(4 * ACC):
        acc += (tl.zeros((32 * WARPS,) if MMA else (32 * WARPS, 2, 4), tl.float32),)
    one, _ = first_slot(tl.program_id(0) * WARPS, TYPES)  # all children of a position have the same parents
    c, last = first_slot(tl.program_id(0) * WARPS + warp, TYPES)
    for s in range(tl.load(seen_ptr + one)):
        slot = tl.load(parents_ptr + one * S + s)
        l, i = slot // I, slot % I + c - one
        row = row_of(slot + c - one, N, J, TYPES)
        for j0 in range(0, J, 4):
            j = tl.minimum(j0 + lane % 4, J - 1)
            column = tl.minimum(j0 + lane // 8, J - 1)
            loaded = load_shares(r_ptr, dz_ptr, row + (j // 4 * N + n) * 16 + j % 4 * 4, slots, T)
            block = (l * tl.cdiv(J, 4) + j // 4) * tl.cdiv(N, 8) + n // 8
            coef = coef_ptr + (block * 4 + 2 * half) * (4 * T - 1) * 128 + (n % 8 * 4 + j % 4) * 4
            terms = ()
            for t in tl.static_range(4 * T - 1):
                if MMA:
                    terms += four(coef + t * 128) + four(coef + (4 * T - 1 + t) * 128)
                else:
                    terms += (load_block(coef + t * 128, (4 * T - 1) * 128, 2, 4, 1),)
            new = ()
            for k in tl.static_range(4):
                step = nth(k, last, TYPES)
                weight = W_ptr + ((i + step) % SHARED if SHARED else i + step) * J * 16
                pose = pose_ptr + ((c + step) * N + n) * 16 + 2 * half
                if MMA:
                    X = two(pose + lane % 4 * 4)
                    Y = two(weight + column * 16 + lane % 4 * 4 + lane // 4 % 2 * 2)
                    q = four(weight + j * 16 + lane // 4 % 4 * 4)
                    Z = tf32_part(q[0], lane), tf32_part(q[1], lane), tf32_part(q[2], lane), tf32_part(q[3], lane)
                else:
                    X, Y = load_block(pose, 1, 2, 4, 4), load_block(weight + j * 16, 4, 4, 4, 1)
                    Z = tl.permute(Y, (0, 2, 1))
                X = half_product(terms[16 * (2 * T - 1) :] if MMA else terms[4 * T - 2], X, Y, MMA)
                if COORDS:
                    y = tl.where(half == 0, tl.load(coords_ptr + 2 * (i + step)), 0.0)
                    x = tl.where(half == 0, tl.load(coords_ptr + 2 * (i + step) + 1), 0.0)
                    X = at_coords(X, y, x, 3, 7, MMA)
                a = tl.load(a_ptr + (c + step) * N + n)
                dV = grad_vote(X, shares(loaded, a, k, j0 + lane % 4 < J, J, T), terms, T, MMA)
                new += contract(acc[k * ACC : (k + 1) * ACC], dV, Z, MMA)
            acc = new
    for k in tl.static_range(4):
        dP = finish(acc[k * ACC : (k + 1) * ACC], lane, MMA)
        on = here & (k <= last)
        at = dpose_ptr + ((c + k) * N + n) * 16 + lane % 2 * 8 + 2 * half
        store_two(at, dP[0], dP[2], on)
        store_two(at + 4, dP[1], dP[3], on)


@triton.jit
def store_two(ptr, a, b, mask):
    tl.store(ptr[:, None] + tl.arange(0, 2)[None, :], tl.join(a, b), mask=mask[:, None])


@triton.jit
def grad_weight_kernel(
    a_ptr,  # c n
    pose_ptr,  # c n r p
    W_ptr,  # g j q r
    coords_ptr,  # i 2
    child_ptr,  # l i
    coef_ptr,  # l g b p t n k r
    r_ptr,  # t l u g n k 4
    dz_ptr,  # t l u g n k 4
    dW_ptr,  # parts g j q r
    N, L, I, G, ROUNDS, slots, J: tl.constexpr, TYPES: tl.constexpr, SHARED: tl.constexpr, COORDS: tl.constexpr,
    T: tl.constexpr, WARPS: tl.constexpr, MMA: tl.constexpr,
):  # fmt: skip
    """Write columns 2 half, 2 half + 1 of dW for four rows of weights; a warp has 8 parent types and 4 images.

    A program sums ROUNDS blocks of images, positions and slots that share weights; the caller sums over programs.
    """
    half = tl.program_id(1) % 2
    warp, lane = tl.arange(0, 32 * WARPS) // 32, tl.arange(0, 32 * WARPS) % 32
    j = tl.program_id(1) // 2 * 8 + lane // 4
    here = (j < J) & (lane % 4 < 2)
    j = tl.minimum(j, J - 1)
    g, last = first_slot(tl.program_id(0) * WARPS + warp, TYPES)
    ACC: tl.constexpr = 4 if MMA else 1
    acc = ()
    for k in tl.static_range(4 * ACC):
        acc += (tl.zeros((32 * WARPS,) if MMA else (32 * WARPS, 2, 4), tl.float32),)
    blocks = tl.cdiv(N, 4)
    copies = I // G if SHARED else 1
    end = tl.minimum((tl.program_id(2) + 1) * ROUNDS, L * copies * blocks)
    for round in range(tl.program_id(2) * ROUNDS, end):
        l, copy = round // blocks // copies, round // blocks % copies
        n = round % blocks * 4 + lane % 4
        other = tl.minimum(round % blocks * 4 + lane // 8, N - 1)  # the image whose column of M the lane loads
        on = n < N
        n = tl.minimum(n, N - 1)
        i = copy * G + g
        row = row_of(l * I + i, N, J, TYPES)
        loaded = load_shares(r_ptr, dz_ptr, row + (j // 4 * N + n) * 16 + j % 4 * 4, slots, T)
        block = (l * tl.cdiv(J, 4) + j // 4) * tl.cdiv(N, 8) + n // 8
        coef = coef_ptr + block * 4 * (4 * T - 1) * 128 + (n % 8 * 4 + j % 4) * 4 + 2 * half
        terms = ()
        for t in tl.static_range(4 * T - 1):
            if MMA:
                rows = ()
                for p in tl.static_range(4):
                    rows += two(coef + (p * (4 * T - 1) + t) * 128)
                terms += (rows[0], rows[2], rows[4], rows[6], rows[1], rows[3], rows[5], rows[7])
            else:
                terms += (load_block(coef + t * 128, 1, 2, 4, (4 * T - 1) * 128),)
        c = tl.load(child_ptr + l * I + i).to(tl.int32)
        new = ()
        for k in tl.static_range(4):
            step = nth(k, last, TYPES)
            weight = W_ptr + ((g + step) * J + j) * 16 + 2 * half
            pose = pose_ptr + (c + step) * 16 * N
            if MMA:
                X = two(weight + lane % 4 * 4)
                Y = two(pose + 16 * other + lane % 4 * 4 + lane // 4 % 2 * 2)
                q = four(pose + 16 * n + lane // 4 % 4 * 4)
                Z = tf32_part(q[0], lane), tf32_part(q[1], lane), tf32_part(q[2], lane), tf32_part(q[3], lane)
            else:
                X, Y = load_block(weight, 1, 2, 4, 4), load_block(pose + 16 * n, 4, 4, 4, 1)
                Z = tl.permute(Y, (0, 2, 1))
            X = half_product(terms[16 * (2 * T - 1) :] if MMA else terms[4 * T - 2], X, Y, MMA)
            if COORDS:
                y = tl.where(half == 1, tl.load(coords_ptr + 2 * (i + step)), 0.0)
                x = tl.where(half == 1, tl.load(coords_ptr + 2 * (i + step) + 1), 0.0)
                X = at_coords(X, y, x, 4, 5, MMA)
            s = shares(loaded, tl.load(a_ptr + (c + step) * N + n), k, on, J, T)
            dV = grad_vote(X, s, terms, T, MMA)
            new += contract(acc[k * ACC : (k + 1) * ACC], dV, Z, MMA)
        acc = new
    for k in tl.static_range(4):
        dW = finish(acc[k * ACC : (k + 1) * ACC], lane, MMA)  # (r, q)
        at = dW_ptr + ((tl.program_id(2) * G + g + k) * J + j) * 16 + lane % 2 * 8 + 2 * half
        on = here & (k <= last)
        store_two(at, dW[0], dW[2], on)
        store_two(at + 4, dW[1], dW[3], on)

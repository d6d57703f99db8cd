"""Gradients of poses and weights, as Triton kernels: dM_i = sum_lj dV_ij W_ij^T and dW_gj = sum_nli M_i^T dV_ij.

The gradient of a vote is made where it is used, from what its parent adds to it (README.md beside this file):

    dV_ij = sum_k s_kij (E_kj + C_kj (V_ij - m_j))

with weights s: R_ij in each of the T moments, dz_ij in each of the T - 1 scores. A parent's E, C and m are 4 T - 1
poses, too many to load for one vote: a warp loads two rows of them and uses them for GROUP children of one position,
which share their parents. Gradients of weights are the same with images and types, rows and columns exchanged.

Axes and memory: passes_triton.py; coef: l g b p t n k r, t over E_0, C_0, E_1, ..., -m, types in groups g of 4, images
in blocks b of 8: what a warp loads lies together.
"""

import triton
import triton.language as tl

from vbcaps.routing.mma_triton import contract, finish, four, half_product, load_block, part, two


@triton.jit
def shares(r_ptr, dz_ptr, a, at, slots, J, on, T: tl.constexpr):
    """With what weight a vote enters each term: R_ij in moments t = 0 .. T-1, then dz_ij in scores t = 0 .. T-2."""
    a = tl.where(on, a, 0.0)
    s = (a / J,)
    for t in tl.static_range(T - 1):
        s += (a * tl.load(r_ptr + t * slots + at),)
    for t in tl.static_range(T - 1):
        s += (tl.where(on, tl.load(dz_ptr + t * slots + at), 0.0),)
    return s


@triton.jit
def grad_vote(X, s, terms, T: tl.constexpr, MMA: tl.constexpr):
    """dV_he = sum_k s_k (E_khe + C_khe X_he), X = V - m, h < 2, e < 4."""
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
def at_place(X, y, x, y_at: tl.constexpr, x_at: tl.constexpr, MMA: tl.constexpr):
    """X with y and x added to two of its entries."""
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
    a_ptr, pose_ptr, W_ptr, place_ptr, parents_ptr, seen_ptr, coef_ptr, r_ptr, dz_ptr,
    dpose_ptr,
    N, NS, I, J, S, TYPES, slots,
    GROUP: tl.constexpr, SHARED: tl.constexpr, PLACE: tl.constexpr, T: tl.constexpr, MMA: tl.constexpr,
):  # fmt: skip
    """Rows 2 half, 2 half + 1 of dM for GROUP children of one position; a warp has 8 images and 4 types of parents."""
    groups = tl.cdiv(TYPES, GROUP)
    position, kind = tl.program_id(0) // groups, tl.program_id(0) % groups * GROUP
    half = tl.program_id(2)
    lane = tl.arange(0, 32)
    n = tl.program_id(1) * 8 + lane // 4
    here = (n < N) & (lane % 4 < 2)
    n = tl.minimum(n, N - 1)
    ACC: tl.constexpr = 4 if MMA else 1
    acc = ()
    for k in tl.static_range(GROUP * ACC):
        acc += (tl.zeros((32,) if MMA else (32, 2, 4), tl.float32),)
    c = position * TYPES + kind
    for s in range(tl.load(seen_ptr + c)):
        slot = tl.load(parents_ptr + c * S + s)
        l, i = slot // I, slot % I
        for j0 in range(0, J, 4):
            j = tl.minimum(j0 + lane % 4, J - 1)
            column = tl.minimum(j0 + lane // 8, J - 1)
            block = (l * tl.cdiv(J, 4) + j // 4) * tl.cdiv(N, 8) + n // 8
            coef = coef_ptr + (block * 4 + 2 * half) * (4 * T - 1) * 128 + (n % 8 * 4 + j % 4) * 4
            terms = ()
            for t in tl.static_range(4 * T - 1):
                if MMA:
                    terms += four(coef + t * 128) + four(coef + (4 * T - 1 + t) * 128)
                else:
                    terms += (load_block(coef + t * 128, (4 * T - 1) * 128, 2, 4, 1),)
            new = ()
            for k in tl.static_range(GROUP):
                step = tl.minimum(kind + k, TYPES - 1) - kind
                weight = W_ptr + ((i + step) % SHARED if SHARED else i + step) * J * 16
                pose = pose_ptr + ((c + step) * 4 + 2 * half) * 4 * N + 4 * n
                if MMA:
                    X = tl.load(pose + lane % 4), tl.load(pose + 4 * N + lane % 4)
                    Y = two(weight + column * 16 + lane % 4 * 4 + lane // 4 % 2 * 2)
                    q = four(weight + j * 16 + lane // 4 % 4 * 4)
                    Z = part(q[0], lane), part(q[1], lane), part(q[2], lane), part(q[3], lane)
                else:
                    X, Y = load_block(pose, 4 * N, 2, 4, 1), load_block(weight + j * 16, 4, 4, 4, 1)
                    Z = tl.permute(Y, (0, 2, 1))
                X = half_product(terms[16 * (2 * T - 1) :] if MMA else terms[4 * T - 2], X, Y, MMA)
                if PLACE:
                    y = tl.where(half == 0, tl.load(place_ptr + 2 * (i + step)), 0.0)
                    x = tl.where(half == 0, tl.load(place_ptr + 2 * (i + step) + 1), 0.0)
                    X = at_place(X, y, x, 3, 7, MMA)
                a = tl.load(a_ptr + (c + step) * N + n)
                at = ((slot + step) * J + j) * NS + n
                dV = grad_vote(X, shares(r_ptr, dz_ptr, a, at, slots, J, j0 + lane % 4 < J, T), terms, T, MMA)
                new += contract(acc[k * ACC : (k + 1) * ACC], dV, Z, MMA)
            acc = new
    for k in tl.static_range(GROUP):
        dP = finish(acc[k * ACC : (k + 1) * ACC], lane, MMA)
        on = here & (kind + k < TYPES)
        at = dpose_ptr + ((c + k) * 4 + 2 * half) * 4 * N + 4 * n + lane % 2 * 2
        store_two(at, dP[0], dP[1], on)
        store_two(at + 4 * N, dP[2], dP[3], on)


@triton.jit
def store_two(ptr, a, b, mask):
    tl.store(ptr[:, None] + tl.arange(0, 2)[None, :], tl.join(a, b), mask=mask[:, None])


@triton.jit
def grad_weight_kernel(
    a_ptr, pose_ptr, W_ptr, place_ptr, child_ptr, coef_ptr, r_ptr, dz_ptr,
    dW_ptr,
    N, NS, L, I, J, G, ROUNDS, slots,
    GROUP: tl.constexpr, SHARED: tl.constexpr, PLACE: tl.constexpr, T: tl.constexpr, MMA: tl.constexpr,
):  # fmt: skip
    """Columns 2 half, 2 half + 1 of dW_gj for GROUP rows g; a warp has 8 types of parents and 4 images.

    A program sums ROUNDS blocks of images, positions and slots that share weights; the sum over programs is left to the
    caller.
    """
    half = tl.program_id(1) % 2
    lane = tl.arange(0, 32)
    j = tl.program_id(1) // 2 * 8 + lane // 4
    here = (j < J) & (lane % 4 < 2)
    j = tl.minimum(j, J - 1)
    g = tl.program_id(0) * GROUP
    ACC: tl.constexpr = 4 if MMA else 1
    acc = ()
    for k in tl.static_range(GROUP * ACC):
        acc += (tl.zeros((32,) if MMA else (32, 2, 4), tl.float32),)
    blocks = tl.cdiv(N, 4)
    copies = I // G if SHARED else 1
    end = tl.minimum((tl.program_id(2) + 1) * ROUNDS, L * copies * blocks)
    for round in range(tl.program_id(2) * ROUNDS, end):
        l, copy = round // blocks // copies, round // blocks % copies
        n = round % blocks * 4 + lane % 4
        other = tl.minimum(round % blocks * 4 + lane // 8, N - 1)  # whose column of M a lane deals out
        on = n < N
        n = tl.minimum(n, N - 1)
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
        new = ()
        for k in tl.static_range(GROUP):
            row = tl.minimum(g + k, G - 1)
            i = copy * G + row
            c = tl.load(child_ptr + l * I + i).to(tl.int32)
            weight = W_ptr + (row * J + j) * 16 + 2 * half
            pose = pose_ptr + c * 16 * N
            if MMA:
                X = two(weight + lane % 4 * 4)
                column = pose + lane // 4 % 2 * 8 * N + 4 * other + lane % 4
                Y = tl.load(column), tl.load(column + 4 * N)
                column = pose + 4 * n + lane // 4 % 4
                Z = (
                    part(tl.load(column), lane), part(tl.load(column + 4 * N), lane),
                    part(tl.load(column + 8 * N), lane), part(tl.load(column + 12 * N), lane),
                )  # fmt: skip
            else:
                X, Z = load_block(weight, 1, 2, 4, 4), load_block(pose + 4 * n, 4 * N, 4, 4, 1)
                Y = tl.permute(Z, (0, 2, 1))
            X = half_product(terms[16 * (2 * T - 1) :] if MMA else terms[4 * T - 2], X, Y, MMA)
            if PLACE:
                y = tl.where(half == 1, tl.load(place_ptr + 2 * i), 0.0)
                x = tl.where(half == 1, tl.load(place_ptr + 2 * i + 1), 0.0)
                X = at_place(X, y, x, 4, 5, MMA)
            at = ((l * I + i) * J + j) * NS + n
            s = shares(r_ptr, dz_ptr, tl.load(a_ptr + c * N + n), at, slots, J, on, T)
            dV = grad_vote(X, s, terms, T, MMA)
            new += contract(acc[k * ACC : (k + 1) * ACC], dV, Z, MMA)
        acc = new
    for k in tl.static_range(GROUP):
        dW = finish(acc[k * ACC : (k + 1) * ACC], lane, MMA)  # (r, q)
        at = dW_ptr + ((tl.program_id(2) * G + g + k) * J + j) * 16 + lane % 2 * 8 + 2 * half
        on = here & (g + k < G)
        store_two(at, dW[0], dW[2], on)
        store_two(at + 4, dW[1], dW[3], on)

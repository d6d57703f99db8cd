"""How a warp computes votes and sums their gradients, with or without tensor cores.

A lane has an image n and a parent type j, and holds the vote V_ij = M_i W_ij of one child there: 16 entries, or two
rows of four. A warp has 8 images and 4 types (or 4 and 8). Its votes for one child are a matrix product of 32 rows
(n p) by 16 columns (j r) that sums over only 4 entries (q), which suits the `mma` instructions. They put each lane's
whole vote into its own registers, and take operands that are spread over the lanes, so that a lane loads 6 numbers
instead of 32.

Tensor cores read TF32, which has 11 significant bits. A float32 is the sum of two TF32 numbers to 2^-23, so a product
takes three TF32 products (the fourth is below the rounding): V = (M' + M") W' + M' W".

Without tensor cores (MMA = False: other GPUs, Triton's interpreter) each lane loads all of M_i and W_ij, and keeps
numbers in blocks of two rows. The functions below compute the same in both modes: h is one of two rows, e and q count
entries, the sum is over q.
"""

import triton
import triton.language as tl


def _split(high: str, low: str, x: str) -> str:
    """Return PTX that sets `high` to x rounded to TF32 and `low` to the rest (an mma reads only its upper bits)."""
    return (
        f"add.s32 {high}, {x}, 0x1000; and.b32 {high}, {high}, 0xffffe000; "
        f"sub.f32 {low}, {x}, {high}; add.s32 {low}, {low}, 0x1000;\n"
    )


def _mma(k: int, d: str, a: str, b: str, c: str) -> str:
    return f"mma.sync.aligned.m16n8k{k}.row.col.f32.tf32.tf32.f32 {{{d}}}, {{{a}}}, {{{b}}}, {{{c}}};\n"


def _product_asm() -> str:
    """Return PTX for $0..$7 = $12..$19 plus the lane's entries of X Y; the lane gives $8, $9 of X and $10, $11 of Y."""
    asm = "{\n.reg .b32 x<4>, y<4>; .reg .f32 d<8>;\n"
    for k in range(2):
        asm += _split(f"x{k}", f"x{2 + k}", f"${8 + k}") + _split(f"y{k}", f"y{2 + k}", f"${10 + k}")
    entries = ["d0,d1,d2,d3", "d4,d5,d6,d7"]
    given = ["$12,$13,$14,$15", "$16,$17,$18,$19"]
    asm += "".join(_mma(4, entries[u], "x0,x1", f"y{2 + u}", given[u]) for u in range(2))
    asm += "".join(_mma(8, entries[u], "x0,x1,x2,x3", f"y{u},y{u}", entries[u]) for u in range(2))
    return asm + "".join(f"mov.f32 ${k}, d{k};\n" for k in range(8)) + "}"


def _contract_asm() -> str:
    """Return PTX for $0..$3 = $16..$19 plus the lane's entries of D Z.

    The lane gives $4..$11 of D and $12..$15 of Z (in two parts).
    """
    asm = "{\n.reg .b32 h<8>, l<8>; .reg .f32 d<4>;\n"
    for k in range(8):  # truncating takes half the instructions of rounding, and its error is still 2^-22
        asm += f"mov.b32 h{k}, ${4 + k}; and.b32 l{k}, h{k}, 0xffffe000; sub.f32 l{k}, h{k}, l{k};\n"
    asm += "".join(f"mov.f32 d{k}, ${16 + k};\n" for k in range(4))
    for part in "lh":
        for s in (0, 2):
            a = ",".join(f"{part}{k}" for k in (s, 4 + s, s + 1, 5 + s))
            asm += _mma(8, "d0,d1,d2,d3", a, f"${12 + s},${13 + s}", "d0,d1,d2,d3")
    return asm + "".join(f"mov.f32 ${k}, d{k};\n" for k in range(4)) + "}"


PRODUCT = tl.constexpr(_product_asm())
CONTRACT = tl.constexpr(_contract_asm())


@triton.jit
def two(ptr):
    """Load two adjacent numbers as two tensors, by one 8-byte load."""
    return tl.split(tl.load(ptr[:, None] + tl.arange(0, 2)[None, :]))


@triton.jit
def four(ptr):
    """Load four adjacent numbers as four tensors, by one 16-byte load."""
    x = tl.load(ptr[:, None] + tl.arange(0, 4)[None, :])
    ac, bd = tl.split(tl.reshape(x, (x.shape[0], 2, 2)))
    a, c = tl.split(ac)
    b, d = tl.split(bd)
    return a, b, c, d


@triton.jit
def load_rows(ptr):
    """Load sixteen adjacent numbers, a matrix that is stored row by row, as a tuple."""
    return four(ptr) + four(ptr + 4) + four(ptr + 8) + four(ptr + 12)


@triton.jit
def load_pose(ptr):
    """Load a pose, stored column by column, as a tuple, row by row. Even an inactive lane must point to a pose."""
    X = load_rows(ptr)
    return [X[d] for d in (0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15)]


@triton.jit
def store_four(ptr, X, mask):
    x = tl.reshape(tl.join(tl.join(X[0], X[2]), tl.join(X[1], X[3])), (X[0].shape[0], 4))
    tl.store(ptr[:, None] + tl.arange(0, 4)[None, :], x, mask=mask[:, None])


@triton.jit
def store_rows(ptr, stride, X, mask):
    for p in tl.static_range(4):
        store_four(ptr + p * stride, (X[4 * p], X[4 * p + 1], X[4 * p + 2], X[4 * p + 3]), mask)


@triton.jit
def store_pose(ptr, X, mask):
    """Store a pose as `load_pose` reads it."""
    for r in tl.static_range(4):
        store_four(ptr + 4 * r, (X[r], X[4 + r], X[8 + r], X[12 + r]), mask)


@triton.jit
def load_block(ptr, stride, H: tl.constexpr, W: tl.constexpr, W_STRIDE: tl.constexpr):
    """Load H rows, `stride` apart, of W entries, W_STRIDE apart, as one tensor."""
    rows, columns = tl.arange(0, H)[None, :, None], tl.arange(0, W)[None, None, :]
    return tl.load(ptr[:, None, None] + rows * stride + columns * W_STRIDE)


@triton.jit
def eight(x):
    """Return a block of eight numbers as eight tensors, in order."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], 2, 2, 2)))
    a, c = tl.split(even)
    b, d = tl.split(odd)
    a0, a1 = tl.split(a)
    b0, b1 = tl.split(b)
    c0, c1 = tl.split(c)
    d0, d1 = tl.split(d)
    return a0, b0, c0, d0, a1, b1, c1, d1


@triton.jit
def product_plain(X, Y):
    """Return X Y for each lane, without tensor cores."""
    return tl.sum(X[:, :, :, None] * Y[:, None, :, :], 2)


@triton.jit
def half_product(A, X, Y, MMA: tl.constexpr):
    """Return A_he + sum_q X_hq Y_qe, h < 2, e < 4.

    MMA: X is X_0q, X_1q for the row of lane // 4 and q = lane % 4; Y is Y_qe, Y_q(e+1) for q = lane % 4, the column of
    lane // 8 and e = lane // 4 % 2 * 2.
    """
    if MMA:
        d = tl.inline_asm_elementwise(
            PRODUCT, "=f,=f,=f,=f,=f,=f,=f,=f," + "f," * 11 + "f",
            [X[0], X[1], Y[0], Y[1], A[0], A[2], A[4], A[6], A[1], A[3], A[5], A[7]], (tl.float32,) * 8, True, 1,
        )  # fmt: skip
        return d[0], d[4], d[1], d[5], d[2], d[6], d[3], d[7]  # both rows of e = 0, 2, then of e = 1, 3
    else:
        return A + product_plain(X, Y)


@triton.jit
def contract(acc, D, Z, MMA: tl.constexpr):
    """Return acc_hq + sum_e D_he Z_eq, where D comes from `half_product`; MMA also sums over lane % 4.

    MMA: Z is Z_eq, e < 4, of lane % 4, with q = lane // 4 % 4, split in two (`tf32_part`); acc is four tensors, which
    `finish` puts in order.
    """
    if MMA:
        return tl.inline_asm_elementwise(
            CONTRACT, "=f,=f,=f,=f," + "f," * 15 + "f",
            [D[0], D[1], D[2], D[3], D[4], D[5], D[6], D[7], Z[0], Z[1], Z[2], Z[3], acc[0], acc[1], acc[2], acc[3]],
            (tl.float32,) * 4, True, 1,
        )  # fmt: skip
    else:
        return (acc[0] + product_plain(D, Z),)


@triton.jit
def tf32_part(x, lane):
    """Return the TF32 nearest to x in the lower half of a warp, and the remainder of x in the upper half."""
    high = ((x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return tl.where(lane < 16, high, x - high)


@triton.jit
def finish(acc, lane, MMA: tl.constexpr):
    """Finish the sum of `contract` over lanes: return (0, q), (0, q+1), (1, q), (1, q+1), q = lane % 2 * 2."""
    IMAGES: tl.constexpr = acc[0].shape[0] // 4
    if MMA:
        out = ()
        for k in tl.static_range(4):
            s = tl.sum(tl.reshape(acc[k], (IMAGES, 2, 2)), 1, keep_dims=True)
            out += (tl.reshape(tl.broadcast_to(s, (IMAGES, 2, 2)), (4 * IMAGES,)),)
        return out
    else:
        s = tl.sum(tl.reshape(acc[0], (IMAGES, 4, 8)), 1, keep_dims=True)
        s = eight(tl.reshape(tl.broadcast_to(s, (IMAGES, 4, 8)), (4 * IMAGES, 8)))
        left = lane % 2 == 0
        return (
            tl.where(left, s[0], s[2]),
            tl.where(left, s[1], s[3]),
            tl.where(left, s[4], s[6]),
            tl.where(left, s[5], s[7]),
        )

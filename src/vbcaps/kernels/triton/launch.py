"""The Triton backend: the launches of the kernels and their memory layout."""

import functools
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
import triton
from torch import Tensor, nn

from vbcaps.kernels.backend import (
    EMResultGrads,
    MomentGrads,
    Moments,
    Normaliser,
    NormedCapsules,
    PriorTensors,
    Running,
    ScoreSums,
    VBResult,
    VBResultGrads,
    VBRule,
    Votes,
)
from vbcaps.kernels.norm import normalise, plain_batch_norm, plain_parents, plain_primary
from vbcaps.kernels.triton import triton_interprets
from vbcaps.kernels.triton.em import em_grad_parent_kernel, em_parent_kernel
from vbcaps.kernels.triton.gradients import (
    grad_a_kernel,
    grad_pose_kernel,
    grad_R_kernel,
    grad_weight_kernel,
    grad_z_kernel,
)
from vbcaps.kernels.triton.norm import batch_norm, keep_statistics
from vbcaps.kernels.triton.passes import means_kernel, scores_kernel, softmax_kernel, spreads_kernel
from vbcaps.kernels.triton.vb import grad_parent_kernel, parent_kernel
from vbcaps.routing.fields import Fields
from vbcaps.routing.vb import ACTIVATIONS

LANES = 32  # lanes per program in the kernels that have one lane per parent and image
ROOM = 4  # number of four-warp programs, with up to 128 registers, that a multiprocessor holds at once


def fours(I: int, types: int) -> int:
    """Return the number of slot quads in a field of I slots: a quad holds four types at one position."""
    return I // types * triton.cdiv(types, 4)


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of the GPU; 1 in Triton's interpreter, which keeps tests short."""
    return 1 if triton_interprets() else torch.cuda.get_device_properties(device).multi_processor_count


def best_chunk(programs: int, U: int, most: int, cost: int, device: torch.device) -> int:
    """Return how many of a field's U quads each program should take, so that the launch takes least time.

    A launch has `programs` programs if each takes a whole field, and a field may be split into up to `most` parts. The
    fixed cost of a program is that of `cost` quads. Programs run in waves that fill the GPU.
    """
    room = ROOM * multiprocessors(device)
    chunks = {triton.cdiv(U, parts) for parts in range(1, min(most, U) + 1)}
    return min(sorted(chunks), key=lambda c: triton.cdiv(programs * triton.cdiv(U, c), room) * (c + cost))


def lay_capsules(x: Tensor) -> Tensor:
    """Return activations ``n h w c`` or poses ``n h w c p q`` in the memory order that the passes read."""
    if x.ndim == 4:
        return x.permute(1, 2, 3, 0).contiguous().permute(3, 0, 1, 2)
    return x.permute(1, 2, 3, 0, 5, 4).contiguous().permute(3, 0, 1, 2, 5, 4)


def by_type(norm: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a BatchNorm over axis 1 to each type of ``n l j p q``, in the memory order l j n q p."""
    x = x.permute(1, 2, 0, 4, 3)
    return norm(x.flatten(2)).reshape(x.shape).permute(2, 0, 1, 4, 3)


class Triton:
    """The Triton kernels, see ``Backend``. Poses are stored column by column, ``n r p``.

    Slots are stored in quads of child types and groups of four parent types, ``l u g n k 4`` (passes.py).
    """

    name = "triton"
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)

    def refusal(self, a: Tensor, W: Tensor, fields: Fields, iters: int) -> str | None:
        if not (a.is_cuda or triton_interprets()):
            return f"needs a CUDA device, got {a.device}"
        most = self.most_images(W, fields, iters)
        if len(a) > most:
            return f"addresses at most {most} images in this layer, got {len(a)}: its offsets are 32 bits"
        return None

    def most_images(self, W: Tensor, fields: Fields, iters: int) -> int:
        """Return the largest batch that the kernels can take: their offsets into a buffer have 32 bits.

        Fields, and blocks of eight images, are also axes of a grid, which CUDA limits to 65535 programs.
        """
        (L, I), C, J = fields.child.shape, len(fields.seen), W.shape[1]
        if max(W.numel(), fields.parents.numel()) >= 2**31 or L >= 2**16:
            return 0
        slots = fours(I, fields.types) * 4
        responsibilities = max(iters - 1, 1) * L * slots * -(-J // 4) * 4  # r or dz: one buffer for all iterations
        terms = L * -(-J // 4) * 4 * 16 * (4 * iters - 1)  # the terms that parents add to dV, see new_terms
        most = min((2**31 - 1) // max(responsibilities, terms, C * 16), 8 * ((2**16 - 1) // -(-J // 16)))
        return max(0, most // 8 * 8)  # terms are stored in whole blocks of eight images

    # --- around the routing -----------------------------------------------------------------------------------------

    def convolve(self, conv: nn.Conv2d, x: Tensor) -> Tensor:
        return conv(x)

    def primary(self, x: Tensor, types: int, norm_a: Normaliser, norm_pose: Normaliser | None) -> NormedCapsules:
        return plain_primary(x, types, norm_a, norm_pose, lay_capsules)

    def parents(
        self, logit: Tensor, m: Tensor, norm_a: Normaliser | None, norm_pose: Normaliser | None
    ) -> NormedCapsules:
        return plain_parents(logit, m, norm_a, norm_pose, by_type)

    def batch_norm(
        self, x: Tensor, running: Running, momentum: float, eps: float, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        if running.mean.dtype != torch.float32:
            return plain_batch_norm(x, running, momentum, eps, weight, bias)
        if (
            x.ndim == 3 and x.dtype == torch.float32 and weight is None and x.numel() < 2**31
        ):  # of capsules: few types, many values of each
            y, _, mean, var = batch_norm(x.contiguous(), eps)
        else:
            y, mean, var = normalise(x, running, eps, weight, bias)
        keep_statistics(mean.detach(), var.detach(), *running, momentum)
        return y

    # --- memory -----------------------------------------------------------------------------------------------------

    def lay_poses(self, pose: Tensor) -> Tensor:
        return pose.permute(1, 0, 3, 2).contiguous()

    def new_poses(self, like: Tensor, *shape: int) -> Tensor:
        return like.new_empty(*shape, 4, 4)

    def as_poses(self, x: Tensor) -> Tensor:
        return x.mT

    def new_slots(self, v: Votes, T: int) -> Tensor:
        _, N, L, I, J = v.sizes
        return v.a.new_empty(T, L, fours(I, v.types), -(-J // 4), N, 4, 4)

    def as_slots(self, x: Tensor, v: Votes) -> Tensor:
        _, N, L, I, J = v.sizes
        x = x.permute(3, 0, 1, 5, 2, 4).reshape(N, L, I // v.types, -(-v.types // 4) * 4, -(-J // 4) * 4)
        return x[:, :, :, : v.types, :J].reshape(N, L, I, J)

    def new_terms(self, v: Votes, iters: int) -> Tensor:
        """Allocate ``l g b p t n k r``: row by row, types in groups g of four, images in blocks b of eight."""
        _, N, L, _, J = v.sizes
        return v.a.new_empty(L, triton.cdiv(J, 4), triton.cdiv(N, 8), 4, 4 * iters - 1, 8, 4, 4)

    def parts(self, v: Votes) -> int:
        _, N, L, I, J = v.sizes
        U, (programs, _) = fours(I, v.types), _programs(N, L, J)
        return triton.cdiv(U, best_chunk(programs, U, 8, 4, v.a.device))

    # --- passes over votes ------------------------------------------------------------------------------------------

    def prepared(self, v: Votes) -> AbstractContextManager[None]:
        return nullcontext()

    def moments(self, v: Votes, r: Tensor | None, k0: Tensor, m0: Tensor, rj: Tensor, m: Tensor, S: Tensor) -> None:
        grid, sizes, options = _fields(v, len(S))
        sum_R, sum_RV = rj.new_empty(len(S), *rj.shape), torch.empty_like(S)
        votes = (v.a, v.pose, v.W, v.coordinates, v.child)
        means_kernel[grid](*votes, r, sum_R, sum_RV, *sizes, FIRST=r is None, **options)
        spreads_kernel[grid](
            *votes, r, k0, m0, sum_R, sum_RV, rj, m, S, *sizes,
            len(S), k0.ndim, 16 * (m0.ndim - 1), FIRST=r is None, **options,
        )  # fmt: skip

    def scores(self, v: Votes, m: Tensor, lam: Tensor, K: Tensor, r: Tensor) -> None:
        grid, sizes, options = _fields(v)
        scores_kernel[grid](v.pose, v.W, v.coordinates, v.child, m, lam, K, r, *sizes, **options)
        children, sizes, options = _children(v)
        softmax_kernel[children](r, v.parents, v.seen, *sizes, **options)

    def agreements(self, v: Votes, w: Tensor, r: Tensor) -> None:
        """Compute sum_d w_jd V_ijd as the gradient of R_ij where w is the gradient of sum R V."""
        grid, sizes, options = _fields(v)
        nothing, none = torch.zeros_like(w), w.new_zeros(w.shape[:-2])
        votes = (v.pose, v.W, v.coordinates, v.child)
        grad_R_kernel[grid](*votes, nothing, w, nothing, none, r, *sizes, maxnreg=128, **options)
        children, sizes, options = _children(v)
        softmax_kernel[children](r, v.parents, v.seen, *sizes, **options)

    def grad_responsibilities(
        self, v: Votes, m: Tensor, g: MomentGrads, r: Tensor | None, dR: Tensor, s: Tensor, da: Tensor, add: bool
    ) -> None:
        grid, sizes, options = _fields(v)
        grad_R_kernel[grid](v.pose, v.W, v.coordinates, v.child, m, *g, dR, *sizes, maxnreg=128, **options)
        children, sizes, options = _children(v)
        grad_a_kernel[children](dR, r, v.parents, v.seen, s, da, *sizes, FIRST=r is None, ADD=add, **options)

    def grad_scores(self, v: Votes, m: Tensor, r: Tensor, s: Tensor, dR: Tensor, U: ScoreSums) -> None:
        grid, sizes, options = _fields(v, len(U.U0))
        votes = (v.a, v.pose, v.W, v.coordinates, v.child)
        grad_z_kernel[grid](*votes, m, r, s, dR, *U, *sizes, maxnreg=128, **options)

    def put_term(self, terms: Tensor, k: int, x: Tensor, iters: int) -> None:
        L, groups, blocks = terms.shape[:3]
        J, N = x.shape[1:3]
        x = F.pad(x, (0, 0, 0, 0, 0, 8 * blocks - N, 0, 4 * groups - J))
        terms[:, :, :, :, k].copy_(x.view(L, groups, 4, blocks, 8, 4, 4).permute(0, 1, 3, 6, 4, 2, 5))

    def grad_votes(
        self,
        v: Votes,
        terms: Tensor,
        r: Tensor,
        dz: Tensor,
        iters: int,
        uniform: tuple[Tensor, MomentGrads] | None,
        da: Tensor,
    ) -> tuple[Tensor, Tensor]:
        C, N, L, I, J = v.sizes
        room = self.new_slots(v, 1)[0]
        if uniform is not None:
            self.grad_responsibilities(v, *uniform, None, room, torch.empty_like(da), da, add=True)
        G, slots = len(v.W), room.numel()
        dpose = torch.empty_like(v.pose)
        warps = math.gcd(4, fours(v.types, v.types))
        options = dict(T=iters, WARPS=warps, num_warps=warps, **_weights(v))
        grad_pose_kernel[(fours(C, v.types) // warps, triton.cdiv(N, 8), 2)](
            v.a, v.pose, v.W, v.coordinates, v.parents, v.seen, terms, r, dz, dpose,
            N, I, v.parents.shape[1], slots, **options,
        )  # fmt: skip
        grid = fours(G, v.types) // warps, 2 * triton.cdiv(J, 8)
        work = L * (I // G) * triton.cdiv(N, 4)
        rounds = triton.cdiv(work, triton.cdiv(62 * multiprocessors(v.a.device), grid[0] * grid[1] * warps))
        pieces = triton.cdiv(work, rounds)
        dW = v.W.new_empty(pieces, *v.W.shape)
        grad_weight_kernel[(*grid, pieces)](
            v.a, v.pose, v.W, v.coordinates, v.child, terms, r, dz, dW,
            N, L, I, G, rounds, slots, maxnreg=168, **options,
        )  # fmt: skip
        return dpose, dW.sum(0) if pieces > 1 else dW[0]

    # --- VB at a parent ---------------------------------------------------------------------------------------------

    def vb_update(
        self, moments: Moments, spread: Tensor, prior: PriorTensors, rule: VBRule, lam: Tensor, K: Tensor
    ) -> None:
        L, J, N = moments.rj.shape
        priors, strides = _prior(prior)
        parent_kernel[_grid(L, J, N)](
            moments.rj, spread, None, *priors, None, None, moments.S, lam, K, *[None] * 7, L * J * N, len(spread), N, J,
            *strides, rule.temper, LAST=False, WISHART=rule.wishart, RULE=0, **_lanes(J),
        )  # fmt: skip

    def vb_logit(
        self, moments: Moments, spread: Tensor, prior: PriorTensors, rule: VBRule, beta_a: Tensor, beta_u: Tensor,
        result: VBResult,
    ) -> None:  # fmt: skip
        L, J, N = moments.rj.shape
        priors, strides = _prior(prior)
        parent_kernel[_grid(L, J, N)](
            moments.rj, spread, moments.m, *priors, beta_a, beta_u, moments.S, None, None, *result,
            L * J * N, len(spread), N, J, *strides, rule.temper, LAST=True, **_rule(rule), **_lanes(J),
        )  # fmt: skip

    def vb_grad(
        self, moments: Moments, last_m: Tensor, prior: PriorTensors, rule: VBRule, beta_u: Tensor,
        result: VBResultGrads | None, U: ScoreSums, g: MomentGrads, terms: Tensor, t: int, iters: int,
        gamma: Tensor | None,
    ) -> None:  # fmt: skip
        L, J, N = moments.rj.shape
        priors, strides = _prior(prior)
        last = result or (None,) * 8
        has = {f"HAS_{k}": x is not None for k, x in zip(("M", "ALPHA", "KAPPA", "PSI", "NU"), last[1:6], strict=True)}
        grad_parent_kernel[_grid(L, J, N)](
            moments.rj, moments.S, moments.m, last_m, *priors, beta_u, *last, *U, *g, *_terms(terms, t, iters),
            *((None, None, None) if gamma is None else gamma), L * J * N, len(U.U0), N, J, terms.stride(3), *strides,
            rule.temper, LAST=result is not None, PRIOR=gamma is not None, **_rule(rule), **_lanes(J), **has,
        )  # fmt: skip

    # --- EM at a parent ---------------------------------------------------------------------------------------------

    def em_update(
        self, moments: Moments, spread: Tensor, beta_a: Tensor, beta_u: Tensor, inverse_temperature: float,
        min_var: float, lam: Tensor, K: Tensor,
    ) -> None:  # fmt: skip
        L, J, N = moments.rj.shape
        em_parent_kernel[_grid(L, J, N)](
            moments.rj, spread, beta_a, beta_u, moments.S, lam, K, None, None,
            L * J * N, len(spread), N, J, inverse_temperature, min_var, LAST=False, LANES=LANES, num_warps=1,
        )  # fmt: skip

    def em_logit(
        self, moments: Moments, spread: Tensor, beta_a: Tensor, beta_u: Tensor, inverse_temperature: float,
        min_var: float, logit: Tensor, var: Tensor,
    ) -> None:  # fmt: skip
        L, J, N = moments.rj.shape
        em_parent_kernel[_grid(L, J, N)](
            moments.rj, spread, beta_a, beta_u, moments.S, None, None, logit, var,
            L * J * N, len(spread), N, J, inverse_temperature, min_var, LAST=True, LANES=LANES, num_warps=1,
        )  # fmt: skip

    def em_grad(
        self, moments: Moments, last_m: Tensor, beta_a: Tensor, beta_u: Tensor, inverse_temperature: float,
        min_var: float, result: EMResultGrads | None, U: ScoreSums, g: MomentGrads, terms: Tensor, t: int, iters: int,
        glogit: Tensor,
    ) -> None:  # fmt: skip
        L, J, N = moments.rj.shape
        last = result or (None,) * 3
        em_grad_parent_kernel[_grid(L, J, N)](
            moments.rj, moments.S, moments.m, last_m, beta_a, beta_u, *last, *U, *g, *_terms(terms, t, iters),
            glogit, L * J * N, len(U.U0), N, J, terms.stride(3), inverse_temperature, min_var,
            LAST=result is not None, HAS_M=last[1] is not None, HAS_VAR=last[2] is not None, LANES=LANES, num_warps=1,
        )  # fmt: skip


# --- grids and constants ---------------------------------------------------------------------------------------------


def _programs(N: int, L: int, J: int) -> tuple[int, int]:
    """Return the number of programs, each for a field, 8 images and up to 16 types, and their number of warps."""
    groups = triton.cdiv(J, 4)
    warps = min(4, triton.next_power_of_2(groups))
    return L * triton.cdiv(N, 8) * triton.cdiv(groups, warps), warps


def _fields(v: Votes, parts: int | None = None) -> tuple[tuple[int, int, int], tuple[int, ...], dict[str, int | bool]]:
    """Return grid, sizes and options of a kernel whose programs each take a part of a field's quads.

    Without `parts`, for kernels that sum nothing over quads, the number of parts is the fastest.
    """
    _, N, L, I, J = v.sizes
    U, (programs, warps) = fours(I, v.types), _programs(N, L, J)
    chunk = triton.cdiv(U, parts) if parts else best_chunk(programs, U, U, 2, v.a.device)
    grid = triton.cdiv(U, chunk), L, programs // L
    return grid, (N, I, U, chunk), dict(WARPS=warps, num_warps=warps, **_weights(v))


def _children(v: Votes) -> tuple[tuple[int, int], tuple[int, ...], dict[str, int]]:
    """Return grid, sizes and options of a kernel with one warp for four children of a position and 8 images."""
    C, N, _, _, J = v.sizes
    return (fours(C, v.types), triton.cdiv(N, 8)), (N, v.parents.shape[1]), dict(J=J, TYPES=v.types, num_warps=1)


def _weights(v: Votes) -> dict[str, int | bool]:
    """Return the options of the votes. SHARED: the rows of weights that positions share, 0 if each slot has its own."""
    G, J = v.W.shape[:2]
    shared = 0 if v.child.shape[1] == G else G
    return dict(J=J, TYPES=v.types, SHARED=shared, COORDS=v.coordinates is not None, MMA=_has_tensor_cores(v.a.device))


@functools.cache
def _has_tensor_cores(device: torch.device) -> bool:
    """Return whether the device has `mma` for TF32: NVIDIA since Ampere, but not Triton's interpreter."""
    return not triton_interprets() and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)


def _grid(L: int, J: int, N: int) -> tuple[int]:
    """Return a grid with one program of one warp for every LANES parents and images."""
    return (triton.cdiv(L * J * N, LANES),)


def _lanes(J: int) -> dict[str, int]:
    return dict(TYPES=triton.next_power_of_2(J), LANES=LANES, num_warps=1)


def _prior(prior: PriorTensors) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """Return the prior's tensors, and the strides from one type to the next: 0 where all types share it."""
    numbers = prior.alpha0, prior.kappa0, prior.nu0
    strides = *(x.ndim for x in numbers), 16 * (prior.inv_psi0.ndim - 1), 16 * (prior.m0.ndim - 1)
    return (prior.m0, *numbers, prior.inv_psi0), strides


def _rule(rule: VBRule) -> dict[str, int | bool]:
    return dict(WISHART=rule.wishart, RULE=ACTIVATIONS.index(rule.activation))


def _terms(terms: Tensor, t: int, iters: int) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return views of the terms from those of moments t, from those of scores t (None at the last t), and of -m."""
    of_scores = None if t == iters - 1 else terms[:, :, :, :, 2 * (iters + t) :]
    return terms[:, :, :, :, 2 * t :], of_scores, terms[:, :, :, :, -1:]

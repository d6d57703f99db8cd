"""Dynamic routing, fused: the fast twin of dynamic.py.

`dynamic_routing_fused` takes children, poses and weights instead of votes, and gives what `dynamic_routing` gives for
the votes they make. It strings together the same passes over votes as vb_fused.py. Scores are linear in a vote here:
b_ij after some iterations is sum_d w_jd V_ijd, w_j the sum of the parent's poses so far, and that is a pass which VB
and EM have in their backward. What happens at a parent is little, and plain PyTorch.

In memory poses lie as each device wants them; `as_poses` shows them as l j n p r.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from vbcaps.kernels.passes import (
    Votes,
    as_poses,
    check_fusable,
    images_first,
    new_poses,
    new_slots,
    on_its_device,
    op_inputs,
    passes_for,
    poses_first,
    refuse_twice,
    responsibilities,
)
from vbcaps.routing.dynamic import Agreement, squash
from vbcaps.routing.fields import Fields, check_iters

TINY = torch.finfo(torch.float32).tiny ** 0.5


@torch.library.custom_op("vbcaps::dynamic_route", mutates_args=())
@on_its_device
def dynamic_route(
    a: Tensor, pose: Tensor, W: Tensor, place: Tensor | None, child: Tensor, parents: Tensor, seen: Tensor,
    types: int, iters: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """logit, m, r; and for the backward pass the sums of votes s of every iteration, and w."""
    v = Votes(a, pose, W, place, child, parents, seen, types)
    out = dynamic_route_shapes(a, pose, W, place, child, parents, seen, types, iters)
    logit, m, r, s, w = out
    run, (_, N, L, I, J) = passes_for(a), v.sizes
    parts = run.parts(a, L, I, J, types)
    k0, m0, rj = a.new_zeros(()), a.new_zeros(16), torch.empty_like(logit)
    mean, spread = new_poses(a, L, J, N), new_poses(a, parts, L, J, N)
    for t in range(iters):
        run.moments(v, r[t - 1] if t else None, k0, m0, rj, mean, spread)
        s_t = torch.mul(rj[..., None, None], as_poses(mean), out=as_poses(s[t]))
        length2 = s_t.square().sum((3, 4))
        v_t = squash(s_t, length2[..., None, None], TINY)
        if t < iters - 1:
            as_poses(w[t]).copy_(v_t if t == 0 else v_t + as_poses(w[t - 1]))
            run.agreements(v, w[t], r[t])
        else:
            as_poses(m).copy_(v_t)
            torch.log(length2 + TINY, out=logit)
    return out


@dynamic_route.register_fake
def dynamic_route_shapes(
    a: Tensor, pose: Tensor, W: Tensor, place: Tensor | None, child: Tensor, parents: Tensor, seen: Tensor,
    types: int, iters: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    (L, I), N, J = child.shape, a.shape[1], W.shape[1]
    vector = functools.partial(new_poses, a)
    r = new_slots(a, iters - 1, (L, I), J, N, types)
    return a.new_empty(L, J, N), vector(L, J, N), r, vector(iters, L, J, N), vector(iters - 1, L, J, N)


@torch.library.custom_op("vbcaps::dynamic_route_backward", mutates_args=())
@on_its_device
def dynamic_route_backward(
    dlogit: Tensor, dm: Tensor | None, a: Tensor, pose: Tensor, W: Tensor, place: Tensor | None, child: Tensor,
    parents: Tensor, seen: Tensor, r: Tensor, s: Tensor, w: Tensor, types: int, iters: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of a, pose, W. Of a vote it is R_ij ds_j for every sum and dz_ij w_j for every score."""
    v = Votes(a, pose, W, place, child, parents, seen, types)
    C, N, L, I, J = v.sizes
    T = iters
    run = passes_for(a)
    da, sums, ds = a.new_empty(C, N), a.new_empty(C, N), new_poses(a, L, J, N)
    dR = new_slots(a, T, (L, I), J, N, types)  # dR[t - 1] becomes dz[t - 1]; dR[T - 1] is that of t = 0
    parts = run.parts(a, L, I, J, types)
    U0, U1, U2 = a.new_empty(parts, L, J, N), new_poses(a, parts, L, J, N), new_poses(a, parts, L, J, N)
    coef = run.new_terms(v, T).zero_()  # votes enter without a center, and not as squares
    none, nothing = torch.zeros_like(dlogit), torch.zeros_like(ds)
    dv = torch.zeros_like(as_poses(ds)) if dm is None else as_poses(dm)
    for t in range(T - 1, -1, -1):
        as_poses(ds).copy_(grad_squash(as_poses(s[t]), dv, dlogit if t == T - 1 else None))
        run.put_term(coef, 2 * t, ds, T)
        r_t = r[t - 1] if t else None
        run.grad_responsibilities(v, nothing, ds, nothing, none, r_t, dR[t - 1], sums, da, add=t < T - 1)
        if t:
            run.grad_scores(v, nothing, r_t, sums, dR[t - 1], U0, U1, U2)
            run.put_term(coef, 2 * (T + t - 1), w[t - 1], T)
            dw = as_poses(U1).sum(0)
            dv = dw if t == T - 1 else dv + dw  # a pose is part of every score after it
    dpose, dW = run.grad_votes(v, coef, r, dR, T)
    return da, dpose, dW


def grad_squash(s: Tensor, dv: Tensor, dlogit: Tensor | None) -> Tensor:  # l j n p r
    """The gradient of s in v = f(|s|^2) s, f(x) = sqrt(x + tiny) / (1 + x), and in the logit ln(|s|^2 + tiny)."""
    x = s.square().sum((3, 4), keepdim=True)
    root, whole = (x + TINY).sqrt(), 1 + x
    df = (0.5 / root - root / whole) / whole
    along = 2 * df * (s * dv).sum((3, 4), keepdim=True)
    if dlogit is not None:
        along = along + 2 * dlogit[..., None, None] / (x + TINY)
    return root / whole * dv + along * s


@dynamic_route_backward.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    return tuple(map(torch.empty_like, args[2:5]))


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, ctx.types, ctx.iters = inputs
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, *output[2:])


def _backward(ctx: Any, dlogit: Tensor | None, dm: Tensor | None, *others: None) -> tuple[Tensor | None, ...]:
    a, _, W, _, child, *_ = ctx.saved_tensors
    dlogit = a.new_zeros(len(child), W.shape[1], a.shape[1]) if dlogit is None else dlogit.contiguous()
    dm = None if dm is None else dm.contiguous()
    gradients = dynamic_route_backward(dlogit, dm, *ctx.saved_tensors, ctx.types, ctx.iters)
    return *gradients, None, None, None, None, None, None


dynamic_route.register_autograd(_backward, setup_context=_save)
dynamic_route_backward.register_autograd(refuse_twice)


def dynamic_routing_fused(
    a: Tensor,
    pose: Tensor,
    W: Tensor,
    fields: Fields,
    *,
    place: Tensor | None = None,
    iters: int = 3,
    posterior: bool = True,
) -> tuple[Tensor, Tensor, Agreement | None]:
    """``dynamic_routing`` of the votes that ``a: n c``, ``pose: n c p q``, ``W: g j q r`` and ``place: i 2`` make.

    And between its results the poses as ``n l j p r``. The coefficients in the posterior have no gradient, and
    say so where one is asked for.
    """
    check_iters(iters)
    check_fusable(a, pose, W)
    logit, m, r, *_ = dynamic_route(*op_inputs(a, pose, W, place, fields), fields.types, iters)
    poses = poses_first(m)
    if not posterior:
        return images_first(logit), poses, None
    r = responsibilities(r, fields, W.shape[1], len(a))
    return images_first(logit), poses, Agreement(poses.flatten(3), r)

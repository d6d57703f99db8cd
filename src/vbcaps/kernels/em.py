"""EM routing, fused: the fast twin of em.py.

`em_routing_fused` takes children, poses and weights instead of votes, and gives what `em_routing` gives for the votes
they make. It strings together the same passes over votes as vb_fused.py, without a prior; what happens at each parent
between them is EM's.
"""

import functools
from typing import Any

import torch
from torch import Tensor

from vbcaps.kernels.passes import (
    Votes,
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
from vbcaps.routing.em import Mixture, check_constants
from vbcaps.routing.fields import Fields, check_iters

D = 16


@torch.library.custom_op("vbcaps::em_route", mutates_args=())
@on_its_device
def em_route(
    a: Tensor, pose: Tensor, W: Tensor, place: Tensor | None, child: Tensor, parents: Tensor, seen: Tensor,
    beta_a: Tensor, beta_u: Tensor, types: int, iters: int, temperature: float, growth: float, min_var: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """logit, m, var, r; and for the backward pass the moments of every iteration."""
    v = Votes(a, pose, W, place, child, parents, seen, types)
    out = em_route_shapes(a, pose, W, place, child, parents, seen, beta_a, beta_u, types, iters, temperature, growth,
                          min_var)  # fmt: skip
    logit, m, var, r, rj, early_m, S = out
    lam, K = torch.empty_like(m), torch.empty_like(logit)
    k0, m0 = a.new_zeros(()), a.new_zeros(D)
    run, (_, N, L, I, J) = passes_for(a), v.sizes
    parts = run.parts(a, L, I, J, types)
    for t in range(iters):
        last = t == iters - 1
        m_t = m if last else early_m[t]
        spread = S[t : t + 1] if parts == 1 else new_poses(a, parts, L, J, N)
        run.moments(v, r[t - 1] if t else None, k0, m0, rj[t], m_t, spread)
        inverse_temperature = temperature * (1 - growth ** (t + 1))
        if last:
            run.em_logit(rj[t], spread, beta_a, beta_u, S[t], logit, var, inverse_temperature, min_var)
        else:
            run.em_parent(rj[t], spread, beta_a, beta_u, S[t], lam, K, inverse_temperature, min_var)
            run.scores(v, m_t, lam, K, r[t])
    return out


@em_route.register_fake
def em_route_shapes(
    a: Tensor, pose: Tensor, W: Tensor, place: Tensor | None, child: Tensor, parents: Tensor, seen: Tensor,
    beta_a: Tensor, beta_u: Tensor, types: int, iters: int, temperature: float, growth: float, min_var: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    (L, I), N, J = child.shape, a.shape[1], W.shape[1]
    scalar, new, vector = (L, J, N), a.new_empty, functools.partial(new_poses, a)
    r = new_slots(a, iters - 1, (L, I), J, N, types)
    return (
        new(scalar), vector(*scalar), vector(*scalar), r,
        new(iters, *scalar), vector(iters - 1, *scalar), vector(iters, *scalar),
    )  # fmt: skip


@torch.library.custom_op("vbcaps::em_route_backward", mutates_args=())
@on_its_device
def em_route_backward(
    dlogit: Tensor, dm: Tensor | None, dvar: Tensor | None, a: Tensor, pose: Tensor, W: Tensor, place: Tensor | None,
    child: Tensor, parents: Tensor, seen: Tensor, beta_a: Tensor, beta_u: Tensor, m: Tensor, r: Tensor, rj: Tensor,
    early_m: Tensor, S: Tensor, types: int, iters: int, temperature: float, growth: float, min_var: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of a, pose, W, beta_a, beta_u."""
    v = Votes(a, pose, W, place, child, parents, seen, types)
    C, N, L, I, J = v.sizes
    T = iters
    run = passes_for(a)
    scalar, new, vector = (L, J, N), a.new_empty, functools.partial(new_poses, a)
    da, s = new(C, N), new(C, N)
    dR = new_slots(a, T, (L, I), J, N, types)  # dR[t - 1] becomes dz[t - 1]; dR[T - 1] is that of t = 0
    gb, gS, gr = vector(*scalar), vector(*scalar), new(scalar)
    glogit = new(T, *scalar)  # of beta_a - cost_j, in every iteration: activations take part in routing
    parts = run.parts(a, L, I, J, types)
    U0, U1, U2 = new(parts, *scalar), vector(parts, *scalar), vector(parts, *scalar)
    coef = run.new_terms(v, T)

    def parent(t: int) -> None:
        last = t == T - 1
        run.em_grad_parent(
            rj[t], S[t], m if last else early_m[t], m, beta_a, beta_u, (dlogit, dm, dvar) if last else None,
            (U0, U1, U2), gb, gS, gr, *run.terms(coef, t, T), glogit[t],
            temperature * (1 - growth ** (t + 1)), min_var,
        )  # fmt: skip

    parent(T - 1)
    for t in range(T - 1, -1, -1):
        r_t = r[t - 1] if t else None
        m_t = m if t == T - 1 else early_m[t]
        run.grad_responsibilities(v, m_t, gb, gS, gr, r_t, dR[t - 1], s, da, add=t < T - 1)
        if t:
            run.grad_scores(v, early_m[t - 1], r_t, s, dR[t - 1], U0, U1, U2)
            parent(t - 1)
    dpose, dW = run.grad_votes(v, coef, r, dR, T)
    return da, dpose, dW, glogit.sum((0, 1, 3)), -D * (glogit * rj).sum((0, 1, 3))


@em_route_backward.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    a, pose, W = args[3:6]
    beta_a, beta_u = args[10:12]
    return tuple(map(torch.empty_like, (a, pose, W, beta_a, beta_u)))


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, ctx.types, ctx.iters, ctx.temperature, ctx.growth, ctx.min_var = inputs
    _, m, _, *moments = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, m, *moments)


def _backward(ctx: Any, dlogit: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    rj = ctx.saved_tensors[-3]
    dlogit = torch.zeros_like(rj[0]) if dlogit is None else dlogit.contiguous()
    dm, dvar = (None if g is None else g.contiguous() for g in grads[:2])
    da, dpose, dW, dbeta_a, dbeta_u = em_route_backward(
        dlogit, dm, dvar, *ctx.saved_tensors, ctx.types, ctx.iters, ctx.temperature, ctx.growth, ctx.min_var
    )
    return da, dpose, dW, None, None, None, None, dbeta_a, dbeta_u, None, None, None, None, None


em_route.register_autograd(_backward, setup_context=_save)
em_route_backward.register_autograd(refuse_twice)


def em_routing_fused(
    a: Tensor,
    pose: Tensor,
    W: Tensor,
    fields: Fields,
    *,
    place: Tensor | None = None,
    iters: int = 3,
    beta_a: Tensor,
    beta_u: Tensor,
    temperature: float,
    growth: float,
    min_var: float,
    posterior: bool = True,
) -> tuple[Tensor, Tensor, Mixture | None]:
    """``em_routing`` of the votes that ``a: n c``, ``pose: n c p q``, ``W: g j q r`` and ``place: i 2`` make.

    And between its results the means as ``n l j p r``; ``posterior=False`` saves the copies of the mixture. The
    responsibilities in it have no gradient, and say so where one is asked for.
    """
    check_iters(iters)
    check_constants(temperature, growth, min_var)
    check_fusable(a, pose, W)
    logit, m, var, r, *_ = em_route(
        *op_inputs(a, pose, W, place, fields),
        beta_a.contiguous(),
        beta_u.contiguous(),
        fields.types,
        iters,
        temperature,
        growth,
        min_var,
    )
    means = poses_first(m)
    if not posterior:
        return images_first(logit), means, None
    r = responsibilities(r, fields, W.shape[1], len(a))
    return (
        images_first(logit),
        means,
        Mixture(means.flatten(3), poses_first(var).flatten(3), r),
    )

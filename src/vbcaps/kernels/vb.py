"""VB routing with diagonal precision, fused: the fast twin of vb.py.

`vb_routing_fused` takes children, poses and weights instead of votes, and gives what `vb_routing` gives for the votes
they make. It strings together the passes over votes and what happens at each parent between them; these exist for
each kind of device (`passes_for`), with one meaning.
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
from vbcaps.prior import Prior
from vbcaps.routing.fields import Fields
from vbcaps.routing.vb import Posterior

D = 16


@torch.library.custom_op("vbcaps::vb_route", mutates_args=())
@on_its_device
def vb_route(
    a: Tensor, pose: Tensor, W: Tensor, place: Tensor | None, child: Tensor, parents: Tensor, seen: Tensor,
    alpha0: Tensor, m0: Tensor, kappa0: Tensor, inv_psi0: Tensor, nu0: Tensor, beta_a: Tensor, beta_u: Tensor,
    types: int, iters: int, wishart: bool, paper: bool, through_last: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """logit, m, alpha, kappa, psi, nu, r; and for the backward pass the moments of every iteration."""
    v = Votes(a, pose, W, place, child, parents, seen, types)
    out = vb_route_shapes(a, pose, W, place, child, parents, seen, alpha0, m0, kappa0, inv_psi0, nu0, beta_a, beta_u,
                          types, iters, wishart, paper, through_last)  # fmt: skip
    logit, m, alpha, kappa, psi, nu, r, rj, early_m, S, E_ln_pi, E_lndet = out
    lam, K = torch.empty_like(m), torch.empty_like(logit)
    prior = (alpha0, kappa0, nu0, inv_psi0)
    run, (_, N, L, I, J) = passes_for(a), v.sizes
    parts = run.parts(a, L, I, J, types)
    for t in range(iters):
        last = t == iters - 1
        m_t = m if last else early_m[t]
        spread = S[t : t + 1] if parts == 1 else new_poses(a, parts, L, J, N)
        run.moments(v, r[t - 1] if t else None, kappa0, m0, rj[t], m_t, spread)
        if last:
            run.vb_logit(
                rj[t], spread, prior, beta_a, beta_u, S[t], logit, alpha, kappa, psi, nu, E_ln_pi, E_lndet,
                wishart, paper,
            )  # fmt: skip
        else:
            run.vb_parent(rj[t], spread, prior, S[t], lam, K, wishart)
            run.scores(v, m_t, lam, K, r[t])
    return out


@vb_route.register_fake
def vb_route_shapes(
    a: Tensor, pose: Tensor, W: Tensor, place: Tensor | None, child: Tensor, parents: Tensor, seen: Tensor,
    alpha0: Tensor, m0: Tensor, kappa0: Tensor, inv_psi0: Tensor, nu0: Tensor, beta_a: Tensor, beta_u: Tensor,
    types: int, iters: int, wishart: bool, paper: bool, through_last: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    (L, I), N, J = child.shape, a.shape[1], W.shape[1]
    scalar, new, vector = (L, J, N), a.new_empty, functools.partial(new_poses, a)
    r = new_slots(a, iters - 1, (L, I), J, N, types)
    return (
        new(scalar), vector(*scalar), new(scalar), new(scalar), vector(*scalar), new(scalar), r,
        new(iters, *scalar), vector(iters - 1, *scalar), vector(iters, *scalar), new(scalar), new(scalar),
    )  # fmt: skip


@torch.library.custom_op("vbcaps::vb_route_backward", mutates_args=())
@on_its_device
def vb_route_backward(
    dlogit: Tensor, dm: Tensor | None, dalpha: Tensor | None, dkappa: Tensor | None, dpsi: Tensor | None,
    dnu: Tensor | None, a: Tensor, pose: Tensor, W: Tensor, place: Tensor | None, child: Tensor, parents: Tensor,
    seen: Tensor, alpha0: Tensor, m0: Tensor, kappa0: Tensor, inv_psi0: Tensor, nu0: Tensor, beta_u: Tensor,
    m: Tensor, r: Tensor, rj: Tensor, early_m: Tensor, S: Tensor, E_ln_pi: Tensor, E_lndet: Tensor,
    types: int, iters: int, wishart: bool, paper: bool, through_last: bool, prior: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of a, pose, W; and, where `prior`, of alpha0, m0, kappa0, inv_psi0, nu0."""
    v = Votes(a, pose, W, place, child, parents, seen, types)
    C, N, L, I, J = v.sizes
    T = iters
    run = passes_for(a)
    scalar, new, vector = (L, J, N), a.new_empty, functools.partial(new_poses, a)
    da, s = new(C, N), new(C, N)
    dR = new_slots(a, T, (L, I), J, N, types)  # dR[t - 1] becomes dz[t - 1]; dR[T - 1] is that of t = 0
    gb, gS, gr = vector(T, *scalar), vector(T, *scalar), new(scalar)
    parts = run.parts(a, L, I, J, types)
    U0, U1, U2 = new(parts, *scalar), vector(parts, *scalar), vector(parts, *scalar)
    gamma = new(3, T if prior else 0, *scalar)  # of alpha, kappa, nu
    coef = run.new_terms(v, T)
    if through_last:  # nothing comes from the iterations before
        for x in (dR, gb, gS, gamma, coef):
            x.zero_()

    def parent(t: int) -> None:
        last = t == T - 1
        run.vb_grad_parent(
            rj[t], S[t], m if last else early_m[t], m, (alpha0, kappa0, nu0, inv_psi0), beta_u,
            (dlogit, dm, dalpha, dkappa, dpsi, dnu, E_ln_pi, E_lndet) if last else None, (U0, U1, U2),
            gb[t], gS[t], gr, *run.terms(coef, t, T), gamma[:, t] if prior else None, wishart, paper,
        )  # fmt: skip

    parent(T - 1)
    for t in range(T - 1, T - 2 if through_last else -1, -1):
        r_t = r[t - 1] if t else None
        m_t = m if t == T - 1 else early_m[t]
        run.grad_responsibilities(v, m_t, gb[t], gS[t], gr, r_t, dR[t - 1], s, da, add=t < T - 1)
        if t and not through_last:
            run.grad_scores(v, early_m[t - 1], r_t, s, dR[t - 1], U0, U1, U2)
            parent(t - 1)
    dpose, dW = run.grad_votes(v, coef, r, dR, T)
    if not prior:
        return da, dpose, dW, new(0), new(0), new(0), new(0), new(0)
    # m = (sum R V + kappa0 m0) / kappa and S = sum R (V - m)^2 + kappa0 (m0 - m)^2, of which m is the minimum.
    gb, gS = as_poses(gb), as_poses(gS)
    gap = m0.view(-1, 1, 4, 4) - as_poses(torch.cat([early_m, m[None]]))  # t l j n p r
    k0 = kappa0.view(-1, 1, 1, 1)
    dalpha0, dkappa0, dnu0 = (g.sum((0, 1, 3)) for g in gamma)
    dkappa0 = dkappa0 + (gap * (gb + gap * gS)).sum((0, 1, 3, 4, 5))
    dm0 = (k0 * (gb + 2 * gap * gS)).sum((0, 1, 3)).view(J, D)
    dinv_psi0 = gS.sum((0, 1, 3)).view(J, D)
    given = (alpha0, m0, kappa0, inv_psi0, nu0)
    dprior = (dalpha0, dm0, dkappa0, dinv_psi0, dnu0)
    return da, dpose, dW, *(g.sum_to_size(p.shape) for g, p in zip(dprior, given, strict=True))


@vb_route_backward.register_fake
def _(*args: Any) -> tuple[Tensor, ...]:
    a, pose, W = args[6:9]
    alpha0, m0, kappa0, inv_psi0, nu0 = args[13:18]
    priors = (torch.empty_like(p) if args[-1] else p.new_empty(0) for p in (alpha0, m0, kappa0, inv_psi0, nu0))
    return torch.empty_like(a), torch.empty_like(pose), torch.empty_like(W), *priors


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    *tensors, ctx.types, ctx.iters, ctx.wishart, ctx.paper, ctx.through_last = inputs
    _, m, _, _, _, _, *moments = output
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*tensors, m, *moments)


def _backward(ctx: Any, dlogit: Tensor | None, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    *votes_and_priors, _, beta_u, m, r, rj, early_m, S, E_ln_pi, E_lndet = ctx.saved_tensors
    prior = any(ctx.needs_input_grad[7:12])
    dlogit = torch.zeros_like(E_ln_pi) if dlogit is None else dlogit.contiguous()
    of_posterior = [None if g is None else g.contiguous() for g in grads[:5]]  # m, alpha, kappa, psi, nu
    da, dpose, dW, *dprior = vb_route_backward(
        dlogit, *of_posterior, *votes_and_priors, beta_u, m, r, rj, early_m, S, E_ln_pi, E_lndet,
        ctx.types, ctx.iters, ctx.wishart, ctx.paper, ctx.through_last, prior,
    )  # fmt: skip
    dbeta_a = dlogit.sum((0, 2)) if ctx.needs_input_grad[12] else None
    dbeta_u = -(dlogit * rj[-1] if ctx.paper else dlogit).sum((0, 2)) if ctx.needs_input_grad[13] else None
    dprior = dprior if prior else [None] * 5
    return da, dpose, dW, None, None, None, None, *dprior, dbeta_a, dbeta_u, None, None, None, None, None


vb_route.register_autograd(_backward, setup_context=_save)
vb_route_backward.register_autograd(refuse_twice)


def vb_routing_fused(
    a: Tensor,
    pose: Tensor,
    W: Tensor,
    fields: Fields,
    prior: Prior,
    *,
    place: Tensor | None = None,
    iters: int = 3,
    activation: str = "released",
    through: str = "all",
    beta_a: Tensor,
    beta_u: Tensor,
    posterior: bool = True,
) -> tuple[Tensor, Tensor, Posterior | None]:
    """``vb_routing`` of the votes that ``a: n c``, ``pose: n c p q``, ``W: g j q r`` and ``place: i 2`` make.

    And between its results the means as ``n l j p r``; ``posterior=False`` saves the copies of one. The
    responsibilities in it have no gradient, and say so where one is asked for.
    """
    check_fusable(a, pose, W, prior)
    p = prior()
    logit, m, alpha, kappa, psi, nu, r, *_ = vb_route(
        *op_inputs(a, pose, W, place, fields),
        p.alpha0.contiguous(),
        p.m0.contiguous(),
        p.kappa0.contiguous(),
        p.inv_Psi0.contiguous(),
        p.nu0.contiguous(),
        beta_a,
        beta_u,
        fields.types,
        iters,
        prior.precision == "wishart",
        activation == "paper",
        through == "last",
    )
    means = poses_first(m)
    if not posterior:
        return images_first(logit), means, None
    r = responsibilities(r, fields, W.shape[1], len(a))
    r = r.detach() if through == "last" else r
    return (
        images_first(logit),
        means,
        Posterior(
            images_first(alpha),
            means.flatten(3),
            images_first(kappa),
            poses_first(psi).flatten(3),
            images_first(nu),
            r,
            p,
        ),
    )

"""The three routing algorithms as their papers print them: float64, one index at a time, to hold the library to.

Axes: n image, l parent position, i child slot in a receptive field, j parent type, d (e) pose entry. Where the papers
leave a choice, it is DESIGN.md's: responsibilities start at 1/d_j, a child's parents are those of every type and
position whose field holds it, and the last E-step is skipped.
"""

import itertools
from types import SimpleNamespace

import numpy as np
import torch
from scipy.special import digamma, expit, gammaln, multigammaln

from vbcaps.routing.fields import conv_fields


def random_problem(
    seed, *, size=(4, 4), types=1, kernel=(3, 3), stride=(1, 1), parents=3, dim=4, batch=2, scale=1.0, dtype=None
):
    """a, V and child of a random layer; lower capsules are numbered at random, with gaps, and seen out of order."""
    gen = torch.Generator().manual_seed(seed)
    dtype = dtype or torch.float64
    capsules = size[0] * size[1] * types
    child = conv_fields(*size, types, kernel, stride, torch.device("cpu")).child
    child = child[:, torch.randperm(child.shape[1], generator=gen)]
    child = torch.randperm(capsules + 5, generator=gen)[:capsules][child]
    a = torch.rand(batch, capsules + 5, generator=gen, dtype=dtype)[:, child]
    V = scale * torch.randn(batch, *child.shape, parents, dim, generator=gen, dtype=dtype)
    return a, V, child


def tensors(q):
    """Return what routing knows about its parents by name, without the prior and the softness."""
    return {name: x for name, x in q._asdict().items() if name not in ("prior", "temper")}


def extreme_inputs(dtype=torch.float32, dim=4):
    """What every routing must survive, by name: a, V and child. Two fields of four children share one of them."""
    gen = torch.Generator().manual_seed(0)
    child = torch.tensor([[0, 1, 2, 3], [3, 4, 5, 6]])
    apart = torch.arange(8).view(2, 4)
    a = torch.rand(2, 7, generator=gen, dtype=dtype)[:, child]
    V = torch.randn(2, 2, 4, 3, dim, generator=gen, dtype=dtype)
    lit = torch.tensor([1.0, 0.0], dtype=dtype)[:, None].expand(2, 2, 4)
    mixed = V * torch.tensor([1e4, 1e-6, 1.0, 1e4], dtype=dtype)[:, None, None]
    return {
        "no child active": (torch.zeros_like(a), V, child),
        "no child of one field active": (lit, V, apart),
        "every child active": (torch.ones_like(a), V, child),
        "faint children": (a * 1e-30, V, child),
        "poses of 1e4": (a, 1e4 * V, child),
        "poses of 1e-6": (a, 1e-6 * V, child),
        "poses of both sizes": (a, mixed, child),
        "inactive with poses of 1e4": (torch.zeros_like(a), 1e4 * V, child),
        "all votes equal": (a, torch.full_like(V, 0.7), child),
        "all votes equal to 1e4": (a, torch.full_like(V, 1e4), child),
        "all votes zero": (a, torch.zeros_like(V), child),
        "one image": (a[:1], V[:1], child),
        "one parent type": (a, V[:, :, :, :1], child),
        "one child": (a[:, :1, :1], V[:, :1, :1], child[:1, :1]),
        "one child in all": (a, V, torch.zeros_like(child)),
    }


def leaf(x):
    return x.detach().clone().requires_grad_()


def assert_finite_with_gradients(outputs, leaves):
    """Every output is finite, and so is every leaf's gradient of a random weighting of them."""
    gen = torch.Generator().manual_seed(1)
    loss = 0.0
    for x in outputs:
        assert x.isfinite().all()
        loss = loss + (torch.randn(x.shape, generator=gen, dtype=x.dtype) * x).sum()
    for grad in torch.autograd.grad(loss, leaves):
        assert grad.isfinite().all()


def normalise_over_parents(ln_p, child):
    """r_ij = p_ij / sum of p over every slot of every field that holds the same child, and over every type."""
    N, L, I, J = ln_p.shape
    r = np.empty_like(ln_p)
    for n, l, i in itertools.product(range(N), range(L), range(I)):
        rivals = [
            ln_p[n, l2, i2, j]
            for l2, i2, j in itertools.product(range(L), range(I), range(J))
            if child[l2, i2] == child[l, i]
        ]
        top = max(rivals)
        total = sum(np.exp(x - top) for x in rivals)
        for j in range(J):
            r[n, l, i, j] = np.exp(ln_p[n, l, i, j] - top) / total
    return r


def vb_routing(a, v, child, prior, *, iters, precision, activation, temper, beta_a, beta_u):
    """Algorithm 1. ``prior`` has alpha0, kappa0, nu0 as ``j``, m0 as ``j d`` and Psi0 as ``j d e``."""
    N, L, I, J, D = v.shape
    n_l_j = list(itertools.product(range(N), range(L), range(J)))
    r_ij = np.full((N, L, I, J), 1 / J)
    q = SimpleNamespace(
        alpha=np.empty((N, L, J)),
        m=np.empty((N, L, J, D)),
        kappa=np.empty((N, L, J)),
        psi=np.empty((N, L, J, D, D)),
        nu=np.empty((N, L, J)),
        logit=np.empty((N, L, J)),
    )
    r_j, lndet_Psi = np.empty((N, L, J)), np.empty((N, L, J))
    E_ln_pi, E_lndet = np.empty((N, L, J)), np.empty((N, L, J))
    for t in range(iters):
        q.r = r_ij
        for n, l, j in n_l_j:
            # Update Suff. Stats
            r = [r_ij[n, l, i, j] * a[n, l, i] for i in range(I)]
            r_j[n, l, j] = sum(r)
            v_mean = 1 / r_j[n, l, j] * sum(r[i] * v[n, l, i, j] for i in range(I))
            S = sum(r[i] * np.outer(v[n, l, i, j] - v_mean, v[n, l, i, j] - v_mean) for i in range(I))
            # Update q*(pi, mu, Lambda)
            kappa0, m0 = prior.kappa0[j], prior.m0[j]
            q.alpha[n, l, j] = prior.alpha0[j] + r_j[n, l, j]
            q.kappa[n, l, j] = kappa = kappa0 + r_j[n, l, j]
            q.nu[n, l, j] = prior.nu0[j] + r_j[n, l, j]
            q.m[n, l, j] = (r_j[n, l, j] * v_mean + kappa0 * m0) / kappa
            between = kappa0 * r_j[n, l, j] / kappa * np.outer(v_mean - m0, v_mean - m0)
            inv_Psi = np.linalg.inv(prior.Psi0[j]) + S + between
            if precision != "full":
                inv_Psi = np.diag(np.diag(inv_Psi))
            lndet_Psi[n, l, j] = -2 * np.trace(np.diag(np.log(np.diag(np.linalg.cholesky(inv_Psi)))))
            q.psi[n, l, j] = np.linalg.inv(inv_Psi)
        # Update q*(z)
        for n, l, j in n_l_j:
            E_ln_pi[n, l, j] = digamma(q.alpha[n, l, j]) - digamma(sum(q.alpha[n, l, k] for k in range(J)))
            if precision == "gamma":
                digammas = sum(digamma(q.nu[n, l, j] / 2) for _ in range(D))
            else:
                digammas = sum(digamma((q.nu[n, l, j] - d) / 2) for d in range(D))
            E_lndet[n, l, j] = D * np.log(2) + lndet_Psi[n, l, j] + digammas
        if t == iters - 1:
            break
        ln_r = np.empty((N, L, I, J))
        for (n, l, j), i in itertools.product(n_l_j, range(I)):
            x = v[n, l, i, j] - q.m[n, l, j]
            E_maha = D / q.kappa[n, l, j] + q.nu[n, l, j] * x @ q.psi[n, l, j] @ x
            ln_r[n, l, i, j] = temper * (E_ln_pi[n, l, j] + E_lndet[n, l, j] / 2 - E_maha / 2)
        r_ij = normalise_over_parents(ln_r, child)
    for n, l, j in n_l_j:
        if activation == "agreement":
            q.logit[n, l, j] = beta_a[j] + (E_ln_pi[n, l, j] + E_lndet[n, l, j] / 2 - beta_u[j]) * r_j[n, l, j]
        elif activation == "information":
            q.logit[n, l, j] = beta_a[j] - beta_u[j] + divergence(q, prior, n, l, j, precision)
        elif activation == "paper":
            q.logit[n, l, j] = beta_a[j] - (beta_u[j] + E_ln_pi[n, l, j] + E_lndet[n, l, j]) * r_j[n, l, j]
        else:
            H = D / 2 * np.log(2 * np.pi * np.e) - E_lndet[n, l, j] / 2
            q.logit[n, l, j] = beta_a[j] - (np.exp(E_ln_pi[n, l, j]) * H + beta_u[j])
    return q


def divergence(q, prior, n, l, j, precision):
    """KL[q(mu, Lambda) || prior], by cross entropies of a Gaussian-Wishart, or of a Gaussian-Gamma for each entry."""
    m, kappa, Psi, nu = (x[n, l, j] for x in (q.m, q.kappa, q.psi, q.nu))
    m0, kappa0, nu0, Psi0 = prior.m0[j], prior.kappa0[j], prior.nu0[j], prior.Psi0[j]
    D, gap = len(m), m - m0
    total = (D * np.log(kappa / kappa0) + D * kappa0 / kappa - D + kappa0 * nu * gap @ Psi @ gap) / 2
    if precision == "full":
        E_lndet = sum(digamma((nu - d) / 2) for d in range(D)) + D * np.log(2) + np.linalg.slogdet(Psi)[1]
        total += (nu - nu0) / 2 * E_lndet - nu * D / 2 + nu / 2 * np.trace(np.linalg.inv(Psi0) @ Psi)
        for k, P, sign in ((nu0, Psi0, 1), (nu, Psi, -1)):  # ln of the Wisharts' normalisers
            total += sign * (k * D / 2 * np.log(2) + k / 2 * np.linalg.slogdet(P)[1] + multigammaln(k / 2, D))
        return total
    for d in range(D):
        a, a0, rate, rate0 = nu / 2, nu0 / 2, 1 / (2 * Psi[d, d]), np.linalg.inv(Psi0)[d, d] / 2
        E_ln = digamma(a) - np.log(rate)
        total += a * np.log(rate) - gammaln(a) + (a - 1) * E_ln - a
        total -= a0 * np.log(rate0) - gammaln(a0) + (a0 - 1) * E_ln - rate0 * a / rate
    return total


def em_routing(a, v, child, *, iters, beta_a, beta_u, temperature, growth, min_var):
    """Procedure 1 of "Matrix capsules with EM routing", with lambda_t = temperature (1 - growth^t), t = 1, 2, ..."""
    N, L, I, J, D = v.shape
    r_ij = np.full((N, L, I, J), 1 / J)
    mu, var = np.empty((N, L, J, D)), np.empty((N, L, J, D))
    logit, ln_p = np.empty((N, L, J)), np.empty((N, L, I, J))
    for t in range(1, iters + 1):
        inverse_temperature = temperature * (1 - growth**t)
        used = r_ij
        for n, l, j in itertools.product(range(N), range(L), range(J)):
            # M-step
            R = [r_ij[n, l, i, j] * a[n, l, i] for i in range(I)]
            cost = 0.0
            for h in range(D):
                mu[n, l, j, h] = sum(R[i] * v[n, l, i, j, h] for i in range(I)) / sum(R)
                var[n, l, j, h] = sum(R[i] * (v[n, l, i, j, h] - mu[n, l, j, h]) ** 2 for i in range(I)) / sum(R)
                var[n, l, j, h] += min_var
                cost += (beta_u[j] + np.log(np.sqrt(var[n, l, j, h]))) * sum(R)
            logit[n, l, j] = inverse_temperature * (beta_a[j] - cost)
            # E-step
            for i in range(I):
                ln_p[n, l, i, j] = np.log(expit(logit[n, l, j]))
                for h in range(D):
                    x = v[n, l, i, j, h] - mu[n, l, j, h]
                    ln_p[n, l, i, j] -= x**2 / (2 * var[n, l, j, h]) + np.log(2 * np.pi * var[n, l, j, h]) / 2
        r_ij = normalise_over_parents(ln_p, child)
    return SimpleNamespace(logit=logit, m=mu, var=var, r=used)


def dynamic_routing(a, v, child, *, iters):
    """Procedure 1 of "Dynamic routing between capsules"; a child's vote counts a_i times. ``length`` is |v_j|."""
    N, L, I, J, D = v.shape
    b, c = np.zeros((N, L, I, J)), np.full((N, L, I, J), 1 / J)
    out, length = np.empty((N, L, J, D)), np.empty((N, L, J))
    for t in range(iters):
        if t > 0:
            c = normalise_over_parents(b, child)
        for n, l, j in itertools.product(range(N), range(L), range(J)):
            s = sum(c[n, l, i, j] * a[n, l, i] * v[n, l, i, j] for i in range(I))
            norm = np.sqrt(sum(s[d] ** 2 for d in range(D)))
            out[n, l, j] = norm**2 / (1 + norm**2) * s / norm
            length[n, l, j] = np.sqrt(sum(out[n, l, j, d] ** 2 for d in range(D)))
            for i in range(I):
                b[n, l, i, j] += sum(v[n, l, i, j, d] * out[n, l, j, d] for d in range(D))
    return SimpleNamespace(m=out, r=c, length=length)

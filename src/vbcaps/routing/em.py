"""EM routing: Hinton, Sabour and Frosst, "Matrix capsules with EM routing" (ICLR 2018).

Axes: n image, l parent position, i child slot in a receptive field, j parent type, d pose entry.
"""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vbcaps.distributions import LN2PI
from vbcaps.routing.fields import check_iters, check_routing_inputs, softmax_over_parents

LEAST_VAR = 1e-12  # its gradients are finite in float32


class Mixture(NamedTuple):
    """What EM routing knows about each parent: point estimates of its Gaussian.

    Args:
        m: mean, ``n l j d``.
        var: variance, ``n l j d``.
        r: responsibilities that the last M-step used, ``n l i j``.
    """

    m: Tensor
    var: Tensor
    r: Tensor


def em_routing(
    a: Tensor,
    V: Tensor,
    child: Tensor,
    *,
    children: int | None = None,
    iters: int = 3,
    beta_a: Tensor | float = 0.0,
    beta_u: Tensor | float = 0.0,
    temperature: float = 0.01,
    growth: float = 0.95,
    min_var: float = 0.1,
    history: list[Mixture] | None = None,
) -> tuple[Tensor, Mixture]:
    r"""Route children to parents by expectation maximisation.

    Args:
        a, V, child, children, iters: see `vb_routing`.
        beta_a, beta_u: the learned costs, a number or one for each type ``j``.
        temperature, growth: the inverse temperature of iteration t = 1, 2, ... is
            $\text{temperature} \, (1 - \text{growth}^t)$, the authors' schedule.
        min_var: added to every variance. Without it a parent that owns one child has the variance 0, and its likelihood
            no bound. With a small one, as 1e-4, a network learns slowly (results/NOTES.md); 0.1 is about what VB's
            prior, which needs no such constant, comes to.
        history: a list to which the mixture after every iteration is appended.

    Returns:
        The logit of each parent's activation, ``n l j``, before BatchNorm and sigmoid; and the mixture.

    Example:
        >>> logit, q = em_routing(torch.rand(8, 1, 20), torch.randn(8, 1, 20, 5, 16), torch.arange(20)[None])
        >>> logit.shape, q.var.shape
        (torch.Size([8, 1, 5]), torch.Size([8, 1, 5, 16]))
    """
    children = check_routing_inputs(a, V, child, children, iters)
    check_constants(temperature, growth, min_var)
    r = torch.full_like(V[..., 0], 1 / V.shape[3])  # n l i j
    for t in range(iters):
        # M-step
        R = r * a[..., None]
        r_j = R.sum(2)  # n l j
        weight = R / r_j.clamp_min(torch.finfo(R.dtype).tiny ** 0.5)[:, :, None]  # sums to 1 over i, or to 0
        m = torch.einsum("nlij,nlijd->nljd", weight, V)
        var = torch.einsum("nlij,nlijd->nljd", weight, (V - m[:, :, None]).square()) + min_var
        cost = (
            V.shape[-1] * torch.as_tensor(beta_u) + 0.5 * var.log().sum(-1)
        ) * r_j  # sum_d (beta_u + ln sigma_d) r_j
        logit = temperature * (1 - growth ** (t + 1)) * (beta_a - cost)
        if history is not None:
            history.append(Mixture(m, var, r))
        # E-step
        if t < iters - 1:  # nothing would read the last responsibilities
            distance = torch.einsum("nlijd,nljd->nlij", (V - m[:, :, None]).square(), 1 / var)
            ln_p = -0.5 * (distance + (var.log() + LN2PI).sum(-1)[:, :, None])
            r = softmax_over_parents(F.logsigmoid(logit)[:, :, None] + ln_p, child, children)
    return logit, Mixture(m, var, r)


def check_constants(temperature: float, growth: float, min_var: float) -> None:
    for name, value, high in (("temperature", temperature, math.inf), ("growth", growth, 1)):
        if not 0 < value < high:
            raise ValueError(f"{name} must lie between 0 and {high}, both excluded, got {value}")
    if not LEAST_VAR <= min_var < math.inf:
        raise ValueError(f"min_var must be a number of at least {LEAST_VAR:g}, got {min_var}")


class EMRouting(nn.Module):
    """`em_routing` with its learned costs.

    Args:
        types: how many types of parent there are.
        dim: entries of a pose.
        iters, temperature, growth, min_var: see `em_routing`.

    Example:
        >>> routing = EMRouting(types=5, iters=2)
        >>> logit, q = routing(torch.rand(8, 1, 20), torch.randn(8, 1, 20, 5, 16), torch.arange(20)[None])
    """

    def __init__(
        self,
        types: int,
        dim: int = 16,
        *,
        iters: int = 3,
        temperature: float = 0.01,
        growth: float = 0.95,
        min_var: float = 0.1,
    ):
        super().__init__()
        check_iters(iters)
        check_constants(temperature, growth, min_var)
        self.iters, self.temperature, self.growth, self.min_var = iters, temperature, growth, min_var
        self.beta_a = nn.Parameter(torch.zeros(types))
        self.beta_u = nn.Parameter(torch.zeros(types))

    def forward(
        self,
        a: Tensor,
        V: Tensor,
        child: Tensor,
        children: int | None = None,
        history: list[Mixture] | None = None,
    ) -> tuple[Tensor, Mixture]:
        return em_routing(
            a,
            V,
            child,
            children=children,
            iters=self.iters,
            beta_a=self.beta_a,
            beta_u=self.beta_u,
            temperature=self.temperature,
            growth=self.growth,
            min_var=self.min_var,
            history=history,
        )

    def extra_repr(self) -> str:
        return f"iters={self.iters}, temperature={self.temperature}, growth={self.growth}, min_var={self.min_var}"

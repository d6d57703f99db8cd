"""Dynamic routing: Sabour, Frosst and Hinton, "Dynamic routing between capsules" (NIPS 2017), for matrix poses.

Axes: n image, l parent position, i child slot in a receptive field, j parent type, d pose entry.
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from vbcaps.routing.fields import check_iters, check_routing_inputs, softmax_over_parents


class Agreement(NamedTuple):
    """What dynamic routing knows about each parent.

    Args:
        m: its squashed pose, ``n l j d``.
        r: the coupling coefficients that made it, ``n l i j``.
    """

    m: Tensor
    r: Tensor


def dynamic_routing(
    a: Tensor,
    V: Tensor,
    child: Tensor,
    *,
    children: int | None = None,
    iters: int = 3,
    history: list[Agreement] | None = None,
) -> tuple[Tensor, Agreement]:
    r"""Route children to parents by agreement.

    A 2017 capsule says how sure it is by its length, a matrix capsule by its activation: a child's votes are
    weighted by $a_i$. The logit is $\ln |s_j|^2$, so that its sigmoid is the length of the squashed pose,
    $|s|^2 / (1 + |s|^2)$. As in VB and EM, the first coefficients are $1/d_j$; from then on they are a softmax over
    every parent that sees the child.

    Args:
        a, V, child, children, iters: see `vb_routing`.
        history: a list to which the agreement after every iteration is appended.

    Returns:
        The logit of each parent's activation, ``n l j``, before BatchNorm and sigmoid; and the agreement.

    Example:
        >>> logit, q = dynamic_routing(torch.rand(8, 1, 20), torch.randn(8, 1, 20, 5, 16), torch.arange(20)[None])
        >>> bool(torch.allclose(logit.sigmoid(), q.m.norm(dim=-1)))
        True
    """
    children = check_routing_inputs(a, V, child, children, iters)
    tiny = torch.finfo(V.dtype).tiny ** 0.5
    b = torch.zeros_like(V[..., 0])  # n l i j
    r = torch.full_like(b, 1 / V.shape[3])
    for t in range(iters):
        s = torch.einsum("nlij,nlijd->nljd", r * a[..., None], V)
        length2 = s.square().sum(-1, keepdim=True)
        m = squash(s, length2, tiny)
        if history is not None:
            history.append(Agreement(m, r))
        if t < iters - 1:  # nothing would read the last coefficients
            b = b + torch.einsum("nlijd,nljd->nlij", V, m)
            r = softmax_over_parents(b, child, children)
    return (length2[..., 0] + tiny).log(), Agreement(m, r)


def squash(s: Tensor, length2: Tensor, tiny: float) -> Tensor:
    r"""Return a vector of the direction $s / |s|$ and the length $|s|^2 / (1 + |s|^2)$."""
    return s * (length2 + tiny).sqrt() / (1 + length2)


class DynamicRouting(nn.Module):
    """`dynamic_routing` as a module; it has nothing to learn.

    Args:
        types, dim: taken as every routing takes them, and not needed.
        iters: how often poses are made.

    Example:
        >>> routing = DynamicRouting(types=5, iters=2)
        >>> logit, q = routing(torch.rand(8, 1, 20), torch.randn(8, 1, 20, 5, 16), torch.arange(20)[None])
    """

    def __init__(self, types: int, dim: int = 16, *, iters: int = 3):
        super().__init__()
        check_iters(iters)
        self.iters = iters

    def forward(
        self,
        a: Tensor,
        V: Tensor,
        child: Tensor,
        children: int | None = None,
        history: list[Agreement] | None = None,
    ) -> tuple[Tensor, Agreement]:
        return dynamic_routing(a, V, child, children=children, iters=self.iters, history=history)

    def extra_repr(self) -> str:
        return f"iters={self.iters}"

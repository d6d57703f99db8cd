"""How should votes lie in memory? Reference VB routing of ConvCaps 1 ({64,16,16,16,5}, 32x32) in several layouts, CPU.

python benchmarks/layouts.py [--batch 8] [--csv benchmarks/layouts.csv]

`nine axes` is the arrangement of the authors' released code: one broadcast axis for each of image, child type, parent
type, pose row, pose column, two of position and two of kernel, and a sum for each contraction. All layouts compute the
same posterior, forward and backward; the script checks this.
"""

import argparse
import csv
import platform
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

from vbcaps.distributions import expected_log_pi, expected_logdet_gamma
from vbcaps.prior import Prior
from vbcaps.routing import vb_routing
from vbcaps.routing.fields import conv_fields
from vbcaps.routing.votes import votes

SIDE, TYPES, PARENTS, KERNEL, STRIDE, POSE = 14, 16, 16, 3, 2, 4


def by_parent(a: Tensor, pose: Tensor, W: Tensor, iters: int) -> Tensor:
    """The library's: the votes of a parent together, n l j i d; each pass a batched matrix product."""
    return route_gathered(a, pose, W, iters, votes)


def by_child(a: Tensor, pose: Tensor, W: Tensor, iters: int) -> Tensor:
    """The votes of a child together, n l i j d."""
    return route_gathered(
        a, pose, W, iters, lambda M, W: torch.einsum("nlipq,ijqr->nlijpr", M, W).contiguous().flatten(4)
    )


def batch_last(a: Tensor, pose: Tensor, W: Tensor, iters: int) -> Tensor:
    """Images innermost, l i j d n."""

    def make(M: Tensor, W: Tensor) -> Tensor:
        return torch.einsum("nlipq,ijqr->lijprn", M, W).contiguous().flatten(3, 4).permute(4, 0, 1, 2, 3)

    return route_gathered(a, pose, W, iters, make)


def route_gathered(a: Tensor, pose: Tensor, W: Tensor, iters: int, make: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    n = len(a)
    child = conv_fields(SIDE, SIDE, TYPES, (KERNEL, KERNEL), (STRIDE, STRIDE), a.device).child
    index = child.flatten()
    M = pose.reshape(n, -1, POSE, POSE).index_select(1, index).unflatten(1, child.shape)
    a = a.reshape(n, -1).index_select(1, index).unflatten(1, child.shape)
    V, children = make(M, W.flatten(0, 2)), SIDE * SIDE * TYPES
    logit, q = vb_routing(a, V, child, Prior(), children=children, iters=iters, activation="released")
    return torch.cat([logit.flatten(), q.m.flatten()])


def nine_axes(a: Tensor, pose: Tensor, W: Tensor, iters: int) -> Tensor:
    """n B C P P F F K K, broadcast and sum."""
    logit, m = route_by_nine_axes(a, pose, W, iters, STRIDE)
    return torch.cat([logit.flatten(), m.flatten()])


def route_by_nine_axes(
    a: Tensor, pose: Tensor, W: Tensor, iters: int, stride: int, place: Tensor | float = 0.0
) -> tuple[Tensor, Tensor]:
    """Logit and mean, n 1 C . 1 F F 1 1, from ``n h h B``, ``n h h B P P``, ``K K B C P P``; place: D 1 1 1 K K."""
    kernel, parents = W.shape[0], W.shape[3]
    M = pose.permute(0, 3, 4, 5, 1, 2).unfold(4, kernel, stride).unfold(5, kernel, stride)  # n B P P F F K K
    M = M[:, :, None, :, :, None]  # n B 1 P P 1 F F K K
    weight = W.permute(2, 3, 4, 5, 0, 1)[None, :, :, None, :, :, None, None]  # 1 B C 1 P P 1 1 K K
    V = (M * weight).sum(4).flatten(3, 4)[:, :, :, :, None] + place  # n B C D 1 F F K K
    A = a.permute(0, 3, 1, 2).unfold(2, kernel, stride).unfold(3, kernel, stride)[:, :, None, None, None]
    children, poses, D = (1, -2, -1), (3, 4), POSE * POSE
    r = torch.full_like(V[:, :, :, :1], 1 / parents)
    for t in range(iters):
        R = r * A
        r_j = R.sum(children, keepdim=True)
        alpha, kappa, nu = 1 + r_j, 1 + r_j, D + 1 + r_j
        mean = (R * V).sum(children, keepdim=True) / r_j
        m = r_j * mean / kappa
        S = (R * (V - mean).square()).sum(children, keepdim=True)
        psi = 1 / (1 + S + r_j / kappa * mean.square())
        E_ln_pi = expected_log_pi(alpha.transpose(2, -1)).transpose(2, -1)
        E_lndet = expected_logdet_gamma(psi.transpose(3, -1).log(), nu.squeeze(-1))[..., None]
        if t < iters - 1:
            distance = D / kappa + nu * (psi * (V - m).square()).sum(poses, keepdim=True)
            r = over_parents(E_ln_pi + 0.5 * (E_lndet - distance), a.shape[1], stride)
    H = 0.5 * (D * 2.8378770664093453 - E_lndet)
    return -(E_ln_pi.exp() * H), m


def over_parents(ln_p: Tensor, side: int, stride: int) -> Tensor:
    """Softmax over all parents of a child for n B C 1 1 F F K K, by folding the fields back onto the map."""
    top = ln_p.detach().amax()
    p = (ln_p - top).exp()
    n, B, *_, fields, _, _, kernel = p.shape
    columns = p.sum(2).reshape(n, B, fields * fields, kernel * kernel).transpose(2, 3).flatten(1, 2)
    total = torch.nn.functional.fold(columns, side, kernel, stride=stride)
    total = total.unfold(2, kernel, stride).unfold(3, kernel, stride)
    return p / total[:, :, None, None, None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--iters", type=int, default=3)
    parser.add_argument("--csv", help="write the table here")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    a = torch.rand(arguments.batch, SIDE, SIDE, TYPES)
    pose = torch.randn(arguments.batch, SIDE, SIDE, TYPES, POSE, POSE)
    W = torch.randn(KERNEL, KERNEL, TYPES, PARENTS, POSE, POSE) / 4
    inputs = (a.requires_grad_(), pose.requires_grad_(), W.requires_grad_())

    rows: list[tuple[str, float, float]] = []
    reference: tuple[Tensor, ...] | None = None
    layouts: list[Callable[[Tensor, Tensor, Tensor, int], Tensor]] = [nine_axes, by_child, batch_last, by_parent]
    for layout in layouts:
        forward, both = [], []
        for _ in range(arguments.repeats + 1):  # the first is a warm-up
            start = time.perf_counter()
            out = layout(*inputs, arguments.iters)
            forward.append(time.perf_counter() - start)
            grads = torch.autograd.grad(out.square().sum(), inputs)
            both.append(time.perf_counter() - start)
        reference = grads if reference is None else reference
        for ours, theirs in zip(grads, reference, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3 * theirs.abs().max().item())
        rows.append((layout.__name__, statistics.median(forward[1:]), statistics.median(both[1:])))

    header = ("layout", "forward_s", "forward_backward_s", "ratio_to_nine_axes", "batch", "threads", "torch", "cpu")
    here = (arguments.batch, torch.get_num_threads(), torch.__version__, platform.machine())
    table = [(name, f"{f:.3f}", f"{b:.3f}", f"{rows[0][2] / b:.1f}", *here) for name, f, b in rows]
    for row in (header, *table):
        print("  ".join(f"{cell!s:18s}" for cell in row))
    if arguments.csv:
        with open(arguments.csv, "w", newline="") as file:
            csv.writer(file).writerows((header, *table))


if __name__ == "__main__":
    main()

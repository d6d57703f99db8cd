"""Muon (Keller Jordan et al., 2024): an optimiser whose steps are equally long in all directions of a matrix."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

# Jordan's coefficients of the odd polynomial x (A + B x^2 + C x^4), which moves singular values towards 1. It is steep
# at 0, so that five applications bring all but the smallest between 0.7 and 1.2.
A, B, C = 3.4445, -4.7750, 2.0315


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum for convolutions and transformations of capsules; use AdamW for other parameters.

    A step is the matrix with the singular vectors of the (Nesterov) momentum and singular values near 1, times
    ``0.2 sqrt(longer side)``. Its entries are about as large as those of AdamW's steps, so the same learning rates and
    weight decays work (Liu et al., 2025). Weight decay is decoupled, as in AdamW.
    """

    def __init__(
        self, parameters: Iterable[Tensor], lr: float | Tensor, momentum: float = 0.95, weight_decay: float = 0.0
    ):
        if not 0 <= momentum < 1:
            raise ValueError(f"momentum must be from 0 to below 1, got {momentum}")
        if weight_decay < 0 or (not isinstance(lr, Tensor) and lr < 0):
            raise ValueError(f"lr and weight_decay must not be below 0, got {lr} and {weight_decay}")
        super().__init__(parameters, dict(lr=lr, momentum=momentum, weight_decay=weight_decay))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for p in self.param_groups[-1]["params"]:
            if not is_map(p):
                del self.param_groups[-1]
                raise ValueError(f"Muon is for weights of convolutions and of capsules, got shape {tuple(p.shape)}")
            self.state[p] = dict(momentum_buffer=torch.zeros_like(p))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            if not weights:
                continue
            buffers = [self.state[p]["momentum_buffer"] for p in weights]
            torch._foreach_lerp_(buffers, [p.grad for p in weights], 1 - group["momentum"])
            ahead = torch._foreach_lerp([p.grad for p in weights], buffers, group["momentum"])
            matrices = [as_matrix(x) for x in ahead]
            steps = [from_matrix(x, p.shape) for p, x in zip(weights, orthogonal(matrices), strict=True)]
            torch._foreach_mul_(steps, [0.2 * max(matrix.shape) ** 0.5 for matrix in matrices])
            torch._foreach_mul_(steps, group["lr"])
            torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_sub_(weights, steps)
        return loss


def is_map(p: Tensor) -> bool:
    """Return whether p is the weight of a convolution or of a capsule layer."""
    return p.ndim in (4, 6)


def as_matrix(weight: Tensor) -> Tensor:
    """Return the matrix that maps a receptive field: filters by entries, or for capsules ``(i p) (j q)``."""
    if weight.ndim == 4:
        return weight.flatten(1)
    return weight.flatten(0, 2).transpose(1, 2).flatten(2).flatten(0, 1)  # i j p q, i p j q


def from_matrix(matrix: Tensor, shape: torch.Size) -> Tensor:
    if len(shape) == 4:
        return matrix.reshape(shape)
    *field, j, p, q = shape
    return matrix.reshape(-1, p, j, q).transpose(1, 2).reshape(*field, j, p, q)


def orthogonal(matrices: Sequence[Tensor]) -> list[Tensor]:
    """Return the matrices with their singular values moved near 1; singular values of 0 stay 0.

    A GPU needs many small matrices at once, so all are computed in one batch: each is padded with zeros, which stay
    zeros, to the size of the largest.
    """
    wide = [x if x.shape[0] <= x.shape[1] else x.T for x in matrices]
    corners = [(k, slice(x.shape[0]), slice(x.shape[1])) for k, x in enumerate(wide)]
    x = wide[0].new_zeros(len(wide), *(max(x.shape[axis] for x in wide) for axis in (0, 1)))
    for corner, one in zip(corners, wide, strict=True):
        x[corner] = one
    x /= x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-20)
    for _ in range(5):
        s = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(s, s, s, beta=B, alpha=C), x, beta=A)
    steps = [x[corner] for corner in corners]
    return [step if step.shape == like.shape else step.T for step, like in zip(steps, matrices, strict=True)]

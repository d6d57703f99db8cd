"""What the fused routings share: the makings of votes, which device runs the passes over them, and views of results."""

import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from vbcaps.prior import Prior
from vbcaps.routing import build_cpu
from vbcaps.routing.fields import Fields

Args = ParamSpec("Args")
Result = TypeVar("Result")


class Votes(NamedTuple):
    """What makes the votes; axes as in passes_triton.py."""

    a: Tensor  # c n
    pose: Tensor  # c p n r
    W: Tensor  # g j p r
    place: Tensor | None  # i 2
    child: Tensor  # l i
    parents: Tensor  # c s
    seen: Tensor  # c
    types: int  # of child capsules at one position

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """C, N, L, I, J"""
        return (*self.a.shape, *self.child.shape, self.W.shape[1])


def passes_for(a: Tensor) -> ModuleType:
    """The passes for this tensor's device; on a CPU those of Triton too, where its interpreter is asked for."""
    if a.is_cuda or triton_interprets():
        from vbcaps.routing import launch_triton

        return launch_triton
    from vbcaps.routing import launch_cpu

    return launch_cpu


@torch.compiler.assume_constant_result
def triton_interprets() -> bool:
    """Whether Triton's kernels run on a CPU too, in its interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@torch.compiler.assume_constant_result
def why_no_library() -> str | None:
    """Why there are no kernels for CPUs on this machine, or None where there are."""
    return build_cpu.why_no_library()


def on_its_device(op: Callable[Args, Result]) -> Callable[Args, Result]:
    """Make the device of an op's first tensor the current one: that is where Triton launches, wherever tensors are."""

    @functools.wraps(op)
    def on_device(*args: Args.args, **kwargs: Args.kwargs) -> Result:
        with torch.cuda.device_of(args[0]):
            return op(*args, **kwargs)

    return on_device


def most_images(W: Tensor, fields: Fields, iters: int) -> int:
    """The largest batch that the Triton kernels can take: they count the numbers of a buffer in 32 bits.

    And they deal fields, and images by eight, to axes of a grid, which CUDA lets have 65535 programs.
    """
    (L, I), C, J = fields.child.shape, len(fields.seen), W.shape[1]
    if max(W.numel(), fields.parents.numel()) >= 2**31 or L >= 2**16:
        return 0
    responsibilities = max(iters - 1, 1) * L * I * J  # r, and dz: those of all iterations are one buffer
    terms = L * -(-J // 4) * 4 * 16 * (4 * iters - 1)  # what parents add to dV, launch_triton.new_terms
    most = min(
        (2**31 - 1) // responsibilities - 39, (2**31 - 1) // max(terms, C * 16), 8 * ((2**16 - 1) // -(-J // 16))
    )
    return max(0, most // 8 * 8)  # the terms have room for whole eights, rows of r for up to 39 images more


def check_fusable(a: Tensor, pose: Tensor, W: Tensor, prior: Prior | None = None) -> None:
    if pose.shape[-2:] != (4, 4):
        raise ValueError(f"the fused kernels are for 4x4 poses, got {tuple(pose.shape[-2:])}; use backend='reference'")
    if not a.dtype == pose.dtype == W.dtype == torch.float32:
        raise TypeError(
            f"the fused kernels compute in float32, got {a.dtype}, {pose.dtype} and {W.dtype}; use backend='reference'"
        )
    if prior is not None and prior.precision == "full":
        raise ValueError("the fused kernels are for diagonal precisions; use backend='reference' for precision='full'")
    if a.is_cuda or triton_interprets():
        return
    if a.device.type != "cpu":
        raise ValueError(f"the fused kernels need a CUDA device or a CPU, got {a.device}; use backend='reference'")
    if why := why_no_library():
        raise ValueError(f"the fused kernels could not be built for this CPU: {why}; use backend='reference'")


def images_first(x: Tensor) -> Tensor:  # l j n
    return x.permute(2, 0, 1)


def poses_first(x: Tensor) -> Tensor:  # l j p n r
    return x.permute(3, 0, 1, 2, 4).flatten(3)

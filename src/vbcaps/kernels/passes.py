"""What the fused routings share: the makings of votes, which device runs the passes over them, and views of results."""

import functools
import os
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import Tensor

from vbcaps.kernels.cpu import build
from vbcaps.prior import Prior
from vbcaps.routing.fields import Fields

Args = ParamSpec("Args")
Result = TypeVar("Result")


class Votes(NamedTuple):
    """What makes the votes. How poses and responsibilities lie in memory is up to the device: see below."""

    a: Tensor  # c n
    pose: Tensor  # c n r p, or on a CPU c p n r
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


def constant(question: Callable[Args, Result]) -> Callable[Args, Result]:
    """Mark a question whose answer ``torch.compile`` may take for a constant.

    ``torch.compiler.assume_constant_result`` sets the same mark, but imports the compiler for it: 0.7 seconds that
    whoever does not compile would wait.
    """
    question._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return question


def passes_for(a: Tensor) -> ModuleType:
    """The passes for this tensor's device; on a CPU those of Triton too, where its interpreter is asked for."""
    if for_triton(a):
        from vbcaps.kernels.triton import launch as of_triton

        return of_triton
    from vbcaps.kernels.cpu import launch as of_cpu

    return of_cpu


def for_triton(x: Tensor) -> bool:
    return x.is_cuda or triton_interprets()


@constant
def triton_interprets() -> bool:
    """Whether Triton's kernels run on a CPU too, in its interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@constant
def why_no_library() -> str | None:
    """Why there are no kernels for CPUs on this machine, or None where there are."""
    return build.why_no_library()


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
    slots = I // fields.types * -(-fields.types // 4) * 4
    responsibilities = max(iters - 1, 1) * L * slots * -(-J // 4) * 4  # r, and dz: of all iterations one buffer
    terms = L * -(-J // 4) * 4 * 16 * (4 * iters - 1)  # what parents add to dV, launch_triton.new_terms
    most = min((2**31 - 1) // max(responsibilities, terms, C * 16), 8 * ((2**16 - 1) // -(-J // 16)))
    return max(0, most // 8 * 8)  # the terms have room for whole eights


def check_fusable(a: Tensor, pose: Tensor, W: Tensor, prior: Prior | None = None) -> None:
    if pose.shape[-2:] != (4, 4):
        raise ValueError(f"the fused kernels are for 4x4 poses, got {tuple(pose.shape[-2:])}; use backend='reference'")
    if not a.dtype == pose.dtype == W.dtype == torch.float32:
        raise TypeError(
            f"the fused kernels compute in float32, got {a.dtype}, {pose.dtype} and {W.dtype}; use backend='reference'"
        )
    if prior is not None and prior.precision == "full":
        raise ValueError("the fused kernels are for diagonal precisions; use backend='reference' for precision='full'")
    if for_triton(a):
        return
    if a.device.type != "cpu":
        raise ValueError(f"the fused kernels need a CUDA device or a CPU, got {a.device}; use backend='reference'")
    if why := why_no_library():
        raise ValueError(f"the fused kernels could not be built for this CPU: {why}; use backend='reference'")


# --- how memory lies ----------------------------------------------------------------------------------------------
# A GPU reads the four entries of a column together (mma_triton.py), a CPU those of a row for several images.


def lay_poses(pose: Tensor) -> Tensor:  # n c p r
    """The same as the kernels read it."""
    return pose.permute((1, 0, 3, 2) if for_triton(pose) else (1, 2, 0, 3)).contiguous()


def new_poses(like: Tensor, *shape: int) -> Tensor:
    """Room for poses ``... n``, laid out so."""
    *others, N = shape
    return like.new_empty(*others, N, 4, 4) if for_triton(like) else like.new_empty(*others, 4, N, 4)


def as_poses(x: Tensor) -> Tensor:
    """What was laid out so as ``... n p r``."""
    return x.mT if for_triton(x) else x.transpose(-2, -3)


def new_slots(like: Tensor, T: int, fields: tuple[int, int], J: int, N: int, types: int) -> Tensor:
    """Room for T times a number for each slot, type and image, ``t l u g n k 4`` or on a CPU ``t l i j n``."""
    L, I = fields
    if not for_triton(like):
        return like.new_empty(T, L, I, J, N)
    return like.new_empty(T, L, I // types * -(-types // 4), -(-J // 4), N, 4, 4)


def as_slots(x: Tensor, I: int, J: int, types: int) -> Tensor:
    """One of these as ``n l i j``."""
    if not for_triton(x):
        return x.permute(3, 0, 1, 2)
    L, _, _, N, _, _ = x.shape
    x = x.permute(3, 0, 1, 5, 2, 4).reshape(N, L, I // types, -(-types // 4) * 4, -(-J // 4) * 4)
    return x[:, :, :, :types, :J].reshape(N, L, I, J)


def images_first(x: Tensor) -> Tensor:  # l j n
    return x.permute(2, 0, 1)


def poses_first(x: Tensor) -> Tensor:  # as `new_poses` of l j n
    """``n l j p r``"""
    return as_poses(x).permute(2, 0, 1, 3, 4)


def op_inputs(a: Tensor, pose: Tensor, W: Tensor, place: Tensor | None, fields: Fields) -> tuple[Any, ...]:
    """What every fused op takes first: ``a: n c`` and ``pose: n c p r`` as the kernels read them, and the fields."""
    place = None if place is None else place.contiguous()
    return a.T.contiguous(), lay_poses(pose), W.contiguous(), place, fields.child, fields.parents, fields.seen


def responsibilities(r: Tensor, fields: Fields, J: int, N: int) -> Tensor:
    """Those of the last iteration, ``n l i j``; none were made where there was one only.

    Kernels have no gradient of them, and where one is asked for that is an error. Compiled code asks for all.
    """
    L, I = fields.child.shape
    last = as_slots(r[-1], I, J, fields.types) if len(r) else r.new_full((), 1 / J)
    last = last.detach() if torch.compiler.is_compiling() else NoGradient.apply(last)
    return last.expand(N, L, I, J)


class NoGradient(torch.autograd.Function):
    """The same, but for its gradient: one that would be wrong is refused."""

    @staticmethod
    def forward(ctx: Any, r: Tensor) -> Tensor:
        return r.view_as(r)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise RuntimeError("fused routing has no gradient of its responsibilities; use backend='reference' for it")


def refuse_twice(ctx: Any, *grads: Tensor | None) -> None:
    """The backward pass of a backward pass."""
    raise RuntimeError("fused routing can be differentiated once only; use backend='reference' for second derivatives")

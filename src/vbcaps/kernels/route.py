"""From poses to parents: the one place that chooses between the reference and its fast twins.

Axes: n image, c child, l parent position, i child slot, j parent type, p q r rows and
columns of a pose, g row of weights.
"""

import functools
import importlib.util
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from vbcaps.kernels.passes import most_images, triton_interprets, why_no_library
from vbcaps.routing.dynamic import Agreement
from vbcaps.routing.em import Mixture
from vbcaps.routing.fields import Fields
from vbcaps.routing.vb import Posterior

BACKENDS = ("auto", "reference", "triton", "cpu")
HAS_TRITON = importlib.util.find_spec("triton") is not None  # torch.compile cannot trace the question


def route(
    routing: nn.Module,
    a: Tensor,
    pose: Tensor,
    W: Tensor,
    fields: Fields,
    place: Tensor | None = None,
    backend: str = "auto",
    posterior: bool = True,
) -> tuple[Tensor, Tensor, Posterior | Mixture | Agreement | None]:
    """Route children with activations ``a: n c`` and ``pose: n c p q`` by ``routing``.

    Gives the logit ``n l j``, the means ``n l j p r`` and, unless ``posterior=False``, what else the routing knows.

    Slot i votes with the weights of row ``i mod g`` of ``W: g j q r``. ``place: i 2`` is added to the first two
    entries of the right-hand column of each vote.
    """
    if backend == "auto":
        use_kernels = can_fuse(routing, a, pose, W, fields)
    else:
        use_kernels = backend != "reference"
        check_backend(backend, routing, a)
        if backend == "triton":
            check_images(len(a), W, fields, routing)
    if use_kernels:
        fused: Callable = routing.fused  # type: ignore[assignment]
        return fused(a, pose, W, fields, place, posterior)
    child = fields.child
    slots = child.flatten()
    V = votes(pose.index_select(1, slots).unflatten(1, child.shape), W.repeat(child.shape[1] // len(W), 1, 1, 1))
    if place is not None:
        V = V + at_right_hand_column(place, pose.shape[-1])[:, None]
    logit, q = routing(a.index_select(1, slots).unflatten(1, child.shape), V, child, a.shape[1])
    return logit, q.m.unflatten(-1, pose.shape[-2:]), q if posterior else None


def can_fuse(routing: nn.Module, a: Tensor, pose: Tensor, W: Tensor, fields: Fields) -> bool:
    """Whether kernels cover this call: float32, 4x4 poses, a routing that has them, an ordinary pass forward and back;
    Triton, or a compiler for a CPU."""
    if (
        not getattr(routing, "fusable", False)
        or pose.shape[-2:] != (4, 4)
        or not a.dtype == pose.dtype == W.dtype == torch.float32
        or torch.compiler.is_exporting()
        or transformed()
    ):
        return False
    if a.is_cuda:
        return HAS_TRITON and len(a) <= most_images(W, fields, routing.iters)  # type: ignore[arg-type]
    if a.device.type != "cpu" or triton_interprets():
        return False
    why = why_no_library()
    if why and not torch.compiler.is_compiling():
        warn_of_reference(why)
    return why is None


@functools.cache
def warn_of_reference(why: str) -> None:
    """Warn, once in a process, that routing does without its kernels."""
    warnings.warn(
        f"there are no kernels for this CPU, so capsule routing takes some 20 times as long: {why}. Install a C++ "
        "compiler (g++ or clang++; CXX names another), or choose backend='reference' to do without this warning",
        stacklevel=2,
    )


def transformed() -> bool:
    """Whether ``torch.func`` or forward-mode differentiation is at work: kernels know ``backward`` alone."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0


def check_backend(backend: str, routing: nn.Module, a: Tensor) -> None:
    """An error where this backend was asked for but is not to be had."""
    if backend == "reference":
        return
    if not hasattr(routing, "fused"):
        raise ValueError(f"backend={backend!r} has no kernels for {type(routing).__name__}; use backend='reference'")
    if transformed():
        raise ValueError(
            f"backend={backend!r} has no kernels for torch.func and forward-mode derivatives; use backend='auto'"
        )
    if backend == "triton" and not (a.is_cuda or triton_interprets()):
        raise ValueError(f"backend='triton' needs a CUDA device, got {a.device}; use backend='auto'")
    if backend == "cpu":
        if a.device.type != "cpu":
            raise ValueError(f"backend='cpu' needs tensors on the CPU, got {a.device}; use backend='auto'")
        if triton_interprets():
            raise ValueError("backend='cpu', but TRITON_INTERPRET=1 gives every tensor on the CPU to Triton")
        if why := why_no_library():
            raise ValueError(f"backend='cpu', but its kernels could not be built: {why}; use backend='reference'")


def check_images(images: int, W: Tensor, fields: Fields, routing: nn.Module) -> None:
    most = most_images(W, fields, routing.iters)  # type: ignore[arg-type]
    if images > most:
        raise ValueError(
            f"backend='triton' addresses at most {most} images in this layer, got {images}: its offsets are 32 bits; "
            "use smaller batches or backend='reference'"
        )


def votes(pose: Tensor, W: Tensor) -> Tensor:
    """V = M W: ``n l i p q``, ``i j q r`` to ``n l i j (p r)``.

    In memory the votes of a parent lie together, ``n l j i d``: the order in which every pass of routing is a matrix
    product (benchmarks/layouts.py).
    """
    V = torch.einsum("nlipq,ijqr->nljipr", pose, W)
    return V.flatten(4).transpose(2, 3)


def at_right_hand_column(place: Tensor, p: int) -> Tensor:
    """``i 2`` to ``i (p r)``: zero but for the first two entries of the right-hand column."""
    column = torch.eye(p * p, dtype=place.dtype, device=place.device)[[p - 1, (2 * p - 1) % (p * p)]]
    return place @ column

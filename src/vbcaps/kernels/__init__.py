"""The door to the kernels: which backend serves a call. No layer, network or routing asks for a device itself.

Axes: n image, c child, l field (parent position), i child slot, j parent type, p q r rows and columns of a pose, g row
of weights.
"""

import functools
import importlib.util
import warnings
from collections.abc import Callable

import torch
from torch import Tensor, nn

from vbcaps.kernels.backend import Backend, Normaliser, NormedCapsules, Running, Votes, backend_named
from vbcaps.routing import Agreement, DynamicRouting, EMRouting, Mixture, Posterior, VBRouting
from vbcaps.routing.fields import Fields
from vbcaps.routing.votes import in_fields

BACKENDS = ("auto", "reference", "plain", "triton", "cpu")
HAS_TRITON = importlib.util.find_spec("triton") is not None  # torch.compile cannot trace find_spec
Routed = tuple[Tensor, Tensor, Posterior | Mixture | Agreement | None]


def route(
    routing: nn.Module,
    a: Tensor,
    pose: Tensor,
    W: Tensor,
    fields: Fields,
    coordinates: Tensor | None = None,
    backend: str = "auto",
    posterior: bool = True,
) -> Routed:
    """Route children to parents, by kernels or by the readable reference.

    Args:
        routing: ``VBRouting``, ``EMRouting``, ``DynamicRouting``, or a module with the same call signature.
        a: activations of the children, ``n c``.
        pose: their poses, ``n c p q``.
        W: transformations, ``g j q r``; slot i votes with row ``i mod g``.
        fields: the receptive fields.
        coordinates: added to the first two entries of the right-hand column of each vote, ``i 2``.
        backend: one of ``BACKENDS``.
        posterior: whether to return the posterior as well.

    Returns:
        The logit of each parent, ``n l j``, the means ``n l j p r``, and the posterior or None.
    """
    run = backend_for(backend, routing, a, pose, W, fields)
    if run is None or a.shape[0] == 0:  # no kernel is launched for no images
        logit, q = routing(*in_fields(a, pose, W, fields, coordinates), fields.child, a.shape[1])
        return logit, q.m.unflatten(-1, pose.shape[-2:]), q if posterior else None
    coordinates = None if coordinates is None else coordinates.contiguous()
    index = (fields.child, fields.parents, fields.seen, fields.types)
    v = Votes(a.T.contiguous(), run.lay_poses(pose), W.contiguous(), coordinates, *index, run.name)
    return _fused(routing)(routing, v, posterior)


def backend_for(name: str, routing: nn.Module, a: Tensor, pose: Tensor, W: Tensor, fields: Fields) -> Backend | None:
    """Return the backend that serves a call, or None for the reference: the only branch between them.

    ``"auto"`` takes the device's kernels if they cover the call, and the reference otherwise. A backend that is asked
    for by name and does not cover the call raises an error that states the reason.
    """
    if name == "reference" or (name == "auto" and torch.compiler.is_exporting()):
        return None
    run = native(a) if name == "auto" else backend_named(name)
    error = refusal(run, routing, a, pose, W, fields)
    if error is None:
        return run
    if name != "auto":
        raise error
    if "could not be built" in str(error) and not torch.compiler.is_compiling():
        _warn_of_reference(str(error))
    if a.is_cuda and not HAS_TRITON and not torch.compiler.is_compiling():
        _warn_of_triton()
    return None


@functools.cache
def _warn_of_reference(why: str) -> None:
    """Warn once per process that routing runs without its kernels."""
    warnings.warn(
        f"capsule routing is about 20 times slower on this CPU than it could be: {why}. Install a C++ compiler "
        "(g++ or clang++, or set CXX to another one), or a wheel of vbcaps for this system, which has the kernels. To "
        "silence this warning, choose backend='reference'",
        stacklevel=2,
    )


@functools.cache
def _warn_of_triton() -> None:
    """Warn once per process that routing on a GPU runs without its kernels."""
    warnings.warn(
        "capsule routing is much slower on this GPU than it could be, because triton is not installed: pip install "
        "'vbcaps[gpu]'. To silence this warning, choose backend='reference'",
        stacklevel=2,
    )


def refusal(
    run: Backend, routing: nn.Module, a: Tensor, pose: Tensor, W: Tensor, fields: Fields
) -> ValueError | TypeError | None:
    """Return the error that says why a backend does not cover a call, or None if it does."""
    if type(routing) not in (VBRouting, EMRouting, DynamicRouting):
        why = f"has no kernels for {type(routing).__name__}"
    elif isinstance(routing, VBRouting) and routing.prior.precision == "full":
        why = "has kernels for diagonal precisions only, not for precision='full'"
    elif pose.shape[-2:] != (4, 4):
        why = f"has kernels for 4x4 poses only, got {tuple(pose.shape[-2:])}"
    elif not a.dtype == pose.dtype == W.dtype or a.dtype not in run.dtypes:
        got, able = f"{a.dtype}, {pose.dtype} and {W.dtype}", " or ".join(map(str, run.dtypes))
        return TypeError(f"backend={run.name!r} computes in {able}, got {got}; use backend='reference'")
    elif _transformed():
        why = "has no kernels for torch.func and forward-mode derivatives"
    else:
        found = run.refusal(a, W, fields, routing.iters)  # type: ignore[arg-type]
        if found is None:
            return None
        why = found
    return ValueError(f"backend={run.name!r} {why}; use backend='auto' or backend='reference'")


def native(x: Tensor) -> Backend:
    """Return the backend for a tensor's device; ``refusal`` says whether it can serve a call."""
    return backend_named("triton" if x.is_cuda and HAS_TRITON else "cpu")


def around(x: Tensor, backend: str) -> Backend:
    """Return the backend that prepares the input of routing and normalises its result."""
    readable = backend in ("reference", "plain") or torch.compiler.is_exporting() or x.shape[0] == 0 or _transformed()
    return backend_named("plain") if readable else native(x)


def convolve(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """Convolve a map ``n c h w``, in the memory order and by the library that are fastest on its device."""
    return around(x, "auto").convolve(conv, x)


def primary(
    x: Tensor, types: int, norm_a: Normaliser, norm_pose: Normaliser | None, backend: str = "auto"
) -> NormedCapsules:
    """Make capsules of a map ``n (c p q) + c h w`` of poses and logits, which are normalised.

    Returns:
        Activations and logits ``n h w c`` and poses ``n h w c p q``, in the memory order that routing reads.
    """
    return around(x, backend).primary(x, types, norm_a, norm_pose)


def parents(
    logit: Tensor, m: Tensor, norm_a: Normaliser | None, norm_pose: Normaliser | None, backend: str = "auto"
) -> NormedCapsules:
    """Normalise the logits ``n l j`` and poses ``n l j p q`` that routing gives.

    Returns:
        Activations, logits and poses, in the memory order that routing writes.
    """
    return around(logit, backend).parents(logit, m, norm_a, norm_pose)


def batch_norm(
    x: Tensor,
    running: Running,
    momentum: float,
    eps: float,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """Normalise ``a j ...`` for each j by the batch's statistics, and update the running statistics."""
    return native(x).batch_norm(x, running, momentum, eps, weight, bias)


def _fused(routing: nn.Module) -> Callable[[nn.Module, Votes, bool], Routed]:
    if isinstance(routing, VBRouting):
        from vbcaps.kernels.vb import vb_routing_fused

        return vb_routing_fused  # type: ignore[return-value]
    if isinstance(routing, EMRouting):
        from vbcaps.kernels.em import em_routing_fused

        return em_routing_fused  # type: ignore[return-value]
    from vbcaps.kernels.dynamic import dynamic_routing_fused

    return dynamic_routing_fused  # type: ignore[return-value]


def _transformed() -> bool:
    """Return whether ``torch.func`` or forward-mode differentiation is active; the kernels support neither."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0

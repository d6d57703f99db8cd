"""Calls from Python to C: how tensors, numbers and structures are passed."""

import ctypes
from typing import Any

import torch
from torch import Tensor

from vbcaps.kernels.backend import PriorTensors, Votes
from vbcaps.kernels.cpu.library import library


class _Votes(ctypes.Structure):
    """`Votes` of passes.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("a", "pose", "W", "coordinates", "child", "parents", "seen")),
        *((name, ctypes.c_int64) for name in ("C", "N", "L", "I", "J", "G", "S", "types", "threads")),
    ]  # fmt: skip


class _VBPrior(ctypes.Structure):
    """`VBPrior` of vb.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("alpha0", "kappa0", "nu0", "inv_psi0")),
        *((f"{name}_step", ctypes.c_int64) for name in ("alpha0", "kappa0", "nu0", "inv_psi0")),
    ]  # fmt: skip


def given(x: Tensor) -> Tensor:
    """Return the user's tensor in the layout and type that the kernels read."""
    return x.to(torch.float32).contiguous()


def call(name: str, *arguments: Any) -> None:
    """Call a C function: tensors go as pointers, numbers as int64_t or double, Votes and priors as structures."""
    kept: list[Any] = []  # keeps the memory that C reads alive until the call returns
    getattr(library(), name)(*[_as_c(argument, kept) for argument in arguments])


def _as_c(argument: Any, kept: list[Any]) -> Any:
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(pointer(argument))
    if argument is None:
        return None
    if isinstance(argument, int):
        return ctypes.c_int64(argument)
    if isinstance(argument, float):
        return ctypes.c_double(argument)
    structure = _votes(argument) if isinstance(argument, Votes) else _prior(argument, kept)
    kept.append(structure)
    return ctypes.byref(structure)


def pointer(x: Tensor) -> int:
    if not x.is_contiguous() or x.device.type != "cpu":
        raise ValueError(f"expected a contiguous tensor on the CPU, got strides {x.stride()} on {x.device}")
    return x.data_ptr()


def _votes(v: Votes) -> _Votes:
    pointers = [None if x is None else pointer(x) for x in v[:7]]
    return _Votes(*pointers, *v.sizes, len(v.W), v.parents.shape[1], v.types, torch.get_num_threads())


def _prior(prior: PriorTensors, kept: list[Any]) -> _VBPrior:
    tensors = [given(x) for x in (prior.alpha0, prior.kappa0, prior.nu0, prior.inv_psi0)]
    kept.extend(tensors)
    steps = (*(x.ndim for x in tensors[:3]), 16 * (tensors[3].ndim - 1))  # 0 where all types share it
    return _VBPrior(*map(pointer, tensors), *steps)

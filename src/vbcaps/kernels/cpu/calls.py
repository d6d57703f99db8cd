"""Calls from Python to C: how tensors, numbers and structures are passed."""

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from vbcaps.kernels.backend import PriorTensors, Votes
from vbcaps.kernels.cpu.library import library
from vbcaps.kernels.triton import constant


class _Votes(ctypes.Structure):
    """`Votes` of lanes.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("a", "pose", "W", "coordinates", "child", "parents", "seen", "laid")),
        *((name, ctypes.c_int64) for name in ("C", "N", "L", "I", "J", "G", "S", "types", "threads")),
    ]  # fmt: skip
    weights: Tensor | None  # the memory of `laid`


class _VBPrior(ctypes.Structure):
    """`VBPrior` of vb.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("alpha0", "kappa0", "nu0", "inv_psi0", "m0")),
        *((f"{name}_step", ctypes.c_int64) for name in ("alpha0", "kappa0", "nu0", "inv_psi0", "m0")),
    ]  # fmt: skip


def given(x: Tensor) -> Tensor:
    """Return the user's tensor in the layout and type that the kernels read."""
    return x if x.dtype is torch.float32 and x.is_contiguous() else x.to(torch.float32).contiguous()


def call(name: str, *arguments: Any) -> None:
    """Call a C function: tensors go as pointers, numbers as int64_t or double, Votes and priors as structures.

    An argument of a function always has the same kind, so the first call tells ctypes the types of all.
    """
    function = getattr(library(), name)
    kept: list[Any] = []  # keeps the memory that C reads alive until the call returns
    if function.argtypes is None:
        function.argtypes = [_TYPES.get(type(argument), ctypes.c_void_p) for argument in arguments]
    function(*[x if type(x) in _NUMBERS else _address(x, kept) for x in arguments])


_TYPES = {int: ctypes.c_int64, bool: ctypes.c_int64, float: ctypes.c_double}
_NUMBERS = frozenset((*_TYPES, type(None)))  # with None, which is a null pointer


def _address(argument: Any, kept: list[Any]) -> int:
    """Return the address of a tensor or of a structure, which is made here."""
    kind = type(argument)  # asking isinstance whether anything is a Tensor takes microseconds
    if kind is Votes or kind is PriorTensors:
        structure = _votes(argument) if kind is Votes else _prior(argument, kept)
        kept.append(structure)
        return ctypes.addressof(structure)
    return pointer(argument)


def pointer(x: Tensor) -> int:
    if not x.is_contiguous() or not x.is_cpu:
        raise ValueError(f"expected a contiguous tensor on the CPU, got strides {x.stride()} on {x.device}")
    return x.data_ptr()


class _Present(threading.local):
    """The votes that this thread routes, and their structure."""

    votes: Votes | None = None
    structure: _Votes | None = None


_PRESENT = _Present()


@contextmanager
def prepared(v: Votes) -> Iterator[None]:
    """Make the structure of the votes once for all calls within the context."""
    before = _PRESENT.votes, _PRESENT.structure
    _PRESENT.votes, _PRESENT.structure = v, _votes(v)
    try:
        yield
    finally:
        _PRESENT.votes, _PRESENT.structure = before


def _votes(v: Votes) -> _Votes:
    """Return the structure; where vectors are of types, the weights are laid in their order."""
    if v is _PRESENT.votes and _PRESENT.structure is not None:
        return _PRESENT.structure
    pointers = [None if x is None else pointer(x) for x in v[:7]]
    G = len(v.W)
    structure = _Votes(*pointers, None, *v.sizes, G, v.parents.shape[1], v.types, torch.get_num_threads())
    of_types, units, _, width = vectors(v)
    if of_types:
        structure.weights = v.W.new_empty(G, units, 16, width)
        structure.laid = pointer(structure.weights)
        lay = library().lay_weights
        lay.argtypes = [ctypes.c_void_p]
        lay(ctypes.addressof(structure))
    return structure


@constant
def lanes() -> int:
    """Return how many numbers a vector of the kernels holds."""
    return library().lanes()


def vectors(v: Votes) -> tuple[bool, int, int, int]:
    """Return ``types``, ``units`` and ``blocks`` of ``Lanes`` (lanes.h), and the numbers of a vector."""
    _, N, _, _, J = v.sizes
    width = lanes()
    units, blocks = -(-J // width), -(-N // width)
    return (True, units, N, width) if N * units < J * blocks else (False, J, blocks, width)


def _prior(prior: PriorTensors, kept: list[Any]) -> _VBPrior:
    tensors = [given(x) for x in (prior.alpha0, prior.kappa0, prior.nu0, prior.inv_psi0, prior.m0)]
    kept.extend(tensors)
    # 0 where all types share it
    steps = (*(x.ndim for x in tensors[:3]), *(16 * (x.ndim - 1) for x in tensors[3:]))
    return _VBPrior(*map(pointer, tensors), *steps)

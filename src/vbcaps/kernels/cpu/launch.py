"""Calls of the C++ kernels: the passes of passes.cpp, and what VB and EM do at a parent.

The first call compiles them, in a few seconds, into the user's cache folder; later processes load what lies there.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from vbcaps.kernels.cpu.build import library
from vbcaps.kernels.passes import Votes


class _Votes(ctypes.Structure):
    """`Votes` of passes.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("a", "pose", "W", "place", "child", "parents", "seen")),
        *((name, ctypes.c_int64) for name in ("C", "N", "L", "I", "J", "G", "S", "types", "threads")),
    ]  # fmt: skip


class _VBPrior(ctypes.Structure):
    """`VBPrior` of vb.cpp."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("alpha0", "kappa0", "nu0", "inv_psi0")),
        *((f"{name}_step", ctypes.c_int64) for name in ("alpha0", "kappa0", "nu0", "inv_psi0")),
    ]  # fmt: skip


def parts(a: Tensor, L: int, I: int, J: int, types: int) -> int:
    """Into how many parts sums over slots are dealt."""
    return 1


def moments(v: Votes, r: Tensor | None, k0: Tensor, m0: Tensor, rj: Tensor, m: Tensor, spread: Tensor) -> None:
    k0, m0 = _given(k0), _given(m0)
    _call("moments", v, r, k0, k0.ndim, m0, 16 * (m0.ndim - 1), rj, m, spread)


def scores(v: Votes, m: Tensor, lam: Tensor, K: Tensor, r: Tensor) -> None:
    _call("scores", v, m, lam, K, r)


def agreements(v: Votes, w: Tensor, r: Tensor) -> None:
    """The softmax of z_ij = sum_d w_jd V_ijd: that sum is how a responsibility answers to a gradient w of sum R V."""
    nothing = torch.zeros_like(w)
    _call("agreements", v, nothing, w, nothing, nothing, r)


def grad_responsibilities(
    v: Votes,
    m: Tensor,
    gb: Tensor,
    gS: Tensor,
    gr: Tensor,
    r: Tensor | None,
    dR: Tensor,
    s: Tensor,
    da: Tensor,
    add: bool,
) -> None:
    _call("grad_responsibilities", v, m, gb, gS, gr, r, dR, s, da, add)


def grad_scores(v: Votes, m: Tensor, r: Tensor, s: Tensor, dR: Tensor, U0: Tensor, U1: Tensor, U2: Tensor) -> None:
    _call("grad_scores", v, m, r, s, dR, U0, U1, U2)


def new_terms(v: Votes, iters: int) -> Tensor:
    """Room for what each parent adds to dV, as `grad_votes` reads it: lanes that are off must not be NaN."""
    _, N, L, _, J = v.sizes
    lanes = library().lanes()
    of_types = lanes > 1 and N == 1 and J > 1
    cells = L * (-(-J // lanes) if of_types else J * -(-N // lanes))
    new = v.a.new_zeros if of_types and J % lanes else v.a.new_empty
    return new(cells, 4 * iters - 1, 16 * lanes)


def terms(coef: Tensor, t: int, iters: int) -> tuple[tuple[Tensor, int, int], None]:
    """What `vb_grad_parent` and `em_grad_parent` need to know to write the terms of iteration t."""
    return (coef, iters, t), None


def put_term(coef: Tensor, k: int, x: Tensor, iters: int) -> None:
    """Write the poses ``x: l j p n r`` as term k."""
    L, J, _, N, _ = x.shape
    _call("put_term", coef, iters, k, x, L, J, N)


def grad_votes(v: Votes, coef: Tensor, r: Tensor, dz: Tensor, iters: int) -> tuple[Tensor, Tensor]:
    dpose, dW = v.pose.new_empty(v.pose.shape), v.W.new_empty(v.W.shape)
    _call("grad_votes", v, coef, r, dz, iters, dpose, dW)
    return dpose, dW


# --- VB at a parent -----------------------------------------------------------------------------------------------

VBPrior = tuple[Tensor, Tensor, Tensor, Tensor]  # alpha0, kappa0, nu0, inv_psi0


def vb_parent(
    rj: Tensor, spread: Tensor, prior: VBPrior, S: Tensor, lam: Tensor, K: Tensor, wishart: bool
) -> None:  # fmt: skip
    """`spread` is one part: S itself."""
    threads = torch.get_num_threads()
    _call("vb_parent", rj, S, prior, None, None, lam, K, *[None] * 7, *rj.shape, wishart, False, threads)


def vb_logit(
    rj: Tensor, spread: Tensor, prior: VBPrior, beta_a: Tensor, beta_u: Tensor, S: Tensor, logit: Tensor, alpha: Tensor,
    kappa: Tensor, psi: Tensor, nu: Tensor, E_ln_pi: Tensor, E_lndet: Tensor, wishart: bool, paper: bool,
) -> None:  # fmt: skip
    _call(
        "vb_parent", rj, S, prior, _given(beta_a), _given(beta_u), None, None, logit, alpha, kappa, psi, nu, E_ln_pi,
        E_lndet, *rj.shape, wishart, paper, torch.get_num_threads(),
    )  # fmt: skip


def vb_grad_parent(
    rj: Tensor, S: Tensor, m: Tensor, last_m: Tensor, prior: VBPrior, beta_u: Tensor, last: tuple | None, U: tuple,
    gb: Tensor, gS: Tensor, gr: Tensor, coef: tuple[Tensor, int, int], _: None, gamma: Tensor | None,
    wishart: bool, paper: bool,
) -> None:  # fmt: skip
    """`last`: gradients of logit, m, alpha, kappa, psi, nu (None where there is none), and E[ln pi], E[ln det]."""
    _call(
        "vb_grad_parent", rj, S, m, last_m, prior, _given(beta_u), *(last or [None] * 8), *U, gb, gS, gr, *coef,
        *([None] * 3 if gamma is None else gamma), *rj.shape, wishart, paper, torch.get_num_threads(),
    )  # fmt: skip


# --- EM at a parent -----------------------------------------------------------------------------------------------


def em_parent(
    rj: Tensor, spread: Tensor, beta_a: Tensor, beta_u: Tensor, S: Tensor, lam: Tensor, K: Tensor,
    inverse_temperature: float, min_var: float,
) -> None:  # fmt: skip
    _call(
        "em_parent", rj, S, _given(beta_a), _given(beta_u), lam, K, None, None, float(inverse_temperature),
        float(min_var), *rj.shape, torch.get_num_threads(),
    )  # fmt: skip


def em_logit(
    rj: Tensor, spread: Tensor, beta_a: Tensor, beta_u: Tensor, S: Tensor, logit: Tensor, var: Tensor,
    inverse_temperature: float, min_var: float,
) -> None:  # fmt: skip
    _call(
        "em_parent", rj, S, _given(beta_a), _given(beta_u), None, None, logit, var, float(inverse_temperature),
        float(min_var), *rj.shape, torch.get_num_threads(),
    )  # fmt: skip


def em_grad_parent(
    rj: Tensor, S: Tensor, m: Tensor, last_m: Tensor, beta_a: Tensor, beta_u: Tensor, last: tuple | None, U: tuple,
    gb: Tensor, gS: Tensor, gr: Tensor, coef: tuple[Tensor, int, int], _: None, glogit: Tensor,
    inverse_temperature: float, min_var: float,
) -> None:  # fmt: skip
    """`last`: gradients of logit, m, var (None where there is none)."""
    _call(
        "em_grad_parent", rj, S, m, last_m, _given(beta_a), _given(beta_u), *(last or [None] * 3), *U, gb, gS, gr,
        *coef, glogit, float(inverse_temperature), float(min_var), *rj.shape, torch.get_num_threads(),
    )  # fmt: skip


# --- from Python to C ---------------------------------------------------------------------------------------------


def _given(x: Tensor) -> Tensor:
    """What the user gave, as the kernels read it."""
    return x.to(torch.float32).contiguous()


def _call(name: str, *arguments: Any) -> None:
    """Tensors go as pointers, numbers as int64_t or double, Votes and priors as structures."""
    kept: list[Any] = []  # what C reads stays alive until it returns
    getattr(library(), name)(*(_as_c(argument, kept) for argument in arguments))


def _as_c(argument: Any, kept: list[Any]) -> Any:
    if argument is None:
        return ctypes.c_void_p(None)
    if isinstance(argument, Tensor):
        return ctypes.c_void_p(_pointer(argument))
    if isinstance(argument, int):
        return ctypes.c_int64(argument)
    if isinstance(argument, float):
        return ctypes.c_double(argument)
    structure = _votes(argument, kept) if isinstance(argument, Votes) else _prior(argument, kept)
    kept.append(structure)
    return ctypes.byref(structure)


def _pointer(x: Tensor) -> int:
    if not x.is_contiguous() or x.device.type != "cpu":
        raise ValueError(f"expected a contiguous tensor on the CPU, got strides {x.stride()} on {x.device}")
    return x.data_ptr()


def _votes(v: Votes, kept: list[Any]) -> _Votes:
    tensors = [None if x is None else x.contiguous() for x in v[:7]]
    kept.extend(tensors)
    pointers = (None if x is None else _pointer(x) for x in tensors)
    return _Votes(*pointers, *v.sizes, len(v.W), v.parents.shape[1], v.types, torch.get_num_threads())


def _prior(prior: VBPrior, kept: list[Any]) -> _VBPrior:
    tensors = [_given(x) for x in prior]
    kept.extend(tensors)
    steps = (*(x.ndim for x in tensors[:3]), 16 * (tensors[3].ndim - 1))  # 0 where all types share it
    return _VBPrior(*map(_pointer, tensors), *steps)

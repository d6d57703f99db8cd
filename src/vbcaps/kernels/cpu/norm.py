"""BatchNorm of capsules by norm.cpp, in one pass that also changes the memory order: the fast twin of kernels/norm.py.

Axes: n image, h w row and column, l parent position, j type, p r rows and columns of a pose, f channel.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vbcaps.kernels.backend import TypeNorm
from vbcaps.kernels.cpu.calls import call
from vbcaps.kernels.cpu.memory import MEMORY
from vbcaps.kernels.norm import take_in
from vbcaps.kernels.ops import Op

NONE, GIVEN, BATCH = range(3)  # as in norm.cpp


class Scheme(NamedTuple):
    """How the C++ kernels normalise: not at all, by given statistics, or by those of the batch."""

    how: int
    mean: Tensor | None  # j
    var: Tensor | None  # j
    eps: float


class Made(NamedTuple):
    """The outputs of the operators, in the memory order of routing: of primary capsules the axes l are h w."""

    logit: Tensor  # l j n
    a: Tensor  # l j n
    pose: Tensor  # l j p r n
    found_logit: Tensor  # 3 j     mean, unbiased variance and factor; empty without BatchNorm
    found_pose: Tensor  # 3 j


class PrimaryCall(NamedTuple):
    """The inputs of `primary`."""

    x: Tensor  # n h w f    entries of the poses (j p r), then logits j
    of_logit: Scheme
    of_pose: Scheme


class ParentsCall(NamedTuple):
    """The inputs of `parents`."""

    logit: Tensor  # l j n
    pose: Tensor  # l j p r n
    of_logit: Scheme
    of_pose: Scheme


class Kept(NamedTuple):
    """What the backward passes need of the forward pass."""

    made: Made
    how_logit: int
    how_pose: int


class BackCall(NamedTuple):
    """The inputs of the backward operators."""

    kept: Kept
    da: Tensor | None  # l j n
    dlogit: Tensor | None  # l j n
    dpose: Tensor | None  # l j p r n


class PrimaryBack(NamedTuple):
    """The outputs of the backward operator of `primary`."""

    x: Tensor  # n h w f
    logit: Tensor  # l j n    of the normalised logits


class ParentsBack(NamedTuple):
    """The outputs of the backward operator of `parents`."""

    logit: Tensor  # l j n
    pose: Tensor  # l j p r n; empty where no gradient came in


def new_made(like: Tensor, positions: tuple[int, ...], J: int, N: int, of_logit: Scheme, of_pose: Scheme) -> Made:
    """Allocate the outputs of a forward operator."""
    logit, a = like.new_empty(*positions, J, N), like.new_empty(*positions, J, N)
    pose = MEMORY.empty(like, *positions, J, 4, 4, N)
    return Made(logit, a, pose, *(like.new_empty(3, J if scheme.how else 0) for scheme in (of_logit, of_pose)))


def new_primary(given: PrimaryCall) -> Made:
    n, h, w, f = given.x.shape
    return new_made(given.x, (h, w), f // 17, n, given.of_logit, given.of_pose)


def run_primary(given: PrimaryCall) -> Made:
    """Make primary capsules."""
    made, (n, h, w, f) = new_primary(given), given.x.shape
    call("norm_primary", given.x, *given.of_logit, *given.of_pose, *made, n, h * w, f // 17, torch.get_num_threads())
    return made


def new_parents(given: ParentsCall) -> Made:
    L, J, N = given.logit.shape
    return new_made(given.logit, (L,), J, N, given.of_logit, given.of_pose)


def run_parents(given: ParentsCall) -> Made:
    """Normalise the parents of a layer."""
    made, inputs = new_parents(given), (given.logit, given.pose)
    call("norm_parents", *inputs, *given.of_logit, *given.of_pose, *made, *given.logit.shape, torch.get_num_threads())
    return made


def new_primary_back(given: BackCall) -> PrimaryBack:
    a = given.kept.made.a
    *positions, J, N = a.shape
    return PrimaryBack(MEMORY.empty(a, N, *positions, 17 * J), torch.empty_like(a))


def run_primary_back(given: BackCall) -> PrimaryBack:
    """Compute the gradient of the features."""
    (made, *how), back = given.kept, new_primary_back(given)
    N, h, w, f = back.x.shape
    call("norm_primary_grad", *made, *how, *given[1:], *back, N, h * w, f // 17, torch.get_num_threads())
    return back


def new_parents_back(given: BackCall) -> ParentsBack:
    made = given.kept.made
    return ParentsBack(
        torch.empty_like(made.logit),
        made.pose.new_empty(0) if given.dpose is None else MEMORY.empty(made.pose, *made.pose.shape),
    )


def run_parents_back(given: BackCall) -> ParentsBack:
    """Compute the gradients of the parents before they were normalised."""
    (made, *how), back = given.kept, new_parents_back(given)
    call("norm_parents_grad", *made, *how, *given[1:], *back, *made.logit.shape, torch.get_num_threads())
    return back


primary = Op("vbcaps::cpu_primary", PrimaryCall, Made, run_primary, new_primary)
parents = Op("vbcaps::cpu_parents", ParentsCall, Made, run_parents, new_parents)
primary_back = Op("vbcaps::cpu_primary_backward", BackCall, PrimaryBack, run_primary_back, new_primary_back)
parents_back = Op("vbcaps::cpu_parents_backward", BackCall, ParentsBack, run_parents_back, new_parents_back)
primary_back.refuse_to_differentiate()
parents_back.refuse_to_differentiate()


def keep(given: PrimaryCall | ParentsCall, made: Made) -> Kept:
    return Kept(made, given.of_logit.how, given.of_pose.how)


def differentiate_primary(kept: Kept, given: Made, wanted: dict[str, bool]) -> dict[str, Tensor | None]:
    """Return the gradient of the features, by name."""
    return dict(x=primary_back(BackCall(kept, given.a, given.logit, given.pose)).x)


def differentiate_parents(kept: Kept, given: Made, wanted: dict[str, bool]) -> dict[str, Tensor | None]:
    """Return the gradients of the parents, by name."""
    back = parents_back(BackCall(kept, given.a, given.logit, given.pose))
    return dict(logit=back.logit, pose=None if given.pose is None else back.pose)


primary.differentiate(keep, differentiate_primary)
parents.differentiate(keep, differentiate_parents)


def scheme(norm: TypeNorm | None) -> Scheme:
    """Return what the C++ kernels need to know of a BatchNorm."""
    if norm is None:
        return Scheme(NONE, None, None, 0.0)
    if norm.of_batch:
        return Scheme(BATCH, None, None, norm.eps)
    return Scheme(GIVEN, norm.running.mean, norm.running.var, norm.eps)


def normalise_primary(x: Tensor, of_logit: TypeNorm | None, of_pose: TypeNorm | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return activations and logits ``n h w j`` and poses ``n h w j p r`` of features ``n f h w``."""
    made = primary(PrimaryCall(x.permute(0, 2, 3, 1).contiguous(), scheme(of_logit), scheme(of_pose)))
    update_running(made, of_logit, of_pose)
    return made.a.permute(3, 0, 1, 2), made.logit.permute(3, 0, 1, 2), made.pose.permute(5, 0, 1, 2, 3, 4)


def normalise_parents(
    logit: Tensor, m: Tensor, of_logit: TypeNorm | None, of_pose: TypeNorm | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return activations and logits ``n l j`` and poses ``n l j p r`` of parents."""
    laid = logit.permute(1, 2, 0).contiguous(), m.permute(1, 2, 3, 4, 0).contiguous()
    made = parents(ParentsCall(*laid, scheme(of_logit), scheme(of_pose)))
    update_running(made, of_logit, of_pose)
    a, normed, pose = made.a.permute(2, 0, 1), made.logit.permute(2, 0, 1), made.pose.permute(4, 0, 1, 2, 3)
    if logit.shape[1] == 1:  # classes, whose result goes to the user, who may want to view or save it
        a, normed, pose = a.contiguous(), normed.contiguous(), pose.contiguous()
    return a, normed, pose


def update_running(made: Made, of_logit: TypeNorm | None, of_pose: TypeNorm | None) -> None:
    """Take the statistics of the batch into the running ones."""
    for norm, found in ((of_logit, made.found_logit), (of_pose, made.found_pose)):
        if norm is not None and norm.of_batch:
            take_in(norm.running, found[0], found[1], norm.momentum)

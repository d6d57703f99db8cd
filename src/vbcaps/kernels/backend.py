"""The contract of a backend: the passes over votes, the updates of parents between them, and the memory layout.

Routing is one loop, forward and backward (``order.py``), over passes that mean the same on every backend. Votes are
not stored between passes: each pass recomputes ``V_ij = M_i W_ij`` from the poses and weights in ``Votes``.

Axes: n image, c child, l field (parent position), i child slot in a field, j parent type, p q r rows and columns of a
pose, g row of weights, t iteration, s slots of a child, u partial sums, which are added where they are read.

"poses l j n" below is a tensor that holds a 4x4 matrix for each l, j and n, in a memory order that the backend chooses
(``new_poses``, ``as_poses``); "slots l i j n" holds a number for each slot, type and image (``new_slots``,
``as_slots``). Every other tensor is contiguous, with its axes in the order given here. All tensors have one floating
type (``dtypes``), except the index maps of ``Votes``.
"""

from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn

from vbcaps.routing.fields import Fields


class Votes(NamedTuple):
    """The tensors from which a backend computes the votes."""

    a: Tensor  # c n             activations
    pose: Tensor  # poses c n
    W: Tensor  # g j q r         slot i uses row i mod g
    coordinates: Tensor | None  # i 2    added to the first two entries of a vote's last column
    child: Tensor  # l i         int64: the child in each slot
    parents: Tensor  # c s       int32: the slots (l I + i) that hold a child, then -1
    seen: Tensor  # c            int32: the number of these slots
    types: int  # number of child types at one position
    backend: str  # the backend that chose the memory order

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """Return C, N, L, I and J."""
        return (*self.a.shape, *self.child.shape, self.W.shape[1])


class Moments(NamedTuple):
    """The moments of each parent's votes in one iteration."""

    rj: Tensor  # l j n          sum_i R_ij with R_ij = a_i r_ij
    m: Tensor  # poses l j n     (sum_i R_ij V_ij + k0 m0) / (k0 + r_j)
    S: Tensor  # poses l j n     sum_i R_ij (V_ij - m_j)^2 + k0 (m0 - m_j)^2


class MomentGrads(NamedTuple):
    """The gradients of a loss with respect to the moments of one iteration."""

    gb: Tensor  # poses l j n    of sum_i R_ij V_ij: dm_j / (k0 + r_j)
    gS: Tensor  # poses l j n    of S_j
    gr: Tensor  # l j n          of r_j, without its effect on m_j and S_j


class ScoreSums(NamedTuple):
    """The sums of dz_ij x^k over a parent's slots, x = V_ij - m_j, as u partial sums."""

    U0: Tensor  # u l j n
    U1: Tensor  # poses u l j n
    U2: Tensor  # poses u l j n


class PriorTensors(NamedTuple):
    """VB's prior; a parameter that all types share has no axis j."""

    alpha0: Tensor  # () or j
    m0: Tensor  # d or j d
    kappa0: Tensor  # () or j
    inv_psi0: Tensor  # d or j d
    nu0: Tensor  # () or j


class Running(NamedTuple):
    """The running statistics of BatchNorm; each batch updates them in place."""

    mean: Tensor  # j
    var: Tensor  # j
    batches: Tensor  # () int64


class TypeNorm(NamedTuple):
    """A BatchNorm without affine, which has one mean and variance for each type of capsule."""

    running: Running
    momentum: float
    eps: float
    of_batch: bool  # normalise by the statistics of the batch, and take them into the running ones


class Normaliser(Protocol):
    """A BatchNorm module over axis 1, ``n j`` or ``n j d``."""

    def __call__(self, x: Tensor) -> Tensor:
        """Normalise and, in training, update the running statistics."""

    def plan(self, values: int) -> TypeNorm | None:
        """Return what a call would do with so many values of each type, or None if only a call can do it."""


NormedCapsules = tuple[Tensor, Tensor, Tensor]  # activations, logits, poses


class VBRule(NamedTuple):
    """How VB routing turns its posterior into assignments and activations."""

    wishart: bool  # E[ln|Lambda|] is the Wishart's
    activation: str  # one of routing.vb.ACTIVATIONS
    temper: float  # softness of the assignment


class VBResult(NamedTuple):
    """VB's result for each parent, besides its moments."""

    logit: Tensor  # l j n
    alpha: Tensor  # l j n
    kappa: Tensor  # l j n
    psi: Tensor  # poses l j n
    nu: Tensor  # l j n
    E_ln_pi: Tensor  # l j n
    E_lndet: Tensor  # l j n


class VBResultGrads(NamedTuple):
    """The gradients of a loss with respect to VB's result, and two expectations that the backward pass reuses."""

    logit: Tensor  # l j n
    m: Tensor | None  # poses l j n
    alpha: Tensor | None  # l j n
    kappa: Tensor | None  # l j n
    psi: Tensor | None  # poses l j n
    nu: Tensor | None  # l j n
    E_ln_pi: Tensor  # l j n
    E_lndet: Tensor  # l j n


class EMResultGrads(NamedTuple):
    """The gradients of a loss with respect to EM's logit, means and variances."""

    logit: Tensor  # l j n
    m: Tensor | None  # poses l j n
    var: Tensor | None  # poses l j n


def backend_named(name: str) -> "Backend":
    """Return the backend ``"triton"``, ``"cpu"`` or ``"plain"``, imported on first use."""
    if name not in _LOADED:
        if name == "triton":
            try:
                from vbcaps.kernels.triton.launch import Triton
            except ImportError as error:
                raise ValueError("backend='triton' needs triton: pip install 'vbcaps[gpu]'") from error
            _LOADED[name] = Triton()
        elif name == "cpu":
            from vbcaps.kernels.cpu.launch import Cpu

            _LOADED[name] = Cpu()
        elif name == "plain":
            from vbcaps.kernels.plain import Plain

            _LOADED[name] = Plain()
        else:
            raise ValueError(f"backend must be 'auto', 'reference', 'plain', 'triton' or 'cpu', got {name!r}")
    return _LOADED[name]


_LOADED: dict[str, "Backend"] = {}


class Backend(Protocol):
    """The passes over votes for one kind of device. Methods write into tensors that the caller provides."""

    name: str
    dtypes: tuple[torch.dtype, ...]

    # --- coverage ---------------------------------------------------------------------------------------------------

    def refusal(self, a: Tensor, W: Tensor, fields: Fields, iters: int) -> str | None:
        """Return why this backend cannot serve a call on this machine, device and batch, or None if it can."""

    # --- around the routing -----------------------------------------------------------------------------------------

    def convolve(self, conv: nn.Conv2d, x: Tensor) -> Tensor:
        """Convolve a map ``n c h w``, in the memory order and by the library that are fastest on the device."""

    def primary(self, x: Tensor, types: int, norm_a: Normaliser, norm_pose: Normaliser | None) -> NormedCapsules:
        """Make capsules of a map ``n f h w`` that holds entries of poses (c p q), then logits c.

        Return activations and logits ``n h w c`` and poses ``n h w c p q`` in the memory order that the passes read.
        """

    def parents(
        self, logit: Tensor, m: Tensor, norm_a: Normaliser | None, norm_pose: Normaliser | None
    ) -> NormedCapsules:
        """Normalise ``n l j`` and ``n l j p q`` in the memory order that the passes write, which is that of the result:
        activations, logits and poses."""

    def batch_norm(
        self, x: Tensor, running: Running, momentum: float, eps: float, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """Normalise ``a j ...`` for each j by the batch's statistics, and update the running statistics."""

    # --- memory ---------------------------------------------------------------------------------------------------

    def lay_poses(self, pose: Tensor) -> Tensor:
        """Return ``n c p r`` as poses c n."""

    def new_poses(self, like: Tensor, *shape: int) -> Tensor:
        """Allocate poses of this shape, whose last axis counts images."""

    def as_poses(self, x: Tensor) -> Tensor:
        """Return a view of poses as ``... n p r``."""

    def new_slots(self, v: Votes, T: int) -> Tensor:
        """Allocate T tensors of slots l i j n as one; ``[t]`` selects one of them."""

    def as_slots(self, x: Tensor, v: Votes) -> Tensor:
        """Return slots l i j n as ``n l i j``."""

    def new_terms(self, v: Votes, iters: int) -> Tensor:
        """Allocate the terms that each parent adds to the gradient of a vote (see ``grad_votes``)."""

    def parts(self, v: Votes) -> int:
        """Return the number of partial sums into which a sum over the slots of a field is split."""

    # --- forward passes over votes ----------------------------------------------------------------------------------

    def prepared(self, v: Votes) -> AbstractContextManager[None]:
        """Return a context in which passes over these votes are called; they may share what they make of them."""

    def moments(self, v: Votes, r: Tensor | None, k0: Tensor, m0: Tensor, rj: Tensor, m: Tensor, S: Tensor) -> None:
        """Write ``rj: l j n``, ``m: poses l j n`` and, in parts, ``S: poses u l j n``, as ``Moments`` defines them.

        ``r`` are slots l i j n, or None for 1/J everywhere; ``k0: ()`` or ``j``, ``m0: d`` or ``j d``.
        """

    def scores(self, v: Votes, m: Tensor, lam: Tensor, K: Tensor, r: Tensor) -> None:
        """Write ``r_ij``, the softmax of ``K_j - 1/2 sum_d lam_jd (V_ijd - m_jd)^2`` over all parents of a child.

        ``m`` and ``lam`` are poses l j n, ``K`` is ``l j n``, ``r`` are slots l i j n.
        """

    def agreements(self, v: Votes, w: Tensor, r: Tensor) -> None:
        """Write ``r_ij``, the softmax of ``sum_d w_jd V_ijd`` over all parents of a child; ``w`` are poses l j n."""

    # --- backward passes over votes ---------------------------------------------------------------------------------

    def grad_responsibilities(
        self,
        v: Votes,
        m: Tensor,
        g: MomentGrads,
        r: Tensor | None,
        dR: Tensor,
        s: Tensor,
        da: Tensor,
        add: bool,
    ) -> None:
        """Go back through the moments of one iteration to responsibilities and activations.

        Write ``dR_ij = gr_j + sum_d x_d (gb_jd + gS_jd x_d)`` with ``x = V_ij - m_j`` (slots l i j n), its sum over
        all parents of a child ``s_c = sum r_ij dR_ij`` (``c n``), and ``da = s``, or ``da += s`` where ``add``.
        """

    def grad_scores(self, v: Votes, m: Tensor, r: Tensor, s: Tensor, dR: Tensor, U: ScoreSums) -> None:
        """Go back through the softmax: write ``dz_ij = r_ij a_i (dR_ij - s_i)`` over ``dR``, and its sums ``U``."""

    def put_term(self, terms: Tensor, k: int, x: Tensor, iters: int) -> None:
        """Write the poses l j n ``x`` as term k."""

    def grad_votes(
        self,
        v: Votes,
        terms: Tensor,
        r: Tensor,
        dz: Tensor,
        iters: int,
        uniform: tuple[Tensor, MomentGrads] | None,
        da: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of poses (poses c n) and weights (``g j q r``).

        The gradient of a vote is ``dV_ij = sum_k s_kij (E_kj + C_kj (V_ij - m_j))``, where k counts the T moments,
        which a vote enters with ``s = R_ij``, then the T - 1 scores, which it enters with ``s = dz_ij``. Terms hold
        ``E_0, C_0, E_1, ..., -m``, 4 T - 1 poses for each parent.

        With ``uniform``, the means of the first iteration and the gradients of its moments, add to ``da`` what goes
        back through its responsibilities, which are 1/J, like ``grad_responsibilities``.
        """

    # --- VB at a parent ---------------------------------------------------------------------------------------------

    def vb_update(
        self, moments: Moments, spread: Tensor, prior: PriorTensors, rule: VBRule, lam: Tensor, K: Tensor
    ) -> None:
        """Update q(pi, mu, Lambda): from ``rj`` and the parts of S, write S, and ``lam = nu psi`` and K for ``scores``,
        both times ``rule.temper``."""

    def vb_logit(
        self,
        moments: Moments,
        spread: Tensor,
        prior: PriorTensors,
        rule: VBRule,
        beta_a: Tensor,
        beta_u: Tensor,
        result: VBResult,
    ) -> None:
        """Update q(pi, mu, Lambda) in the last iteration: write S and the result."""

    def vb_grad(
        self,
        moments: Moments,
        last_m: Tensor,
        prior: PriorTensors,
        rule: VBRule,
        beta_u: Tensor,
        result: VBResultGrads | None,
        U: ScoreSums,
        g: MomentGrads,
        terms: Tensor,
        t: int,
        iters: int,
        gamma: Tensor | None,
    ) -> None:
        """Go back through the update of iteration t: write ``g`` and the terms of its moments and scores.

        ``result`` holds the gradients of the result if t is the last iteration; otherwise it is None, and ``U`` holds
        the sums of the score gradients of iteration t. ``gamma: 3 l j n`` receives the gradients of alpha, kappa and
        nu, from which those of the prior follow.
        """

    # --- EM at a parent ---------------------------------------------------------------------------------------------

    def em_update(
        self,
        moments: Moments,
        spread: Tensor,
        beta_a: Tensor,
        beta_u: Tensor,
        inverse_temperature: float,
        min_var: float,
        lam: Tensor,
        K: Tensor,
    ) -> None:
        """Take an M-step: from ``rj`` and the parts of S, write S, ``lam = 1 / var`` and K for ``scores``."""

    def em_logit(
        self,
        moments: Moments,
        spread: Tensor,
        beta_a: Tensor,
        beta_u: Tensor,
        inverse_temperature: float,
        min_var: float,
        logit: Tensor,
        var: Tensor,
    ) -> None:
        """Take the last M-step: write S, the logit and the variance."""

    def em_grad(
        self,
        moments: Moments,
        last_m: Tensor,
        beta_a: Tensor,
        beta_u: Tensor,
        inverse_temperature: float,
        min_var: float,
        result: EMResultGrads | None,
        U: ScoreSums,
        g: MomentGrads,
        terms: Tensor,
        t: int,
        iters: int,
        glogit: Tensor,
    ) -> None:
        """Go back through the M-step of iteration t like ``vb_grad``; write the gradient ``glogit`` of ``beta_a``."""

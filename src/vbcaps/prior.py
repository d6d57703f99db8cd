"""The conjugate priors of a capsule layer, fixed or learned."""

from collections.abc import Collection
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vbcaps.distributions import cholesky

PRECISIONS = ("gamma", "wishart", "full")
NAMES = ("alpha0", "m0", "kappa0", "Psi0", "nu0")
SMALLEST, LARGEST = 1e-6, 1e6  # beyond these, gradients of psi and ln leave float32


class PriorValues(NamedTuple):
    """The values of a `Prior` at one moment; each broadcasts against ``n l j`` or ``n l j d`` (``n l j d e``).

    Args:
        alpha0: a number, or one for each type ``j``.
        m0: ``d`` or ``j d``.
        kappa0: a number, or one for each type ``j``.
        inv_Psi0: the inverse of Psi0, ``d`` or ``j d``; for a full precision ``d e`` or ``j d e``.
        nu0: a number, or one for each type ``j``.
    """

    alpha0: Tensor
    m0: Tensor
    kappa0: Tensor
    inv_Psi0: Tensor
    nu0: Tensor


class Prior(nn.Module):
    r"""The conjugate priors of a capsule layer, fixed or learned.

    They are $\pi \sim Dir(\alpha_0)$, $\mu \sim N(m_0, (\kappa_0 \Lambda)^{-1})$ and $\Lambda \sim Wi(\Psi_0, \nu_0)$.
    The defaults are the paper's uninformative ones. Calling a prior gives its present `PriorValues`.

    Args:
        alpha0, kappa0: a number, or one for each parent type.
        m0: a number, ``(dim,)`` or ``(types, dim)``.
        Psi0: a number (times the identity) or the diagonal as ``(dim,)``; for ``"gamma"`` and ``"wishart"`` also
            ``(types, dim)``, for ``"full"`` a matrix ``(dim, dim)`` or ``(types, dim, dim)``.
        nu0: a number, or one for each parent type; without it ``dim + 1``.
        dim: entries of a pose.
        precision: what Lambda is. ``"gamma"``: diagonal, a Gaussian-Gamma for each pose entry, the paper's equation for
            diagonal precisions. ``"wishart"``: diagonal, but $E[\ln \det \Lambda]$ is the Wishart's, as in the authors'
            released code. ``"full"``: a full matrix with a Gaussian-Wishart.
        learn: names of the parameters that backpropagation trains (the paper's empirical Bayes), ``"all"`` for every
            one. Positive ones pass through softplus, ``Psi0`` of ``"full"`` through its Cholesky factor.
        dtype: of the values; without it PyTorch's default.

    Example:
        >>> prior = Prior(alpha0=0.1, Psi0=2.0, learn=["alpha0"])
        >>> prior().inv_Psi0[:2]
        tensor([0.5000, 0.5000])
        >>> [name for name, _ in prior.named_parameters()]
        ['alpha0_raw']
    """

    def __init__(
        self,
        alpha0: float | Tensor = 1.0,
        m0: float | Tensor = 0.0,
        kappa0: float | Tensor = 1.0,
        Psi0: float | Tensor = 1.0,
        nu0: float | Tensor | None = None,
        *,
        dim: int = 16,
        precision: str = "gamma",
        learn: Collection[str] | str = (),
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        if precision not in PRECISIONS:
            raise ValueError(f"precision must be one of {PRECISIONS}, got {precision!r}")
        if dim < 1:
            raise ValueError(f"dim must be at least 1, got {dim}")
        learn = NAMES if learn == "all" else (learn,) if isinstance(learn, str) else tuple(learn)
        if unknown := set(learn) - set(NAMES):
            raise ValueError(f"learn must name some of {NAMES}, or be 'all'; got {sorted(unknown)}")
        self.dim, self.precision = dim, precision
        self.learn = tuple(name for name in NAMES if name in learn)
        # A Wishart needs more than dim - 1 degrees of freedom, a Gamma more than none.
        self.nu0_above = 0.0 if precision == "gamma" else dim - 1.0

        dtype = dtype or torch.get_default_dtype()
        given = dict(alpha0=alpha0, m0=m0, kappa0=kappa0, Psi0=Psi0, nu0=dim + 1.0 if nu0 is None else nu0)
        for name, number in given.items():
            where = number.device if isinstance(number, Tensor) else torch.get_default_device()
            value = torch.as_tensor(number, dtype=dtype, device="cpu")  # on "meta" there is no value to check
            value = self._checked(name, value.detach().clone()).to(where)
            if name in self.learn:
                self.register_parameter(f"{name}_raw", nn.Parameter(self._to_raw(name, value)))
            else:
                self.register_buffer(f"{name}_fixed", value)

    def forward(self) -> PriorValues:
        return PriorValues(*(self._value(name) for name in NAMES))

    def _kept(self, name: str) -> Tensor:
        """Return the parameter or buffer, which ``torch.func.functional_call`` may have swapped for a tensor."""
        return getattr(self, f"{name}_raw" if name in self.learn else f"{name}_fixed")

    def _value(self, name: str) -> Tensor:
        raw = self._kept(name)
        if name not in self.learn:
            return raw
        if name == "m0":
            return raw
        if name == "Psi0" and self.precision == "full":
            L = raw.tril(-1) + torch.diag_embed(_softplus(raw.diagonal(dim1=-2, dim2=-1)))
            return L @ L.mT
        if name == "nu0":  # at least just over half a last digit of dim - 1, so that the sum does not round down to it
            half_digit = 0.51 * torch.finfo(raw.dtype).eps * self.nu0_above
            return _softplus(raw).clamp_min(half_digit) + self.nu0_above
        return _softplus(raw)

    def _to_raw(self, name: str, value: Tensor) -> Tensor:
        """Return the raw number from which ``_value`` computes this value."""
        if name == "m0":
            return value.clone()
        if name == "Psi0" and self.precision == "full":
            L = cholesky(value)
            return L.tril(-1) + torch.diag_embed(_inverse_softplus(L.diagonal(dim1=-2, dim2=-1)))
        return _inverse_softplus(value - (self.nu0_above if name == "nu0" else 0.0))

    def _checked(self, name: str, value: Tensor) -> Tensor:
        """Return the value in the shape it is kept in (``Psi0`` as its inverse); raise an error where it is illegal."""
        D, shape = self.dim, tuple(value.shape)
        if name in ("alpha0", "kappa0", "nu0"):
            if value.ndim > 1:
                raise ValueError(f"{name} must be a number or one per parent type, got shape {shape}")
            above = self.nu0_above if name == "nu0" else 0.0
            rounding = 0.5 * torch.finfo(value.dtype).eps * above  # of a nu0 just above dim - 1
            if not (bool((value > above).all()) and _within(value - above + rounding)):
                needs = f"above dim - 1 = {above:g} for precision={self.precision!r}" if above else "positive"
                raise ValueError(
                    f"{name} must be {needs}, {SMALLEST:g} to {LARGEST:g} beyond {above:g}; got {value.tolist()}"
                )
            return value
        if name == "m0":
            if value.ndim > 2 or (value.ndim and value.shape[-1] != D):
                raise ValueError(f"m0 must be a number, ({D},) or (types, {D}), got shape {shape}")
            if not bool((value.abs() <= LARGEST).all()):
                raise ValueError(f"m0 must be finite and at most {LARGEST:g} in size, got {value.tolist()}")
            return value.expand(D).clone() if value.ndim == 0 else value.clone()
        return self._checked_Psi0(value)

    def _checked_Psi0(self, Psi0: Tensor) -> Tensor:
        D, shape = self.dim, tuple(Psi0.shape)
        Psi0 = Psi0.expand(D) if Psi0.ndim == 0 else Psi0
        if self.precision != "full":
            if Psi0.ndim > 2 or Psi0.shape[-1] != D:
                raise ValueError(f"Psi0 must be a number, ({D},) or (types, {D}), got shape {shape}")
            if not _within(Psi0):
                raise ValueError(f"Psi0 must be positive, {SMALLEST:g} to {LARGEST:g}, got {Psi0.tolist()}")
            return 1 / Psi0
        if shape == (D,) or shape == ():
            Psi0 = torch.diag(Psi0)
        if Psi0.ndim not in (2, 3) or Psi0.shape[-2:] != (D, D):
            raise ValueError(f"Psi0 must be a number, ({D},), ({D}, {D}) or (types, {D}, {D}), got shape {shape}")
        if not torch.allclose(Psi0, Psi0.mT):  # False for NaN too
            raise ValueError("Psi0 must be a symmetric matrix of finite numbers")
        spectrum = torch.linalg.eigvalsh(Psi0.double())
        if not _within(spectrum):
            raise ValueError(
                f"Psi0 must be positive definite, eigenvalues {SMALLEST:g} to {LARGEST:g}, "
                f"got {spectrum.min():g} to {spectrum.max():g}"
            )
        inv_Psi0 = torch.linalg.inv(Psi0.double()).to(Psi0.dtype)
        if not bool((torch.linalg.eigvalsh(inv_Psi0.double()) > 0).all()):
            raise ValueError(f"Psi0 is too ill-conditioned for {Psi0.dtype}, give dtype=torch.float64")
        return inv_Psi0

    def types(self) -> dict[str, int]:
        """Return the number of types for each parameter that was given per type."""
        ranks = dict(alpha0=1, m0=2, kappa0=1, Psi0=3 if self.precision == "full" else 2, nu0=1)
        return {name: len(self._kept(name)) for name in NAMES if self._kept(name).ndim == ranks[name]}

    def extra_repr(self) -> str:
        return f"dim={self.dim}, precision={self.precision!r}, learn={self.learn}"


def _within(value: Tensor) -> bool:
    """Return whether every entry lies in the legal range, with room for rounding at its ends; False for NaN."""
    return bool(((value >= 0.999 * SMALLEST) & (value <= 1.001 * LARGEST)).all())


def _softplus(raw: Tensor) -> Tensor:
    return F.softplus(raw) + SMALLEST / 2  # never 0, however far training pushes


def _inverse_softplus(value: Tensor) -> Tensor:
    y = value.double() - SMALLEST / 2
    return (y + torch.log(-torch.expm1(-y))).to(value.dtype)

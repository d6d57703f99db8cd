"""Capsule routing via Variational Bayes."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vbcaps.layers import Capsules, ClassCaps, ConvCaps, PrimaryCaps
    from vbcaps.models import CapsNet, CapsVAE, ConvNet, Reconstruction
    from vbcaps.prior import Prior
    from vbcaps.weights.shipped import load

__version__ = "0.2.0"

__all__ = [
    "CapsNet",
    "CapsVAE",
    "Capsules",
    "ClassCaps",
    "ConvCaps",
    "ConvNet",
    "PrimaryCaps",
    "Prior",
    "Reconstruction",
    "__version__",
    "load",
]

_HOME = dict(
    CapsNet="models", CapsVAE="models", ConvNet="models", Reconstruction="models", Prior="prior", load="weights.shipped"
)  # fmt: skip


def __getattr__(name: str) -> Any:
    """PyTorch takes seconds to import, so `vbcaps --help` does without: a name is imported when it is asked for."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME.get(name, 'layers')}"), name)
    globals()[name] = value
    return value

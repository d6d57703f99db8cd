"""Capsule routing via Variational Bayes."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vbcaps.classifier import CapsuleClassifier
    from vbcaps.heads import BackboneCapsNet, CapsHead
    from vbcaps.layers import Capsules, ClassCaps, ConvCaps, PrimaryCaps
    from vbcaps.models import CapsNet, ConvNet
    from vbcaps.prior import Prior
    from vbcaps.training.folds import fit_folds
    from vbcaps.training.loop import fit, fit_seeds
    from vbcaps.training.recipes import recipe
    from vbcaps.vae import CapsVAE, Reconstruction
    from vbcaps.weights.export import export
    from vbcaps.weights.find import list_models
    from vbcaps.weights.model import Model, load

__version__ = "0.2.0"

__all__ = [
    "BackboneCapsNet",
    "CapsHead",
    "CapsNet",
    "CapsVAE",
    "CapsuleClassifier",
    "Capsules",
    "ClassCaps",
    "ConvCaps",
    "ConvNet",
    "Model",
    "PrimaryCaps",
    "Prior",
    "Reconstruction",
    "__version__",
    "export",
    "fit",
    "fit_folds",
    "fit_seeds",
    "list_models",
    "load",
    "recipe",
]

_HOME = dict(
    BackboneCapsNet="heads", CapsHead="heads",
    CapsNet="models", ConvNet="models", CapsVAE="vae", Reconstruction="vae", Prior="prior",
    Capsules="layers", ClassCaps="layers", ConvCaps="layers", PrimaryCaps="layers",
    Model="weights.model", load="weights.model", list_models="weights.find", export="weights.export",
    CapsuleClassifier="classifier",
    fit="training.loop", fit_folds="training.folds", fit_seeds="training.loop", recipe="training.recipes",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a name on first use, because PyTorch takes seconds to import and `vbcaps --help` does not need it."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

"""Capsule routing via Variational Bayes."""

from vbcaps.layers import Capsules, ClassCaps, ConvCaps, PrimaryCaps
from vbcaps.models import CapsNet, CapsVAE, Reconstruction
from vbcaps.prior import Prior

__version__ = "0.1.0"

__all__ = [
    "CapsNet",
    "CapsVAE",
    "Capsules",
    "ClassCaps",
    "ConvCaps",
    "PrimaryCaps",
    "Prior",
    "Reconstruction",
    "__version__",
]

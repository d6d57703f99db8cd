"""What a network knows about its own answers: calibrated probabilities, scores of uncertainty, and their measures."""

from vbcaps.uncertainty.density import Density, fit_density
from vbcaps.uncertainty.familiar import percentiles, remember_familiar
from vbcaps.uncertainty.metrics import (
    Reliability,
    RiskCoverage,
    aupr,
    auroc,
    brier,
    ece,
    fpr95,
    nll,
    reliability,
    risk_coverage,
    surprise,
)
from vbcaps.uncertainty.predictive import (
    fit_temperature,
    mean_field_probabilities,
    probability_samples,
    sampled_probabilities,
)
from vbcaps.uncertainty.scores import Look, fit_densities, head_scores, look, posterior_scores, scores

__all__ = [
    "Density",
    "Look",
    "Reliability",
    "RiskCoverage",
    "aupr",
    "auroc",
    "brier",
    "ece",
    "fit_densities",
    "fit_density",
    "fit_temperature",
    "fpr95",
    "head_scores",
    "look",
    "mean_field_probabilities",
    "nll",
    "percentiles",
    "posterior_scores",
    "probability_samples",
    "reliability",
    "remember_familiar",
    "risk_coverage",
    "sampled_probabilities",
    "scores",
    "surprise",
]

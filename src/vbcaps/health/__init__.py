"""What a network's capsules do: who gets the votes, how sharp routing is, and what poses say."""

from vbcaps.health.measure import ITERATIONS, health
from vbcaps.health.record import AtIterations, Health, LayerHealth, Moves, Uniform

__all__ = ["ITERATIONS", "AtIterations", "Health", "LayerHealth", "Moves", "Uniform", "health"]

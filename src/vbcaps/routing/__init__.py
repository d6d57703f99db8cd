"""Routing: one algorithm, one file, one signature."""

from vbcaps.routing.dynamic import Agreement, DynamicRouting, dynamic_routing
from vbcaps.routing.em import EMRouting, Mixture, em_routing
from vbcaps.routing.vb import ELBO, Posterior, VBRouting, vb_routing

ROUTINGS = {"vb": VBRouting, "em": EMRouting, "dynamic": DynamicRouting}

__all__ = [
    "ELBO",
    "ROUTINGS",
    "Agreement",
    "DynamicRouting",
    "EMRouting",
    "Mixture",
    "Posterior",
    "VBRouting",
    "dynamic_routing",
    "em_routing",
    "vb_routing",
]

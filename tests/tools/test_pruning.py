"""The effective number of parents, against SciPy; and what the table says of VB and EM."""

import csv
import importlib
import sys
from pathlib import Path

import pytest
import torch
from scipy.stats import entropy

from vbcaps import CapsNet

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))  # as for `python tools/pruning.py`
pruning = importlib.import_module("pruning")


@pytest.mark.parametrize("layer", ["conv_caps2", "class_caps"])
def test_effective_parents_are_those_of_the_entropy(layer):
    net = CapsNet((8, 4, 4, 4), num_classes=3, routing_options=dict(iters=2)).eval()
    with torch.no_grad():
        one = net.trace(torch.randn(2, 2, 32, 32)).layers[layer]
    for found, q in zip(pruning.effective_parents(one), one.iterations, strict=True):
        held = (q.kappa - q.prior.kappa0).double()  # r_j
        want = torch.tensor([entropy(shares) for shares in held.flatten(0, -2)]).exp().mean()
        assert found == pytest.approx(float(want), rel=1e-4)


def test_the_table_shows_that_vb_prunes_and_em_does_not():
    with open(pruning.TABLE, newline="") as file:
        rows = list(csv.DictReader(file))
    at = {(row["routing"], row["layer"], row["iteration"]): float(row["parents"]) for row in rows}
    assert at["vb", "class_caps", "1"] == at["em", "class_caps", "1"] == 10
    assert at["vb", "class_caps", "5"] < 3 < 9 < at["em", "class_caps", "5"]

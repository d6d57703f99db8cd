"""BatchNorm's outputs and running statistics against PyTorch's."""

import pytest
import torch
from torch import nn

from vbcaps.norm import BatchNorm, BatchNorm2d


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.mark.parametrize("make", [lambda: BatchNorm(3), lambda: BatchNorm2d(3)], ids=["capsules", "map"])
def test_batch_norm_is_pytorchs_but_for_how_running_statistics_begin(make):
    """Outputs to the bit; batch t has the share max(t^(-1/3), momentum), and the first replaces 0 and 1."""
    ours, plain = make(), nn.BatchNorm2d(3, affine=False)
    mean, var = torch.zeros(3), torch.ones(3)
    for t in range(1, 7):
        ours.num_batches_tracked.fill_(400 * (t == 6) + t - 1)
        x = 3 * torch.randn(4, 3, 5, 2) + t
        assert torch.equal(ours(x if isinstance(ours, BatchNorm2d) else x.flatten(2)).view_as(x), plain(x))
        share = max(float(ours.num_batches_tracked) ** (-1 / 3), 0.1)
        mean = mean + share * (x.mean((0, 2, 3)) - mean)
        var = var + share * (x.var((0, 2, 3)) - var)
        torch.testing.assert_close(ours.running_mean, mean)
        torch.testing.assert_close(ours.running_var, var)
    assert ours.state_dict().keys() - {"weight", "bias"} == plain.state_dict().keys()

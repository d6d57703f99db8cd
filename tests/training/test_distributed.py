"""Two processes on CPUs (gloo) against one on the joined batch."""

import copy

import numpy as np
import pytest
import torch
from tiny import forked
from torch import nn

from vbcaps.norm import BatchNorm, BatchNorm2d
from vbcaps.training.distributed import Group, synchronise


def test_two_processes_have_the_loss_curve_of_one(tmp_path):
    """Also when one goes on with what two began, and two with what one began, in the middle of an epoch."""
    curves = forked("together", tmp_path)
    alone = curves["alone"]
    assert [row[:3] for row in alone[5:]] == [
        ["step", 2, 1],
        ["step", 2, 2],
        ["step", 2, 3],
        ["step", 2, 4],
        ["epoch", 2, 4],
    ]
    assert alone[0][3] > 1.5 * alone[-1][3]  # it learns, so the curves are not flat
    for name in ("two", "one_then_two", "two_then_one"):
        assert [row[:3] for row in curves[name]] == [row[:3] for row in alone], name
        np.testing.assert_allclose([row[3] for row in curves[name]], [row[3] for row in alone], rtol=2e-4)
        errors = [[row[4] for row in curve if row[4] is not None] for curve in (curves[name], alone)]
        assert len(errors[0]) == 2
        np.testing.assert_allclose(*errors, atol=1.01 / 12, rtol=0)  # of 12 images one may be decided by rounding


def test_group_shares_cover_a_batch():
    parts = [torch.arange(12)[Group(rank, 3).share(12)] for rank in range(3)]
    assert torch.equal(torch.cat(parts), torch.arange(12))


def test_synchronising_keeps_names_values_and_evaluation():
    net = nn.Sequential(nn.Conv2d(2, 3, 1), BatchNorm2d(3), nn.Sequential(nn.Flatten(2), BatchNorm(3)))
    x = torch.randn(4, 2, 5, 5)
    net(x)
    before, expected = {k: v.clone() for k, v in net.state_dict().items()}, net.eval()(x)
    synchronise(net)
    assert net[1].gather is not None
    assert net[2][1].gather is not None
    after = net.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert torch.equal(net(x), expected)
    copy.deepcopy(net)


@pytest.mark.parametrize("kind", [BatchNorm, BatchNorm2d])
def test_normalising_over_processes_has_the_gradient_of_the_joined_batch(kind):
    """Two BatchNorms stand for two processes; each is given the statistics of the other's half."""
    torch.manual_seed(0)
    shape = (6, 3, 4) if kind is BatchNorm else (6, 3, 2, 2)
    x = torch.randn(shape, dtype=torch.float64) + torch.arange(6.0).view(6, *[1] * (len(shape) - 1))
    upstream = torch.randn_like(x)
    together, apart = x.clone().requires_grad_(), x.clone().requires_grad_()
    norm, halves = kind(3).double(), [copy.deepcopy(kind(3)).double() for _ in range(2)]
    if norm.weight is not None:
        for one in (norm, *halves):
            nn.init.constant_(one.weight, 0.7)
            nn.init.constant_(one.bias, -0.2)
    axes = [0, *range(2, len(shape))]
    moments = [torch.stack(torch.var_mean(half, axes, correction=0)[::-1]) for half in apart.split(3)]
    halves[0].gather = lambda mine: torch.stack([mine, moments[1]])
    halves[1].gather = lambda mine: torch.stack([moments[0], mine])
    for _ in range(2):
        expected = norm(together)
        found = torch.cat([one(half) for one, half in zip(halves, apart.split(3), strict=True)])
    torch.testing.assert_close(found, expected)
    for y, leaf in ((expected, together), (found, apart)):
        y.backward(upstream)
        assert leaf.grad.abs().max() > 0.1
    torch.testing.assert_close(apart.grad, together.grad)
    for one in halves:
        for (name, value), other in zip(one.state_dict().items(), norm.state_dict().values(), strict=True):
            torch.testing.assert_close(value, other, msg=name)

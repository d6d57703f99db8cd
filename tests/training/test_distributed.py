"""Two processes on CPUs (gloo) against one on the joined batch."""

import numpy as np
import torch
from tiny import forked
from torch import nn

from vbcaps.layers import BatchNorm
from vbcaps.training import distributed
from vbcaps.training.distributed import Group, SyncNorm, synchronise


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
    net = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.Sequential(nn.Flatten(2), BatchNorm(3)))
    x = torch.randn(4, 2, 5, 5)
    net(x)
    before, expected = {k: v.clone() for k, v in net.state_dict().items()}, net.eval()(x)
    synchronise(net)
    assert sum(isinstance(module, SyncNorm) for module in net.modules()) == 2
    after = net.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)
    torch.testing.assert_close(net(x), expected)


def test_normalising_over_processes_has_the_gradient_of_the_joined_batch(monkeypatch):
    """The messages of the other process are what it would have sent: taken from the joined batch."""
    torch.manual_seed(0)
    x = torch.randn(6, 3, 4, dtype=torch.float64) + torch.arange(6.0)[:, None, None]
    upstream = torch.randn_like(x)
    joined = x.clone().requires_grad_()
    norm = nn.BatchNorm1d(3, affine=False).double()
    expected = norm(joined)
    expected.backward(upstream)

    halves = [slice(0, 3), slice(3, 6)]
    other = torch.stack(torch.var_mean(x[halves[1]], (0, 2), correction=0)[::-1])
    sums = torch.stack([upstream.sum((0, 2)), (upstream * expected.detach()).sum((0, 2))])
    monkeypatch.setattr(distributed.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(
        distributed.dist, "all_gather", lambda every, mine: (every[0].copy_(mine), every[1].copy_(other))
    )
    monkeypatch.setattr(distributed.dist, "all_reduce", lambda mine: mine.copy_(sums))
    half = x[halves[0]].clone().requires_grad_()
    synced = SyncNorm(nn.BatchNorm1d(3, affine=False).double())
    y = synced(half)
    y.backward(upstream[halves[0]])
    torch.testing.assert_close(y, expected[halves[0]])
    torch.testing.assert_close(half.grad, joined.grad[halves[0]])
    torch.testing.assert_close(synced.running_mean, norm.running_mean)
    torch.testing.assert_close(synced.running_var, norm.running_var)

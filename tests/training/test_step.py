"""The captured training step and the BatchNorm kernels."""

import copy
import gc

import pytest
import torch

from vbcaps import CapsNet
from vbcaps.losses import activation_nll_loss
from vbcaps.training.step import TrainStep, no_garbage_collection

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def loss(out, y):
    return activation_nll_loss(out.activations, y)


def problem(steps=4, device="cpu"):
    torch.manual_seed(0)
    net = CapsNet((8, 4, 4, 4), image_size=20).to(device)
    return net, [
        (torch.randn(4, 2, 20, 20, device=device), torch.randint(5, (4,), device=device)) for _ in range(steps)
    ]


def plain_losses(net, batches, optimiser, augment=lambda x: x):
    losses = []
    for x, y in batches:
        optimiser.zero_grad()
        value = loss(net(augment(x)), y)
        value.backward()
        optimiser.step()
        losses.append(value.item())
    return losses


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.SGD])
def test_a_step_is_the_loop_everyone_writes(make):
    net, batches = problem()
    other = copy.deepcopy(net)
    step = TrainStep(net, make(net.parameters(), lr=0.01), loss, augment=lambda x: x.flip(-1))
    expected = plain_losses(other, batches, make(other.parameters(), lr=0.01), lambda x: x.flip(-1))
    assert [step(x, y).item() for x, y in batches] == expected
    for a, b in zip(net.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(a, b)


def test_set_lr_changes_what_the_next_step_does():
    net, batches = problem()
    step = TrainStep(net, torch.optim.SGD(net.parameters(), lr=0.1), loss)
    step.set_lr(0.0)
    before = [p.clone() for p in net.parameters()]
    step(*batches[0])
    assert all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))
    step.set_lr(0.1)
    step(*batches[0])
    assert not all(torch.equal(a, b) for a, b in zip(before, net.parameters(), strict=True))


def test_garbage_is_collected_before_a_capture_and_not_within():
    collected = []

    class Loop:
        def __init__(self):
            self.me = self

        def __del__(self):
            collected.append(1)

    Loop()
    before = gc.isenabled()
    with no_garbage_collection():
        assert collected == [1]
        assert not gc.isenabled()
    assert gc.isenabled() == before
    gc.disable()
    try:
        with no_garbage_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
def test_graphs_of_earlier_runs_do_not_break_a_capture():
    """A graph within a cycle of references is freed when Python collects garbage, which it does here at every turn."""
    thresholds = gc.get_threshold()
    for _ in range(3):
        net, batches = problem(1, DEVICE)
        step = TrainStep(net, torch.optim.SGD(net.parameters(), lr=0.01), loss)
        step.me = step
        gc.set_threshold(1)
        try:
            step(*batches[0])
        finally:
            gc.set_threshold(*thresholds)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.SGD])
def test_a_captured_step_equals_an_eager_one(make):
    """Same losses and weights, although capturing ran the step several times before; a new shape gets a new graph.

    The learning rates are small, since Adam makes steps of full length out of gradients that are only rounding.
    """
    net, batches = problem(8, DEVICE)
    batches = [*batches, (batches[0][0][:3], batches[0][1][:3])]
    other = copy.deepcopy(net)
    eager = TrainStep(other, make(other.parameters(), lr=0.002), loss, capture=False)
    captured = TrainStep(net, make(net.parameters(), lr=0.002), loss)
    for k, (x, y) in enumerate(batches):
        if k == 4:
            eager.set_lr(0.0005)
            captured.set_lr(0.0005)
        torch.testing.assert_close(captured(x, y), eager(x, y), rtol=2e-3, atol=1e-4)
    assert len(captured.graphs) == 2
    assert int(net.class_caps.norm_a.num_batches_tracked) == len(batches)

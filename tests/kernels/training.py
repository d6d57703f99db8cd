"""Trainings by two backends compared, step by step."""

import copy

import torch
from kernels.harness import EPS

from vbcaps import ConvCaps
from vbcaps.losses import activation_nll_loss


def losses_of(net, batches, backend, optimiser):
    """Return the loss of one step for each batch: inputs and labels, whose first axis counts batches."""
    net = copy.deepcopy(net)
    for layer in net.modules():
        if isinstance(layer, ConvCaps):
            layer.backend = backend
    optimiser = optimiser(net.parameters())
    losses = []
    for inputs, label in zip(*batches, strict=True):
        optimiser.zero_grad()
        loss = activation_nll_loss(net(inputs).activations, label)
        loss.backward()
        optimiser.step()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


def stripes(batches, batch=32, classes=4, size=32, device="cpu"):
    """Noisy images of two channels with a bright stripe whose height is the class; eight batches, again and again."""
    gen = torch.Generator().manual_seed(0)
    label = torch.randint(classes, (8, batch), generator=gen)
    x = 0.5 * torch.randn(8, batch, 2, size, size, generator=gen)
    stripe = torch.arange(size) * classes // size == label[..., None]  # batches n rows
    x += stripe[:, :, None, :, None]
    again = torch.arange(batches) % 8
    return x[again].to(device), label[again].to(device)


def assert_training_drifts_no_further_than_rounding(net, backend, batches, lr=1e-4, others=3):
    """Rounding grows as training goes on, in the reference too.

    The stated drift: up to each step, at most four times what it is between references whose first weights differ in
    the last bit. And two trainings with the kernels have the same losses to the bit.
    """

    def losses(net, backend):
        return losses_of(net, batches, backend, lambda p: torch.optim.Adam(p, lr, eps=1e-3))

    kernel, expected = losses(net, backend), losses(net, "reference")
    drift = torch.zeros(len(expected))
    for _ in range(others):
        other = copy.deepcopy(net)
        with torch.no_grad():
            for p in other.parameters():
                p.mul_(1 + EPS * torch.randint(-1, 2, p.shape, device=p.device))
        drift = torch.maximum(drift, (losses(other, "reference") - expected).abs().cummax(0).values)
    assert expected[-1] < expected[0] - 0.1
    assert ((kernel - expected).abs() <= 4 * drift + 1e-5).all()
    assert torch.equal(losses(net, backend), kernel)

"""Small capsule networks whose health is known because it was planted."""

from typing import Any

import torch

from vbcaps import CapsNet, Prior

SIZE = 24


def images(count: int = 96, seed: int = 0) -> torch.Tensor:
    """Return blobs of light in random places, ``n 1 h w``."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(count, 1, SIZE, SIZE, generator=generator) * 0.2
    for image in x:
        y, z = (6 + 8 * torch.rand(2, generator=generator)).int().tolist()
        image[:, y : y + 6, z : z + 4] += 2
    return x


def network(**options: Any) -> CapsNet:
    """Return an untrained network whose BatchNorm has the statistics of `images`, in evaluation mode."""
    torch.manual_seed(1)
    settings: dict[str, Any] = dict(arch=(8, 4, 3, 5), in_channels=1, num_classes=4, image_size=SIZE, norm_logit=False)
    net = CapsNet(**settings | options)
    with torch.no_grad():
        net(images())
    return net.eval()


def answering(sign: float, **routing: Any) -> CapsNet:
    """Return a network whose logits are ``sign`` times a large factor times the votes of each class."""
    net = network(routing_options=dict(activation="paper") | routing, gain=4.0)
    with torch.no_grad():
        net.class_caps.routing.beta_u.fill_(-sign * 1e5)
    return net


def healthy() -> CapsNet:
    """Return a network whose answer is the class with the most votes."""
    return answering(1.0)


def inverted() -> CapsNet:
    """Return a network whose answer is the class with the fewest votes."""
    return answering(-1.0)


def uniform() -> CapsNet:
    """Return a network that routes uniformly: one iteration."""
    return answering(1.0, iters=1)


def dead() -> CapsNet:
    """Return a network whose class poses are those of a prior that no vote can move."""
    return network(routing_options=dict(prior=Prior(m0=torch.linspace(-1, 1, 16), kappa0=1e6)))

"""Small capsule networks whose health is known because it was planted."""

from typing import Any

import torch

from vbcaps import CapsNet, Prior

SIZE = 24

# A record as a weights file has it.
RECORD: dict[str, Any] = dict(
    images=300, routing="vb", activation="released", iters=2, error=0.08, most_votes=0.98, fewest_votes=0.0,
    tightest=0.97, votes_by_rank=[0.6, 0.3, 0.1], entries=16, moving=15.8, moving_others=13.9, moving_all=16.0,
    maps=-0.2, parts=0.43,
    layers=[
        dict(name="primary_caps", types=8, sharpness=None, information=None, information_share=None,
             never_on=0, always_on=0, untaught=0),
        dict(name="conv_caps1", types=8, sharpness=0.1, information=0.2, information_share=0.05,
             never_on=0, always_on=0, untaught=0),
        dict(name="class_caps", types=3, sharpness=0.8, information=0.6, information_share=0.6,
             never_on=0, always_on=0, untaught=0),
    ],
    at_iterations=[
        dict(iters=1, error=0.7, same=0.25), dict(iters=2, error=0.08, same=1.0), dict(iters=10, error=0.09, same=0.97),
    ],
    uniform=dict(images=150, error=0.5, as_trained=0.09, same=0.5),
    moves=dict(shift=0.45, shift_others=0.33, angle=0.7, angle_others=0.01), of="300 made-up images", objects=1,
)  # fmt: skip


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

"""A network as a stack of capsule layers, and changes to it that are undone afterwards.

Axes: n image, c child, l parent position, i child slot in a receptive field, j parent type.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from vbcaps.heads import BackboneCapsNet, CapsHead
from vbcaps.health.assignments import Routed
from vbcaps.layers import Capsules, ClassCaps, ConvCaps, without_autocast
from vbcaps.models import CapsNet, ConvNet
from vbcaps.norm import BatchNorm
from vbcaps.vae import CapsVAE


class Stack(NamedTuple):
    """The capsule layers of a network.

    Args:
        begin: the function from the network's input to the primary capsules.
        layers: by name, in their order; the last is the class layer.
    """

    begin: Callable[[Tensor], Capsules]
    layers: dict[str, ConvCaps]

    @property
    def classes(self) -> ClassCaps:
        """Return the class layer."""
        last = list(self.layers.values())[-1]
        assert isinstance(last, ClassCaps)
        return last

    def __call__(self, x: Tensor) -> Capsules:
        """Return the class capsules of standardised images."""
        caps = self.begin(x)
        for layer in self.layers.values():
            caps = layer(caps, posterior=False)
        return caps

    def routed(self, x: Tensor) -> tuple[Capsules, list[Routed]]:
        """Return the primary capsules of standardised images, and what every layer did with them."""
        first = caps = self.begin(x)
        found = []
        for layer in self.layers.values():
            found.append(route_once(layer, caps))
            caps = found[-1].parents
        return first, found


def route_once(layer: ConvCaps, caps: Capsules) -> Routed:
    """Route a batch by one layer, and keep what it did."""
    parents = layer(caps)
    r = parents.posterior.r  # n l i j, or n i j of class capsules
    with without_autocast(caps.activations.device):
        children = layer.children_of(caps)
    size: Any = tuple(caps.activations.shape[1:])
    return Routed(layer, children, r if r.ndim == 4 else r[:, None], size, parents)


def stack_of(net: nn.Module) -> Stack:
    """Return the capsule layers of a network; a network without capsules is an error."""
    if isinstance(net, CapsVAE):
        net = net.net
    if isinstance(net, CapsNet):
        caps = net

        def begin(x: Tensor) -> Capsules:
            caps.check(x)
            return caps.primary_caps(caps.stem(x))

        return Stack(begin, {name: getattr(net, name) for name in ("conv_caps1", "conv_caps2", "class_caps")})
    if isinstance(net, CapsHead | BackboneCapsNet):
        head = net.head if isinstance(net, BackboneCapsNet) else net
        features = net.features if isinstance(net, BackboneCapsNet) else lambda x: x
        layers: dict[str, Any] = {f"conv_caps{k}": layer for k, layer in enumerate(head.conv_caps, 1)}
        return Stack(lambda x: head.primary_caps(head.pool(features(x))), layers | dict(class_caps=head.class_caps))
    if isinstance(net, ConvNet):
        raise ValueError("a CNN has no capsules, so there is nothing to say of their health: give a capsule network")
    raise TypeError(
        "health is measured of a Model, CapsNet, CapsVAE, CapsHead or BackboneCapsNet, got " + type(net).__name__
    )


def iterations_of(stack: Stack) -> int | None:
    """Return how many iterations the class layer makes; None for a routing that does not say."""
    iters = getattr(stack.classes.routing, "iters", None)
    return iters if isinstance(iters, int) else None


@contextmanager
def with_iterations(stack: Stack, iters: int) -> Iterator[None]:
    """Let every layer make so many iterations, and restore its own number afterwards."""
    routings: list[Any] = [layer.routing for layer in stack.layers.values()]
    before = [routing.iters for routing in routings]
    try:
        for routing in routings:
            routing.iters = iters
        yield
    finally:
        for routing, own in zip(routings, before, strict=True):
            routing.iters = own


@contextmanager
def normed_anew(stack: Stack, x: Tensor) -> Iterator[None]:
    """Take the statistics of BatchNorm in the routed layers anew on images, and restore them afterwards.

    The primary capsules keep theirs: their input is the same, however children are routed.
    """
    norms = [m for layer in stack.layers.values() for m in layer.modules() if isinstance(m, BatchNorm)]
    kept = [({name: b.clone() for name, b in norm.named_buffers()}, norm.training, norm.gather) for norm in norms]
    try:
        for norm in norms:
            norm.reset_running_stats()  # the first batch then gives them
            norm.gather = None  # other processes do not take part
            norm.train()
        stack(x)
        for norm in norms:
            norm.eval()
        yield
    finally:
        for norm, (buffers, mode, gather) in zip(norms, kept, strict=True):
            norm.training, norm.gather = mode, gather
            for name, buffer in norm.named_buffers():
                buffer.copy_(buffers[name])


def in_batches(count: int, batch_size: int, device: torch.device) -> Iterator[Tensor]:
    """Yield the numbers of the images of each batch."""
    yield from torch.arange(count, device=device).split(batch_size)

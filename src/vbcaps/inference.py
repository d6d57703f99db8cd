"""How a network runs outside training: its mode, the precision of its convolutions, and its probabilities."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vbcaps.layers import Capsules
from vbcaps.models import Scores
from vbcaps.vae import Reconstruction


def probabilities(out: Capsules | Scores | Reconstruction, temperature: float = 1.0, objects: int = 1) -> Tensor:
    """Return probabilities ``n c`` from a network's logits over a temperature: their softmax, or if images have several
    objects their sigmoid, the probability that each class is there."""
    logits = out.logits / temperature
    return logits.softmax(1) if objects == 1 else logits.sigmoid()


@contextmanager
def evaluating(net: nn.Module) -> Iterator[None]:
    """Put a network into eval mode, and restore the mode of each of its modules afterwards."""
    modes = [(module, module.training) for module in net.modules()]
    net.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def exact_convolutions() -> Any:
    """Return a context in which a GPU convolves like a CPU: deterministically, without TF32."""
    return torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False)

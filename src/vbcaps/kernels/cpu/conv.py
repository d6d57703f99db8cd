"""Convolutions on a CPU by oneDNN, with channels innermost, as norm.cpp reads them."""

import torch
from torch import Tensor, nn

HAS_ONEDNN = torch.backends.mkldnn.is_available()  # torch.compile cannot trace this call


def convolve(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """Convolve ``n c h w``; where oneDNN computes it, the channels of the result lie together.

    PyTorch itself gives small maps and, to one thread, small batches of 1x1 convolutions to older code, which takes
    twice as long. Without gradients oneDNN is called by its name. torch.compile chooses a memory order by itself.
    """
    if x.device.type != "cpu" or x.dtype != torch.float32 or not HAS_ONEDNN or torch.compiler.is_compiling():
        return conv(x)
    x = x.contiguous(memory_format=torch.channels_last)
    if torch.is_grad_enabled() or not _plain(conv, x):
        return conv(x)
    assert not isinstance(conv.padding, str)
    return torch.mkldnn_convolution(x, conv.weight, conv.bias, conv.padding, conv.stride, conv.dilation, conv.groups)


def _plain(conv: nn.Conv2d, x: Tensor) -> bool:
    """Return whether a call of the module is nothing but a convolution in float32."""
    watched = conv._forward_hooks or conv._forward_pre_hooks
    exact = conv.weight.dtype == torch.float32 and not torch.is_autocast_enabled("cpu") and x.numel() > 0
    return exact and not watched and conv.padding_mode == "zeros" and not isinstance(conv.padding, str)

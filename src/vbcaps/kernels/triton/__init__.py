"""The kernels for GPUs. This file imports no Triton, so that it can be asked where there is none."""

import os

import torch


@torch.compiler.assume_constant_result
def triton_interprets() -> bool:
    """Return whether Triton's kernels run on a CPU, in its interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"

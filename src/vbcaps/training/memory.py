"""Memory between the steps of a training on a CPU."""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from vbcaps.kernels.cpu.memory import MEMORY

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h
MOST = 2**31 - 1


@contextmanager
def freed_memory_kept(device: torch.device) -> Iterator[bool]:
    """Let the C library keep freed memory for the next step on a CPU, and give back what is unused at the end.

    Each step frees its large tensors, and the system would take the memory back, only to hand it out again page by page
    in the next step, filled with zeros. The CPU kernels keep memory of their own (``kernels/cpu/memory.py``); this is
    for PyTorch's. The most memory that a run needs stays the same. The setting is glibc's, for the whole process, and
    stays; elsewhere nothing changes.

    Yields:
        Whether the C library does so.
    """
    libc = _glibc() if device.type == "cpu" else None
    kept = libc is not None and all([libc.mallopt(M_MMAP_MAX, 0), libc.mallopt(M_TRIM_THRESHOLD, MOST)])
    try:
        yield kept
    finally:
        MEMORY.give_back()
        if libc is not None:
            libc.malloc_trim(0)


def _glibc() -> Any:
    """Return the C library if it is glibc, or None."""
    if sys.platform != "linux":
        return None
    libc = ctypes.CDLL(None)
    return libc if all(hasattr(libc, name) for name in ("gnu_get_libc_version", "mallopt", "malloc_trim")) else None

"""Large memory of the CPU kernels: what one step frees serves the next.

A C library gives large freed blocks back to the system, which hands them out again page by page and filled with zeros;
for these kernels that is a fifth of a step. So on Linux tensors of a megabyte and more lie in regions of our own,
unless ``VBCAPS_MEMORY=system``. Memory that some hundred large tensors did not need goes back to the system, and
``give_back`` returns all that is free.
"""

import collections
import math
import mmap
import os
import sys
import threading
import weakref
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

SMALLEST = 1 << 20  # bytes of a tensor; what is smaller is left to the C library
REGION = 1 << 28  # bytes of addresses: only those that are written to take memory
PAGE = mmap.PAGESIZE
MAPPED = sys.platform == "linux" and os.environ.get("VBCAPS_MEMORY") != "system"
WINDOW = 256  # large tensors; memory that was needed neither in this window nor in the last one goes back


class Region:
    """Mapped memory, and the gaps in it."""

    def __init__(self, size: int):
        self.map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.gaps = [(0, size)]  # begin, end
        self.written = self.high = self.high_before = 0  # ends of what was taken: ever, in this window, in the last one
        with suppress(AttributeError, OSError):  # systems without huge pages
            self.map.madvise(mmap.MADV_HUGEPAGE)

    def take(self, size: int) -> int | None:
        """Return where the first gap of at least this size begins, or None."""
        for k, (begin, end) in enumerate(self.gaps):
            if end - begin >= size:
                self.gaps[k : k + 1] = [(begin + size, end)] if end - begin > size else []
                self.high = max(self.high, begin + size)
                self.written = max(self.written, self.high)
                return begin
        return None

    def give(self, begin: int, end: int) -> None:
        """Make a gap of what was taken."""
        first, *others = sorted([*self.gaps, (begin, end)])
        self.gaps = [first]
        for begin, end in others:
            if begin == self.gaps[-1][1]:
                self.gaps[-1] = (self.gaps[-1][0], end)
            else:
                self.gaps.append((begin, end))

    def end_window(self) -> None:
        """Give back what was needed neither in this window nor in the last one."""
        self.give_back(max(self.high, self.high_before))
        self.high_before, self.high = self.high, 0

    def give_back(self, keep: int = 0) -> None:
        """Give gaps back to the system, but for what begins before ``keep``."""
        for begin, end in self.gaps:
            begin, end = max(begin, keep), min(end, self.written)
            if begin < end:
                self.map.madvise(mmap.MADV_DONTNEED, begin, end - begin)
                self.written = begin if end == self.written else self.written


class Memory:
    """Regions, and the tensors in them."""

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self.freed: collections.deque[tuple[Region, int, int]] = collections.deque()  # any thread frees, at any time
        self.taken = 0
        self.lock = threading.Lock()

    def empty(self, like: Tensor, *shape: int) -> Tensor:
        """Return a new tensor of float32 of this shape, like ``like.new_empty``."""
        size = 4 * math.prod(shape)
        if size < SMALLEST or not MAPPED or type(like) is not Tensor or like.dtype != torch.float32 or not like.is_cpu:
            return like.new_empty(shape)
        with self.lock:
            found = self._take(-(-size // PAGE) * PAGE)
        if found is None:
            return like.new_empty(shape)
        region, begin, end = found
        array = np.ndarray(shape, np.float32, region.map, begin)  # the tensor keeps it until nothing reads it
        weakref.finalize(array, self.freed.append, (region, begin, end)).atexit = False
        return torch.from_numpy(array)

    def give_back(self) -> None:
        """Return the memory that no tensor uses to the system."""
        with self.lock:
            self._collect()
            for region in self.regions:
                region.give_back()

    def _take(self, size: int) -> tuple[Region, int, int] | None:
        self._collect()
        self.taken += 1
        if self.taken % WINDOW == 0:
            for region in self.regions:
                region.end_window()
        for region in self.regions:
            if (begin := region.take(size)) is not None:
                return region, begin, begin + size
        for wanted in (max(REGION << len(self.regions), size), size):
            with suppress(OSError, ValueError):  # the addresses of this process are limited
                self.regions.append(Region(wanted))
                self.regions[-1].take(size)
                return self.regions[-1], 0, size
        return None

    def _collect(self) -> None:
        while self.freed:
            region, begin, end = self.freed.popleft()
            region.give(begin, end)


MEMORY = Memory()


def renew_lock() -> None:
    """Replace the lock in a child process, where the thread that held it does not exist."""
    MEMORY.lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=renew_lock)

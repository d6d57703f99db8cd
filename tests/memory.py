"""The peak of resident memory of this process."""

from collections.abc import Callable
from pathlib import Path

import pytest

MB = 1 << 20


def resident(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(status.split(f"{field}:")[1].split()[0]) * 1024


def peak(work: Callable[[], object]) -> int:
    """Return how many bytes more are resident at once while ``work`` is done, than before."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        pytest.skip("this system does not measure the peak of resident memory")
    before = resident("VmRSS")
    work()
    return resident("VmHWM") - before

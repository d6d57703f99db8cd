"""What is said where the reference has to serve a call for want of a compiler."""

import warnings

import pytest
import torch

from vbcaps import CapsNet, kernels
from vbcaps.kernels.cpu import launch


@pytest.fixture
def no_compiler(monkeypatch):
    """As on a CPU without a compiler, in a new process."""
    monkeypatch.setattr(launch, "why_no_library", lambda: "there is no C++ compiler")
    kernels._warn_of_reference.cache_clear()
    yield
    kernels._warn_of_reference.cache_clear()


def run(**options):
    with torch.no_grad():
        return CapsNet((4, 2, 2, 2), 1, 3, 20, **options).eval()(torch.zeros(1, 1, 20, 20))


def test_a_cpu_without_a_compiler_is_slow_and_says_so_once(no_compiler):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run()
        run()
    (message,) = {str(one.message) for one in told}
    assert "there is no C++ compiler" in message
    assert "Install a C++ compiler" in message
    assert len(told) == 1


def test_nothing_is_said_where_the_reference_is_asked_for_or_kernels_would_not_serve(no_compiler):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(backend="reference")
        CapsNet((4, 2, 2, 2), 1, 3, 20).double().eval()(torch.zeros(1, 1, 20, 20, dtype=torch.float64))

"""Numbers and GPU code that no refactoring may change (tests/golden/)."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from golden import values

from vbcaps.kernels.cpu.build import find_compiler

GOLDEN = Path(__file__).with_name("golden")


@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
def test_logits_and_losses_are_the_recorded_ones():
    """To the last bit on the kind of machine that recorded them; elsewhere as far as rounding lets them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found, (expected, machine) = values.compute(), values.read()
    torch.set_num_threads(threads)
    assert found.keys() == expected.keys()
    exact = machine == values.machine()
    for name, x in expected.items():
        grown = name.startswith(("losses", "program"))  # rounding grows from step to step
        rounding = dict(rtol=0, atol=0) if exact else dict(rtol=0.05 if grown else 1e-3, atol=1e-2)
        torch.testing.assert_close(found[name], x, **rounding, msg=lambda m, at=name: f"{at}: {m}")


@pytest.mark.parametrize("which", ["--some", pytest.param("--all", marks=pytest.mark.slow)])
def test_triton_compiles_the_kernels_to_the_recorded_code(which):
    """In a process of its own, where Triton is not in its interpreter. No GPU is needed."""
    triton = pytest.importorskip("triton")
    recorded = json.loads((GOLDEN / "ptx.json").read_text())
    if triton.__version__ != recorded["triton"]:
        pytest.skip(f"recorded with triton {recorded['triton']}")
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(GOLDEN / "ptx.py"), which]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) > 5
    if which == "--all":
        assert found.keys() == recorded["kernels"].keys()
    for case, kernels in found.items():
        assert kernels == recorded["kernels"][case], case

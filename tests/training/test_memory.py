"""Memory that a training keeps between its steps."""

import subprocess
import sys

import pytest
import torch

from vbcaps.training import memory

FAULTS = """
import resource, sys, torch
from vbcaps.training.memory import freed_memory_kept

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.ones(10_000_000)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

usual = faults()
with freed_memory_kept(torch.device("cpu")) as kept:
    faults()
    print(usual, faults() if kept else -1)
"""


@pytest.mark.skipif(memory._glibc() is None, reason="needs glibc")
def test_steps_reuse_memory_without_asking_the_system_for_pages():
    done = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, timeout=60, check=True)
    usual, kept = map(int, done.stdout.split())
    assert kept < 100 < usual, done.stdout


def test_nothing_changes_on_a_gpu_or_with_another_c_library(monkeypatch):
    monkeypatch.setattr(memory, "_glibc", lambda: None)
    with memory.freed_memory_kept(torch.device("cpu")) as kept:
        assert not kept
    monkeypatch.setattr(memory, "_glibc", lambda: pytest.fail("asked for"))
    with memory.freed_memory_kept(torch.device("cuda")) as kept:
        assert not kept

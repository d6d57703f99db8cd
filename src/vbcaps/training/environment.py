"""The environment of a run: commit, command, versions, device."""

import functools
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import vbcaps
from vbcaps.training.files import RunError


@functools.cache
def commit() -> str:
    """Return the commit of the running source, or ``VBCAPS_COMMIT`` if it is set."""
    if named := os.environ.get("VBCAPS_COMMIT"):
        return named
    here = Path(__file__).parent
    try:
        git = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty"], capture_output=True, text=True, timeout=10
        )
        tracked = subprocess.run(["git", "-C", str(here), "ls-files", "--error-unmatch", __file__], capture_output=True)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return git.stdout.strip() if git.returncode == 0 == tracked.returncode else "unknown"


def environment(device: torch.device, processes: int) -> dict[str, Any]:
    """Return the content of ``environment.json``; ``VBCAPS_NOTE`` sets its note, for example that a GPU was shared."""
    import safetensors

    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return dict(
        vbcaps=vbcaps.__version__,
        commit=commit(),
        command=[Path(sys.argv[0]).name, *sys.argv[1:]],
        device=gpu or platform.processor() or platform.machine(),
        device_type=device.type,
        processes=processes,
        threads=torch.get_num_threads(),
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        torch=torch.__version__,
        cuda=torch.version.cuda,
        cudnn=torch.backends.cudnn.version() if device.type == "cuda" else None,
        safetensors=safetensors.__version__,
        note=os.environ.get("VBCAPS_NOTE", ""),
    )


def other_threads(first: dict[str, Any], now: dict[str, Any]) -> str:
    """Return a sentence if a run goes on with another number of threads on a CPU, which gives other bits; else ""."""
    earlier = [first, *(one for one in first.get("resumed", []) if isinstance(one, dict))]
    before = earlier[-1].get("threads")
    if now["device_type"] != "cpu" or type(before) is not int or before == now["threads"]:
        return ""
    return (
        f"was trained with {before} threads and goes on with {now['threads']}: PyTorch then sums the gradients of "
        f"convolutions in another order, so the weights get other last bits; OMP_NUM_THREADS={before} keeps them"
    )


def with_resumption(first: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """Return the environment in which a run began; add the present one to "resumed" unless it is there already."""
    resumed = first.get("resumed", [])
    if not isinstance(resumed, list):
        raise RunError(f"environment.json is damaged: resumed must be a list, got {ascii(resumed)[:60]}")
    return first | dict(resumed=resumed if now in resumed else [*resumed, now])

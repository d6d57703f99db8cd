"""Whether two runs ended in the same bits."""

from pathlib import Path

import torch
from safetensors.torch import load_file

from vbcaps.training.runfolder import read_metrics, read_result

TIMES = ("seconds", "images_per_second")


def assert_same_run(a: Path, b: Path) -> None:
    """Every bit but for times: weights files as a whole, state, metrics and result."""
    for name in ("last.safetensors", "best.safetensors"):
        assert (a / name).exists() == (b / name).exists()
        if (a / name).exists():
            assert (a / name).read_bytes() == (b / name).read_bytes(), name
    states = [load_file(folder / "state.safetensors") for folder in (a, b)]
    assert states[0].keys() == states[1].keys()
    for name in states[0]:
        assert torch.equal(states[0][name], states[1][name]), name
    rows = [[{k: v for k, v in row.items() if k not in TIMES} for row in read_metrics(f)] for f in (a, b)]
    assert rows[0] == rows[1]
    results = [{k: v for k, v in read_result(f).items() if k not in (*TIMES, "folder", "sums")} for f in (a, b)]
    assert results[0] == results[1]

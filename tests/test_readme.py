"""README's Python, one block after the other, on a CPU."""

import re
from pathlib import Path

import pytest
import torch

TEXT = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
NEEDS = (".cuda()", "fit(", "runs/")  # a GPU, minutes, a run


def test_blocks_run_in_their_order(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    names, ran = {"labels": torch.randint(10, (8,))}, 0
    for block in BLOCKS:
        if not any(word in block for word in NEEDS):
            photos = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
            names["images"] = photos if "predict(" in block else torch.rand(8, 1, 28, 28)
            exec(block, names)
            ran += 1
    assert ran >= 6
    assert names["scores"].sum(1).tolist() == pytest.approx([1.0] * 4)
    assert names["mine"](torch.randn(4, 3, 40, 52)).logits.shape == (4, 3)

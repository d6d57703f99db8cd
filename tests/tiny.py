"""A problem small enough to train in a second or two with the reference: three classes, told by where a bar lies."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from vbcaps.data import Dataset, Split
from vbcaps.training.recipe import Recipe

CLASSES = ("top", "middle", "bottom")

# A step each epoch, of a network that is trained in milliseconds, with every file that a run writes.
SMALL: dict = dict(
    network="cnn", arch=(1, 1, 1, 1), batch=36, epochs=2, warmup=0.0, validation=0.25, test=True, iters=3,
    backend="auto",
)  # fmt: skip


def split(count: int, seed: int) -> Split:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 60, (count, 1, 22, 22), generator=generator, dtype=torch.uint8)
    labels = torch.arange(count) % 3
    for image, label in zip(images, labels.tolist(), strict=True):
        image[:, 3 + 6 * label : 6 + 6 * label, 4:18] += 150
    return Split(images, labels)


def dataset(*_: object, **__: object) -> Dataset:
    """In place of ``vbcaps.data.load_dataset``."""
    return Dataset("tiny", split(48, 1), split(30, 2), CLASSES, "made up")


def recipe(**fields: object) -> Recipe:
    settings: dict = dict(
        name="tiny", dataset="sample", image_size=22, crop=20, standardise="dataset", arch=(4, 2, 2, 2),
        batch=8, epochs=3, lr=0.01, schedule="onecycle", warmup=0.5, loss_on="logits", iters=2,
        backend="reference", save_seconds=0.0,
    )  # fmt: skip
    return Recipe(**settings | fields)


@contextmanager
def in_place_of_data() -> Iterator[None]:
    """``fit`` trains on it, with one thread: for tensors this small two only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vbcaps.training.loop.load_dataset", dataset)
        yield
    torch.set_num_threads(threads)


def forked(which: str, folder: Path) -> dict:
    """Run ``tests/forked.py`` in a process of its own, and return what it prints.

    Its runs are compared bit by bit, and weights files have the commit: a commit made meanwhile must not change it.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | dict(VBCAPS_COMMIT="abc1234")
    command = [sys.executable, str(Path(__file__).with_name("forked.py")), which, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]) | {"stderr": done.stderr}

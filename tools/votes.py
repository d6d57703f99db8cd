"""The squared distance of votes to class capsules, measured after each epoch of a run (the paper's last two figures).

`python tools/series.py votes` trains with this beside it; nothing here runs on its own. The votes of the class layer
are averaged over all test images of one class, and so is each class capsule's mean after every iteration. The distance
of each child's vote to each class capsule goes to votes.npz in the run's folder.

Axes: e epoch, s the class that is shown, t iteration, j class capsule, i child; n image, d pose entry.
"""

import io
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import vbcaps
from vbcaps.data import Split
from vbcaps.layers import Capsules
from vbcaps.models import CapsNet
from vbcaps.training.files import write
from vbcaps.training.loop import Event, prepare
from vbcaps.training.recipe import Recipe
from vbcaps.weights.file import read_weights
from vbcaps.weights.model import Model

SHOWN = ("airplane", "car")
FILE = "votes.npz"
BATCH = 64


def watcher(recipe: Recipe, data_folder: str | None) -> Callable[[Event], None]:
    """Return a function for ``fit`` that measures the weights of each epoch, and writes ``votes.npz`` beside them."""
    images: dict[str, Tensor] = {}
    classes: list[str] = []

    def on_event(event: Event) -> None:
        done = event.epoch if event.kind == "epoch" else event.epoch - 1
        if event.kind not in ("start", "epoch") or done < 1:  # a resumed run may have been killed before it measured
            return
        path = event.folder / FILE
        kept = dict(np.load(path)) if path.exists() else {}
        if kept and done in kept["epochs"]:
            return
        if not images:
            data = prepare(recipe, data_folder, torch.device("cpu"))
            classes.extend(data.classes)
            images.update(images_of(data.test, data.classes))
        model = weights_of(event.folder, done)
        now = np.stack([distances(model, images[name]) for name in SHOWN])[None].astype(np.float32)
        write(path, packed(kept, done, now, classes, [len(images[name]) for name in SHOWN]))

    return on_event


def images_of(split: Split, classes: tuple[str, ...]) -> dict[str, Tensor]:
    """Return the images of each class that is shown."""
    return {name: split.images[split.labels == classes.index(name)] for name in SHOWN}


def weights_of(folder: Path, epoch: int) -> Model:
    """Wait until the run has written the weights of this epoch, which it does in a thread, and return them."""
    path = folder / "last.safetensors"
    while not path.exists() or read_weights(path).about["epoch"] != epoch:
        time.sleep(0.05)
    return vbcaps.load(path, device="cpu")


@torch.no_grad()
def distances(model: Model, images: Tensor) -> np.ndarray:
    r"""Return $\|\bar V_{j|i} - \bar m_j\|^2$ after each iteration, ``t j i``; bars are means over the images."""
    net = model.net
    if not isinstance(net, CapsNet):
        raise ValueError(f"votes are those of capsules, got a {type(net).__name__}")
    model.eval()
    votes, means = torch.zeros(()), torch.zeros(())  # sums over images: i j d, t j d
    for some in images.split(BATCH):
        trace = net.class_caps.trace(_children(net, model.view.test(some)))
        votes = votes + trace.votes.double().sum(0)
        means = means + torch.stack([q.m.double().sum(0) for q in trace.iterations])
    votes, means = votes / len(images), means / len(images)
    return (votes[None] - means[:, None]).square().sum(-1).transpose(1, 2).numpy()  # t i j d -> t j i


def _children(net: CapsNet, x: Tensor) -> Capsules:
    """Return the children of the class layer. Its own routing is traced by the reference, the layers below need not."""
    caps = net.primary_caps(net.stem(x))
    for layer in (net.conv_caps1, net.conv_caps2):
        caps = layer(caps, posterior=False)
    return caps


def packed(kept: dict[str, np.ndarray], epoch: int, now: np.ndarray, classes: list[str], images: list[int]) -> bytes:
    """Return the content of ``votes.npz`` with one epoch more: distances ``e s t j i``, and what its axes stand for."""
    epochs, before = kept.get("epochs", np.zeros(0, int)), kept.get("distances", now[:0])
    file = io.BytesIO()
    np.savez_compressed(
        file, epochs=np.append(epochs, epoch), distances=np.concatenate([before, now]), shown=np.array(SHOWN),
        classes=np.array(classes), images=np.array(images),
    )  # fmt: skip
    return file.getvalue()

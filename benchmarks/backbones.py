"""Does a capsule head read a backbone better than a linear one? Three heads on one frozen backbone, on real images.

python benchmarks/backbones.py [--data-folder FOLDER] [--seeds 3] [--csv benchmarks/backbones.csv]

A small CNN learns five classes of CIFAR-10 (its first five), enlarged to 96 pixels. Then it is frozen, and heads learn
the other five classes from 50 or 500 images of each: `linear`, the mean of the map and a linear layer; `conv`, a 3x3
convolution with about as many parameters as the capsules, the mean and a linear layer; `caps`, `CapsHead` with
(16, 16). Each head's learning rate is the best of three on 1,000 held-out training images, found with seed 0; then each
seed draws training images and weights anew and is tested once, on all test images of the five classes.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from measure import record
from torch import Tensor, nn

from vbcaps import CapsHead
from vbcaps.data import load_dataset

SIDE, KNOWN, NEW = 96, range(5), range(5, 10)
PRETRAINING, PASSES, VALIDATION = 12_000, 6, 1_000  # images, passes over them, held-out images of the new classes
PER_CLASS, EPOCHS, BATCH = (50, 500), {50: 40, 500: 8}, 32
RATES = (1e-3, 3e-3, 1e-2)
CHANNELS = 128


def make_backbone() -> nn.Sequential:
    """Return four convolutions of stride 2: 96 pixels become a map of 6x6."""
    layers: list[nn.Module] = []
    for few, many in ((3, 16), (16, 32), (32, 64), (64, CHANNELS)):
        layers += [nn.Conv2d(few, many, 3, 2, 1, bias=False), nn.BatchNorm2d(many), nn.ReLU()]
    return nn.Sequential(*layers)


class Pooled(nn.Module):
    """A layer over a map, its mean over positions, and a linear classifier."""

    def __init__(self, layer: nn.Module, channels: int):
        super().__init__()
        self.layer, self.classify = layer, nn.Linear(channels, len(NEW))

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.layer(x).mean((2, 3)))


class Logits(nn.Module):
    """A capsule head that returns its logits alone."""

    def __init__(self) -> None:
        super().__init__()
        self.head = CapsHead(CHANNELS, len(NEW), caps=(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x).logits


HEADS: dict[str, Callable[[], nn.Module]] = dict(
    linear=lambda: Pooled(nn.Identity(), CHANNELS),
    conv=lambda: Pooled(
        nn.Sequential(nn.Conv2d(CHANNELS, 63, 3, padding=1, bias=False), nn.BatchNorm2d(63), nn.ReLU()), 63
    ),
    caps=Logits,
)


def enlarged(images: Tensor) -> Tensor:
    """Return uint8 images as the backbone's input: 96 pixels, from -1 to 1."""
    return F.interpolate(images.float() / 127.5 - 1, size=SIDE, mode="bilinear")


def train(net: nn.Module, x: Tensor, y: Tensor, lr: float, epochs: int, seed: int, prepare: Callable) -> None:
    """Train with AdamW and a cosine schedule."""
    generator = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], lr, weight_decay=0.01)
    steps = epochs * (len(x) // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    net.train()
    for _ in range(epochs):
        order = torch.randperm(len(x), generator=generator)
        for some in order[: len(x) // BATCH * BATCH].split(BATCH):
            loss = F.cross_entropy(net(prepare(x[some])), y[some])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()


@torch.no_grad()
def error(net: nn.Module, x: Tensor, y: Tensor) -> float:
    net.eval()
    right = sum((net(a).argmax(1) == b).sum().item() for a, b in zip(x.split(256), y.split(256), strict=True))
    return 1 - right / len(y)


def features(backbone: nn.Module, images: Tensor) -> Tensor:
    with torch.no_grad():
        return torch.cat([backbone(enlarged(part)) for part in images.split(256)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-folder", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--csv")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dataset = load_dataset("cifar10", options.data_folder)
    train_set, test_set = dataset.train, dataset.test
    torch.manual_seed(0)

    backbone, began = make_backbone(), time.perf_counter()
    known = (train_set.labels < len(KNOWN)).nonzero()[:, 0]
    known = known[torch.randperm(len(known))[:PRETRAINING]]
    whole = nn.Sequential(backbone, Pooled(nn.Identity(), CHANNELS))
    train(whole, train_set.images[known], train_set.labels[known], 3e-3, PASSES, 0, enlarged)
    backbone.eval().requires_grad_(False)
    print(f"trained the backbone in {time.perf_counter() - began:.0f} s", flush=True)

    new = (train_set.labels >= len(KNOWN)).nonzero()[:, 0]
    new = new[torch.randperm(len(new))[: VALIDATION + 5 * 1_000]]
    x, y = features(backbone, train_set.images[new]), train_set.labels[new] - len(KNOWN)
    held_x, held_y, x, y = x[:VALIDATION], y[:VALIDATION], x[VALIDATION:], y[VALIDATION:]
    tested = test_set.labels >= len(KNOWN)
    test_x, test_y = features(backbone, test_set.images[tested]), test_set.labels[tested] - len(KNOWN)

    for count in PER_CLASS:
        for name, make in HEADS.items():

            def fitted(lr: float, seed: int, make: Callable[[], nn.Module] = make, count: int = count) -> nn.Module:
                torch.manual_seed(seed)
                chosen = torch.cat(
                    [(y == c).nonzero()[:, 0][torch.randperm(int((y == c).sum()))[:count]] for c in range(5)]
                )
                net = make()
                train(net, x[chosen], y[chosen], lr, EPOCHS[count], seed, lambda x: x)
                return net

            tried = {lr: error(fitted(lr, 0), held_x, held_y) for lr in RATES}
            lr = min(tried, key=lambda lr: tried[lr])
            began = time.perf_counter()
            nets = [fitted(lr, seed) for seed in range(options.seeds)]
            seconds = (time.perf_counter() - began) / options.seeds
            errors = [100 * error(net, test_x, test_y) for net in nets]
            row = dict(
                per_class=count, head=name, parameters=sum(p.numel() for p in nets[0].parameters()), lr=lr,
                seeds=options.seeds, error=f"{statistics.mean(errors):.2f}", std=f"{statistics.stdev(errors):.2f}",
                errors=" ".join(f"{e:.2f}" for e in errors), seconds=f"{seconds:.1f}", source=dataset.source,
            )  # fmt: skip
            record(row, torch.device("cpu"), options.csv)


if __name__ == "__main__":
    main()

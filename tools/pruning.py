"""How many parents share the votes after each iteration? Rows for results/pruning.csv, which docs/analyses.md quotes.

python tools/pruning.py [--write]

In untrained networks {32,8,8,8} of VB and EM routing the script gives the effective number of parents at a position,
the exponential of the entropy of their shares of the votes, as the mean over 256 test images and all positions.
"""

import argparse
import csv
from pathlib import Path

import torch
from torch import Tensor

from vbcaps import CapsNet
from vbcaps.data import load_dataset
from vbcaps.layers import LayerTrace
from vbcaps.trace import LAYERS
from vbcaps.training.environment import environment

TABLE = Path(__file__).parents[1] / "results" / "pruning.csv"
IMAGES, ITERATIONS, SEEDS = 256, 5, 3


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table, not only print it")
    arguments = parser.parse_args(words)
    about = environment(torch.device("cpu"), 1)
    rows = [
        dict(
            routing=routing, layer=layer, iteration=t + 1, seeds=SEEDS, parents=f"{parents:.2f}", commit=about["commit"]
        )
        for routing in ("vb", "em")
        for layer, numbers in measured(routing).items()
        for t, parents in enumerate(numbers)
    ]
    for row in rows:
        print(*row.values())
    if arguments.write:
        with open(TABLE, "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)


def measured(routing: str) -> dict[str, list[float]]:
    """Return the effective number of parents by layer and iteration, mean over untrained networks."""
    images = load_dataset("sample").test.images[:IMAGES].float() / 255
    x = (images - images.mean()) / images.std()
    found: dict[str, list[list[float]]] = {layer: [] for layer in LAYERS}
    options = dict(iters=ITERATIONS) | (dict(activation="released") if routing == "vb" else {})
    for seed in range(SEEDS):
        torch.manual_seed(seed)
        net = CapsNet((32, 8, 8, 8), 1, 10, 28, routing=routing, routing_options=options)
        with torch.no_grad():
            trace = net.trace(x)
        for layer in LAYERS:
            found[layer].append(effective_parents(trace.layers[layer]))
    return {layer: torch.tensor(each).mean(0).tolist() for layer, each in found.items()}


def effective_parents(layer: LayerTrace) -> list[float]:
    """Return the effective number of parents that share the votes of a field, after each iteration."""
    numbers = []
    for q in layer.iterations:
        shares: Tensor = (layer.activations[..., None] * q.r).sum(-2)  # n l j, or n j
        shares = shares / shares.sum(-1, keepdim=True)
        numbers.append(float((-torch.xlogy(shares, shares).sum(-1)).exp().mean()))
    return numbers


if __name__ == "__main__":
    main()

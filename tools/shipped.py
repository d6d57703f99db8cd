"""Measure which density tells strangers best in the shipped networks, and record it in results/shipped.csv.

python tools/shipped.py [NAME...] [--data-folder FOLDER] [--write]

Densities are fitted to 4,000 training images of each network. The one that tools/densities.py puts into the weights
files of VB networks is chosen by the rows ``choice`` alone, by its mean over networks: 1,000 other training images of
the network against 1,000 training images of CIFAR-10, for networks of CIFAR-10 of Fashion-MNIST. The rows ``strangers``
are 2,000 test images against 2,000 of each dataset in ``STRANGERS``, measured once. A network that is in the table is
skipped.
"""

import argparse
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor
from uncertainty import IMAGES, TRAIN, Row, apart, append, read, some, strangers

import vbcaps
from vbcaps import Model
from vbcaps.training.environment import commit
from vbcaps.training.loop import prepare
from vbcaps.uncertainty import Look, fit_density, look
from vbcaps.uncertainty.scores import joined, of_logits

TABLE = Path(__file__).parents[1] / "results" / "shipped.csv"
HEAD = ("network", "test", "against", "score", "measure", "value", "images", "commit")
NETWORKS = ("fashion", "smallnorb", "svhn_small", "cifar10_small", "fashion_laptop", "fashion_evidence")
STRANGERS = {  # none of them is in the pair for the choice
    "fashion-mnist": ("mnist", "smallnorb", "svhn"),
    "smallnorb": ("mnist", "fashion-mnist"),
    "svhn": ("mnist", "fashion-mnist"),
    "cifar10": ("svhn", "mnist"),
}
CHOICE = 1000  # images of each side of the pair for the choice
CANDIDATES = (  # features, and whether all classes share a covariance
    ("class_caps.kappa", False), ("class_caps.m", True), ("class_caps.m+class_caps.kappa+class_caps.precision", True),
    ("conv_caps1.kappa", False), ("conv_caps1.m", True), ("conv_caps1.m+conv_caps1.precision", True),
    ("conv_caps1.m+conv_caps1.kappa+conv_caps1.precision", True), ("conv_caps2.m", True),
)  # fmt: skip


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NETWORKS, metavar="NAME", help="networks of the package")
    parser.add_argument("--data-folder", metavar="FOLDER", help="folder of the datasets")
    parser.add_argument("--write", action="store_true", help="write the table, not only print")
    arguments = parser.parse_args(words)
    for name in arguments.names:
        if arguments.write and any(row["network"] == name for row in read(TABLE)):
            print(f"{name}: recorded already")
            continue
        rows = [dict(network=name) | row | dict(commit=commit()) for row in measure(name, arguments.data_folder)]
        for row in rows:
            print(*list(row.values())[:-1], flush=True)
        if arguments.write:
            append(TABLE, HEAD, rows)


def measure(name: str, data_folder: str | None) -> list[Row]:
    """Return the AUROC of every score of one network, on the pair for the choice and for each stranger."""
    model = vbcaps.load(name)
    dataset = model.recipe.dataset
    data = prepare(model.recipe, data_folder, torch.device("cpu"))
    order = torch.randperm(len(data.train.labels), generator=torch.Generator().manual_seed(0))
    fitted, others = (data.train.take(order[a:b].sort().values) for a, b in pairwise((0, TRAIN, TRAIN + CHOICE)))
    seen = look(model, fitted.images)
    densities = {
        f"density {features}" + ("" if tied else ", per class"): (
            features.split("+"),
            fit_density(joined(seen.features, features.split("+")), fitted.labels, model.num_classes, tied=tied),
        )
        for features, tied in CANDIDATES
    }

    def scores(images: Tensor) -> dict[str, Tensor]:
        seen = look(model, images)
        of_densities = {
            score: -density.log_prob(joined(seen.features, features))
            for score, (features, density) in densities.items()
        }
        return plain(model, seen) | of_densities

    against = "cifar10" if dataset != "cifar10" else "fashion-mnist"
    strange = strangers(model, against, data_folder, part="train")[:CHOICE]
    rows = of_images(apart("choice", against, scores(others.images), scores(strange)), len(strange))
    familiar = scores(some(data.test, IMAGES).images)
    for against in STRANGERS[dataset]:
        images = strangers(model, against, data_folder)
        rows += of_images(apart("strangers", against, familiar, scores(images)), len(images))
    return rows


def plain(model: Model, seen: Look) -> dict[str, Tensor]:
    """Return the scores beside which densities are judged: maximum softmax, energy and ELBO."""
    of_each = of_logits(seen.logits, model.temperature)
    return {score: of_each[score] for score in ("max_softmax", "energy")} | dict(elbo=seen.scores["elbo"])


def of_images(rows: list[Row], images: int) -> list[Row]:
    return [row | dict(images=images) for row in rows if row["measure"] == "auroc"]


if __name__ == "__main__":
    main()

"""Records of runs that were never made, for the figures that are drawn from results/."""

import csv
import json
from itertools import zip_longest
from pathlib import Path

import numpy as np

from vbcaps.training.recipes import recipe

ENVIRONMENT = dict(
    commit="abc1234", command=["vbcaps", "train"], device="a CPU", device_type="cpu", processes=1, threads=1
)


def record(
    folder: Path,
    name: str,
    *,
    test: float | None = None,
    familiar: float | None = None,
    validation: tuple[float, ...] = (),
    training: tuple[float, ...] = (0.5, 0.4),
    finished: bool = True,
    **fields: object,
) -> Path:
    """Write the record of a run of the recipe; errors are shares, validation and training those of each epoch.

    Small twins for a laptop have the same learning rate for VB and EM, as in the series that are drawn.
    """
    one = recipe(name, **(dict(lr=0.008) if name.endswith("_laptop") else {}) | fields)
    folder.mkdir(parents=True)
    (folder / "recipe.json").write_text(json.dumps(one.to_json()))
    (folder / "environment.json").write_text(json.dumps(ENVIRONMENT))
    with open(folder / "metrics.csv", "w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["epoch", "train_error", "validation_error"])
        rows.writerows([epoch, *errors] for epoch, errors in enumerate(zip_longest(training, validation), 1))
    result = dict(test=None if test is None else dict(error=test), familiar=None, seconds=1.0)
    if familiar is not None:
        result |= dict(familiar=dict(error=familiar))
    if finished:
        (folder / "result.json").write_text(json.dumps(result))
    return folder


def curves(results: Path, dataset: str = "smallnorb") -> None:
    """Two seeds of VB and one of EM, held-out errors of two epochs."""
    record(results / "series/some/vb0", f"{dataset}_laptop", validation=(0.4, 0.2), test=0.19)
    record(results / "series/some/vb1", f"{dataset}_laptop", validation=(0.6, 0.3), test=0.21, seed=1)
    record(results / "series/other/em0", f"{dataset}_em_laptop", validation=(0.5, 0.4), test=0.35)


def priors(results: Path) -> None:
    """Four pairs of priors, one of them failed, another with two seeds; and a learned one."""
    for alpha0, psi0, errors in ((0.1, 0.1, [0.11]), (0.1, 1.0, [0.12]), (1.0, 0.1, []), (1.0, 1.0, [0.13, 0.15])):
        for seed, error in enumerate(errors or [None]):
            folder = results / f"series/priors/{alpha0}-{psi0}-{seed}"
            fields = dict(alpha0=alpha0, psi0=psi0, epochs=1, seed=seed)
            record(folder, "fashion_laptop", test=error, finished=error is not None, training=(0.5,), **fields)
    record(results / "series/priors/learned", "fashion_laptop", learn=("alpha0",), epochs=1, test=0.14)


def iterations(results: Path) -> None:
    """Errors 0.1, 0.2 for 1, 2 iterations of VB, 0.01 more for EM; times 10, 20 ms and 1 ms more."""
    for k, routing in enumerate(("vb", "em")):
        for iters in (1, 2):
            name = "fashion_laptop" if routing == "vb" else "fashion_em_laptop"
            error = iters / 10 + k / 100
            record(results / f"series/iterations/{routing}{iters}", name, iters=iters, epochs=1, test=error)
    step_times(results, 2)


def step_times(results: Path, most: int) -> None:
    """Times for 1 iteration to the most."""
    rows: list[list[object]] = [["routing", "iters", "ms", "low", "high", "batch"]]
    for k, routing in enumerate(("vb", "em")):
        for iters in range(1, most + 1):
            rows.append([routing, iters, 10 * iters + k, 10 * iters + k - 0.5, 10 * iters + k + 0.5, 64])
    with open(results / "step_times.csv", "w", newline="") as file:
        csv.writer(file).writerows(rows)


def votes(results: Path) -> None:
    """Distances after two epochs, whose medians are the epoch, and 10 more for a capsule that is not of the class."""
    folder = record(results / "series/votes/one", "smallnorb_laptop", iters=3, test=0.1)
    shown, classes = ("airplane", "car"), ("car", "airplane")
    distances = np.zeros((2, 2, 3, 2, 9), np.float32)  # e s t j i
    for e in range(2):
        for s in range(2):
            for j in range(2):
                distances[e, s, :, j] = e + 1 + 10 * (classes[j] != shown[s]) + np.linspace(-0.5, 0.5, 9)
    np.savez_compressed(
        folder / "votes.npz", epochs=np.array([1, 2]), distances=distances, shown=np.array(shown),
        classes=np.array(classes), images=np.array([7, 8]),
    )  # fmt: skip


def affnist(results: Path) -> None:
    """The capsules as they are today, twice, and once as they were; the CNN once."""
    record(results / "affnist_fast-0", "affnist_fast", test=0.5, familiar=0.1, lr=0.5)
    record(results / "affnist_fast-1", "affnist_fast", test=0.02, familiar=0.002)
    record(results / "affnist_fast-2", "affnist_fast", test=0.04, familiar=0.004, seed=1)
    record(results / "affnist_cnn_fast-0", "affnist_cnn_fast", test=0.05, familiar=0.01, lr=0.4)


def measures() -> list[tuple[object, ...]]:
    """VB and a CNN on two datasets; the density is the best of VB's on the pair for choices, softmax of the CNN's."""
    made: list[tuple[object, ...]] = []

    def add(
        recipe: str, test: str, score: str, measure: str, value: float, against: str = "", seeds: str = "0",
        viewpoint: str = "",
    ) -> None:  # fmt: skip
        made.append((recipe, viewpoint, seeds, test, against, score, measure, value, "abc1234"))

    auroc = {"max_softmax": 0.6, "votes": 0.7, "density class_caps.kappa": 0.9, "logits": 0.95}
    for seed in ("0", "1"):
        for score, value in auroc.items():
            add("fashion_laptop", "choice", score, "auroc", value, "cifar10", seed)
            for dataset, against in (("fashion", "mnist"), ("mnist", "svhn")):
                value += 0.02 * int(seed)
                add(f"{dataset}_laptop", "strangers", score, "auroc", value, against, seed)
        for dataset in ("fashion", "mnist"):
            for score in ("softmax", "softmax with temperature"):
                add(f"{dataset}_laptop", "calibration", score, "ece", 0.02, seeds=seed)
                add(f"{dataset}_laptop", "calibration", score, "error", 0.1 + 0.02 * int(seed), seeds=seed)
            for kind in ("rotate", "blur", "noise", "occlude"):
                add(f"{dataset}_laptop", "damage", "", "error", 0.3, f"{kind} 1", seed)
                for score in auroc:
                    add(f"{dataset}_laptop", "damage", score, "auroc", 0.8, f"{kind} 1", seed)
    add("fashion_cnn_laptop", "choice", "max_softmax", "auroc", 0.8, "cifar10")
    add("fashion_cnn_laptop", "strangers", "max_softmax", "auroc", 0.5, "mnist")
    add("mnist_cnn_laptop", "strangers", "max_softmax", "auroc", 0.4, "svhn")
    add("fashion_cnn_laptop", "choice", "disagreement", "auroc", 0.85, "cifar10", "0+1+2+3+4")
    add("fashion_cnn_laptop", "strangers", "disagreement", "auroc", 0.75, "mnist", "0+1+2+3+4")
    add("fashion_cnn_laptop", "calibration", "softmax with temperature", "ece", 0.013, seeds="0+1+2+3+4")
    add("smallnorb_laptop", "viewpoints", "energy", "auroc", 0.66, "novel", viewpoint="azimuth")
    add("fashion_laptop --evidence 1.0", "calibration", "softmax", "error", 0.11)
    add("fashion_laptop --evidence 1.0", "evidence", "", "answer_has_most_votes", 0.97)
    chosen = "fashion_laptop --no-norm-logit --evidence 0.1"  # by both its names
    add(chosen, "calibration", "softmax", "error", 0.09)
    add(chosen, "evidence", "", "answer_has_most_votes", 0.96)
    add("fashion_evidence_laptop", "evidence", "", "answer_has_most_votes", 0.92, seeds="1")
    return made


def uncertainty(results: Path) -> None:
    """The measures, and curves of VB alone."""
    results.mkdir(parents=True, exist_ok=True)
    with open(results / "uncertainty.csv", "w", newline="") as file:
        head = ("recipe", "viewpoint", "seeds", "test", "against", "score", "measure", "value", "commit")
        csv.writer(file).writerows([head, *measures()])
    curves: list[tuple[object, ...]] = [
        ("recipe", "viewpoint", "seeds", "curve", "score", "x", "y", "images", "commit")
    ]
    for score in ("softmax", "softmax with temperature"):
        curves += [("fashion_laptop", "", "0", "reliability", score, x, x, 50, "abc1234") for x in (0.5, 0.9)]
    curves += [("fashion_laptop", "", "0", "risk-coverage", "max_softmax", x, x / 9, 50, "abc1234") for x in (0.5, 1.0)]
    with open(results / "uncertainty_curves.csv", "w", newline="") as file:
        csv.writer(file).writerows(curves)


def all_of_them(results: Path) -> None:
    for make in (curves, priors, iterations, votes, uncertainty, affnist):
        make(results)

"""Sweep rules, softness, priors and iterations of VB routing, and measure accuracy, settling and sharpness.

python tools/agreement.py STAGE --out FOLDER [--part K/N] [--device cuda] [--seeds 0 1 2] [--data-folder FOLDER]
python tools/agreement.py STAGE --gather FOLDER

A stage is a list of settings, see ``STAGES``. Every network trains on its recipe's training images without those that
the recipe holds out, and is measured on these; test images are not read. Each setting leaves one JSON file in FOLDER,
and is not made again. --part takes every N-th setting, for several processes at the same time. --gather writes the
rows into results/agreement_STAGE.csv.
"""

import argparse
import csv
import dataclasses
import json
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import torch

from vbcaps import fit
from vbcaps.layers import Capsules
from vbcaps.routing import Posterior
from vbcaps.training.environment import commit
from vbcaps.training.loop import pick_device, prepare
from vbcaps.training.recipe import Recipe
from vbcaps.training.recipes import recipe
from vbcaps.weights.model import Model

RESULTS = Path(__file__).parents[1] / "results"
RULES = ("released", "paper", "agreement", "information")
SOFT = (1.0, 1 / 4, 1 / 16)
PRIORS: tuple[dict[str, float], ...] = ({}, dict(nu0=1.0, psi0=25.0), dict(psi0=100.0))
TEST_ITERS = (1, 2, 3, 4, 6, 10)
Settings = list[tuple[str, dict[str, Any]]]


def first() -> Settings:
    """Return every rule, softness and prior with 1, 2 and 3 iterations, and the other routings beside."""
    uniform = [("default", dict(iters=1, activation=rule) | prior) for rule, prior in product(RULES, PRIORS)]
    routed = [
        ("default", dict(iters=iters, activation=rule, temper=temper) | prior)
        for iters, prior, temper, rule in product((2, 3), PRIORS, SOFT, RULES)
    ]
    others = [("default", dict(routing=routing, iters=k)) for routing, k in product(("em", "dynamic"), (1, 2, 3))]
    return [*routed, *uniform, *others, ("default", dict(network="cnn", arch=(32, 32, 36, 36), iters=3))]


def strong() -> Settings:
    """Return priors that the votes of one image hardly move: a precision near ``stiffness``, even mixing proportions.

    Mass then begets neither precision nor mass, and an iteration is one of k-means with soft assignment.
    """

    def fields(rule: str, alpha0: float, nu0: float, stiffness: float, temper: float, iters: int) -> dict[str, Any]:
        prior = dict(alpha0=alpha0, nu0=nu0, psi0=stiffness / nu0)
        return dict(iters=iters, activation=rule, temper=temper) | prior

    rules = "agreement", "information"
    kinds = (100.0, 10.0), (1e3, 3.0), (1e3, 10.0), (1e3, 30.0), (1e3, 100.0), (1e4, 10.0)
    three = [fields(rule, a, *kind, t, 3) for kind, a, t, rule in product(kinds, (1e3, 1.0), (1.0, 0.25), rules)]
    two = [fields(rule, 1e3, 1e3, stiffness, 1.0, 2) for stiffness, rule in product((3.0, 10.0, 30.0, 100.0), rules)]
    five = [fields(rule, 1e3, 1e3, stiffness, 1.0, 5) for stiffness, rule in product((10.0, 30.0), rules)]
    return [("default", one) for one in (*three, *two, *five)]


def full_size() -> Settings:
    """Return the fast recipe of smallNORB, 30 epochs, with whole toys held out."""
    held: dict[str, Any] = dict(epochs=30, validation=0.2, hold_out="objects")
    stiff: dict[str, Any] = dict(nu0=1e3, psi0=0.03, temper=0.25)
    choices: list[dict[str, Any]] = [
        dict(activation="agreement") | stiff,
        dict(activation="agreement"),
        dict(activation="information"),
        dict(activation="paper"),
        dict(activation="agreement", weight_decay=0.1) | stiff,
        dict(activation="agreement", learn=("Psi0",)) | stiff,
        dict(activation="agreement", iters=1) | stiff,
        dict(activation="information") | stiff,
    ]
    return [("smallnorb_fast", held | choice) for choice in choices]


STAGES = dict(first=first, strong=strong, full_size=full_size)


def recipe_of(name: str, fields: dict[str, Any], seed: int) -> Recipe:
    """Return the recipe of a setting: at least an eighth of the training images is held out, and chooses the epoch."""
    fields = dict(fields)
    if fields.get("network") == "cnn":
        fields.pop("iters", None)
    one = recipe(name, **fields)
    return dataclasses.replace(one, seed=seed, validation=max(one.validation, 0.125), test=False)


def measure(model: Model, pixels: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
    """Return the error at each number of iterations, and what the class capsules do at the trained number."""
    net = model.net.eval()
    routings: list[Any] = [m for m in net.modules() if hasattr(m, "iters")]
    trained = [m.iters for m in routings]
    row: dict[str, Any] = {}
    x = model.view.test(pixels)
    with torch.no_grad():
        parts = [net(part) for part in x.split(500)]
        answer = torch.cat([p.logits for p in parts]).argmax(1)
        row["error"] = float((answer != labels).float().mean())
        if not isinstance(parts[0], Capsules):
            return row
        row |= of_classes(parts, answer, labels)
        for t in TEST_ITERS if routings else ():
            for m in routings:
                m.iters = t
            found = torch.cat([net(part).logits.argmax(1) for part in x.split(500)])
            row[f"error_{t}"] = float((found != labels).float().mean())
        for m, t in zip(routings, trained, strict=True):
            m.iters = t
    return row


def of_classes(parts: list[Capsules], answer: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
    """Return how often the answer has the most votes and the tightest posterior, and how sharply children choose."""
    found: list[Any] = [p.posterior for p in parts]
    r = torch.cat([q.r for q in found])  # n i j
    share = r / r.sum(-1, keepdim=True)
    row: dict[str, Any] = {}
    if isinstance(found[0], Posterior):
        votes = torch.cat([q.kappa for q in found])
        tight = torch.cat([q.psi.log().sum(-1) + 16 * torch.digamma(q.nu / 2) for q in found])
        row["most_votes"] = float((votes.argmax(1) == answer).float().mean())
        row["fewest_votes"] = float((votes.argmin(1) == answer).float().mean())
        row["tightest"] = float((tight.argmax(1) == answer).float().mean())
    entropy = -(share * share.clamp_min(1e-30).log()).sum(-1).mean()
    mean = share.mean(0)
    of_mean = -(mean * mean.clamp_min(1e-30).log()).sum(-1).mean()
    ln_J = torch.tensor(float(r.shape[-1])).log()
    row["sharpness"] = float(1 - entropy.cpu() / ln_J)
    row["information"] = float((of_mean - entropy).cpu() / ln_J)
    poses = torch.cat([p.poses for p in parts]).flatten(2)
    own = poses[torch.arange(len(answer), device=answer.device), answer]
    moves = torch.stack([own[labels == c].std(0) for c in labels.unique()]).mean(0)
    row["moving_entries"] = int((moves > 0.05).sum())
    return row


def make(name: str, fields: dict[str, Any], seed: int, device: str, data_folder: str | None) -> dict[str, Any]:
    """Train one network, and return its row."""
    one = recipe_of(name, fields, seed)
    row: dict[str, Any] = dict(recipe=name, seed=seed) | fields
    with tempfile.TemporaryDirectory() as folder:
        try:
            model = fit(one, Path(folder) / "run", device=device, data_folder=data_folder)
        except ArithmeticError as error:
            return row | dict(failed=str(error).split(":")[0])
        place = pick_device(device)
        held = prepare(one, data_folder, place).validation
        assert held is not None
        return row | measure(model, held.images, held.labels)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stage", choices=sorted(STAGES))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--gather", type=Path)
    parser.add_argument("--part", default="0/1")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--data-folder")
    given = parser.parse_args()
    if given.gather is not None:
        gather(given.stage, given.gather)
        return
    if given.out is None:
        parser.error("--out or --gather is needed")
    k, n = map(int, given.part.split("/"))
    given.out.mkdir(parents=True, exist_ok=True)
    jobs = [(name, fields, seed) for seed in given.seeds for name, fields in STAGES[given.stage]()]
    for name, fields, seed in jobs[k::n]:
        words = "-".join([name, *(f"{field}={value}" for field, value in fields.items()), f"seed{seed}"])
        file = given.out / (words.replace(" ", "") + ".json")
        if not file.exists():
            row = make(name, fields, seed, given.device, given.data_folder)
            file.write_text(json.dumps(row | dict(commit=commit())) + "\n")
            print(json.dumps(row), flush=True)


def gather(stage: str, folder: Path) -> None:
    """Write the rows of all files as one table."""
    rows = [json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    with open(RESULTS / f"agreement_{stage}.csv", "w", newline="") as file:
        table = csv.DictWriter(file, columns, lineterminator="\n")
        table.writeheader()
        table.writerows(rows)


if __name__ == "__main__":
    main()

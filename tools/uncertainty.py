"""Measure how far the uncertainty of trained networks can be trusted, and record it in results/uncertainty.csv.

python tools/uncertainty.py --all runs/series/uncertainty [--data-folder FOLDER] [--device auto] [--write]
python tools/uncertainty.py RUN... [--data-folder FOLDER] [--device auto] [--write]
python tools/uncertainty.py --ensemble RUN RUN... [--data-folder FOLDER] [--device auto] [--write]

--all measures every finished run in a folder, and every five that differ in their seeds alone as an ensemble. A RUN is
the folder of a finished run with a held-out share, such as `tools/series.py uncertainty` makes. For each one:

- calibration on test images, before and after a temperature that is fitted on held-out images, at most 2,000 as of
  each set, and with the posterior's noise;
- errors: how well each score finds them;
- strangers: how well each score tells test images from those of other datasets (``STRANGERS``);
- novel viewpoints, where the recipe has one: from familiar ones;
- damage: scores of test images that are turned, blurred, noisy or partly hidden.

Densities are fitted on training images. Which score stands for a kind of network is chosen on one pair alone, Fashion-
MNIST's held-out share against training images of CIFAR-10 (rows ``choice``); all else is measured on test images. With
--ensemble the mean probabilities of several runs are measured in the same way. A run that is in the table is skipped;
several processes may write to one table.
"""

import argparse
import csv
import functools
import io
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from recorded import flags
from torch import Tensor

import vbcaps
from vbcaps import Model
from vbcaps.data import Split, load_dataset
from vbcaps.layers import ClassCaps
from vbcaps.models import CapsNet
from vbcaps.training.environment import commit
from vbcaps.training.loop import pick_device, prepare
from vbcaps.training.recipe import Recipe
from vbcaps.training.runfolder import read_recipe
from vbcaps.training.runlog import Data
from vbcaps.uncertainty import (
    Look,
    aupr,
    auroc,
    brier,
    ece,
    fit_density,
    fit_temperature,
    fpr95,
    look,
    mean_field_probabilities,
    nll,
    reliability,
    risk_coverage,
    sampled_probabilities,
    surprise,
)
from vbcaps.uncertainty.damage import LEVELS, damage
from vbcaps.uncertainty.scores import joined, of_logits
from vbcaps.weights.inputs import read_pixels, side_of

ROOT = Path(__file__).parents[1]
TABLE, CURVES = ROOT / "results" / "uncertainty.csv", ROOT / "results" / "uncertainty_curves.csv"
HEAD = ("recipe", "viewpoint", "seeds", "test", "against", "score", "measure", "value", "commit")
CURVES_HEAD = ("recipe", "viewpoint", "seeds", "curve", "score", "x", "y", "images", "commit")
# Datasets that a network has not seen; CIFAR-10's training images against Fashion-MNIST are the pair for choices.
STRANGERS = {
    "fashion-mnist": ("mnist", "svhn", "smallnorb"),
    "mnist": ("fashion-mnist", "svhn", "cifar10"),
    "cifar10": ("svhn",),
    "svhn": ("cifar10",),
    "smallnorb": ("mnist", "fashion-mnist"),
}
CHOICE = ("fashion-mnist", "cifar10")
IMAGES, TRAIN, DAMAGED = 2000, 4000, 500  # images of each set, training images for densities, damaged images
MEMBERS = 5  # of an ensemble
DENSITIES = (
    "logits", "features", "class_caps.m", "class_caps.kappa", "class_caps.precision", "logits+class_caps.m",
    "class_caps.m+class_caps.kappa+class_caps.precision", "conv_caps1.m+conv_caps1.kappa+conv_caps1.precision",
    "conv_caps1.m", "conv_caps2.m", "logits+class_caps.m+conv_caps1.m+conv_caps2.m",
)  # fmt: skip
WHEN_DAMAGED = (
    "max_softmax", "entropy", "energy", "precision", "pose_entropy", "votes", "elbo", "disagreement",
    "density features", "density class_caps.m", "density class_caps.kappa, per class",
)  # fmt: skip
PER_CLASS = ("features", "class_caps.kappa", "logits")  # also with one covariance for each class


Row = dict[str, Any]


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="the folder of a finished run")
    parser.add_argument("--all", type=Path, metavar="FOLDER", help="measure all finished runs in it, and ensembles")
    parser.add_argument("--ensemble", action="store_true", help="measure the mean of all runs, not each of them")
    parser.add_argument("--data-folder", metavar="FOLDER", help="folder of the datasets")
    parser.add_argument("--device", default="auto", help="where the networks run")
    parser.add_argument("--write", action="store_true", help="write the tables, not only print")
    arguments = parser.parse_args(words)
    if bool(arguments.runs) == bool(arguments.all):
        parser.error("give the folders of finished runs, or --all and a folder of such folders")
    if arguments.ensemble and len(arguments.runs) < 2:
        parser.error("an --ensemble has at least two RUNs, and --all finds its own")
    if unfinished := [str(run) for run in arguments.runs if not (run / "result.json").is_file()]:
        parser.error(f"{', '.join(unfinished)}: not the folder of a finished run, which has a result.json")
    groups = [arguments.runs] if arguments.ensemble else [[run] for run in arguments.runs]
    if arguments.all and not (groups := in_folder(arguments.all)):
        parser.error(f"{arguments.all} has no folder of a finished run")
    for runs in groups:
        recipes = [read_recipe(run) for run in runs]
        seeds = "+".join(str(recipe.seed) for recipe in recipes)
        changed = flags(recipes[0], leave_out=("viewpoint", "hold_out", "validation", "test"))
        name = " ".join(filter(None, [recipes[0].name, changed]))
        key = dict(recipe=name, viewpoint=recipes[0].viewpoint or "", seeds=seeds)
        if arguments.write and any(all(row[k] == v for k, v in key.items()) for row in read(TABLE)):
            print(f"{', '.join(filter(None, key.values()))}: recorded already")
            continue
        members = [vbcaps.load(run, device=pick_device(arguments.device)) for run in runs]
        data = prepare(recipes[0], arguments.data_folder, torch.device("cpu"))
        if data.validation is None:
            parser.error(f"{runs[0]} has no held-out share, which temperatures and choices need")
        measure = of_ensemble if len(members) > 1 else of_one
        rows, curves = measure(members, data, arguments.data_folder)
        print(f"{', '.join(filter(None, key.values()))}: {len(rows)} rows")
        if arguments.write:
            append(TABLE, HEAD, [key | row | dict(commit=commit()) for row in rows])
            append(CURVES, CURVES_HEAD, [key | row | dict(commit=commit()) for row in curves])
        else:
            for row in rows:
                if row["measure"] in ("auroc", "ece", "error", "nll"):
                    print(*row.values())


def in_folder(folder: Path) -> list[list[Path]]:
    """Return each finished run in a folder alone, then those of each ensemble that is complete."""
    runs = sorted(path.parent for path in folder.glob("*/result.json"))
    alike: dict[Recipe, dict[int, Path]] = {}
    for run in runs:
        recipe = read_recipe(run)
        alike.setdefault(replace(recipe, seed=0, save_seconds=0.0), {})[recipe.seed] = run
    return [[run] for run in runs] + [
        [run for _, run in sorted(seeds.items())] for seeds in alike.values() if len(seeds) == MEMBERS
    ]


# --- the images ------------------------------------------------------------------------------------------------------


def some(split: Split, count: int, seed: int = 0) -> Split:
    """Return so many images of a split, the same ones every time."""
    order = torch.randperm(len(split.labels), generator=torch.Generator().manual_seed(seed))
    return split.take(order[:count].sort().values)


@functools.cache
def some_of(name: str, part: str, data_folder: str | None) -> Split:
    """Return the images of another dataset that are looked at; each is read once."""
    return some(getattr(load_dataset(name, data_folder), part), IMAGES)


def strangers(model: Model, name: str, data_folder: str | None, part: str = "test") -> Tensor:
    """Return images of another dataset in the size and channels of the network; a stereo pair is one image twice."""
    images = some_of(name, part, data_folder).images
    channels = model.net.in_channels
    images = images[:, :1] if images.shape[1] == 2 else images
    if channels == 2:
        return read_pixels(images, side_of(model.recipe), 1).expand(-1, 2, -1, -1).contiguous()
    return read_pixels(images, side_of(model.recipe), channels)


def sets(model: Model, data: Data, data_folder: str | None) -> Iterator[tuple[str, str, Tensor]]:
    """Return the images that a network is tested on besides its own test images: test, against, images."""
    dataset = model.recipe.dataset
    if model.recipe.viewpoint:
        assert data.familiar is not None
        yield "viewpoints", "novel", some(data.test, IMAGES).images
        return
    for name in STRANGERS[dataset]:
        yield "strangers", name, strangers(model, name, data_folder)


# --- one network -----------------------------------------------------------------------------------------------------


def of_one(members: Sequence[Model], data: Data, data_folder: str | None) -> tuple[list[Row], list[Row]]:
    """Measure one network."""
    (model,) = members
    assert data.validation is not None
    test = some(data.familiar or data.test, IMAGES)
    held = some(data.validation, IMAGES)
    train = some(data.train, TRAIN)
    of_held, of_test, of_train = (look(model, part.images) for part in (held, test, train))
    t = fit_temperature(of_held.logits, held.labels)
    densities = {
        f"density {name}" + ("" if tied else ", per class"): (
            name.split("+"),
            fit_density(joined(of_train.features, name.split("+")), train.labels, model.num_classes, tied=tied),
        )
        for name, tied in itertools.product(DENSITIES, (True, False))
        if set(name.split("+")) <= set(of_train.features) and (tied or name in PER_CLASS)
    }

    def single(seen: Look) -> dict[str, Tensor]:
        of_densities = {
            name: -density.log_prob(joined(seen.features, features)) for name, (features, density) in densities.items()
        }
        return of_logits(seen.logits, t) | seen.scores | of_densities

    reference = single(of_held)

    def all_scores(seen: Look) -> dict[str, Tensor]:
        found = single(seen)
        surprises = {name: surprise(found[name], reference[name]) for name in ("max_softmax", *densities)}
        both = {f"{name} and max_softmax": surprises[name] + surprises["max_softmax"] for name in densities}
        return found | both

    def looked_at(seen: Look) -> tuple[Tensor, dict[str, Tensor]]:
        return seen.logits, all_scores(seen)

    familiar = all_scores(of_test)
    rows = calibration(of_test.logits, test.labels, t) + of_posterior(model, test, held, t)
    wrong = of_test.logits.argmax(1) != test.labels
    rows += errors(familiar, wrong) + evidence(model, of_test)
    if (model.recipe.dataset, model.recipe.viewpoint) == (CHOICE[0], None):
        images = strangers(model, CHOICE[1], data_folder, part="train")
        rows += apart("choice", CHOICE[1], all_scores(of_held), all_scores(look(model, images)))
    for kind, against, images in sets(model, data, data_folder):
        rows += apart(kind, against, familiar, all_scores(look(model, images)))
    rows += when_damaged(model, data, lambda images: looked_at(look(model, images)))
    return rows, curves_of(of_test.logits, test.labels, t, familiar, wrong)


def calibration(logits: Tensor, labels: Tensor, t: float) -> list[Row]:
    rows = [row("calibration", "", "", "temperature", t)]
    for name, p in (("softmax", logits.softmax(1)), ("softmax with temperature", (logits / t).softmax(1))):
        rows += of_probabilities(name, p, labels)
    return rows


def of_probabilities(name: str, p: Tensor, labels: Tensor) -> list[Row]:
    measured = dict(
        error=float((p.argmax(1) != labels).double().mean()), ece=ece(p, labels),
        adaptive_ece=ece(p, labels, adaptive=True), nll=nll(p, labels), brier=brier(p, labels),
    )  # fmt: skip
    return [row("calibration", "", name, measure, value) for measure, value in measured.items()]


@torch.no_grad()
def of_posterior(model: Model, test: Split, held: Split, t: float) -> list[Row]:
    """Measure the two ways to carry the posterior's noise into probabilities, each with a temperature of its own."""
    if not isinstance(model.net, CapsNet) or model.recipe.routing != "vb":
        return []
    torch.manual_seed(0)
    layer = model.net.class_caps
    assert isinstance(layer, ClassCaps)

    def log_probabilities(images: Tensor) -> dict[str, Tensor]:
        found: dict[str, list[Tensor]] = {"samples of the posterior": [], "closed form of the posterior": []}
        for part in images.split(250):
            out = model.net(model.view.test(part.to(model.device)))
            found["samples of the posterior"].append(sampled_probabilities(layer, out, 32, t).cpu())
            found["closed form of the posterior"].append(mean_field_probabilities(layer, out, t).cpu())
        return {name: torch.cat(parts).clamp_min(1e-30).log() for name, parts in found.items()}

    rows, of_test, of_held = [], log_probabilities(test.images), log_probabilities(held.images)
    for name, log_p in of_test.items():
        again = fit_temperature(of_held[name], held.labels)
        rows += of_probabilities(name, log_p.exp(), test.labels)
        rows += of_probabilities(f"{name} with temperature", (log_p / again).softmax(1), test.labels)
    return rows


def evidence(model: Model, seen: Look) -> list[Row]:
    """Measure how often the answer is the class with most votes, and the class whose votes agree most."""
    if not seen.scores:
        return []
    answer = seen.logits.argmax(1)
    votes = seen.features["class_caps.kappa"]
    agree = seen.features["class_caps.precision"].unflatten(1, (model.num_classes, -1)).sum(2)  # ln|E[Lambda_j]|
    return [
        row("evidence", "", "", f"answer_has_most_{what}", float((of.argmax(1) == answer).double().mean()))
        for what, of in (("votes", votes), ("agreement", agree))
    ]


def errors(scores: dict[str, Tensor], wrong: Tensor) -> list[Row]:
    """Measure how well each score finds errors."""
    if not 0 < int(wrong.sum()) < len(wrong):
        return []
    rows = []
    for name, score in scores.items():
        rows.append(row("errors", "", name, "auroc", auroc(score[~wrong], score[wrong])))
        rows.append(row("errors", "", name, "area_under_risk_coverage", risk_coverage(score, wrong).area()))
    return rows


def apart(test: str, against: str, familiar: dict[str, Tensor], strange: dict[str, Tensor]) -> list[Row]:
    """Measure how well each score tells strange images from familiar ones."""
    rows = []
    for name in familiar:
        pair = familiar[name], strange[name]
        measured = dict(auroc=auroc(*pair))
        if test in ("strangers", "viewpoints"):
            measured |= dict(aupr=aupr(*pair), fpr95=fpr95(*pair))
        rows += [row(test, against, name, measure, value) for measure, value in measured.items()]
    return rows


def when_damaged(
    model: Model, data: Data, all_scores: Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]
) -> list[Row]:
    """Measure the error on damaged images, and how well each score tells them from the undamaged ones.

    Args:
        model: a network.
        data: its data.
        all_scores: returns logits and scores of images.
    """
    if model.recipe.viewpoint:
        return []
    own, rows = some(data.test, DAMAGED, seed=1), []
    before: dict[str, Tensor] = {}
    for kind, levels in LEVELS.items():
        for level in (0, *levels) if not before else levels:
            logits, found = all_scores(damage(own.images, kind, level))
            wrong = logits.argmax(1) != own.labels
            rows.append(row("damage", f"{kind} {level:g}", "", "error", float(wrong.double().mean())))
            found = {name: score for name, score in found.items() if name in WHEN_DAMAGED}
            before = before or found
            rows += apart("damage", f"{kind} {level:g}", before, found)
    return rows


def curves_of(logits: Tensor, labels: Tensor, t: float, scores: dict[str, Tensor], wrong: Tensor) -> list[Row]:
    """Return the reliability diagram before and after the temperature, and risk-coverage curves of some scores."""
    rows = []
    for name, p in (("softmax", logits.softmax(1)), ("softmax with temperature", (logits / t).softmax(1))):
        found = reliability(p, labels)
        for x, y, images in zip(*(one.tolist() for one in found), strict=True):
            rows.append(dict(curve="reliability", score=name, x=f"{x:.5g}", y=f"{y:.5g}", images=images))
    for name in ("max_softmax", "energy", "density class_caps.m", "density features", "disagreement"):
        if name in scores:
            curve = risk_coverage(scores[name], wrong)
            every = max(len(wrong) // 40, 1)
            for k in range(every - 1, len(wrong), every):
                x, y = float(curve.coverage[k]), float(curve.risk[k])
                rows.append(dict(curve="risk-coverage", score=name, x=f"{x:.5g}", y=f"{y:.5g}", images=k + 1))
    return rows


def row(test: str, against: str, score: str, measure: str, value: float) -> Row:
    return dict(test=test, against=against, score=score, measure=measure, value=f"{value:.5g}")


# --- an ensemble -----------------------------------------------------------------------------------------------------


def of_ensemble(members: Sequence[Model], data: Data, data_folder: str | None) -> tuple[list[Row], list[Row]]:
    """Measure the mean of the members' calibrated probabilities, with a temperature of its own."""
    assert data.validation is not None
    test, held = some(data.familiar or data.test, IMAGES), some(data.validation, IMAGES)

    def each(images: Tensor) -> Tensor:  # member n c
        return torch.stack([model.predict(images) for model in members])

    def all_scores(p: Tensor) -> dict[str, Tensor]:
        log_mean = p.mean(0).clamp_min(1e-30).log()
        entropy = -(p * p.clamp_min(1e-30).log()).sum(2).mean(0)
        found = of_logits(log_mean, t)
        del found["energy"]  # probabilities have lost it
        return found | dict(disagreement=-(p.mean(0) * log_mean).sum(1) - entropy)

    of_held, of_test = each(held.images), each(test.images)
    log_held, log_test = (p.mean(0).clamp_min(1e-30).log() for p in (of_held, of_test))
    t = fit_temperature(log_held, held.labels)
    familiar, wrong = all_scores(of_test), log_test.argmax(1) != test.labels
    rows = calibration(log_test, test.labels, t) + errors(familiar, wrong)
    first = members[0]
    if (first.recipe.dataset, first.recipe.viewpoint) == (CHOICE[0], None):
        images = strangers(first, CHOICE[1], data_folder, part="train")
        rows += apart("choice", CHOICE[1], all_scores(of_held), all_scores(each(images)))
    for kind, against, images in sets(first, data, data_folder):
        rows += apart(kind, against, familiar, all_scores(each(images)))
    rows += when_damaged(first, data, lambda images: ((p := each(images)).mean(0), all_scores(p)))
    return rows, curves_of(log_test, test.labels, t, familiar, wrong)


# --- the tables ------------------------------------------------------------------------------------------------------


def read(table: Path) -> list[Row]:
    if not table.exists():
        return []
    with open(table, newline="") as file:
        return list(csv.DictReader(file))


def append(table: Path, head: Sequence[str], rows: list[Row]) -> None:
    """Append rows by one call of the system, so that those of several processes do not mix."""
    text = io.StringIO()
    writer = csv.DictWriter(text, head, lineterminator="\n")
    with suppress(FileExistsError), open(table, "x", newline="") as file:  # the first process writes the head
        file.write(",".join(head) + "\n")
    writer.writerows(rows)
    file_number = os.open(table, os.O_WRONLY | os.O_APPEND)
    try:
        os.write(file_number, text.getvalue().encode())
    finally:
        os.close(file_number)


if __name__ == "__main__":
    main()

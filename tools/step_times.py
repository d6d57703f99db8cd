"""Time a training step of VB and of EM routing with 1 to 5 iterations, on one thread of the CPU.

python tools/step_times.py [--recipe fashion_laptop] [--repeats 40] [--csv results/step_times.csv]

A step is that of a training run: gather, augment, forward, loss, backward, update. What is measured is the processor's
time for it, which on an idle machine is the time that passes; on a busy one the waiting is left out. All networks are
in one process, and their steps take turns. A row has the median of a network's steps, and the times that a tenth of the
steps are below and above. The file is written anew.
"""

import argparse
import csv
import os
import statistics
import time
from datetime import date
from pathlib import Path

import torch

from vbcaps.data import Split
from vbcaps.data.facts import FACTS
from vbcaps.training.environment import environment
from vbcaps.training.learner import Learner
from vbcaps.training.recipe import Recipe
from vbcaps.training.recipes import recipe

ROUTINGS, ITERATIONS = ("vb", "em"), (1, 2, 3, 4, 5)
WARM = 3  # first steps, which are not timed


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="fashion_laptop", help="a recipe of VB that has a twin of EM")
    parser.add_argument("--repeats", type=int, default=40, help="steps of each network that are timed")
    parser.add_argument("--csv", type=Path, default=Path(__file__).parents[1] / "results" / "step_times.csv")
    arguments = parser.parse_args(words)
    before = os.getloadavg()[0]
    torch.set_num_threads(1)
    parent, _, size = arguments.recipe.rpartition("_")
    names = dict(zip(ROUTINGS, (arguments.recipe, f"{parent}_em_{size}"), strict=True))
    recipes = [recipe(names[routing], iters=iters) for routing in ROUTINGS for iters in ITERATIONS]
    times = alternate([learner(one) for one in recipes], arguments.repeats)
    about = environment(torch.device("cpu"), 1)
    rows = []
    for one, some in zip(recipes, times, strict=True):
        deciles = statistics.quantiles(some, n=10, method="inclusive")
        numbers = dict(ms=statistics.median(some), low=deciles[0], high=deciles[-1])
        rows.append(
            dict(
                routing=one.routing, iters=one.iters, **{k: f"{v:.2f}" for k, v in numbers.items()}, repeats=len(some),
                recipe=one.name, network=",".join(map(str, one.arch)), image=one.crop, batch=one.batch,
                threads=about["threads"], commit=about["commit"], device=about["device"], torch=about["torch"],
                load_before=f"{before:.1f}", load_after=f"{os.getloadavg()[0]:.1f}", date=date.today().isoformat(),
            )
        )  # fmt: skip
        print("  ".join(f"{k} {rows[-1][k]}" for k in ("routing", "iters", "ms", "low", "high")), flush=True)
    with open(arguments.csv, "w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def learner(one: Recipe) -> Learner:
    """Return a learner of the recipe, with random images of the shape of its dataset."""
    facts, count = FACTS[one.dataset], 4 * one.batch
    side = one.image_size or facts.side
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (count, facts.channels, side, side), generator=generator, dtype=torch.uint8)
    split = Split(images, torch.arange(count) % facts.classes)
    return Learner(one, split, one.view().fit(split), facts.classes)


def alternate(learners: list[Learner], repeats: int) -> list[list[float]]:
    """Return the milliseconds of processor time of each learner's steps, which take turns."""
    times: list[list[float]] = [[] for _ in learners]
    for turn in range(WARM + repeats):
        for one, some in zip(learners, times, strict=True):
            if turn % one.steps == 0:
                one.step = 0
                one.begin()
            start = time.process_time()
            one()
            if turn >= WARM:
                some.append(1e3 * (time.process_time() - start))
    return times


if __name__ == "__main__":
    main()

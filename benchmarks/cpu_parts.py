"""What a training step of a recipe spends its time on, on one thread of a CPU.

python benchmarks/cpu_parts.py [--recipe default] [--steps 20] [--csv benchmarks/cpu_parts.csv]

Every operator of a step is counted once, by PyTorch's profiler, without the operators that it calls; the C++ kernels
belong to the operator that calls them. `python` is the rest: the time of the thread in which no operator ran. Operators
that belong to no part are `other`. Other programs on the machine only add time, so each number is the least of many
steps.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Callable

import torch
from measure import record
from torch.profiler import ProfilerActivity, profile

from vbcaps.data import Split
from vbcaps.training.learner import Learner
from vbcaps.training.memory import freed_memory_kept
from vbcaps.training.recipes import recipe as named_recipe

PARTS = {  # the first part with a matching piece of the operator's name
    "routing backward": ("_routeBackward", "_route_backward"),
    "routing forward": ("_route",),
    "capsule norms": ("cpu_primary", "cpu_parents"),
    "convolutions": ("convolution", "conv2d"),
    "BatchNorm and ReLU": ("batch_norm", "threshold", "relu", "BatchNorm"),
    "optimiser": ("_fused_", "Optimizer", "_foreach"),
    "images": ("index", "embedding", "_to_copy", "div"),
    "copies": ("copy_", "clone", "contiguous"),
}


def part_of(name: str) -> str:
    """Return the part to which an operator belongs."""
    return next((part for part, pieces in PARTS.items() if any(piece in name for piece in pieces)), "other")


def parts(step: Callable[[], None], steps: int) -> dict[str, float]:
    """Return the milliseconds of a step without the profiler (``step``), and of its parts."""
    for _ in range(3):
        step()
    whole, found = [], defaultdict(list)
    for _ in range(steps):
        start = time.thread_time()
        step()
        whole.append(1e3 * (time.thread_time() - start))
    for _ in range(steps):
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            step()
        times: dict[str, float] = defaultdict(float)
        for event in seen.key_averages():
            times[part_of(event.key)] += event.self_cpu_time_total / 1e3
        for part in (*PARTS, "other"):
            found[part].append(times[part])
    least = {part: min(values) for part, values in found.items()}
    return {"step": min(whole), **least, "python": max(0.0, min(whole) - sum(least.values()))}


def make_step(name: str) -> Callable[[], None]:
    """Return a function that trains the network of a recipe by one step, on random images."""
    recipe = named_recipe(name)
    random = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (40 * recipe.batch, 1, 28, 28), generator=random, dtype=torch.uint8)
    split = Split(images, torch.randint(0, 10, (len(images),), generator=random))
    learner = Learner(recipe, split, recipe.view().fit(split), 10)
    learner.begin()

    def step() -> None:
        learner.work()
        learner.k.zero_()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipe", default="default")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--csv")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with freed_memory_kept(torch.device("cpu")):  # as in a training
        times = parts(make_step(given.recipe), given.steps)
    found = {name: f"{ms:.3f}" for name, ms in times.items()}
    record({"recipe": given.recipe, **found}, torch.device("cpu"), given.csv)


if __name__ == "__main__":
    main()

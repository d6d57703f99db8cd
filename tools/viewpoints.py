"""Which choices carry over to novel viewpoints? Table 2 made of smallNORB's training set alone, not of its test; and
affNIST of MNIST's.

python tools/viewpoints.py [CHOICE...] [--base smallnorb_elevation_fast] [--also CHOICE] [--held 0.4] [--splits 0 1]
                             [--epochs 100] [--stop 30] [--workers 3] [--csv results/viewpoints.csv]

Some toys are held out; the network is trained on the others at familiar viewpoints. A row has, for each epoch, the
errors on the held-out toys at familiar and at novel viewpoints, so that choices can be compared at equal errors on
familiar viewpoints, as in the paper. With --base affnist_matched_fast digits are held out, and affine maps of them are
the novel images. The learning rate falls over --epochs; the run ends after --stop.
"""

import dataclasses
import functools
import time
from collections.abc import Iterable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from choices import Job, compare, jobs_of, options, recipe_of, refusing
from recorded import flags

if TYPE_CHECKING:
    from vbcaps.data import Split

MAPS = 4  # of each digit
CHOICES = (
    "",
    # as in Table 2, where elevation squeezes what is seen, and azimuth turns it
    "rotate=15",
    "zoom=0.2",
    "stretch=0.2",
    "rotate=15 zoom=0.2 stretch=0.2",
    "rotate=15 zoom=0.2 stretch=0.2 resample=bicubic",
    # what makes familiar toys harder to tell, and may do nothing for novel views
    "mixup=0",
    "cutout=0",
    # when it stops the rate is high
    "lr=0.0015",
    "optimiser=adam lr=0.006 weight_decay=0",
    "optimiser=adam lr=0.003 weight_decay=0",
)


def main(words: list[str] | None = None) -> None:
    parser = options(__doc__, base="smallnorb_elevation_fast", csv="viewpoints.csv")
    parser.add_argument("--stop", type=int, default=30, help="after so many epochs; what is matched comes early")
    parser.set_defaults(epochs=100)
    arguments = parser.parse_args(words)
    with refusing():
        base = recipe_of(arguments)
        if base.viewpoint is None and base.dataset != "affnist":
            raise ValueError(
                f"{base.name} has nothing novel; smallnorb_azimuth_fast, smallnorb_elevation_fast and affnist_fast do"
            )
        if arguments.stop < 1:
            raise ValueError(f"stop must be at least 1, got {arguments.stop}")
        jobs = jobs_of(dataclasses.replace(base, match=0.0), arguments, CHOICES)
    compare(functools.partial(run, stop=arguments.stop), jobs, arguments)


def run(job: Job, stop: int) -> dict[str, Any]:
    """Train, and return a row; the row of a run that fails says how, and has the epochs before."""
    import torch

    from vbcaps.training.environment import environment
    from vbcaps.training.learner import NEVER, Learner
    from vbcaps.training.loop import pick_device, scorer

    recipe, device, start = job.recipe, pick_device(job.device), time.time()
    classes, *parts = parts_of(job)
    view = recipe.view().fit(parts[0])
    train, familiar, novel = (part.to(device) for part in parts)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False  # as ``fit`` has it
    stream = torch.cuda.Stream(device) if device.type == "cuda" else None
    if stream is not None:
        torch.cuda.synchronize(device)  # the data must be there
    errors: list[tuple[float, float]] = []
    train_error, note = float("nan"), ""
    with torch.cuda.stream(stream) if stream is not None else nullcontext():
        learner = Learner(recipe, train, view, len(classes), stream=stream)
        scorers = [scorer(learner, part, classes) for part in (familiar, novel)]
        while learner.epoch < min(stop, recipe.epochs):
            learner.begin()
            while learner.step < learner.steps:
                learner()
            totals = learner.totals()
            if totals.bad != NEVER:
                note = f"not finite in epoch {learner.epoch + 1}"
                break
            learner.epoch, learner.step = learner.epoch + 1, 0
            train_error = totals.error
            first, second = (score().error for score in scorers if score is not None)
            errors.append((first, second))
        learner.disconnect()
    about = environment(device, 1)
    return dict(
        base=recipe.name, choice=job.choice, held=job.held, split=recipe.split, epochs=recipe.epochs,
        familiar=percent(one for one, _ in errors), novel=percent(one for _, one in errors),
        train_error=f"{train_error:.5f}", seconds=f"{time.time() - start:.0f}", flags=flags(recipe),
        **{key: about[key] for key in ("commit", "device", "torch")}, note=note,
    )  # fmt: skip


def parts_of(job: Job) -> "tuple[tuple[str, ...], Split, Split, Split]":
    """Return the classes, images to train on, and held-out images at familiar and at novel viewpoints."""
    from vbcaps.data import Split, hold_out, load_dataset, viewpoints
    from vbcaps.data.affnist import affine_digits

    recipe = job.recipe
    if recipe.viewpoint is None:
        digits = load_dataset("mnist", job.data_folder)
        rest, held = hold_out(digits.train, job.held, recipe.split)
        return digits.classes, rest, held, Split(affine_digits(held.images, MAPS), held.labels.repeat(MAPS))
    toys = load_dataset(recipe.dataset, job.data_folder, recipe.image_size)
    rest, held = hold_out(toys.train, job.held, recipe.split, "objects")
    return toys.classes, *viewpoints(dataclasses.replace(toys, train=rest, test=held), recipe.viewpoint)


def percent(errors: Iterable[float]) -> str:
    return " ".join(f"{100 * error:.2f}" for error in errors)


if __name__ == "__main__":
    main()

"""Make the runs of a series one after another, and record them in results/series/.

python tools/series.py NAME [--out runs] [--data-folder FOLDER] [--seeds 3] [--scale laptop] [--only fashion]
                            [--together] [--list | --record]

A series is a list of recipes with changed fields, in order of importance: every run of seed 0, then those of seed 1,
and so on. Each run has its folder in OUT/series/NAME/. A run that has ended in OUT/series/, or is recorded in results/,
under whatever name, is not made again. A run that was begun is resumed. A run whose loss is not finite is written down
as failed (failed.json), and the series goes on. Ctrl-C saves the run and ends the series; the same command goes on.
Several processes may make the same series: each leaves the runs alone that another one is making. --only takes the
recipes whose names begin so. --together trains all seeds of a setting at the same time, which uses a GPU better.

--list prints the runs and makes none. --record copies what is finished or failed into results/series/NAME/, as
tools/record.py does: it refuses runs from changed source.
"""

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import count, product
from pathlib import Path
from typing import Any, NamedTuple

from record import RESULTS, check, contents

from vbcaps.training.files import RunError, lock, read_json, write, write_json
from vbcaps.training.recipe import Recipe, nearest
from vbcaps.training.recipes import recipe
from vbcaps.training.runfolder import read_recipe, read_result

Settings = list[tuple[str, dict[str, Any]]]  # recipes by name, with the fields that are changed

SCALES = ("laptop", "fast")
DATASETS = ("smallnorb", "fashion", "svhn", "cifar10")
OTHERS = ("smallnorb", "svhn", "cifar10")
NETWORKS = ("", "_em", "_dynamic", "_cnn")
COEFFICIENTS = (0.01, 0.1, 1.0, 10.0)  # of both priors, in the paper's section on sensitivity
ITERATIONS = (1, 2, 3, 4, 5)


class Job(NamedTuple):
    """One run of a series."""

    base: str  # the recipe's name
    fields: dict[str, Any]  # what is changed in it
    seed: int

    @property
    def recipe(self) -> Recipe:
        return recipe(self.base, **self.fields, seed=self.seed)

    @property
    def folder(self) -> str:
        """Return the name of the run's folder, as ``fashion_laptop-alpha0=0.1-seed0``."""
        changes = (f"{field}={'+'.join(v) if isinstance(v, tuple) else v}" for field, v in self.fields.items())
        return "-".join([self.base, *changes, f"seed{self.seed}"])


# --- the series ------------------------------------------------------------------------------------------------------


def curves(scale: str) -> Settings:
    """VB and EM routing on the four datasets, with a validation error after each epoch.

    Hyperparameters are the same in both: on a laptop, where each has a learning rate of its own, those of VB.
    """

    def held(dataset: str) -> dict[str, Any]:
        if scale == "laptop":  # these recipes hold out a tenth
            return {}
        return dict(validation=0.1, test=True, hold_out="objects" if dataset == "smallnorb" else "images")

    rate = dict(lr=recipe("fashion_laptop").lr) if scale == "laptop" else {}
    return [(f"{dataset}{routing}_{scale}", held(dataset) | rate) for dataset in DATASETS for routing in ("", "_em")]


def priors(scale: str) -> Settings:
    """Fashion-MNIST: alpha0 learned, the default priors, then the other pairs of the paper's coefficients.

    Of these the corners come first, so that a series that was stopped has them.
    """
    short = shorter(scale)

    def order(pair: tuple[float, float]) -> tuple[bool, float]:
        return pair != (1.0, 1.0), -sum(abs(COEFFICIENTS.index(one) - 1.5) for one in pair)

    grid = sorted(product(COEFFICIENTS, COEFFICIENTS), key=order)
    pairs: Settings = [(f"fashion_{scale}", dict(alpha0=alpha0, psi0=psi0) | short) for alpha0, psi0 in grid]
    return [(f"fashion_{scale}", dict(learn=("alpha0",)) | short), *pairs]


def iterations(scale: str) -> Settings:
    """Fashion-MNIST with 1 to 5 iterations of VB and EM routing, which share their learning rate as in ``curves``."""
    rate = dict(lr=recipe("fashion_laptop").lr) if scale == "laptop" else {}
    runs = product(ITERATIONS, ("", "_em"))
    return [(f"fashion{routing}_{scale}", dict(iters=iters) | shorter(scale) | rate) for iters, routing in runs]


def votes(scale: str) -> Settings:
    """One network of three iterations on smallNORB, whose votes are measured after each epoch."""
    return [(f"smallnorb_{scale}", dict(iters=3) | (dict(epochs=7) if scale == "laptop" else {}))]


def uncertainty(scale: str) -> Settings:
    """Every routing and the CNN on every dataset, and on smallNORB's familiar azimuths alone, for tools/uncertainty.py.

    With --seeds 5 there are the members of ensembles of five. The laptop's runs of VB are those of ``curves``.
    """
    held = {} if scale == "laptop" else dict(validation=0.1, test=True)
    networks = [f"{dataset}{network}_{scale}" for dataset in ("fashion", "mnist", *OTHERS) for network in NETWORKS]
    objects = {} if scale == "laptop" else dict(hold_out="objects")
    runs: Settings = [(one, held | (objects if one.startswith("smallnorb") else {})) for one in networks]
    azimuths: dict[str, Any] = held | objects | dict(viewpoint="azimuth")
    return runs + [(f"smallnorb{network}_{scale}", azimuths) for network in NETWORKS]


def evidence(scale: str) -> Settings:
    """Fashion-MNIST with choices under which the posterior of the class layer may count evidence."""
    held: dict[str, Any] = {} if scale == "laptop" else dict(validation=0.1, test=True)
    choices: list[dict[str, Any]] = [
        {},
        dict(evidence=1.0),
        dict(activation="paper"),
        dict(evidence=1.0, norm_logit=False),
        dict(norm_pose=False),
        dict(norm_logit=False),
        dict(evidence=1.0, activation="paper"),
        dict(evidence=0.1, norm_logit=False),
        dict(evidence=0.3, norm_logit=False),
        dict(evidence=0.1),
    ]
    return [(f"fashion_{scale}", held | choice) for choice in choices]


def matters(scale: str) -> Settings:
    """Does routing matter? VB with one iteration, which is uniform, then VB, EM and Dynamic routing, and the CNN.

    VB's routed rows are the soft assignment with a stiff prior, and Algorithm 1 with the default prior. All have the
    activation that rises with agreement. With --seeds 5 the rows are paired by seed.
    """
    vb = dict(activation="agreement")
    stiff = dict(alpha0=1.0, nu0=1000.0, psi0=0.03, temper=0.25)
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("", dict(iters=3) | vb | stiff),
        ("", dict(iters=1) | vb | stiff),
        ("_cnn", {}),
        ("_em", dict(iters=3)),
        ("", dict(iters=3) | vb),
        ("_dynamic", dict(iters=3)),
    ]
    datasets = "overlap", "smallnorb", "fashion", "overlap_fashion"
    return [(f"{dataset}{kind}_{scale}", dict(fields)) for kind, fields in kinds for dataset in datasets]


def shorter(scale: str) -> dict[str, Any]:
    """Return the fields of a laptop's comparison with many runs: one epoch."""
    return dict(epochs=1) if scale == "laptop" else {}


SERIES: dict[str, Callable[[str], Settings]] = dict(
    curves=curves, priors=priors, iterations=iterations, votes=votes,
    uncertainty=uncertainty, evidence=evidence, matters=matters,
)  # fmt: skip


def with_watcher(name: str, one: Recipe, data_folder: str | None) -> dict[str, Any]:
    """Return the keyword arguments of ``fit`` with which the runs of a series are watched."""
    if name != "votes":
        return {}
    import votes as measured

    return dict(on_event=measured.watcher(one, data_folder))


def jobs(name: str, scale: str, seeds: int, only: str = "") -> list[Job]:
    """Return the runs of a series in the order in which they are made; of several with one recipe, the first."""
    if name not in SERIES:
        raise ValueError(f"there is no series {name!r}{nearest(name, SERIES)}; they are {', '.join(SERIES)}")
    settings = [(base, fields) for base, fields in SERIES[name](scale) if base.startswith(only)]
    if not settings:
        raise ValueError(f"no recipe of the series {name} begins with {only!r}")
    made: dict[Recipe, Job] = {}
    for seed in range(seeds):
        for base, fields in settings:
            job = Job(base, fields, seed)
            made.setdefault(key(job.recipe), job)
    return list(made.values())


# --- what is there already -------------------------------------------------------------------------------------------


def key(one: Recipe) -> Recipe:
    """Return the recipe without its name and the fields that do not change a result."""
    return dataclasses.replace(one, name="", save_seconds=0.0)


def ended(root: Path) -> Iterator[Path]:
    """Yield the folders of finished and failed runs in ``root``, at whatever depth."""
    for path in sorted(root.rglob("recipe.json")):
        if (path.parent / "result.json").exists() or (path.parent / "failed.json").exists():
            yield path.parent


def by_recipe(root: Path) -> dict[Recipe, Path]:
    """Return the finished and failed runs in ``root`` by their recipes."""
    return {key(read_recipe(folder)): folder for folder in ended(root)}


def outcome(folder: Path) -> str:
    """Return what came of a run that ended: its error and time, or why it failed."""
    if not (folder / "result.json").exists():
        return f"failed: {read_json(folder / 'failed.json')['error']}"
    result = read_result(folder)
    errors = [f"{100 * result['validation']:.2f}% validation error"] if result["validation"] is not None else []
    errors += [f"{100 * result['test']['error']:.2f}% test error"] if result["test"] is not None else []
    return ", ".join([*errors, f"{result['seconds']:.0f} s"])


# --- making and recording --------------------------------------------------------------------------------------------


def main(words: Sequence[str] | None = None, results: Path = RESULTS) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", metavar="NAME", help=", ".join(SERIES))
    parser.add_argument("--out", type=Path, default=Path("runs"), help="runs are written to OUT/series/NAME/")
    parser.add_argument("--data-folder", help="where datasets lie, as for `vbcaps train`")
    parser.add_argument("--seeds", type=int, default=3, help="how many seeds, from 0")
    parser.add_argument("--scale", choices=SCALES, default="laptop", help="which twins of the recipes")
    parser.add_argument("--only", default="", metavar="RECIPE", help="only recipes whose names begin so")
    parser.add_argument("--together", action="store_true", help="train all seeds of a setting at the same time")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", help="print the runs, and make none")
    what.add_argument("--record", action="store_true", help="copy what has ended into results/, and make none")
    arguments = parser.parse_args(words)
    try:
        todo = jobs(arguments.name, arguments.scale, arguments.seeds, arguments.only)
        if arguments.record:
            record(todo, arguments.out, arguments.name, results)
        elif arguments.list:
            for number, job in enumerate(todo, 1):
                say(number, todo, job, state(job, arguments.out, arguments.name, results))
        else:
            make_all(todo, arguments.out, arguments.name, results, arguments.data_folder, arguments.together)
    except (RunError, ValueError) as error:
        sys.exit(f"series: {error}")


def say(number: int, todo: Sequence[Job], job: Job, what: str) -> None:
    print(f"{number}/{len(todo)}  {job.folder}: {what}", flush=True)


def state(job: Job, out: Path, name: str, results: Path) -> str:
    """Return whether a run is recorded, has ended, was begun, or is still to be made."""
    recorded, made = by_recipe(results).get(key(job.recipe)), by_recipe(out / "series").get(key(job.recipe))
    if recorded is not None:
        return f"recorded in {recorded.relative_to(results)}, {outcome(recorded)}"
    if made is not None:
        return f"made in {made}, {outcome(made)}"
    return "begun" if (out / "series" / name / job.folder / "recipe.json").exists() else "to be made"


def make_all(
    todo: Sequence[Job], out: Path, name: str, results: Path, data_folder: str | None, together: bool = False
) -> None:
    """Make the runs that are not there yet; a run that cannot be made is reported, and the others follow."""
    from vbcaps.training.loop import Interrupted

    broken = 0
    for group in by_setting(todo) if together else [[job] for job in todo]:
        wanted = []
        for job in group:
            was = state(job, out, name, results)
            if was in ("begun", "to be made"):
                wanted.append(job)
            else:
                say(todo.index(job) + 1, todo, job, was)
        try:
            for job, what in make(wanted, out / "series" / name, name, data_folder):
                say(todo.index(job) + 1, todo, job, what)
        except Interrupted as stop:
            print(
                f"series: interrupted in {wanted[0].folder}, which is saved; the same command goes on", file=sys.stderr
            )
            sys.exit(stop.code)
        except KeyboardInterrupt:
            sys.exit(130)
        except RunError as error:
            broken += len(wanted)
            for job in wanted:
                say(todo.index(job) + 1, todo, job, f"not made: {error}")
    if broken:
        sys.exit(f"series: {broken} of {len(todo)} runs could not be made")


def by_setting(todo: Sequence[Job]) -> list[list[Job]]:
    """Return the seeds of each setting, in the order of the settings.

    >>> [[job.seed for job in group] for group in by_setting(jobs("votes", "laptop", 3))]
    [[0, 1, 2]]
    """
    found: dict[str, list[Job]] = {}
    for job in todo:
        found.setdefault(job._replace(seed=0).folder, []).append(job)
    return list(found.values())


def make(wanted: Sequence[Job], root: Path, name: str, data_folder: str | None) -> Iterator[tuple[Job, str]]:
    """Make or resume runs that differ in their seeds, and yield what came of each."""
    from vbcaps.training.loop import NonFinite, fit, fit_all

    free = []
    for job in wanted:
        (root / job.folder).mkdir(parents=True, exist_ok=True)
        try:
            held = lock(root / job.folder)
        except RunError:
            yield job, "another process is making it"
            continue
        if held is not None:
            os.close(held)
        free.append(job)
    if len(free) > 1 and name != "votes":  # whose runs are watched one by one
        with suppress(NonFinite):  # which of them it was shows when they are resumed
            folders = [root / job.folder for job in free]
            fit_all([job.recipe for job in free], folders, data_folder=data_folder, resume=True)
    for job in free:
        folder = root / job.folder
        watched = with_watcher(name, job.recipe, data_folder)
        try:
            if not (folder / "result.json").exists():
                fit(job.recipe, folder, data_folder=data_folder, resume=True, **watched)
        except NonFinite as error:
            write_json(folder / "failed.json", dict(error=str(error)))
        yield job, outcome(folder)


def record(todo: Sequence[Job], out: Path, name: str, results: Path) -> None:
    """Copy the runs of a series that ended, and are not recorded yet, into ``results/series/NAME/``."""
    recorded, made = by_recipe(results), by_recipe(out / "series" / name)
    files: dict[Path, bytes] = {}
    for job in todo:
        folder = made.get(key(job.recipe))
        if folder is None or key(job.recipe) in recorded:
            continue
        check(folder, unfinished=(folder / "failed.json").exists(), dirty=False)
        place = free(results / "series" / name / job.folder)
        files |= {place / file: content for file, content in contents(folder).items()}
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write(path, content)
    new = sorted({path.parent.name for path in files})
    print(*(f"recorded {folder}" for folder in new), f"{len(new)} runs are new in {name}", sep="\n")


def free(place: Path) -> Path:
    """Return a folder that is not there yet: a recipe may have changed since a run of the same name was recorded."""
    names = (place if k == 1 else place.with_name(f"{place.name}-{k}") for k in count(1))
    return next(one for one in names if not one.exists())


if __name__ == "__main__":
    main()

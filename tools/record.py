"""Copy finished runs into results/, and the weights of one into weights/.

scripts/record RUN... [--ship NAME] [--unfinished] [--dirty]

A RUN is the folder of a run, or of all its seeds: all that were run count. Recipe, environment, metrics, result and
tests on several crops are copied; weights and the state are not. A run that is recorded already may be recorded again
when it has more files now; one that tools/series.py has recorded is not copied again. --ship NAME puts the weights of
its seed 0, chosen before any was tested, into weights/, or into the package where it has this network already;
tools/published.py then lists it, so that `vbcaps.load` finds it.
"""

import argparse
import json
import re
import sys
from pathlib import Path

from vbcaps.training.files import RunError, read_json, write
from vbcaps.training.recipes import RECIPES
from vbcaps.training.runfolder import read_recipe, read_result, seed_folders
from vbcaps.weights.file import read_weights

ROOT = Path(__file__).parents[1]
RESULTS, WEIGHTS, PACKAGE = ROOT / "results", ROOT / "weights", ROOT / "src" / "vbcaps" / "weights"
FILES = (
    "recipe.json", "environment.json", "metrics.csv", "result.json", "crops*.json",
    "failed.json", "votes.npz",  # of a series
)  # fmt: skip


def main(words: list[str] | None = None, results: Path = RESULTS, weights: Path = WEIGHTS) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="the folder of a run, or of its seeds")
    parser.add_argument("--ship", metavar="NAME", help="put the weights of seed 0 into weights/ by this name")
    parser.add_argument("--unfinished", action="store_true", help="also record runs that did not finish, as failures")
    parser.add_argument("--dirty", action="store_true", help="also record runs of changed or unknown source")
    arguments = parser.parse_args(words)
    if arguments.ship and len(arguments.runs) > 1:
        parser.error(f"--ship takes the weights of one RUN, got {len(arguments.runs)}")
    try:
        files: dict[Path, bytes] = {}
        for run in arguments.runs:
            for where, folder in folders(run).items():
                check(folder, arguments.unfinished, arguments.dirty)
                if in_series(folder, results):
                    continue
                files |= {results / where / name: content for name, content in contents(folder).items()}
        for path, content in files.items():
            if path.exists() and path.read_bytes() != content:
                raise RunError(f"{path} is of another run: rename the folder of this one, or remove that one")
        if arguments.ship:
            file = f"{arguments.ship}.safetensors"
            place = PACKAGE if (PACKAGE / file).exists() else weights
            files[place / file] = weights_to_ship(arguments.runs[0], arguments.ship)
        for path, content in files.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path, content)
    except RunError as error:
        sys.exit(f"record: {error}")
    for folder in sorted({path.parent for path in files}):
        print(f"{folder}: {', '.join(path.name for path in files if path.parent == folder)}")


def in_series(folder: Path, results: Path) -> bool:
    """Return whether tools/series.py has recorded the run."""
    there = results.glob(f"series/*/{folder.resolve().name}/result.json")
    return any(read_json(path)["seconds"] == read_result(folder)["seconds"] for path in there)


def folders(run: Path) -> dict[Path, Path]:
    """Return the folders that make up a run, its own or those of its seeds, by their paths in results/."""
    run = run.resolve()
    if (run / "recipe.json").exists():
        if run in (of_seeds := seed_folders(run.parent)) and len(of_seeds) > 1:
            raise RunError(f"{run} is one seed of several, and all that were run count: give {run.parent}")
        return {Path(run.name): run}
    seeds = seed_folders(run)
    if not seeds:
        raise RunError(
            f"{run} has neither recipe.json nor folders seed0, seed1, ... that have: not the folder of a run"
        )
    return {Path(run.name, seed.name): seed for seed in seeds}


def check(folder: Path, unfinished: bool, dirty: bool) -> None:
    """Raise an error if the run is incomplete, or nobody else can make it again."""
    recipe = read_recipe(folder)
    if recipe.data is not None:
        raise RunError(f"{folder} was trained on images of your own, which nobody else has")
    if recipe.folds:
        raise RunError(f"{folder} is a fold of a cross-validation, which was not tested on the test set")
    if recipe.name not in RECIPES:
        raise RunError(f"{folder} is a run of {recipe.name!r}, which recipes.py does not have: no command repeats it")
    if not (folder / "result.json").exists() and not unfinished:
        raise RunError(f"{folder} is not finished: resume it, or record it as a failure with --unfinished")
    environments = [read_json(folder / "environment.json")]
    environments += environments[0].get("resumed", [])
    environments += [read_json(path)["environment"] for path in folder.glob("crops*.json")]
    for commit in (environment["commit"] for environment in environments):
        if (commit == "unknown" or commit.endswith("-dirty")) and not dirty:
            raise RunError(
                f"{folder} ran from commit {commit!r}, which nobody can check out; --dirty records it anyway"
            )


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files of a run that are kept, by name."""
    files = {path.name: path.read_bytes() for pattern in FILES for path in sorted(folder.glob(pattern))}
    return {name: without_folders(content) if name.endswith(".json") else content for name, content in files.items()}


def without_folders(content: bytes) -> bytes:
    """Keep only the last part of absolute paths in commands: they would show where somebody keeps their data."""
    fields = json.loads(content)
    for environment in (fields.get("environment", fields), *fields.get("resumed", [])):
        if "command" in environment:
            environment["command"] = [re.sub(r"(^|=)/.*/", r"\1", word) for word in environment["command"]]
    return (json.dumps(fields, indent=2) + "\n").encode()


def weights_to_ship(run: Path, name: str) -> bytes:
    """Return the weights of seed 0 as the run wrote them, with recipe and test error in their header."""
    if not re.fullmatch(r"[a-z0-9_]+", name):
        raise RunError(f"a name to ship by has small letters, digits and _, got {name!r}")
    found = [folder for folder in folders(run).values() if read_recipe(folder).seed == 0]
    if not found:
        raise RunError(
            f"{run} has no seed 0, which is the one to ship: the best of several would be chosen by its test"
        )
    (folder,) = found
    result = read_result(folder)
    if result["test"] is None:
        raise RunError(f"{folder} was not tested: weights are shipped with their test error")
    path = folder / result["weights"]
    kept = read_weights(path)
    if kept.recipe != read_recipe(folder) or kept.about["test_error"] != result["test"]["error"]:
        raise RunError(f"{path} is not of this run: its recipe or its test error differ from result.json")
    return path.read_bytes()


if __name__ == "__main__":
    main()

"""results/README.md and the main table of README.md, made from the runs recorded in results/ and from nothing else.

scripts/tables [--check]

Runs whose recipes differ in their seeds alone are a row; every run is in one.
"""

import argparse
import difflib
import json
import math
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cells import low_to_high, spread, table
from held_out import held_out, on_novel_views, read_rows
from recorded import Group, Run, command, flags, groups, name_of, read_runs
from scipy.special import stdtrit

from vbcaps.training.recipe import Recipe
from vbcaps.training.recipes import FAMILIAR, PAPER, paper

ROOT = Path(__file__).parents[1]
RESULTS, WEIGHTS = ROOT / "results", ROOT / "src" / "vbcaps" / "weights"
BEGIN, END = "<!-- results: made by scripts/tables -->", "<!-- end of results -->"
ORIGINAL = "original files"
AVERAGED = {"smallnorb": "1.29"}  # the paper's error on the mean of several crops, how many it does not say

TABLES = {
    "Table 1: smallNORB": ("smallnorb_small", "smallnorb", "smallnorb_large", "smallnorb_em", "smallnorb_dynamic"),
    "Table 1: Fashion-MNIST": ("fashion_small", "fashion", "fashion_large", "fashion_em", "fashion_dynamic"),
    "Fashion-MNIST, enlarged": ("fashion_enlarged",),
    "Table 1: SVHN": ("svhn_small", "svhn_medium", "svhn", "svhn_em", "svhn_dynamic"),
    "Table 1: CIFAR-10": ("cifar10_small", "cifar10_medium", "cifar10", "cifar10_em", "cifar10_dynamic"),
    "CIFAR-10 with a residual stem": ("cifar10_residual",),
    "Fashion-MNIST with a learned prior": ("fashion_learned",),
    "Table 2: novel viewpoints, at the error on familiar ones": (
        "smallnorb_azimuth", "smallnorb_azimuth_em", "smallnorb_elevation", "smallnorb_elevation_em",
        "smallnorb_azimuth_whole", "smallnorb_azimuth_em_whole", "smallnorb_elevation_whole",
        "smallnorb_elevation_em_whole",
    ),
    "MNIST to affNIST, at the error on MNIST": ("affnist", "affnist_cnn", "affnist_matched", "affnist_matched_cnn"),
    "The demonstration": ("default",),
}  # fmt: skip
CROPS, ABLATION = "The mean of several crops", "Choices, compared on a share of the training set"
HEAD = "recipe | paper | ours (runs) | 95% interval, notes | parameters | epochs | training | commit | command"
COMPARED = "recipe | choice | validation error (runs) | notes | parameters | epochs | training | commit | command"

# The rows of README.md; those whose paper number has a ± are its bold cells, and are there before there is a result.
MAIN = {
    "smallnorb": "smallNORB", "smallnorb_small": "smallNORB, {64,8,16,16}",
    "smallnorb_large": "smallNORB, {64,16,32,32}",
    "smallnorb_em": "smallNORB, EM", "smallnorb_dynamic": "smallNORB, Dynamic",
    "fashion": "Fashion-MNIST", "fashion_small": "Fashion-MNIST, {64,8,16,16}",
    "fashion_large": "Fashion-MNIST, {64,16,32,32}",
    "fashion_em": "Fashion-MNIST, EM", "fashion_dynamic": "Fashion-MNIST, Dynamic",
    "svhn": "SVHN", "svhn_small": "SVHN, {64,8,16,16}", "svhn_medium": "SVHN, {64,16,16,16}",
    "svhn_em": "SVHN, EM", "svhn_dynamic": "SVHN, Dynamic",
    "cifar10": "CIFAR-10", "cifar10_small": "CIFAR-10, {64,8,16,16}", "cifar10_medium": "CIFAR-10, {64,16,16,16}",
    "cifar10_em": "CIFAR-10, EM", "cifar10_dynamic": "CIFAR-10, Dynamic",
    "cifar10_residual": "CIFAR-10, residual stem",
    "smallnorb_azimuth": "smallNORB, novel azimuths at familiar ones",
    "smallnorb_azimuth_whole": "smallNORB, novel azimuths at familiar ones, trained to the end",
    "smallnorb_azimuth_em": "smallNORB, novel azimuths at familiar ones, EM",
    "smallnorb_azimuth_em_whole": "smallNORB, novel azimuths at familiar ones, EM, trained to the end",
    "smallnorb_elevation": "smallNORB, novel elevations at familiar ones",
    "smallnorb_elevation_whole": "smallNORB, novel elevations at familiar ones, trained to the end",
    "smallnorb_elevation_em": "smallNORB, novel elevations at familiar ones, EM",
    "smallnorb_elevation_em_whole": "smallNORB, novel elevations at familiar ones, EM, trained to the end",
    "affnist": "MNIST to affNIST, at MNIST", "affnist_cnn": "MNIST to affNIST, at MNIST: a CNN of the same size",
    "affnist_matched": "MNIST to affNIST, stopped at 0.8 on MNIST",
    "affnist_matched_cnn": "MNIST to affNIST, stopped at 0.8 on MNIST: a CNN of the same size",
}  # fmt: skip

INTRODUCTION = """\
# Results

Made by `scripts/tables` from the folders beside this file; `scripts/record` puts finished runs here. Test errors in %,
mean ± standard deviation over all runs that were made, and how many these are. The interval is that of the mean over
runs (Student's t); for one run it is Wilson's, for its test images. Where the data are not the original files, the
notes say so. Several seeds on a GPU train at once, and the minutes are those of all of them together. A recipe with
flags is one in which these fields were changed, by hand or since. The command trains a row's recipe with the source of
today; for the very run, check its commit out and take the command in its `environment.json`. What the numbers taught,
and what is not reached, is in [`NOTES.md`](NOTES.md).
"""


def main(words: list[str] | None = None, root: Path = ROOT) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where something would be written")
    check = parser.parse_args(words).check
    rows = groups(read_runs(root / "results"))
    short = main_table(rows) + "\n\n" + shipped(root / "src" / "vbcaps" / "weights")
    readme = root / "README.md"
    choices, novel = (read_rows(root / "results" / name) for name in ("choices.csv", "viewpoints.csv"))
    new = {
        root / "results" / "README.md": "\n".join([all_tables(rows), *held_out(choices), *on_novel_views(novel)]),
        readme: between_markers(readme.read_text(), short),
    }
    stale = {path: text for path, text in new.items() if not path.exists() or path.read_text() != text}
    for path, text in stale.items():
        if check:
            old = path.read_text().splitlines() if path.exists() else []
            print(*difflib.unified_diff(old, text.splitlines(), str(path), "as it would be", lineterm=""), sep="\n")
        else:
            path.write_text(text)
            print(f"wrote {path}")
    if check and stale:
        sys.exit(f"{', '.join(str(path.relative_to(root)) for path in stale)}: not up to date, run scripts/tables")


# --- cells -----------------------------------------------------------------------------------------------------------


def interval(tests: Sequence[dict[str, Any]]) -> str:
    """95%: of the mean over runs, or of one run's test images."""
    if len(tests) == 1:
        low, high = tests[0]["interval"]
    else:
        errors = [test["error"] for test in tests]
        half = float(stdtrit(len(errors) - 1, 0.975)) * statistics.stdev(errors) / math.sqrt(len(errors))
        low, high = max(statistics.mean(errors) - half, 0.0), statistics.mean(errors) + half
    return f"{100 * low:.2f} to {100 * high:.2f}"


def evaluations(group: Group, part: str = "test") -> list[dict[str, Any]]:
    return [run.result[part] for run in group if run.result is not None and run.result[part] is not None]


def ours(group: Group) -> str:
    """``1.55 ± 0.06 (5)``, with the error on what is familiar where there is one."""
    test, familiar = evaluations(group), evaluations(group, "familiar")
    at = f" at {spread([one['error'] for one in familiar])}" if familiar else ""
    return f"{spread([one['error'] for one in test])}{at} ({count(group)})"


def count(group: Group) -> str:
    """Of all runs, those that did not finish as well."""
    failed = sum(run.result is None for run in group)
    return f"{len(group)}, {failed} failed" if failed else f"{len(group)}"


def papers(name: str) -> str:
    familiar = FAMILIAR.get(name.removesuffix("_fast"))
    return (paper(name) or "") + (f" at {familiar}" if familiar else "")


def sources(group: Group) -> list[str]:
    """In which ways the data are not the original files."""
    return sorted({run.result["source"] for run in group if run.result is not None} - {ORIGINAL})


def notes(group: Group) -> list[str]:
    unmatched = sum(run.result is not None and run.result["matched"] is False for run in group)
    found = [f"{unmatched} of {len(group)} did not reach the error to match"] if unmatched else []
    return found + [f"data: {source}" for source in sources(group)]


def training(group: Group) -> str:
    """Minutes, on what, and its note: of all seeds that a GPU trained at the same time, else of one on average."""
    by_folder: dict[str, list[Run]] = {}
    for run in group:
        if run.result is not None:
            by_folder.setdefault(run.folder.parts[0], []).append(run)
    minutes: dict[str, list[float]] = {}
    for runs in by_folder.values():
        seconds = [run.result["seconds"] for run in runs if run.result is not None]
        about = runs[0].environment
        device = ", then ".join(dict.fromkeys(place(part) for part in (about, *about.get("resumed", []))))
        if len(runs) > 1 and about["device_type"] == "cuda" and about["processes"] == 1:
            device, seconds = f"{len(runs)} at once, {device}", [max(seconds)]
        minutes.setdefault(device, []).extend(one / 60 for one in seconds)
    return "; ".join(f"{statistics.mean(some):.1f} min, {device}" for device, some in minutes.items()) or "-"


def place(about: dict[str, Any]) -> str:
    """What an environment ran on, and its note."""
    device = f"{about['processes']} x {about['device']}" if about["processes"] > 1 else about["device"]
    if about["device_type"] != "cuda":
        device += f", {about['threads']} thread{'s' if about['threads'] > 1 else ''}"
    return device + (f", {about['note']}" if about.get("note") else "")


def links(group: Group) -> str:
    """The recipe's name, which leads to the run; to the others from the second on by their numbers."""
    folders = list(dict.fromkeys(run.folder.parts[0] for run in group))
    more = "".join(f" [{k}]({folder})" for k, folder in enumerate(folders[1:], 2))
    return f"[{name_of(group)}]({folders[0]}){more}"


def with_flags(group: Group) -> str:
    changed = flags(group[0].recipe)
    return links(group) + (f" `{changed}`" if changed else "")


def last_cells(group: Group, again: str) -> list[str]:
    results = [run.result for run in group if run.result is not None]
    parts = [part for run in group for part in (run.environment, *run.environment.get("resumed", []))]
    commits = ", ".join(dict.fromkeys(part["commit"] for part in parts))
    parameters, epochs = (low_to_high({result[key] for result in results}) for key in ("parameters", "epochs"))
    return [parameters, epochs, training(group), commits, again]


# --- tables ----------------------------------------------------------------------------------------------------------


def row(group: Group) -> list[str]:
    said = [interval(evaluations(group))] if evaluations(group) else []
    first = [with_flags(group), papers(name_of(group)), ours(group), "; ".join(said + notes(group))]
    return first + last_cells(group, f"`{command(group)}`")


def tests_on_crops(group: Group) -> dict[int, list[dict[str, Any]]]:
    """By the number of crops."""
    numbers = sorted({crops for run in group for crops in run.crops})
    return {crops: [run.crops[crops] for run in group if crops in run.crops] for crops in numbers}


def crops_row(group: Group, crops: int, tests: list[dict[str, Any]]) -> list[str]:
    said = [f"{crops} crops", interval(tests)]
    if len(tests) < len(group):
        said.append(f"{len(group) - len(tests)} of {len(group)} without this test")
    again = f"`{command(group)}`, then `vbcaps eval --crops {crops}` of each run"
    first = [with_flags(group), averaged(group), f"{spread([test['error'] for test in tests])} ({len(tests)})"]
    return [*first, "; ".join(said + notes(group)), *last_cells(group, again)]


def averaged(group: Group) -> str:
    return AVERAGED.get(name_of(group).removesuffix("_fast"), "")


def compared(group: Group) -> list[str]:
    """A choice of settings, by its error on a share of the training set."""
    recipe = group[0].recipe
    errors = [run.result["validation"] for run in group if run.result is not None]
    share = f"{100 * recipe.validation:g}% held out"
    said = [share, *([f"tested: {ours(group)}"] if evaluations(group) else []), *notes(group)]
    choice = flags(recipe, leave_out=("validation", "split", "test"))
    first = [links(group), f"`{choice}`" if choice else "as it is", f"{spread(errors)} ({count(group)})"]
    return [*first, "; ".join(said), *last_cells(group, f"`{command(group)}`")]


def all_tables(rows: list[Group]) -> str:
    """Those that have rows."""
    final = [group for group in rows if not group[0].recipe.validation]
    parts = {
        title: (HEAD, [row(group) for group in final if name_of(group).removesuffix("_fast") in names])
        for title, names in TABLES.items()
    }
    parts[CROPS] = HEAD, [crops_row(group, *one) for group in final for one in tests_on_crops(group).items()]
    parts[ABLATION] = COMPARED, [compared(group) for group in rows if group[0].recipe.validation]
    made = [f"## {title}\n\n{table(head, cells)}\n" for title, (head, cells) in parts.items() if cells]
    return "\n".join([INTRODUCTION, *made])


def main_table(rows: list[Group]) -> str:
    """A row for each recipe, as it is now or as it was last: paper | ours | training. Fast twins have their own."""
    found = last_of_each(rows)
    footnotes: list[str] = []

    def mark(group: Group, cell: str) -> str:
        said, changed = [f"data: {source}" for source in sources(group)], flags(group[0].recipe)
        for one in said + ([f"today's recipe with `{changed}`"] if changed else []):
            footnotes.extend([one] if one not in footnotes else [])
            cell += f" [{footnotes.index(one) + 1}]"
        return cell

    cells = []
    for name, what in MAIN.items():
        for twin in (name, f"{name}_fast"):
            group = found.get(twin)
            if group is not None:
                label = what + (f", fast: {lasting(group[0].recipe)}" if twin != name else "")
                cells.append([label, papers(twin), mark(group, ours(group)), training(group)])
                for crops, tests in tests_on_crops(group).items():
                    error = f"{spread([test['error'] for test in tests])} ({len(tests)})"
                    cells.append([f"{label}, the mean of {crops} crops", averaged(group), mark(group, error), ""])
            elif twin in PAPER and "±" in PAPER[twin]:
                cells.append([what, papers(twin), "not run yet", ""])
    notes = "".join(f"\n\n[{k}] {one}" for k, one in enumerate(footnotes, 1))
    return table("test error in % | paper | ours: mean ± std (runs) | training", cells) + notes


def last_of_each(rows: list[Group]) -> dict[str, Group]:
    """Of each recipe its runs as it is; where there are none, those with other fields whose folder has the last number.

    When the fields of a dataset change, its cells keep what they had until they are trained again.
    """

    def order(group: Group) -> tuple[bool, int]:
        numbers = [int(number) for run in group for number in re.findall(r"\d+$", run.folder.parts[0])]
        return not flags(group[0].recipe), max(numbers, default=0)

    return {name_of(group): group for group in sorted(rows, key=order) if not group[0].recipe.validation}


def lasting(recipe: Recipe) -> str:
    return f"{recipe.epochs} epochs{' or fewer' if recipe.match else ''}"


def shipped(weights: Path) -> str:
    """The networks in the package, as their headers describe them."""
    found = []
    for path in sorted(weights.glob("*.safetensors")):
        content = path.read_bytes()
        header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        about = json.loads(header["__metadata__"]["vbcaps"])
        found.append(f"`{path.stem}` ({100 * about['metadata']['test_error']:.2f}%)")
    return f"Weights in the package, with their test errors: {', '.join(found) or 'none yet'}."


def between_markers(text: str, new: str) -> str:
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md must have the lines {BEGIN} and {END}, between which the table belongs")
    return f"{before}{BEGIN}\n\n{new}\n\n{END}{after}"


if __name__ == "__main__":
    main()

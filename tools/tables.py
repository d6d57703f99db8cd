"""Make results/README.md, and the short table of README.md, from the runs recorded in results/ and nothing else.

scripts/tables [--check]

Runs whose recipes differ only in their seeds share a row; every run is in a row.
"""

import argparse
import difflib
import math
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cells import low_to_high, spread, table
from held_out import held_out, on_novel_views, read_rows
from published import about_weights
from rare_table import on_rare_classes
from recorded import Group, Run, command, commits, flags, groups, name_of, of_earlier_version, read_runs
from scipy.special import stdtrit
from shipped_table import on_shipped
from trusted import on_uncertainty

from vbcaps.training.recipe import Recipe
from vbcaps.training.recipes import EXPERIMENTS, RECIPES, Experiment, parent

ROOT = Path(__file__).parents[1]
RESULTS, WEIGHTS = ROOT / "results", ROOT / "src" / "vbcaps" / "weights"
BEGIN, END = "<!-- results: made by scripts/tables -->", "<!-- end of results -->"
ORIGINAL = "original files"
EARLIER, CROPS, ABLATION = (
    "Recipes of earlier versions",
    "The mean of several crops",
    "Choices, compared on a share of the training set",
)
HEAD = "recipe | paper | ours | 95% interval, notes | parameters | epochs | training | commit | command"
COMPARED = "recipe | choice | validation error | notes | parameters | epochs | training | commit | command"

INTRODUCTION = """\
# Results

Made by `scripts/tables` from the folders beside this file; `scripts/record` puts finished runs here. Test errors in %:
mean ± standard deviation over all runs that were made, and how many these are. In parentheses stands the error on what
a network was trained on, familiar viewpoints or MNIST, where the test is of something else. The interval is that of the
mean over runs (Student's t); for one run it is Wilson's, for its test images. Where the data are not the original
files, the notes say so. Several seeds on a GPU train at once, and the minutes are those of all of them together. A
recipe with flags is one in which these fields were changed, by hand or since. The command trains a row's recipe with
the source of today; for the very run, check its commit out and take the command in its `environment.json`. What the
numbers taught, and what is not reached, is in [`NOTES.md`](NOTES.md).
"""
FRONT = """\
Test errors in %: mean ± standard deviation over all runs that were made. In parentheses: the error on the viewpoints
that the network was trained on, or on MNIST. The CNN has as many parameters as the capsules and was trained alike. Ours
are the fast recipes, `smallnorb_fast` and so on, with settings chosen on images held out of the training set.
[`results/README.md`](results/README.md) has every experiment and run, with times and commands."""
PAPERS_SCHEDULE = "the paper's schedule, not the fast recipe"


def main(words: list[str] | None = None, root: Path = ROOT) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where something would be written")
    check = parser.parse_args(words).check
    rows = groups(read_runs(root / "results"))
    readme, last = root / "README.md", last_of_each(rows)
    names = ("choices", "viewpoints", "imbalance")
    choices, novel, rare = (read_rows(root / "results" / f"{name}.csv") for name in names)
    trained = shipped(root / "src" / "vbcaps" / "weights", root / "weights")
    long = [INTRODUCTION, f"## All experiments\n\n{main_table(last)}\n", f"{trained}\n", *all_tables(rows)]
    new = {
        root / "results" / "README.md": "\n".join(
            [
                *long,
                *on_uncertainty(root / "results"),
                *on_shipped(root / "results" / "shipped.csv"),
                *on_rare_classes(rare),
                *held_out(choices),
                *on_novel_views(novel),
            ]
        ),
        readme: between_markers(readme.read_text(), front_table(last)),
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
    """Return the 95% interval of the mean over runs, or of one run's test images."""
    if len(tests) == 1:
        low, high = tests[0]["interval"]
    else:
        errors = [test["error"] for test in tests]
        half = float(stdtrit(len(errors) - 1, 0.975)) * statistics.stdev(errors) / math.sqrt(len(errors))
        low, high = max(statistics.mean(errors) - half, 0.0), statistics.mean(errors) + half
    return f"{100 * low:.2f} to {100 * high:.2f}"


def evaluations(group: Group, split: str = "test") -> list[dict[str, Any]]:
    return [run.result[split] for run in group if run.result is not None and run.result[split] is not None]


def ours(group: Group) -> str:
    """Return ``1.55 ± 0.06, 5 runs``, with the error on what is familiar in parentheses where there is one."""
    test, familiar = evaluations(group), evaluations(group, "familiar")
    beside = f" ({spread([one['error'] for one in familiar])})" if familiar else ""
    return f"{spread([one['error'] for one in test])}{beside}, {count(group)}"


def count(group: Group) -> str:
    """Return how many runs there are, and how many of them did not finish."""
    failed = sum(run.result is None for run in group)
    return runs(len(group)) + (f", {failed} failed" if failed else "")


def runs(number: int) -> str:
    return f"{number} run{'s' if number > 1 else ''}"


def experiment(name: str) -> Experiment | None:
    """Return the experiment of a recipe, or of the parent of a fast twin; None for a recipe of an earlier version."""
    return EXPERIMENTS.get(parent(name))


def papers(name: str) -> str:
    one = experiment(name)
    if one is None or one.paper is None:
        return ""
    return one.paper + (f" ({one.familiar})" if one.familiar else "")


def sources(group: Group) -> list[str]:
    """Return in which ways the data are not the original files."""
    return sorted({run.result["source"] for run in group if run.result is not None} - {ORIGINAL})


def notes(group: Group) -> list[str]:
    unmatched = sum(run.result is not None and run.result["matched"] is False for run in group)
    found = [f"{unmatched} of {len(group)} did not reach the error to match"] if unmatched else []
    pixels = [test["reconstruction"] for test in evaluations(group) if test.get("reconstruction") is not None]
    if pixels:
        found.append(f"squared error {of_pixels(pixels)} a pixel")
    return found + [f"data: {source}" for source in sources(group)]


def of_pixels(values: Sequence[float]) -> str:
    """Return the mean squared error of a Capsule-VAE's reconstructions, with its standard deviation over runs."""
    tail = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4f}{tail}"


def training(group: Group) -> str:
    """Return minutes and device, with its note: of all seeds that a GPU trained at once, else of a run on average."""
    by_folder: dict[str, list[Run]] = {}
    for run in group:
        if run.result is not None:
            by_folder.setdefault(run.folder.parts[0], []).append(run)
    minutes: dict[str, list[float]] = {}
    for some in by_folder.values():
        seconds = [run.result["seconds"] for run in some if run.result is not None]
        about = some[0].environment
        device = ", then ".join(dict.fromkeys(machine(one) for one in (about, *about.get("resumed", []))))
        if len(some) > 1 and about["device_type"] == "cuda" and about["processes"] == 1:
            device, seconds = f"{len(some)} at once, {device}", [max(seconds)]
        minutes.setdefault(device, []).extend(one / 60 for one in seconds)
    return "; ".join(f"{statistics.mean(times):.1f} min, {device}" for device, times in minutes.items()) or "-"


def machine(about: dict[str, Any]) -> str:
    """Return the device of an environment, and its note."""
    device = f"{about['processes']} x {about['device']}" if about["processes"] > 1 else about["device"]
    if about["device_type"] != "cuda":
        device += f", {about['threads']} thread{'s' if about['threads'] > 1 else ''}"
    return device + (f", {about['note']}" if about.get("note") else "")


def links(group: Group) -> str:
    """Return the recipe's name as a link to the first run's folder, then numbers that link to the others."""
    folders = list(dict.fromkeys(run.folder.parts[0] for run in group))
    more = "".join(f" [{k}]({folder})" for k, folder in enumerate(folders[1:], 2))
    return f"[{name_of(group)}]({folders[0]}){more}"


def with_flags(group: Group) -> str:
    changed = flags(group[0].recipe)
    return links(group) + (f" `{changed}`" if changed else "")


def last_cells(group: Group, again: str) -> list[str]:
    results = [run.result for run in group if run.result is not None]
    parameters, epochs = (low_to_high({result[key] for result in results}) for key in ("parameters", "epochs"))
    return [parameters, epochs, training(group), ", ".join(commits(group)), again]


# --- tables ----------------------------------------------------------------------------------------------------------


def row(group: Group) -> list[str]:
    said = [interval(evaluations(group))] if evaluations(group) else []
    first = [with_flags(group), papers(name_of(group)), ours(group), "; ".join(said + notes(group))]
    return first + last_cells(group, f"`{command(group)}`")


def tests_on_crops(group: Group) -> dict[int, list[dict[str, Any]]]:
    """Return the tests on the mean of several crops by the number of crops."""
    numbers = sorted({crops for run in group for crops in run.crops})
    return {crops: [run.crops[crops] for run in group if crops in run.crops] for crops in numbers}


def crops_row(group: Group, crops: int, tests: list[dict[str, Any]]) -> list[str]:
    said = [f"{crops} crops", interval(tests)]
    if len(tests) < len(group):
        said.append(f"{len(group) - len(tests)} of {len(group)} without this test")
    again = f"`{command(group)}`, then `vbcaps eval --crops {crops}` of each run"
    first = [with_flags(group), averaged(group), f"{averages(tests)}"]
    return [*first, "; ".join(said + notes(group)), *last_cells(group, again)]


def averaged(group: Group) -> str:
    one = experiment(name_of(group))
    return (one and one.averaged) or ""


def averages(tests: Sequence[dict[str, Any]]) -> str:
    return f"{spread([test['error'] for test in tests])}, {runs(len(tests))}"


def compared(group: Group) -> list[str]:
    """Return the row of a choice of settings, with its error on a share of the training set."""
    recipe = group[0].recipe
    errors = [run.result["validation"] for run in group if run.result is not None]
    share = f"{100 * recipe.validation:g}% held out"
    said = [share, *([f"tested: {ours(group)}"] if evaluations(group) else []), *notes(group)]
    choice = flags(recipe, leave_out=("validation", "split", "test"))
    first = [links(group), f"`{choice}`" if choice else "as it is", f"{spread(errors)}, {count(group)}"]
    return [*first, "; ".join(said), *last_cells(group, f"`{command(group)}`")]


def of_choices(group: Group) -> bool:
    """Return whether runs compare choices on a held-out share, which the recipe itself does not hold out."""
    recipe = group[0].recipe
    own = RECIPES[recipe.name]().validation if recipe.name in RECIPES else 0.0
    return bool(recipe.validation) and recipe.validation != own


def all_tables(rows: list[Group]) -> list[str]:
    """Return a table for each section that has rows."""
    final = [group for group in rows if not of_choices(group)]
    tables: dict[str, tuple[str, list[list[str]]]] = {one.section: (HEAD, []) for one in EXPERIMENTS.values()}
    tables[EARLIER] = HEAD, []
    for group in final:
        one = experiment(name_of(group))
        tables[EARLIER if one is None else one.section][1].append(row(group))
    tables[CROPS] = HEAD, [crops_row(group, *one) for group in final for one in tests_on_crops(group).items()]
    tables[ABLATION] = COMPARED, [compared(group) for group in rows if of_choices(group)]
    return [f"## {title}\n\n{table(head, cells)}\n" for title, (head, cells) in tables.items() if cells]


class Footnotes:
    """Numbers sentences in the order in which cells of a table refer to them."""

    def __init__(self) -> None:
        self.sentences: list[str] = []

    def mark(self, group: Group, cell: str, *more: str) -> str:
        """Return the cell with the numbers of the footnotes on its runs, and of ``more`` sentences."""
        said, changed = [f"data: {source}" for source in sources(group)], flags(group[0].recipe)
        for one in [*said, *([f"today's recipe with `{changed}`"] if changed else []), *more]:
            self.sentences += [one] if one not in self.sentences else []
            cell += f" [{self.sentences.index(one) + 1}]"
        return cell

    def __str__(self) -> str:
        return "".join(f"\n\n[{k}] {one}" for k, one in enumerate(self.sentences, 1))


def front_table(last: dict[str, Group]) -> str:
    """Return README's table: a few experiments, each by its fast recipe where that has run, and the CNN beside it."""
    footnotes, cells = Footnotes(), []

    def cell(name: str) -> str:
        group = last.get(f"{name}_fast", last.get(name))
        if group is None:
            return ""
        return footnotes.mark(group, ours(group), *([PAPERS_SCHEDULE] if name_of(group) == name else []))

    for name, one in EXPERIMENTS.items():
        if one.front:
            cells.append([one.label, papers(name), cell(name) or "not run yet", cell(f"{name}_cnn")])
    return f"{table('dataset | paper | ours | CNN', cells)}\n\n{FRONT}{footnotes}"


def main_table(last: dict[str, Group]) -> str:
    """Return a table with a row for each recipe, as it is now or as it was last; fast twins have their own rows.

    An experiment for which the paper made several runs has a row before it has run.
    """
    footnotes, cells = Footnotes(), []
    for name, one in EXPERIMENTS.items():
        for twin in (name, f"{name}_fast"):
            group = last.get(twin)
            if group is not None:
                label = one.label + (f", fast: {lasting(group[0].recipe)}" if twin != name else "")
                cells.append([label, papers(twin), footnotes.mark(group, ours(group)), training(group)])
                for crops, tests in tests_on_crops(group).items():
                    error = footnotes.mark(group, averages(tests))
                    cells.append([f"{label}, the mean of {crops} crops", averaged(group), error, ""])
            elif twin == name and one.paper and "±" in one.paper:
                cells.append([one.label, papers(twin), "not run yet", ""])
    return f"{table('experiment | paper | ours | training', cells)}{footnotes}"


def last_of_each(rows: list[Group]) -> dict[str, Group]:
    """Return the runs of each recipe as it is now; where there are none, those whose folder has the last number.

    When the fields of a dataset change, its cells keep what they had until its networks are trained again.
    """

    def order(group: Group) -> tuple[bool, int]:
        numbers = [int(number) for run in group for number in re.findall(r"\d+$", run.folder.parts[0])]
        return not flags(group[0].recipe), max(numbers, default=0)

    final = (group for group in rows if not (of_choices(group) or of_earlier_version(group)))
    return {name_of(group): group for group in sorted(final, key=order)}


def lasting(recipe: Recipe) -> str:
    return f"{recipe.epochs} epochs{' or fewer' if recipe.match or recipe.patience else ''}"


def shipped(package: Path, others: Path) -> str:
    """Return a sentence that names the trained networks, with the test errors in their headers."""
    inside, fetched = (
        ", ".join(
            f"`{path.stem}` ({100 * about_weights(path)['test_error']:.2f}%)"
            for path in sorted(folder.glob("*.safetensors"))
        )
        for folder in (package, others)
    )
    return (
        f"Weights in the package, with their test errors: {inside or 'none yet'}. Weights that `vbcaps.load` fetches: "
        f"{fetched or 'none yet'}."
    )


def between_markers(text: str, new: str) -> str:
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md must have the lines {BEGIN} and {END}, between which the table belongs")
    return f"{before}{BEGIN}\n\n{new}\n\n{END}{after}"


if __name__ == "__main__":
    main()

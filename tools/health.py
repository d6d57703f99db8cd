"""Measure what the capsules of the shipped networks do: rows of results/health.csv, and the table of docs/health.md.

python tools/health.py [NAME...] [--data-folder FOLDER] [--images INT] [--write] [--table]

Each network is measured on test images of its dataset, drawn at random and the same each time. A network that is in the
file gets a new row in place of the old one. --table only makes the table of docs/health.md again, from the file.
Networks whose training kept a record of their health in the weights file need no row: `tools/published.py` reads both.
"""

import argparse
import csv
from pathlib import Path

import torch
from cells import table

import vbcaps
from vbcaps.cli.uncertainty import some_of
from vbcaps.training.environment import commit
from vbcaps.training.loop import prepare
from vbcaps.vae import capsules_of

ROOT = Path(__file__).parents[1]
RECORD, PAGE = ROOT / "results" / "health.csv", ROOT / "docs" / "health.md"
IMAGES = 300
BEGIN, END = "<!-- results: made by tools/health.py -->", "<!-- end of results -->"
HEAD = (
    "network | rule | most votes | fewest votes | tightest | poses | parts | sharp | by the image | settles | uniform"
)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="networks; by default all that have capsules")
    parser.add_argument("--data-folder", metavar="FOLDER", help="folder of the datasets")
    parser.add_argument("--images", type=int, default=IMAGES, metavar="INT", help=f"test images (default {IMAGES})")
    parser.add_argument("--write", action="store_true", help="write the file and the table, not only print")
    parser.add_argument("--table", action="store_true", help="make the table again from the file")
    arguments = parser.parse_args(words)
    names = [] if arguments.table else arguments.names or vbcaps.list_models()
    for name in names:
        row = measure(name, arguments.data_folder, arguments.images)
        if row is None:
            continue
        print(*(f"{key}={row[key]}" for key in ("network", "most_votes", "fewest_votes", "moving_others", "same_10")))
        if arguments.write:
            record(RECORD, row)
    if arguments.write or arguments.table:
        PAGE.write_text(with_table(PAGE.read_text(), RECORD))


def measure(name: str, data_folder: str | None, images: int) -> dict[str, object] | None:
    """Return the row of a network, or None for a CNN."""
    model = vbcaps.load(name)
    if capsules_of(model.net) is None:
        return None
    data = prepare(model.recipe, data_folder, torch.device("cpu"))
    test = some_of(data.test, images)
    found = model.health(test.images, test.labels, of=f"{len(test.labels)} test images of {model.recipe.dataset}")
    return dict(network=name) | found.row() | dict(source=data.source, commit=commit())


def record(file: Path, row: dict[str, object]) -> None:
    """Put a row into the file, in place of that of the same network."""
    rows = {one["network"]: one for one in read(file)} | {str(row["network"]): row}
    head = list(dict.fromkeys(key for one in rows.values() for key in one))
    with open(file, "w", newline="") as opened:
        writer = csv.DictWriter(opened, head, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[name] for name in sorted(rows))


def read(file: Path) -> list[dict[str, str]]:
    """Return the rows of the file."""
    if not file.exists():
        return []
    with open(file, newline="") as opened:
        return list(csv.DictReader(opened))


def with_table(page: str, file: Path) -> str:
    """Return a page with the table of the file between its marks."""
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    cells = [cells_of(row) for row in read(file)]
    return f"{before}{BEGIN}\n\n{table(HEAD, cells)}\n\n{END}{after}"


def cells_of(row: dict[str, str]) -> list[str]:
    """Return the cells of a network in the table: shares in %."""

    def share(name: str) -> str:
        return f"{100 * float(row[name]):.0f}" if row[name] else ""

    def number(name: str, digits: int) -> str:
        return f"{float(row[name]):.{digits}f}" if row[name] else ""

    uniform = f"{share('uniform_error')} ({share('uniform_as_trained')})" if row["uniform_error"] else ""
    rule = {"released": "released", "paper": "printed"}.get(row["activation"], row["activation"] or row["routing"])
    return [
        f"`{row['network']}`", rule, share("most_votes"), share("fewest_votes"), share("tightest"),
        f"{number('moving', 1)} ({number('moving_others', 1)})", number("parts", 2), share("class_caps.sharpness"),
        share("class_caps.information_share"), share("same_10"),
        uniform,
    ]  # fmt: skip


if __name__ == "__main__":
    main()

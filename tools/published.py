"""List the trained networks in src/vbcaps/weights/published.json: size, SHA-256, dataset and test error of each file,
and what its capsules do.

python tools/published.py [--check | --copy-to FOLDER]

The files are those in the package and in weights/. `vbcaps.load` holds what it fetches to this list, so run this script
after any of these files changed; with --check it writes nothing, and fails where it would. --copy-to checks the list,
too, and copies all files to a folder, from where a release publishes them. The health of a network is that in its file,
or in results/health.csv for a file that keeps none.
"""

import argparse
import csv
import hashlib
import json
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
HEALTH = ROOT / "results" / "health.csv"
PACKAGE = ROOT / "src" / "vbcaps" / "weights"
FOLDERS = (PACKAGE, ROOT / "weights")
MEASURES = (  # of health, that are listed
    "images", "most_votes", "fewest_votes", "tightest", "moving", "moving_others", "parts", "class_caps.sharpness",
    "class_caps.information_share", "same_10",
)  # fmt: skip


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    only = parser.add_mutually_exclusive_group()
    only.add_argument("--check", action="store_true", help="write nothing; fail if the list is stale")
    only.add_argument("--copy-to", type=Path, metavar="FOLDER", help="copy all files there; fail if the list is stale")
    arguments = parser.parse_args(words)
    new, path = listed(), PACKAGE / "published.json"
    if not path.exists() or path.read_text() != new:
        if arguments.check or arguments.copy_to:
            sys.exit(f"{path.name} is stale: run python tools/published.py")
        path.write_text(new)
    if arguments.copy_to:
        arguments.copy_to.mkdir(parents=True, exist_ok=True)
        for file in weights_files():
            shutil.copy(file, arguments.copy_to)


def weights_files() -> list[Path]:
    """Return all weights files, by name."""
    return sorted((path for folder in FOLDERS for path in folder.glob("*.safetensors")), key=lambda path: path.stem)


def listed() -> str:
    """Return the list as JSON."""
    files = weights_files()
    if twice := [path.stem for path in files if all((folder / path.name).exists() for folder in FOLDERS)]:
        sys.exit(f"{twice[0]} is in the package and in weights/: keep one")
    return json.dumps({path.stem: facts(path) for path in files}, indent=1) + "\n"


def facts(path: Path) -> dict[str, Any]:
    """Return what is listed of a weights file."""
    content, header = path.read_bytes(), header_of(path)
    return dict(
        size=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        dataset=header["recipe"]["dataset"],
        test_error=round(header["metadata"]["test_error"], 6),
    ) | health_of(path.stem, header["metadata"])


def health_of(name: str, about: dict[str, Any]) -> dict[str, Any]:
    """Return the main measures of a network's capsules, from its file or from results/health.csv; empty without any."""
    if about.get("health") is not None:
        row = row_of(about["health"])
    else:
        row = next((one for one in rows_of(HEALTH) if one["network"] == name), dict[str, Any]())
    known = {measure: json.loads(str(row[measure])) for measure in MEASURES if row.get(measure) not in ("", None)}
    return dict(health=known) if known else {}


def row_of(kept: dict[str, Any]) -> dict[str, Any]:
    """Return a kept record as `Health.row` does, as far as it is listed; this script runs without PyTorch."""
    top = kept["layers"][-1]
    same = {f"same_{one['iters']}": one["same"] for one in kept["at_iterations"]}
    return kept | same | {f"{top['name']}.{measure}": top[measure] for measure in ("sharpness", "information_share")}


def rows_of(file: Path) -> list[dict[str, str]]:
    """Return the rows of a table."""
    if not file.exists():
        return []
    with open(file, newline="") as opened:
        return list(csv.DictReader(opened))


def about_weights(path: Path) -> dict[str, Any]:
    """Return the facts in the header of a weights file, its test error among them."""
    return header_of(path)["metadata"]


def header_of(path: Path) -> dict[str, Any]:
    """Return our part of the header of a weights file."""
    content = path.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    return json.loads(header["__metadata__"]["vbcaps"])


if __name__ == "__main__":
    main()

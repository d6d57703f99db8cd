"""Export each network of the package in both formats, and compare the files with PyTorch: benchmarks/exports.csv.

python tools/exports.py [NAME...] [--data-folder FOLDER] [--write]

A file is compared on test images of its network's dataset (MNIST's for affNIST), the same for both formats; the made-up
images are those on which `vbcaps export` itself compares. A file that is in the table is skipped.
"""

import argparse
import csv
import tempfile
import time
from pathlib import Path

import torch

import vbcaps
from vbcaps.data import load_dataset
from vbcaps.training.environment import commit
from vbcaps.weights.export import FORMATS, OPSET, onnx_runner

IMAGES, BATCH = 60, 10  # the files materialise every vote, so large batches take gigabytes
TABLE = Path(__file__).parents[1] / "benchmarks" / "exports.csv"
HEAD = (
    "network", "format", "opset", "images", "difference", "other_answers", "difference_made_up", "bytes", "seconds",
    "source", "torch", "commit",
)  # fmt: skip


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="networks; by default all in the package")
    parser.add_argument("--format", choices=list(FORMATS), action="append", help="by default both, one after the other")
    parser.add_argument("--data-folder", metavar="FOLDER", help="folder of the datasets")
    parser.add_argument("--write", action="store_true", help="write the table, not only print")
    arguments = parser.parse_args(words)
    kept = read(TABLE)
    for kind in arguments.format or FORMATS:
        for name in arguments.names or vbcaps.list_models():
            if arguments.write and any((row["network"], row["format"]) == (name, kind) for row in kept):
                print(f"{name}, {kind}: recorded already")
                continue
            kept.append(row := compare(name, kind, arguments.data_folder))
            print(*(f"{key}={row[key]}" for key in HEAD[:-3]), flush=True)
            if arguments.write:
                with open(TABLE, "w", newline="") as file:
                    writer = csv.DictWriter(file, HEAD, lineterminator="\n")
                    writer.writeheader()
                    writer.writerows(sorted(kept, key=lambda row: (row["network"], row["format"])))


def compare(name: str, kind: str, data_folder: str | None, count: int = IMAGES) -> dict[str, str]:
    """Return the row of a network in one format."""
    model = vbcaps.load(name)
    recipe = model.recipe
    data = load_dataset("mnist" if recipe.dataset == "affnist" else recipe.dataset, data_folder, recipe.image_size)
    order = torch.randperm(len(data.test.labels), generator=torch.Generator().manual_seed(0))
    images = data.test.images[order[:count]]
    expected = model.predict(images)
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        done = vbcaps.export(model, Path(folder) / f"net{FORMATS[kind]}", format=kind)
        seconds = time.perf_counter() - began
        run = onnx_runner(str(done.path)) if kind == "onnx" else torch.export.load(done.path).module()
        with torch.no_grad():
            found = torch.cat([run(part) for part in images.split(BATCH)])
        size = done.path.stat().st_size
    row = dict(
        network=name, format=kind, opset=OPSET if kind == "onnx" else "", images=len(images),
        difference=f"{float((found - expected).abs().max()):.2g}",
        other_answers=int((found.argmax(1) != expected.argmax(1)).sum()),
        difference_made_up=f"{done.difference:.2g}", bytes=size, seconds=f"{seconds:.1f}",
        source=data.source, torch=torch.__version__, commit=commit(),
    )  # fmt: skip
    return {key: str(value) for key, value in row.items()}


def read(table: Path) -> list[dict[str, str]]:
    if not table.exists():
        return []
    with open(table, newline="") as file:
        return list(csv.DictReader(file))


if __name__ == "__main__":
    main()

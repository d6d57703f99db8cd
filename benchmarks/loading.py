"""Does the care with which data files are read cost time? Loading each dataset, before and after.

python benchmarks/loading.py --data FOLDER [--before COMMIT] [--rounds 7] [--csv benchmarks/loading.csv]

Loads every dataset that FOLDER has by the present code and by that of another commit, in turns, each in a process of
its own, and compares medians of the CPU time, in which other programs have little part. A process loads once to import
and to fill the system's cache of files, and is measured when it loads again. `first_s` is the very first load of the
present code, which also takes the published sums, while the later ones remember them.

`--make` first writes files in official formats to FOLDER: SVHN as .mat and CIFAR-10 as a pickled archive from the
sheets there, and BloodMNIST with random pixels.
"""

import argparse
import io
import json
import os
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import processor, record

from vbcaps.data import FACTS, load_dataset
from vbcaps.data.medmnist_table import TABLE

ROOT = Path(__file__).resolve().parents[1]
BEFORE = "b4a3ba1^"  # data files were then read by SciPy, NumPy and pickle
CODE = """
import json, sys, time
from vbcaps.data import load_dataset
def load():
    begin = time.process_time()
    data = load_dataset(sys.argv[1], sys.argv[2])
    return time.process_time() - begin, len(data.train.labels) + len(data.test.labels)
first, images = load()
print(json.dumps(dict(first=first, again=min(load()[0] for _ in range(int(sys.argv[3]))), images=images)))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="a folder of datasets, one folder each")
    parser.add_argument("--before", default=BEFORE, metavar="COMMIT", help=f"default: {BEFORE}")
    parser.add_argument("--rounds", type=int, default=7, help="processes of each code for each dataset")
    parser.add_argument("--loads", type=int, default=1, help="loads of a process, of which the fastest counts")
    parser.add_argument("--only", nargs="+", choices=list(FACTS), help="these datasets")
    parser.add_argument("--make", action="store_true", help="write files in official formats first")
    parser.add_argument("--csv", help="append to this file")
    options = parser.parse_args()
    if options.make:
        make(options.data)
    names = options.only or [name for name in FACTS if (options.data / name).is_dir()]
    with tempfile.TemporaryDirectory() as folder:
        other = extracted(options.before, Path(folder))
        for name in names:
            times: dict[str, list[float]] = dict(before=[], now=[])
            found: dict = {}
            first = None
            for _ in range(options.rounds):
                for which, source in (("before", other), ("now", ROOT / "src")):
                    found = loaded(source, name, options.data, options.loads, Path(folder) / "cache")
                    times[which].append(found["again"])
                first = found["first"] if first is None else first
            before, now = (statistics.median(times[which]) for which in ("before", "now"))
            row = dict(
                dataset=name, images=found["images"], before_s=f"{before:.3f}", now_s=f"{now:.3f}",
                ratio=f"{now / before:.3f}", first_s=f"{first:.3f}", rounds=options.rounds,
                before=options.before, load=f"{os.getloadavg()[0]:.1f}", processor=processor(),
            )  # fmt: skip
            record(row, torch.device("cpu"), options.csv)


def extracted(commit: str, folder: Path) -> Path:
    """Return the folder of the package's source at a commit."""
    packed = subprocess.run(["git", "-C", str(ROOT), "archive", commit, "src"], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        archive.extractall(folder, filter="data")
    return folder / "src"


def loaded(source: Path, name: str, data: Path, loads: int, cache: Path) -> dict:
    """Load a dataset by the code in a folder, in a process of its own."""
    environment = os.environ | dict(PYTHONPATH=str(source), OMP_NUM_THREADS="1", VBCAPS_CACHE=str(cache))
    command = [sys.executable, "-P", "-c", CODE, name, str(data), str(loads)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    return json.loads(done.stdout)


def make(folder: Path) -> None:
    """Write files in official formats from the datasets that are there in others."""
    from scipy.io import savemat

    sys.path.insert(0, str(ROOT / "tests"))
    from official_files import cifar_pickle

    svhn, cifar, blood = (folder / name for name in ("svhn", "cifar10", "bloodmnist"))
    if svhn.is_dir() and not (svhn / "test_32x32.mat").exists():
        data = load_dataset("svhn", folder)
        for part, split in (("train", data.train), ("test", data.test)):
            labels = split.labels.numpy().astype(np.uint8)[:, None]
            X = split.images.numpy().transpose(2, 3, 1, 0)
            savemat(svhn / f"{part}_32x32.mat", dict(X=X, y=np.where(labels, labels, 10)), do_compression=True)
    if cifar.is_dir() and not (cifar / "cifar-10-python.tar.gz").exists():
        data = load_dataset("cifar10", folder)
        with tarfile.open(cifar / "cifar-10-python.tar.gz", "w:gz") as archive:
            for k, name in enumerate([*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]):
                split, batch = (data.train, slice(k * 10_000, (k + 1) * 10_000)) if k < 5 else (data.test, slice(None))
                rows = split.images[batch].flatten(1).numpy()
                content = cifar_pickle(rows, split.labels[batch].tolist())
                member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
                member.size, member.mtime = len(content), int(time.time())
                archive.addfile(member, io.BytesIO(content))
    if not (blood / "bloodmnist.npz").exists():
        blood.mkdir(exist_ok=True)
        generator = np.random.default_rng(0)
        arrays: dict[str, Any] = {}
        for part, count in zip(("train", "val", "test"), TABLE["bloodmnist"].counts, strict=True):
            arrays[f"{part}_images"] = generator.integers(0, 256, (count, 28, 28, 3), np.uint8)
            arrays[f"{part}_labels"] = (np.arange(count) % 8).astype(np.uint8)[:, None]
        np.savez_compressed(blood / "bloodmnist.npz", **arrays)


if __name__ == "__main__":
    main()

"""How fast is a folder of images decoded, and how much memory does a training on it take?

python benchmarks/folder.py [--images 10000 100000] [--side 64] [--folder FOLDER] [--csv benchmarks/folder.csv]

Makes folders of small colour images of ten classes, half of them PNG and half JPEG, as files of their own with a
thousand different contents; decodes each folder to the mapped file of `vbcaps.data.stored`; and trains a tiny network
for one epoch on crops of 28 x 28, with the test at the end. Every part is a process of its own. A row has:

- the images that were decoded in a second, and the CPU time of an image, in which other programs have little part: its
  inverse is the rate of one core that does nothing else;
- the most memory that the decoding processes together had for themselves, and that the training had; and what the
  training had with the pages of the mapped file, which the system takes back when it needs them.

Folders and decoded images are removed at the end; --folder says where they are in the meantime.
"""

import argparse
import io
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import processor, record
from PIL import Image

from vbcaps.data import load_dataset
from vbcaps.data import stored as store
from vbcaps.training.loop import fit
from vbcaps.training.recipes import recipe

CLASSES, CONTENTS = 10, 1000
EVERY = 0.02  # seconds between two looks at the memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--side", type=int, default=64)
    parser.add_argument("--folder", type=Path, help="for the images, which need about 5 KB each, and 12 KB decoded")
    parser.add_argument("--csv", help="append to this file")
    parser.add_argument("--part", choices=list(PARTS), help="do this alone, with the images that are there")
    arguments = parser.parse_args()
    if arguments.part:
        print(json.dumps(measured(lambda: PARTS[arguments.part](arguments.folder, arguments.side))))
        return
    for images in arguments.images:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as made:
            write_images(Path(made) / "images", images, arguments.side)
            found = {part: alone(part, Path(made), arguments.side) for part in PARTS}
            files = sum(path.stat().st_size for path in Path(made).rglob("*") if path.is_file()) / 1e6
        record(row(images, arguments.side, files, found), torch.device("cpu"), arguments.csv)


def row(images: int, side: int, files_MB: float, found: dict[str, dict[str, float]]) -> dict[str, Any]:
    decoding, training = found["decode"], found["train"]
    return dict(
        images=images, side=side, decoded_MB=f"{images * 3 * side**2 / 1e6:.0f}", all_files_MB=f"{files_MB:.0f}",
        decode_s=f"{decoding['seconds']:.1f}", images_per_s=f"{images / decoding['seconds']:.0f}",
        cpu_us_per_image=f"{1e6 * decoding['cpu_s'] / images:.0f}", processes=store.workers(),
        decode_own_MB=f"{decoding['own_MB']:.0f}", train_s=f"{training['seconds']:.0f}",
        train_own_MB=f"{training['own_MB']:.0f}", train_mapped_MB=f"{training['all_MB']:.0f}",
        load=f"{decoding['load']:.1f}", processor=processor(),
    )  # fmt: skip


def write_images(root: Path, count: int, side: int) -> None:
    """Write PNG and JPEG files of smooth colours with a little noise, as photographs have."""
    generator = np.random.default_rng(0)
    contents = []
    for k in range(min(count, CONTENTS)):
        coarse = Image.fromarray(generator.integers(0, 256, (6, 6, 3), dtype=np.uint8))
        smooth = coarse.resize((side, side), Image.Resampling.BICUBIC)
        noise = generator.integers(-6, 7, (side, side, 3))
        image = Image.fromarray((np.asarray(smooth) + noise).clip(0, 255).astype(np.uint8))
        file = io.BytesIO()
        image.save(file, "PNG" if k % 2 else "JPEG")
        contents.append(("png" if k % 2 else "jpg", file.getvalue()))
    for c in range(CLASSES):
        (root / f"class{c}").mkdir(parents=True)
    for k in range(count):
        suffix, content = contents[k % len(contents)]
        (root / f"class{k % CLASSES}" / f"{k:06d}.{suffix}").write_bytes(content)


def alone(part: str, folder: Path, side: int) -> dict[str, float]:
    """Return what a process of its own measures."""
    command = [sys.executable, __file__, "--part", part, "--folder", str(folder), "--side", str(side)]
    variables = {**os.environ, "VBCAPS_CACHE": str(folder / "decoded"), "OMP_WAIT_POLICY": "PASSIVE"}
    done = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(f"{part} failed")
    return json.loads(done.stdout.splitlines()[-1])


def decode(folder: Path, side: int) -> None:
    store.IN_MEMORY = 0  # so that the small folder takes the same way as the large one
    load_dataset(folder / "images", size=side)


def train(folder: Path, side: int) -> None:
    store.IN_MEMORY = 0
    one = recipe(
        "default", data=str(folder / "images"), image_size=side, crop=28, arch=(4, 2, 2, 2), iters=1, batch=128,
        epochs=1, validation=0.0, test=True, flip=False,
    )  # fmt: skip
    fit(one, folder / "run", device="cpu")
    shutil.rmtree(folder / "run")


PARTS: dict[str, Callable[[Path, int], None]] = dict(decode=decode, train=train)


def measured(call: Callable[[], None]) -> dict[str, float]:
    """Return the seconds of a call, its CPU seconds, and the most memory of this process and those that it started."""
    stop, most = threading.Event(), dict(own_MB=0.0, all_MB=0.0)

    def look() -> None:
        while not stop.wait(EVERY):
            for name, value in memory().items():
                most[name] = max(most[name], value)

    watching = threading.Thread(target=look)
    before, begun = cpu_seconds(), time.perf_counter()
    watching.start()
    try:
        call()
    finally:
        stop.set()
        watching.join()
    return dict(
        seconds=time.perf_counter() - begun, cpu_s=cpu_seconds() - before, load=os.getloadavg()[0], **most
    )  # fmt: skip


def cpu_seconds() -> float:
    """Return the CPU seconds of this process and of those that it started and that have ended."""
    return sum(
        used.ru_utime + used.ru_stime
        for used in (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    )


def memory() -> dict[str, float]:
    """Return megabytes of this process and of those that it started: without pages of files, and with them."""
    own = both = 0.0
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    for process in ("self", *children):
        try:
            lines = Path(f"/proc/{process}/status").read_text().splitlines()
        except OSError:  # it has ended
            continue
        fields = {name: rest.split() for name, _, rest in (line.partition(":") for line in lines)}
        own += int(fields.get("RssAnon", ["0"])[0]) / 1024
        both += int(fields.get("VmRSS", ["0"])[0]) / 1024
    return dict(own_MB=own, all_MB=both)


if __name__ == "__main__":
    main()

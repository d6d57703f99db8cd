"""Harnesses of folders in which names are links, pipes, devices, sockets, folders, and files of 20 GB without a byte.

Run folders, sweeps, folders of the Hub and caches are read and written as the library does it. Beside each lies a
folder ``elsewhere``, to which links lead, and in which nothing may change.
"""

import io
import os
import shutil
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import tiny
from mutations import layers, mutated
from PIL import Image

import vbcaps
from vbcaps import disk
from vbcaps.data import DataError, sums
from vbcaps.data import stored as store
from vbcaps.data.folder import image_folder
from vbcaps.data.worker import work as decode_all
from vbcaps.sweeps.plan import make_plan
from vbcaps.sweeps.study import open_sweep
from vbcaps.training.checkpoint import unpack_state
from vbcaps.training.distributed import ALONE
from vbcaps.training.files import RunError, check_writable, read_json, write
from vbcaps.training.loop import fit
from vbcaps.training.runfolder import read_metrics, read_recipe, read_result, resolved, seed_folders
from vbcaps.weights.find import present

HUGE = 20 * 10**9
DEVICES = ("/dev/zero", "/dev/full", "/dev/null", "/dev/random", "/dev/tty", "/dev/stdin")
RUN = tiny.SMALL
PARTS = ("recipe.json", "metrics.csv", "state.safetensors", "environment.json", "result.json", "config.json", "room")
MADE = dict(  # further names that a folder may come to have
    run=("latest", "seed1/x", "tensorboard"), cache=("weights", "kernels"),
    sweep=(
        "sweep.db-journal", "sweep.db-wal", "sweep.db-shm", ".claims/trial-0003.lock", ".claims/trial-0004.lock",
        ".claims/sweep.lock-journal", "trial-0003", "trial-0004/state.safetensors",
    ),
)  # fmt: skip
Work = Callable[[], object]
whole: dict[str, dict[str, bytes]] = {}  # the files of each kind of folder, by name
drawn = Random(0)  # by the seed of the change, for what is tried on the folder


def remember(kind: str, root: Path, make: Callable[[Path], object]) -> None:
    """Make whole files once, and write them from memory from then on; make what lies elsewhere, too."""
    if kind not in whole:
        made = root / "made" / kind
        made.mkdir(parents=True)
        make(made)
        whole[kind] = {
            path.relative_to(made).as_posix(): path.read_bytes() for path in made.rglob("*") if path.is_file()
        }
        shutil.rmtree(root / "made")
    if not (root.parent / "huge").exists():
        with open(root.parent / "huge", "xb") as file:
            file.truncate(HUGE)
    for name, content in whole[kind].items():
        path = root / kind / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (root / "elsewhere").mkdir()
    (root / "elsewhere" / "secret").write_bytes(b"precious")


def change(kind: str) -> Callable[[Path, Random], Path]:
    """Return what replaces some files of a folder, or names that it may come to have, by something odd."""

    def changed(root: Path, random: Random) -> Path:
        drawn.seed(random.random())
        there = [*whole[kind], *MADE.get(kind, ()), *(f".{part}.part" for part in PARTS)]
        for _ in range(1 + int(random.expovariate(0.8))):
            name = random.choice(there)
            path = root / kind / name
            if random.random() < 0.1 and path.parent != root / kind:
                path = path.parent
            if any(parent.is_symlink() for parent in path.parents if parent.is_relative_to(root)):
                continue  # nothing is made through a link that leads elsewhere
            with suppress(OSError):
                path.parent.mkdir(parents=True, exist_ok=True)
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
                random.choice(ODD)(path, whole[kind].get(name, b""), random)
        return root / kind

    return changed


def _pipe(path: Path, content: bytes, random: Random) -> None:
    os.mkfifo(path)


def _socket(path: Path, content: bytes, random: Random) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(os.path.relpath(path))


def _device(path: Path, content: bytes, random: Random) -> None:
    path.symlink_to(random.choice(DEVICES))


def _elsewhere(path: Path, content: bytes, random: Random) -> None:
    root = next(parent for parent in path.parents if (parent / "elsewhere").is_dir())
    path.symlink_to(root / "elsewhere" / random.choice(["secret", "new", "", "pipe"]))


def _loop(path: Path, content: bytes, random: Random) -> None:
    path.symlink_to(random.choice([path.name, ".", ".."]))


def _folder(path: Path, content: bytes, random: Random) -> None:
    path.mkdir()


def _huge(path: Path, content: bytes, random: Random) -> None:
    root = next(parent for parent in path.parents if (parent / "huge").is_file())
    os.link(root / "huge", path)


def _bytes(path: Path, content: bytes, random: Random) -> None:
    path.write_bytes(mutated(layers(path.name, content), random) if content else random.randbytes(20))


def _gone(path: Path, content: bytes, random: Random) -> None:
    pass


ODD = (_pipe, _device, _elsewhere, _elsewhere, _loop, _folder, _huge, _bytes, _bytes, _bytes, _gone)


def tried(root: Path, works: list[Work], errors: tuple[type[Exception], ...]) -> None:
    """Do everything, look elsewhere, and raise one of the errors that there were."""
    caught = []
    for one in works:
        try:
            one()
        except errors as error:
            caught.append(error)
    there = sorted((root / "elsewhere").iterdir())
    if there != [root / "elsewhere" / "secret"] or there[0].read_bytes() != b"precious":
        raise AssertionError(f"changed elsewhere: {there}")
    if caught:
        raise drawn.choice(caught)


# --- run folders


def make_run(root: Path) -> None:
    def make(folder: Path) -> None:
        with tiny.in_place_of_data():
            fit(tiny.recipe(**RUN), folder, device="cpu")
        (folder / "latest").write_text("run\n")
        (folder / "state.before.safetensors").write_bytes((folder / "state.safetensors").read_bytes())
        (folder / "seed0").mkdir()
        (folder / "seed0" / "recipe.json").write_bytes((folder / "recipe.json").read_bytes())

    remember("run", root, make)


def use_run(root: Path, changed: Path) -> None:
    run = root / "run"

    def state() -> None:
        with suppress(OSError):  # which a run turns into a sentence
            unpack_state(ALONE.read(run / "state.safetensors", None, 1 << 22), str(run / "state.safetensors"))

    def clear() -> None:
        with suppress(OSError):
            disk.clear_parts(run)

    def resume() -> None:
        if drawn.random() < 0.5:
            with suppress(OSError):
                (run / "result.json").unlink()
        with tiny.in_place_of_data():
            fit(tiny.recipe(**RUN), run, device="cpu", resume=drawn.random() < 0.8)

    works: list[Work] = [
        lambda: read_recipe(run), lambda: read_result(run), lambda: read_metrics(run), lambda: seed_folders(run),
        lambda: read_json(run / "environment.json"), lambda: resolved(run / "latest"), lambda: vbcaps.load(run), state,
        lambda: write(run / "metrics.csv", b"epoch\n"), lambda: write(run / "result.json", b"{}"),
        lambda: check_writable(run, 1000), clear,
    ]  # fmt: skip
    drawn.shuffle(works)
    tried(root, [resume] if drawn.random() < 0.15 else works, (RunError,))


# --- sweeps


def make_sweep(root: Path) -> None:
    def make(folder: Path) -> None:
        plan, _ = make_plan(tiny.recipe(), ["lr=log:1e-4,1e-2", "routing=choice:vb,em"], "random", 6, validation=0.25)
        study = open_sweep(folder, plan)
        for k in range(3):
            one = study.take()
            assert one is not None
            study.tell(one, 0.1 * k, epochs=1, best_epoch=1, seconds=1.0, parameters=5)
        study.take()
        study.close()
        study.storage.engine.dispose()  # type: ignore[attr-defined]

    remember("sweep", root, make)


def use_sweep(root: Path, changed: Path) -> None:
    study = None

    def use() -> None:
        nonlocal study
        study = open_sweep(root / "sweep")
        study.trials()
        one = study.take()
        if one is not None:
            study.plan.recipe(one.params)
            study.run_folder(one.number)
            study.tell(one, 0.5, epochs=1) if drawn.random() < 0.5 else study.leave(one)
        for trial in study.trials():
            if any(not letter.isprintable() for letter in str((trial.params, trial.about))):
                raise AssertionError(f"raw values: {trial}")
        study.plan.train(study.trials()[0].params)

    try:
        tried(root, [use], (RunError,))
    finally:
        if study is not None:
            study.close()


# --- folders of the Hub


def make_hub(root: Path) -> None:
    def make(folder: Path) -> None:
        vbcaps.load("fashion_laptop").save_pretrained(folder)

    remember("hub", root, make)


def use_hub(root: Path, changed: Path) -> None:
    loaded = vbcaps.load("fashion_laptop")
    works: list[Work] = [
        lambda: vbcaps.Model.from_pretrained(root / "hub"), lambda: vbcaps.load(root / "hub" / "model.safetensors"),
        lambda: loaded.save_pretrained(root / "hub"),
    ]  # fmt: skip
    tried(root, works if drawn.random() < 0.5 else works[:2], (RunError,))


# --- caches


class Process:
    """What decodes images, in a thread of this process: the judge takes every process that is started for a fault."""

    def __init__(self) -> None:
        import threading

        pipes = [os.pipe() for _ in range(2)]
        self.stdin, self.stdout = os.fdopen(pipes[0][1], "w"), os.fdopen(pipes[1][0])
        streams = os.fdopen(pipes[0][0]), os.fdopen(pipes[1][1], "w")

        def work() -> None:
            with suppress(Exception), streams[0], streams[1]:
                decode_all(*streams)

        self.thread = threading.Thread(target=work, daemon=True)
        self.thread.start()

    def kill(self) -> None:
        with suppress(OSError):
            self.stdin.close()

    def wait(self) -> None:
        self.thread.join(5)

    def poll(self) -> int:
        return 1


def in_cache(root: Path, work: Callable[[], Any]) -> Any:
    """Call with the cache of a harness, and with everything decoded into it."""
    before = os.environ.get("VBCAPS_CACHE"), store.IN_MEMORY, store._start, sums.FRESH
    os.environ["VBCAPS_CACHE"] = str(root / "cache")
    store.IN_MEMORY, store._start, sums.FRESH = 0, Process, 0  # type: ignore[assignment]
    try:
        return work()
    finally:
        _, store.IN_MEMORY, store._start, sums.FRESH = before
        if before[0] is None:
            del os.environ["VBCAPS_CACHE"]
        else:
            os.environ["VBCAPS_CACHE"] = before[0]


def make_cache(root: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 255, (4, 9, 8, 3), dtype=np.uint8)
    for k, name in enumerate(("a/0", "a/1", "b/0", "b/1")):
        path = root / "photos" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        file = io.BytesIO()
        Image.fromarray(pixels[k]).save(file, "PNG")
        path.write_bytes(file.getvalue())
        os.utime(path, (1e9, 1e9))

    def make(folder: Path) -> None:
        in_cache(folder.parent, lambda: image_folder(root / "photos", 8))
        in_cache(folder.parent, lambda: sums._remember({"a": "b"}))
        (folder / "weights").mkdir()
        content = next(path for path in Path(vbcaps.__file__).parent.glob("weights/*.safetensors")).read_bytes()
        (folder / "weights" / "smallnorb_small.safetensors").write_bytes(content)

    remember("cache", root, make)


def use_cache(root: Path, changed: Path) -> None:
    def images() -> None:
        found = image_folder(root / "photos", 8).train.images
        assert len(found) == 2
        found.load()

    def weights() -> None:
        found = present("smallnorb_small")
        assert found is None or not found[0].is_relative_to(root), "weights of another network"

    works: list[Work] = [images, weights, lambda: sums._remember(sums._remembered() | {"c": "d"})]
    in_cache(root, lambda: tried(root, works, (RunError, DataError)))

"""Links, pipes, devices and huge empty files in the place of every file that is read or written."""

import ast
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tiny

import vbcaps
from vbcaps import disk
from vbcaps.data import DataError, read_image, sums
from vbcaps.data.groups import groups_of_files
from vbcaps.data.npy import map_npy
from vbcaps.training.distributed import ALONE
from vbcaps.training.files import RunError, check_writable, read_json, write
from vbcaps.training.loop import fit, fit_seeds
from vbcaps.training.runfolder import read_metrics, read_recipe, read_result, resolved, seed_folders
from vbcaps.weights.file import read_weights

sys.path.append(str(Path(__file__).parent / "fuzz"))  # whose modules name each other without a package
from harnesses import make_recipe, make_state, make_weights

SOURCE = Path(vbcaps.__file__).parent
SPARSE = 20 * 10**9


@pytest.fixture(autouse=True)
def no_waiting():
    """Open every pipe after ten seconds, so that a reader that waits for one fails, and no test hangs."""
    held, ended = [], threading.Event()

    def watch() -> None:
        if not ended.wait(10):
            for path in pipes:
                held.append(os.open(path, os.O_RDWR))

    pipes.clear()
    thread = threading.Thread(target=watch)
    thread.start()
    began = time.monotonic()
    yield
    took = time.monotonic() - began
    ended.set()
    thread.join()
    for file in held:
        os.close(file)
    assert took < 8


pipes: list[Path] = []


def pipe(path: Path) -> None:
    os.mkfifo(path)
    pipes.append(path)


def link_to_pipe(path: Path) -> None:
    pipe(path.with_name("pipe"))
    path.symlink_to("pipe")


def sparse(path: Path) -> None:
    with open(path, "xb") as file:
        file.truncate(SPARSE)


ODD: dict[str, Callable[[Path], object]] = dict(
    pipe=pipe, link_to_pipe=link_to_pipe, device=lambda path: path.symlink_to("/dev/zero"),
    folder=lambda path: path.mkdir(), sparse=sparse, loop=lambda path: path.symlink_to(path.name),
)  # fmt: skip


def make(folder: Path) -> None:
    make_weights(folder)
    make_state(folder)
    make_recipe(folder)
    (folder / "groups.csv").write_text("file,group\na,1\n")
    np.save(folder / "one.npy", np.zeros((8, 8)))


READERS: dict[str, Callable[[Path], object]] = {
    "last.safetensors": lambda folder: read_weights(folder / "last.safetensors"),
    "recipe.json": read_recipe,
    "result.json": read_result,
    "environment.json": lambda folder: read_json(folder / "environment.json"),
    "metrics.csv": read_metrics,
    "state.safetensors": lambda folder: ALONE.read(folder / "state.safetensors", None, 1 << 20),
    "groups.csv": lambda folder: groups_of_files(str(folder / "groups.csv"), folder, [folder / "a"]),
    "one.npy": lambda folder: map_npy(folder / "one.npy"),
    "one.png": lambda folder: read_image(folder / "one.png", 8, 1),
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_file_is_refused_at_once(tmp_path, name, kind):
    make(tmp_path)
    path = tmp_path / name
    path.unlink(missing_ok=True)
    ODD[kind](path)
    with pytest.raises((RunError, DataError, OSError, ValueError)) as caught:
        READERS[name](tmp_path)
    assert name in str(caught.value) or isinstance(caught.value, ValueError)
    said = dict(
        sparse="20,000,000,000 bytes|does not begin|no array|none of the formats|Expecting value", loop="symbolic|no "
    )
    allowed = said.get(kind, "it is no file but a folder, a pipe or a device|no ").split("|")
    assert any(words in str(caught.value) for words in allowed), str(caught.value)


@pytest.mark.parametrize("kind", ["pipe", "link_to_pipe", "device", "sparse"])
def test_the_list_of_sums_is_passed_over(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("VBCAPS_CACHE", str(tmp_path))
    ODD[kind](tmp_path / "sums.json")
    assert sums._remembered() == {}
    sums._remember({"a": "b"})
    assert sums._remembered() == {"a": "b"}


@pytest.mark.parametrize("kind", ["pipe", "sparse", "device"])
def test_a_folder_of_the_hub_is_refused_at_once(tmp_path, kind):
    pytest.importorskip("huggingface_hub")
    make_weights(tmp_path)
    (tmp_path / "last.safetensors").rename(tmp_path / "model.safetensors")
    ODD[kind](tmp_path / "config.json")
    with pytest.raises(RunError, match=r"config\.json: it "):
        vbcaps.Model.from_pretrained(tmp_path)


def test_a_file_that_grows_while_it_is_read_ends_at_the_limit(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(bytes(100))
    monkeypatch.setattr(disk, "check", lambda *_: None)
    with pytest.raises(OSError, match="more than the 10 bytes"):
        disk.read_bytes(tmp_path / "a", 10)


def test_json_of_very_many_values_is_refused(tmp_path, monkeypatch):
    (tmp_path / "a.json").write_text('{"a": [' + "[]," * 20 + "[]]}")
    assert read_json(tmp_path / "a.json")
    monkeypatch.setattr("vbcaps.training.files.MOST_VALUES", 30)
    with pytest.raises(RunError, match="more than 30 values"):
        read_json(tmp_path / "a.json")


# --- writing


@pytest.fixture
def elsewhere(tmp_path) -> Path:
    """A file of somebody else, which nothing may change."""
    path = tmp_path / "elsewhere"
    path.write_bytes(b"precious")
    return path


def test_no_run_writes_through_a_link(tmp_path, elsewhere):
    """Every name that a run has is a link to a file elsewhere, or to one that is not there."""
    names = (
        "recipe.json", "environment.json", "metrics.csv", "last.safetensors", "best.safetensors", "state.safetensors",
        "state.before.safetensors",
    )  # fmt: skip
    run = tmp_path / "run"
    with tiny.in_place_of_data():
        fit(tiny.recipe(**tiny.SMALL), tmp_path / "whole", device="cpu")
        run.mkdir()
        for name in names:
            for link in (f".{name}.part", f".{name}"):
                (run / link).symlink_to(elsewhere)
            if "state" not in name and name != "recipe.json":
                (run / name).symlink_to(elsewhere if name != "metrics.csv" else tmp_path / "new")
        for name in (".room.part", ".result.json.part"):
            (run / name).symlink_to(elsewhere)
        fit(tiny.recipe(**tiny.SMALL), run, device="cpu")
    assert elsewhere.read_bytes() == b"precious"
    assert not (tmp_path / "new").exists()
    assert (run / "last.safetensors").read_bytes() == (tmp_path / "whole" / "last.safetensors").read_bytes()
    assert not list(run.glob(".*.part"))


def test_writing_replaces_a_link_and_not_what_it_leads_to(tmp_path, elsewhere):
    for name in ("a", ".a.part", ".a"):
        (tmp_path / name).symlink_to(elsewhere)
    write(tmp_path / "a", b"new")
    assert (tmp_path / "a").read_bytes() == b"new"
    assert not (tmp_path / "a").is_symlink()
    assert elsewhere.read_bytes() == b"precious"
    with pytest.raises(FileExistsError):
        disk.put(tmp_path / ".a", b"new")
    (tmp_path / ".dangling").symlink_to(tmp_path / "made")
    with pytest.raises(FileExistsError):
        disk.put(tmp_path / ".dangling", b"new")
    assert not (tmp_path / "made").exists()


def test_names_of_unfinished_files_cannot_be_guessed(tmp_path):
    names = {disk.beside(tmp_path / ("x" * 255)).name for _ in range(100)}
    assert len(names) == 100
    assert max(len(os.fsencode(disk.beside(tmp_path / ("ä" * 127)).name)) for _ in range(10)) < 255


def test_the_check_for_room_follows_no_link(tmp_path, elsewhere):
    (tmp_path / ".room.part").symlink_to(elsewhere)
    check_writable(tmp_path, 10)
    assert elsewhere.read_bytes() == b"precious"


@pytest.mark.parametrize("place", ["seed0", "tensorboard"])
def test_a_folder_within_that_is_a_link_is_refused(tmp_path, place):
    (tmp_path / "other").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / place).symlink_to(tmp_path / "other")
    options: dict = dict(seeds=1) if place == "seed0" else dict(tensorboard=True)
    train = fit_seeds if place == "seed0" else fit
    with tiny.in_place_of_data(), pytest.raises(RunError, match=f"{place}: it is a link, and nothing is written thr"):
        train(tiny.recipe(**tiny.SMALL), tmp_path / "run", device="cpu", **options)
    assert not list((tmp_path / "other").iterdir())


def test_a_file_in_the_place_of_tensorboards_folder_is_named(tmp_path):
    pytest.importorskip("tensorboard")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tensorboard").write_bytes(b"damaged")
    with tiny.in_place_of_data(), pytest.raises(RunError, match=r"cannot write in .*tensorboard: "):
        fit(tiny.recipe(**tiny.SMALL), tmp_path / "run", device="cpu", tensorboard=True)
    (tmp_path / "run" / "tensorboard").unlink()
    (tmp_path / "run" / "tensorboard").mkdir()
    (tmp_path / "run" / "tensorboard" / "events.out.tfevents.1.here").write_bytes(b"\xff" * 100)  # is not read
    with tiny.in_place_of_data():
        fit(tiny.recipe(**tiny.SMALL), tmp_path / "run", device="cpu", tensorboard=True, resume=True)


def test_a_picture_is_not_drawn_through_a_link(tmp_path, elsewhere):
    pytest.importorskip("matplotlib")
    from vbcaps.figures.run import new_figure, save

    (tmp_path / "a.png.part").symlink_to(elsewhere)
    (tmp_path / "a.png").symlink_to(elsewhere)
    save(new_figure(1, 1), tmp_path / "a.png")
    assert elsewhere.read_bytes() == b"precious"


# --- names


def test_a_folder_with_a_digit_of_another_kind_is_no_seed(tmp_path):
    for name in ("seed²", "seed١", "seed1", "seed07"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "recipe.json").write_text("{}")
    assert [path.name for path in seed_folders(tmp_path)] == ["seed1", "seed07"]


def test_latest_of_odd_bytes_is_refused_by_name(tmp_path):
    for content in (b"\xff\xfe", b"", b"a\0b", bytes(5000)):
        (tmp_path / "latest").write_bytes(content)
        with pytest.raises(RunError, match="latest: "):
            resolved(tmp_path / "latest")
    (tmp_path / "latest").write_text("run-1\n")
    assert resolved(tmp_path / "latest") == tmp_path / "run-1"


# --- one door


def test_every_file_is_opened_by_one_function():
    """The others read what the package itself has, write, or open a library's own file after a check."""
    allowed = {
        "disk.py": 1, "data/worker.py": 1, "data/stored.py": 1, "data/download.py": 1, "data/sample.py": 1,
        "kernels/cpu/build.py": 5, "explore/server.py": 1, "explore/pictures.py": 2, "data/opening.py": 1,
        "data/sheets.py": 1,
    }  # fmt: skip
    found: dict[str, int] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call):
                continue
            called = ast.unparse(node.func)
            reads = called in ("open", "io.FileIO", "Image.open", "np.load", "np.fromfile") or called.endswith(
                (".read_text", ".read_bytes", "path.open", "file.open")
            )
            if reads and not called.startswith("disk."):
                name = path.relative_to(SOURCE).as_posix()
                found[name] = found.get(name, 0) + 1
    assert found == allowed | {"figures/votes.py": 1}

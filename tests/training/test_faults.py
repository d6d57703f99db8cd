"""Runs on a disk that fails at each call in turn, and on one that is full."""

import errno
import os
import resource
from pathlib import Path

import pytest
import tiny
import torch
from faults import ERRORS, failing, watched
from same import assert_same_run

from vbcaps import disk
from vbcaps.training import files
from vbcaps.training.checkpoint import sum_of, unpack_state
from vbcaps.training.files import RunError
from vbcaps.training.loop import fit
from vbcaps.training.runfolder import BEFORE, STATE
from vbcaps.weights.tensors import pack_tensors, unpack_tensors


@pytest.fixture(scope="module", autouse=True)
def tiny_data():
    with tiny.in_place_of_data():
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return a run that nothing disturbed, and the number of its calls."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    with watched(folder) as calls:
        fit(tiny.recipe(**tiny.SMALL), folder, device="cpu")
    assert {"open", "write", "fsync", "replace", "link", "mkdir"} == set(calls.names)
    return folder, len(calls.names)


def assert_whole(folder: Path) -> None:
    """Hold each state that is there to be readable: the last, or else the one before it."""
    for name in (STATE, BEFORE):
        if (folder / name).exists():
            unpack_state((folder / name).read_bytes(), name)


def test_a_call_that_fails_ends_the_run_with_a_clear_word_and_loses_nothing(whole, tmp_path):
    for at in range(whole[1]):
        folder, number = tmp_path / f"run{at}", ERRORS[at % len(ERRORS)]
        with watched(folder, at, failing(number)) as calls, pytest.raises(RunError) as caught:
            fit(tiny.recipe(**tiny.SMALL), folder, device="cpu")
        message, where = str(caught.value), f"{calls.names[at]}, call {at}"
        assert os.strerror(number) in message, where
        assert str(folder) in message, where
        assert not list(folder.glob(".*")), where
        assert_whole(folder)
        fit(tiny.recipe(**tiny.SMALL), folder, device="cpu", resume=folder.exists())  # there is room again
        assert_same_run(whole[0], folder)


def test_a_limit_on_the_size_of_files_that_is_met_in_the_run(whole, tmp_path, monkeypatch):
    """The system itself refuses to write the state, after the check for room at the beginning."""
    monkeypatch.setattr("vbcaps.training.runlog.check_writable", lambda folder, size: files.make_folder(folder))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((whole[0] / STATE).stat().st_size - 100, hard))
    try:
        with pytest.raises(RunError, match=r"cannot write .*state\.safetensors: File too large"):
            fit(tiny.recipe(**tiny.SMALL), tmp_path / "run", device="cpu")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    fit(tiny.recipe(**tiny.SMALL), tmp_path / "run", device="cpu", resume=True)
    assert_same_run(whole[0], tmp_path / "run")


def begun(folder: Path, **fields: object) -> Path:
    """Leave a run as a kill in its second epoch does, with a state and the one before it."""

    def stop(event: object) -> None:
        if event.kind == "epoch" and event.epoch == 2:
            raise KeyError("stop")

    with pytest.raises(KeyError):
        fit(tiny.recipe(**tiny.SMALL | fields), folder, device="cpu", on_event=stop)
    assert (folder / BEFORE).exists()
    return folder


def changed(state: bytes, **fields: object) -> bytes:
    tensors, header = unpack_tensors(state, "it")
    header = {name: value for name, value in header.items() if name != "sum"} | fields
    return pack_tensors(tensors, header | dict(sum=sum_of(tensors, header)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (lambda state: state[: len(state) // 2], "damaged or no safetensors file"),
        (lambda state: b"", "does not begin with the length of a header"),
        (lambda state: b"\x80\x04cposix\nsystem\nX\x05\0\0\0touch\x85R.", "does not begin with the length of a header"),
        (lambda state: b"PK\x03\x04" + bytes(100), "damaged or no safetensors file"),  # as torch.save writes
        (
            lambda state: state.replace(b"vbcaps state 2", b"vbcaps state 9"),
            r"is not the state of a run that vbcaps \S+ can resume: it has the format 'vbcaps state 9', not",
        ),
        (lambda state: changed(state, epoch=[]), r"damaged: epoch is \[\]"),
        (lambda state: changed(state, rows=[1, 2]), r"damaged: a row must have numbers for epoch, .*, got 1"),
        (
            lambda state: changed(state, rows=[{"epoch": 1, "lass": 1.0}]),
            r"damaged: a row must have numbers for epoch, loss, .*, got \{'epoch': 1, 'lass': 1.0\}",
        ),
        (lambda state: changed(state, epoch=7), "damaged: it stands at epoch 7, step 0"),
    ],
    ids=["truncated", "empty", "pickle", "zip", "version", "type", "rows", "row", "position"],
)
def test_a_bad_state_is_refused_by_name_and_the_one_before_it_offered(whole, tmp_path, content, message):
    folder = begun(tmp_path / "run")
    state = folder / STATE
    state.write_bytes(content(state.read_bytes()))
    with pytest.raises(RunError, match=message) as caught:
        fit(tiny.recipe(**tiny.SMALL), folder, device="cpu", resume=True)
    assert f"{state}" in str(caught.value)
    assert "The state before it, state.before.safetensors, is whole, at epoch 2, step 0: remove state.saf" in str(
        caught.value
    )
    with pytest.raises(RunError, match="already holds a run: resume it"):
        fit(tiny.recipe(**tiny.SMALL), folder, device="cpu")
    state.unlink()
    fit(tiny.recipe(**tiny.SMALL), folder, device="cpu", resume=True)
    assert_same_run(whole[0], folder)
    assert not (folder / BEFORE).exists()  # a finished run needs none


def test_nothing_is_offered_where_both_states_are_bad(tmp_path):
    folder = begun(tmp_path / "run")
    for name in (STATE, BEFORE):
        (folder / name).write_bytes(b"")
    with pytest.raises(RunError, match=r"length of a header$"):
        fit(tiny.recipe(**tiny.SMALL), folder, device="cpu", resume=True)


def test_a_file_system_without_second_names_keeps_the_state_by_renaming(whole, tmp_path, monkeypatch):
    def refuse(*args: object) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    folder = begun(tmp_path / "run")
    (folder / STATE).unlink()  # killed after the renaming
    fit(tiny.recipe(**tiny.SMALL), folder, device="cpu", resume=True)
    assert_same_run(whole[0], folder)


def test_a_run_that_is_moved_to_another_machine_resumes(whole, tmp_path, monkeypatch):
    """With another folder, other threads, a clock that went back, and a note of another machine."""
    folder = begun(tmp_path / "run")
    moved = tmp_path / "elsewhere" / "name with spaces"
    moved.parent.mkdir()
    folder.rename(moved)
    for path in moved.glob("*.safetensors"):
        assert str(tmp_path).encode() not in path.read_bytes()
        os.utime(path, (0, 0))
    monkeypatch.setattr("time.time", lambda: -1e9)
    monkeypatch.setattr("platform.machine", lambda: "another")
    threads = torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        fit(tiny.recipe(**tiny.SMALL), moved, device="cpu", resume=True)
    finally:
        torch.set_num_threads(threads)
    assert_same_run(whole[0], moved)


def test_a_finished_run_on_a_disk_that_cannot_be_written_gives_its_model(whole, monkeypatch):
    def read_only(path: object, flags: int, *rest: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return real(path, flags, *rest)

    real = os.open
    monkeypatch.setattr(os, "open", read_only)
    assert fit(tiny.recipe(**tiny.SMALL), whole[0], device="cpu", resume=True).result.test is not None


def test_a_begun_run_on_a_disk_that_cannot_be_written_says_so(tmp_path, monkeypatch):
    folder = begun(tmp_path / "run")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    def refuse(path: object, content: bytes) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(disk, "put", refuse)
    with pytest.raises(RunError, match=r"cannot write in .*: Read-only file system; a run needs about 0 MB there"):
        fit(tiny.recipe(**tiny.SMALL), folder, device="cpu", resume=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_the_name_of_a_file_is_on_the_disk_before_the_next_is_written(tmp_path):
    with watched(tmp_path) as calls:
        files.write(tmp_path / "a", b"1")
    assert calls.names == ["open", "write", "fsync", "replace", "open", "fsync"]  # the last two are of the folder
    with watched(tmp_path) as calls:
        files.make_folder(tmp_path / "b" / "c")
    assert calls.names == ["mkdir", "open", "fsync"] * 2

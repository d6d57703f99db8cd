"""Files that are never half written: on a full disk, in a thread."""

import contextlib
import os
import resource
import threading
from pathlib import Path

import pytest
import tiny

from vbcaps.training import files
from vbcaps.training.files import RunError
from vbcaps.training.loop import fit


@contextlib.contextmanager
def full_disk():
    """No file may grow beyond 4 KB: the system's own error, at the same calls as when the disk is full.

    Not a fixture: pytest's own output may be a file.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_full_disk_is_found_at_the_start(tmp_path):
    events = []
    with (
        tiny.in_place_of_data(),
        full_disk(),
        pytest.raises(RunError, match=r"cannot write in .*: File too large; a run needs about 0 MB"),
    ):
        fit(tiny.recipe(), tmp_path / "run", device="cpu", on_event=events.append)
    assert [event.kind for event in events] == ["stop"]
    assert list((tmp_path / "run").iterdir()) == []


def test_a_disk_that_fills_later_leaves_the_old_file(tmp_path):
    path = tmp_path / "state"
    files.write(path, b"old")
    with full_disk(), pytest.raises(RunError, match="what was there before is unchanged"):
        files.write(path, bytes(8192))
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_files_are_written_while_the_run_goes_on_one_call_after_the_other(tmp_path, monkeypatch):
    write, may, written = files.write, threading.Event(), []

    def slow(path: Path, content: bytes) -> None:
        assert may.wait(10)
        write(path, content)
        written.append(path.name)

    monkeypatch.setattr("vbcaps.training.files.write", slow)
    writer = files.Writer()
    writer({tmp_path / "a": b"1", tmp_path / "b": b"2"})  # returns although nothing can be written yet
    assert written == []
    may.set()
    writer({tmp_path / "a": b"3"})  # waits for the first two
    assert written[:2] == ["a", "b"]
    writer.wait()
    assert written == ["a", "b", "a"]
    assert (tmp_path / "a").read_bytes() == b"3"


def test_what_went_wrong_while_writing_is_raised_once(tmp_path):
    writer = files.Writer()
    writer({tmp_path / "none" / "a": b"1", tmp_path / "b": b"2"})
    with pytest.raises(RunError, match=r"cannot write .*: No such file"):
        writer({tmp_path / "c": b"3"})
    assert list(tmp_path.iterdir()) == []  # nothing after the one that failed
    writer.wait()


def test_a_lock_that_a_dying_process_still_holds_is_waited_for(tmp_path):
    """A subprocess of a run that was killed has the lock, too, until it is gone."""
    held = files.lock(tmp_path)
    threading.Timer(0.2, os.close, (held,)).start()
    os.close(files.lock(tmp_path))

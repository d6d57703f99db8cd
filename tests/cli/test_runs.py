"""The folders of runs: numbers that count up, and the one begun last."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from vbcaps.cli.runs import RUNS, new_run, set_latest
from vbcaps.training.runfolder import resolved


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def begin(name: str) -> Path:
    with new_run(name) as folder:
        (folder / "recipe.json").touch()
    return folder


def test_numbers_count_up():
    assert [begin("clothes").name for _ in range(3)] == ["clothes-1", "clothes-2", "clothes-3"]
    (RUNS / "clothes-9").mkdir()
    (RUNS / "clothes-0-2").mkdir()  # as earlier versions called theirs
    assert begin("clothes").name == "clothes-10"
    assert begin("clothes-10").name == "clothes-10-1"
    assert begin("c").name == "c-1"


def test_no_two_processes_get_the_same_folder():
    with ThreadPoolExecutor(8) as pool:
        folders = list(pool.map(begin, ["clothes"] * 40))
    assert len(set(folders)) == 40


def test_a_run_that_cannot_begin_leaves_nothing():
    with new_run("clothes") as folder:
        assert folder.is_dir()
    assert not RUNS.exists()
    begin("clothes")
    with pytest.raises(ValueError, match="no"), new_run("clothes"):
        raise ValueError("no")
    assert [path.name for path in RUNS.iterdir()] == ["clothes-1"]


def test_a_chosen_folder_is_taken_and_other_processes_make_none():
    with new_run("clothes", Path("mine")) as folder:
        assert folder == Path("mine")
    with new_run("clothes", make=False) as folder:
        assert folder == RUNS / "clothes-1"
    assert not Path("mine").exists()
    assert not RUNS.exists()


@pytest.mark.parametrize("links", [True, False])
def test_latest_leads_to_the_run_begun_last(links, monkeypatch):
    def no_links(*_: object, **__: object) -> None:
        raise OSError("a privilege is not held")

    if not links:
        monkeypatch.setattr(Path, "symlink_to", no_links)
    for _ in range(2):
        folder = begin("clothes")
        set_latest(folder)
    assert resolved(RUNS / "latest") == RUNS / "clothes-2"
    assert (RUNS / "latest").is_symlink() == links
    assert sorted(path.name for path in RUNS.iterdir()) == ["clothes-1", "clothes-2", "latest"]
    assert resolved(RUNS / "clothes-1") == RUNS / "clothes-1"


def test_a_run_that_somebody_called_latest_is_left_alone():
    folder = begin("clothes")
    (RUNS / "latest").mkdir()
    set_latest(folder)
    assert (RUNS / "latest").is_dir()
    assert resolved(RUNS / "latest") == RUNS / "latest"
    assert os.listdir(RUNS / "latest") == []

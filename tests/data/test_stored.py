"""Folders whose decoded images are in a mapped file: the same bits, made once, and again where the folder changes."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from vbcaps.data import DataError, Split, View, folder, hold_out, load_dataset
from vbcaps.data import stored as store
from vbcaps.data.stored import Images
from vbcaps.training.checkpoint import fingerprint
from vbcaps.training.loop import fit
from vbcaps.training.recipe import Recipe

GENERATOR = np.random.default_rng(0)
RECIPE = Recipe(
    name="tiny", crop=20, image_size=20, standardise="dataset", arch=(4, 2, 2, 2), batch=8, epochs=2, lr=0.01,
    loss_on="logits", iters=2, backend="reference", validation=0.25, test=True, save_seconds=0.0,
)  # fmt: skip


@pytest.fixture
def photos(tmp_path, monkeypatch):
    """A folder of 30 photographs of two classes, and a cache that is used for the smallest folder."""
    monkeypatch.setenv("VBCAPS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(store, "JOB", 4)
    monkeypatch.setattr(folder, "BLOCK", 7)
    for k, name in enumerate(("dark", "light")):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for i in range(15):
            pixels = GENERATOR.integers(100 * k, 100 * k + 100, (24, 26, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{i:02d}.jpg")
    return tmp_path / "photos"


def entries(root: Path) -> list[Path]:
    return sorted((root.parent / "cache").glob("*/*"))


def in_file(monkeypatch) -> None:
    monkeypatch.setattr(store, "IN_MEMORY", 1000)


def test_the_same_bits_as_in_memory(photos, monkeypatch):
    before = load_dataset(photos, size=20)
    assert entries(photos) == []
    in_file(monkeypatch)
    told = []
    after = load_dataset(photos, size=20, progress=lambda done, count: told.append((done, count)))
    assert isinstance(after.train.images, Images)
    assert told[-1] == (30, 30)
    for one, other in ((before.train, after.train), (before.test, after.test)):
        assert torch.equal(one.images, torch.cat([other.images]))
        assert torch.equal(one.labels, other.labels)
    assert fingerprint(before.train, before.test) == fingerprint(after.train, after.test)
    view = View(crop=18, standardise="dataset")
    assert view.fit(before.train) == view.fit(after.train)
    halves = [hold_out(split, 0.5, 3) for split in (before.train, after.train)]
    assert all(torch.equal(a.images, b.images.load()) for a, b in zip(*halves, strict=True))


def test_a_second_run_decodes_nothing_and_a_changed_folder_is_decoded_again(photos, monkeypatch):
    in_file(monkeypatch)
    first = load_dataset(photos, size=20).train.images.load()
    (entry,) = entries(photos)
    made = entry.stat().st_mtime_ns, entry.stat().st_ino

    def never(*_: object) -> None:
        raise AssertionError("decoded again")

    with monkeypatch.context() as patch:
        patch.setattr(store, "_decode_all", never)
        assert torch.equal(load_dataset(photos, size=20).train.images.load(), first)
    Image.new("RGB", (30, 30), (1, 2, 3)).save(photos / "dark" / "07.jpg")
    again = load_dataset(photos, size=20)
    (other,) = entries(photos)  # what was there for the former contents is gone
    assert other != entry
    assert (other.stat().st_mtime_ns, other.stat().st_ino) != made
    assert not torch.equal(torch.cat([again.train.images, again.test.images]), first)
    Image.new("RGB", (30, 30), (1, 2, 3)).save(photos / "dark" / "99.jpg")
    assert len(load_dataset(photos, size=20, whole=True).train.labels) == 31
    assert len(entries(photos)) == 1
    load_dataset(photos, size=16)
    assert len(entries(photos)) == 2  # another size has a file of its own


def test_unreadable_files_are_named_as_ever_and_leave_nothing(photos, monkeypatch):
    for k in range(7):
        path = photos / "light" / f"{k:02d}.jpg"
        path.write_bytes(path.read_bytes()[:300])  # the header is whole
    with pytest.raises(DataError) as in_memory:
        load_dataset(photos, size=20)
    in_file(monkeypatch)
    with pytest.raises(DataError) as from_file:
        load_dataset(photos, size=20)
    assert str(in_memory.value) == str(from_file.value)
    assert "light/00.jpg: cannot be read as an image" in str(from_file.value)
    assert str(from_file.value).endswith("; and 2 more")
    assert entries(photos) == []


def test_training_gives_the_same_bits_and_resumes(photos, tmp_path, monkeypatch):
    recipe = RECIPE.with_fields(data=str(photos))
    before = fit(recipe, tmp_path / "memory", device="cpu")
    in_file(monkeypatch)
    events = []
    after = fit(recipe, tmp_path / "file", device="cpu", on_event=lambda event: events.append(event.kind))
    assert "decode" in events
    assert before.sum == after.sum
    assert (before.view, before.result.test) == (after.view, after.result.test)

    class Stop(Exception):
        pass

    def stop(event):
        if event.kind == "epoch":
            raise Stop

    with pytest.raises(Stop):
        fit(recipe, tmp_path / "stopped", device="cpu", on_event=stop)
    monkeypatch.undo()  # resumed where the images fit into memory
    assert fit(recipe, tmp_path / "stopped", device="cpu", resume=True).sum == before.sum


def test_two_processes_at_once_decode_one_file(photos, tmp_path):
    code = (
        "import sys\nfrom vbcaps.data import load_dataset, stored\nstored.IN_MEMORY = 1000\n"
        "told = []\ndata = load_dataset(sys.argv[1], size=20, progress=lambda *x: told.append(x))\n"
        "print(len(told) > 0, int(data.train.images.load().long().sum()))"
    )
    command = [sys.executable, "-c", code, str(photos)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ) for _ in range(2)]
    said = [process.communicate(timeout=120)[0].split() for process in running]
    assert [process.returncode for process in running] == [0, 0]
    assert said[0][1] == said[1][1]
    assert sorted(one[0] for one in said) == ["False", "True"]
    assert len(entries(photos)) == 1


def test_a_process_that_dies_is_an_error(photos, monkeypatch):
    in_file(monkeypatch)
    monkeypatch.setattr(sys, "executable", "/bin/true" if Path("/bin/true").exists() else sys.executable)
    with pytest.raises(DataError, match="a process that decodes images ended early"):
        load_dataset(photos, size=20)
    assert entries(photos) == []


def test_no_room_is_an_error_that_names_the_way_out(photos, monkeypatch):
    in_file(monkeypatch)
    monkeypatch.setattr(store.shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    with pytest.raises(DataError, match=r"the decoded images need 0\.00 GB, .* --cache or VBCAPS_CACHE"):
        load_dataset(photos, size=20)
    monkeypatch.undo()
    in_file(monkeypatch)
    (photos.parent / "file").write_text("")
    monkeypatch.setenv("VBCAPS_CACHE", str(photos.parent / "file"))
    with pytest.raises(DataError, match=r"cannot be kept there .* --cache or VBCAPS_CACHE"):
        load_dataset(photos, size=20)


def test_the_cache_keeps_below_its_limit(photos, monkeypatch):
    in_file(monkeypatch)
    size = 30 * 3 * 20 * 20
    monkeypatch.setattr(store, "LIMIT", 1.5 * size)
    for side in (18, 19, 20):
        load_dataset(photos, size=side)
        time.sleep(0.01)
    assert [path.parent.name.split("-")[1] for path in entries(photos)] == ["20"]


def test_images_in_a_file_behave_like_a_tensor():
    x = torch.arange(5 * 2 * 3 * 3).reshape(5, 2, 3, 3).to(torch.uint8)
    images = Images(x, torch.tensor([4, 2, 0]))
    expected = x[[4, 2, 0]]
    assert (images.shape, images.ndim, len(images), images.dtype) == (expected.shape, 4, 3, torch.uint8)
    assert torch.equal(images[1], expected[1])
    assert torch.equal(images[:, 1], expected[:, 1])
    for index in (slice(1, 3), torch.tensor([2, 0]), torch.tensor([True, False, True]), [0, 1]):
        assert isinstance(images[index], Images)
        assert torch.equal(images[index].load(), expected[index])
    assert torch.equal(images.index_select(0, torch.tensor([2, 2])), expected[[2, 2]])
    assert [len(part) for part in images.split(2)] == [2, 1]
    assert torch.equal(torch.cat([images, images]), torch.cat([expected] * 2))
    assert torch.equal(images.float(), expected.float())
    assert torch.equal(images.permute(0, 2, 3, 1), expected.permute(0, 2, 3, 1))
    assert np.array_equal(np.asarray(images), expected.numpy())
    split = Split(images, torch.tensor([0, 1, 0])).take(torch.tensor([0, 2]))
    assert torch.equal(split.images.load(), expected[[0, 2]])
    assert isinstance(split.to("cpu").images, Images)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        images.nothing  # noqa: B018


def test_the_cache_of_another_user_is_read(photos, monkeypatch):
    """Who may not change the times of a file decodes nothing again."""
    in_file(monkeypatch)
    first = load_dataset(photos, size=20).train.images.load()

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(store.os, "utime", refuse)
    monkeypatch.setattr(store, "_decode_all", refuse)
    assert torch.equal(load_dataset(photos, size=20).train.images.load(), first)


@pytest.mark.parametrize("kind", ["folder", "entry"])
def test_a_cache_that_is_a_link_is_not_written_through(photos, monkeypatch, tmp_path, kind):
    in_file(monkeypatch)
    load_dataset(photos, size=20)
    (entry,) = entries(photos)
    place = entry.parent if kind == "folder" else entry
    place.rename(tmp_path / "elsewhere")
    place.symlink_to(tmp_path / "elsewhere")
    before = sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "elsewhere").rglob("*"))
    if kind == "folder":
        with pytest.raises(DataError, match=r"decoded images cannot be kept there .it is a link"):
            load_dataset(photos, size=20)
    else:
        load_dataset(photos, size=20)
        assert not entry.is_symlink()
    assert before == sorted((path, path.stat().st_mtime_ns) for path in (tmp_path / "elsewhere").rglob("*"))

"""Fetching from a server of our own: mirrors, sums, interruptions; and what ``check`` says afterwards."""

import gzip
import hashlib
import os
import threading
import time
import zipfile
from pathlib import Path

import official_files as official
import pytest
from served import Server

from vbcaps.data import DataError, check, download, fetch, load_dataset
from vbcaps.data import official as table
from vbcaps.data.official import OFFICIAL, OfficialFile

PREFIXES = ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")


@pytest.fixture
def server(monkeypatch):
    with Server() as server:
        monkeypatch.setattr(table, "ARCHIVE", server.address + "/archive/")
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
            monkeypatch.delenv(name, raising=False)
        yield server


@pytest.fixture
def mnist(server, monkeypatch, tmp_path):
    """MNIST, ten images of it, published by the server's second mirror."""
    official.make_idx(tmp_path / "published")
    files = []
    for prefix in PREFIXES:
        name = f"{prefix}-ubyte.gz"
        data = (tmp_path / "published" / name).read_bytes()
        server.files[f"/second/{name}"] = data
        sums = [hashlib.sha256(d).hexdigest() for d in (data, gzip.decompress(data))]
        mirrors = (f"{server.address}/first/", f"{server.address}/second/")
        files.append(OfficialFile(name, len(data), *sums, mirrors))
        monkeypatch.setitem(table.SUMS, (name, len(data)), sums[0])
    monkeypatch.setitem(OFFICIAL, "mnist", tuple(files))
    return files


def states(name: str, folder: Path) -> list[str]:
    return [row.state for row in check(name, folder)]


def test_fetch_from_the_second_mirror(server, mnist, tmp_path):
    told = []
    rows = fetch("mnist", tmp_path, progress=lambda *call: told.append(call))
    assert [row.state for row in rows] == ["ok"] * 4
    assert load_dataset("mnist", tmp_path).train.images.shape == (10, 1, 28, 28)
    assert [call for call in told if call[1] == call[2]] == [(file.name, file.size, file.size) for file in mnist]
    assert sorted(path.name for path in (tmp_path / "mnist").iterdir()) == sorted(file.name for file in mnist)

    asked = len(server.requests)
    fetch("mnist", tmp_path)  # nothing is left to do
    assert len(server.requests) == asked


def test_what_is_damaged_is_fetched_again(mnist, tmp_path):
    fetch("mnist", tmp_path)
    official.flip(tmp_path / "mnist" / mnist[0].name)
    (tmp_path / "mnist" / mnist[2].name).unlink()
    assert states("mnist", tmp_path) == ["damaged", "ok", "missing", "ok"]
    assert "SHA-256" in check("mnist", tmp_path)[0].note
    fetch("mnist", tmp_path)
    assert states("mnist", tmp_path) == ["ok"] * 4


def test_a_wrong_file_never_gets_the_name(server, mnist, tmp_path):
    """The first mirror sends another file, the second a page: an error, and nothing that looks like data."""
    name = mnist[0].name
    server.files[f"/first/{name}"] = server.files[f"/second/{mnist[2].name}"]
    server.files[f"/second/{name}"] = b"<html>sorry</html>"
    with pytest.raises(DataError, match="the download is not the published file"):
        fetch("mnist", tmp_path)
    assert list((tmp_path / "mnist").iterdir()) == []


@pytest.mark.parametrize("ranges", [True, False])
def test_an_interrupted_download_goes_on(server, mnist, tmp_path, monkeypatch, ranges):
    file = mnist[0]
    server.ranges, server.break_after = ranges, 1000
    monkeypatch.setitem(OFFICIAL, "mnist", (file._replace(mirrors=(f"{server.address}/second/",)),))
    with pytest.raises(DataError, match=f"the connection ended after 1000 of {file.size} bytes|IncompleteRead"):
        fetch("mnist", tmp_path)
    assert states("mnist", tmp_path) == ["missing"]
    assert (tmp_path / "mnist" / f"{file.name}.part").stat().st_size == 1000
    server.break_after = None
    server.requests.clear()
    fetch("mnist", tmp_path)
    assert server.requests == [(f"/second/{file.name}", "bytes=1000-")]
    assert states("mnist", tmp_path) == ["ok"]


@pytest.mark.parametrize("left", ["whole", "longer", "other"])
def test_what_an_earlier_attempt_left(server, mnist, tmp_path, left):
    file = mnist[0]
    data = server.files[f"/second/{file.name}"]
    part = tmp_path / "mnist" / f"{file.name}.part"
    official.write(part, {"whole": data, "longer": data + b"more", "other": b"x" * 500}[left])
    assert [row.state for row in fetch("mnist", tmp_path)] == ["ok"] * 4
    assert not part.exists()


def test_without_a_network(monkeypatch, tmp_path):
    """The message names every file to place by hand, and where."""
    closed = tuple(file._replace(mirrors=("http://127.0.0.1:9/",)) for file in OFFICIAL["smallnorb"])
    monkeypatch.setattr(table, "ARCHIVE", "http://127.0.0.1:9/")
    monkeypatch.setitem(OFFICIAL, "smallnorb", closed)
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(DataError) as caught:
        fetch("smallnorb", tmp_path)
    for file in closed:
        assert str(tmp_path / "smallnorb" / file.name) in str(caught.value)
    assert "refused" in str(caught.value)


def test_a_folder_that_cannot_be_written(mnist, tmp_path):
    (tmp_path / "mnist").write_text("a file where the folder should be")
    with pytest.raises(DataError, match="cannot be written to"):
        fetch("mnist", tmp_path)


def test_a_full_disk_is_not_the_mirrors_fault(server, mnist, tmp_path, monkeypatch):
    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(download, "_download", full)
    with pytest.raises(DataError, match=r"cannot be written to .*No space left"):
        fetch("mnist", tmp_path)


def test_affnist_comes_with_mnist(server, mnist, tmp_path, monkeypatch):
    """Its archive has no published sum: its own are checked."""
    official.make_affnist(tmp_path / "test.mat.zip")
    whole = (tmp_path / "test.mat.zip").read_bytes()
    file = OFFICIAL["affnist"][0]._replace(mirrors=(f"{server.address}/aff/",))
    monkeypatch.setitem(OFFICIAL, "affnist", (file,))
    bad = bytearray(whole)
    bad[len(bad) // 2] ^= 0xFF
    for wrong in (b"<html>sorry</html>", bytes(bad)):
        server.files["/aff/test.mat.zip"] = wrong
        with pytest.raises(DataError, match="not the published file"):
            fetch("affnist", tmp_path)
    server.files["/aff/test.mat.zip"] = whole
    assert [row.state for row in fetch("affnist", tmp_path)] == ["ok"] * 4 + ["readable"]
    assert len(load_dataset("affnist", tmp_path).test.labels) == 12


@pytest.mark.parametrize("length", ["", "99999999", None])
def test_a_server_that_does_not_stop_sending(server, mnist, tmp_path, length):
    """Nothing is kept, and no more is written than the file has."""
    name = mnist[0].name
    server.length = length
    for mirror in ("first", "second"):
        server.files[f"/{mirror}/{name}"] = bytes(mnist[0].size + (4 << 20))
    with pytest.raises(DataError, match=rf"{name} could not be fetched:\n.*more than the {mnist[0].size:,} bytes"):
        fetch("mnist", tmp_path)
    left = list((tmp_path / "mnist").iterdir())
    assert sum(path.stat().st_size for path in left) == 0


def test_an_answer_with_a_damaged_head(server, mnist, tmp_path):
    server.length = "\x1b[2Jmany"
    fetch("mnist", tmp_path)
    assert states("mnist", tmp_path) == ["ok"] * 4


def test_a_link_in_the_place_of_an_earlier_attempt(server, mnist, tmp_path):
    """A stranger's link in a folder of several users does not have another file overwritten."""
    kept = tmp_path / "kept"
    kept.write_text("mine")
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist" / f"{mnist[0].name}.part").symlink_to(kept)
    fetch("mnist", tmp_path)
    assert kept.read_text() == "mine"
    assert states("mnist", tmp_path) == ["ok"] * 4
    assert not any(path.is_symlink() for path in (tmp_path / "mnist").iterdir())


def test_two_at_once_fetch_each_file_once(server, mnist, tmp_path):
    threads = [threading.Thread(target=fetch, args=("mnist", tmp_path)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert states("mnist", tmp_path) == ["ok"] * 4
    assert len([path for path, _ in server.requests if path.startswith("/second/")]) == 4


def test_an_archive_that_is_a_bomb_is_not_unpacked(server, tmp_path, monkeypatch):
    """affNIST has no published sum, so its archive is unpacked to be checked."""
    with zipfile.ZipFile(tmp_path / "bomb", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("test.mat", bytes(1 << 22))
    server.files["/aff/test.mat.zip"] = (tmp_path / "bomb").read_bytes()
    file = OFFICIAL["affnist"][0]._replace(mirrors=(f"{server.address}/aff/",), most=1 << 20)
    monkeypatch.setitem(OFFICIAL, "affnist", (file,))
    monkeypatch.setitem(OFFICIAL, "mnist", ())
    monkeypatch.setattr(zipfile.ZipFile, "testzip", lambda self: pytest.fail("it is unpacked"))
    with pytest.raises(DataError, match="not the published file"):
        fetch("affnist", tmp_path)


def test_check_of_files_packed_differently(mnist, tmp_path):
    """Unpacked, or packed by another gzip: the contents count."""
    official.make_idx(tmp_path / "mnist", suffix="")
    assert states("mnist", tmp_path) == ["ok"] * 4
    path = tmp_path / "mnist" / "t10k-labels-idx1-ubyte"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    assert states("mnist", tmp_path) == ["ok"] * 3 + ["damaged"]


def test_check_of_stand_ins(tmp_path):
    official.make_sheets(tmp_path / "svhn", n=70)
    rows = check("svhn", tmp_path)
    assert [row.state for row in rows] == ["missing"] * 2 + ["present"] * 4
    assert rows[2].name == "test_00.webp"
    assert check("sample") == []


def test_unknown_names():
    for ask in (check, fetch):
        with pytest.raises(DataError, match="'norb' is not a dataset: datasets are sample, smallnorb"):
            ask("norb")


def test_the_table_is_well_formed():
    for files in OFFICIAL.values():
        for file in files:
            assert len(file.addresses) >= 2
            ends = f"/{file.name}{file.query}"
            assert all(address.startswith("http") and address.endswith(ends) for address in file.addresses)
            assert file.sha256 is None or len(bytes.fromhex(file.sha256)) == 32


def test_files_of_medmnist_are_fetched_by_size_and_held_to_their_md5(server, tmp_path, monkeypatch):
    official.make_medmnist(tmp_path / "there" / "breastmnist", side=64)
    content = (tmp_path / "there" / "breastmnist" / "breastmnist_64.npz").read_bytes()
    md5 = hashlib.md5(content).hexdigest()
    file = OfficialFile("breastmnist_64.npz", None, None, None, (f"{server.address}/",), md5, "?download=1")
    monkeypatch.setitem(OFFICIAL, "breastmnist_64", (file,))
    server.files["/breastmnist_64.npz?download=1"] = content[:-9] + bytes(9)
    with pytest.raises(DataError, match="its MD5 differs"):
        fetch("breastmnist_64", tmp_path)
    server.files["/breastmnist_64.npz?download=1"] = content
    (row,) = fetch("breastmnist_64", tmp_path)
    assert (row.state, row.path) == ("ok", tmp_path / "breastmnist" / "breastmnist_64.npz")
    assert load_dataset("breastmnist", tmp_path, size=64).train.images.shape == (24, 1, 64, 64)
    official.flip(row.path)
    (row,) = check("breastmnist_64", tmp_path)
    assert (row.state, row.note) == ("damaged", "its MD5 is not the published one")


class Dripping:
    """An answer that sends a byte at a time and never ends."""

    status, headers = 200, {}

    def __enter__(self):
        return self

    def __exit__(self, *error):
        pass

    def read1(self, size):
        time.sleep(0.01)
        return b"x"


def test_a_download_that_never_ends_is_given_up(mnist, tmp_path, monkeypatch):
    monkeypatch.setattr(download, "PATIENCE", 0.1)
    monkeypatch.setattr("urllib.request.urlopen", lambda request, timeout: Dripping())
    began = time.monotonic()
    with pytest.raises(DataError, match="it sends less than 1,000 bytes a second"):
        fetch("mnist", tmp_path)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_a_pipe_in_the_place_of_an_earlier_attempt(server, mnist, tmp_path, kind):
    (tmp_path / "mnist").mkdir()
    part = tmp_path / "mnist" / f"{mnist[0].name}.part"
    os.mkfifo(part) if kind == "pipe" else part.symlink_to("/dev/full")
    fetch("mnist", tmp_path)
    assert states("mnist", tmp_path) == ["ok"] * 4

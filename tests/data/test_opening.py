"""Image files and folders that were made to do harm, or that an unlucky user has."""

import os
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import official_files as official
import pytest
import torch
from memory import MB, peak
from PIL import Image

from vbcaps.data import DataError, image_files, load_dataset, opening, read_image, read_images, stored
from vbcaps.data.errors import written
from vbcaps.data.folder import survey
from vbcaps.data.opening import Turns
from vbcaps.data.pixels import Form, decode, read_header
from vbcaps.explore.pictures import Refused, read_upload

GREY = Form(1, "uint8")


def colours(root: Path, n: int = 4) -> Path:
    for name in ("dark", "light"):
        (root / name).mkdir(parents=True)
        for k in range(n):
            Image.fromarray(official.pixels(20, 20, 3, seed=k)).save(root / name / f"{k}.png")
    return root


# --- one file


def test_no_program_is_started_for_an_image(tmp_path, monkeypatch):
    """Pillow gives PostScript to Ghostscript, whatever the name of the file ends with."""
    started = tmp_path / "started"
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "gs"
    program.write_text(f"#!/bin/sh\ntouch {started}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    page = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20 20\n%%EndComments\nshowpage\n%%EOF\n"
    for name in ("a.png", "a.jpg", "a.tif"):
        (tmp_path / name).write_bytes(page)
        with pytest.raises(DataError, match=rf"{name}: cannot be read as an image .*: replace it or take it away"):
            read_image(tmp_path / name, 8, 3)
        with pytest.raises(DataError, match=name):
            decode(tmp_path / name, 8, GREY)
    assert not started.exists()


def test_a_pipe_in_the_place_of_an_image_does_not_wait(tmp_path):
    for name in ("a.png", "a.npy", "a.tif"):
        os.mkfifo(tmp_path / name)
        with pytest.raises(DataError, match=rf"{name}: .*no file but a folder, a pipe or a device"):
            decode(tmp_path / name, 8, GREY)
    with pytest.raises(DataError, match="no file but"):
        read_image(Path("/dev/zero"), 8, 1)
    colours(tmp_path / "photos")
    os.mkfifo(tmp_path / "photos" / "dark" / "9.png")  # in a folder it is no image
    assert len(load_dataset(tmp_path / "photos", whole=True).train.labels) == 8


def test_large_files_and_arrays(tmp_path):
    for name in ("a.png", "a.npy"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(opening.LARGEST + 1)
        with pytest.raises(DataError, match=rf"{name}: .*2,147,483,649 bytes, more than the"):
            read_header(tmp_path / name)
    head = b"\x93NUMPY\x01\x00" + struct.pack("<H", 80)
    head += b"{'descr': '|u1', 'fortran_order': False, 'shape': (7696581394432,), }".ljust(79) + b"\n"
    (tmp_path / "b.npy").write_bytes(head + bytes(64))
    with pytest.raises(DataError, match=r"b\.npy: .*does not take the 64 bytes"):
        read_header(tmp_path / "b.npy")


def pages(count: int, loop: bool) -> bytes:
    """A TIFF file of so many pages of 4 x 4 pixels; with ``loop`` the last leads to the first."""
    kinds = [(256, 3, 4), (257, 3, 4), (258, 3, 8), (259, 3, 1), (262, 3, 1), (273, 4, 0), (278, 3, 4), (279, 4, 16)]
    tags = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in kinds)
    parts, size = [b"II*\0" + struct.pack("<I", 8)], 2 + len(tags) + 4
    for k in range(count):
        follows = 8 + size * (k + 1) if k < count - 1 else 8 * loop
        parts.append(struct.pack("<H", len(kinds)) + tags + struct.pack("<I", follows))
    return b"".join(parts) + bytes(16)


def test_tiff_files_of_very_many_pages_and_of_pages_in_a_circle(tmp_path):
    path = tmp_path / "a.tif"
    path.write_bytes(pages(1, loop=True))
    assert read_header(path).form.channels == 1
    path.write_bytes(pages(10, loop=True))
    with pytest.raises(DataError, match=r"a\.tif: .*more than 5,000 pages"):
        read_header(path)
    path.write_bytes(pages(10, loop=False))
    assert read_header(path).form.channels == 10
    path.write_bytes(pages(100_000, loop=False))  # tifffile takes minutes to look for all
    begin = time.monotonic()
    with pytest.raises(DataError, match=r"a\.tif: .*more than 5,000 pages"):
        read_header(path)
    assert time.monotonic() - begin < 5


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_tiff_file_that_says_it_is_huge(tmp_path):
    """A strip of 100 bytes, and sizes for which an array of 2.5 GB would be made."""
    import tifffile

    path = tmp_path / "a.tif"
    values = np.random.default_rng(0).random((4, 16, 16), np.float32)
    tifffile.imwrite(path, values, photometric="minisblack", planarconfig="separate", metadata=None)
    data = bytearray(path.read_bytes())
    for tag in (256, 257):
        at = data.index(struct.pack("<HHI", tag, 4, 1))
        data[at : at + 12] = struct.pack("<HHII", tag, 4, 1, 12_500)
    path.write_bytes(data)

    def read() -> None:
        with pytest.raises(DataError, match=r"a\.tif: .*values of float32 take 2,500,000,000 bytes"):
            decode(path, 8, Form(4, "float32"))

    assert peak(read) < 16 * MB
    tifffile.imwrite(path, values, photometric="minisblack", planarconfig="separate", metadata=None)
    assert np.array_equal(decode(path, 16, Form(4, "float32")), values)


def test_a_jpeg_file_of_very_many_scans(tmp_path):
    """A few bytes for each scan, which the decoder takes through all pixels: minutes for some megabytes."""
    path = tmp_path / "a.jpg"
    Image.new("L", (64, 64), 128).save(path, progressive=True)
    assert decode(path, 8, GREY).shape == (1, 8, 8)
    content = path.read_bytes()
    scan = content[content.rindex(b"\xff\xda") : -2]
    path.write_bytes(content[:-2] + 200 * scan + content[-2:])
    for read in (lambda: decode(path, 8, GREY), lambda: read_image(path, 8, 1)):
        with pytest.raises(DataError, match=r"a\.jpg: .*more than 100 scans"):
            read()
    with pytest.raises(Refused, match="rare kind"):
        read_upload(path.read_bytes(), 28, 1)


def test_a_word_of_a_name_that_a_terminal_would_obey_is_written_out(tmp_path):
    path = tmp_path / "\x1b[2J\x9b\u202eimage.png"
    path.write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"/\\x1b\[2J\\x9b\\u202eimage\.png: cannot be read"):
        read_image(path, 8, 1)
    assert written("tab\tline\nword é 漢字\u3000") == "tab\tline\nword é 漢字\u3000"
    assert written("\udcff\x07") == "\\udcff\\x07"


# --- many at once


def test_large_images_are_decoded_in_turns(tmp_path, monkeypatch):
    """Eight threads, and images of which no two may be decoded together."""
    monkeypatch.setattr("vbcaps.data.folder.workers", lambda: 8)
    side = 9_500
    path = tmp_path / "a.png"
    Image.new("L", (side, side), 7).save(path, compress_level=1)
    with pytest.warns(Image.DecompressionBombWarning):
        taken = peak(lambda: read_images([path] * 5, 8, 1))
    assert side * side < taken < 1.5 * side * side


def test_turns():
    turns, inside, most = Turns(), [], []

    def decode_one(pixels: int) -> None:
        with turns.take(pixels):
            inside.append(pixels)
            most.append(sum(inside))
            time.sleep(0.002)
            inside.remove(pixels)

    sizes = [opening.ROOM // 4, opening.ROOM // 2, opening.ROOM * 3] * 5
    threads = [threading.Thread(target=decode_one, args=(size,)) for size in sizes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(most) == len(sizes)
    assert all(total <= opening.ROOM or total == 3 * opening.ROOM for total in most)
    assert max(total for total in most if total <= opening.ROOM) > opening.ROOM // 4


@pytest.mark.skipif(opening.fcntl is None, reason="needs file locks")
def test_processes_decode_large_images_one_after_another(tmp_path):
    file = tmp_path / "pixels"
    file.write_bytes(b"")
    with open(file, "r+b") as one, open(file, "r+b") as other:
        mine, theirs, order = Turns(one), Turns(other), []

        def wait() -> None:
            with theirs.take(opening.LARGE + 1):
                order.append("other")

        thread = threading.Thread(target=wait)
        with mine.take(opening.LARGE + 1):
            thread.start()
            with theirs.take(opening.LARGE - 1):  # a small one does not wait
                pass
            time.sleep(0.05)
            order.append("one")
        thread.join()
    assert order == ["one", "other"]


# --- folders


def test_links(tmp_path):
    """Links to images and to folders are followed; those that lead nowhere, or to themselves, are no images."""
    colours(tmp_path / "elsewhere")
    root = tmp_path / "photos"
    (root / "dark").mkdir(parents=True)
    (root / "light").symlink_to(tmp_path / "elsewhere" / "light")
    for k in range(4):
        (root / "dark" / f"{k}.png").symlink_to(tmp_path / "elsewhere" / "dark" / f"{k}.png")
    (root / "dark" / "none.png").symlink_to("nowhere")
    (root / "dark" / "self.png").symlink_to("self.png")
    (root / "dark" / "up").symlink_to("..")
    expected, found = (load_dataset(folder, whole=True) for folder in (tmp_path / "elsewhere", root))
    assert torch.equal(found.train.images, expected.train.images)
    assert survey(root).train == (3, 3)
    (root / "both").symlink_to(".")
    with pytest.raises(DataError, match=r"both: is a link to .*photos, which is no class of its own: remove it"):
        load_dataset(root)
    (root / "both").unlink()
    (root / "both").symlink_to("..")
    with pytest.raises(DataError, match=r"both: is a link to .*, which is no class of its own: remove it"):
        load_dataset(root)
    (root / "both").unlink()
    (root / "same").symlink_to("light")
    with pytest.raises(DataError, match=r"same: is a link to .*light, which is no class of its own"):
        survey(root)


@pytest.mark.parametrize("name", ["\x1b[31mred", "a\nb", "a\u202eb", b"\xff\xfe"])
def test_classes_that_cannot_be_printed(tmp_path, name):
    colours(tmp_path)
    os.rename(os.fsencode(tmp_path / "dark"), os.path.join(os.fsencode(tmp_path), os.fsencode(name)))
    with pytest.raises(DataError, match="has characters that cannot be printed: rename the folder") as caught:
        load_dataset(tmp_path)
    assert str(caught.value).isprintable()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_that_may_not_be_read(tmp_path):
    colours(tmp_path)
    (tmp_path / "dark").chmod(0)
    with pytest.raises(DataError, match="cannot be listed"):
        load_dataset(tmp_path)


def test_an_error_while_a_folder_is_listed_names_it(tmp_path, monkeypatch):
    colours(tmp_path)

    def refused(self: Path) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "iterdir", refused)
    for read in (load_dataset, survey):
        with pytest.raises(DataError, match=rf"{tmp_path.name}: cannot be listed \(Permission denied\)"):
            read(tmp_path)


def test_decoded_images_of_another_kind_are_decoded_again(tmp_path, monkeypatch):
    """Somebody else wrote to the cache, or it is damaged."""
    monkeypatch.setenv("VBCAPS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(stored, "IN_MEMORY", 100)
    root = colours(tmp_path / "photos")
    right = load_dataset(root, size=8, whole=True).train.images.load()
    (entry,) = (tmp_path / "cache").glob("*/*.npy")
    for array in (np.zeros((8, 3, 8, 9), np.uint8), np.zeros((8, 3, 8, 8), np.int64), np.zeros((7, 3, 8, 8), np.uint8)):
        np.save(entry, array)
        assert torch.equal(load_dataset(root, size=8, whole=True).train.images.load(), right)
    np.save(entry, np.array([{}] * 8), allow_pickle=True)
    assert torch.equal(load_dataset(root, size=8, whole=True).train.images.load(), right)


def test_names_that_are_too_long_or_no_names(tmp_path):
    for name in ("x" * 5000, "a\0b", "\udcff", ""):
        with pytest.raises(DataError, match="neither a dataset nor a folder"):
            load_dataset(name)
    with pytest.raises(DataError, match=r"^xxx.* \.\.\. .*replace it or take it away"):
        read_image(Path("x" * 5000 + ".png"), 8, 1)
    with pytest.raises(DataError, match="cannot be read as an image"):
        read_image(Path("a\0b.png"), 8, 1)
    assert image_files(Path("a\0b")) == [Path("a\0b")]


def test_the_command_line_writes_names_out(tmp_path):
    path = tmp_path / "\x1b[2J.png"
    path.write_bytes(b"nothing")
    command = [sys.executable, "-m", "vbcaps", "predict", str(path), "--weights", "fashion_laptop"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "\x1b" not in done.stdout + done.stderr
    assert "\\x1b[2J.png: cannot be read as an image" in done.stderr


def test_tables_and_files_write_names_out(tmp_path, capsys):
    from vbcaps.cli.report import complain, console, save_text, say, table

    rows = table("class", numbers=("images",))
    rows.add_row("\x1b[31mred\nline", "7")
    say(rows, "a \udcff name", "a \x9b name")
    complain("no \x07 bell")
    save_text(tmp_path / "a.csv", "\udcff.png,1\n")
    with console.status("reading \x1b[2J"):
        pass
    said = capsys.readouterr()
    assert set(said.out + said.err) & {"\x1b", "\x9b", "\x07", "\udcff"} == set()
    assert "\\x1b[31mred\\nline       7" in said.out
    assert "a \\udcff name\na \\x9b name" in said.out
    assert "no \\x07 bell" in said.err
    assert (tmp_path / "a.csv").read_text() == "\\udcff.png,1\n"

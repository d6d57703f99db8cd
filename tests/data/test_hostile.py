"""Files that were made to do harm: they unpack to more than there is room for, or ask for what no dataset needs."""

import gzip
import io
import lzma
import pickle
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import official_files as official
import pytest
from memory import MB, peak

from vbcaps.data import DataError, load_dataset, sums
from vbcaps.data import official as table
from vbcaps.data.cifar10 import read_pickle
from vbcaps.data.contents import Damaged, contents
from vbcaps.data.files import read, read_npy
from vbcaps.data.npy import unpack_npy
from vbcaps.data.tar import unpack_tar

GIB = 1 << 30


@pytest.fixture(scope="module")
def zeros(tmp_path_factory) -> dict[str, bytes]:
    """An eighth of a gibibyte of zeros, packed."""
    piece = bytes(2 * MB)
    packer, xz = zlib.compressobj(9, wbits=31), lzma.LZMACompressor(preset=0)
    packed = {".gz": b"", ".xz": b""}
    for _ in range(64):
        packed[".gz"] += packer.compress(piece)
        packed[".xz"] += xz.compress(piece)
    packed[".gz"] += packer.flush()
    packed[".xz"] += xz.flush()
    assert all(len(data) < MB for data in packed.values())
    return packed


def refused(work: Callable[[], object], message: str) -> Callable[[], None]:
    def call() -> None:
        with pytest.raises(DataError, match=message):
            work()

    return call


# --- memory


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_a_bomb_is_unpacked_no_further_than_the_official_file(tmp_path, zeros, suffix):
    path = tmp_path / f"t10k-images-idx3-ubyte{suffix}"
    path.write_bytes(zeros[suffix])
    assert peak(refused(lambda: read(path), rf"idx3-ubyte\{suffix}: .*more than 15,680,032 bytes.*fetch it")) < 48 * MB


def test_a_zip_that_is_a_bomb(tmp_path):
    path = tmp_path / "t10k-labels-idx1-ubyte.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open(path.stem, "w") as member:
        for _ in range(32):
            member.write(bytes(2 * MB))
    assert peak(refused(lambda: read(path), "67,108,864 bytes, and 20,016 at most")) < 16 * MB


def test_a_file_that_is_larger_than_its_contents_may_be_is_not_read(tmp_path):
    path = tmp_path / "t10k-labels-idx1-ubyte"
    with path.open("wb") as file:
        file.truncate(8 * GIB)
    assert peak(refused(lambda: read(path), "it has 8,589,934,592 bytes, and its contents are 20,016 at most")) < MB


def test_loading_takes_a_small_multiple_of_what_the_files_have(tmp_path):
    """Measured on almost as many images as MNIST has, and on fewer of the other formats."""
    n = 59_999
    for prefix, count in (("train", n), ("t10k", 9_999)):
        images = np.zeros((count, 28, 28), np.uint8)
        official.write(tmp_path / "mnist" / f"{prefix}-images-idx3-ubyte.gz", official.idx(images))
        labels = np.arange(count, dtype=np.uint8) % 10
        official.write(tmp_path / "mnist" / f"{prefix}-labels-idx1-ubyte.gz", official.idx(labels))
    assert peak(lambda: load_dataset("mnist", tmp_path)) < 1.5 * 70_000 * 28 * 28
    official.make_cifar(tmp_path / "cifar10", "python", packed=True, n=2000)
    assert peak(lambda: load_dataset("cifar10", tmp_path)) < 3 * 12_000 * 3072
    official.make_svhn(tmp_path / "svhn", n=6000)
    assert peak(lambda: load_dataset("svhn", tmp_path)) < 3 * 12_000 * 3072
    official.make_medmnist(tmp_path / "bloodmnist", counts=(10_000, 1000, 1000))
    assert peak(lambda: load_dataset("bloodmnist", tmp_path)) < 3 * 12_000 * 28 * 28 * 3
    official.make_norb(tmp_path / "smallnorb", n=2000)
    assert peak(lambda: load_dataset("smallnorb", tmp_path, size=96)) < 3 * 4000 * 2 * 96 * 96


def test_an_array_that_declares_tebibytes(tmp_path):
    path = tmp_path / "train_labels.npy"
    np.save(path, np.arange(10))
    path.write_bytes(path.read_bytes().replace(b"(10,), }       ", b"(7696581394432,), }"[:19].ljust(15)))
    assert peak(refused(lambda: read_npy(path), r"train_labels\.npy: ")) < MB


def test_a_pickle_that_asks_for_a_huge_memory_of_results():
    """Python's own unpickler allocates 32 GiB for this."""
    data = b"\x80\x02}r\xff\xff\xff\x7f."
    assert peak(refused(lambda: read_pickle(data, "here"), "here: .*no dictionary with data and labels")) < MB


def test_a_pickle_that_grows_like_the_grains_on_a_chessboard():
    """Forty lists, each with the one before twice: a terabyte if anything goes through them."""
    board = b"]q\x00" + b"".join(b"](h" + bytes([k]) + b"h" + bytes([k]) + b"eq" + bytes([k + 1]) for k in range(40))
    data = b"\x80\x02}(U\x06labels" + board + b"U\x04dataK\x01u."
    with pytest.raises(DataError, match="here"):
        read_pickle(data, "here")


# --- what no dataset needs


def tar_of(member: tarfile.TarInfo, data: bytes = b"", kind: int = tarfile.USTAR_FORMAT) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=kind) as tar:
        tar.addfile(member, io.BytesIO(data))
    return file.getvalue()


def member(name: str, **fields: object) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    for field, value in fields.items():
        setattr(info, field, value)
    return info


def headers(count: int) -> bytes:
    one = member("pax", type=tarfile.XHDTYPE)
    return one.tobuf(tarfile.USTAR_FORMAT) * count


SPARSE = bytearray(member("test_batch.bin", type=tarfile.GNUTYPE_SPARSE, size=512).tobuf(tarfile.GNU_FORMAT))
SPARSE[483:495] = b"%011o\0" % (8 * GIB - 1)
TARS = {
    "a link to itself": tar_of(member("test_batch.bin", type=tarfile.SYMTYPE, linkname="test_batch.bin")),
    "a link to another file": tar_of(member("test_batch.bin", type=tarfile.LNKTYPE, linkname="/etc/passwd")),
    "a folder": tar_of(member("test_batch.bin", type=tarfile.DIRTYPE)),
    "a sparse file": bytes(SPARSE) + bytes(1024),
    "many extended headers": headers(2000),
    "a wrong checksum": tar_of(member("test_batch.bin", size=3), b"abc").replace(b"ustar", b"USTAR"),
    "a number that is none": tar_of(member("test_batch.bin")).replace(b"00000000000", b"0000000000x"),
    "no end": tar_of(member("test_batch.bin", size=3), b"abc")[:512],
    "a size beyond the end": tar_of(member("test_batch.bin", size=600), bytes(600))[:1024],
    "something else": b"<html>" * 200,
}


@pytest.mark.parametrize("kind", TARS)
def test_archives(tmp_path, kind):
    path = tmp_path / "cifar10" / "cifar-10-binary.tar.gz"
    official.write(path, TARS[kind])
    with pytest.raises(DataError, match=rf"{path.name}.*fetch it again"):
        load_dataset("cifar10", tmp_path)


def test_extended_headers_of_an_archive_are_passed_over():
    data = tar_of(member("a/b/x.bin", size=5, pax_headers=dict(comment="words")), b"12345", tarfile.PAX_FORMAT)
    assert {name: bytes(found) for name, found in unpack_tar(data, ["x.bin"]).items()} == {"x.bin": b"12345"}
    with pytest.raises(Damaged, match=r"two files x\.bin"):
        unpack_tar(data[:2048] * 2, ["x.bin"])


def npy_of(header: str, data: bytes = b"", version: int = 1) -> bytes:
    return b"\x93NUMPY" + bytes([version, 0]) + struct.pack("<H", len(header)) + header.encode() + data


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x93NUMPY\x01\x00",
        npy_of("{'descr': '|V0', 'fortran_order': False, 'shape': (3,), }\n"),
        npy_of("{'descr': '|O', 'fortran_order': False, 'shape': (1,), }\n", bytes(8)),
        npy_of("{'descr': '<U3', 'fortran_order': False, 'shape': (1,), }\n", bytes(12)),
        npy_of("{'descr': '|u1, 'fortran_order': False, 'shape': (1,), }\n", b"1"),
        npy_of("{'descr': '|u1', 'fortran_order': False, 'shape': (1,), '''}\n", b"1"),
        npy_of("(" * 900),
        npy_of("-" * 900),
        npy_of("{'descr': '|u8', 'fortran_order': False, 'shape': (7696581394432,), }\n", bytes(8)),
        npy_of("{'descr': '|u1', 'fortran_order': False, 'shape': (%s1,), }\n" % ("1," * 70), b"1"),
        npy_of("{'descr': '<f1', 'fortran_order': False, 'shape': (1,), }\n", b"1"),
        npy_of("{'descr': '|u1', 'fortran_order': False, 'shape': (1,), }\n", b"1", version=9),
    ],
)
def test_arrays(tmp_path, content):
    path = tmp_path / "train_labels.npy"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"train_labels\.npy: .*fetch it again"):
        read_npy(path)


def test_an_archive_in_the_place_of_an_array(tmp_path):
    path = tmp_path / "train_labels.npy"
    with path.open("wb") as file:
        np.savez(file, a=np.arange(3))
    with pytest.raises(DataError, match=r"train_labels\.npy: .*no array in NumPy's format"):
        read_npy(path)


@pytest.mark.parametrize("dtype", ["|b1", "u1", "<i2", ">i4", "<u8", "<f2", "<f4", ">f8"])
@pytest.mark.parametrize("shape", [(), (0,), (5,), (3, 4), (2, 0, 3), (2, 3, 4)])
def test_arrays_that_numpy_writes_are_read(dtype, shape):
    array = np.random.default_rng(0).integers(0, 2, shape).astype(dtype)
    for one in (array, np.asfortranarray(array)):
        file = io.BytesIO()
        np.save(file, one)
        found = unpack_npy(file.getvalue())
        assert found.dtype == one.dtype
        assert found.shape == one.shape
        assert np.array_equal(found, one)


def zipped(path: Path, change: Callable[[bytes], bytes] = bytes, method: int = zipfile.ZIP_DEFLATED) -> Path:
    with zipfile.ZipFile(path, "w", method) as archive:
        archive.writestr("test.mat", official.mat(x=official.pixels(3, 3)))
    path.write_bytes(change(path.read_bytes()))
    return path


def put(at: int, value: bytes, head: bytes) -> Callable[[bytes], bytes]:
    """Write into the entry of the list of members, and into the member's own header where ``head`` is it."""

    def change(data: bytes) -> bytes:
        begin = data.rindex(head) + at
        return data[:begin] + value + data[begin + len(value) :]

    return change


LIST, END = b"PK\1\2", b"PK\5\6"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (put(8, b"\1", LIST), "is encrypted"),
        (put(10, b"\x63", LIST), "packed in another way than deflate"),
        (put(10, b"\x0e", LIST), "packed in another way than deflate"),  # LZMA, whose header asks for memory
        (put(46, b"x", LIST), r"has no member test\.mat"),
        (put(12, b"\xff\xff\xff\x7f", END), "list of members has 2,147,483,647 bytes"),
        (put(16, b"\xff\xff\xff\x7f", END), "Invalid argument"),
        (put(6, b"\xff", LIST), "version 25"),
        (put(16, b"\1", LIST), "CRC"),
        (lambda data: data[:-30], "no zip archive, or cut short"),
        (lambda data: b"", "no zip archive"),
    ],
)
def test_zip_archives(tmp_path, change, message):
    with pytest.raises(DataError, match=rf"test\.mat\.zip: .*{message}"):
        read(zipped(tmp_path / "test.mat.zip", change))


@pytest.mark.parametrize("suffix", [".gz", ".xz"])
def test_members_one_after_another(suffix, monkeypatch):
    pack = gzip.compress if suffix == ".gz" else lzma.compress
    whole = pack(b"one") + pack(b"") + pack(b"two" * 100_000) + bytes(512)
    assert contents(io.BytesIO(whole), f"x{suffix}", 10 * MB) == b"one" + b"two" * 100_000
    large = np.random.default_rng(0).integers(0, 4, 100_000, np.uint8).tobytes()
    for piece, made in ((1000, 1 << 20), (1 << 20, 1000), (1, 7)):
        monkeypatch.setattr("vbcaps.data.contents.PIECE", piece)
        monkeypatch.setattr("vbcaps.data.contents.MADE", made)
        part = large[: 100 * max(piece, made)]
        assert contents(io.BytesIO(pack(part)), f"x{suffix}", len(part)) == part
    with pytest.raises(Damaged, match="many members without contents"):
        contents(io.BytesIO(pack(b"") * 100), f"x{suffix}", 10 * MB)
    for cut in range(0, len(pack(b"one")) - 1, 3):
        with pytest.raises((Damaged, EOFError, zlib.error, lzma.LZMAError)):
            contents(io.BytesIO(pack(b"one")[:cut]), f"x{suffix}", 10 * MB)


def test_pickles_of_other_things(tmp_path):
    images, labels = official.pixels(2, 3072), [1, 2]
    for batch in (
        [],
        {b"data": images},
        {b"data": images, b"labels": [1, None]},
        {b"data": images, b"labels": [[1], [2]]},
        {b"data": images, b"labels": [1, 10**30]},
        {b"data": images, b"labels": (1, 2)},
        {b"data": images.astype(float), b"labels": labels},
        {b"data": images[:, :9], b"labels": labels},
        {b"data": images[:1], b"labels": labels},
        {b"data": images[:0], b"labels": []},
        {b"data": images, b"labels": [1, 77]},
        {3: images, b"labels": labels},
        {b"data": {b"a": 1}, b"labels": labels},
    ):
        with pytest.raises(DataError, match=r"^batch: .*fetch it again"):
            read_pickle(pickle.dumps(batch), "batch")
    whole = official.cifar_pickle(images, labels)
    for cut in range(500):
        with pytest.raises(DataError, match=r"^batch: "):
            read_pickle(whole[:cut], "batch")
    with pytest.raises(DataError, match="more than 500,000 instructions"):
        read_pickle(b"\x80\x02}" + b"q\x00" * 600_000, "batch")


# --- accepted though wrong


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0, 1.5, 5.0, 1e30])
def test_labels_that_are_no_labels(tmp_path, value):
    official.make_norb(tmp_path / "smallnorb", size=8)
    labels = (np.arange(20) % 5).astype("<f8")
    labels[7] = value
    path = tmp_path / "smallnorb" / f"{official.NORB['test']}-cat.mat.gz"
    data = struct.pack("<5i", 0x1E3D4C53, 1, 20, 1, 1) + labels.tobytes()
    official.write(path, data)
    with pytest.raises(DataError, match=rf"{path.name}: labels must be"):
        load_dataset("smallnorb", tmp_path)


@pytest.mark.parametrize("shape", [(20, 2, 0, 8), (20, 2, 8, 0), (0, 2, 8, 8), (20, 1, 8, 8), (20, 2, 64)])
def test_sides_that_are_none(tmp_path, shape):
    official.make_norb(tmp_path / "smallnorb", size=8)
    path = tmp_path / "smallnorb" / f"{official.NORB['test']}-dat.mat.gz"
    official.write(path, official.matrix(np.zeros(shape, np.uint8)))
    with pytest.raises(DataError, match=path.name):
        load_dataset("smallnorb", tmp_path)


@pytest.mark.parametrize("axes", [0, 1, 2, 4, 65, 255])
def test_idx_files_of_other_axes(tmp_path, axes):
    official.make_idx(tmp_path / "mnist")
    path = tmp_path / "mnist" / "t10k-images-idx3-ubyte.gz"
    official.write(path, bytes([0, 0, 8, axes]) + struct.pack(">I", 1) * axes + b"1")
    with pytest.raises(DataError, match=rf"{path.name}: not an idx file of bytes with 3 axes"):
        load_dataset("mnist", tmp_path)


def test_changed_contents_of_a_known_sum_are_refused_also_unpacked(tmp_path, monkeypatch):
    """Contents of the official size must be the official ones; the sum is not taken twice."""
    monkeypatch.setenv("VBCAPS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sums, "FRESH", 0)
    official.make_idx(tmp_path / "mnist", suffix="")
    path = tmp_path / "mnist" / "train-images-idx3-ubyte"
    monkeypatch.setitem(table.CONTENTS, path.name, path.stat().st_size)
    with pytest.raises(DataError, match=rf"{path.name}: changed, the SHA-256 of its contents is not.*fetch it again"):
        load_dataset("mnist", tmp_path)
    taken = []

    def take() -> str:
        taken.append(1)
        return "right"

    assert not sums.is_published(path, "wrong", take)
    assert sums.is_published(path, "right", take)
    assert sums.is_published(path, "right", take)
    assert len(taken) == 2
    path.write_bytes(path.read_bytes())  # other times
    assert sums.is_published(path, "right", take)
    assert len(taken) == 3
    for damage in ("[]", "{", '{"a": 1}', "[" * 5000):
        (tmp_path / "cache" / "sums.json").write_text(damage)
        assert sums.is_published(path, "right", take)
    assert len(taken) == 7
    monkeypatch.setenv("VBCAPS_CACHE", str(path / "none"))  # no place to write
    assert sums.is_published(path, "right", take)
    assert len(taken) == 8


def test_sheets_of_another_size_or_kind(tmp_path):
    from PIL import Image

    official.make_sheets(tmp_path / "svhn", n=70)
    path = tmp_path / "svhn" / "train_00.webp"
    whole = path.read_bytes()
    huge = int.from_bytes(b"\xff\xff\xff\x0f", "little").to_bytes(4, "little")
    for content in (whole[:21] + huge + whole[25:], whole[:15], whole[:-40], b"", whole[:12] + b"VP8X" + whole[16:]):
        path.write_bytes(content)
        assert peak(refused(lambda: load_dataset("svhn", tmp_path), rf"{path.name}: .*fetch it again")) < 64 * MB
    Image.new("RGB", (2048, 64)).save(path, format="TIFF")
    with pytest.raises(DataError, match=rf"{path.name}: .*no lossless WebP"):
        load_dataset("svhn", tmp_path)

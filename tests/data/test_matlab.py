"""MATLAB files: our reader against SciPy's, and what it refuses."""

import io
import struct
import zlib

import numpy as np
import official_files as official
import pytest
from scipy.io import loadmat, savemat

from vbcaps.data.contents import Damaged
from vbcaps.data.matlab import unpack_matlab

MOST = 1 << 24


def saved(packed: bool, **variables: object) -> bytes:
    file = io.BytesIO()
    savemat(file, variables, do_compression=packed)
    return file.getvalue()


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("dtype", ["u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8"])
@pytest.mark.parametrize("shape", [(1, 1), (1, 3), (3, 1), (5, 4, 3, 2), (0, 3), (300, 70)])
def test_arrays_are_those_that_scipy_reads(packed, dtype, shape):
    """Small ones lie within the head of their element."""
    array = np.random.default_rng(0).integers(0, 100, shape).astype(dtype)
    data = saved(packed, other=np.zeros(3), X=array, text="words", cells=np.array([1, "a"], object))
    ours, theirs = unpack_matlab(data, ("X",), MOST)["X"], loadmat(io.BytesIO(data))["X"]
    assert ours.dtype == theirs.dtype
    assert np.array_equal(ours, theirs)
    assert np.array_equal(ours, array)


@pytest.mark.parametrize("packed", [True, False])
def test_fields_of_a_struct_are_those_that_scipy_reads(packed):
    fields = dict(a=np.arange(12.0).reshape(3, 4), image=official.pixels(1600, 7), words="abc", nested=dict(x=1))
    fields |= dict(label_int=np.arange(7, dtype=np.uint8)[None], empty=np.zeros((0, 0)))
    data = saved(packed, affNISTdata=fields, later=np.zeros(2))
    wanted = ("affNISTdata.image", "affNISTdata.label_int", "affNISTdata.a", "affNISTdata.empty")
    ours, theirs = unpack_matlab(data, wanted, MOST), loadmat(io.BytesIO(data))["affNISTdata"]
    assert ours.keys() == set(wanted)
    for name, array in ours.items():
        expected = theirs[name.partition(".")[2]][0, 0]
        assert array.dtype == expected.dtype
        assert np.array_equal(array, expected)


def test_both_byte_orders():
    """A file of a big-endian machine: the same elements, every number turned."""
    little = official.mat_array("y", np.arange(6, dtype=np.uint8)[:, None])
    big = b"".join(
        struct.pack(">II", kind, len(data)) + data + b"\0" * (-len(data) % 8)
        for kind, data in (
            (6, struct.pack(">II", 9, 0)),
            (5, struct.pack(">2i", 6, 1)),
            (1, b"y"),
            (2, bytes(range(6))),
        )
    )
    for order, body in (("<", little), (">", struct.pack(">II", 14, len(big)) + big)):
        head = b"MATLAB".ljust(124) + struct.pack(f"{order}H", 0x0100) + (b"IM" if order == "<" else b"MI")
        assert unpack_matlab(head + body, ("y",), MOST)["y"].ravel().tolist() == list(range(6))


def damaged(data: bytes, message: str, wanted: tuple[str, ...] = ("X",), most: int = MOST) -> None:
    with pytest.raises((Damaged, zlib.error), match=message):
        unpack_matlab(data, wanted, most)


def header(version: int = 0x0100) -> bytes:
    return b"MATLAB 5.0".ljust(124) + struct.pack("<H", version) + b"IM"


def packed(content: bytes) -> bytes:
    deflated = zlib.compress(content)
    return header() + struct.pack("<II", 15, len(deflated)) + deflated


def test_other_files_and_other_versions():
    damaged(b"", "no MATLAB 5 file")
    damaged(b"<html>" * 100, "no MATLAB 5 file")
    damaged(header(0x0200), r"version 0x0200, not 0x0100 \(save it with -v7 in MATLAB\)")
    damaged(header() + b"\0" * 4, "ends early")
    damaged(header() + struct.pack("<II", 99, 0), "element of type 99")
    assert unpack_matlab(header(), ("X",), MOST) == {}


def test_sizes_are_not_believed():
    array = official.pixels(4, 5)
    whole = official.mat(X=array)
    for cut in range(130, len(whole), 7):
        with pytest.raises((Damaged, zlib.error)):
            unpack_matlab(whole[:cut], ("X",), MOST)
    bomb = official.mat(X=np.zeros((1000, 1000), np.uint8))
    damaged(bomb, "more than 100,000 bytes|begins with type 14", most=100_000)
    body = official.mat_array("X", array)
    damaged(packed(body[:4] + struct.pack("<I", 1 << 31) + body[8:]), "2,147,483,648 bytes")
    damaged(packed(body + b"more"), "longer than it says")
    # The data say that they are larger than the variable that they lie in.
    at = body.index(array.tobytes(order="F")) - 4
    damaged(packed(body[:at] + struct.pack("<I", 1 << 20) + body[at + 4 :]), "1,048,576 bytes")
    sizes = body.index(struct.pack("<2i", 4, 5))
    damaged(packed(body[:sizes] + struct.pack("<2i", 1 << 30, 1 << 30) + body[sizes + 8 :]), "20 bytes")
    damaged(packed(body[:sizes] + struct.pack("<2i", -4, -5) + body[sizes + 8 :]), "the sizes")
    flipped = bytearray(whole)
    flipped[-3] ^= 1  # the checksum of the stream
    damaged(bytes(flipped), "incorrect data check")


def test_things_in_the_place_of_numbers():
    damaged(saved(True, X=np.array([1, "a"], object)), "X must be an array of real numbers")
    damaged(saved(True, X=np.array([1 + 2j])), "X must be an array of real numbers")
    damaged(saved(True, X="words"), "X must be an array of real numbers")
    damaged(saved(True, X=[dict(a=1), dict(a=2)]), "must be", ("X", "X.a"))
    array = official.mat_array("X", official.pixels(4, 5))
    for kind in range(256):  # the type of the numbers, which crashed SciPy
        at = array.index(official.pixels(4, 5).tobytes(order="F")) - 8
        body = array[:at] + struct.pack("<I", kind) + array[at + 4 :]
        if kind not in (1, 2):  # bytes
            damaged(packed(body), f"type {kind}|has 20 bytes")

"""Arrays in NumPy's own format, ``.npy``: a header in Python's notation, then the numbers.

NumPy evaluates the header and allocates what it declares. Here the header must be as NumPy writes it, of plain numbers,
and the numbers must be as many bytes as the file has.
"""

import math
import re
import struct
from pathlib import Path
from typing import Literal

import numpy as np

from vbcaps.data.contents import Damaged
from vbcaps.disk import opened

HEADER = re.compile(
    rb"\{'descr': '([<>|=]?[biuf][1248])', 'fortran_order': (False|True), "
    rb"'shape': \(((?:\d{1,18}, ?)*\d{0,18})\),? ?\} *\n?"
)
AXES = 8
LONGEST = 1024  # bytes of a header
MOST = 1 << 40  # an axis of an array without numbers may say anything


def unpack_npy(data: bytes | bytearray | memoryview) -> np.ndarray:
    """Return the array in the bytes of an ``.npy`` file; it shares their memory."""
    dtype, shape, order, start = read_header(bytes(data[:LONGEST]), len(data))
    return np.frombuffer(data, dtype, offset=start).reshape(shape, order=order)


def map_npy(path: Path, mode: Literal["r", "c"] = "r") -> np.ndarray:
    """Return the array in an ``.npy`` file, mapped into memory; with mode ``"c"`` its copy there may be changed."""
    with opened(path) as file:
        size = file.seek(0, 2)
        file.seek(0)
        dtype, shape, order, start = read_header(file.read(LONGEST), size)
        if 0 in shape:  # no bytes to map
            return np.empty(shape, dtype)
        return np.memmap(file, dtype, mode, start, shape, order)


def read_header(head: bytes, size: int) -> tuple[np.dtype, tuple[int, ...], Literal["C", "F"], int]:
    """Return the type of the numbers, the shape, the order of the axes, and where the numbers begin.

    Args:
        head: the first bytes of the file: ``LONGEST``, or all.
        size: how many bytes the file has.
    """
    if head[:6] != b"\x93NUMPY" or len(head) < 12:
        raise Damaged("it is no array in NumPy's format .npy")
    wide = head[6] > 1  # version 1.0 has two bytes for the length of the header, later ones have four
    begin = 12 if wide else 10
    (length,) = struct.unpack("<I" if wide else "<H", head[8:begin])
    start = begin + length
    if head[6] not in (1, 2, 3) or start > len(head):
        raise Damaged("it ends within its header, or its header is damaged")
    found = HEADER.fullmatch(head[begin:start])
    if found is None:
        raise Damaged("its header is damaged, or it holds other things than plain numbers")
    try:
        dtype = np.dtype(found[1].decode())
    except TypeError as error:
        raise Damaged(f"it holds numbers of an unknown type {found[1].decode()}") from error
    shape = tuple(int(size) for size in found[3].replace(b" ", b"").split(b",") if size)
    if len(shape) > AXES or math.prod(shape) * dtype.itemsize != size - start:
        raise Damaged(f"an array of {shape} of {dtype} does not take the {size - start:,} bytes that it has")
    if max(shape, default=0) > MOST:
        raise Damaged(f"its shape {shape} has no numbers, or too many")
    return dtype, shape, "F" if found[2] == b"True" else "C", start

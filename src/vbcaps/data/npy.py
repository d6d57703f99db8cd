"""Arrays in NumPy's own format, ``.npy``: a header in Python's notation, then the numbers.

NumPy evaluates the header and allocates what it declares. Here the header must be as NumPy writes it, of plain numbers,
and the numbers must be as many bytes as the file has.
"""

import math
import re
import struct

import numpy as np

from vbcaps.data.contents import Damaged

HEADER = re.compile(
    rb"\{'descr': '([<>|=]?[biuf][1248])', 'fortran_order': (False|True), "
    rb"'shape': \(((?:\d{1,18}, ?)*\d{0,18})\),? ?\} *\n?"
)
AXES = 8


def unpack_npy(data: bytes | bytearray | memoryview) -> np.ndarray:
    """Return the array in the bytes of an ``.npy`` file; it shares their memory."""
    if bytes(data[:6]) != b"\x93NUMPY" or len(data) < 12:
        raise Damaged("it is no array in NumPy's format .npy")
    wide = data[6] > 1  # version 1.0 has two bytes for the length of the header, later ones have four
    begin = 12 if wide else 10
    (length,) = struct.unpack("<I" if wide else "<H", data[8:begin])
    start = begin + length
    if data[6] not in (1, 2, 3) or length > 1000 or start > len(data):
        raise Damaged("it ends within its header, or its header is damaged")
    found = HEADER.fullmatch(data[begin:start])
    if found is None:
        raise Damaged("its header is damaged, or it holds other things than plain numbers")
    try:
        dtype = np.dtype(found[1].decode())
    except TypeError as error:
        raise Damaged(f"it holds numbers of an unknown type {found[1].decode()}") from error
    shape = tuple(int(size) for size in found[3].replace(b" ", b"").split(b",") if size)
    if len(shape) > AXES or math.prod(shape) * dtype.itemsize != len(data) - start:
        raise Damaged(f"an array of {shape} of {dtype} does not take the {len(data) - start:,} bytes that it has")
    return np.frombuffer(data, dtype, offset=start).reshape(shape, order="F" if found[2] == b"True" else "C")

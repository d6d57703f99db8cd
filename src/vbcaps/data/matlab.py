"""Arrays in MATLAB's files of version 5, which MATLAB 5 to 7 write: those of SVHN and affNIST.

A file is a header of 128 bytes and then elements: a type and a length, 4 bytes each, and so many bytes, filled up to a
multiple of 8. (An element of up to 4 bytes has type, length and data in 8.) A variable is an element of type MATRIX,
mostly within a zlib stream in an element of type COMPRESSED. A MATRIX has elements again: flags with the class, sizes,
name, and then the numbers, or for a struct the names of its fields and a MATRIX for each.

The reader knows numbers, and structs of numbers. Everything else is passed over. No length is believed before it is
compared with the bytes that there are.
"""

import math
import struct
import zlib
from collections.abc import Collection

import numpy as np

from vbcaps.data.contents import Damaged

INT8, INT32, UINT32, MATRIX, COMPRESSED = 1, 5, 6, 14, 15
NUMBERS = {1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8"}
STRUCT = 2
NUMERIC = range(6, 16)  # the classes double, single, and integers of 8 to 64 bits
COMPLEX, LOGICAL = 0x0800, 0x0200
VARIABLES, FIELDS, AXES, LONGEST = 64, 256, 8, 64  # of a file, a struct, an array, a name
PIECE = 1 << 16


def unpack_matlab(data: bytes | bytearray, wanted: Collection[str], most: int) -> dict[str, np.ndarray]:
    """Return arrays by name.

    Args:
        data: the bytes of the file.
        wanted: names of variables, and of fields of structs as ``"struct.field"``.
        most: how many bytes the file may have in all, unpacked.
    """
    view = memoryview(data)
    order = _order(view)
    found: dict[str, np.ndarray] = {}
    at = 128
    for _ in range(VARIABLES):
        if at == len(view) or found.keys() == set(wanted):
            return found
        if len(view) - at < 8:
            break
        kind, length = struct.unpack_from(f"{order}II", view, at)
        if kind not in (MATRIX, COMPRESSED):
            raise Damaged(f"it has an element of type {kind} in the place of a variable")
        if length > len(view) - at - 8:
            break
        body = view[at + 8 : at + 8 + length]
        if kind == MATRIX:
            _Variable(_Plain(body), order).read(length, wanted, found)
            length += -length % 8
        else:
            stream = _Deflated(body, most)
            kind, inner = struct.unpack(f"{order}II", stream.take(8))
            if kind != MATRIX or inner > most:
                raise Damaged(f"a variable begins with type {kind} and {inner:,} bytes")
            if _Variable(stream, order).read(inner, wanted, found):
                stream.end()
            most -= stream.given
        at = min(at + 8 + length, len(view))
    else:
        raise Damaged(f"it has more than {VARIABLES} variables")
    raise Damaged("it ends early")


def _order(view: memoryview) -> str:
    """Check the header; return the byte order of the file, as ``struct`` writes it."""
    orders = {b"IM": "<", b"MI": ">"}
    order = orders.get(bytes(view[126:128]))
    if order is None:
        raise Damaged("it is no MATLAB 5 file")
    (version,) = struct.unpack_from(f"{order}H", view, 124)
    if version != 0x0100:
        hint = " (save it with -v7 in MATLAB)" if version == 0x0200 else ""
        raise Damaged(f"it is a MATLAB file of version {version:#06x}, not 0x0100{hint}")
    return order


class _Plain:
    """Bytes that are given out in order."""

    def __init__(self, body: memoryview):
        self.body, self.at = body, 0

    def take(self, count: int) -> bytes | memoryview:
        if count > len(self.body) - self.at:
            raise Damaged("it ends early")
        self.at += count
        return self.body[self.at - count : self.at]

    def array(self, count: int) -> np.ndarray:
        return np.frombuffer(self.take(count), np.uint8)

    def skip(self, count: int) -> None:
        self.take(count)


class _Deflated:
    """A zlib stream whose contents are given out in order, and unpacked only as far as they are asked for."""

    def __init__(self, body: memoryview, most: int):
        self.body, self.most, self.at, self.given = body, most, 0, 0
        self.stream = zlib.decompressobj()
        self.ready = b""

    def piece(self, count: int) -> bytes:
        """Unpack at most ``count`` bytes; return none only where the stream is at its end."""
        while not self.stream.eof:
            data = self.stream.unconsumed_tail
            if not data:
                data = bytes(self.body[self.at : self.at + PIECE])
                self.at += len(data)
            made = self.stream.decompress(data, count)  # without data: what zlib still holds back
            if made:
                return made
            if not data and not self.stream.eof:
                raise Damaged("it ends early")
        return b""

    def account(self, count: int) -> None:
        self.given += count
        if self.given > self.most:
            raise Damaged(f"its contents have more than {self.most:,} bytes")

    def take(self, count: int) -> bytes:
        self.account(count)
        while len(self.ready) < count:
            more = self.piece(PIECE)
            if not more:
                raise Damaged("it ends early")
            self.ready += more
        taken, self.ready = self.ready[:count], self.ready[count:]
        return taken

    def array(self, count: int) -> np.ndarray:
        self.account(count)
        out = np.empty(count, np.uint8)
        done = min(count, len(self.ready))
        out[:done] = np.frombuffer(self.ready[:done], np.uint8)
        self.ready = self.ready[done:]
        while done < count:
            more = self.piece(count - done)
            if not more:
                raise Damaged("it ends early")
            out[done : done + len(more)] = np.frombuffer(more, np.uint8)
            done += len(more)
        return out

    def skip(self, count: int) -> None:
        while count:
            step = min(count, PIECE)
            self.take(step)
            count -= step

    def end(self) -> None:
        """Check that the stream ends here, with the right checksum."""
        if self.ready or self.piece(1):
            raise Damaged("a variable is longer than it says")


class _Variable:
    """Reads the elements of one variable."""

    def __init__(self, stream: _Plain | _Deflated, order: str):
        self.stream, self.order = stream, order
        self.left = 0  # bytes of the present MATRIX

    def read(self, length: int, wanted: Collection[str], found: dict[str, np.ndarray], parent: str = "") -> bool:
        """Read a MATRIX of ``length`` bytes to its end, and put it into ``found`` if it is wanted; return whether it,
        or a field of it, was."""
        self.left = length
        flags, shape, name = self.head()
        name = f"{parent}.{name}" if parent else name
        return self.body(flags, shape, name, wanted, found)

    def head(self) -> tuple[int, tuple[int, ...], str]:
        """Read flags, sizes and name."""
        flags = self.small(UINT32, 8)
        sizes = self.small(INT32, 4 * AXES)
        name = self.small(INT8, LONGEST)
        if len(flags) != 8 or not 8 <= len(sizes) <= 4 * AXES or len(sizes) % 4:
            raise Damaged("a variable has damaged flags or sizes")
        shape = struct.unpack(f"{self.order}{len(sizes) // 4}i", sizes)
        if min(shape) < 0:
            raise Damaged(f"a variable has the sizes {shape}")
        return struct.unpack(f"{self.order}II", flags)[0], shape, bytes(name).decode("latin-1")

    def body(
        self, flags: int, shape: tuple[int, ...], name: str, wanted: Collection[str], found: dict[str, np.ndarray]
    ) -> bool:
        kind = flags & 0xFF
        if kind == STRUCT and any(one.startswith(f"{name}.") for one in wanted):
            self.fields(shape, name, wanted, found)
            return True
        if name not in wanted:
            self.skip(self.left)
            return False
        if kind not in NUMERIC or flags & COMPLEX:
            raise Damaged(f"{name} must be an array of real numbers, it is of class {kind}")
        found[name] = self.numbers(shape, name)
        self.skip(self.left)
        return True

    def fields(self, shape: tuple[int, ...], name: str, wanted: Collection[str], found: dict[str, np.ndarray]) -> None:
        """Read the fields of a struct of one element."""
        if math.prod(shape) != 1:
            raise Damaged(f"{name} must be one struct, its sizes are {shape}")
        width = bytes(self.small(INT32, 4))
        size = struct.unpack(f"{self.order}i", width)[0] if len(width) == 4 else 0
        if not 1 <= size <= LONGEST:
            raise Damaged(f"{name} has field names of {size} bytes")
        names = bytes(self.small(INT8, size * FIELDS))
        if len(names) % size:
            raise Damaged(f"{name} has damaged field names")
        for at in range(0, len(names), size):
            field = names[at : at + size].partition(b"\0")[0].decode("latin-1")
            kind, length, inline = self.tag()
            if kind != MATRIX or inline is not None or length > self.left:
                raise Damaged(f"the field {field!a} of {name} is damaged")
            rest, self.left = self.left - length, length
            flags, sizes, _ = self.head() if length else (0, (0, 0), "")
            self.body(flags, sizes, f"{name}.{field}", () if not length else wanted, found)
            self.left = rest
        self.skip(self.left)

    def numbers(self, shape: tuple[int, ...], name: str) -> np.ndarray:
        kind, length, inline = self.tag()
        if kind not in NUMBERS:
            raise Damaged(f"{name} has numbers of type {kind}")
        dtype = np.dtype(self.order + NUMBERS[kind])
        if length != math.prod(shape) * dtype.itemsize:
            raise Damaged(f"{name} has {length:,} bytes, and {shape} numbers of {dtype}")
        if inline is not None:
            data = np.frombuffer(inline[:length], np.uint8)
        else:
            self.spend(length)
            data = self.stream.array(length)
            self.fill(length)
        return data.view(dtype).reshape(shape, order="F")

    def tag(self) -> tuple[int, int, bytes | None]:
        """Read the head of an element: its type, its length, and where it is small its data."""
        self.spend(8)
        tag = bytes(self.stream.take(8))
        kind, length = struct.unpack(f"{self.order}II", tag)
        if not kind >> 16:
            return kind, length, None
        if kind >> 16 > 4:
            raise Damaged(f"a small element has {kind >> 16} bytes")
        return kind & 0xFFFF, kind >> 16, tag[4:]

    def small(self, expected: int, most: int) -> bytes | memoryview:
        """Read an element of a type, of at most ``most`` bytes."""
        kind, length, inline = self.tag()
        if kind != expected or length > most:
            raise Damaged(f"an element has type {kind} and {length:,} bytes, not type {expected} and at most {most}")
        if inline is not None:
            return inline[:length]
        self.spend(length)
        data = self.stream.take(length)
        self.fill(length)
        return data

    def spend(self, count: int) -> None:
        if count > self.left:
            raise Damaged("an element is longer than the variable that it lies in")
        self.left -= count

    def fill(self, length: int) -> None:
        """Pass over the bytes that fill an element up to a multiple of 8."""
        self.skip(min(-length % 8, self.left))

    def skip(self, count: int) -> None:
        self.spend(count)
        self.stream.skip(count)

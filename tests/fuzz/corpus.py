"""Every file that once made a reader fail, or that others made to do harm: the reader, the file's name, its content.

The files are small, and what they say that they hold is not.
"""

import gzip
import io
import json
import lzma
import pickle
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import cache

import numpy as np
import official_files as official

MB, GIB = 1 << 20, 1 << 30
ZEROS = bytes(2 * MB)
TIMES = 24  # an eighth of a gibibyte each: 3 GiB


@cache
def zeros(kind: str) -> bytes:
    """Return 3 GiB of zeros: an eighth of a gibibyte, packed, again and again."""
    packer = {
        "gz": lambda: zlib.compressobj(9, wbits=31), "xz": lambda: lzma.LZMACompressor(preset=0),
        "raw": lambda: zlib.compressobj(9, wbits=-15),
    }[kind]()  # fmt: skip
    out = b"".join(packer.compress(ZEROS) for _ in range(64))
    return TIMES * (out + (packer.flush(zlib.Z_FULL_FLUSH) if kind == "raw" else packer.flush()))


def zip_of(name: str, packed: bytes, size: int, method: int = 8, flags: int = 0) -> bytes:
    """Return a zip archive that says of its one member what it is told to."""
    raw = name.encode()
    fields = struct.pack("<HHHHHIIIH", 20, flags, method, 0, 0, 0, len(packed), size & 0xFFFFFFFF, len(raw))
    local = b"PK\3\4" + fields + b"\0\0" + raw + packed
    entry = b"PK\1\2" + struct.pack("<H", 20) + fields + struct.pack("<HHHHII", 0, 0, 0, 0, 0, 0) + raw
    return local + entry + b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, 1, 1, len(entry), len(local), 0)


def npy(header: str, data: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + data


def npz(**arrays: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in arrays.items():
            archive.writestr(f"{name}.npy", data)
    return file.getvalue()


def tar(name: str, kind: bytes, link: str = "", size: int = 0) -> bytes:
    member = tarfile.TarInfo(name)
    member.type, member.linkname, member.size = kind, link, size
    head = bytearray(member.tobuf(tarfile.GNU_FORMAT))
    if kind == tarfile.GNUTYPE_SPARSE:
        head[483:495] = b"%011o\0" % (8 * GIB - 1)
        head[148:156] = b" " * 8
        head[148:156] = b"%06o\0 " % sum(head)
    return gzip.compress(bytes(head) + bytes(2048))


def mat(kind: int) -> bytes:
    """Return SVHN's numbers under a data type that crashed SciPy."""
    array = official.mat_array("X", official.pixels(4, 5))
    at = array.index(official.pixels(4, 5).tobytes(order="F")) - 8
    packed = zlib.compress(array[:at] + struct.pack("<I", kind) + array[at + 4 :])
    return b"MATLAB 5.0".ljust(124) + struct.pack("<H", 0x0100) + b"IM" + struct.pack("<II", 15, len(packed)) + packed


class Runs:
    """A pickle that starts a program where it is loaded."""

    def __reduce__(self) -> tuple[Callable, tuple[str]]:
        import os

        return os.system, ("touch /tmp/executed",)


def png(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")
    )


def tiff(count: int, loop: bool) -> bytes:
    kinds = [(256, 3, 4), (257, 3, 4), (258, 3, 8), (259, 3, 1), (262, 3, 1), (273, 4, 0), (278, 3, 4), (279, 4, 16)]
    tags = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in kinds)
    size = 2 + len(tags) + 4
    follows = [8 + size * (k + 1) for k in range(count - 1)] + [8 * loop]
    pages = [struct.pack("<H", len(kinds)) + tags + struct.pack("<I", after) for after in follows]
    return b"II*\0" + struct.pack("<I", 8) + b"".join(pages) + bytes(16)


def safetensors(fields: object) -> bytes:
    head = json.dumps({"__metadata__": {"vbcaps": fields if isinstance(fields, str) else json.dumps(fields)}}).encode()
    return struct.pack("<Q", len(head)) + head


U1 = "{'descr': '|u1', 'fortran_order': False, 'shape': (%s), }\n"
DEEP = "[" * 5000 + "]" * 5000
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 20 20\n%%EndComments\nshowpage\n%%EOF\n"


def corpus() -> Iterator[tuple[str, str, bytes]]:
    """Yield the reader, the name of the file, and its content."""
    yield "idx", "t10k-images-idx3-ubyte.gz", zeros("gz")
    yield "idx", "t10k-images-idx3-ubyte.gz", b"\x1f\x8b\x08" + bytes(7)
    yield "idx", "t10k-labels-idx1-ubyte.gz", gzip.compress(bytes([0, 0, 8, 65]) + struct.pack(">I", 1) * 65 + b"1")
    yield "npy", "train_images_48.npy.xz", zeros("xz")
    yield "npy", "train_labels.npy", npy(U1 % "7696581394432,", bytes(64))
    for header in ("{'descr': '|V0', 'fortran_order': False, 'shape': (3,), }\n", "(" * 900, "-" * 900, "{'descr': '"):
        yield "npy", "train_labels.npy", npy(header)
    yield "npy", "train_labels.npy", npz(a=npy(U1 % "1,", b"1"))
    yield "npz", "breastmnist.npz", npz(train_images=npy(U1 % "1099511627776,28,28", bytes(64)))
    yield "npz", "breastmnist.npz", npz(train_images=npy(U1 % f"{GIB // 8 // 784},28,28", bytes(GIB // 8 // 784 * 784)))
    yield "npz", "breastmnist.npz", zip_of("train_images.npy", zeros("raw"), 3 * GIB)
    yield "npz", "breastmnist.npz", zip_of("train_images.npy", b"abc", 3, method=99)
    yield "npz", "breastmnist.npz", zip_of("train_images.npy", b"abc" * 9, 3, flags=1)
    yield "npz", "breastmnist.npz", npz(train_images=npy("(" * 900))
    yield "mat_zip", "test.mat.zip", zip_of("test.mat", zeros("raw"), 3 * GIB)
    yield "mat_zip", "test.mat.zip", zip_of("test.mat", b"abc", 3, method=14)
    yield "mat_zip", "test.mat.zip", zip_of("test.mat", b"abc" * 9, 3, flags=1)
    for kind in (0, 8, 10, 11, 16, 18, 255):
        yield "mat", "test_32x32.mat", mat(kind)
    for kind, link in ((tarfile.SYMTYPE, "test_batch.bin"), (tarfile.LNKTYPE, "/etc/passwd"), (tarfile.DIRTYPE, "")):
        yield "tar", "cifar-10-binary.tar.gz", tar("test_batch.bin", kind, link)
    yield "tar", "cifar-10-binary.tar.gz", tar("test_batch.bin", tarfile.GNUTYPE_SPARSE, size=512)
    yield "tar", "cifar-10-binary.tar.gz", tar("../../../test_batch.bin", tarfile.REGTYPE)
    yield "pickle", "test_batch", pickle.dumps(Runs(), 2)
    yield "pickle", "test_batch", pickle.dumps({b"data": Runs(), b"labels": [1]}, 2)
    yield "pickle", "test_batch", b"\x80\x02c\xff\n"  # a word that is no text
    yield "pickle", "test_batch", b"\x80\x02}r\xff\xff\xff\x7f."
    yield (
        "norb",
        f"{official.NORB['test']}-dat.mat.gz",
        gzip.compress(official.matrix(np.zeros((9, 2, 0, 8), np.uint8))),
    )
    for reader in ("images", "predict"):
        for name in ("grey.png", "colour.jpg", "colour.tif"):
            yield reader, name, EPS
        yield reader, "grey.png", png(30_000, 30_000)
        yield reader, "grey.png", png(13_000, 13_000)
        yield reader, "colour.png", png(10, 30).replace(b"\0\0\0\x11IDAT", b"\xda\x04\x56\xe2IDAT")  # 3.7 GB of pixels
        for count, loop in ((1, True), (10, True), (100_000, False)):
            yield reader, "colour.tif", tiff(count, loop)
        yield reader, "cube.npy", npy(U1 % "7696581394432,", bytes(64))
        yield reader, "cube.npy", npz(a=npy(U1 % "1,", b"1"))
    for name in ("weights", "state"):
        file = "last.safetensors" if name == "weights" else "state.safetensors"
        yield name, file, struct.pack("<Q", 1 << 62) + b"{}"
        yield name, file, pickle.dumps(Runs(), 2)
        yield name, file, safetensors(DEEP)
        yield name, file, safetensors(dict(format=f"vbcaps {name} 1", recipe=[], view=None, classes=[["a"]]))
        yield name, file, struct.pack("<Q", 12) + b'{"a": [1, 2]'
        yield name, file, struct.pack("<Q", 8) + b'{"a": 1}'
        yield name, file, struct.pack("<Q", 9) + b'{"\xff": 1}'
    yield "recipes", "recipe.json", DEEP.encode()
    yield "recipes", "recipe.json", b'{"name": "\xff"}'
    yield "recipes", "result.json", b"[]"
    yield "recipes", "metrics.csv", b"epoch,loss\n1,2,3,4\n"
    yield "recipes", "metrics.csv", b"epoch,loss\n" + b"1" * 200_000 + b",x\n"

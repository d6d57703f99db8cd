"""The contents of a file, uncompressed: gzip, xz, zip or none of them.

A few megabytes can unpack to terabytes, so everything is unpacked piece by piece, and no further than a bound.
"""

import lzma
import struct
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

PIECE = 1 << 18  # bytes read from the disk at a time
MADE = 1 << 22  # bytes that are unpacked at a time
ROOM = 1 << 30  # an xz file may ask for so much memory; the most that `xz -9` asks for is 65 MB
SPARE = 1 << 20  # bytes that a compressed file may be larger than its contents
EMPTY = 16  # empty members that a gzip or xz file may have
ENTRIES = 1 << 16  # bytes of the list of members of a zip archive
STORED, DEFLATED = zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED


class Damaged(ValueError):
    """Raised when contents cannot be read. The message says what is wrong; the caller adds the file's name."""


def contents(file: BinaryIO, name: str, most: int) -> bytearray:
    """Return the contents of an open file; the ending of ``name`` says how they are packed.

    Args:
        file: the file, at its beginning.
        name: its name: ``a.mat.gz``, ``a.mat.xz``, ``a.mat.zip`` with ``a.mat`` in it, or any other.
        most: how many bytes the contents may have.
    """
    size = file.seek(0, 2)
    file.seek(0)
    if size > most + SPARE:
        raise Damaged(f"it has {size:,} bytes, and its contents are {most:,} at most")
    suffix = Path(name).suffix
    if suffix == ".zip":
        return _zipped(file, size, name.removesuffix(".zip"), most)
    packed = suffix in (".gz", ".xz")
    return _gathered(_members(file, suffix) if packed else iter(lambda: file.read(PIECE), b""), most)


def _gathered(pieces: Iterator[bytes], most: int) -> bytearray:
    out = bytearray()
    for piece in pieces:
        out += piece
        if len(out) > most:
            raise Damaged(f"its contents have more than {most:,} bytes")
    return out


def _members(file: BinaryIO, suffix: str) -> Iterator[bytes]:
    """Unpack a gzip or xz file, which may have several members one after another, and zeros behind them."""
    data, empty = file.read(PIECE), 0
    if not data:
        raise Damaged("it is empty")
    while data:
        unpacker = zlib.decompressobj(31) if suffix == ".gz" else lzma.LZMADecompressor(memlimit=ROOM)
        some = False
        while not unpacker.eof:
            piece = unpacker.decompress(data, MADE)
            some = some or bool(piece)
            yield piece
            held = isinstance(unpacker, lzma.LZMADecompressor) and not unpacker.needs_input
            data = b"" if isinstance(unpacker, lzma.LZMADecompressor) else unpacker.unconsumed_tail
            if not (data or held or unpacker.eof):
                data = file.read(PIECE)
                if not (data or piece):
                    raise Damaged("it ends early")
        empty += not some
        if empty > EMPTY:
            raise Damaged("it has many members without contents")
        data = unpacker.unused_data.lstrip(b"\0")
        while not data and (more := file.read(PIECE)):
            data = more.lstrip(b"\0")


def _zipped(file: BinaryIO, size: int, name: str, most: int) -> bytearray:
    """Return the member ``name`` of a zip archive."""
    check_list(file, size)
    with zipfile.ZipFile(file) as archive:
        member = next((one for one in archive.infolist() if one.filename == name), None)
        if member is None:
            raise Damaged(f"it has no member {name}")
        return unzip(archive, member, most)


def unzip(archive: zipfile.ZipFile, member: zipfile.ZipInfo, most: int) -> bytearray:
    """Return a member of a zip archive, of at most ``most`` bytes."""
    if member.flag_bits & 1:
        raise Damaged(f"its member {member.filename} is encrypted")
    if member.compress_type not in (STORED, DEFLATED):
        raise Damaged(f"its member {member.filename} is packed in another way than deflate")
    if member.file_size > most:
        raise Damaged(f"its member {member.filename} has {member.file_size:,} bytes, and {most:,} at most")
    with archive.open(member) as stream:
        return _gathered(iter(lambda: stream.read(PIECE), b""), most)


def check_list(file: BinaryIO, size: int) -> None:
    """Raise an error if a zip archive has a longer list of members than data files have, which would all be kept."""
    start = max(size - (1 << 16) - 22, 0)
    file.seek(start)
    end = file.read()
    at = end.rfind(b"PK\5\6")
    if at < 0 or len(end) - at < 22:
        raise Damaged("it is no zip archive, or cut short")
    (length,) = struct.unpack("<I", end[at + 12 : at + 16])
    if length > ENTRIES:
        raise Damaged(f"its list of members has {length:,} bytes")
    file.seek(0)

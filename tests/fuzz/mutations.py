"""Damage to bytes by random numbers: what disks, networks and strangers do, at every layer of a file."""

import gzip
import io
import json
import lzma
import re
import struct
import zipfile
import zlib
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

NUMBERS = (0, 1, 2, 3, 7, 8, 9, 16, 31, 64, 127, 128, 255, 256, 1000, 4095, 32767, 32768, 65535, 65536)
LARGE = (1 << 24, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 33, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
WORDS = (
    b"\x93NUMPY", b"PK\3\4", b"PK\1\2", b"PK\5\6", b"\x1f\x8b\x08", b"\xfd7zXZ", b"ustar", b"%!PS-Adobe", b"RIFF",
    b"II*\0", b"cos\nsystem\n", b"cbuiltins\neval\n", b"(S'id'\ntR.", b"\x80\x04\x95", b"{'descr': '|O'",
    b"'shape': (1,),", b"nan", b"inf", b"-1", b"1e999", b"null", b"[[[[", b"\x1b[2J", b"\0" * 16, b"\xff" * 16,
    b"../../x", b"/etc/passwd",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2, 10**6, 10**18, 10**30, -(2**63), 0.0, -0.5, 1e308, float("nan"), float("inf"), "",
    "a", "\x1b[2J", "\ud800", "\0", "x" * 2000, [], {}, [[]], [1], ["a", "a"], [None], {"a": 1}, [1] * 2000, "auto",
    "cpu", "../x",
)  # fmt: skip


class Layer(NamedTuple):
    """Bytes within a file, and what puts changed ones back into their place."""

    content: bytes
    back: Callable[[bytes], bytes]
    kind: str = "bytes"  # or "json"


def layers(name: str, content: bytes) -> list[Layer]:
    """Return the layers of a file that is whole: itself, what is packed in it, what is packed in that."""
    found = [Layer(content, bytes)]
    for inner in _inside(name, content):
        deeper = layers(name.rpartition(".")[0], inner.content) if inner.content != content else [inner]
        found += [inner, *(Layer(one.content, _both(inner.back, one.back), one.kind) for one in deeper[1:])]
    return found


def _both(outer: Callable[[bytes], bytes], inner: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
    return lambda data: outer(inner(data))


def _inside(name: str, content: bytes) -> list[Layer]:
    if content[:2] == b"\x1f\x8b":
        return [Layer(gzip.decompress(content), lambda data: gzip.compress(data, 1, mtime=0))]
    if content[:4] == b"\xfd7zX":
        return [Layer(lzma.decompress(content), lambda data: lzma.compress(data, preset=0))]
    if content[:4] == b"PK\3\4":
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            members = {one: archive.read(one) for one in archive.namelist()}
        return [Layer(data, _zipped(members, one)) for one, data in members.items()]
    if content[257:262] == b"ustar":
        return [Layer(content, _with_sums)]
    if content[124:128] in (b"\0\1IM", b"\1\0MI") and len(content) > 136:
        (length,) = struct.unpack_from("<I", content, 132)
        rest = content[136 + length :]
        before = content[:128] + struct.pack("<I", 15)
        return [
            Layer(
                zlib.decompress(content[136 : 136 + length]),
                lambda data: before + struct.pack("<I", len(zlib.compress(data, 1))) + zlib.compress(data, 1) + rest,
            )
        ]
    if name.endswith(".safetensors"):
        (length,) = struct.unpack_from("<Q", content)
        tensors = content[8 + length :]

        def begin(data: bytes) -> bytes:
            return struct.pack("<Q", len(data)) + data + tensors

        head = content[8 : 8 + length]
        fields = json.loads(head)["__metadata__"]["vbcaps"].encode()
        return [Layer(head, begin, "json"), Layer(fields, lambda data: begin(_with_fields(head, data)), "json")]
    return [Layer(content, bytes, "json")] if name.endswith(".json") else []


def _with_fields(head: bytes, data: bytes) -> bytes:
    fields = json.loads(head)
    fields["__metadata__"]["vbcaps"] = data.decode("utf-8", "replace")
    return json.dumps(fields).encode()


def _zipped(members: dict[str, bytes], name: str) -> Callable[[bytes], bytes]:
    def pack(data: bytes) -> bytes:
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
            for one, content in members.items():
                archive.writestr(one, data if one == name else content)
        return file.getvalue()

    return pack


def _with_sums(data: bytes) -> bytes:
    """Write the right checksum into the first header of a tar archive."""
    head = data[:148] + b" " * 8 + data[156:512]
    return data[:148] + b"%06o\0 " % sum(head) + data[156:] if len(data) >= 512 else data


def mutated(whole: list[Layer], random: Random) -> bytes:
    """Return a file with one to eight changes in one of its layers."""
    layer = random.choice(whole)
    changes = min(1 + int(random.expovariate(0.7)), 8)
    if layer.kind == "json" and random.random() < 0.7:
        return layer.back(_json(layer.content, changes, random))
    data = bytearray(layer.content)
    for _ in range(changes):
        random.choice(CHANGES)(data, random)
    return layer.back(bytes(data))


def _at(data: bytearray, random: Random) -> int:
    """Return a place: headers, which lie in front, are met as often as all the rest."""
    return min(int(random.choice((random.random() ** 4, random.random())) * len(data)), max(len(data) - 1, 0))


def _flip(data: bytearray, random: Random) -> None:
    if data:
        data[_at(data, random)] ^= 1 << random.randrange(8)


def _set(data: bytearray, random: Random) -> None:
    if data:
        data[_at(data, random)] = random.choice((0, 1, 0x7F, 0x80, 0xFF, random.randrange(256)))


def _number(data: bytearray, random: Random) -> None:
    size, order = random.choice("HIQ"), random.choice("<>")
    value = random.choice(NUMBERS + LARGE)
    packed = struct.pack(f"{order}Q", value)
    packed = packed[: struct.calcsize(size)] if order == "<" else packed[-struct.calcsize(size) :]
    at = _at(data, random)
    data[at : at + len(packed)] = packed


def _digits(data: bytearray, random: Random) -> None:
    found = list(re.finditer(rb"\d+", bytes(data[:4096])))
    if found:
        one = random.choice(found)
        data[one.start() : one.end()] = str(random.choice(NUMBERS + LARGE)).encode()


def _word(data: bytearray, random: Random) -> None:
    at, word = _at(data, random), random.choice(WORDS)
    data[at : at + random.choice((0, len(word)))] = word


def _delete(data: bytearray, random: Random) -> None:
    at = _at(data, random)
    del data[at : at + random.choice((1, 4, 8, 100, 512))]


def _insert(data: bytearray, random: Random) -> None:
    at = _at(data, random)
    data[at:at] = random.randbytes(random.choice((1, 4, 8, 100, 512)))


def _again(data: bytearray, random: Random) -> None:
    begin, at = _at(data, random), _at(data, random)
    data[at:at] = data[begin : begin + random.choice((1, 8, 64, 512, 4096))]


def _cut(data: bytearray, random: Random) -> None:
    del data[_at(data, random) :]


def _noise(data: bytearray, random: Random) -> None:
    at = _at(data, random)
    size = min(random.choice((4, 16, 64)), len(data) - at)
    data[at : at + size] = random.randbytes(size)


CHANGES = (_flip, _set, _number, _digits, _word, _delete, _insert, _again, _cut, _noise)


def _json(content: bytes, changes: int, random: Random) -> bytes:
    """Change values, keys and levels of JSON."""
    value = json.loads(content)
    for _ in range(changes):
        value = _changed(value, random)
    text = json.dumps(value)
    if random.random() < 0.05:  # deeper than a parser that calls itself can go
        text = text.replace("1", "[" * 5000 + "]" * 5000, 1)
    return text.encode()


def _changed(value: Any, random: Random) -> Any:
    if isinstance(value, dict) and value and random.random() < 0.95:
        key = random.choice(list(value))
        if random.random() < 0.15:
            out = dict(value)
            kept = out.pop(key)
            if random.random() < 0.5:
                out[str(random.choice(VALUES))[:50]] = kept
            return out
        return value | {key: _changed(value[key], random)}
    if isinstance(value, list) and value and random.random() < 0.7:
        at = random.randrange(len(value))
        if random.random() < 0.2:
            return value[:at] + value[at + 1 :] if random.random() < 0.5 else value + value[at:]
        return [*value[:at], _changed(value[at], random), *value[at + 1 :]]
    return random.choice(VALUES)

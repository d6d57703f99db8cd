"""Files in a tar archive: regular ones, by their names. Links, sparse files and extended headers are passed over."""

from collections.abc import Collection

from vbcaps.data.contents import Damaged

BLOCK = 512
MEMBERS = 256  # an archive of a dataset has few
REGULAR = (b"0", b"\0")


def unpack_tar(data: bytes | bytearray, wanted: Collection[str]) -> dict[str, memoryview]:
    """Return files of an archive by name, without their folders; they share the memory of ``data``."""
    view, found, at = memoryview(data), dict[str, memoryview](), 0
    for _ in range(MEMBERS):
        head = bytes(view[at : at + BLOCK])
        if len(head) == BLOCK and not any(head):
            return found
        if len(head) < BLOCK:
            raise Damaged("its archive ends early")
        if _number(head[148:156]) != sum(head) - sum(head[148:156]) + 8 * ord(" "):
            raise Damaged("its archive has a header with a wrong checksum")
        size, begin = _number(head[124:136]), at + BLOCK
        if size > len(view) - begin:
            raise Damaged("its archive ends early")
        name = head[:100].partition(b"\0")[0].decode("latin-1").rpartition("/")[2]
        if name in wanted and head[156:157] in REGULAR:
            if name in found:
                raise Damaged(f"its archive has two files {name}")
            found[name] = view[begin : begin + size]
        at = begin + size + -size % BLOCK
    raise Damaged(f"its archive has more than {MEMBERS} members")


def _number(field: bytes) -> int:
    """Read a number in octal digits."""
    digits = field.strip(b" \0")
    if not digits.isdigit() or b"8" in digits or b"9" in digits:
        raise Damaged("its archive has a damaged header")
    return int(digits, 8)

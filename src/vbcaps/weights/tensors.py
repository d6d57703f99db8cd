"""Named tensors in a safetensors file, with JSON in its header; nothing in such a file is executed.

The header is read and checked by itself: it says how large every tensor is before any of them is allocated.
"""

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse
from safetensors.torch import save as serialise
from torch import Tensor

from vbcaps.training.files import RunError
from vbcaps.training.recipe import OBEYED

LONGEST = 2**26  # bytes of a header; a state's has a row for each of up to 100,000 epochs
DEEPEST = 16  # levels of a header, one within another
AXES, MOST = 16, 2**63 - 1  # of a tensor, and of an axis
FLOATS = ("F32", "F64", "F16", "BF16")  # what a tensor of floats is read from
DTYPES = dict(
    F64=torch.float64, F32=torch.float32, F16=torch.float16, BF16=torch.bfloat16, I64=torch.int64, I32=torch.int32,
    I16=torch.int16, I8=torch.int8, U8=torch.uint8, BOOL=torch.bool,
)  # fmt: skip


def pack_tensors(tensors: Mapping[str, Tensor], header: dict[str, Any]) -> bytes:
    """Return the bytes of a safetensors file.

    Args:
        tensors: tensors by name, on any device.
        header: goes into the file's metadata as one JSON string, since the order of several strings is not fixed.
    """
    contents = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    return serialise(contents, {"vbcaps": json.dumps(header)})


class Header(NamedTuple):
    """What a safetensors file says before its tensors."""

    tensors: dict[str, tuple[str, tuple[int, ...]]]  # dtype, in the words of safetensors, and shape, by name
    fields: dict[str, Any]  # the header of ``pack_tensors``; empty for another program's file


def header_size(begin: bytes, file: str) -> int:
    """Return how many bytes lie before the tensors of a safetensors file, from its first eight."""
    length = int.from_bytes(begin[:8], "little")
    if len(begin) < 8 or length > LONGEST:
        raise RunError(f"{file} is damaged or no safetensors file: it does not begin with the length of a header")
    return 8 + length


def read_header(begin: bytes, file: str) -> Header:
    """Return the header of a safetensors file.

    Args:
        begin: the bytes of the file, at least as far as ``header_size`` says.
        file: its name in errors.
    """
    size = header_size(begin, file)
    try:
        if len(begin) < size:
            raise ValueError("it ends in its header")
        listed = parse_json(_text(begin[8:size]))
        metadata = listed.pop("__metadata__", {})
        for name, x in listed.items():
            if not isinstance(x, dict) or not isinstance(x.get("shape"), list):
                raise ValueError(f"{name!a} has no dtype and shape")
        tensors = {name: (x.get("dtype"), tuple(x["shape"])) for name, x in listed.items()}
        words = metadata.get("vbcaps", "{}") if isinstance(metadata, dict) else None
        if not isinstance(words, str):
            raise ValueError("its header has no fields")
        for name, (dtype, shape) in tensors.items():
            lengths = len(shape) <= AXES and all(type(length) is int and 0 <= length <= MOST for length in shape)
            if not isinstance(dtype, str) or not lengths:
                raise ValueError(f"{name!a} has no dtype and shape of at most {AXES} axes")
            if OBEYED.search(name + dtype):
                raise ValueError(f"{name!a} of {dtype!a} has control characters")
            _check_room(name, dtype, shape, listed[name].get("data_offsets"))
        fields = parse_json(words)
    except ValueError as error:
        raise RunError(f"{file} is damaged or no safetensors file: {error}") from error
    return Header(tensors, fields)


def _check_room(name: str, dtype: str, shape: tuple[int, ...], offsets: Any) -> None:
    """Raise an error unless a tensor has as many bytes as its shape needs; no product overflows in Python."""
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(offset) is int for offset in offsets):
        raise ValueError(f"{name!a} has no place in the file")
    room = offsets[1] - offsets[0]
    if dtype in DTYPES and room != math.prod(shape) * DTYPES[dtype].itemsize:
        raise ValueError(f"{name!a} has {room} bytes, which is not {shape} of {dtype}")


def _text(header: bytes) -> str:
    try:
        return header.decode()
    except UnicodeDecodeError:
        raise ValueError("its header is no text") from None


def parse_json(text: str) -> dict[str, Any]:
    """Return the fields of a JSON object; a ValueError says what is wrong with any other text."""
    try:
        parsed = json.loads(text, object_pairs_hook=_once)
    except RecursionError:
        raise ValueError(f"its header is nested more than {DEEPEST} levels deep") from None
    if not isinstance(parsed, dict):
        raise ValueError(f"its header has no fields, but is {text[:40]!a}")
    level: list[Any] = [parsed]
    for _ in range(DEEPEST):
        level = [
            x
            for one in level
            for x in (one.values() if isinstance(one, dict) else one if isinstance(one, list) else ())
        ]
    if level:
        raise ValueError(f"its header is nested more than {DEEPEST} levels deep")
    return parsed


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError(f"its header has {first_twice(name for name, _ in pairs)!r} twice")
    return found


def first_twice(names: Iterable[str]) -> str | None:
    """Return the first name that was there before, in one walk."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def unpack_tensors(content: bytes, file: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the arguments of ``pack_tensors``; the header is empty for another program's file.

    Args:
        content: the bytes of the file.
        file: its name in errors.
    """
    header = read_header(content, file)
    try:
        return parse(content), header.fields
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise RunError(f"{file} is damaged or no safetensors file: {error}") from error


def check_shapes(into: Mapping[str, Tensor], tensors: Mapping[str, tuple[str, tuple[int, ...]]], file: str) -> None:
    """Raise an error that names the tensors of a file whose names, shapes or dtypes are not those of a network.

    Args:
        into: the network's tensors by name; they may lie on the meta device.
        tensors: dtype and shape of those in the file, by name.
        file: its name in errors.
    """
    wrong = [f"{k} is missing" for k in into if k not in tensors]
    wrong += [f"{k} is not known" for k in tensors if k not in into]
    both = [k for k in into if k in tensors]
    wrong += [
        f"{k} is {tensors[k][1]}, the network's {tuple(into[k].shape)}"
        for k in both
        if tensors[k][1] != tuple(into[k].shape)
    ]
    wrong += [
        f"{k} has numbers of {tensors[k][0]}, it must be of {' or '.join(_dtypes(into[k]))}"
        for k in both
        if tensors[k][0] not in _dtypes(into[k])
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise RunError(f"{file} is of another network: {'; '.join(wrong[:3])}{more}")


def _dtypes(x: Tensor) -> tuple[str, ...]:
    """Return the dtypes, in the words of safetensors, from which a tensor takes its values."""
    if x.is_floating_point():
        return FLOATS
    return (next(name for name, dtype in DTYPES.items() if dtype == x.dtype),)


def copy_tensors(into: Mapping[str, Tensor], tensors: Mapping[str, Tensor], file: str) -> None:
    """Copy ``tensors`` into the tensors of the same names; the error names those that do not fit.

    Args:
        into: the tensors that are overwritten in place, by name.
        tensors: the values, with the same names and shapes.
        file: the name of their source in errors.
    """
    names = {dtype: name for name, dtype in DTYPES.items()}
    given = {k: (names.get(x.dtype, str(x.dtype)), tuple(x.shape)) for k, x in tensors.items()}
    check_shapes(into, given, file)
    with torch.no_grad():
        for name, x in into.items():
            x.copy_(tensors[name])

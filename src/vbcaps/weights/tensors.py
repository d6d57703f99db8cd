"""Named tensors in a safetensors file, with JSON in its header; nothing in such a file is executed."""

import json
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as parse
from safetensors.torch import save as serialise
from torch import Tensor

from vbcaps.training.files import RunError


def pack_tensors(tensors: Mapping[str, Tensor], header: dict[str, Any]) -> bytes:
    """Return the bytes of a safetensors file.

    Args:
        tensors: tensors by name, on any device.
        header: goes into the file's metadata as one JSON string, since the order of several strings is not fixed.
    """
    contents = {name: x.detach().cpu().contiguous() for name, x in tensors.items()}
    return serialise(contents, {"vbcaps": json.dumps(header)})


def unpack_tensors(content: bytes, file: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the arguments of ``pack_tensors``; the header is empty for another program's file.

    Args:
        content: the bytes of the file.
        file: its name in errors.
    """
    try:
        tensors = parse(content)
        metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
        header = json.loads(metadata.get("__metadata__", {}).get("vbcaps", "{}"))
    except (SafetensorError, ValueError, KeyError) as error:
        raise RunError(f"{file} is damaged or no safetensors file: {error}") from error
    if not isinstance(header, dict):
        raise RunError(f"{file} is damaged: its header has no fields")
    return tensors, header


def copy_tensors(into: Mapping[str, Tensor], tensors: Mapping[str, Tensor], file: str) -> None:
    """Copy ``tensors`` into the tensors of the same names; the error names those whose names or shapes differ.

    Args:
        into: the tensors that are overwritten in place, by name.
        tensors: the values, with the same names and shapes.
        file: the name of their source in errors.
    """
    wrong = [f"{k} is missing" for k in into if k not in tensors]
    wrong += [f"{k} is not known" for k in tensors if k not in into]
    wrong += [
        f"{k} is {tuple(tensors[k].shape)}, the network's {tuple(into[k].shape)}"
        for k in into
        if k in tensors and tensors[k].shape != into[k].shape
    ]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise RunError(f"{file} is of another network: {'; '.join(wrong[:3])}{more}")
    with torch.no_grad():
        for name, x in into.items():
            x.copy_(tensors[name])

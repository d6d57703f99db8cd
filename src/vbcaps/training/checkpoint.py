"""The state of a run: everything that a run needs to resume with the same bits as if it had never stopped."""

import hashlib
import json
import zlib
from collections.abc import Mapping
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import Tensor

import vbcaps
from vbcaps.data import Split
from vbcaps.data.dataset import CHUNK
from vbcaps.training.files import RunError
from vbcaps.training.recipe import Recipe
from vbcaps.weights.tensors import pack_tensors, unpack_tensors

FORMAT, FIRST = "vbcaps state 2", "vbcaps state 1"  # the first had no checksum
MAY_CHANGE = (
    "save_seconds",
    "data",
    "groups",
)  # fields that may differ when a run resumes; a checksum identifies the data


class State(NamedTuple):
    """The position of a run, stored in the header of ``state.safetensors``; its tensors are ``Learner.tensors()``."""

    recipe: dict[str, Any]
    data: str  # the checksum of images and labels
    epoch: int  # epochs done
    step: int  # steps done in the present epoch
    rows: list[dict[str, Any]]  # of metrics.csv
    best: dict[str, Any] | None  # the row that is best in validation
    seconds: float  # since the run began
    epoch_seconds: float  # of training in the present epoch
    began_with: dict[str, Any] | None = None  # the weights that the run began with


KINDS: dict[str, tuple[type, ...]] = dict(
    recipe=(dict,), data=(str,), epoch=(int,), step=(int,), rows=(list,), best=(dict, NoneType),
    seconds=(int, float), epoch_seconds=(int, float), began_with=(dict, NoneType),
)  # fmt: skip


ROW = ("epoch", "loss", "train_error", "validation_error")


def pack_state(tensors: dict[str, Tensor], state: State) -> bytes:
    """Return the content of ``state.safetensors``."""
    fields, here = dict(format=FORMAT, **state._asdict()), {name: x.detach().cpu() for name, x in tensors.items()}
    return pack_tensors(here, fields | dict(sum=sum_of(here, fields)))


def sum_of(tensors: Mapping[str, Tensor], fields: Mapping[str, Any]) -> str:
    """Return a checksum of all numbers and of the header: a bit that has flipped would resume to other weights."""
    total = hashlib.blake2b(json.dumps(fields).encode(), digest_size=16)
    for name in sorted(tensors):
        x = tensors[name].contiguous()
        total.update(f"\n{name} {x.dtype} {tuple(x.shape)}\n".encode())
        total.update(x.reshape(-1).view(torch.uint8).numpy().data)
    return total.hexdigest()


def unpack_state(content: bytes, file: str) -> tuple[dict[str, Tensor], State]:
    """Return the tensors and the position in ``state.safetensors``; ``file`` is its name in errors."""
    tensors, header = unpack_tensors(content, file)
    if header.get("format") not in (FORMAT, FIRST):
        got = ascii(header.get("format"))[:60]
        raise RunError(
            f"{file} is not the state of a run that vbcaps {vbcaps.__version__} can resume: it has the format {got}, "
            f"not {FORMAT!r}"
        )
    if header["format"] == FORMAT and header.pop("sum", None) != sum_of(tensors, header):
        raise RunError(f"{file} is damaged: its checksum is not that of its content")
    known = {field: header[field] for field in State._fields if field in header}
    for field in State._fields:
        if field not in known and field not in State._field_defaults:
            raise RunError(f"{file} is damaged: its header has no {field!r}")
        if field in known and not isinstance(known[field], KINDS[field]):
            raise RunError(f"{file} is damaged: {field} is {ascii(known[field])[:60]}")
    for row in [*known["rows"], *([known["best"]] if known["best"] is not None else [])]:
        if not isinstance(row, dict) or not all(is_number(row.get(column, "")) for column in ROW):
            raise RunError(f"{file} is damaged: a row must have numbers for {', '.join(ROW)}, got {ascii(row)[:200]}")
    return tensors, State(**known)


def is_number(value: object) -> bool:
    """Return whether a value may stand in a row: a number, or nothing."""
    return value is None or type(value) in (int, float)


def fingerprint(*splits: Split | None) -> str:
    """Return a checksum of images and labels, so that a run does not resume with other data."""
    total = 0
    for split in splits:
        if split is not None:
            for x in (split.images, split.labels):
                for part in x.split(CHUNK) if len(x) else ():  # images may be more than the memory holds
                    total = zlib.crc32(part.cpu().contiguous().numpy().data, total)
    return f"{total:08x}"


def check_same(saved: dict[str, Any], recipe: Recipe, folder: object) -> None:
    """Raise an error that names the fields in which the saved recipe of a folder differs from ``recipe``."""
    try:
        saved = Recipe.from_json(saved).to_json()  # fills in fields that recipes have gained since
    except (TypeError, ValueError) as error:
        raise RunError(f"{folder} has a recipe that vbcaps {vbcaps.__version__} cannot read: {error}") from error
    mine = recipe.to_json()
    other = [k for k in mine if k not in MAY_CHANGE and saved[k] != mine[k]]
    if other:
        lines = "; ".join(f"{k} was {saved[k]!r}, is now {mine[k]!r}" for k in other)
        raise RunError(f"{folder} is a run of another recipe ({lines}): resume it as it was, or choose another folder")

"""Data: every dataset becomes uint8 tensors; ``vbcaps.data.augment`` processes them on the device."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vbcaps.data.facts import FACTS

if TYPE_CHECKING:
    from vbcaps.data.augment import View
    from vbcaps.data.catalogue import load_dataset
    from vbcaps.data.dataset import DataError, Dataset, Split, data_folder
    from vbcaps.data.download import FileState, check, fetch
    from vbcaps.data.folder import fit_image, image_files, read_image, read_images
    from vbcaps.data.overlap import overlapping
    from vbcaps.data.splits import divide, hold_out, viewpoints

__all__ = [
    "FACTS",
    "DataError",
    "Dataset",
    "FileState",
    "Split",
    "View",
    "check",
    "data_folder",
    "divide",
    "fetch",
    "fit_image",
    "hold_out",
    "image_files",
    "load_dataset",
    "overlapping",
    "read_image",
    "read_images",
    "viewpoints",
]

_HOME = dict(
    View="augment", load_dataset="catalogue", DataError="dataset", Dataset="dataset", Split="dataset",
    data_folder="dataset",
    FileState="download", check="download", fetch="download", fit_image="folder", image_files="folder",
    read_image="folder",
    read_images="folder", overlapping="overlap", divide="splits", hold_out="splits", viewpoints="splits",
)  # fmt: skip


def __getattr__(name: str) -> Any:
    """Import a name when it is first asked for: ``FACTS`` is read by programs that do not wait for PyTorch."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value

"""Data: every dataset ends as uint8 tensors; what happens to them on the device is in ``vbcaps.data.augment``."""

from vbcaps.data.augment import View
from vbcaps.data.catalogue import DATASETS, load
from vbcaps.data.dataset import DataError, Dataset, Split, data_folder
from vbcaps.data.download import FileState, check, fetch
from vbcaps.data.folder import image_files, read_image, read_images
from vbcaps.data.splits import hold_out, viewpoints

__all__ = [
    "DATASETS",
    "DataError",
    "Dataset",
    "FileState",
    "Split",
    "View",
    "check",
    "data_folder",
    "fetch",
    "hold_out",
    "image_files",
    "load",
    "read_image",
    "read_images",
    "viewpoints",
]

"""Data: every dataset ends as uint8 tensors; what happens to them on the device is in ``vbcaps.data.augment``."""

from vbcaps.data.augment import View
from vbcaps.data.catalogue import DATASETS, load_dataset
from vbcaps.data.dataset import DataError, Dataset, Split, data_folder
from vbcaps.data.download import FileState, check, fetch
from vbcaps.data.folder import fit_image, image_files, read_image, read_images
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
    "fit_image",
    "hold_out",
    "image_files",
    "load_dataset",
    "read_image",
    "read_images",
    "viewpoints",
]

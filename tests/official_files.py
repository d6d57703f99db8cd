"""Small datasets in the official file formats, written byte by byte, and the damage that can befall a file."""

import gzip
import io
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path

import numpy as np
from PIL import Image

from vbcaps.data.medmnist_table import TABLE, file_name

NORB = {
    "train": "smallnorb-5x46789x9x18x6x2x96x96-training",
    "test": "smallnorb-5x01235x9x18x6x2x96x96-testing",
}
NORB_MAGIC = {"u1": 0x1E3D4C55, "i4": 0x1E3D4C54}
CIFAR = {"train": [f"data_batch_{k}" for k in range(1, 6)], "test": ["test_batch"]}


def pixels(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def write(path: Path, data: bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


# idx: MNIST, Fashion-MNIST


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + b"".join(struct.pack(">I", n) for n in array.shape) + array.tobytes()


def make_idx(folder: Path, n: int = 10, suffix: str = ".gz") -> dict[str, np.ndarray]:
    """``n`` training and ``n`` test images whose labels are 0, 1, ..., 9, 0, ..."""
    arrays = {}
    for seed, part in enumerate(("train", "t10k")):
        arrays[part] = pixels(n, 28, 28, seed=seed)
        write(folder / f"{part}-images-idx3-ubyte{suffix}", idx(arrays[part]))
        write(folder / f"{part}-labels-idx1-ubyte{suffix}", idx(np.arange(n, dtype=np.uint8) % 10))
    return arrays


# binary matrix: smallNORB


def matrix(array: np.ndarray) -> bytes:
    sizes = [*array.shape, *[1] * (3 - array.ndim)]
    magic = NORB_MAGIC[array.dtype.str[1:]]
    return struct.pack(f"<{2 + len(sizes)}i", magic, array.ndim, *sizes) + array.tobytes()


def norb_info(n: int) -> np.ndarray:
    """Instance, elevation 0..8, azimuth 0, 2..34, lighting 0..5: ``n`` rows that meet every viewpoint in turn."""
    k = np.arange(n, dtype=np.int32)
    return np.stack([k % 5, k % 9, k % 18 * 2, k % 6], 1)


def make_norb(folder: Path, n: int = 20, size: int = 96, suffix: str = ".gz") -> dict[str, np.ndarray]:
    arrays = {}
    for seed, (part, prefix) in enumerate(NORB.items()):
        arrays[part] = pixels(n, 2, size, size, seed=seed)
        labels = np.arange(n, dtype=np.int32) % 5
        for kind, array in (("dat", arrays[part]), ("cat", labels), ("info", norb_info(n))):
            write(folder / f"{prefix}-{kind}.mat{suffix}", matrix(array))
    return arrays


# MATLAB 5: SVHN, affNIST


def element(kind: int, data: bytes) -> bytes:
    return struct.pack("<II", kind, len(data)) + data + b"\0" * (-len(data) % 8)


def mat_array(name: str, array: np.ndarray | dict[str, np.ndarray]) -> bytes:
    """A uint8 array, or a struct of them, as an miMATRIX element."""
    struct_, uint8 = 2, 9
    kind, shape = (struct_, (1, 1)) if isinstance(array, dict) else (uint8, array.shape)
    out = element(6, struct.pack("<II", kind, 0)) + element(5, struct.pack(f"<{len(shape)}i", *shape))
    out += element(1, name.encode())
    if isinstance(array, dict):
        out += struct.pack("<HHi", 5, 4, 32) + element(1, b"".join(field.encode().ljust(32, b"\0") for field in array))
        out += b"".join(mat_array("", value) for value in array.values())
    else:
        out += element(2, array.tobytes(order="F"))
    return element(14, out)


def mat(**variables: np.ndarray | dict[str, np.ndarray]) -> bytes:
    """A whole file: the header, then every variable compressed."""
    out = b"MATLAB 5.0 MAT-file, Platform: GLNXA64".ljust(116) + b"\0" * 8 + struct.pack("<H", 0x0100) + b"IM"
    for name, value in variables.items():
        packed = zlib.compress(mat_array(name, value))
        out += struct.pack("<II", 15, len(packed)) + packed
    return out


def make_svhn(folder: Path, n: int = 20) -> dict[str, np.ndarray]:
    """Labels 1, 2, ..., 10, 1, ...: 10 stands for the digit 0."""
    arrays = {}
    for seed, part in enumerate(("train", "test")):
        arrays[part] = pixels(32, 32, 3, n, seed=seed)
        labels = (np.arange(n, dtype=np.uint8) % 10 + 1)[:, None]
        write(folder / f"{part}_32x32.mat", mat(X=arrays[part], y=labels))
    return arrays


def make_affnist(path: Path, n: int = 12, zipped: bool = True) -> np.ndarray:
    """The struct of the official test.mat, fields in its order; an image in each column, row after row."""
    images = pixels(n, 40, 40)
    labels = np.arange(n, dtype=np.uint8) % 10
    data = mat(
        affNISTdata={
            "affine_matrix": pixels(4, n),
            "inv_affine_matrix": pixels(4, n),
            "image": images.reshape(n, 1600).T,
            "id_affnist": pixels(1, n),
            "label_one_of_n": np.eye(10, dtype=np.uint8)[:, labels],
            "label_int": labels[None],
            "human_readable_transform": pixels(6, n),
            "id_mnist": pixels(1, n),
        }
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    if zipped:
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr("test.mat", data)
    else:
        path.write_bytes(data)
    return images


# CIFAR-10


def cifar_pickle(images: np.ndarray, labels: list[int]) -> bytes:
    """The opcodes with which Python 2 wrote the official batches: a dictionary with one array of bytes in it."""
    text = lambda s: b"U" + bytes([len(s)]) + s  # noqa: E731
    out = b"\x80\x02}q\x01(" + text(b"batch_label") + b"q\x02" + text(b"training batch 1 of 5") + b"q\x03"
    out += text(b"labels") + b"q\x04]q\x05(" + b"".join(b"K" + bytes([label]) for label in labels) + b"e"
    out += (
        text(b"data")
        + b"q\x06cnumpy.core.multiarray\n_reconstruct\nq\x07cnumpy\nndarray\nq\x08K\x00\x85U\x01b\x87Rq\x09"
    )
    out += b"(K\x01M" + struct.pack("<H", len(images)) + b"M\x00\x0c\x86cnumpy\ndtype\nq\x0aU\x02u1K\x00K\x01\x87Rq\x0b"
    out += b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
    out += b"T" + struct.pack("<I", images.size) + images.tobytes() + b"tb"
    return out + text(b"filenames") + b"q\x0c](" + text(b"a.png") * len(images) + b"eu."


def cifar_binary(images: np.ndarray, labels: list[int]) -> bytes:
    return b"".join(bytes([label]) + image.tobytes() for label, image in zip(labels, images, strict=True))


def make_cifar(folder: Path, version: str, packed: bool, n: int = 10) -> dict[str, np.ndarray]:
    """Batches of ``n``, version "python" or "binary", as an archive or unpacked; labels 0, 1, ..., 9, 0, ..."""
    batch, suffix, sub = (
        (cifar_pickle, "", "cifar-10-batches-py")
        if version == "python"
        else (cifar_binary, ".bin", "cifar-10-batches-bin")
    )
    folder.mkdir(parents=True, exist_ok=True)
    names = [name for part in CIFAR.values() for name in part]
    images = {name: pixels(n, 3072, seed=k) for k, name in enumerate(names)}
    files = {f"{sub}/{name}{suffix}": batch(images[name], [i % 10 for i in range(n)]) for name in names}
    files[f"{sub}/readme.html"] = b"<html>"
    if packed:
        with tarfile.open(folder / f"cifar-10-{version}.tar.gz", "w:gz") as tar:
            for name, data in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    else:
        for name, data in files.items():
            write(folder / name, data)
    return {part: np.concatenate([images[name] for name in names]) for part, names in CIFAR.items()}


# sheets


def make_sheets(folder: Path, n: int = 4096 + 70) -> dict[str, np.ndarray]:
    """Lossless WebP sheets of 64 columns and at most 4096 images, and labels 0, 1, ..., 9, 0, ..."""
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {}
    for seed, (part, count) in enumerate((("train", n), ("test", 65))):
        # Flat images: WebP packs a hundred thousand random pixels slowly.
        arrays[part] = np.broadcast_to(pixels(count, 3, 1, 1, seed=seed), (count, 3, 32, 32)).copy()
        arrays[part][:, :, 3, 5] = pixels(count, 3, seed=seed + 9)
        np.save(folder / f"{part}_labels.npy", (np.arange(count) % 10).astype(np.uint8))
        for k in range(0, count, 4096):
            images = arrays[part][k : k + 4096]
            rows = -(-len(images) // 64)
            sheet = np.zeros((rows * 32, 64 * 32, 3), np.uint8)
            for i, image in enumerate(images):
                y, x = i // 64 * 32, i % 64 * 32
                sheet[y : y + 32, x : x + 32] = image.transpose(1, 2, 0)
            Image.fromarray(sheet).save(folder / f"{part}_{k // 4096:02d}.webp", lossless=True, method=0, quality=0)
    return arrays


# MedMNIST


def make_medmnist(folder: Path, side: int = 28, counts: tuple[int, int, int] = (24, 9, 12)) -> dict[str, np.ndarray]:
    """An official file of the dataset ``folder.name``; labels 0, 1, ..., 0, ... as the file has them, ``n 1``."""
    about, folder = TABLE[folder.name], Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, np.ndarray] = {}
    for seed, (part, count) in enumerate(zip(("train", "val", "test"), counts, strict=True)):
        arrays[f"{part}_images"] = pixels(count, side, side, *([3] if about.channels == 3 else []), seed=seed)
        arrays[f"{part}_labels"] = (np.arange(count, dtype=np.uint8) % len(about.classes))[:, None]
    np.savez_compressed(folder / file_name(folder.name, side), **arrays)
    return arrays


# damage


def cut(path: Path) -> None:
    """The download ended early."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


def flip(path: Path) -> None:
    """A few bytes went bad on the disk, in the middle."""
    data = bytearray(path.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 8] = bytes(byte ^ 0xFF for byte in data[middle : middle + 8])
    path.write_bytes(data)


def page(path: Path) -> None:
    """The server sent a page that says sorry."""
    path.write_bytes(b"<!DOCTYPE html><html><body>404 Not Found</body></html>")

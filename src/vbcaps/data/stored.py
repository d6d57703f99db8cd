"""Decoded images in a file that is mapped into memory, for folders that are larger than memory.

A folder's images are decoded once, by a process for each core, to one ``.npy`` file in the cache. Its name is made of
the names, sizes and times of all images, so a folder that changed is decoded again.

Axes: n image, c channel, h w pixel.
"""

import contextlib
import hashlib
import json
import math
import os
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vbcaps.data.dataset import CHUNK, DataError, data_folder
from vbcaps.data.npy import map_npy
from vbcaps.data.pixels import Form
from vbcaps.disk import beside, no_link

try:
    import fcntl
except ImportError:  # Windows: two processes may then decode the same folder, and the later file stays
    fcntl = None  # type: ignore[assignment]

IN_MEMORY = 512 * 2**20  # bytes of decoded images that are kept in memory, or a quarter of the memory if that is less
LIMIT = 200 * 10**9  # bytes of the whole cache; the files used longest ago go first
JOB = 64  # images that a process decodes between two answers
FORMAT = "1"  # of what `decode` returns: another number decodes every folder again
DTYPES = (np.uint8, np.uint16, np.float32)
Progress = Callable[[int, int], None]  # images decoded, and in all


class Images:
    """Images in a mapped file, which behave like a tensor ``n c h w``.

    To select some (``index_select``, ``split``, an index) reads these from the file, or makes another ``Images``. Any
    other use of a tensor reads all images into memory first.

    Args:
        file: the tensor that is mapped.
        rows: which of its images these are, in order; all by default.
    """

    def __init__(self, file: Tensor, rows: Tensor | None = None):
        self.file = file
        self.rows = torch.arange(len(file)) if rows is None else rows

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.rows), *self.file.shape[1:]))

    @property
    def dtype(self) -> torch.dtype:
        return self.file.dtype

    @property
    def device(self) -> torch.device:
        return self.file.device

    @property
    def ndim(self) -> int:
        return self.file.ndim

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice | list | Tensor | np.ndarray):
            return Images(self.file, self.rows[index])
        return self.load()[index] if isinstance(index, tuple) else self.file[self.rows[index]]

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        if dim != 0:
            return self.load().index_select(dim, index)
        return self.file.index_select(0, self.rows.index_select(0, index))

    def split(self, size: int) -> Iterator[Tensor]:
        """Yield ``size`` images at a time, as tensors in memory."""
        for rows in self.rows.split(size):
            yield self.file.index_select(0, rows)

    def load(self) -> Tensor:
        """Return all images as a tensor in memory."""
        return self.file.index_select(0, self.rows)

    def cpu(self) -> "Images":
        return self

    def to(self, device: torch.device | str) -> Any:
        """Return the images on a device: on a GPU as a tensor, without all of them in memory on the way."""
        if torch.device(device).type == "cpu":
            return self
        return torch.cat([part.to(device) for part in self.split(CHUNK)])

    def float(self) -> Tensor:
        return torch.cat([part.float() for part in self.split(CHUNK)])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__array__":
            raise AttributeError(name)
        return getattr(self.load(), name)

    @classmethod
    def __torch_function__(
        cls, function: Callable, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        def loaded(x: Any) -> Any:
            if isinstance(x, Images):
                return x.load()
            return type(x)(map(loaded, x)) if type(x) in (list, tuple) else x

        return function(*map(loaded, args), **{name: loaded(x) for name, x in (kwargs or {}).items()})


def in_memory() -> int:
    """Return up to how many bytes of decoded images are kept in memory."""
    try:
        quarter = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4
    except (AttributeError, ValueError, OSError):  # Windows
        return IN_MEMORY
    return min(IN_MEMORY, quarter)


def cache_folder() -> Path:
    """Return the folder of decoded images: ``VBCAPS_CACHE``, or ``decoded`` beside the datasets."""
    named = os.environ.get("VBCAPS_CACHE")
    return Path(named).expanduser() if named else data_folder() / "decoded"


def entry_of(root: Path, paths: Sequence[Path], side: int, axes: str) -> Path:
    """Return the file that has the decoded images of a folder as it is now, or would have them."""
    root = root.resolve()
    place = hashlib.blake2b(json.dumps([str(root), side, axes]).encode(), digest_size=8).hexdigest()
    listing = hashlib.blake2b(FORMAT.encode(), digest_size=16)
    for path in paths:
        about = path.stat()
        listing.update(os.fsencode(f"{path}\0{about.st_size}\0{about.st_mtime_ns}\n"))
    return cache_folder() / f"{root.name}-{side}-{place}" / f"{listing.hexdigest()}.npy"


def mapped(entry: Path, count: int, side: int) -> Tensor | None:
    """Return the decoded images in a file, mapped into memory; None if there is no such file, or another one."""
    try:
        array = map_npy(no_link(no_link(entry.parent) / entry.name), "c")
        with contextlib.suppress(PermissionError):  # another user's, in a cache of several
            os.utime(entry)  # it has been used
    except (OSError, ValueError):
        return None
    fits = array.ndim == 4 and array.shape[0] == count and array.shape[2:] == (side, side) and array.flags.c_contiguous
    return torch.from_numpy(array) if fits and array.dtype in DTYPES else None


def store(
    entry: Path, paths: Sequence[Path], side: int, form: Form, axes: str, progress: Progress | None = None
) -> Tensor:
    """Decode images to ``entry``, unless another process did meanwhile, and return them mapped into memory."""
    shape = (len(paths), form.channels, side, side)
    size = math.prod(shape) * np.dtype(form.dtype).itemsize
    try:
        no_link(entry.parent).mkdir(parents=True, exist_ok=True)
        with locked(entry.parent):
            found = mapped(entry, len(paths), side)
            if found is None:
                _clear(entry.parent)
                free = shutil.disk_usage(entry.parent).free
                if free < size:
                    raise DataError(
                        f"{entry.parent}: the decoded images need {size / 1e9:.2f} GB, {free / 1e9:.2f} GB are free: "
                        "name another folder with --cache or VBCAPS_CACHE"
                    )
                part = beside(entry)
                try:
                    _decode_all(part, paths, shape, form, axes, progress)
                    os.replace(part, entry)
                finally:
                    part.unlink(missing_ok=True)
                found = mapped(entry, len(paths), side)
    except OSError as error:
        raise DataError(
            f"{entry.parent}: decoded images cannot be kept there ({error.strerror}): name another folder with --cache "
            "or VBCAPS_CACHE"
        ) from error
    if found is None:
        raise DataError(f"{entry}: vanished while it was opened: try again")
    _bound(entry)
    return found


def workers() -> int:
    """Return how many processes decode: one for each core that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _decode_all(
    part: Path, paths: Sequence[Path], shape: tuple[int, ...], form: Form, axes: str, progress: Progress | None
) -> None:
    """Write the images of ``paths`` to a new ``.npy`` file; one error names all files that cannot be read."""
    with open(part, "xb") as file:  # new: not what a link of this name leads to
        header = dict(descr=np.lib.format.dtype_to_descr(np.dtype(form.dtype)), fortran_order=False, shape=shape)
        np.lib.format.write_array_header_1_0(file, header)
        begin, each = file.tell(), math.prod(shape[1:]) * np.dtype(form.dtype).itemsize
        if hasattr(os, "posix_fallocate"):  # so that a full disk is an error now
            os.posix_fallocate(file.fileno(), 0, begin + len(paths) * each)
        else:
            file.truncate(begin + len(paths) * each)
    setup = dict(file=str(part), begin=begin, bytes=each, form=form, side=shape[2], axes=axes)
    jobs: queue.SimpleQueue[int] = queue.SimpleQueue()
    for first in range(0, len(paths), JOB):
        jobs.put(first)
    answers: queue.SimpleQueue[tuple[int, list[str]] | Exception] = queue.SimpleQueue()
    count = min(workers(), -(-len(paths) // JOB))
    processes = [_start() for _ in range(count)]
    try:
        for process in processes:
            threading.Thread(target=_feed, args=(process, setup, paths, jobs, answers), daemon=True).start()
        done, errors = 0, dict[int, list[str]]()
        while done < len(paths):
            answer = answers.get()
            if isinstance(answer, Exception):
                raise answer
            first, errors[first] = answer
            done += min(JOB, len(paths) - first)
            if progress is not None:
                progress(done, len(paths))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    if found := [message for first in sorted(errors) for message in errors[first]]:
        raise all_of(found)


def all_of(messages: Sequence[str], shown: int = 5) -> DataError:
    """Return one error that names several."""
    more = f"; and {len(messages) - shown} more" if len(messages) > shown else ""
    return DataError("; ".join(messages[:shown]) + more)


def _start() -> subprocess.Popen[str]:
    """Start a process that decodes. It is no fork, since this process has threads, and reads no script again."""
    library = str(Path(__file__).parents[2])
    found = [path for path in sys.path if not _is_here(path)]  # the working folder may hold the images, and a PIL.py
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([library, *found])}
    command = [sys.executable, "-P", "-s", "-m", "vbcaps.data.worker"]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8", env=environment
    )


def _is_here(path: str) -> bool:
    """Return whether a path is the working folder."""
    try:
        return os.path.samefile(path or ".", ".")
    except OSError:
        return False


def _feed(
    process: subprocess.Popen[str],
    setup: dict[str, Any],
    paths: Sequence[Path],
    jobs: "queue.SimpleQueue[int]",
    answers: "queue.SimpleQueue[tuple[int, list[str]] | Exception]",
) -> None:
    """Give a process one job after another, and pass its answers on."""
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(json.dumps(setup) + "\n")
        while True:
            first = jobs.get_nowait()
            job = dict(first=first, paths=[str(path) for path in paths[first : first + JOB]])
            process.stdin.write(json.dumps(job) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
            if not line:
                raise BrokenPipeError
            answers.put((first, json.loads(line)))
    except queue.Empty:
        return
    except (OSError, ValueError):
        code = process.poll()
        answers.put(DataError(f"a process that decodes images ended early (exit code {code}); its message is above"))


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Wait until no other process fills this folder."""
    if fcntl is None:
        yield
        return
    held = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system that has no locks
            fcntl.flock(held, fcntl.LOCK_EX)
        yield
    finally:
        os.close(held)


def _clear(folder: Path) -> None:
    """Remove what is left of former contents of the folder; a process that has a file mapped keeps it."""
    for path in folder.iterdir():
        if path.suffix == ".npy" or (path.suffix == ".part" and fcntl is not None):
            with contextlib.suppress(OSError):
                path.unlink()


def _bound(entry: Path) -> None:
    """Remove files of the cache, the one used longest ago first, until all together are below ``LIMIT``."""
    files = []
    for path in entry.parent.parent.glob("*/*.npy"):
        with contextlib.suppress(OSError):
            about = path.stat()
            files.append((about.st_mtime, about.st_size, path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= LIMIT:
            return
        if path != entry:
            with contextlib.suppress(OSError):
                path.unlink()
                total -= size

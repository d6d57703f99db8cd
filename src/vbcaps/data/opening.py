"""Open image files, which may be damaged or made to do harm: one kind of error, and bounds of size and memory.

Only formats that Pillow and tifffile decode by themselves are opened, whatever a file's name ends with: for PostScript
Pillow would start another program.
"""

import io
import mmap
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
from PIL import Image, UnidentifiedImageError

from vbcaps.data.contents import Damaged
from vbcaps.data.errors import DataError
from vbcaps.data.npy import map_npy
from vbcaps.disk import opened as opened_file

try:
    import fcntl
except ImportError:  # Windows: processes do not wait for each other there
    fcntl = None  # type: ignore[assignment]

TIFFS = {".tif", ".tiff"}
FORMATS = ("JPEG", "PNG", "TIFF", "WEBP", "GIF", "BMP", "DIB", "PPM")
LARGEST = 1 << 31  # bytes of a file, and of the values of one image
SCANS = 100  # of a progressive JPEG file; programs make about ten
PAGES = 5000  # of a TIFF file
ROOM = 1 << 27  # pixels of all images that threads decode at a time; a larger image is decoded alone
LARGE = 1 << 26  # pixels of an image that no other process decodes at the same time as another large one
REPAIR = "replace it or take it away"
SAID = (Damaged, OSError, SyntaxError, Image.DecompressionBombError)  # errors whose words are meant for people

# An image's pixels are one block of memory, so that those of a large image go back to the system when they are freed.
# Smaller blocks, such as Pillow's of 16 MB, would partly stay with the threads that allocated them.
Image.core.set_block_size(1 << 30)


class Turns:
    """Let images be decoded at the same time as long as they have at most ``ROOM`` pixels together.

    Args:
        shared: a file that several processes have opened, each for itself: large images also wait for theirs.
    """

    def __init__(self, shared: IO[bytes] | None = None):
        self.shared, self.taken, self.changed = shared, 0, threading.Condition()

    @contextmanager
    def take(self, pixels: int) -> Iterator[None]:
        """Wait until an image of so many pixels may be decoded; others wait until the context ends."""
        held = self.shared if fcntl is not None and pixels > LARGE else None
        with self.changed:
            self.changed.wait_for(lambda: not self.taken or self.taken + pixels <= ROOM)
            self.taken += pixels
        try:
            if held is not None:
                fcntl.flock(held, fcntl.LOCK_EX)
            yield
        finally:
            if held is not None:
                fcntl.flock(held, fcntl.LOCK_UN)
            with self.changed:
                self.taken -= pixels
                self.changed.notify_all()


TURNS = Turns()  # of the threads of this process


@contextmanager
def failing(path: Path, what: str) -> Iterator[None]:
    """Turn whatever a library raises on a damaged file into one error, which names the file."""
    try:
        yield
    except DataError:
        raise
    except MemoryError as error:
        raise DataError(f"{path}: there is not enough memory to read it") from error
    except Exception as error:  # Pillow and tifffile fail on damage in dozens of ways
        words = str(error) if isinstance(error, SAID) and str(error) else "it is damaged"
        raise DataError(f"{path}: cannot be read as {what} ({words}): {REPAIR}") from error


def check_file(path: Path) -> None:
    """Raise an error for what is no file, such as a pipe, which would never end, or is too large to be one image."""
    about = path.stat()
    if not stat.S_ISREG(about.st_mode):
        raise Damaged("it is no file but a folder, a pipe or a device")
    if about.st_size > LARGEST:
        raise Damaged(f"it has {about.st_size:,} bytes, more than the {LARGEST:,} of the largest image")


class Whole(io.BufferedReader):
    """A file that reads no more bytes than it has: Python allocates all that a decoder asks for, 4 GiB in a PNG."""

    def __init__(self, path: Path):
        super().__init__(opened_file(path).detach())
        self.size = os.fstat(self.fileno()).st_size

    def read(self, size: int | None = -1, /) -> bytes:
        left = max(self.size - self.tell(), 0)
        return super().read(left if size is None or size < 0 else min(size, left))


@contextmanager
def opened(path: Path) -> Iterator[Image.Image | None]:
    """Open a picture; None for a TIFF file that is no picture, and that only tifffile reads whole."""
    tiff = path.suffix.lower() in TIFFS
    with failing(path, "an image"), ExitStack() as files:
        check_file(path)
        try:
            image = Image.open(files.enter_context(Whole(path)), formats=FORMATS)
        except UnidentifiedImageError as error:
            if not tiff:
                raise Damaged(f"it has none of the formats {', '.join(FORMATS)}") from error
            image = None
        if image is None:
            yield None
            return
        with image:
            if image.info.get("progressive"):
                with opened_file(path) as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                    check_scans(image, content)
            yield None if tiff and not _is_picture(image) else image


@contextmanager
def decoding(image: Image.Image, turns: Turns) -> Iterator[None]:
    """Wait for the turn of an image that is open, and free its pixels before the turn of the next begins."""
    with turns.take(image.width * image.height), closing(image):
        yield


def check_scans(image: Image.Image, content: bytes | mmap.mmap) -> None:
    """Raise an error for a progressive JPEG file of very many scans: each is a few bytes, and goes over all pixels."""
    if image.format != "JPEG" or not image.info.get("progressive"):
        return
    at = -1
    for _ in range(SCANS + 1):
        at = content.find(b"\xff\xda", at + 1)
        if at < 0:
            return
    raise Damaged(f"it has more than {SCANS} scans")


def has_pages(image: Image.Image) -> bool:
    """Return whether a file has a second page or frame; to count them takes minutes where it says that it has many."""
    try:
        image.seek(1)
    except EOFError:
        image.seek(0)
        return False
    except Exception:  # one that Pillow does not know
        return True
    image.seek(0)
    return True


def _is_picture(image: Image.Image) -> bool:
    """Return whether Pillow gives a TIFF file whole: one page, and no more bits than its mode has."""
    if has_pages(image):
        return False
    tags = getattr(image, "tag_v2", {})
    if image.mode in ("F", "I") or image.mode.startswith("I;16"):
        return tags.get(277, 1) == 1  # of planes of floats one after another Pillow gives the first
    bits = tags.get(258, (8,))
    return max(bits if isinstance(bits, tuple) else (bits,)) <= 8


@contextmanager
def opened_tiff(path: Path) -> Iterator[Any]:
    """Open the first series of a TIFF file with tifffile."""
    try:
        import tifffile
    except ImportError:
        raise DataError(
            f"{path}: has channels, bits or pages that only tifffile reads: pip install 'vbcaps[tiff]'"
        ) from None
    with failing(path, "an image"):
        check_file(path)
        with tifffile.TiffFile(path, _multifile=False) as file:
            with suppress(IndexError):
                file.pages[PAGES]  # series look for all pages, which takes minutes where a file has very many
                raise Damaged(f"it has more than {PAGES:,} pages")
            series = file.series[0]
            if series.nbytes > LARGEST:
                raise Damaged(f"its {series.shape} values of {series.dtype} take {series.nbytes:,} bytes")
            yield series


def load_array(path: Path) -> np.ndarray:
    """Map a ``.npy`` file into memory, so that a header that promises too much allocates nothing."""
    with failing(path, "a NumPy array"):
        check_file(path)
        return map_npy(path)

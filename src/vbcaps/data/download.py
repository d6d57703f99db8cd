"""Fetch the official files, and check their state."""

import errno
import hashlib
import os
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable, Iterable
from http.client import HTTPException
from pathlib import Path
from typing import NamedTuple

from vbcaps.data.contents import check_list
from vbcaps.data.dataset import DataError, data_folder
from vbcaps.data.files import find, read, reading
from vbcaps.data.medmnist_table import MULTI_LABEL
from vbcaps.data.official import OFFICIAL, OfficialFile, folder_name
from vbcaps.data.stored import locked
from vbcaps.disk import NO_LINK, NO_WAIT, opened

DISK = (errno.EACCES, errno.EDQUOT, errno.ENOSPC, errno.EROFS)  # no mirror helps
BLOCK, TIMEOUT = 1 << 18, 30  # bytes, seconds without a byte
PATIENCE, SLOWEST = 60.0, 1000  # seconds after which a download must have had so many bytes a second
Progress = Callable[[str, int, int | None], None]  # name of the file, bytes so far, bytes in all where known


class FileState(NamedTuple):
    """One row of ``vbcaps data check``."""

    name: str
    state: str  # "ok", "damaged", "missing"; "readable": no sum is known; "present": not an official file
    path: Path
    note: str = ""


def check(name: str, folder: str | Path | None = None) -> list[FileState]:
    """Return the state of each official file of a dataset, and of files that stand in for them."""
    place = data_folder(folder) / folder_name(name)
    rows = [_state(place, file) for file in _official(name)]
    if any(row.state == "missing" for row in rows) and place.is_dir() and folder_name(name) == name:
        known = {row.path for row in rows}
        others = (path for path in sorted(place.rglob("*")) if path.is_file() and path.suffix != ".part")
        rows += [FileState(path.name, "present", path, "not an official file") for path in others if path not in known]
    return rows


def fetch(name: str, folder: str | Path | None = None, progress: Progress | None = None) -> list[FileState]:
    """Fetch the official files of a dataset that are missing; check each against its sum before it gets its name.

    affNIST trains on MNIST, which is fetched too.
    """
    files = _official(name)
    before = fetch("mnist", folder, progress) if name == "affnist" else []
    place = data_folder(folder) / folder_name(name)
    if any(_state(place, file).state in ("missing", "damaged") for file in files):
        try:
            place.mkdir(parents=True, exist_ok=True)
            with locked(place):  # by the time it is this process's turn, another may have fetched them
                for file in files:
                    if _state(place, file).state in ("missing", "damaged"):
                        _fetch(name, file, place, progress)
        except OSError as error:
            raise DataError(f"{place}: cannot be written to ({error})") from error
    return before + [_state(place, file) for file in files]


def _official(name: str) -> tuple[OfficialFile, ...]:
    if name in MULTI_LABEL:
        raise DataError(MULTI_LABEL[name])
    if name not in OFFICIAL:
        raise DataError(f"{name!r} is not a dataset: datasets are {', '.join(OFFICIAL)}")
    return OFFICIAL[name]


def _state(place: Path, file: OfficialFile) -> FileState:
    path = find(place, file.name)
    if path is None:
        return FileState(file.name, "missing", place / file.name)
    if file.md5 is not None:  # these files are large, and are not read into memory
        good = _digest(path, "md5") == file.md5
        return FileState(
            file.name, "ok" if good else "damaged", path, "" if good else "its MD5 is not the published one"
        )
    try:
        content = read(path)
    except DataError as error:
        return FileState(file.name, "damaged", path, str(error))
    if path.name == file.name and path.stat().st_size == file.size:  # then ``read`` has held it to the published sum
        return FileState(file.name, "ok", path)
    if file.content is None:
        return FileState(file.name, "readable", path, "no sum is published to hold it to")
    if hashlib.sha256(content).hexdigest() == file.content:
        return FileState(file.name, "ok", path, "packed differently, contents as published")
    return FileState(file.name, "damaged", path, "its contents are not the published ones")


def _fetch(name: str, file: OfficialFile, place: Path, progress: Progress | None) -> None:
    reasons = fetch_file(file, file.addresses, place, progress)
    if not reasons:
        return
    raise DataError(
        f"{file.name} could not be fetched:",
        *(f"  {reason}" for reason in reasons),
        f"Without a network, place the files of {name} by hand:",
        *(f"  {place / other.name}" for other in OFFICIAL[name]),
    )


def fetch_file(file: OfficialFile, addresses: Iterable[str], folder: Path, progress: Progress | None) -> list[str]:
    """Fetch a file from the first address that has it; it gets its name in the folder when its sum is right.

    Returns:
        Why each address did not serve, or nothing if one did. A folder that cannot be written to raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    part, reasons = folder / f"{file.name}.part", []
    for address in addresses:
        try:
            _download(address, part, file, progress)
        except (OSError, HTTPException, DataError, ValueError) as error:  # ValueError: it leads to no address
            if isinstance(error, OSError) and error.errno in DISK:
                raise
            reasons.append(f"{address}: {error}")
            continue
        os.replace(part, folder / file.name)
        return []
    return reasons


def _download(address: str, part: Path, file: OfficialFile, progress: Progress | None) -> None:
    """Download to ``part``, resuming an earlier attempt; delete a file that is not the official one."""
    if part.is_symlink() or (part.exists() and not part.is_file()):  # somebody's, to have another file written to
        part.unlink()
    have = part.stat().st_size if part.is_file() else 0
    headers = {"User-Agent": "vbcaps"} | ({"Range": f"bytes={have}-"} if have else {})
    request = urllib.request.Request(address, headers=headers)
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code != 416:  # nothing is left to send: the part is whole, or not of this file
            raise
    else:
        with response, open(part, "ab" if response.status == 206 else "wb", opener=not_by_link) as out:
            done = out.tell()
            left = response.headers.get("Content-Length")
            total = done + int(left) if left and left.isascii() and left.isdigit() else file.size
            most = max(file.size or file.most, have)
            begun, before = time.monotonic(), done
            while block := response.read1(min(BLOCK, most + 1 - done)):  # what has come, so that the clock is looked at
                out.write(block)
                took = time.monotonic() - begun
                if took > PATIENCE and done + len(block) - before < SLOWEST * took:
                    raise DataError(f"it sends less than {SLOWEST:,} bytes a second")
                done += len(block)
                if progress:
                    progress(file.name, done, total)
                if done > most:
                    break
            out.flush()
            os.fsync(out.fileno())
            if done > most:
                out.truncate(0)
                raise DataError(f"it sends more than the {most:,} bytes of the file")
            if total is not None and done < total:
                raise DataError(f"the connection ended after {done} of {total} bytes")
    if _genuine(part, file):
        return
    part.unlink()
    if not have:
        raise DataError(
            f"the download is not the published file: its {'MD5' if file.md5 else 'SHA-256'} differs, or its archive "
            "is damaged"
        )
    _download(address, part, file, progress)  # from the start: it may be the earlier attempt's fault


def not_by_link(path: str, flags: int) -> int:
    """Open a file to be written, as ``open`` asks for it, unless its name is a link."""
    return os.open(path, flags | NO_LINK | NO_WAIT, 0o666)


def _digest(path: Path, kind: str) -> str:
    with opened(path) as data:
        return hashlib.file_digest(data, kind).hexdigest()


def _genuine(part: Path, file: OfficialFile) -> bool:
    if file.md5 is not None:
        return _digest(part, "md5") == file.md5
    if file.sha256 is None:  # only zip archives have no published sum, and they carry sums themselves
        try:
            with reading(part), opened(part) as data:
                check_list(data, part.stat().st_size)
                with zipfile.ZipFile(data) as archive:
                    return sum(one.file_size for one in archive.infolist()) <= 2 * file.most and not archive.testzip()
        except DataError:
            return False
    return _digest(part, "sha256") == file.sha256

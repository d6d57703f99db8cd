"""The folders in ``runs/``: ``NAME-1``, ``NAME-2`` and so on, and ``latest``, which leads to the newest run."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from vbcaps.disk import put
from vbcaps.training.files import RunError
from vbcaps.training.runfolder import LATEST

RUNS = Path("runs")


@contextmanager
def new_run(name: str, chosen: Path | None = None, make: bool = True, root: Path = RUNS) -> Iterator[Path]:
    """Yield the folder for a run: ``chosen``, or a new one in ``root`` with the next number after its name.

    Two processes never get the same new folder, since only one of them can create it. A folder that stays empty because
    the run could not begin is removed. Without ``make`` nothing is created, because another process does it.
    """
    if chosen is not None:
        yield chosen
        return
    taken = (re.fullmatch(rf"{re.escape(name)}-(\d+)", path.name) for path in root.glob("*"))
    number = max((int(match[1]) for match in taken if match), default=0) + 1
    had_root = root.exists()
    while make:
        new = root / f"{name}-{number}"
        try:
            new.mkdir(parents=True)
            break
        except OSError as error:
            if not os.path.lexists(new):
                raise RunError(f"cannot make the folder {new}: {error.strerror}; choose one with --out") from error
            number += 1
    folder = root / f"{name}-{number}"
    try:
        yield folder
    finally:
        if make:
            with suppress(OSError):  # it has files, as it should
                folder.rmdir()
                if not had_root:
                    root.rmdir()


def set_latest(folder: Path) -> None:
    """Make ``runs/latest`` lead to a run beside it: as a symbolic link, or else as a file with the run's name."""
    latest, beside = folder.with_name(LATEST), folder.with_name(f".{LATEST}-{os.getpid()}")
    if latest.is_dir() and not latest.is_symlink():  # somebody's run
        return
    with suppress(OSError):  # a run goes on without this name
        beside.unlink(missing_ok=True)
        try:
            beside.symlink_to(folder.name, target_is_directory=True)
        except (OSError, NotImplementedError):
            put(beside, f"{folder.name}\n".encode())
        os.replace(beside, latest)


def newest_run() -> Path:
    """Return the run in ``runs/`` whose weights were written last."""
    from vbcaps.weights.find import list_models

    found = [path for inner in ("*", "*/seed*", "*/fold*") for path in RUNS.glob(f"{inner}/last.safetensors")]
    found = [path for path in found if path.relative_to(RUNS).parts[0] != LATEST]  # the same run again
    if not found:
        raise RunError(
            f"there are no weights in {RUNS}/: train some with `vbcaps train`, or give --weights a file or one of "
            f"the trained networks: {', '.join(list_models())}"
        )
    return max(found, key=lambda path: path.stat().st_mtime).parent

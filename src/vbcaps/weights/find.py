"""Find weights by name, in a run's folder, or in a file.

A name is looked for in the package, in the folder that `VBCAPS_WEIGHTS` names, in `weights/` of the checkout that the
package is used from, and in the user's cache; else its file is fetched into the cache (fetch.py). `published.json`
lists all names, with size and SHA-256 of each file; `tools/published.py` makes it.

Nothing here needs PyTorch.
"""

import hashlib
import json
import os
import re
from pathlib import Path
from typing import Literal, NamedTuple, overload

from vbcaps.disk import RECIPE, read_bytes, read_text
from vbcaps.training.files import RunError
from vbcaps.training.recipe import nearest
from vbcaps.training.runfolder import fold_folders, resolved, seed_folders
from vbcaps.weights.fetch import FetchError, Progress, fetch_weights

FOLDER = Path(__file__).parent


class Published(NamedTuple):
    """What is known of a network without its file.

    Args:
        size: bytes of the file.
        sha256: of the file.
        dataset: the name of the dataset that it was trained on.
        test_error: the share of wrong answers on its test images.
        health: the main measures of what its capsules do, by their names in the row of `vbcaps.health.Health`; None for
            a CNN, and where nobody measured it.
    """

    size: int
    sha256: str
    dataset: str
    test_error: float
    health: dict[str, float | None] | None = None


class Place(NamedTuple):
    """A folder that is searched for weights."""

    title: str
    folder: Path
    checked: bool  # whether a file there must have the published SHA-256


def published() -> dict[str, Published]:
    """Return the networks whose files anybody can have, by name."""
    path = FOLDER / "published.json"
    try:
        listed = json.loads(read_text(path, RECIPE))
        found = {name: Published(**fields) for name, fields in listed.items()}
        for name, fields in found.items():
            of_health = fields.health.values() if isinstance(fields.health, dict) else [fields.health]
            known = all(x is None or type(x) in (int, float) for x in of_health)
            if not re.fullmatch(r"\w+", name) or [type(x) for x in fields[:4]] != [int, str, str, float] or not known:
                raise ValueError(name)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(f"{path} is damaged: install vbcaps again") from error
    return found


@overload
def list_models(*, details: Literal[False] = False) -> list[str]: ...


@overload
def list_models(*, details: Literal[True]) -> dict[str, Published]: ...


def list_models(*, details: bool = False) -> list[str] | dict[str, Published]:
    """Return the names of the trained networks, for ``vbcaps.load``, which fetches those that are not here yet.

    Args:
        details: return a dict from each name to what is known of the network without its file: ``dataset``,
            ``test_error``, ``size`` and ``health``, the main measures of what its capsules do.

    Example:
        >>> import vbcaps
        >>> "smallnorb" in vbcaps.list_models()
        True
        >>> vbcaps.list_models(details=True)["fashion_evidence"].health["most_votes"] > 0.9
        True
    """
    if details:
        return published()
    return sorted({*(path.stem for path in FOLDER.glob("*.safetensors")), *published()})


def at_hand() -> list[str]:
    """Return the names of the trained networks that need not be fetched."""
    return [name for name in list_models() if present(name)]


def places() -> list[Place]:
    """Return the folders that are searched for weights, in their order."""
    found = [Place("in the package", FOLDER, False)]
    if named := os.environ.get("VBCAPS_WEIGHTS"):
        found.append(Place("in VBCAPS_WEIGHTS", Path(os.path.expanduser(named)), True))
    source = FOLDER.resolve().parents[1]
    if source.name == "src" and (source.parent / "pyproject.toml").is_file():
        found.append(Place("in the checkout", source.parent / "weights", False))
    if cache := cache_folder():
        found.append(Place("cached", cache, True))
    return found


def cache_folder() -> Path | None:
    """Return the folder for weights that are fetched, or None for a user without a home."""
    if named := os.environ.get("VBCAPS_CACHE"):
        return Path(os.path.expanduser(named)) / "weights"
    try:
        cache = os.environ.get("XDG_CACHE_HOME") or os.environ.get("LOCALAPPDATA") or Path.home() / ".cache"
    except RuntimeError:
        return None
    return Path(cache).expanduser() / "vbcaps" / "weights"


def present(name: str) -> tuple[Path, Place] | None:
    """Return the file of a trained network and where it is, or None if it must be fetched.

    A damaged file in the cache counts as missing; one in `VBCAPS_WEIGHTS`, which is the user's, is an error.
    """
    for place in places():
        path = place.folder / f"{name}.safetensors"
        if not path.is_file():
            continue
        if not place.checked or is_published(path):
            return path, place
        if place.folder != cache_folder():
            raise RunError(f"{path} is damaged or another network: its SHA-256 is not that of {name}; remove it")
    return None


def is_published(path: Path) -> bool:
    """Return whether a file is the published one of its name."""
    fields = published().get(path.stem)
    if fields is None or path.stat().st_size != fields.size:  # nothing larger is read
        return False
    return hashlib.sha256(read_bytes(path, fields.size)).hexdigest() == fields.sha256


def belongs(path: Path) -> Place | None:
    """Return the place of a trained network's file, or None for any other weights file."""
    known = path.suffix == ".safetensors" and path.stem in list_models()
    return next((place for place in places() if known and path.parent == place.folder), None)


def weights_file(name: str | Path, progress: Progress | None = None) -> Path:
    """Return the weights file that a name or path means; that of a name is fetched if it is not here.

    Args:
        name: a weights file; a run's folder, which means its best weights if a validation share chose them, else its
            last; or one of ``list_models()``.
        progress: called while a file is fetched, with its name, the bytes so far, and the bytes in all.
    """
    path = resolved(Path(name))
    for file in (path, path / "best.safetensors", path / "last.safetensors"):
        if os.path.isfile(file):  # False also for a name that is too long
            return file
    if str(name) in list_models():
        return named_file(str(name), progress)
    if os.path.exists(path) or path.suffix or len(path.parts) > 1:
        if seeds := seed_folders(path):
            raise RunError(f"{path} has a run for each seed: choose one, as {seeds[0]}")
        if folds := fold_folders(path):
            raise RunError(f"{path} has a run for each fold: choose one, as {folds[0]}")
        return path / "last.safetensors" if path.is_dir() else path
    there = f"there are {', '.join(list_models())}" if list_models() else "there are none in this version"
    raise RunError(
        f"{name} is neither a file nor the folder of a run, and no weights called {str(name)!r} come with the "
        f"package{nearest(name, list_models())}; {there}"
    )


def named_file(name: str, progress: Progress | None = None) -> Path:
    """Return the file of a trained network, which is fetched into the cache if it is nowhere yet."""
    if found := present(name):
        return found[0]
    folder, fields = cache_folder(), published()[name]
    if folder is None:
        raise RunError(f"there is no folder to fetch the weights {name} into: set VBCAPS_CACHE to one")
    try:
        return fetch_weights(name, fields.size, fields.sha256, folder, progress)
    except FetchError as error:
        raise RunError(str(error)) from error

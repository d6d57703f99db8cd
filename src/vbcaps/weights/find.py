"""Find weights by name: in the package (``weights/NAME.safetensors``), in a run's folder, or in a file."""

from pathlib import Path

from vbcaps.training.files import RunError
from vbcaps.training.recipe import nearest
from vbcaps.training.runfolder import resolved, seed_folders

FOLDER = Path(__file__).parent


def list_models() -> list[str]:
    """Return the names of the trained networks that come with the package, for ``vbcaps.load``.

    Example:
        >>> import vbcaps
        >>> "smallnorb" in vbcaps.list_models()
        True
    """
    return sorted(path.stem for path in FOLDER.glob("*.safetensors"))


def weights_file(name: str | Path) -> Path:
    """Return the weights file that a name or path means.

    Args:
        name: a weights file; a run's folder, which means its best weights if a validation share chose them, else its
            last; or one of ``list_models()``.
    """
    path = resolved(Path(name))
    for file in (path, path / "best.safetensors", path / "last.safetensors"):
        if file.is_file():
            return file
    if str(name) in list_models():
        return FOLDER / f"{name}.safetensors"
    if path.exists() or path.suffix or len(path.parts) > 1:
        if seeds := seed_folders(path):
            raise RunError(f"{path} has a run for each seed: choose one, as {seeds[0]}")
        return path / "last.safetensors" if path.is_dir() else path
    there = f"there are {', '.join(list_models())}" if list_models() else "there are none in this version"
    raise RunError(
        f"{name} is neither a file nor the folder of a run, and no weights called {str(name)!r} come with the "
        f"package{nearest(name, list_models())}; {there}"
    )

"""Networks on the Hugging Face Hub: ``save_pretrained``, ``push_to_hub`` and ``from_pretrained`` of ``Model``.

They use the hooks of ``huggingface_hub.PyTorchModelHubMixin``. A repository has ``model.safetensors``, which is a
weights file of vbcaps, ``config.json`` and a model card; nothing is pickled, neither written nor read.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from vbcaps.training.files import RunError, read_json, write, write_json
from vbcaps.training.recipe import Recipe
from vbcaps.weights.card import TAGS, card_text, data_of, licence_of, published, title_of
from vbcaps.weights.file import pack_weights, read_weights
from vbcaps.weights.model import Model, model_of

try:
    from huggingface_hub import EvalResult, ModelCard, ModelCardData, PyTorchModelHubMixin, hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, HFValidationError
except ImportError as missing:
    raise RunError("the Hugging Face Hub needs huggingface_hub: pip install 'vbcaps[hub]'") from missing

WEIGHTS = "model.safetensors"
DOWNLOAD = ("revision", "cache_dir", "force_download", "local_files_only", "token")  # options of hf_hub_download


class Shared(PyTorchModelHubMixin, library_name="vbcaps", tags=list(TAGS), pipeline_tag="image-classification"):
    """A model as huggingface_hub handles it.

    Args:
        model: the network; ``_from_pretrained`` makes one.
        name: what ``from_pretrained`` takes to load it, for the card.
        licence: of the weights, for the card.
    """

    def __init__(self, model: Model, name: str, licence: str | None = None):
        self.model, self.name, self.licence = model, name, licence

    def _save_pretrained(self, save_directory: Path) -> None:
        model, open_to_all = self.model, published(self.model)
        densities = {} if model.changed() else model.densities
        recipe = Recipe.from_json(open_to_all["recipe"])
        content = pack_weights(model.net, recipe, model.classes, model.view, open_to_all["about"], densities)
        write(save_directory / WEIGHTS, content)
        write_json(save_directory / "config.json", dict(library_name="vbcaps", classes=model.classes, **open_to_all))

    @classmethod
    def _from_pretrained(cls, *, model_id: str, device: str | torch.device = "cpu", **options: Any) -> "Shared":
        folder = Path(model_id)
        if folder.is_dir():
            file = folder / WEIGHTS
            if not file.is_file():
                raise RunError(f"{folder} has no {WEIGHTS}, which save_pretrained writes")
        else:
            options = {key: value for key, value in options.items() if key in DOWNLOAD}
            file = Path(hf_hub_download(model_id, WEIGHTS, **options))
        return cls(model_of(read_weights(file), file, device), model_id)

    def generate_model_card(self, *_: Any, **__: Any) -> ModelCard:
        model, about = self.model, published(self.model)["about"]
        results = None
        if about.get("test_error") is not None:
            recipe, dataset = published(model)["recipe"], data_of(model)
            kind = recipe["data"] or recipe["dataset"]
            accuracy = round(1 - about["test_error"], 6)
            results = [EvalResult("image-classification", kind, dataset, "accuracy", accuracy, dataset_split="test")]
        facts = self._hub_mixin_info.model_card_data.to_dict() | dict(
            model_name=title_of(model), license=self.licence, eval_results=results
        )
        return ModelCard(f"---\n{ModelCardData(**facts)}\n---\n\n{card_text(model, self.name, self.licence)}")


def save_pretrained(model: Model, folder: str | Path, licence: str | None = None) -> Path:
    """Write what is pushed into a folder; a card that is there already stays."""
    folder = Path(folder)
    try:
        for written in (folder / "README.md", folder / "config.json"):  # which huggingface_hub would write by a link
            if written.is_symlink() and not written.exists():
                written.unlink()
        Shared(model, folder.resolve().name, licence or licence_of(model)).save_pretrained(folder)
    except OSError as error:
        raise RunError(f"cannot write in {folder}: {error.strerror or error}") from error
    return folder


def push_to_hub(model: Model, repo_id: str, licence: str | None = None, **options: Any) -> str:
    """Write weights, configuration and card into a repository of the Hub; return the address of the commit."""
    with clear_hub_errors(repo_id):
        return Shared(model, repo_id, licence or licence_of(model)).push_to_hub(repo_id, **options)


def from_pretrained(name: str | Path, device: str | torch.device = "cpu", **options: Any) -> Model:
    """Return the model of a repository of the Hub, or of a folder that ``save_pretrained`` wrote."""
    if unknown := sorted(options.keys() - set(DOWNLOAD)):
        raise TypeError(f"from_pretrained has no argument {unknown[0]!r}; it takes device, {', '.join(DOWNLOAD)}")
    if os.path.lexists(config := Path(name) / "config.json"):
        read_json(config)  # huggingface_hub reads it, too, but fails unclearly where it is damaged, and waits at a pipe
    with clear_hub_errors(str(name)):
        return Shared.from_pretrained(name, device=device, **options).model


@contextmanager
def clear_hub_errors(name: str) -> Iterator[None]:
    """Say in one sentence what the Hub did not do."""
    try:
        yield
    except RunError:
        raise
    except HFValidationError as error:
        raise ValueError(f"{name!r} is neither a folder nor the name of a repository, USER/NAME: {error}") from error
    except EntryNotFoundError as error:
        raise RunError(f"{name}: there is no {WEIGHTS} on the Hub, or no connection to it: {first(error)}") from error
    except (HfHubHTTPError, OSError) as error:
        raise RunError(f"{name}: the Hub answers with an error: {first(error)}") from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RunError(f"{name}: its config.json is damaged: {first(error)}") from error


def first(error: Exception) -> str:
    """Return the first line of an error's text."""
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__

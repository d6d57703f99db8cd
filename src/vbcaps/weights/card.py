"""The model card of a network: what it is, how well it does, what it is for, and how to load it."""

from typing import Any

import vbcaps
from vbcaps.data import FACTS
from vbcaps.health import Health
from vbcaps.health.findings import findings
from vbcaps.weights import find
from vbcaps.weights.inputs import side_of
from vbcaps.weights.model import ROUTING_NAMES, Model

PAPER = "https://arxiv.org/abs/1905.11455"
CITATION = """@inproceedings{desousaribeiro2020capsule,
  title     = {Capsule Routing via Variational Bayes},
  author    = {De Sousa Ribeiro, Fabio and Leontidis, Georgios and Kollias, Stefanos},
  booktitle = {Proceedings of the AAAI Conference on Artificial Intelligence},
  volume    = {34}, number = {4}, pages = {3749--3756}, year = {2020},
  doi       = {10.1609/aaai.v34i04.5785}
}"""
TAGS = ("capsule-networks", "image-classification", "uncertainty", "vbcaps")
LICENCES = {"apache-2.0": "Apache-2.0"}  # names of the Hub, as people write them


def data_of(model: Model) -> str:
    """Return the name of the images that the network was trained on; of a folder, only its last part."""
    recipe = published(model)["recipe"]
    return recipe["data"] or FACTS[recipe["dataset"]].title


def published(model: Model) -> dict[str, Any]:
    """Return recipe and facts of a network without folders of the computer that trained it."""
    recipe, about = model.recipe.to_json(), {} if model.changed() else dict(model.about)
    if recipe["data"]:
        recipe["data"] = last_part(recipe["data"])
    if isinstance(about.get("began_with"), dict):
        about["began_with"] = about["began_with"] | dict(weights=last_part(str(about["began_with"].get("weights", ""))))
    return dict(recipe=recipe, about=about)


def last_part(path: str) -> str:
    """Return the last part of a path of any system."""
    return path.replace("\\", "/").rstrip("/").rsplit("/", 1)[-1]


def licence_of(model: Model) -> str | None:
    """Return the licence of a trained network of ours, as the Hub writes it; None for a network of your own."""
    own = model.changed() or model.file is None or find.belongs(model.file) is None
    return None if own else "apache-2.0"


def card_text(model: Model, name: str, licence: str | None) -> str:
    """Return the Markdown of the card, without the YAML that stands before it.

    Args:
        model: the network.
        name: what ``Model.from_pretrained`` takes to load it.
        licence: of the weights; None if nobody has said it.
    """
    sections = (
        f"# {title_of(model)}\n\n{what_it_is(model)}",
        f"## How to load it\n\n{how_to_load(model, name)}",
        f"## Test error\n\n{how_good(model)}",
        *([f"## What its capsules do\n\n{how_healthy(model)}"] if model.recipe.network != "cnn" else []),
        f"## Intended use\n\n{intended(model)}",
        f"## Limits\n\n{limits(model)}",
        f"## Training\n\n{training(model)}",
        f"## Citation\n\nThe routing is that of [Capsule Routing via Variational Bayes]({PAPER}):\n\n"
        f"```bibtex\n{CITATION}\n```",
        f"## Licence\n\n{LICENCES.get(licence, licence) if licence else 'Whoever published this network named none.'}",
    )
    return "\n\n".join(sections) + "\n"


def title_of(model: Model) -> str:
    return f"{model.recipe.name}: {kind_of(model)} for {data_of(model)}"


def kind_of(model: Model) -> str:
    kinds = dict(caps="a capsule network", cnn="a convolutional network", vae="a Capsule-VAE")
    return kinds[model.recipe.network]


def what_it_is(model: Model) -> str:
    recipe, parameters = model.recipe, sum(p.numel() for p in model.net.parameters())
    routing = (
        "" if recipe.network == "cnn" else f" with {ROUTING_NAMES[recipe.routing]} routing in {recipe.iters} iterations"
    )
    made = f"It is {kind_of(model)}{'' if recipe.network == 'cnn' else routing}, and has {parameters:,} parameters."
    tells = f"It tells {model.num_classes} classes of images apart"
    if recipe.objects > 1:
        tells = (
            f"It names {recipe.objects} overlapping objects in an image, of different classes of {model.num_classes}"
        )
    return f"{tells}: {', '.join(model.classes)}. {made} It was made with the library vbcaps {vbcaps.__version__}."


def how_to_load(model: Model, name: str) -> str:
    side, channels = side_of(model.recipe), model.net.in_channels
    plural = "s" if channels > 1 else ""
    code = f'from vbcaps import Model\n\nmodel = Model.from_pretrained("{name}")\nprobabilities = model.predict(images)'
    return (
        f"```python\n{code}\n```\n\nIt needs `pip install 'vbcaps[hub]'`. `images` are arrays, tensors, PIL images or "
        f"paths, which are resized to {side} x {side} with {channels} channel{plural}. The file is "
        "in the safetensors format, and nothing in it is executed."
    )


def how_good(model: Model) -> str:
    about = published(model)["about"]
    if about.get("test_error") is None:
        return "It was not tested, or its weights have changed since."
    several = model.recipe.objects > 1
    said = f"{100 * about['test_error']:.2f}% of the test images of {data_of(model)} are classified wrongly"
    if several:
        said = (
            f"In {100 * about['test_error']:.2f}% of images, put together from the test images of {data_of(model)}, "
            "not all objects are named rightly"
        )
    said += f", in one run after {about['epoch']} epochs." if about.get("epoch") else "."
    if model.temperature != 1:
        what = "sigmoid" if several else "softmax"
        said += f" Probabilities are the {what} of the logits over a temperature of {model.temperature:g}."
    else:
        said += " No temperature was fitted: its probabilities may be too sure."
    return said


def how_healthy(model: Model) -> str:
    """Return the findings of the record of health that the model keeps."""
    kept = published(model)["about"].get("health")
    if kept is None:
        return "It was not measured, or its weights have changed since; `vbcaps health` measures it."
    found = Health.from_json(kept)
    said = "\n".join(f"- {sentence}." for sentence in findings(found))
    return f"Measured on {found.of or f'{found.images} images'}:\n\n{said}"


def intended(model: Model) -> str:
    return (
        f"Research on capsule networks and on their uncertainty, and classification of images like those of "
        f"{data_of(model)}. Fine-tune it for other images."
    )


def limits(model: Model) -> str:
    return (
        f"It answers with one of its {model.num_classes} classes whatever an image shows, and its test error says "
        f"nothing of images that are unlike those of {data_of(model)}. It was not examined for fairness or for "
        "attacks, and decides nothing about people by itself."
    )


def training(model: Model) -> str:
    recipe, about = model.recipe, published(model)["about"]
    steps = f"{recipe.epochs} epochs in batches of {recipe.batch}, seed {recipe.seed}"
    how = f"The recipe `{recipe.name}` trains it: {steps}."
    if about.get("began_with"):
        how += f" It began with the weights {about['began_with']['weights']}."
    if about.get("validation_error") is not None:
        how += (
            f" Of its epochs the best on held-out images was kept, with {100 * about['validation_error']:.2f}% wrong."
        )
    return how + " All fields of the recipe are in `config.json`."

"""What the explorer's page shows: every function takes what the page sent, and returns what is drawn, as plain JSON.

The numbers are those of ``model.predict``, `vbcaps.uncertainty.scores` and ``net.trace``. A trace is made once for each
network and image; the panels share it.

Axes: n image, c channel, t iteration, j parent type, d pose entry, s sample; y x row and column.
"""

import hashlib
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vbcaps.explore.networks import COLUMNS, Images, Networks, capsules, described, kind_of, shown_side, title_of
from vbcaps.explore.pictures import CHANGES, Refused, as_png, changed, encoded, from_png, read_changes
from vbcaps.inference import exact_convolutions
from vbcaps.layers import Capsules
from vbcaps.models import CapsNet, ConvNet, NetworkTrace
from vbcaps.routing import Mixture, Posterior
from vbcaps.trace import LAYERS, cloud_of, frame_of_parts, map_sizes, parts_of, receptive_field, types_of
from vbcaps.uncertainty import percentiles, probability_samples, scores
from vbcaps.vae import CapsVAE, capsules_of
from vbcaps.weights.model import Model

KEPT = 12  # traces that are kept; the largest takes 30 MB
SAMPLES = 200  # of the class capsules, for the interval of the probabilities
INTERVAL = (0.05, 0.95)
SWEEPS = dict(rotate=(-90.0, 90.0), right=(-35.0, 35.0), down=(-35.0, 35.0))
POINTS = 25  # of a sweep

# What each score is called on the page, and the paper's symbols for it.
SCORES = dict(
    max_softmax=("maximum softmax", "1 − max p"),
    entropy=("entropy", "H[p]"),
    energy=("energy", "−ln Σ exp z"),
    precision=("precision", "−E[ln|Λⱼ|]"),
    pose_entropy=("pose entropy", "H[q(μⱼ, Λⱼ)]"),
    class_entropy=("class entropy", "H[q(π)]"),
    kl=("divergence", "−KL"),
    votes=("votes", "−rⱼ"),
    alpha=("expected share", "−αⱼ / Σ α"),
    epistemic=("variance of mean", "1 / (κⱼ νⱼ ψⱼ)"),
    elbo=("ELBO per vote", "−L(q) / Σ aᵢ"),
)
DENSITIES = {
    "class_caps.kappa": ("evidence density", "−ln p(ln κ)"),
    "class_caps.m": ("pose density", "−ln p(m)"),
    "conv_caps1.m": ("density of parts", "−ln p(m)"),
    "logits": ("logit density", "−ln p(z)"),
    "features": ("feature density", "−ln p(f)"),
}
OTHER = ("density", "−ln p")


class Scene(NamedTuple):
    """What a page looks at: a network and an image, and the image as the sliders changed it."""

    name: str
    model: Model
    original: Tensor  # 1 c side side   uint8
    values: dict[str, float]
    pixels: Tensor  # 1 c side side   uint8


class Explorer:
    """Answers for all pages. It keeps networks and traces, and nothing that belongs to a page.

    Args:
        networks: the networks that may be chosen.
    """

    def __init__(self, networks: Networks):
        self.networks = networks
        self.traces: OrderedDict[tuple[str, bytes], NetworkTrace] = OrderedDict()
        self.lock = threading.RLock()  # PyTorch uses all cores for one answer: two at once would be slower

    # --- networks and images -----------------------------------------------------------------------------------------

    def catalogue(self) -> dict[str, Any]:
        """Return the networks to choose from, and the sliders."""
        models = self.networks.models
        return dict(
            models=[dict(name=name, title=described(models[name])) for name in self.networks.sorted()],
            model=self.networks.first,
            changes=[dict(name=name, **change._asdict()) for name, change in CHANGES.items()],
            sweeps=list(SWEEPS),
        )

    def about(self, name: object) -> dict[str, Any]:
        """Return what the page must know of a network: its classes, layers and twins, and images to choose from."""
        model = self.networks.model(name)
        name, net = str(name), capsules_of(model.net)
        with self.lock:
            images = self.networks.images(name)
        layers = [] if net is None else [(one, *map_sizes(net, one)[-1], getattr(net, one).out_caps) for one in LAYERS]
        keys = ("name", "rows", "columns", "types")
        return dict(
            name=name,
            title=described(model),
            dataset=title_of(model),
            error=model.about.get("test_error"),
            objects=model.recipe.objects,
            classes=list(model.classes),
            channels=model.net.in_channels,
            side=shown_side(model),
            routing=routing_of(model),
            printed_rule=has_printed_rule(model),
            softness=model.recipe.temper if routing_of(model) == "vb" else 1.0,
            iterations=0 if net is None else model.recipe.iters,
            twins=[
                dict(name=twin, routing=routing_of(self.networks.models[twin])) for twin in self.networks.twins(name)
            ],
            vae=self.networks.vae(name),
            layers=[dict(zip(keys, layer, strict=True)) for layer in layers],
            samples=of_samples(images),
        )

    def read(self, sent: Mapping[str, Any]) -> Scene:
        """Return the scene that a page sent."""
        model = self.networks.model(sent.get("model"))
        name, image = str(sent["model"]), sent.get("image")
        if not isinstance(image, Mapping) or len(image) != 1 or not {"sample", "pixels"} >= set(image):
            raise Refused("image must be an object with either sample or pixels")
        if "pixels" in image:
            original = from_png(image["pixels"], shown_side(model), model.net.in_channels)
        else:
            with self.lock:
                there = self.networks.images(name).pixels
            number = whole(image["sample"], "sample", len(there))
            original = there[number : number + 1]
        values = read_changes(sent.get("changes", {}))
        return Scene(name, model, original, values, changed(original, values))

    # --- the answer --------------------------------------------------------------------------------------------------

    def look(self, sent: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the network and its twins say of an image, and how familiar it looks."""
        begun = time.perf_counter()
        with self.lock, torch.no_grad(), exact_convolutions():
            scene = self.read(sent)
            model = scene.model
            picture = shown(model, scene.pixels)
            probabilities = model.predict(scene.pixels)[0]
            twins = []
            for twin in self.networks.twins(scene.name):
                other = self.networks.models[twin]
                said = numbers(other.predict(scene.pixels)[0])
                twins.append(dict(name=twin, routing=routing_of(other), probabilities=said))
            low, high, activations = self.spread(scene)
            found = scores(model, scene.pixels) if model.recipe.objects == 1 else {}
            return dict(
                picture=encoded(picture),
                height=picture.shape[0],
                width=picture.shape[1],
                cameras=2 if scene.pixels.shape[1] == 2 else 1,
                answer=dict(
                    probabilities=numbers(probabilities),
                    low=low,
                    high=high,
                    activations=activations,
                    temperature=model.temperature,
                ),
                twins=twins,
                taken=self.taken(scene, probabilities),
                **familiarity(model, found),
                milliseconds=1000 * (time.perf_counter() - begun),
            )

    def taken(self, scene: Scene, probabilities: Tensor) -> dict[str, Any] | None:
        """Return the parts of the image that the class capsule of each object took; None for one object, and a CNN."""
        net, objects = capsules_of(scene.model.net), scene.model.recipe.objects
        if net is None or objects == 1:
            return None
        trace = self.trace(scene.name, scene.pixels)
        types = probabilities.topk(objects).indices.tolist()
        parts = [dict(type=j, parts=numbers(parts_of(trace, "class_caps", 0, j))) for j in types]
        return dict(objects=parts, frame=frame_of(net))

    def spread(self, scene: Scene) -> tuple[list[float] | None, list[float] | None, list[float]]:
        """Return a 90% interval of each probability, if there is a posterior, and the class activations."""
        out = self.output(scene.model, scene.pixels)
        activations = numbers(out.activations[0])
        q = getattr(out, "posterior", None)
        if not isinstance(q, Posterior) or q.full or scene.model.recipe.objects > 1:
            return None, None, activations
        generator = torch.Generator(out.logits.device).manual_seed(0)  # the same noise for each image
        net = capsules(scene.model)
        p = probability_samples(net.class_caps, out, SAMPLES, scene.model.temperature, generator)[:, 0]
        low, high = p.quantile(p.new_tensor(INTERVAL), 0)
        return numbers(low), numbers(high), activations

    def output(self, model: Model, pixels: Tensor) -> Any:
        """Return what a network, or the capsules of a Capsule-VAE, says of images."""
        x = model.view.test(pixels.to(model.device))
        return model.net(x) if isinstance(model.net, ConvNet) else capsules(model)(x)

    # --- routing -----------------------------------------------------------------------------------------------------

    def trace(self, name: str, pixels: Tensor) -> NetworkTrace:
        """Return the trace of an image, which is made once and kept for the next panel."""
        key = (name, hashlib.sha256(pixels.numpy().tobytes()).digest())
        with self.lock:
            if key not in self.traces:
                model = self.networks.models[name]
                with torch.no_grad(), exact_convolutions():
                    made = capsules(model).trace(model.view.test(pixels.to(model.device)))
                check_finite(made.output.logits)
                self.traces[key] = made
            self.traces.move_to_end(key)
            while len(self.traces) > KEPT:
                self.traces.popitem(last=False)
            return self.traces[key]

    def routing(self, sent: Mapping[str, Any]) -> dict[str, Any]:
        """Return how a parent was routed, iteration by iteration: its parts, its votes, its pose and the ELBO.

        A class capsule is shown in the network's twins, too; capsules of other layers have no counterpart there.
        """
        with self.lock, torch.no_grad():
            scene = self.read(sent)
            net = capsules(scene.model)
            layer, position, type = read_parent(sent.get("parent"))
            names = [scene.name]
            if layer == "class_caps":
                names += [one for one in self.networks.twins(scene.name) if capsules_of(self.networks.models[one].net)]
            try:
                routed = [self.routed(name, scene.pixels, layer, position, type) for name in names]
            except ValueError as error:  # no such parent
                raise Refused(str(error)) from error
            activations = self.trace(scene.name, scene.pixels).layers[layer].parents.activations[0]
            return dict(
                networks=routed,
                field=receptive_field(net, layer, position)._asdict(),
                frame=frame_of(net),
                activations=numbers(activations.reshape(-1, activations.shape[-1])),
            )

    def routed(self, name: str, pixels: Tensor, layer: str, position: int, type: int) -> dict[str, Any]:
        """Return how one network routed a parent."""
        trace = self.trace(name, pixels)
        one = trace.layers[layer]
        cloud = cloud_of(trace, layer, position, type)
        mean, deviation = pose_of(one.iterations[-1], position, type)
        activations = one.parents.activations[0].reshape(-1, types_of(one))
        bounds = [q.elbo(one.activations, one.votes) for q in one.iterations if isinstance(q, Posterior)]
        alone = (
            int(one.fields.seen.max()) == 1
        )  # children in several fields count more than once in the first iteration
        return dict(
            name=name,
            routing=routing_of(self.networks.models[name]),
            activation=float(activations[position, type]),
            parts=[numbers(parts_of(trace, layer, position, type, t)) for t in range(len(one.iterations))],
            cloud={key: None if x is None else numbers(x) for key, x in cloud._asdict().items()},
            elbo=[
                dict(bound=alone or t > 0, **{term: float(x[0]) for term, x in bound._asdict().items()})
                for t, bound in enumerate(bounds)
            ]
            or None,
            pose=numbers(mean),
            deviation=None if deviation is None else numbers(deviation),
        )

    # --- poses -------------------------------------------------------------------------------------------------------

    def sweep(self, sent: Mapping[str, Any]) -> dict[str, Any]:
        """Return how the pose of a class capsule moves while one slider goes through its range."""
        with self.lock, torch.no_grad(), exact_convolutions():
            scene = self.read(sent)
            model = scene.model
            capsules(model)
            name = sent.get("sweep")
            if not isinstance(name, str) or name not in SWEEPS:
                raise Refused(f"sweep must be one of {', '.join(SWEEPS)}, got {name!r}")
            type = whole(sent.get("type"), "type", model.num_classes)
            values = torch.linspace(*SWEEPS[name], POINTS).tolist()
            frames = torch.cat([changed(scene.original, scene.values | {name: value}) for value in values])
            out: Capsules = self.output(model, frames)
            q = out.posterior
            assert q is not None
            deviation = deviation_of(q)
            return dict(
                unit=CHANGES[name].unit,
                values=[round(value, 3) for value in values],
                poses=numbers(q.m[:, type]),
                deviations=None if deviation is None else numbers(deviation[:, type]),
                probabilities=numbers(model.predict(frames)[:, type]),
                at=scene.values[name],
            )

    def decode(self, sent: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the Capsule-VAE draws when entries of an image's pose are moved."""
        with self.lock, torch.no_grad(), exact_convolutions():
            scene = self.read(sent)
            name = self.networks.vae(scene.name)
            if name is None:
                have = [one for one, model in self.networks.models.items() if kind_of(model) == "vae"]
                raise Refused(f"there is no Capsule-VAE for {scene.name}; there are {', '.join(have)}")
            model = self.networks.models[name]
            vae = model.net
            assert isinstance(vae, CapsVAE)
            entries = sent.get("entries")
            if not isinstance(entries, list) or [one for one in entries if not is_shift(one)]:
                raise Refused("entries must be a list of numbers between -1000 and 1000")
            if len(entries) != vae.code_size:
                raise Refused(
                    f"entries must have a number for each of {vae.code_size} pose entries, got {len(entries)}"
                )
            label = None if sent.get("type") is None else whole(sent["type"], "type", model.num_classes)
            x = model.view.test(scene.pixels.to(model.device))
            given = None if label is None else torch.tensor([label], device=x.device)
            out = vae(x, given)
            number = int(out.label)
            moved = out.mean + torch.tensor([entries], dtype=out.mean.dtype, device=x.device)
            image = (vae.decoder(moved, out.label)[0].clamp(0, 1) * 255).round().byte().cpu()
            return dict(
                vae=name,
                picture=encoded(pictured(image).numpy()),
                original=encoded(shown(model, scene.pixels)),
                mean=numbers(out.mean[0]),
                deviation=numbers(vae.code_root[number].norm(dim=1)),
                **{"class": number},
            )


# --- parts of answers ------------------------------------------------------------------------------------------------


def of_samples(images: Images) -> dict[str, Any]:
    """Return the images to choose from, as one sheet."""
    n, c, side, _ = images.pixels.shape
    tiles = images.pixels[:, :1] if c == 2 else images.pixels
    rows = -(-n // COLUMNS)
    blank = tiles.new_zeros(rows * COLUMNS - n, *tiles.shape[1:])
    grid = torch.cat([tiles, blank]).unflatten(0, (rows, COLUMNS))  # row column c y x
    sheet = grid.permute(2, 0, 3, 1, 4).reshape(len(tiles[0]), rows * side, COLUMNS * side)
    groups = [
        dict(name=name, samples=(images.labels[:, 0] == j).nonzero()[:, 0].tolist())
        for j, name in enumerate(images.classes)
    ]
    truths = [" + ".join(images.classes[j] for j in row) for row in images.labels.tolist()]
    place = dict(tile=side, columns=COLUMNS, sheet=as_png(sheet))
    return dict(title=images.title, note=images.note, classes=groups, truths=truths, **place)


def frame_of(net: CapsNet) -> dict[str, float]:
    """Return where the map of parts lies on the image, in pixels."""
    return dict(zip(("top", "left", "bottom", "right"), frame_of_parts(net), strict=True))


def familiarity(model: Model, found: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return every score of an image with its place among familiar images, and the one for the gauge."""
    places = percentiles(model, found)
    rows: list[dict[str, Any]] = []
    for name, score in found.items():
        title, symbol = DENSITIES.get(name.removeprefix("density."), OTHER) if "density." in name else SCORES[name]
        place = float(places[name]) if name in places else None
        rows.append(dict(name=name, title=title, symbol=symbol, value=float(f"{float(score):.6g}"), percentile=place))
    gauge = None
    best = [row for row in rows if row["name"].startswith("density.")] or [r for r in rows if r["name"] == "energy"]
    if best and best[0]["percentile"] is not None:
        row = best[0]
        images = model.about["familiar"]["images"]
        sentence = f"This image looks stranger than {100 * row['percentile']:.0f}% of {images}, by the {row['title']}."
        gauge = dict(score=row["name"], value=row["value"], percentile=row["percentile"], sentence=sentence)
    return dict(gauge=gauge, scores=sorted(rows, key=lambda row: row not in best))  # that of the gauge first


def read_parent(given: Any) -> tuple[str, int, int]:
    """Return the layer, position and type of the parent that a page asks for."""
    if not isinstance(given, Mapping) or given.get("layer") not in LAYERS:
        raise Refused(f"parent must be an object with layer, position and type; layer is one of {', '.join(LAYERS)}")
    return str(given["layer"]), whole(given.get("position"), "position"), whole(given.get("type"), "type")


def whole(value: Any, what: str, count: int = 2**31) -> int:
    """Return a whole number from 0 to ``count`` - 1; anything else is refused."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < count:
        raise Refused(f"{what} must be a whole number from 0 to {count - 1}, got {value!r}")
    return value


def is_shift(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1000


def routing_of(model: Model) -> str | None:
    """Return the routing of a network; None for a CNN."""
    return None if kind_of(model) == "cnn" else model.recipe.routing


def has_printed_rule(model: Model) -> bool:
    """Return whether agreement lowers the activation of the network's capsules."""
    return routing_of(model) == "vb" and model.recipe.activation == "paper"


def pose_of(q: Any, position: int, type: int) -> tuple[Tensor, Tensor | None]:
    """Return the mean of one parent's pose and its standard deviation, if the routing has one, ``d`` each."""

    def of_parent(x: Tensor) -> Tensor:  # n l j d, or n j d
        return x[0].reshape(-1, *x.shape[-2:])[position, type]

    deviation = deviation_of(q)
    return of_parent(q.m), None if deviation is None else of_parent(deviation)


def deviation_of(q: Any) -> Tensor | None:
    """Return the standard deviation of each pose entry, in the shape of the means; None for Dynamic routing."""
    if isinstance(q, Posterior):
        return q.variance().sqrt()
    return q.var.sqrt() if isinstance(q, Mixture) else None


def shown(model: Model, pixels: Tensor) -> Any:
    """Return the crop of an image that the network sees as an array of bytes, ``y x`` or ``y x 3``."""
    fill = "black" if model.view.fill == "mean" else model.view.fill
    view = replace(model.view, standardise="none", fill=fill, mean=(), std=())
    return pictured((view.test(pixels)[0] * 255).round().byte()).numpy()


def pictured(image: Tensor) -> Tensor:
    """Return uint8 ``c y x`` as ``y x``, or ``y x 3``; two cameras stand side by side."""
    if len(image) == 3:
        return image.permute(1, 2, 0).contiguous()
    return torch.cat(list(image), 1).contiguous()


def numbers(x: Tensor) -> list[Any]:
    """Return a tensor as nested lists of numbers with six digits."""
    check_finite(x)
    flat = [float(f"{value:.6g}") for value in x.flatten().tolist()]
    for size in reversed(x.shape[1:]):
        flat = [flat[k : k + size] for k in range(0, len(flat), size)]  # type: ignore[misc]
    return flat


def check_finite(x: Tensor) -> None:
    """Refuse numbers that are not finite, which nothing can be drawn of."""
    if not bool(x.isfinite().all()):
        raise Refused("the network's numbers are not finite: its training diverged, or its file is damaged", 422)

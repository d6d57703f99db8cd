"""A trained network as one object, which ``vbcaps.load`` and ``vbcaps.fit`` return and the command line uses.

Axes: n image, c class.
"""

import time
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

import vbcaps
from vbcaps.data import View
from vbcaps.inference import evaluating, exact_convolutions, probabilities
from vbcaps.layers import Capsules
from vbcaps.models import Scores
from vbcaps.training.files import RunError, write
from vbcaps.training.recipe import Recipe
from vbcaps.uncertainty.density import Density
from vbcaps.uncertainty.scores import check_densities
from vbcaps.vae import Network, Reconstruction
from vbcaps.weights import decode, find
from vbcaps.weights.fetch import Progress
from vbcaps.weights.file import Contents, NoDraws, pack_weights, read_weights
from vbcaps.weights.inputs import frame_of, read_pixels, side_of
from vbcaps.weights.tensors import copy_tensors
from vbcaps.weights.transfer import class_names, transfer, view_of
from vbcaps.weights.values import read_values

if TYPE_CHECKING:
    from vbcaps.health import Health
    from vbcaps.training.runlog import Result
    from vbcaps.weights.export import Exported


class Model(nn.Module):
    """A trained network with everything that is needed to use it.

    ``model(x)`` runs the network on standardised float images ``n channels height width``, which ``view.test`` makes,
    and returns its output: ``Capsules``, ``Scores`` of a ``ConvNet``, or ``Reconstruction`` of a ``CapsVAE``.
    ``model.predict(images)`` takes raw images.

    Args:
        net: the network.
        recipe: how the network is built and was trained.
        classes: the names of its classes, in the order of its output.
        view: how images become its input.
        about: other facts: epoch, validation and test error, temperature, version, commit.
        densities: of the network's features, by name, see ``vbcaps.uncertainty.fit_densities``.
        file: the weights file that the model was read from, if any.
        result: the result of the training, if ``vbcaps.fit`` made the model.

    Example:
        >>> import torch, vbcaps
        >>> model = vbcaps.load("fashion_laptop")
        >>> images = torch.randint(0, 256, (4, 28, 28), dtype=torch.uint8)
        >>> model.predict(images).shape
        torch.Size([4, 10])
    """

    def __init__(
        self,
        net: Network,
        recipe: Recipe,
        classes: Sequence[str],
        view: View,
        about: dict[str, Any] | None = None,
        *,
        densities: Mapping[str, Density] | None = None,
        file: Path | None = None,
        result: "Result | None" = None,
    ):
        super().__init__()
        check_densities(net, len(classes), densities or {})
        self.net = net
        self.recipe, self.classes, self.view = recipe, tuple(classes), view
        self.about, self.densities, self.file, self.result = dict(about or {}), dict(densities or {}), file, result
        self.sum = checksum(net)  # of the weights to which ``about`` and ``result`` belong

    def forward(self, x: Tensor) -> Capsules | Scores | Reconstruction:  # n channels height width
        """Run the network on standardised images, differentiably."""
        return self.net(x)

    @torch.no_grad()
    def predict(self, images: Any, *, batch_size: int = 256, crops: int = 1) -> Tensor:
        """Return the probability of each class for each image, the softmax of the logits over ``temperature``.

        A network that was trained on overlapping objects (``recipe.objects`` above 1) names several classes: it returns
        the sigmoid, the probability that each class is in the image, and the sum over the classes is not 1.

        The method resizes, crops and standardises the images, and runs the network in evaluation mode for this call.

        Args:
            images: a NumPy array or tensor ``h w``, ``h w c``, ``c h w``, ``n h w``, ``n h w c`` or ``n c h w``, uint8
                or float; a PIL image; the path of a picture, of a ``.npy`` file, or of a folder of pictures; or a list
                of any of these. Images may have any size: the shorter side is resized, the longer cropped. Floats are
                taken to lie in [0, 1] if no value of the call is above 1, else in [0, 255]. One and three channels are
                converted into each other; a network with two channels (smallNORB) takes arrays with two. A network that
                was trained on images of 16 bits or floats takes such images, in the values of its training images.
            batch_size: how many images the network sees at a time.
            crops: 1 for the central crop; 5 or a square number for the mean over several crops.

        Returns:
            Probabilities as a float tensor ``n c`` on the CPU, in the order of ``classes``; ``1 c`` for one image, and
            ``0 c`` for an empty list or an array of no images.

        Example:
            >>> import numpy as np, vbcaps
            >>> model = vbcaps.load("fashion_laptop")
            >>> scores = model.predict(np.random.rand(60, 40, 3))
            >>> model.classes[scores[0].argmax()] in model.classes
            True
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        pixels, weight = self.read(images), next(self.net.parameters())
        if not len(pixels):
            return torch.zeros(0, self.num_classes)
        with evaluating(self), exact_convolutions():
            found = [self._scores(part.to(weight.device), crops, weight.dtype) for part in pixels.split(batch_size)]
        return torch.cat(found)

    def _scores(self, pixels: Tensor, crops: int, dtype: torch.dtype) -> Tensor:
        x = self.view.crops(pixels, crops).to(dtype)  # k n channel y x
        scores = probabilities(self.net(x.flatten(0, 1)), self.temperature, self.recipe.objects)
        return scores.unflatten(0, x.shape[:2]).mean(0).float().cpu()

    def together(self, scores: Tensor) -> str:
        """Return the class of an image in words, from its probabilities ``c``; of several objects "3 + 7".

        Example:
            >>> import torch, vbcaps
            >>> vbcaps.load("fashion_laptop").together(torch.eye(10)[8])
            'Bag'
        """
        return " + ".join(self.classes[j] for j in scores.topk(self.recipe.objects).indices.tolist())

    def reconstruct(self, images: Any, *, label: int | str | None = None, batch_size: int = 256) -> Tensor:
        """Decode images again from the pose of a class capsule; only a Capsule-VAE can.

        Args:
            images: whatever ``predict`` takes.
            label: the class whose capsule is decoded, its name or number; without it the class that is predicted.
            batch_size: how many images the network sees at a time.

        Returns:
            Images as a float tensor ``n channels height width`` on the CPU, with values from 0 to 1 and the size of the
            network's input.

        Example:
            >>> import torch, vbcaps
            >>> model = vbcaps.load("vae_mnist")
            >>> model.reconstruct(torch.randint(0, 256, (4, 28, 28), dtype=torch.uint8)).shape
            torch.Size([4, 1, 28, 28])
        """
        return decode.reconstruct(self, images, label, batch_size)

    def codes(self, images: Any, *, label: int | str | None = None, batch_size: int = 256) -> Tensor:
        """Return the pose that ``reconstruct`` decodes, the posterior mean of a class capsule, ``n d``.

        The arguments are those of ``reconstruct``.
        """
        return decode.codes(self, images, label, batch_size)

    def tweak(
        self, image: Any, entry: int, values: Sequence[float] | Tensor, *, label: int | str | None = None
    ) -> Tensor:
        """Decode an image with one entry of its pose moved; only a Capsule-VAE can.

        Args:
            image: one image, whatever ``predict`` takes.
            entry: the entry of the pose, from 0 to 15; it stands in row entry // 4, column entry % 4 of the matrix.
            values: k numbers that are added to it.
            label: as in ``reconstruct``.

        Returns:
            Images as a float tensor ``k channels height width`` on the CPU, with values from 0 to 1.

        Example:
            >>> import torch, vbcaps
            >>> model = vbcaps.load("vae_mnist")
            >>> model.tweak(torch.rand(28, 28), entry=3, values=[-0.5, 0.0, 0.5]).shape
            torch.Size([3, 1, 28, 28])
        """
        return decode.tweak(self, image, entry, values, label)

    def sample(self, label: int | str, count: int = 1, *, source: str = "class", seed: int | None = None) -> Tensor:
        """Decode poses that no image had; only a Capsule-VAE can.

        Args:
            label: the class, its name or number.
            count: how many samples.
            source: ``"class"`` draws poses from a Gaussian with mean and covariance of those of the training images of
                the class; ``"prior"`` from the paper's prior N(0, I).
            seed: seed of the draws; without it they come from torch's random numbers.

        Returns:
            Images as a float tensor ``count channels height width`` on the CPU, with values from 0 to 1.

        Example:
            >>> import vbcaps
            >>> vbcaps.load("vae_mnist").sample("7", 5, seed=0).shape
            torch.Size([5, 1, 28, 28])
        """
        return decode.sample(self, label, count, source, seed)

    def read(self, images: Any) -> Tensor:
        """Return any images that ``predict`` takes as what ``view`` crops, ``n channels y x``: uint8, or float32 for a
        network that was trained on images of more than 8 bits."""
        if self.view.low:
            return read_values(images, side_of(self.recipe), self.net.in_channels, self.recipe.axes)
        return read_pixels(images, side_of(self.recipe), self.net.in_channels, frame_of(self.view))

    def health(self, images: Any, labels: Tensor | None = None, **options: Any) -> "Health":
        """Measure what the network's capsules do: who gets the votes, how sharp routing is, what poses say.

        Args:
            images: whatever ``predict`` takes; a few hundred test images are enough.
            labels: their classes, ``n`` of int64; without them there are no errors.
            options: ``batch_size``, ``iterations``, ``of`` and ``progress`` of `vbcaps.health.health`.

        Example:
            >>> import vbcaps
            >>> from vbcaps.data import load_dataset
            >>> test = load_dataset("sample").test
            >>> found = vbcaps.load("fashion_evidence").health(test.images[:60], test.labels[:60])
            >>> found.most_votes > 0.9  # the answer is the class that has the most votes
            True
        """
        from vbcaps.health import health

        return health(self, images, labels, **options)

    def save(self, path: str | Path) -> Path:
        """Write a weights file, from which ``vbcaps.load(path)`` restores the same bits; return its path.

        Args:
            path: the path of the file. Its folder must exist; an existing file is replaced in one step.
        """
        path = Path(path)
        about, densities = self.about, self.densities
        if self.changed():  # these belong to other weights
            about, densities = dict(began_with=dict(weights=self._before()), trained="by hand"), {}
        write(path, pack_weights(self.net, self.recipe, self.classes, self.view, about, densities))
        return path

    def export(self, path: str | Path, **options: Any) -> "Exported":
        """Write the network with its preprocessing as one file that other programs run, see ``vbcaps.export``."""
        from vbcaps.weights.export import export

        return export(self, path, **options)

    def save_pretrained(self, folder: str | Path, *, license: str | None = None) -> Path:
        """Write what ``push_to_hub`` would push into a folder, for ``from_pretrained``; return its path.

        Args:
            folder: the folder, which is made; a ``README.md`` in it stays as it is.
            license: of the weights, for the card, as the Hub writes it: ``"apache-2.0"``, ``"cc-by-4.0"``.
        """
        from vbcaps.weights.hub import save_pretrained

        return save_pretrained(self, folder, license)

    def push_to_hub(self, repo_id: str, *, license: str | None = None, **options: Any) -> str:
        """Publish the network on the Hugging Face Hub, with a model card; return the address of the commit.

        Names of folders on this computer are left out of the published recipe.

        Args:
            repo_id: the repository, ``"user/name"``, which is made if it does not exist.
            license: as in ``save_pretrained``.
            options: ``private``, ``token``, ``branch``, ``create_pr`` and ``commit_message`` of huggingface_hub.
        """
        from vbcaps.weights.hub import push_to_hub

        return push_to_hub(self, repo_id, license, **options)

    @classmethod
    def from_pretrained(cls, name: str | Path, *, device: str | torch.device = "cpu", **options: Any) -> "Model":
        """Return a network of the Hugging Face Hub, or of a folder that ``save_pretrained`` wrote, in eval mode.

        Args:
            name: the repository, ``"user/name"``, or the folder.
            device: the device of the network.
            options: ``revision``, ``token``, ``cache_dir``, ``force_download`` and ``local_files_only``.
        """
        from vbcaps.weights.hub import from_pretrained

        return from_pretrained(name, device, **options)

    def changed(self) -> bool:
        """Return whether the weights have changed since the model was made: ``about`` then tells of other weights."""
        return checksum(self.net) != self.sum

    @property
    def temperature(self) -> float:
        """Return what divides the logits, fitted on images held out of training; 1 if there were none."""
        return float(self.about.get("temperature", 1.0))

    @property
    def num_classes(self) -> int:
        """Return the number of classes."""
        return len(self.classes)

    @property
    def device(self) -> torch.device:
        """Return the device of the network."""
        return next(self.net.parameters()).device

    @property
    def name(self) -> str:
        """Return the name by which ``vbcaps.load`` finds the model, or the path of its file, or its recipe's name."""
        if self.file is None:
            return self.recipe.name
        return self.file.stem if find.belongs(self.file) else str(self.file)

    def _before(self) -> str:
        """Return the name of the weights that the model had before they were changed."""
        began = self.about.get("began_with") if self.file is None else None
        return began["weights"] if began else self.name

    def origin(self) -> str:
        """Return where the weights come from and how they were trained, in one line."""
        r, about = self.recipe, self.about
        if self.changed():
            return f"by hand, begun with {self._before()}"
        said = []
        if "epoch" in about:
            said.append(f"{about['epoch']} epoch{'s' if about['epoch'] > 1 else ''} of {r.name}")
        if start := about.get("began_with"):
            said.append(f"begun with {start['weights']}")
        if self.file is not None and (place := find.belongs(self.file)):
            where = "in the package," if place.folder == find.FOLDER else "published with"
            said.append(f"{where} vbcaps {vbcaps.__version__}")
        elif self.file is not None and self.file.exists():
            written = time.localtime(self.file.stat().st_mtime)
            said.append(time.strftime("written %Y-%m-%d %H:%M", written))
        if start and "epoch" not in about:
            said.append("trained by hand since" if about.get("trained") else "not trained since")
        if about.get("commit"):
            said.append(f"commit {about['commit']}")
        return ", ".join(said) if said else "not trained yet"

    def __repr__(self) -> str:
        r, net = self.recipe, self.net
        kind = f"{type(net).__name__} {{{','.join(map(str, r.arch))}}}" + (" residual" if r.stem == "residual" else "")
        if r.network != "cnn":
            kind += f", {ROUTING_NAMES[r.routing]} routing in {r.iters} iteration{'s' if r.iters > 1 else ''}"
        kind += f", {sum(p.numel() for p in net.parameters()):,} parameters"
        many = len(self.classes) > 12
        told = ", ".join(self.classes[:12]) + (f" and {len(self.classes) - 12} more" if many else "")
        side, crop = side_of(r), self.view.crop
        of = f", out of images of {side} x {side}" if side != crop else ""
        channels = f"{net.in_channels} channel{'s' if net.in_channels > 1 else ''}"
        does = "tells apart" if r.objects == 1 else f"names {r.objects} of"
        lines = [(does, told), ("network", kind), ("input", f"{channels} of {crop} x {crop}{of}")]
        if self.about.get("test_error") is not None and not self.changed():
            where = f"the images in {r.data}" if r.data else r.dataset
            objects = "" if r.objects == 1 else f", {r.objects} overlapping objects in an image"
            error = f"{100 * self.about['test_error']:.2f}% on {where}{objects}"
            if self.about.get("reconstruction") is not None:
                error += f", squared error {self.about['reconstruction']:.4f} a pixel"
            lines.append(("test error", error))
        lines.append(("trained", self.origin()))
        lines.append(("to use it", "model.predict(images)"))
        return "\n".join([self.name, *(f"  {what:11s} {text}" for what, text in lines)])


def checksum(net: Network) -> int:
    """Return a checksum of a network's parameters and buffers."""
    total = 0
    for x in net.state_dict().values():
        if not x.is_meta:
            total = zlib.crc32(x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data, total)
    return total


ROUTING_NAMES = {"vb": "VB", "em": "EM", "dynamic": "Dynamic"}


def load(
    name: str | Path,
    num_classes: int | None = None,
    in_channels: int | None = None,
    *,
    classes: Sequence[str] | None = None,
    device: str | torch.device = "cpu",
    progress: Progress | None = None,
) -> Model:
    """Return a trained network, in eval mode.

    Some of ``vbcaps.list_models()`` are in the package; the others are fetched once into the user's cache, unless they
    are in the folder that ``VBCAPS_WEIGHTS`` names.

    Args:
        name: one of ``vbcaps.list_models()``, a weights file, or the folder of a run.
        num_classes: another number of classes; the model then has a fresh class layer, which must be trained.
        in_channels: another number of channels; the first convolution's weights are spread over them so that images
            with equal channels get the same response as before.
        classes: the names of the new classes; by default "0", "1" and so on.
        device: the device of the network.
        progress: called while a file is fetched, with its name, the bytes so far, and the bytes in all.

    Returns:
        The model, with ``net``, ``recipe``, ``classes``, ``view`` and ``about`` (its test error and more).

    Example:
        >>> import vbcaps
        >>> vbcaps.load("vae_mnist").classes
        ('0', '1', '2', '3', '4', '5', '6', '7', '8', '9')
        >>> vbcaps.load("fashion", num_classes=3, in_channels=3).net(torch.randn(2, 3, 32, 32)).logits.shape
        torch.Size([2, 3])
    """
    file = find.weights_file(name, progress)
    contents = read_weights(file)
    names = class_names(contents.classes, num_classes, classes)
    channels = contents.in_channels if in_channels is None else in_channels
    if names == contents.classes and channels == contents.in_channels:
        return model_of(contents, file, device)
    net = contents.recipe.net(channels, len(names))
    transfer(contents, net, str(name), fresh=names != contents.classes)
    view = view_of(contents.view, channels)
    about = dict(began_with=dict(weights=str(name)))
    return Model(net, contents.recipe, names, view, about).to(device).eval()


def model_of(
    contents: Contents, file: Path, device: str | torch.device = "cpu", result: "Result | None" = None
) -> Model:
    """Return the model in a weights file, in eval mode, without a change to torch's random state."""
    try:
        with torch.random.fork_rng(devices=[]), NoDraws():
            net = contents.recipe.net(contents.in_channels, len(contents.classes))
    except (TypeError, ValueError) as error:
        raise RunError(f"{file} has a header that this version ({vbcaps.__version__}) cannot read: {error}") from error
    copy_tensors(net.state_dict(), contents.tensors, str(file))
    parts = contents.recipe, contents.classes, contents.view, contents.about
    model = Model(net, *parts, densities=contents.densities, file=file, result=result)
    return model.to(device).eval()

"""``CapsuleClassifier``: train and use capsule networks as any estimator of scikit-learn.

Axes: n image, c channel, y x pixel.
"""

import copy
import dataclasses
import math
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_array, check_is_fitted, check_random_state, validate_data
from torch import Tensor

from vbcaps.data import Dataset, Split
from vbcaps.data.resize import resize
from vbcaps.training.events import Event, Hook
from vbcaps.training.loop import Interrupted, fit, pick_device
from vbcaps.training.own_images import EPOCHS, SIDES, STEPS, fitting_batch
from vbcaps.training.recipe import Recipe, not_for
from vbcaps.training.recipes import recipe as named_recipe
from vbcaps.weights.model import Model

NAME = "arrays"  # of the data in recipes and weights files
FIELDS = ("lr", "arch", "routing", "iters", "optimiser", "weight_decay", "precision", "network")  # of the recipe
FEW = 4  # channels that are looked for beside the sides of an image that is not square


class CapsuleClassifier(ClassifierMixin, BaseEstimator):
    """A capsule network as an estimator of scikit-learn: ``fit``, ``predict``, ``predict_proba``, ``score``.

    Images are arrays ``n h w``, ``n h w c`` or ``n c h w``, or rows ``n f`` of square grey images (or of images of
    ``image_shape``). They are cut to a square and resized to the network's input. Labels may be of any kind. A
    parameter that is None has the value of the recipe, or one that fits the images.

    Args:
        recipe: the name of a recipe, or a ``Recipe``. Its dataset is not used.
        epochs: passes over the images; by default so many that few images give enough steps, as for your own images.
        batch: images in a step; by default smaller where there are few images.
        lr: highest learning rate.
        arch: F, d1, d2, d3: filters of the stem, then capsule types of each layer.
        routing: ``"vb"``, ``"em"`` or ``"dynamic"``.
        iters: routing iterations.
        optimiser: ``"adam"``, ``"adamw"``, ``"muon"`` or ``"sgd"``.
        weight_decay: weight decay.
        precision: VB: ``"gamma"``, ``"wishart"`` or ``"full"``.
        network: ``"caps"`` or ``"cnn"``.
        side: height and width of the network's input; by default that of the images, within 28 to 48.
        flip: mirror half of the training images.
        validation: share of the images held out to choose the best epoch and to fit the temperature; 0: none.
        fields: any other fields of the recipe, a dictionary.
        image_shape: the shape of one image where X has rows, ``(h, w)``, ``(h, w, c)`` or ``(c, h, w)``.
        value_range: the values that become black and white; by default 0 and 255 for uint8, else the smallest and the
            largest value in ``fit``.
        weights: trained weights to begin with, whatever ``vbcaps.load`` takes, of a network as the recipe's.
        folder: keep the run in this folder; by default nothing is kept on the disk.
        device: ``"auto"``, ``"cpu"``, ``"cuda"`` or ``"cuda:1"``.
        random_state: an integer gives the same network again.
        verbose: print a line after each epoch.
        on_event: a function that receives the progress, as in ``vbcaps.fit``.

    Attributes:
        classes_: the labels, sorted.
        model_: the trained ``vbcaps.Model``; its classes are the labels as words.
        n_features_in_: the number of values in an image.
        image_shape_: the shape of an image in ``fit``.
        value_range_: the values that become black and white.
        n_iter_: the epochs that were run.
        history_: loss, training error and validation error of each epoch.

    Example:
        >>> from sklearn.datasets import load_digits
        >>> from sklearn.model_selection import train_test_split
        >>> from vbcaps import CapsuleClassifier
        >>> images, labels = load_digits(return_X_y=True)
        >>> train, test, train_labels, test_labels = train_test_split(images, labels, random_state=0)
        >>> classifier = CapsuleClassifier(epochs=6, random_state=0)
        >>> classifier.fit(train, train_labels).score(test, test_labels)  # doctest: +SKIP
        0.9955555555555555
    """

    def __init__(
        self,
        recipe: str | Recipe = "default",
        *,
        epochs: int | None = None,
        batch: int | None = None,
        lr: float | None = None,
        arch: tuple[int, ...] | None = None,
        routing: str | None = None,
        iters: int | None = None,
        optimiser: str | None = None,
        weight_decay: float | None = None,
        precision: str | None = None,
        network: str | None = None,
        side: int | None = None,
        flip: bool = False,
        validation: float = 0.0,
        fields: dict[str, Any] | None = None,
        image_shape: tuple[int, ...] | None = None,
        value_range: tuple[float, float] | None = None,
        weights: Model | str | Path | None = None,
        folder: str | Path | None = None,
        device: str = "auto",
        random_state: int | np.random.RandomState | None = None,
        verbose: bool | int = False,
        on_event: Hook | None = None,
    ):
        self.recipe = recipe
        self.epochs = epochs
        self.batch = batch
        self.lr = lr
        self.arch = arch
        self.routing = routing
        self.iters = iters
        self.optimiser = optimiser
        self.weight_decay = weight_decay
        self.precision = precision
        self.network = network
        self.side = side
        self.flip = flip
        self.validation = validation
        self.fields = fields
        self.image_shape = image_shape
        self.value_range = value_range
        self.weights = weights
        self.folder = folder
        self.device = device
        self.random_state = random_state
        self.verbose = verbose
        self.on_event = on_event

    def fit(self, X: Any, y: Any) -> "CapsuleClassifier":
        """Train a network on images and their labels; return the classifier."""
        X, y = validate_data(self, X, y, allow_nd=True, dtype=None, ensure_min_samples=2)
        check_classification_targets(y)
        X = numbers(X)
        self.classes_, labels = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise ValueError(f"y must have at least two classes, got one class, {self.classes_[0]!r}")
        self.n_features_in_ = math.prod(X.shape[1:])
        self.image_shape_ = self._shape_of_images(X)
        self.value_range_ = self._range_of_values(X)
        recipe = self._recipe(len(X))
        pixels = self._pixels(X, recipe.crop)
        split = Split(pixels, torch.from_numpy(labels.reshape(-1)).long())
        names = tuple(map(str, self.classes_))
        data = Dataset(NAME, split, split.take(torch.arange(0)), names, "arrays in memory")
        self.history_: list[dict[str, Any]] = []
        with self._folder() as folder:
            try:
                model = fit(
                    recipe, folder, data=data, weights=self.weights, device=self.device, on_event=self._on_event
                )
            except Interrupted as stop:  # its advice, to resume, needs a folder that stays
                raise stop if self.folder is not None else KeyboardInterrupt from None
        if self.folder is None:
            model.file = model.result = None
        self.model_, self.n_iter_ = model, len(self.history_)
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """Return the probability of each class for each image, ``n classes``."""
        check_is_fitted(self)
        pixels = self._pixels(self._images(X), self.model_.recipe.crop)
        self.model_.to(pick_device(self.device))
        found = self.model_.predict(pixels).double()
        return (found / found.sum(1, keepdim=True)).numpy()

    def predict(self, X: Any) -> np.ndarray:
        """Return the most probable label of each image."""
        best = self.predict_proba(X).argmax(1)
        return self.classes_[best]

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.three_d_array = True
        return tags

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled; the network is on the CPU there, so that any computer can read it."""
        state = super().__getstate__()
        model = state.get("model_")
        if model is not None and model.device.type != "cpu":
            state = state | dict(model_=copy.deepcopy(model).cpu())
        return state

    def _recipe(self, count: int) -> Recipe:
        """Return the recipe for ``count`` images of ``image_shape_``."""
        base = named_recipe(self.recipe) if isinstance(self.recipe, str) else self.recipe
        changes: dict[str, Any] = dict(viewpoint=None, match=0.0, hold_out="images", image_size=None, pad=0, objects=1)
        changes |= dict(flip=self.flip, validation=self.validation, test=False)
        changes |= {field: getattr(self, field) for field in FIELDS if getattr(self, field) is not None}
        low, high = SIDES
        _, height, width = channels_first(self.image_shape_)
        usual = min(max(min(height, width) // 4 * 4, low), high)
        changes["crop"] = usual if self.side is None else self.side
        changes["batch"] = fitting_batch(count, base.batch) if self.batch is None else self.batch
        steps = max(count // max(min(changes["batch"], count), 1), 1)
        enough = max(min(-(-STEPS // steps), EPOCHS), base.epochs)
        changes["epochs"] = enough if self.epochs is None else self.epochs
        if isinstance(changes.get("arch"), list):
            changes["arch"] = tuple(changes["arch"])
        other = not_for(changes.get("network", base.network), changes.get("routing", base.routing))
        changes = {field: getattr(Recipe, field) for field in other} | changes
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        recipe = base.with_fields(**changes | dict(seed=seed) | (self.fields or {}))
        return dataclasses.replace(recipe, image_size=recipe.crop)

    def _shape_of_images(self, X: np.ndarray) -> tuple[int, ...]:
        """Return the shape of an image in X, ``h w``, ``h w c`` or ``c h w``."""
        if X.ndim > 2:
            shape = X.shape[1:]
        elif self.image_shape is not None:
            shape = tuple(self.image_shape)
            if math.prod(shape) != X.shape[1]:
                raise ValueError(f"image_shape {shape} has {math.prod(shape)} values, but rows of X have {X.shape[1]}")
        else:
            side = math.isqrt(X.shape[1])
            if side * side != X.shape[1]:
                raise ValueError(
                    f"rows of {X.shape[1]} features are no square images: give image_shape, or X as n h w, n h w c or "
                    "n c h w"
                )
            shape = (side, side)
        channels_first(shape)  # raises the error of a shape that is no image
        return shape

    def _range_of_values(self, X: np.ndarray) -> tuple[float, float]:
        if self.value_range is not None:
            low, high = self.value_range
            if not low < high:
                raise ValueError(f"value_range must be two rising numbers, got {self.value_range!r}")
            return low, high
        return (0.0, 255.0) if X.dtype == np.uint8 else (float(X.min()), float(X.max()))

    def _images(self, X: Any) -> np.ndarray:
        """Return new images ``n ...`` after scikit-learn's checks, with the shape of an image in ``fit``."""
        if not hasattr(X, "shape") or len(X.shape) <= 2:
            X = validate_data(self, X, reset=False, dtype=None, allow_nd=True)
        X = numbers(check_array(X, allow_nd=True, dtype=None))
        if X.ndim > 2 and X.shape[1:] != self.image_shape_:
            raise ValueError(f"X has images of shape {X.shape[1:]}, but those of fit had {self.image_shape_}")
        return X

    def _pixels(self, X: np.ndarray, side: int) -> Tensor:
        """Return images as uint8 ``n c side side``: scaled, cut to a square and resized."""
        X = X.reshape(len(X), *self.image_shape_)
        if X.ndim == 3:
            X = X[:, None]
        elif channels_first(self.image_shape_) != self.image_shape_:
            X = np.moveaxis(X, 3, 1)
        low, high = self.value_range_
        if X.dtype != np.uint8 or (low, high) != (0.0, 255.0):
            scaled = (X.astype(np.float64) - low) * (255 / (high - low)) if high > low else np.zeros(X.shape)
            X = np.clip(np.rint(scaled), 0, 255).astype(np.uint8)
        height, width = X.shape[2:]
        square = min(height, width)
        top, left = (height - square) // 2, (width - square) // 2
        cut = X[:, :, top : top + square, left : left + square]
        return resize(torch.from_numpy(np.array(cut)), side)

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        """Give the folder of the run, which is removed afterwards unless the user named it."""
        if self.folder is not None:
            yield Path(self.folder)
            return
        with tempfile.TemporaryDirectory(prefix="vbcaps-") as folder:
            yield Path(folder) / "run"

    def _on_event(self, event: Event) -> None:
        if event.kind == "epoch":
            row = dict(epoch=event.epoch, loss=event.loss, error=event.error, validation=event.validation)
            self.history_.append(row)
            if self.verbose:
                held = "" if event.validation is None else f", validation error {100 * event.validation:.2f}%"
                error = f"error {100 * (event.error or 0.0):.2f}%"
                print(f"epoch {event.epoch}/{event.epochs}: loss {event.loss:.4f}, {error}{held}", flush=True)
        if self.on_event is not None:
            self.on_event(event)


def numbers(X: np.ndarray) -> np.ndarray:
    """Return an array of numbers: uint8 stays, all others become floats."""
    if X.dtype == np.uint8:
        return X
    return check_array(X, allow_nd=True, dtype=np.float64, ensure_min_samples=0, ensure_min_features=0)


def channels_first(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape ``c h w`` of an image ``h w``, ``h w c`` or ``c h w``.

    The sides of a square image tell its channels; else they are the axis that is small.

    >>> channels_first((28, 28)), channels_first((32, 32, 200)), channels_first((3, 40, 60))
    ((1, 28, 28), (200, 32, 32), (3, 40, 60))
    """
    if len(shape) == 2:
        return (1, *shape)
    if len(shape) != 3:
        raise ValueError(f"images must have 2 or 3 axes, h w, h w c or c h w, got the shape {shape}")
    first, middle, last = shape
    if middle == last and first != middle:
        return shape
    if (first == middle and last != first) or (last <= FEW and first > FEW):
        return last, first, middle
    if first <= FEW:
        return shape
    raise ValueError(f"images of shape {shape} may be h w c or c h w: only square images have more than {FEW} channels")

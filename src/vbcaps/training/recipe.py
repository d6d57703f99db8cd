"""The recipe of an experiment: one dataclass, with a type, default and meaning for every field."""

import dataclasses
import difflib
import math
import re
import types
import typing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vbcaps.data import errors
from vbcaps.data.facts import FACTS
from vbcaps.data.medmnist_table import MULTI_LABEL
from vbcaps.removed import without_removed

if TYPE_CHECKING:  # PyTorch takes seconds to import, and a recipe can be listed, changed and checked without
    from vbcaps.data import View
    from vbcaps.prior import Prior
    from vbcaps.vae import Network

# What no name may have: characters that a terminal obeys or that cannot be printed, and ends of lines and tabs.
OBEYED = re.compile(f"{errors.OBEYED.pattern}|[\t\n]")
# The allowed words of a field; a test compares them with the modules that implement them.
CHOICES: dict[str, tuple[str, ...]] = dict(
    dataset=tuple(FACTS),
    network=("caps", "cnn", "vae"), stem=("conv", "residual"), routing=("vb", "em", "dynamic"),
    activation=("agreement", "information", "released", "paper"), through=("all", "last"),
    precision=("gamma", "wishart", "full"),
    learn=("alpha0", "m0", "kappa0", "Psi0", "nu0"), init=("glorot", "identity"),
    backend=("auto", "reference", "plain", "triton", "cpu"), loss=("nll", "spread"), loss_on=("activations", "logits"),
    optimiser=("adam", "adamw", "muon", "sgd"), schedule=("constant", "exponential", "steps", "cosine", "onecycle"),
    viewpoint=("azimuth", "elevation"), hold_out=("images", "objects"),
    standardise=("image", "crop", "dataset", "none"), fill=("black", "mean", "edge"),
    resample=("bilinear", "bicubic"), axes=("auto", "chw", "hwc"), sampling=("shortcut", "posterior"),
    choose_by=("error", "balanced_error"),
)  # fmt: skip
LONGEST_WORD = 100  # letters of a word for which a near one is looked for
# Number fields: the smallest and the largest value allowed.
RANGES: dict[str, tuple[float, float]] = dict(
    objects=(1, 4), validation=(0, 0.9), split=(0, 2**32 - 1), match=(0, 1), image_size=(8, 1024), seed=(0, 2**32 - 1),
    crop=(20, 256), pad=(0, 64), brightness=(0, 1), contrast=(0, 1), rotate=(0, 180), zoom=(0, 0.9),
    stretch=(0, 0.9), cutout=(0, 256), mixup=(0, 0.5), iters=(1, 100), temper=(1e-3, 100),
    temperature=(1e-6, 1e6), min_var=(1e-9, 1e6), gain=(1e-3, 1e3), noise=(0, 1), batch=(1, 65536), epochs=(1, 100_000),
    lr=(0, 100), momentum=(0, 0.9999), weight_decay=(0, 1), warmup=(0, 100_000), decay=(0, 1), final=(0, 1),
    ema=(0, 0.999999), evidence=(0, 1000), save_seconds=(0, math.inf), eta=(0, 1e6), beta=(0, 1e6),
    kl_warmup=(0, 100_000), decoder=(4, 4096), folds=(0, 1000), fold=(0, 1000), patience=(0, 100_000), balance=(0, 1),
)  # fmt: skip
PRIOR = ("alpha0", "m0", "kappa0", "psi0", "nu0")
VB_ONLY = ("activation", "temper", "through", "precision", *PRIOR, "learn", "evidence")
EM_ONLY = ("temperature", "min_var")
CAPS_ONLY = ("routing", "iters", *VB_ONLY, *EM_ONLY, "norm_pose", "norm_logit", "init", "gain", "noise", "backend")
OVERLAPPING = ("mnist", "fashion-mnist", "sample")  # whose objects lie before a black background
VAE_ONLY = ("eta", "beta", "kl_warmup", "sampling", "decoder")


def _field(default: Any, help: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides the result of a training, except the device.

    A recipe is immutable: ``with_fields`` makes another. A wrong type, a value out of range or an impossible
    combination raises a ``ValueError`` that names the field.
    """

    name: str = _field("custom", "name of the run")

    dataset: str = _field("smallnorb", "the dataset")
    data: str | None = _field(None, "a folder of your own images, one folder for each class, in place of the dataset")
    image_size: int | None = _field(
        None, "resize images to this side first; by default 48 for smallNORB, --crop for your own images"
    )
    axes: str = _field("auto", "your own .npy and TIFF files: which axis has the channels, the first or the last")
    objects: int = _field(
        1, "objects of different classes in an image, which lie anywhere in the crop and overlap; all are to be named"
    )
    validation: float = _field(
        0.0, "hold out this share of each class of the training images to choose the best epoch; 0: off"
    )
    hold_out: str = _field("images", "hold out images at random, or whole objects of smallNORB")
    split: int = _field(0, "number of the random share that is held out, the same for every seed")
    folds: int = _field(0, "cross-validation: divide the training images into so many parts, each tested once; 0: off")
    fold: int = _field(0, "cross-validation: test this part, from 1, and train on the others; 0: each in turn")
    groups: str | None = _field(
        None,
        "images that stay together in every split, such as those of a patient: FILE.csv or FILE.csv:COLUMN with a row "
        "for each image; folder, for CLASS/GROUP/image; or a column of smallNORB, such as instance",
    )
    choose_by: str = _field("error", "what chooses the best epoch: the validation error, or its mean over the classes")
    patience: int = _field(0, "stop after this many epochs in which validation found no better one; 0: off")
    test: bool = _field(False, "with a validation share: test the best weights once, at the end")
    viewpoint: str | None = _field(None, "smallNORB: train on some azimuths or elevations, test on the others")
    match: float = _field(0.0, "stop at this error on familiar viewpoints (for affNIST: on MNIST); 0: off")
    seed: int = _field(0, "seed of the initial weights, the order of the images and the augmentation")

    crop: int = _field(32, "side of the network's input: random crops in training, the central crop in testing")
    pad: int = _field(0, "pad images by this many pixels before random crops")
    standardise: str = _field("image", "scale to mean 0 and variance 1: each image, each crop, or the whole dataset")
    fill: str = _field("black", "pixels outside an image: black, its mean, or the nearest at its edge")
    flip: bool = _field(False, "mirror half of the training images (in a stereo pair, left and right swap)")
    place: bool = _field(False, "place training images anywhere in the crop, test images at its centre")
    brightness: float = _field(0.0, "change the brightness of training images at random by up to this share; 0: off")
    contrast: float = _field(0.0, "change the contrast of training images at random by up to this share; 0: off")
    rotate: float = _field(0.0, "rotate training images at random by up to this many degrees; 0: off")
    zoom: float = _field(0.0, "enlarge or shrink training images at random by up to this share; 0: off")
    stretch: float = _field(0.0, "make training images wider or taller at random by up to this share; 0: off")
    resample: str = _field("bilinear", "interpolation of rotated, enlarged or stretched images")
    cutout: int = _field(0, "blank a square of this side at a random place in training images; 0: off")
    mixup: float = _field(0.0, "nll: blend each training image and label with another, up to this share; 0: off")

    network: str = _field("caps", "capsules, a plain CNN with the same receptive fields, or capsules with a decoder")
    arch: tuple[int, ...] = _field(
        (64, 16, 16, 16), "F,d1,d2,d3: filters of the stem, then capsule types (CNN: filters) of each layer"
    )
    stem: str = _field("conv", "three convolutions, or four residual blocks")
    routing: str = _field("vb", "Variational Bayes, EM, or Dynamic")
    iters: int = _field(3, "routing iterations")
    activation: str = _field(
        "released",
        "VB: what activates a parent: agreement of its votes, information that they brought, the rule of the "
        "released code, or the one printed in the paper, in which agreement deactivates",
    )
    temper: float = _field(1.0, "VB: softness of the assignment; below 1 children share themselves out more evenly")
    through: str = _field("all", "VB: iterations through which gradients flow back")
    precision: str = _field("gamma", "VB: distribution of a pose's precision; gamma is diagonal")
    alpha0: float = _field(1.0, "VB: prior concentration of the mixing proportions")
    m0: float = _field(0.0, "VB: prior mean of a pose")
    kappa0: float = _field(1.0, "VB: prior weight of the mean")
    psi0: float = _field(1.0, "VB: prior scale of the precision, a multiple of the identity")
    nu0: float | None = _field(None, "VB: prior degrees of freedom; by default 17, pose entries + 1")
    learn: tuple[str, ...] = _field((), "VB: priors to learn by backpropagation")
    temperature: float = _field(0.01, "EM: inverse temperature of the last iteration")
    min_var: float = _field(0.1, "EM: constant added to every variance")
    norm_pose: bool = _field(True, "also normalise the poses by BatchNorm")
    norm_logit: bool = _field(True, "normalise the class logits by BatchNorm")
    init: str = _field("glorot", "initial transformations: Glorot's, or the identity with noise off its diagonal")
    gain: float = _field(1.0, "factor on Glorot's initial transformations")
    noise: float = _field(0.01, "standard deviation of the noise on identity transformations")
    backend: str = _field("auto", "which kernels route; auto takes the fastest that are available")
    sampling: str = _field("shortcut", "VAE: draw the code by the paper's short cut, or from the posterior")
    decoder: int = _field(64, "VAE: filters of the decoder")

    loss: str = _field(
        "nll",
        "negative log likelihood (of several objects: binary cross entropy), or spread (the margin grows from 0.2 to "
        "0.9 in the first half)",
    )
    loss_on: str = _field(
        "activations", "nll: softmax of the activations, as in the released code, or of scaled logits"
    )
    evidence: float = _field(0.0, "VB: weight of -E(ln pi) of the right class in the loss; 0: off")
    class_weights: str = _field(
        "none", "weights in the loss: none, balanced (each class counts the same), or a number for each class: 1,5,20"
    )
    eta: float = _field(1e-3, "VAE: weight of the VAE loss beside the classification loss")
    beta: float = _field(1.0, "VAE: weight of the divergence within the VAE loss; 1 in the paper")
    kl_warmup: float = _field(0.0, "VAE: epochs in which beta rises from 0")
    batch: int = _field(32, "images in a step, all processes together")
    balance: float = _field(0.0, "take images of rare classes more often; 1: each class as often as any other; 0: off")
    epochs: int = _field(350, "passes over the training images; warmup and milestones follow unless they are given")
    optimiser: str = _field("adam", "Adam, AdamW, SGD with momentum, or Muon (with AdamW for all but matrices)")
    lr: float = _field(3e-3, "highest learning rate")
    momentum: float = _field(0.9, "momentum of SGD")
    weight_decay: float = _field(0.0, "weight decay: L2 for Adam and SGD, decoupled for AdamW and Muon")
    schedule: str = _field("exponential", "how the learning rate falls")
    warmup: float = _field(0.0, "epochs in which the learning rate rises from 0, in every schedule")
    milestones: tuple[int, ...] = _field((), "steps: epochs after which the learning rate is multiplied by decay")
    decay: float = _field(0.1, "steps: factor on the learning rate at a milestone")
    final: float = _field(0.01, "exponential, cosine, onecycle: last learning rate as a share of the highest")
    ema: float = _field(0.0, "evaluate a moving average of the weights with this decay; 0: off")
    save_seconds: float = _field(
        300.0, "also save the state within an epoch, after this many seconds; 0: after epochs only"
    )

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        for field, kind in field_types().items():
            _check_type(field, getattr(self, field), kind)
        for field, allowed in CHOICES.items():
            value = getattr(self, field)
            for one in value if isinstance(value, tuple) else [] if value is None else [value]:
                if one not in allowed:
                    hint = nearest(one, allowed)
                    if field == "dataset":
                        hint = f"; {MULTI_LABEL[one]}" if one in MULTI_LABEL else hint
                        hint = hint or "; a folder of your own images is given as data"
                    raise ValueError(f"{field} must be one of {allowed}, got {one!r}{hint}")
        for field, (low, high) in RANGES.items():
            value = getattr(self, field)
            if value is not None and not low <= value <= high:
                raise ValueError(f"{field} must lie from {low:g} to {high:g}, got {value}")
        if len(self.arch) != 4 or min(self.arch) < 1:
            raise ValueError(f"arch must be four positive numbers F, d1, d2, d3, got {self.arch}")
        if self.lr == 0:
            raise ValueError("lr must be above 0, got 0")
        weights_of(self.class_weights)
        self._validate_combinations()
        # Views and priors check the rest; they need PyTorch, so they are made only where something could be wrong.
        if (self.place and self.pad) or self.fill == "mean":
            self.view()
        if any(getattr(self, field) != getattr(Recipe, field) for field in PRIOR) and not self._surely_legal_prior():
            self.prior()

    def _surely_legal_prior(self) -> bool:
        """Return whether the prior lies well within what ``Prior`` accepts, which needs no PyTorch to be seen."""
        positive = (self.alpha0, self.kappa0, self.psi0, 1.0 if self.nu0 is None else self.nu0)
        return self.precision == "gamma" and all(1e-5 < x < 1e5 for x in positive) and abs(self.m0) < 1e5

    def _validate_combinations(self) -> None:
        owners = (
            ("network", ("caps", "vae"), CAPS_ONLY), ("network", ("vae",), VAE_ONLY),
            ("routing", ("vb",), VB_ONLY), ("routing", ("em",), EM_ONLY),
        )  # fmt: skip
        for field, allowed, fields in owners:
            now = getattr(self, field)
            for one in fields if now not in allowed else ():
                value = getattr(self, one)
                if value != getattr(Recipe, one):
                    raise ValueError(
                        f"{one} belongs to {field}={allowed[0]!r}, got {one}={value!r} with {field}={now!r}"
                    )
        if self.network == "cnn" and self.loss_on != "logits":
            raise ValueError(f"network='cnn' has only logits: loss_on must be 'logits', got {self.loss_on!r}")
        if self.network == "vae":
            self._validate_vae()
        if self.objects > 1:
            self._validate_objects()
        if self.loss == "spread" and self.loss_on != "activations":
            raise ValueError(f"loss='spread' needs loss_on='activations', got loss_on={self.loss_on!r}")
        if self.loss == "spread" and self.mixup:
            raise ValueError(f"mixup belongs to loss='nll', got mixup={self.mixup} with loss='spread'")
        if self.resample != "bilinear" and not (self.rotate or self.zoom or self.stretch):
            raise ValueError(f"resample={self.resample!r} needs rotate, zoom or stretch above 0")
        if self.cutout > self.crop:
            raise ValueError(f"cutout must not be larger than crop={self.crop}, got {self.cutout}")
        if self.schedule == "steps" and not self.milestones:
            raise ValueError("schedule='steps' needs milestones, epochs at which the learning rate falls; got none")
        if list(self.milestones) != sorted(set(self.milestones)) or any(m < 1 for m in self.milestones):
            raise ValueError(f"milestones must be rising epochs of at least 1, got {self.milestones}")
        if self.warmup >= self.epochs and self.warmup > 0:
            raise ValueError(f"warmup must be shorter than epochs={self.epochs}, got {self.warmup:g}")
        if self.viewpoint is not None and (self.dataset != "smallnorb" or self.data is not None):
            raise ValueError(f"viewpoint needs dataset='smallnorb', got {self.data or self.dataset!r}")
        if self.hold_out == "objects" and (self.dataset != "smallnorb" or self.data is not None):
            raise ValueError(f"hold_out='objects' needs dataset='smallnorb', got {self.data or self.dataset!r}")
        if self.folds == 1 or self.fold > self.folds:
            raise ValueError(f"folds must be 0 or at least 2, and fold at most folds, got {self.folds} and {self.fold}")
        if self.folds and (self.viewpoint is not None or self.match or self.dataset == "affnist"):
            raise ValueError(
                "folds divide the training images and test a part of them: viewpoint, match and dataset='affnist' have "
                f"other test images, got folds={self.folds}"
            )
        if self.groups is not None and self.hold_out != "images":
            raise ValueError(f"groups hold whole groups out: hold_out must be 'images', got {self.hold_out!r}")
        if self.match and self.viewpoint is None and (self.dataset != "affnist" or self.data is not None):
            raise ValueError(
                "match needs an error on familiar views: set viewpoint for smallNORB, or dataset='affnist'"
            )
        if self.match and self.validation:
            raise ValueError(f"match chooses the epoch, so validation must be 0, got {self.validation}")
        if self.match and (self.patience or self.choose_by != "error"):
            raise ValueError(
                f"match ends the training and chooses the epoch: patience must be 0 and choose_by 'error', got "
                f"{self.patience} and {self.choose_by!r}"
            )
        if self.image_size is not None and self.data is None and self.dataset == "affnist":
            raise ValueError(
                f"dataset='affnist' has images of two sizes, which cannot be resized: got image_size={self.image_size}"
            )

    def _validate_objects(self) -> None:
        """Raise an error for a field that objects=2 and more cannot have."""
        got = f"got objects={self.objects} with"
        if self.data is None and self.dataset not in OVERLAPPING:
            raise ValueError(
                f"objects overlap before a black background: dataset must be one of {OVERLAPPING}, {got} "
                f"{self.dataset!r}"
            )
        needed: dict[str, Any] = dict(loss="nll", loss_on="logits", mixup=0.0, class_weights="none", balance=0.0)
        for field, value in needed.items():
            now = getattr(self, field)
            if now != value:
                raise ValueError(f"several objects in an image need {field}={value!r}, {got} {field}={now!r}")
        if self.network == "vae":
            raise ValueError(f"network='vae' decodes one object of each image, {got} network='vae'")

    def _validate_vae(self) -> None:
        if self.routing != "vb":
            raise ValueError(f"network='vae' samples from VB's posterior: routing must be 'vb', got {self.routing!r}")
        if self.standardise != "none":
            raise ValueError(
                f"network='vae' decodes images of 0 to 1: standardise must be 'none', got {self.standardise!r}"
            )
        if self.mixup:
            raise ValueError(f"network='vae' decodes one class of each image: mixup must be 0, got {self.mixup}")
        if self.precision == "full" and self.sampling == "posterior":
            raise ValueError(
                "sampling='posterior' needs a diagonal precision in training: precision must be 'gamma' or 'wishart', "
                "got 'full'"
            )
        if self.kl_warmup > self.epochs:
            raise ValueError(f"kl_warmup must be at most epochs={self.epochs}, got {self.kl_warmup:g}")

    def view(self) -> "View":
        """Return how images become the network's input; standardise='dataset' must still be fitted."""
        from vbcaps.data import View

        return View(
            crop=self.crop, pad=self.pad, standardise=self.standardise, flip=self.flip, place=self.place,
            brightness=self.brightness, contrast=self.contrast, rotate=self.rotate, zoom=self.zoom,
            stretch=self.stretch, resample=self.resample, cutout=self.cutout, fill=self.fill,
        )  # fmt: skip

    def prior(self) -> "Prior":
        """Return the prior of every capsule layer."""
        from vbcaps.prior import Prior

        return Prior(*(getattr(self, field) for field in PRIOR), precision=self.precision, learn=self.learn)

    def net(self, in_channels: int, num_classes: int) -> "Network":
        """Build the network; its initial weights come from torch's random numbers."""
        from vbcaps.models import CapsNet, ConvNet
        from vbcaps.vae import CapsVAE

        if self.network == "cnn":
            return ConvNet(self.arch, in_channels, num_classes, self.crop, self.stem)
        options: dict[str, Any] = dict(iters=self.iters)
        if self.routing == "vb":
            options |= dict(activation=self.activation, temper=self.temper, through=self.through, prior=self.prior())
        if self.routing == "em":
            options |= dict(temperature=self.temperature, min_var=self.min_var)
        of_capsules: dict[str, Any] = dict(
            routing_options=options, init=self.init, gain=self.gain, noise=self.noise, norm_pose=self.norm_pose,
            logit_scale=self.loss_on == "logits", norm_logit=self.norm_logit, backend=self.backend,
        )  # fmt: skip
        shape = self.arch, in_channels, num_classes, self.crop, self.routing, self.stem
        if self.objects > 1:  # a class is there in this share of the images: its log odds
            of_capsules |= dict(logit_bias=math.log(self.objects / max(num_classes - self.objects, 1)))
        if self.network == "vae":
            return CapsVAE(*shape, sampling=self.sampling, filters=self.decoder, **of_capsules)
        return CapsNet(*shape, **of_capsules)

    def with_epochs(self, epochs: int) -> "Recipe":
        """Return this recipe with another number of epochs and a schedule that is stretched or shortened with it.

        Warm-ups and milestones keep their share of the run; milestones that fall on one epoch become one. The average
        of weights (``ema``) needs no change: it reaches back over at most a ninth of the steps done
        (``average_share``).

        >>> recipe = Recipe(epochs=200, schedule="steps", milestones=(80, 120, 160), warmup=10.0).with_epochs(20)
        >>> recipe.epochs, recipe.milestones, recipe.warmup
        (20, (8, 12, 16), 1.0)
        """
        _check_type("epochs", epochs, int)
        milestones = {max(round(milestone * epochs / self.epochs), 1) for milestone in self.milestones}
        warmup, kl_warmup = (
            round(part * epochs / self.epochs, 9) for part in (self.warmup, self.kl_warmup)
        )  # 6.8, not 6.800000000000001
        return dataclasses.replace(
            self, epochs=epochs, warmup=warmup, kl_warmup=kl_warmup, milestones=tuple(sorted(milestones))
        )

    def with_fields(self, **fields: Any) -> "Recipe":
        """Return this recipe with other fields, as `vbcaps train` does: with ``epochs``, the schedule follows
        (``with_epochs``), except for its fields that are given as well.

        >>> Recipe(epochs=100, warmup=10.0).with_fields(epochs=20, lr=0.1).warmup
        2.0
        """
        base = self.with_epochs(fields["epochs"]) if "epochs" in fields else self
        return dataclasses.replace(base, **fields)

    def learning_rate(self, step: int, steps: int) -> float:
        """Return the learning rate of ``step``, counted from 0 over the whole run, with ``steps`` in an epoch."""
        warm, total = round(self.warmup * steps), self.epochs * steps
        if step < warm:
            return self.lr * (step + 1) / warm
        progress = (step - warm) / max(total - warm, 1)
        if self.schedule == "exponential":
            return self.lr * self.final**progress
        if self.schedule == "steps":
            return self.lr * self.decay ** sum(step // steps >= milestone for milestone in self.milestones)
        if self.schedule == "cosine":
            return self.lr * (self.final + (1 - self.final) * (1 + math.cos(math.pi * progress)) / 2)
        if self.schedule == "onecycle":
            return self.lr * (1 + (self.final - 1) * progress)
        return self.lr

    def divergence_weight(self, step: int, steps: int) -> float:
        """Return the weight of the VAE's divergence in ``step``, which rises for ``kl_warmup`` epochs."""
        warm = round(self.kl_warmup * steps)
        return self.beta * min((step + 1) / warm, 1.0) if warm else self.beta

    def average_share(self, step: int) -> float:
        """Return the share of the weights after ``step`` in their moving average, which is large at first so that the
        average forgets the initial weights."""
        return 1 - min(self.ema, (1 + step) / (10 + step))

    def to_json(self) -> dict[str, Any]:
        return {field: list(v) if isinstance(v, tuple) else v for field, v in dataclasses.asdict(self).items()}

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> "Recipe":
        """Return the recipe of a run or weights file; it may have fields of an earlier version if they are off."""
        if not isinstance(fields, dict):
            raise ValueError(f"a recipe must have fields, got {ascii(fields)[:60]}")
        kinds, fields = field_types(), without_removed(fields)
        for field in fields:
            if field not in kinds:
                raise ValueError(f"a recipe has no field {field!r}{nearest(field, kinds)}")
        values: dict[str, Any] = {field: tuple(v) if isinstance(v, list) else v for field, v in fields.items()}
        return cls(**values)


def weights_of(words: str) -> tuple[float, ...] | None:
    """Return the numbers in ``class_weights``; none for ``"balanced"``, whose weights follow from the images.

    >>> weights_of("none"), weights_of("balanced"), weights_of("1, 2.5")
    (None, (), (1.0, 2.5))
    """
    if words in ("none", "balanced"):
        return None if words == "none" else ()
    try:
        numbers = tuple(float(word) for word in words.split(","))
    except ValueError:
        numbers = ()
    if not numbers or not all(0 < number < math.inf for number in numbers):
        raise ValueError(f"class_weights must be none, balanced, or numbers above 0 such as 1,5,20, got {words!r}")
    return numbers


def not_for(network: str, routing: str) -> tuple[str, ...]:
    """Return the fields that belong to another network or routing."""
    if network == "cnn":
        return CAPS_ONLY + VAE_ONLY
    owners = ((network, "vae", VAE_ONLY), (routing, "vb", VB_ONLY), (routing, "em", EM_ONLY))
    return tuple(field for now, owner, fields in owners if now != owner for field in fields)


def left_behind(recipe: Recipe, fields: dict[str, Any]) -> dict[str, Any]:
    """Return defaults for the fields that the recipe's network and routing do not have once ``fields`` are changed."""
    if "network" not in fields and "routing" not in fields:
        return {}
    network, routing = fields.get("network", recipe.network), fields.get("routing", recipe.routing)
    left = {field: getattr(Recipe, field) for field in not_for(network, routing)}
    return left | dict(loss_on="logits") if network == "cnn" else left


def field_types() -> dict[str, Any]:
    return typing.get_type_hints(Recipe)


def nearest(word: object, allowed: typing.Iterable[str]) -> str:
    """Return ``"; did you mean 'routing'?"``, or an empty string where no allowed word is near."""
    said = str(word)  # of a long word nobody means a short one, and to compare it takes the square of its length
    found = difflib.get_close_matches(said, list(allowed), n=1) if len(said) <= LONGEST_WORD else []
    return f"; did you mean {found[0]!r}?" if found else ""


def _check_type(field: str, value: object, kind: Any) -> None:
    if isinstance(kind, types.UnionType):
        if value is None:
            return
        (kind,) = (one for one in typing.get_args(kind) if one is not type(None))
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, tuple):
            raise ValueError(f"{field} must be a tuple, got {value!r}")
        for one in value:
            _check_type(field, one, typing.get_args(kind)[0])
        return
    good = type(value) in (int, float) if kind is float else type(value) is kind
    if not good or (kind is float and not math.isfinite(value)):  # type: ignore[arg-type]
        word = {int: "a whole number", float: "a number", bool: "True or False", str: "a word"}[kind]
        raise ValueError(f"{field} must be {word}, got {value!r}")
    if isinstance(value, str) and OBEYED.search(value):
        raise ValueError(f"{field} must have no control characters, got {value!a}")

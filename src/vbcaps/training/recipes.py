"""The paper's experiments, one function each: a variant calls its parent and changes fields.

Numbers are test errors as the paper prints them. In all of them batches of 32 and 3 iterations, as the paper says.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from vbcaps.training.recipe import Recipe, nearest, not_for

__all__ = ["FAMILIAR", "PAPER", "PARAMETERS", "RECIPES", "Recipe", "fast", "paper", "parameters", "recipe"]

# --- smallNORB -------------------------------------------------------------------------------------------------------


def smallnorb() -> Recipe:
    """Table 1, {64,16,16,16,5}: 1.6 +- 0.06% over 5 runs, 169K. How fast the rate decays is not printed: to 1%."""
    return Recipe(name="smallnorb", dataset="smallnorb", crop=32, standardise="image")


def smallnorb_small() -> Recipe:
    """Table 1, {64,8,16,16,5}: 1.93%, 142K."""
    return replace(smallnorb(), name="smallnorb_small", arch=(64, 8, 16, 16))


def smallnorb_large() -> Recipe:
    """Table 1, {64,16,32,32,5}: 1.84%, 318K."""
    return replace(smallnorb(), name="smallnorb_large", arch=(64, 16, 32, 32))


def smallnorb_em() -> Recipe:
    """Table 1, the authors' EM routing in the same network: 1.97%."""
    return replace(smallnorb(), name="smallnorb_em", routing="em")


def smallnorb_dynamic() -> Recipe:
    """Dynamic routing in the same network: not in the paper."""
    return replace(smallnorb(), name="smallnorb_dynamic", routing="dynamic")


def smallnorb_azimuth() -> Recipe:
    """Table 2: 11.33% on novel azimuths, at 3.71% on familiar ones."""
    return replace(smallnorb(), name="smallnorb_azimuth", viewpoint="azimuth", match=0.0371)


def smallnorb_azimuth_em() -> Recipe:
    """Table 2, EM: 12.67% on novel azimuths, at 3.72% on familiar ones."""
    return replace(smallnorb_azimuth(), name="smallnorb_azimuth_em", routing="em", match=0.0372)


def smallnorb_elevation() -> Recipe:
    """Table 2: 11.59% on novel elevations, at 4.32% on familiar ones."""
    return replace(smallnorb(), name="smallnorb_elevation", viewpoint="elevation", match=0.0432)


def smallnorb_elevation_em() -> Recipe:
    """Table 2, EM: 12.04% on novel elevations, at 4.29% on familiar ones."""
    return replace(smallnorb_elevation(), name="smallnorb_elevation_em", routing="em", match=0.0429)


def smallnorb_azimuth_whole() -> Recipe:
    """The same, trained to the end, whatever its error on familiar azimuths then is: not in the paper."""
    return _to_the_end(smallnorb_azimuth())


def smallnorb_azimuth_em_whole() -> Recipe:
    """The same with EM: not in the paper."""
    return _to_the_end(smallnorb_azimuth_em())


def smallnorb_elevation_whole() -> Recipe:
    """The same, trained to the end, whatever its error on familiar elevations then is: not in the paper."""
    return _to_the_end(smallnorb_elevation())


def smallnorb_elevation_em_whole() -> Recipe:
    """The same with EM: not in the paper."""
    return _to_the_end(smallnorb_elevation_em())


def _to_the_end(parent: Recipe) -> Recipe:
    return replace(parent, name=f"{parent.name}_whole", match=0.0)


# --- Fashion-MNIST ---------------------------------------------------------------------------------------------------


def fashion() -> Recipe:
    """Table 1, {64,16,16,16,10}: 5.2 +- 0.07% over 3 runs, 172K."""
    return Recipe(
        name="fashion", dataset="fashion-mnist", crop=32, pad=4, standardise="dataset", epochs=200, optimiser="sgd",
        lr=0.1, weight_decay=1e-6, schedule="steps", milestones=(80, 120, 160), decay=0.1,
    )  # fmt: skip


def fashion_small() -> Recipe:
    """Table 1, {64,8,16,16,10}: 5.46%, 145K."""
    return replace(fashion(), name="fashion_small", arch=(64, 8, 16, 16))


def fashion_large() -> Recipe:
    """Table 1, {64,16,32,32,10}: 5.61%, 323K."""
    return replace(fashion(), name="fashion_large", arch=(64, 16, 32, 32))


def fashion_em() -> Recipe:
    """Table 1, the authors' EM routing in the same network: 6.14%."""
    return replace(fashion(), name="fashion_em", routing="em")


def fashion_dynamic() -> Recipe:
    """Dynamic routing in the same network: not in the paper."""
    return replace(fashion(), name="fashion_dynamic", routing="dynamic")


def fashion_enlarged() -> Recipe:
    """The same network sees images of 28 enlarged to 36, in frames of 40: not in the paper.

    The first convolution has a stride of 2, so that it sees more of a shirt; capsules are shared by all positions, so
    that there are no more parameters. It does better on images held out, and no better in the test (results/NOTES.md).
    """
    return replace(fashion(), name="fashion_enlarged", image_size=36, crop=40)


def fashion_learned() -> Recipe:
    """Section "Sensitivity to Prior Hyperparameters": alpha0 learned by backpropagation, 5.19%."""
    return replace(fashion(), name="fashion_learned", learn=("alpha0",))


# --- SVHN ------------------------------------------------------------------------------------------------------------


def svhn() -> Recipe:
    """Table 1, {64,16,32,32,10}: 3.9 +- 0.06% over 3 runs, 323K; the core training set only."""
    return Recipe(
        name="svhn", dataset="svhn", crop=32, pad=4, standardise="dataset", arch=(64, 16, 32, 32), epochs=350,
        optimiser="sgd", lr=0.1, schedule="steps", milestones=(150, 250, 300), decay=0.1,
    )  # fmt: skip


def svhn_small() -> Recipe:
    """Table 1, {64,8,16,16,10}: 4.75%, 145K."""
    return replace(svhn(), name="svhn_small", arch=(64, 8, 16, 16))


def svhn_medium() -> Recipe:
    """Table 1, {64,16,16,16,10}: 4.18%, 172K."""
    return replace(svhn(), name="svhn_medium", arch=(64, 16, 16, 16))


def svhn_em() -> Recipe:
    """Table 1, the authors' EM routing in {64,16,32,32,10}: 5.17%."""
    return replace(svhn(), name="svhn_em", routing="em")


def svhn_dynamic() -> Recipe:
    """Dynamic routing in the same network: not in the paper."""
    return replace(svhn(), name="svhn_dynamic", routing="dynamic")


# --- CIFAR-10 --------------------------------------------------------------------------------------------------------


def cifar10() -> Recipe:
    """Table 1, {64,16,32,32,10}: 11.2 +- 0.09% over 3 runs, 323K."""
    return replace(svhn(), name="cifar10", dataset="cifar10", flip=True)


def cifar10_small() -> Recipe:
    """Table 1, {64,8,16,16,10}: 13.1%, 145K."""
    return replace(cifar10(), name="cifar10_small", arch=(64, 8, 16, 16))


def cifar10_medium() -> Recipe:
    """Table 1, {64,16,16,16,10}: 12.4%, 172K."""
    return replace(cifar10(), name="cifar10_medium", arch=(64, 16, 16, 16))


def cifar10_em() -> Recipe:
    """Table 1, the authors' EM routing in {64,16,32,32,10}: 12.26%."""
    return replace(cifar10(), name="cifar10_em", routing="em")


def cifar10_dynamic() -> Recipe:
    """Dynamic routing in the same network: not in the paper."""
    return replace(cifar10(), name="cifar10_dynamic", routing="dynamic")


def cifar10_residual() -> Recipe:
    """Section "CIFAR-10", the stem replaced by four residual blocks: 7.8%."""
    return replace(cifar10(), name="cifar10_residual", stem="residual")


# --- MNIST to affNIST ------------------------------------------------------------------------------------------------


def affnist() -> Recipe:
    """Figure 5, {64,16,16,16,10}: trained on MNIST placed anywhere in 40x40, 1.9% on affNIST (0.3% on MNIST).

    The paper does not print how it was trained: as for Fashion-MNIST.
    """
    return replace(fashion(), name="affnist", dataset="affnist", crop=40, pad=0, place=True)


def affnist_matched() -> Recipe:
    """Figure 5, the same stopped at 0.8% on MNIST, as the networks it is compared with: 3.1% on affNIST."""
    return replace(affnist(), name="affnist_matched", match=0.008)


def affnist_cnn() -> Recipe:
    """A plain CNN with as many parameters as the capsule network, 169K: not in the paper.

    It quotes a larger one of Hinton et al. (2018): 14.1% on affNIST at 0.8% on MNIST. The loss is of the logits, as
    everyone trains a CNN; all else is as for the capsules.
    """
    return _as_cnn(affnist())


def affnist_matched_cnn() -> Recipe:
    """The same CNN stopped at 0.8% on MNIST."""
    return _as_cnn(affnist_matched())


def _as_cnn(parent: Recipe) -> Recipe:
    return replace(parent, name=f"{parent.name}_cnn", network="cnn", arch=(64, 64, 72, 72), loss_on="logits")


# --- ours ------------------------------------------------------------------------------------------------------------


def default() -> Recipe:
    """The embedded sample of Fashion-MNIST and a network small enough for two cores and no patience.

    Chosen on an eighth of the training images, held out. Not padded, since 28x28 takes two thirds of the time of 32x32.
    The loss is of the logits, so that what `vbcaps predict` shows are probabilities.
    """
    return Recipe(
        name="default", dataset="sample", crop=28, standardise="dataset", flip=True, arch=(32, 8, 8, 8), iters=2,
        loss_on="logits", batch=32, epochs=9, lr=4e-3, schedule="onecycle", warmup=0.5, final=0.01,
        ema=0.99,
    )  # fmt: skip


# What was chosen on a share of the training set held out (results/README.md): fields of the fast twins by dataset, and
# those of one routing or of one recipe alone. EM and the residual stem have VB's, with Muon not compared; affNIST has
# what Fashion-MNIST had before, without its mirrors and squares. What stops at a matched error stops early; some such
# recipes have a shorter schedule, so that their rate has begun to fall by then.
_ADAMW: dict[str, Any] = dict(
    optimiser="adamw", lr=0.0015, weight_decay=0.2, gain=0.25, activation="paper", loss_on="logits", ema=0.998
)
_DYNAMIC = dict(lr=0.003, weight_decay=0.1, gain=1.0)
_ELEVATION: dict[str, Any] = dict(epochs=40, ema=0.99, rotate=30, zoom=0.3, stretch=0.4, resample="bicubic")
_MATCHED: dict[str, Any] = dict(optimiser="muon", lr=0.002, epochs=2, ema=0.99)
TUNED: dict[str, dict[str, Any]] = {
    "smallnorb": dict(
        optimiser="muon", lr=0.003, weight_decay=0.5, epochs=100, image_size=36, pad=2, fill="edge", cutout=12,
        mixup=0.5, ema=0.998, activation="paper",
    ),
    "smallnorb dynamic": dict(optimiser="adam", lr=0.003, weight_decay=0.0),
    "smallnorb_elevation": _ELEVATION,
    "smallnorb_elevation_em": _ELEVATION,
    "fashion-mnist": _ADAMW | dict(optimiser="muon", lr=0.002, epochs=150, flip=True, cutout=8),
    "fashion-mnist dynamic": _DYNAMIC | dict(optimiser="adamw"),
    "fashion_enlarged": dict(epochs=100, cutout=10),
    "svhn": _ADAMW | dict(epochs=40, fill="edge", rotate=8, zoom=0.1, stretch=0.1, brightness=0.3, contrast=0.3),
    "svhn dynamic": _DYNAMIC,
    "cifar10": _ADAMW | dict(optimiser="muon", lr=0.003, epochs=50, cutout=8),
    "cifar10 dynamic": _DYNAMIC | dict(optimiser="adamw"),
    "affnist": _ADAMW | dict(epochs=20),
    "affnist_matched": _MATCHED,
    "affnist_matched_cnn": _MATCHED,
}  # fmt: skip


def fast(make: Callable[[], Recipe]) -> Recipe:
    """Fewer epochs, a tenth unless tuned, in batches of 128; the rate rises for a tenth of them, then falls in a
    straight line. Of what is tuned EM and Dynamic leave out the fields that are VB's alone, a CNN those of capsules."""
    recipe = make()
    changes: dict[str, Any] = dict(batch=128, epochs=max(recipe.epochs // 10, 1), lr=recipe.lr * 2)
    for key in (recipe.dataset, f"{recipe.dataset} {recipe.routing}", recipe.name):
        changes |= TUNED.get(key, {})
    changes = {field: value for field, value in changes.items() if field not in not_for(recipe.network, recipe.routing)}
    return replace(
        recipe, name=f"{recipe.name}_fast", schedule="onecycle", milestones=(), warmup=changes["epochs"] / 10,
        final=0.01, **changes,
    )  # fmt: skip


_PAPERS = (
    smallnorb, smallnorb_small, smallnorb_large, smallnorb_em, smallnorb_dynamic,
    smallnorb_azimuth, smallnorb_azimuth_em, smallnorb_elevation, smallnorb_elevation_em,
    smallnorb_azimuth_whole, smallnorb_azimuth_em_whole, smallnorb_elevation_whole, smallnorb_elevation_em_whole,
    fashion, fashion_small, fashion_large, fashion_em, fashion_dynamic, fashion_enlarged, fashion_learned,
    svhn, svhn_small, svhn_medium, svhn_em, svhn_dynamic,
    cifar10, cifar10_small, cifar10_medium, cifar10_em, cifar10_dynamic, cifar10_residual,
    affnist, affnist_matched, affnist_cnn, affnist_matched_cnn,
)  # fmt: skip


def _recipes() -> Iterator[tuple[str, Callable[[], Recipe]]]:
    yield "default", default
    for make in _PAPERS:
        yield make.__name__, make
        yield f"{make.__name__}_fast", lambda make=make: fast(make)  # type: ignore[misc]


RECIPES: dict[str, Callable[[], Recipe]] = dict(_recipes())

PAPER = dict(
    smallnorb="1.6 ± 0.06", smallnorb_small="1.93", smallnorb_large="1.84", smallnorb_em="1.97",
    smallnorb_azimuth="11.33", smallnorb_azimuth_em="12.67",
    smallnorb_elevation="11.59", smallnorb_elevation_em="12.04",
    fashion="5.2 ± 0.07", fashion_small="5.46", fashion_large="5.61", fashion_em="6.14", fashion_learned="5.19",
    svhn="3.9 ± 0.06", svhn_small="4.75", svhn_medium="4.18", svhn_em="5.17",
    cifar10="11.2 ± 0.09", cifar10_small="13.1", cifar10_medium="12.4", cifar10_em="12.26", cifar10_residual="7.8",
    affnist="1.9", affnist_matched="3.1",
)  # fmt: skip

# Beside them, the paper's error on what is familiar: the viewpoints of the training set, or MNIST.
FAMILIAR = dict(
    smallnorb_azimuth="3.71", smallnorb_azimuth_em="3.72", smallnorb_elevation="4.32", smallnorb_elevation_em="4.29",
    affnist="0.3", affnist_matched="0.8",
)  # fmt: skip

# Learned numbers of each network, which a test holds to the network: building it takes PyTorch.
PARAMETERS = dict(
    default=43_541,
    smallnorb=169_802, smallnorb_small=142_666, smallnorb_large=318_602, smallnorb_em=169_802,
    smallnorb_dynamic=169_728, smallnorb_azimuth=169_802, smallnorb_azimuth_em=169_802,
    smallnorb_elevation=169_802, smallnorb_elevation_em=169_802,
    smallnorb_azimuth_whole=169_802, smallnorb_azimuth_em_whole=169_802,
    smallnorb_elevation_whole=169_802, smallnorb_elevation_em_whole=169_802,
    fashion=169_492, fashion_small=142_356, fashion_large=319_572, fashion_em=169_492, fashion_dynamic=169_408,
    fashion_enlarged=169_492, fashion_learned=169_495,
    svhn=322_772, svhn_small=145_556, svhn_medium=172_692, svhn_em=322_772, svhn_dynamic=322_624,
    cifar10=322_772, cifar10_small=145_556, cifar10_medium=172_692, cifar10_em=322_772, cifar10_dynamic=322_624,
    cifar10_residual=899_988,
    affnist=169_492, affnist_matched=169_492, affnist_cnn=169_082, affnist_matched_cnn=169_082,
)  # fmt: skip


def recipe(name: str) -> Recipe:
    """``recipe("smallnorb_fast")``; an unknown name is an error that says the nearest."""
    if name not in RECIPES:
        raise ValueError(f"there is no recipe {name!r}{nearest(name, RECIPES)}; they are {', '.join(RECIPES)}")
    return RECIPES[name]()


def paper(name: str) -> str | None:
    """The paper's test error in percent, None for what is not in it; a fast twin has its parent's."""
    return PAPER.get(name.removesuffix("_fast"))


def parameters(name: str) -> int:
    """How many numbers the network learns; a fast twin has its parent's, and one more to scale logits with."""
    parent = name.removesuffix("_fast")
    return PARAMETERS[parent] + (recipe(name).loss_on != recipe(parent).loss_on)

r"""Scores of uncertainty for each image, in one pass. A score is larger where the image is less familiar.

All networks:

=================  ====================================================================================================
``max_softmax``    1 - the probability of the answer
``entropy``        entropy of the probabilities
``energy``         $-\ln \sum_c e^{z_c}$ of the logits (Liu et al. 2020)
``density.NAME``   minus the log density of the features NAME, if the model has densities (``fit_densities``)
=================  ====================================================================================================

VB networks, of the capsule j of the answer:

=================  ====================================================================================================
``precision``      $-E[\ln|\Lambda_j|]$: the votes lie far apart
``pose_entropy``   $H[q(\mu_j, \Lambda_j)]$
``class_entropy``  $H[q(\pi)]$ of the shares of all classes
``kl``             $-KL[q(\mu_j, \Lambda_j) \,\|\, p(\mu, \Lambda)]$: little was learned about the pose
``votes``          $-r_j$: few votes went to the answer
``alpha``          $-\alpha_j / \sum_j \alpha_j$: the expected share of the answer
``epistemic``      mean over d of $1 / (\kappa_j \nu_j \psi_{jd})$, the squared scale of Student's t of $\mu_{jd}$
``elbo``           minus the evidence lower bound of the class layer, per unit of votes
=================  ====================================================================================================

Except for ``class_entropy`` and ``elbo``, these scores are larger for fewer or scattered votes, which are a sign of a
strange image only if a network answers with the class that took many votes, as the loss ``evidence`` teaches it. By
``activation="paper"`` votes lower the activation: without that loss a trained network answers with the class that took
the fewest, and its familiar images have the larger scores.

Axes: n image, c class, l position, j capsule type, d pose entry, f feature.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from vbcaps.heads import BackboneCapsNet, CapsHead
from vbcaps.inference import evaluating, exact_convolutions
from vbcaps.layers import Capsules, ClassCaps, without_autocast
from vbcaps.models import ConvNet
from vbcaps.routing import Mixture, Posterior
from vbcaps.routing.em import EMRouting
from vbcaps.routing.vb import VBRouting, expected_logdet
from vbcaps.routing.votes import in_fields
from vbcaps.uncertainty.density import Density, fit_density
from vbcaps.uncertainty.metrics import check_labels
from vbcaps.uncertainty.predictive import votes_of
from vbcaps.vae import capsules_of

if TYPE_CHECKING:
    from vbcaps.weights.model import Model

LAYERS = ("conv_caps1", "conv_caps2", "class_caps")
OF_ALL = ("max_softmax", "entropy", "energy")
OF_POSTERIOR = ("precision", "pose_entropy", "class_entropy", "kl", "votes", "alpha", "epistemic", "elbo")


class Look(NamedTuple):
    """What one pass over images gives.

    Args:
        logits: ``n c``.
        scores: of the posterior, by name, ``n`` each; empty for other networks than VB capsules.
        features: what densities may be fitted to, by name, ``n f`` each.
    """

    logits: Tensor
    scores: dict[str, Tensor]
    features: dict[str, Tensor]


def scores(model: "Model", images: Any, *, batch_size: int = 256) -> dict[str, Tensor]:
    """Return every score of uncertainty that the model has, ``n`` each, on the CPU; larger is less familiar.

    Args:
        model: a trained network.
        images: anything that ``model.predict`` takes.
        batch_size: how many images the network sees at a time.

    Example:
        >>> import vbcaps
        >>> from vbcaps.uncertainty import scores
        >>> found = scores(vbcaps.load("fashion_laptop"), torch.randint(0, 256, (4, 28, 28), dtype=torch.uint8))
        >>> found["max_softmax"].shape, "elbo" in found
        (torch.Size([4]), True)
    """
    return scores_of(model, look(model, images, features=bool(model.densities), batch_size=batch_size))


def scores_of(model: "Model", seen: Look) -> dict[str, Tensor]:
    """Return the scores of images that the network has looked at, with features if the model has densities."""
    return (
        of_logits(seen.logits, model.temperature)
        | seen.scores
        | {
            f"density.{name}": -density.log_prob(joined(seen.features, name.split("+"))).float()
            for name, density in model.densities.items()
        }
    )


def posterior_scores(model: "Model", images: Any, *, batch_size: int = 256) -> dict[str, Tensor]:
    """Return the scores of the posterior alone; an error says what to do where the network has none.

    Example:
        >>> import vbcaps
        >>> from vbcaps.uncertainty import posterior_scores
        >>> found = posterior_scores(vbcaps.load("fashion_laptop"), torch.zeros(2, 28, 28, dtype=torch.uint8))
        >>> sorted(found)[:3]
        ['alpha', 'class_entropy', 'elbo']
    """
    needs_posterior(model)
    return look(model, images, batch_size=batch_size).scores


def needs_posterior(model: "Model") -> None:
    if capsules_of(model.net) is None or model.recipe.routing != "vb":
        kind = "a CNN" if isinstance(model.net, ConvNet) else f"routing={model.recipe.routing!r}"
        raise ValueError(
            f"scores of the posterior need a capsule network with VB routing, got {kind}: train one with "
            f"routing='vb', or use {', '.join(OF_ALL)} and densities"
        )


def needs_one_answer(model: "Model") -> None:
    """Raise an error for a network that names several objects in an image."""
    if model.recipe.objects > 1:
        raise ValueError(
            f"{model.name} names {model.recipe.objects} objects in an image: scores of uncertainty, densities and "
            "calibration are of networks that give one answer"
        )


def of_logits(logits: Tensor, temperature: float = 1.0) -> dict[str, Tensor]:
    """Return the scores of logits ``n c``; the temperature divides them, but for the energy."""
    log_p = (logits / temperature).log_softmax(1)
    return dict(
        max_softmax=1 - log_p.max(1).values.exp(),
        entropy=-(log_p.exp() * log_p).sum(1),
        energy=-logits.logsumexp(1),
    )


@torch.no_grad()
def head_scores(net: CapsHead | BackboneCapsNet, x: Tensor, temperature: float = 1.0) -> dict[str, Tensor]:
    """Return every score of uncertainty of capsules on a backbone, ``n`` each; larger is less familiar.

    Args:
        net: a head, or a network of a backbone and a head; it runs in evaluation mode.
        x: the network's input: images for a network, feature maps for a head.
        temperature: divides the logits.

    Example:
        >>> from vbcaps import CapsHead
        >>> from vbcaps.uncertainty import head_scores
        >>> found = head_scores(CapsHead(8, num_classes=3, caps=(4,)), torch.randn(2, 8, 5, 5))
        >>> found["entropy"].shape, "elbo" in found
        (torch.Size([2]), True)
    """
    head, features = (net.head, net.features) if isinstance(net, BackboneCapsNet) else (net, lambda x: x)
    with evaluating(net):
        children = head.children_of_classes(features(x))
        out = head.class_caps(children)
    of_vb = of_posterior(head.class_caps, children, out) if isinstance(out.posterior, Posterior) else {}
    return of_logits(out.logits, temperature) | of_vb


@torch.no_grad()
def look(model: "Model", images: Any, *, features: bool = True, batch_size: int = 256) -> Look:
    """Run the network once over images, and return logits, the posterior's scores, and features.

    Args:
        model: a trained network.
        images: anything that ``model.predict`` takes.
        features: whether to return features, too: they take a posterior of every layer.
        batch_size: how many images the network sees at a time.

    Example:
        >>> import vbcaps
        >>> seen = look(vbcaps.load("fashion_laptop"), torch.zeros(2, 28, 28, dtype=torch.uint8))
        >>> seen.features["class_caps.m"].shape
        torch.Size([2, 160])
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    needs_one_answer(model)
    pixels = model.read(images)
    weight = next(model.net.parameters())
    seen = []
    with evaluating(model), exact_convolutions():
        for part in pixels.split(batch_size):
            x = model.view.test(part.to(weight.device)).to(weight.dtype)
            seen.append(_look_at(capsules_of(model.net) or model.net, x, features))

    def whole(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {name: torch.cat([part[name] for part in parts]).float().cpu() for name in parts[0]}

    logits = torch.cat([one.logits for one in seen]).float().cpu()
    return Look(logits, whole([one.scores for one in seen]), whole([one.features for one in seen]))


def _look_at(net: Any, x: Tensor, features: bool) -> Look:
    if isinstance(net, ConvNet):
        pooled = net.features(x)
        logits = net.head(pooled)
        return Look(logits, {}, dict(logits=logits, features=pooled) if features else {})
    found: dict[str, Tensor] = {}
    caps = net.primary_caps(net.stem(x))
    for name in LAYERS[:2]:
        caps = getattr(net, name)(caps, posterior=features)
        if features:
            found |= _features(name, caps)
    children, out = caps, net.class_caps(caps)
    if features:
        found |= _features("class_caps", out) | dict(logits=out.logits)
    of_vb = of_posterior(net.class_caps, children, out) if isinstance(out.posterior, Posterior) else {}
    return Look(out.logits, of_vb, found)


def _features(layer: str, caps: Capsules) -> dict[str, Tensor]:
    """Return what a layer's routing computed, the mean over positions, ``n f`` each."""
    q = caps.posterior
    assert q is not None
    kinds = dict(m=q.m)
    if isinstance(q, Mixture):
        kinds |= dict(precision=-q.var.log())
    if isinstance(q, Posterior):
        psi = q.psi.diagonal(dim1=-2, dim2=-1) if q.full else q.psi
        kinds |= dict(kappa=q.kappa.log()[..., None], precision=(q.nu[..., None] * psi).log())
    at_least_3 = {kind: x if x.ndim == 4 else x[:, None] for kind, x in kinds.items()}  # n l j d
    return {f"{layer}.{kind}": x.mean(1).flatten(1).to(caps.poses.dtype) for kind, x in at_least_3.items()}


def of_posterior(layer: ClassCaps, children: Capsules, out: Capsules) -> dict[str, Tensor]:
    """Return the scores of the posterior, ``n`` each, where a class layer with VB routing made ``out`` of children."""
    q = out.posterior
    assert isinstance(q, Posterior)
    answer = out.logits.argmax(1, keepdim=True)

    def of_answer(x: Tensor) -> Tensor:
        return x.gather(1, answer)[:, 0]

    of_pi, of_pose = q.entropy()
    psi = q.psi.diagonal(dim1=-2, dim2=-1) if q.full else q.psi
    lndet = expected_logdet(q, "full" if q.full else "gamma")
    return dict(
        precision=-of_answer(lndet.to(q.m.dtype)),
        pose_entropy=of_answer(of_pose),
        class_entropy=of_pi,
        kl=-of_answer(q.kl()[1]),
        votes=-of_answer(votes_of(q)),
        alpha=-of_answer(q.alpha / q.alpha.sum(1, keepdim=True)),
        epistemic=of_answer((1 / (q.kappa[..., None] * q.nu[..., None] * psi)).mean(-1).to(q.m.dtype)),
        elbo=-_elbo(layer, children, q),
    )


def _elbo(layer: ClassCaps, children: Capsules, q: Posterior) -> Tensor:
    """Return the evidence lower bound of the class layer, divided by the activation of all children."""
    with without_autocast(children.activations.device):
        a, pose, W, fields, coordinates, _ = layer.children_of(children)
        a, V = in_fields(a, pose, W, fields, coordinates)
    return q.elbo(a[:, 0], V[:, 0]).total / a.flatten(1).sum(1).clamp_min(1e-6)


def fit_densities(
    model: "Model",
    images: Any,
    labels: Tensor,
    features: Iterable[str] = (),
    *,
    tied: bool = True,
    batch_size: int = 256,
) -> None:
    """Fit densities of the network's features to training images, and keep them in the model.

    From then on ``scores`` has ``density.NAME`` for each, and ``model.save`` writes them.

    Args:
        model: a trained network.
        images: training images, anything that ``model.predict`` takes; some thousands are enough.
        labels: their classes, ``n`` of int64, in the order of ``model.classes``.
        features: names of ``look(...).features``; several are joined by ``+``. By default ``class_caps.m`` (capsules)
            or ``features`` (a CNN).
        tied: one covariance for all classes, else one for each.
        batch_size: how many images the network sees at a time.

    Example:
        >>> import vbcaps
        >>> from vbcaps.data import load_dataset
        >>> from vbcaps.uncertainty import fit_densities, scores
        >>> model, train = vbcaps.load("fashion_laptop"), load_dataset("sample").train
        >>> fit_densities(model, train.images[:500], train.labels[:500])
        >>> "density.class_caps.m" in scores(model, train.images[:4])
        True
    """
    check_labels(labels, model.num_classes)
    names = list(features) or (["features"] if isinstance(model.net, ConvNet) else ["class_caps.m"])
    seen = look(model, images, batch_size=batch_size)
    if len(labels) != len(seen.logits):
        raise ValueError(f"there are {len(seen.logits)} images and {len(labels)} labels")
    fitted = {
        name: fit_density(joined(seen.features, name.split("+")), labels.cpu(), model.num_classes, tied=tied)
        for name in names
    }
    model.densities.update(fitted)


def feature_sizes(net: Any) -> dict[str, int]:
    """Return how many numbers each of ``Look.features`` has, without a look at an image."""
    if isinstance(net, ConvNet):
        return dict(logits=net.num_classes, features=net.head.in_features)
    caps, sizes = capsules_of(net), {}
    assert caps is not None
    for name in LAYERS:
        layer = getattr(caps, name)
        sizes[f"{name}.m"] = layer.out_caps * layer.pose_size**2
        if isinstance(layer.routing, VBRouting):
            sizes[f"{name}.kappa"] = layer.out_caps
        if isinstance(layer.routing, VBRouting | EMRouting):
            sizes[f"{name}.precision"] = sizes[f"{name}.m"]
    return sizes | dict(logits=caps.class_caps.out_caps)


def check_densities(net: Any, classes: int, densities: Mapping[str, Density]) -> None:
    """Raise an error if densities are of features that the network does not have, or of another size."""
    there = feature_sizes(net) if densities else {}
    for name, density in densities.items():
        unknown = [one for one in name.split("+") if one not in there]
        if unknown:
            what = f"this network has no features {', '.join(unknown)}; it has {', '.join(there)}"
        else:
            its, (of_classes, of_features) = sum(there[one] for one in name.split("+")), density.mean.shape
            if (its, classes) == (of_features, of_classes):
                continue
            what = f"it is of {of_features} features and {of_classes} classes, and this network has {its} and {classes}"
        raise ValueError(
            f"the density of {name} belongs to another network: {what}; fit it again with "
            "vbcaps.uncertainty.fit_densities"
        )


def joined(features: dict[str, Tensor], names: Sequence[str]) -> Tensor:
    """Return some of ``Look.features`` side by side, ``n f``; an unknown name raises an error that lists the known."""
    if unknown := [name for name in names if name not in features]:
        raise ValueError(f"this network has no features {', '.join(unknown)}; it has {', '.join(features)}")
    return torch.cat([features[name] for name in names], 1)

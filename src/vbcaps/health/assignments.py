r"""How children are assigned to parents: how sharply, how much that depends on the image, and where votes come from.

A child competes for every parent type *and position* that sees it, so its assignment is a distribution over all slots
(field, type) that hold it: $p = r / \sum r$ over these $K = \text{seen} \cdot d_j$ slots. From the second iteration on
the sum is 1; the first responsibilities, $1/d_j$ in each field, become the even assignment $1/K$.

Axes: n image, c child, l parent position, i child slot in a receptive field, j parent type, h w row and column.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vbcaps.layers import Capsules, Children, ConvCaps
from vbcaps.routing.fields import Fields

LEAST = 1e-6  # of a child's activation over all images, below which it says nothing


class Routed(NamedTuple):
    """One layer's routing of a batch.

    Args:
        layer: the layer.
        children: its numbered input.
        r: the responsibilities that the last update used, ``n l i j``.
        size: rows, columns and types of the map of children, without padding.
        parents: its output.
    """

    layer: ConvCaps
    children: Children
    r: Tensor
    size: tuple[int, int, int]
    parents: Capsules

    def weights(self) -> Tensor:
        r"""Return the weight of each vote, $R_{ij} = a_i r_{ij}$, ``n l i j``."""
        return in_slots(self.children.a, self.children.fields)[..., None] * self.r


def in_slots(x: Tensor, fields: Fields) -> Tensor:
    """Return what the children have, ``n c``, in the slots that hold them, ``n l i``."""
    return x.index_select(1, fields.child.flatten()).unflatten(1, fields.child.shape)


def of_children(x: Tensor, fields: Fields) -> Tensor:
    """Return the sum over the slots of each child, ``n l i`` to ``n c``, in the same order on any device."""
    slots = F.pad(x.flatten(1), (0, 1))  # the last is empty: -1
    return slots[:, fields.parents].sum(2)


class Assignments:
    """Sums over images from which `sharpness` and `information` follow; a child counts by its activation.

    Args:
        fields: the receptive fields of the layer.
        types: how many types of parent there are.
    """

    def __init__(self, fields: Fields, types: int):
        self.fields, self.types = fields, types
        device, slots = fields.child.device, (*fields.child.shape, types)
        self.a = torch.zeros(len(fields.seen), dtype=torch.float64, device=device)  # c
        self.entropy = torch.zeros_like(self.a)  # c   sum of a H(p)
        self.p = torch.zeros(slots, dtype=torch.float64, device=device)  # l i j   sum of a p

    def add(self, a: Tensor, r: Tensor) -> None:
        """Take in a batch: activations of the children ``n c`` and responsibilities ``n l i j``."""
        total = of_children(r.sum(-1), self.fields).clamp_min(torch.finfo(r.dtype).tiny)
        p = r / in_slots(total, self.fields)[..., None]
        entropy = of_children(-torch.xlogy(p, p).sum(-1), self.fields)
        self.a += a.double().sum(0)
        self.entropy += (a * entropy).double().sum(0)
        self.p += (in_slots(a, self.fields)[..., None] * p).double().sum(0)

    def found(self) -> tuple[float, float, float] | None:
        r"""Return sharpness, information, and information as a share; None where no child has a choice.

        Sharpness is the mean of $1 - H(p) / \ln K$ over images and children. Information is
        $I = H(\bar p) - \overline{H(p)}$ of a child, where the bar is a mean over images; its share is $I / \ln K$. So
        sharpness less this share is what is assigned alike in every image. All means are weighted by activation.
        """
        choices = (self.fields.seen * self.types).double()
        chosen = (choices > 1) & (self.a > LEAST)
        if not chosen.any():
            return None
        a = self.a.clamp_min(LEAST)
        mean = self.p / a[self.fields.child][..., None]
        of_mean = of_children(-torch.xlogy(mean, mean).sum(-1)[None], self.fields)[0]
        information = (of_mean - self.entropy / a).clamp_min(0)
        most = choices.clamp_min(2).log()
        weight = torch.where(chosen, self.a, 0) / self.a[chosen].sum()
        sharpness = (1 - self.entropy / a / most).clamp_min(0)
        means = (weight * torch.stack([sharpness, information, information / most])).sum(1).tolist()
        return means[0], means[1], means[2]


def map_of_votes(classes: Routed, of: Tensor) -> Tensor:
    """Return how many votes each position gave a class of each image, ``n (h w)``; ``of`` names the classes, ``n``."""
    rows = torch.arange(len(of), device=of.device)
    return classes.weights()[:, 0][rows, :, of].unflatten(1, classes.size).sum(3).flatten(1)


def parts_of_classes(layers: list[Routed], of: Tensor) -> Tensor:
    """Return the parts of each image that made a class capsule, ``n (h w)`` over the primary capsules.

    As in `vbcaps.trace.parts_of`, each parent is divided among its children in proportion to the weight of their votes.

    Args:
        layers: what every layer did with the images, the class layer last.
        of: the class of each image, ``n``.
    """
    held = F.one_hot(of, layers[-1].r.shape[-1]).to(layers[-1].r.dtype)[:, None]  # n l j
    for one in reversed(layers):
        R = one.weights()
        shares = R / R.sum(2, keepdim=True).clamp_min(torch.finfo(R.dtype).tiny)
        taken = of_children((shares * held[:, :, None]).sum(-1), one.children.fields)  # n c
        (h, w, types), (top, left) = one.size, one.layer.padding if one is not layers[-1] else (0, 0)
        whole = taken.unflatten(1, (h + 2 * top, w + 2 * left, types))
        held = whole[:, top : top + h, left : left + w].flatten(1, 2)  # n l j of the layer below
    return held.sum(2)


def correlations(x: Tensor, y: Tensor) -> Tensor:
    """Return the correlation of two maps of each image, ``n k`` each; NaN where one of them is even."""
    x, y = (z.double() - z.double().mean(1, keepdim=True) for z in (x, y))
    lengths = x.norm(dim=1) * y.norm(dim=1)
    return torch.where(lengths > 1e-12, (x * y).sum(1) / lengths.clamp_min(1e-300), torch.nan)

"""The network of one seed while it trains: the training step, and everything that a step changes."""

import copy
import gc
import hashlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from vbcaps.data import Split, View
from vbcaps.data.augment import mixup
from vbcaps.data.overlap import Overlap
from vbcaps.layers import Capsules
from vbcaps.losses import (
    VAELoss,
    activation_nll_loss,
    binary_cross_entropy,
    cross_entropy,
    evidence_loss,
    several_hot,
    spread_loss,
    spread_margin,
    total_loss,
    vae_loss,
)
from vbcaps.models import Scores
from vbcaps.training.distributed import ALONE, Group, synchronise
from vbcaps.training.imbalance import class_weights, quotas, take_quotas
from vbcaps.training.measures import wrong
from vbcaps.training.muon import Muon, is_map
from vbcaps.training.recipe import Recipe
from vbcaps.training.step import Graph
from vbcaps.vae import CapsVAE, Network, Reconstruction

PARTS = ("classification", "divergence", "reconstruction")  # of the loss of a VAE
NEVER = 2**62  # the value of Totals.bad if every loss was finite


class NonFinite(ArithmeticError):
    """The loss is NaN or infinite. The message names the step, the layer and what to try."""


class Totals(NamedTuple):
    """The loss and error of the epoch so far."""

    loss: float  # mean
    error: float
    bad: int  # first step whose loss was not finite, or NEVER
    parts: dict[str, float]  # of a VAE's loss: classification, divergence, and reconstruction for each pixel


def epoch_plan(
    seed: int, epoch: int, count: int, draws: int, taken: tuple[list[Tensor], list[int]] | None = None
) -> tuple[Tensor, Tensor]:
    """Return the order of an epoch's images, ``count``, and the random numbers of their augmentation, ``count draws``.

    Every image comes once, or if ``taken`` has the numbers of the images of each class and how many of them an epoch
    takes, ``count`` in all, as often as that says.

    The plan depends only on seed and epoch, so any step can be repeated on any number of processes, and no random state
    has to be saved. The seed is hashed because PyTorch's generator reads only 32 bits of it.
    """
    digest = hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=4).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    order = torch.randperm(count, generator=generator) if taken is None else take_quotas(*taken, generator)
    return order, torch.rand(count, draws, generator=generator)


class Learner:
    """A network that ``learner()`` trains by one step of the epoch that ``begin`` planned; on CUDA it replays a graph.

    The plan of the epoch is on the device, with a counter that each step advances. So a step needs nothing from the
    host, and the host waits for the device only when it asks for ``totals``. With several processes each takes its
    share of every batch, and steps are not captured, because PyTorch's reduction of gradients hooks into a backward
    pass that Python runs.
    """

    def __init__(
        self,
        recipe: Recipe,
        train: Split,
        view: View,
        classes: int,
        group: Group = ALONE,
        stream: "torch.cuda.Stream | None" = None,
        begin_with: Callable[[Network], None] | None = None,
    ):
        self.recipe, self.train, self.view, self.group, self.stream = recipe, train, view, group, stream
        self.classes = classes
        device, count = train.images.device, len(train.labels)
        batch = min(recipe.batch, count)
        if batch % group.size:
            raise ValueError(f"batch must be a multiple of the {group.size} processes, got {batch}")
        self.steps, self.batch, self.share = count // batch, batch, batch // group.size
        if recipe.mixup and self.share < 2:
            each = f"each of the {group.size} processes" if group.size > 1 else "a batch"
            raise ValueError(f"mixup blends two images: {each} must have two, got batch={batch}")
        counts = torch.bincount(train.labels.cpu(), minlength=classes).tolist()
        self.taken: tuple[list[Tensor], list[int]] | None = None
        if recipe.balance:
            labels, counts = train.labels.cpu(), quotas(counts, recipe.balance)
            self.taken = [(labels == c).nonzero()[:, 0] for c in range(classes)], counts
        weights = class_weights(recipe.class_weights, counts)
        self.class_weights = None if weights is None else torch.tensor(weights, device=device)
        self.epoch, self.step = 0, 0  # epochs done, steps done in the present one

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(recipe.seed)
            self.net = recipe.net(train.images.shape[1], classes)
        if begin_with is not None:  # trained weights instead of random ones
            begin_with(self.net)
        self.net.to(device)
        of_code = self.net.draws if isinstance(self.net, CapsVAE) else 0
        self.overlap = Overlap(train, recipe.objects, recipe.crop) if recipe.objects > 1 else None
        of_objects = 0 if self.overlap is None else self.overlap.draws
        self.draws = view.draws + (recipe.mixup > 0) + of_code + of_objects
        self.module: nn.Module = self.net
        if group.size > 1:
            self.module = DistributedDataParallel(synchronise(self.net))
        self.order = torch.zeros(self.steps, self.share, dtype=torch.int64, device=device)
        self.u = torch.zeros(self.steps, self.share, self.draws, device=device)
        # Learning rate, margin, share in the average, weight of the divergence.
        self.rates = torch.zeros(self.steps, 4, device=device)
        self.rate = torch.zeros(1, 4, device=device)
        self.k = torch.zeros(1, dtype=torch.int64, device=device)  # the next step
        # Over images: loss and errors, and for a VAE classification, divergence and reconstruction.
        self.sums = torch.zeros(5 if of_code else 2, dtype=torch.float64, device=device)
        self.bad = torch.full((1,), NEVER, device=device)
        self.ema = copy.deepcopy(self.net).eval().requires_grad_(False) if recipe.ema else None
        self.averaged = [] if self.ema is None else pairs_of(self.ema, self.net)
        self.optimisers = self.make_optimisers()
        self.graph = Graph(self.work, self.changed, device, stream, capture=group.size == 1)

    @property
    def weights(self) -> Network:
        """Return the network that is evaluated and saved: the moving average if there is one."""
        return self.net if self.ema is None else self.ema

    def make_optimisers(self) -> list[torch.optim.Optimizer]:
        """Return the optimisers. They read the learning rate from a tensor, and their state exists from the start."""
        r, parameters, lr = self.recipe, list(self.net.parameters()), self.rate[0, 0]
        made: list[torch.optim.Optimizer] = []
        if r.optimiser == "sgd":
            made += [torch.optim.SGD(parameters, lr, momentum=r.momentum, weight_decay=r.weight_decay, fused=True)]
            for p in parameters if r.momentum else []:
                made[0].state[p] = dict(momentum_buffer=torch.zeros_like(p))
            return made
        if r.optimiser == "muon":
            made += [Muon([p for p in parameters if is_map(p)], lr, weight_decay=r.weight_decay)]
            parameters = [p for p in parameters if not is_map(p)]
        kind = torch.optim.Adam if r.optimiser == "adam" else torch.optim.AdamW
        capturable = self.rate.is_cuda and self.group.size == 1
        made += [kind(parameters, lr, weight_decay=r.weight_decay, fused=True, capturable=capturable)]
        for p in parameters:
            step = torch.zeros((), device=p.device)
            made[-1].state[p] = dict(step=step, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        return made

    def begin(self) -> None:
        """Write the plan of the present epoch to the device, and set the counter to the next step."""
        r, taken = self.recipe, self.steps * self.batch
        order, u = epoch_plan(r.seed, self.epoch, len(self.train.labels), self.draws, self.taken)
        mine = self.group.share(self.batch)
        self.order.copy_(order[:taken].view(self.steps, self.batch)[:, mine])
        self.u.copy_(u[:taken].view(self.steps, self.batch, -1)[:, mine])
        first, total = self.epoch * self.steps, r.epochs * self.steps
        rates = [
            (
                r.learning_rate(t, self.steps),
                spread_margin(t, max(total // 2, 1)),
                r.average_share(t),
                r.divergence_weight(t, self.steps),
            )
            for t in range(first, first + self.steps)
        ]
        self.rates.copy_(torch.tensor(rates))
        self.k.fill_(self.step)
        if self.step == 0:
            self.sums.zero_()

    def __call__(self) -> None:
        self.graph()
        self.step += 1

    def work(self) -> None:
        """Gather, augment, forward, loss, backward, update, average."""
        k = self.k.clamp(max=self.steps - 1)  # a capture may run past the end of the epoch, and is undone
        self.rate.copy_(self.rates.index_select(0, k))
        x, y, target, u = self.images(k)
        self.net.zero_grad(set_to_none=True)
        out = self.forward(x, y, u)
        loss, parts = self.loss(out, x, target)
        loss.backward()
        for optimiser in self.optimisers:
            optimiser.step()
        with torch.no_grad():
            if self.ema is not None:
                self.average()
            bad = wrong(out.logits, y).sum()
            self.sums.add_(torch.stack([loss.detach() * self.share, bad, *(self.share * p.detach() for p in parts)]))
            self.bad.copy_(torch.where(loss.isfinite(), self.bad, torch.minimum(self.bad, k)))
            self.k.add_(1)

    def images(self, k: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the input of step ``k``, its labels, the targets of the loss, which mixup blends, and the uniform
        numbers that decide the codes of a VAE, ``n draws``; overlapping objects have labels ``n k``."""
        index, u = self.order.index_select(0, k)[0], self.u.index_select(0, k)[0]
        if self.overlap is not None:
            together, y = self.overlap(index, u[:, self.view.draws :])
            return self.view.train(together, u[:, : self.view.draws]), y, y, u[:, :0]
        x = self.view.train(self.train.images.index_select(0, index), u[:, : self.view.draws])
        y = self.train.labels.index_select(0, index)
        if not self.recipe.mixup:
            return x, y, y, u[:, self.view.draws :]
        x, target = mixup(x, y, self.recipe.mixup * u[:, -1, None, None, None], self.classes)
        return x, y, target, u[:, self.view.draws :]

    def forward(self, x: Tensor, y: Tensor, u: Tensor) -> Capsules | Scores | Reconstruction:
        return self.module(x, y, u) if isinstance(self.net, CapsVAE) else self.module(x)

    def loss(self, out: Capsules | Scores | Reconstruction, x: Tensor, y: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return the loss of images ``x`` with targets ``y``, and the parts of a VAE's loss."""
        classification = self.classification(out, y)
        if self.recipe.evidence:
            assert not isinstance(out, Scores)
            shares = y if self.overlap is None else several_hot(y, out.logits) / self.overlap.objects
            classification = classification + self.recipe.evidence * evidence_loss(
                out.posterior, shares, weight=self.class_weights
            )
        if not isinstance(out, Reconstruction):
            return classification, ()
        of_vae: VAELoss = vae_loss(x, out, beta=self.rate[0, 3])
        parts = classification, of_vae.divergence, of_vae.reconstruction / x[0].numel()
        return total_loss(classification, of_vae, eta=self.recipe.eta), parts

    def classification(self, out: Capsules | Scores | Reconstruction, y: Tensor) -> Tensor:
        if self.overlap is not None:
            return binary_cross_entropy(out.logits, y)
        if self.recipe.loss == "spread":
            return spread_loss(out.activations, y, self.rate[0, 1], weight=self.class_weights)
        if self.recipe.loss_on == "activations":
            return activation_nll_loss(out.activations, y, weight=self.class_weights)
        return cross_entropy(out.logits, y, weight=self.class_weights)

    def average(self) -> None:
        """Update the moving average of the weights, and that of BatchNorm's statistics, which must fit the weights."""
        floats = [(a, b) for a, b in self.averaged if a.is_floating_point()]
        gaps = torch._foreach_sub([b for _, b in floats], [a for a, _ in floats])
        torch._foreach_mul_(gaps, self.rate[0, 2])
        torch._foreach_add_([a for a, _ in floats], gaps)
        for a, b in self.averaged:
            if not a.is_floating_point():
                a.copy_(b)

    def disconnect(self) -> None:
        """Drop the module that reduces gradients, which must not outlive the group of processes.

        Its destructor would destroy the group while it holds Python's lock, for which a thread of the group may wait.
        """
        if self.group.size > 1:
            self.module = self.net
            gc.collect()

    def totals(self) -> Totals:
        """Wait for the device, and return the totals of the epoch so far."""
        loss, wrong, *parts = self.group.sum(self.sums).tolist()
        bad = -self.group.largest(-int(self.bad), self.bad.device)
        images = max(self.step * self.batch, 1)
        named = {name: part / images for name, part in zip(PARTS, parts, strict=False)}
        return Totals(loss / images, wrong / images, bad, named)

    def tensors(self) -> dict[str, Tensor]:
        """Return all tensors that a run needs to resume, by name; ``sums`` are those of this process."""
        names: dict[Tensor, str] = {p: name for name, p in self.net.named_parameters()}
        tensors = {f"net.{name}": x for name, x in self.net.state_dict().items()}
        if self.ema is not None:
            tensors |= {f"ema.{name}": x for name, x in self.ema.state_dict().items()}
        for optimiser in self.optimisers:
            for p, of_parameter in optimiser.state.items():
                tensors |= {f"optimiser.{names[p]}.{key}": x for key, x in of_parameter.items()}
        return tensors | {"sums": self.sums}

    def changed(self) -> Iterator[Tensor]:
        yield from self.tensors().values()
        yield from (self.rate, self.k, self.bad)


def pairs_of(one: nn.Module, other: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """Return the tensors of two networks of the same kind, side by side; a state dict takes a while to make."""
    return list(zip(one.state_dict().values(), other.state_dict().values(), strict=True))


ADVICE = "try a lower lr, a warmup, or earlier weights (resume continues from the last saved state)"


def diagnose(learner: Learner, bad: int) -> NonFinite:
    """Return an error that says why the loss of step ``bad`` was not finite; repeat the steps before it to find out."""
    where = f"epoch {learner.epoch + 1}, step {bad + 1}"
    while learner.step < bad:
        learner.work()
        learner.step += 1
    for name, p in learner.net.named_parameters():
        if not bool(p.isfinite().all()):
            return NonFinite(f"the loss is not finite at {where}: {name} is not, since the last update; {ADVICE}")
    found: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, out: Any) -> None:
            parts = out if isinstance(out, tuple) else (out,)
            if any(isinstance(x, Tensor) and not bool(x.isfinite().all()) for x in parts):
                found.append(name)

        return hook

    hooks = [module.register_forward_hook(watch(name)) for name, module in learner.net.named_modules() if name]
    x, y, target, u = learner.images(learner.k)
    if not bool(x.isfinite().all()):
        found.append("its input, the augmented images,")
    loss, _ = learner.loss(learner.forward(x, y, u), x, target)
    for handle in hooks:
        handle.remove()
    if found:
        return NonFinite(f"the loss is not finite at {where}: it first appeared in layer {found[0]}; {ADVICE}")
    if not bool(loss.isfinite()):
        return NonFinite(f"the loss is not finite at {where}, although every layer is: it is the loss itself; {ADVICE}")
    return NonFinite(f"the loss was not finite at {where}, but it is when the step is repeated: check the machine")

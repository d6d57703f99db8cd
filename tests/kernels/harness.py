"""What the tests of every backend share: problems, their results by a backend, and the error budget."""

import contextlib
import copy
import functools
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import literal
import pytest
import torch
from torch import Tensor, nn

from vbcaps import Capsules, Prior
from vbcaps.kernels import route
from vbcaps.kernels.cpu.memory import Memory
from vbcaps.kernels.ops import Op, flatten
from vbcaps.routing import DynamicRouting, EMRouting, VBRouting
from vbcaps.routing.fields import Fields, conv_fields, coordinates

F32, F64 = torch.float32, torch.float64
EPS = torch.finfo(F32).eps
# Of the norm: where few numbers are summed, the reference may happen to round exactly and the kernel, in another order,
# not.
TINY = 64 * EPS


class Problem(NamedTuple):
    """What ``route`` takes, in float32."""

    routing: nn.Module
    a: Tensor  # n c
    pose: Tensor  # n c p q
    W: Tensor  # g j q r
    fields: Fields
    coordinates: Tensor | None = None  # i 2


def problem(
    routing,
    *,
    size=(4, 4),
    types=2,
    kernel=(3, 3),
    stride=(1, 1),
    parents=3,
    batch=2,
    scale=1.0,
    whole=False,
    seed=0,
    device="cpu",
):
    """Return random children of a layer; ``whole``: one field over the map, weights shared, coordinates added."""
    gen, device = torch.Generator().manual_seed(seed), torch.device(device)
    kernel, stride = (size, (1, 1)) if whole else (kernel, stride)
    rows = types if whole else kernel[0] * kernel[1] * types
    a = torch.rand(batch, size[0] * size[1] * types, generator=gen)
    pose = scale * torch.randn(*a.shape, 4, 4, generator=gen)
    W = 0.5 * torch.randn(rows, parents, 4, 4, generator=gen)
    return Problem(
        routing.to(device),
        a.to(device),
        pose.to(device),
        W.to(device),
        conv_fields(*size, types, kernel, stride, device),
        coordinates(*size, types, F32, device) if whole else None,
    )


ROUTINGS = (
    "vb-gamma-agreement-shared",
    "vb-gamma-agreement-typed-soft",
    "vb-wishart-agreement-fixed",
    "vb-gamma-information-typed",
    "vb-gamma-information-fixed-soft",
    "vb-gamma-released-shared",
    "vb-gamma-paper-typed",
    "vb-gamma-released-fixed",
    "vb-wishart-released-typed",
    "vb-wishart-paper-shared",
    "em-default",
    "em-warm",
    "dynamic",
)


def make_routing(case, parents=3, iters=3, seed=0):
    """A routing with random offsets; VB with random priors: learned, shared by all types or one each, or fixed; soft
    assigns with a temper of 1/16."""
    gen = torch.Generator().manual_seed(seed)
    kind, *how = case.split("-")
    if kind == "dynamic":
        return DynamicRouting(parents, iters=iters)
    if kind == "em":
        schedule = dict(temperature=0.5, growth=0.5, min_var=0.1) if how == ["warm"] else dict(min_var=1e-4)
        routing = EMRouting(parents, iters=iters, **schedule)
    else:
        precision, activation, prior, *soft = how
        types = (parents,) if prior == "typed" else ()
        above = 15.0 if precision == "wishart" else 0.0
        positive = [0.3 + torch.rand(shape, generator=gen) for shape in (types, types, (*types, 16), types)]
        alpha0, kappa0, Psi0, excess = positive
        m0 = 0.5 * torch.randn(*types, 16, generator=gen)
        learn = () if prior == "fixed" else "all"
        prior = Prior(alpha0, m0, kappa0, Psi0, above + 3 * excess, precision=precision, learn=learn)
        temper = 1 / 16 if soft else 1.0
        routing = VBRouting(parents, iters=iters, activation=activation, temper=temper, prior=prior)
    with torch.no_grad():
        for beta in (routing.beta_a, routing.beta_u):
            beta.copy_(torch.randn(parents, generator=gen))
    return routing


@contextlib.contextmanager
def poisoned():
    """What the fused routings allocate holds NaN until they write it. Gives the list of what was allocated."""
    allocated = []

    def poison(allocate):
        def allocate_nan(*args, **kwargs):
            x = allocate(*args, **kwargs)
            allocated.append(x.shape)
            return x.fill_(torch.nan) if x.is_floating_point() else x

        return allocate_nan

    with pytest.MonkeyPatch.context() as patch:
        for owner, name in ((Tensor, "new_empty"), (torch, "empty_like"), (torch, "empty"), (Memory, "empty")):
            patch.setattr(owner, name, poison(getattr(owner, name)))
        yield allocated


def on_a_fresh_stack(run, *args):
    """In a thread of its own. Python allocates its stack in chunks: a hot call at the end of one, which pytest's deep
    stack makes likely, does so again and again, and Triton's interpreter takes three times as long."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run, *args).result()


def routed(p, backend="reference", dtype=F32):
    """Return outputs and, for random gradients of all that have one, those of a, pose, W and every parameter."""
    if backend == "reference":
        return routed_here(p, backend, dtype)
    with poisoned() as allocated:
        results = on_a_fresh_stack(routed_here, p, backend, dtype)
    assert len(allocated) > 10
    return results


def routed_here(p, backend, dtype=F32):
    """Return the same without poison, in this thread."""
    routing = copy.deepcopy(p.routing).to(dtype)
    leaves = {name: getattr(p, name).detach().to(dtype).requires_grad_() for name in ("a", "pose", "W")}
    added = None if p.coordinates is None else p.coordinates.to(dtype)
    logit, _, q = route(routing, *leaves.values(), p.fields, added, backend)
    outputs = dict(logit=logit, **literal.tensors(q))
    gradients = gradients_of(outputs, leaves | dict(routing.named_parameters()))
    return {name: x.detach() for name, x in outputs.items()} | gradients


def gradients_of(outputs, leaves):
    """For a random gradient of each output but the responsibilities, which have none in the fused routings."""
    gen = torch.Generator().manual_seed(1)
    loss = sum((torch.randn(x.shape, generator=gen).to(x) * x).sum() for name, x in outputs.items() if name != "r")
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {f"d{name}": g for name, g in zip(leaves, gradients, strict=True) if g is not None}


def nudged(p, seed):
    """Return the same problem with inputs that differ in their last bit, at random."""
    gen = torch.Generator().manual_seed(seed)
    steps = [torch.randint(-1, 2, x.shape, generator=gen).to(x) for x in (p.a, p.pose, p.W)]
    a, pose, W = (x * (1 + EPS * step) for x, step in zip((p.a, p.pose, p.W), steps, strict=True))
    return p._replace(a=a, pose=pose, W=W)


def error(x, exact):
    return (x.double() - exact).norm() / exact.norm().clamp_min(1e-30)


def assert_within_budget(kernel, exact, *singles):
    """|kernel - ref64| <= 2 |ref32 - ref64| + tiny |ref64| in norm, for each output and gradient.

    What float32 costs the reference is a matter of luck; it is the most of several ``singles``. Where routing amplifies
    rounding a thousandfold it varies more, and where the reference has no digit left there is nothing to compare with.
    """
    assert kernel.keys() == exact.keys()
    for name, x in exact.items():
        assert kernel[name].shape == x.shape, name
        assert kernel[name].dtype == F32, name
        cost = max(error(single[name], x) for single in singles)
        budget = (2 if cost < 1e-4 else 4) * cost + TINY
        assert cost > 0.1 or error(kernel[name], x) <= budget, f"{name}: {error(kernel[name], x):.1e} over {budget:.1e}"


def reference_in_float32(p):
    return [routed(p), *(routed(nudged(p, seed)) for seed in range(8))]


def assert_backend_equals_reference(p, backend):
    assert_within_budget(routed(p, backend), routed(p, dtype=F64), *reference_in_float32(p))


def layer_results(layer, a, pose, backend="reference", dtype=F32, device="cpu"):
    """Return outputs and gradients in evaluation: BatchNorm in training leaves offsets a gradient of mere rounding."""
    layer = copy.deepcopy(layer).to(device, dtype).eval()
    layer.backend = backend
    leaves = dict(a=a.to(device, dtype).requires_grad_(), pose=pose.to(device, dtype).requires_grad_())

    def run():
        out = layer(Capsules(*leaves.values()))
        outputs = dict(logits=out.logits, poses=out.poses, **literal.tensors(out.posterior))
        return outputs, gradients_of(outputs, leaves | dict(layer.named_parameters()))

    with contextlib.nullcontext() if backend == "reference" else poisoned():
        outputs, gradients = on_a_fresh_stack(run)
    return {name: x.detach() for name, x in outputs.items()} | gradients


def assert_layer_equals_reference(layer, a, pose, backend, device="cpu"):
    exact = layer_results(layer, a, pose, dtype=F64, device=device)
    singles = [layer_results(layer, a * (1 + EPS * k), pose * (1 - EPS * k), device=device) for k in (-2, -1, 0, 1, 2)]
    assert_within_budget(layer_results(layer, a, pose, backend, device=device), exact, *singles)


def assert_same_bits(x, y):
    assert x.keys() == y.keys()
    for name in x:
        assert torch.equal(x[name], y[name]), name


HARD = {
    "no child active": lambda p: p._replace(a=torch.zeros_like(p.a)),
    "half of the children active": lambda p: p._replace(a=p.a.round()),
    "no child of one field active": lambda p: p._replace(a=p.a.index_fill(1, p.fields.child[0], 0.0)),
    "poses of 1e4": lambda p: p._replace(pose=1e4 * p.pose),
    "poses of 1e-6": lambda p: p._replace(pose=1e-6 * p.pose),
    "all votes equal": lambda p: p._replace(pose=torch.full_like(p.pose, 0.7), W=torch.full_like(p.W, 0.3)),
}


def assert_hard_input_is_finite_and_within_budget(p, backend):
    kernel, exact, *singles = results = [routed(p, backend), routed(p, dtype=F64), *reference_in_float32(p)]
    for name, x in kernel.items():
        assert x.isfinite().all(), name
    if isinstance(p.routing, EMRouting):
        # EM divides by r_j = 0 as by the root of the smallest number, and float64 has a smaller one.
        off = p.a == 0
        torch.testing.assert_close(kernel["da"][off], singles[0]["da"][off], rtol=1e-2, atol=0)
        for result in results:
            result["da"] = result["da"][~off]
    assert_within_budget(kernel, exact, *singles)


OPCHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def assert_operators_pass_opcheck(p, backend, monkeypatch, checks=OPCHECKS):
    """Schema, autograd registration, and shapes under tracing with fixed and free sizes, forward and backward."""
    calls = []
    call = Op.__call__
    monkeypatch.setattr(Op, "__call__", lambda op, inputs: calls.append((op, flatten(inputs))) or call(op, inputs))
    routed(p, backend)
    assert len(calls) == 2
    for backward, (op, args) in enumerate(tuple(calls)):  # checks may call operators while they trace
        learned = [isinstance(x, Tensor) and x.requires_grad and not backward for x in args]
        assert backward or sum(learned) >= 3
        pairs = zip(args, learned, strict=True)
        args = [x.detach().requires_grad_(grad) if isinstance(x, Tensor) else x for x, grad in pairs]
        check = functools.partial(torch.library.opcheck, test_utils=checks)
        assert set(on_a_fresh_stack(check, op.operator, args).values()) == {"SUCCESS"}

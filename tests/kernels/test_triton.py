"""The fused kernels against the reference: outputs, every gradient, hard inputs, errors, and two trainings compared.

Without a CUDA device they run in Triton's interpreter (conftest.py), so shapes here are tiny; what has real ones, or
needs a GPU's streams and graphs, is skipped. With one, ``pytest -m gpu`` runs this whole file on it.
"""

import contextlib
import copy
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import literal
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from vbcaps import CapsNet, Capsules, ClassCaps, ConvCaps, Prior
from vbcaps.kernels.route import route
from vbcaps.losses import activation_nll_loss
from vbcaps.routing import DynamicRouting, EMRouting, VBRouting
from vbcaps.routing.fields import Fields, conv_fields, coordinates

pytest.importorskip("triton")
from vbcaps.kernels import dynamic, em, vb

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
F32, F64 = torch.float32, torch.float64

# The interpreter computes with NumPy, which warns where a GPU quietly makes an infinity.
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), *([pytest.mark.gpu] if CUDA else [])]


gpu = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def _seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


# --- problems and the error budget ------------------------------------------------------------------------------


class Problem(NamedTuple):
    """What ``route`` takes, in float32."""

    routing: nn.Module
    a: Tensor  # n c
    pose: Tensor  # n c p q
    W: Tensor  # g j q r
    fields: Fields
    place: Tensor | None = None  # i 2


def problem(
    routing, *, size=(4, 4), types=2, kernel=(3, 3), stride=(1, 1), parents=3, batch=2, scale=1.0, whole=False, seed=0
):
    """Random children of a layer; ``whole``: one field over the map, weights shared by positions, coordinates added."""
    gen = torch.Generator().manual_seed(seed)
    kernel, stride = (size, (1, 1)) if whole else (kernel, stride)
    children = size[0] * size[1] * types
    rows = types if whole else kernel[0] * kernel[1] * types
    a = torch.rand(batch, children, generator=gen)
    pose = scale * torch.randn(batch, children, 4, 4, generator=gen)
    W = 0.5 * torch.randn(rows, parents, 4, 4, generator=gen)
    return Problem(
        routing.to(DEVICE),
        a.to(DEVICE),
        pose.to(DEVICE),
        W.to(DEVICE),
        conv_fields(*size, types, kernel, stride, DEVICE),
        coordinates(*size, types, F32, DEVICE) if whole else None,
    )


ROUTINGS = (
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
    """A routing with random offsets; VB with random priors: learned, shared by all types or one each, or fixed."""
    gen = torch.Generator().manual_seed(seed)
    kind, *how = case.split("-")
    if kind == "dynamic":
        return DynamicRouting(parents, iters=iters)
    if kind == "em":
        schedule = dict(temperature=1.0, growth=0.5, min_var=1e-2) if how == ["warm"] else dict(min_var=1e-4)
        routing = EMRouting(parents, iters=iters, **schedule)
    else:
        precision, activation, prior = how
        types = (parents,) if prior == "typed" else ()
        above = 15.0 if precision == "wishart" else 0.0
        positive = [0.3 + torch.rand(shape, generator=gen) for shape in (types, types, (*types, 16), types)]
        alpha0, kappa0, Psi0, excess = positive
        m0 = 0.5 * torch.randn(*types, 16, generator=gen)
        learn = () if prior == "fixed" else "all"
        prior = Prior(alpha0, m0, kappa0, Psi0, above + 3 * excess, precision=precision, learn=learn)
        routing = VBRouting(parents, iters=iters, activation=activation, prior=prior)
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
        for owner, name in ((Tensor, "new_empty"), (torch, "empty_like"), (torch, "empty")):
            patch.setattr(owner, name, poison(getattr(owner, name)))
        yield allocated


def on_a_fresh_stack(run, *args):
    """In a thread of its own. Python allocates its stack in chunks: a hot call at the end of one, which pytest's deep
    stack makes likely, does so again and again, and the interpreter takes three times as long."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(run, *args).result()


def routed(p, backend="reference", dtype=F32):
    """Outputs and, for random gradients of all that have one, the gradients of a, pose, W and every parameter."""
    if backend == "reference":
        return routed_here(p, backend, dtype)
    with poisoned() as allocated:
        results = on_a_fresh_stack(routed_here, p, backend, dtype)
    assert len(allocated) > 10
    return results


def routed_here(p, backend="triton", dtype=F32):
    routing = copy.deepcopy(p.routing).to(dtype)
    leaves = {name: getattr(p, name).detach().to(dtype).requires_grad_() for name in ("a", "pose", "W")}
    place = None if p.place is None else p.place.to(dtype)
    logit, _, q = route(routing, *leaves.values(), p.fields, place, backend)
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
    """The same problem with inputs that differ in their last bit, at random."""
    gen = torch.Generator().manual_seed(seed)
    steps = [torch.randint(-1, 2, x.shape, generator=gen).to(x) for x in (p.a, p.pose, p.W)]
    a, pose, W = (x * (1 + EPS * step) for x, step in zip((p.a, p.pose, p.W), steps, strict=True))
    return p._replace(a=a, pose=pose, W=W)


EPS = torch.finfo(F32).eps
# Of the norm: where few numbers are summed, the reference may happen to round exactly and the kernel, in another order,
# not.
TINY = 64 * EPS


def error(x, exact):
    return (x.double() - exact).norm() / exact.norm().clamp_min(1e-30)


def assert_within_budget(kernel, exact, *singles):
    """|kernel - ref64| <= 2 |ref32 - ref64| + tiny |ref64| in norm, for each output and gradient.

    What float32 costs the reference is a matter of luck; it is the most of several ``singles``.
    """
    assert kernel.keys() == exact.keys()
    for name, x in exact.items():
        assert kernel[name].shape == x.shape, name
        assert kernel[name].dtype == F32, name
        budget = 2 * max(error(single[name], x) for single in singles) + TINY
        assert error(kernel[name], x) <= budget, f"{name}: {error(kernel[name], x):.1e} over {budget:.1e}"


def reference_in_float32(p):
    return [routed(p), *(routed(nudged(p, seed)) for seed in range(8))]


def assert_kernel_equals_reference(p):
    assert_within_budget(routed(p, "triton"), routed(p, dtype=F64), *reference_in_float32(p))


# --- outputs and gradients --------------------------------------------------------------------------------------


@st.composite
def layers(draw):
    """Any kernel and stride, maps of one or two fields with children that no field sees, any numbers of types."""
    kernel = draw(st.tuples(*[st.integers(1, 5)] * 2).filter(lambda k: k[0] * k[1] <= 6))
    stride, fields = draw(st.tuples(*[st.integers(1, 3)] * 2)), draw(st.sampled_from([(1, 1), (1, 2), (2, 1)]))
    over = draw(st.tuples(*[st.integers(0, 1)] * 2))
    size = tuple(k + s * (f - 1) + o for k, s, f, o in zip(kernel, stride, fields, over, strict=True))
    return dict(
        kernel=kernel,
        stride=stride,
        size=size,
        types=draw(st.integers(1, max(1, 6 // (kernel[0] * kernel[1])))),
        parents=draw(st.integers(1, 5)),
        batch=draw(st.sampled_from((1, 2, 3, 9))),
        whole=draw(st.booleans()),
        seed=draw(st.integers(0, 999)),
    )


# Shrinking would run many more examples in a slow interpreter.
drawn = settings(
    max_examples=10 if CUDA else 2,
    deadline=None,
    derandomize=True,
    database=None,
    phases=(Phase.explicit, Phase.generate),
)


@pytest.mark.parametrize("case", ROUTINGS)
@drawn
@given(layer=layers(), iters=st.integers(1, 4))
def test_outputs_and_gradients_are_within_the_error_budget(case, layer, iters):
    assert_kernel_equals_reference(problem(make_routing(case, layer["parents"], iters, layer["seed"]), **layer))


@pytest.mark.parametrize("routing", ["vb", "em", "dynamic"])
@pytest.mark.parametrize("kind", ["conv", "class", "one class", "one position"])
def test_layers_are_within_the_error_budget(kind, routing):
    """With padding, rectangular kernels and coordinates; a single class for a single image; a map of one position.

    In evaluation: the BatchNorm of training leaves the offsets a gradient of nothing but rounding.
    """
    options = dict(routing=routing, routing_options=dict(iters=2))
    if kind == "conv":
        layer, shape = ConvCaps(3, 2, (2, 3), (1, 2), (1, 0), **options), (2, 1, 5, 3)
    elif kind == "class":
        layer, shape = ClassCaps(3, 5, **options), (4, 2, 2, 3)
    elif kind == "one class":
        layer, shape = ClassCaps(2, 1, **options), (1, 3, 1, 2)
    else:
        layer, shape = ClassCaps(3, 2, **options), (2, 1, 1, 3)
    a, pose = torch.rand(shape), torch.randn(*shape, 4, 4)
    exact = layer_results(layer, a, pose, dtype=F64)
    singles = [layer_results(layer, a * (1 + EPS * k), pose * (1 - EPS * k)) for k in (-1, 0, 1)]
    assert_within_budget(layer_results(layer, a, pose, "triton"), exact, *singles)


def layer_results(layer, a, pose, backend="reference", dtype=F32):
    layer = copy.deepcopy(layer).to(DEVICE, dtype).eval()
    layer.backend = backend
    leaves = dict(a=a.to(DEVICE, dtype).requires_grad_(), pose=pose.to(DEVICE, dtype).requires_grad_())

    def run():
        out = layer(Capsules(*leaves.values()))
        outputs = dict(logits=out.logits, poses=out.poses, **literal.tensors(out.posterior))
        return outputs, gradients_of(outputs, leaves | dict(layer.named_parameters()))

    with poisoned() if backend == "triton" else contextlib.nullcontext():
        outputs, gradients = on_a_fresh_stack(run)
    return {name: x.detach() for name, x in outputs.items()} | gradients


def test_priors_may_lie_in_memory_in_any_order():
    m0, Psi0 = torch.randn(16, 2).T, 0.5 + torch.rand(16, 2).T
    assert not m0.is_contiguous()
    routing = VBRouting(2, iters=2, prior=Prior(m0=m0, Psi0=Psi0, learn="all"))
    assert_kernel_equals_reference(problem(routing, size=(1, 2), kernel=(1, 1), types=3, parents=2))


@pytest.mark.parametrize("case", ["vb-gamma-released-fixed", "em-warm"])
def test_responsibilities_sum_to_one_over_all_parents_of_a_child(case):
    p = problem(make_routing(case, 2), size=(4, 3), types=1, kernel=(3, 2), parents=2)
    r = routed(p, "triton")["r"]  # n l i j
    seen = p.fields.child.flatten()
    total = r.new_zeros(len(r), p.a.shape[1]).index_add(1, seen, r.sum(3).flatten(1))
    torch.testing.assert_close(total[:, seen], torch.ones_like(total[:, seen]))
    assert (r.sum(3) < 0.999).any()  # more than one field sees some


@pytest.mark.parametrize("case", ["vb-wishart-released-typed", "em-default", "dynamic"])
def test_two_runs_give_the_same_bits(case):
    p = problem(make_routing(case, 2, iters=2), size=(2, 3), kernel=(2, 2), types=1, parents=2)
    assert_same_bits(routed(p, "triton"), routed(p, "triton"))


def assert_same_bits(x, y):
    assert x.keys() == y.keys()
    for name in x:
        assert torch.equal(x[name], y[name]), name


# --- hard inputs ------------------------------------------------------------------------------------------------

HARD = {
    "no child active": lambda p: p._replace(a=torch.zeros_like(p.a)),
    "no child of one field active": lambda p: p._replace(a=p.a.index_fill(1, p.fields.child[0], 0.0)),
    "poses of 1e4": lambda p: p._replace(pose=1e4 * p.pose),
    "poses of 1e-6": lambda p: p._replace(pose=1e-6 * p.pose),
    "all votes equal": lambda p: p._replace(pose=torch.full_like(p.pose, 0.7), W=torch.full_like(p.W, 0.3)),
}


@pytest.mark.parametrize("hard", HARD)
@pytest.mark.parametrize("case", ["vb-gamma-released-shared", "em-default", "dynamic"])
def test_hard_inputs_are_finite_and_within_the_error_budget(case, hard):
    p = HARD[hard](problem(make_routing(case, 2), size=(2, 3), kernel=(2, 2), types=1, parents=2))
    kernel, exact, *singles = results = [routed(p, "triton"), routed(p, dtype=F64), *reference_in_float32(p)]
    for name, x in kernel.items():
        assert x.isfinite().all(), name
    if case.startswith("em"):
        # EM divides by r_j = 0 as by the root of the smallest number, and float64 has a smaller one.
        off = p.a == 0
        torch.testing.assert_close(kernel["da"][off], singles[0]["da"][off], rtol=1e-3, atol=0)
        for result in results:
            result["da"] = result["da"][~off]
    assert_within_budget(kernel, exact, *singles)


@pytest.mark.parametrize("precision", ["gamma", "wishart"])
@pytest.mark.parametrize(
    "prior",
    [(1e-6, 0.0, 1e-6, 1e-6, 1e-6), (1e6, 0.0, 1e6, 1e6, 1e6), (1e-6, -1e6, 1e6, 1e6, 1e-6)],
    ids=["low", "high", "mixed"],
)
def test_priors_at_the_ends_of_their_range_give_finite_outputs_and_gradients(precision, prior):
    *others, excess = prior
    nu0 = excess + (15.0 if precision == "wishart" else 0.0)
    routing = VBRouting(2, iters=2, activation="paper", prior=Prior(*others, nu0, precision=precision, learn="all"))
    p = problem(routing, size=(2, 3), kernel=(2, 2), types=1, parents=2)
    p = HARD["poses of 1e4"](HARD["no child of one field active"](p))
    for name, x in routed(p, "triton").items():
        assert x.isfinite().all(), name


@pytest.mark.parametrize("types", [5, 8])
@pytest.mark.parametrize("whole", [False, True], ids=["conv", "class"])
def test_more_than_four_types_of_children_are_within_the_error_budget(types, whole):
    """Then a program has several warps for them, and where types are no multiple of four the last has fewer."""
    routing = make_routing("vb-gamma-released-shared", 5, iters=2)
    sizes = dict(size=(1, 3), kernel=(1, 2), types=types, parents=5, batch=1)
    assert_kernel_equals_reference(problem(routing, whole=whole, **sizes))


@pytest.mark.parametrize("case", ["vb-gamma-paper-typed", "vb-wishart-released-fixed"])
@pytest.mark.parametrize("iters", [1, 3])
def test_gradients_through_the_last_iteration_are_within_the_error_budget(case, iters):
    routing = make_routing(case, 2, iters)
    routing.through = "last"
    p = problem(routing, size=(2, 3), kernel=(2, 2), types=2, parents=2)
    assert_kernel_equals_reference(p)
    through_last = routed(p)
    routing.through = "all"
    assert torch.equal(through_last["dpose"], routed(p)["dpose"]) == (iters == 1)


# --- the operators ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("module", "name", "case"),
    [
        (vb, "vb_route", "vb-gamma-paper-typed"),
        (em, "em_route", "em-default"),
        (dynamic, "dynamic_route", "dynamic"),
    ],
    ids=["vb", "em", "dynamic"],
)
@pytest.mark.parametrize("suffix", ["", "_backward"], ids=["forward", "backward"])
def test_operators_pass_opcheck(module, name, case, suffix, monkeypatch):
    """Schema, autograd registration, and shapes under tracing with fixed and free sizes."""
    op, calls = getattr(module, name + suffix), []
    monkeypatch.setattr(module, name + suffix, lambda *args: calls.append(args) or op(*args))
    routed(problem(make_routing(case, 2, iters=2), size=(1, 2), types=1, parents=2, whole=True), "triton")
    (args,) = calls
    learned = [isinstance(x, Tensor) and x.requires_grad and not suffix for x in args]
    assert suffix or sum(learned) >= (3 if name == "dynamic_route" else 5)
    args = [
        x.detach().requires_grad_(grad) if isinstance(x, Tensor) else x for x, grad in zip(args, learned, strict=True)
    ]
    assert set(on_a_fresh_stack(torch.library.opcheck, op, args).values()) == {"SUCCESS"}


@pytest.mark.parametrize("routing", ["vb", "em", "dynamic"])
def test_a_compiled_layer_is_one_graph_and_gives_the_same(routing):
    torch._dynamo.reset()
    layer = ConvCaps(1, 2, 2, routing=routing, routing_options=dict(iters=2), backend="triton").to(DEVICE)
    a, pose = torch.rand(2, 2, 3, 1, device=DEVICE), torch.randn(2, 2, 3, 1, 4, 4, device=DEVICE)
    graph = torch.compile(layer, fullgraph=True, backend="aot_eager")
    (out, gradients), (expected, expected_gradients) = (
        on_a_fresh_stack(step, run, layer, Capsules(a, pose)) for run in (graph, layer)
    )
    for name, x in (expected | expected_gradients).items():
        torch.testing.assert_close((out | gradients)[name], x, msg=lambda m, at=name: f"{at}: {m}")


def step(run, layer, caps):
    """One forward and backward pass of a layer or network that leaves its running statistics alone."""
    before = copy.deepcopy(layer.state_dict())
    out = run(caps)
    outputs = dict(logits=out.logits, poses=out.poses, **literal.tensors(out.posterior))
    gradients = gradients_of(outputs, dict(layer.named_parameters()))
    layer.load_state_dict(before)
    return {name: x.detach() for name, x in outputs.items()}, gradients


def test_under_autocast_routing_computes_in_float32():
    layer = ConvCaps(1, 2, 2, routing_options=dict(iters=2), backend="triton").to(DEVICE)
    a = torch.rand(2, 2, 3, 1, device=DEVICE).bfloat16()
    pose = torch.randn(2, 2, 3, 1, 4, 4, device=DEVICE).bfloat16()
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        out, gradients = on_a_fresh_stack(step, layer, layer, Capsules(a, pose))
    expected, expected_gradients = on_a_fresh_stack(step, layer, layer, Capsules(a.float(), pose.float()))
    assert_same_bits(out, expected)
    assert_same_bits(gradients, expected_gradients)


# --- what the kernels do not cover ------------------------------------------------------------------------------

UNSUPPORTED = {
    "3x3 poses": (dict(pose_size=3), F32, ValueError, "4x4 poses"),
    "float64": ({}, F64, TypeError, "float32"),
    "full precision": (dict(routing_options=dict(prior=Prior(precision="full"))), F32, ValueError, "diagonal"),
}


@pytest.mark.parametrize("case", UNSUPPORTED)
def test_unsupported_calls_are_an_error_with_triton_and_the_reference_with_auto(case):
    options, dtype, kind, message = UNSUPPORTED[case]
    layer = ConvCaps(2, 3, 2, **options, backend="triton").to(DEVICE, dtype).eval()
    a = torch.rand(2, 3, 3, 2, dtype=dtype, device=DEVICE)
    pose = torch.randn(2, 3, 3, 2, layer.pose_size, layer.pose_size, dtype=dtype, device=DEVICE)
    with pytest.raises(kind, match=message):
        layer(Capsules(a, pose))
    layer.backend = "auto"
    out = layer(Capsules(a, pose))
    layer.backend = "reference"
    torch.testing.assert_close(out.logits, layer(Capsules(a, pose)).logits)


@pytest.mark.parametrize("routing", ["vb", "em"])
def test_children_on_a_cpu_are_an_error_with_triton_but_for_its_interpreter(routing, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    layer = ClassCaps(2, 3, routing=routing, backend="triton")
    with pytest.raises(ValueError, match="CUDA"):
        layer(Capsules(torch.rand(2, 3, 3, 2), torch.randn(2, 3, 3, 2, 4, 4)))


@pytest.mark.parametrize("routing", ["vb", "em"])
def test_auto_on_a_cpu_leaves_the_interpreter_alone(routing, monkeypatch):
    """It is for tests, and slower than the reference, whose bits these are."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    layer = ClassCaps(2, 3, routing=routing).eval()
    a, pose = torch.rand(2, 3, 3, 2), torch.randn(2, 3, 3, 2, 4, 4)
    out = layer(Capsules(a, pose))
    layer.backend = "reference"
    assert torch.equal(out.logits, layer(Capsules(a, pose)).logits)


def test_a_routing_without_kernels_is_an_error_with_triton():
    layer = ConvCaps(1, 2, 1, backend="triton").to(DEVICE)
    layer.routing = nn.Identity()
    with pytest.raises(ValueError, match="no kernels for Identity"):
        layer(Capsules(torch.rand(1, 1, 1, 1, device=DEVICE), torch.randn(1, 1, 1, 1, 4, 4, device=DEVICE)))


# --- training ---------------------------------------------------------------------------------------------------


class CapsuleStack(nn.Module):
    """Capsules to classes without a convolution: all that a training step computes is routing and BatchNorm."""

    def __init__(self, types, hidden, classes, kernel, **options):
        super().__init__()
        self.conv_caps = ConvCaps(types, hidden, kernel, **options)
        self.class_caps = ClassCaps(hidden, classes, logit_scale=False, **options)

    def forward(self, caps):
        return self.class_caps(self.conv_caps(caps))


def losses_of(net, batches, backend, optimiser):
    """Return the loss of one step for each batch: inputs and labels, whose first axis counts batches."""
    net = copy.deepcopy(net)
    for layer in net.modules():
        if isinstance(layer, ConvCaps):
            layer.backend = backend
    optimiser = optimiser(net.parameters())
    losses = []
    for inputs, label in zip(*batches, strict=True):
        optimiser.zero_grad()
        loss = activation_nll_loss(net(inputs).activations, label)
        loss.backward()
        optimiser.step()
        losses.append(loss.detach())
    return torch.stack(losses).cpu()


@pytest.mark.parametrize("routing", ["vb", "em", "dynamic"])
def test_five_steps_of_training_have_the_losses_of_the_reference(routing):
    """To five digits: before rounding has had the time to grow."""
    net = CapsuleStack(2, 2, 2, 2, routing=routing, routing_options=dict(iters=2)).to(DEVICE)
    inputs = torch.rand(4, 2, 2, 2), torch.randn(4, 2, 2, 2, 4, 4), torch.tensor([0, 1, 0, 1])  # the same on any device
    a, pose, label = (x.to(DEVICE) for x in inputs)
    batches = [Capsules(a, pose)] * 5, [label] * 5

    def sgd(parameters):
        return torch.optim.SGD(parameters, 1e-2 if routing == "dynamic" else 1e-3)

    expected = losses_of(net, batches, "reference", sgd)
    losses = on_a_fresh_stack(losses_of, net, batches, "triton", sgd)
    assert expected[-1] < expected[0] - 0.02
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-5)


# --- on a GPU ---------------------------------------------------------------------------------------------------

REAL = {
    "conv": dict(size=(14, 14), types=16, kernel=(3, 3), stride=(2, 2), parents=16, batch=32),
    "conv to 64 types": dict(size=(6, 6), types=16, kernel=(3, 3), parents=64, batch=8),
    "conv from 64 types": dict(size=(6, 6), types=64, kernel=(3, 3), parents=16, batch=5),
    "class": dict(size=(4, 4), types=16, whole=True, parents=5, batch=33),
}


@gpu
@pytest.mark.parametrize("layer", REAL)
@pytest.mark.parametrize("case", ["vb-gamma-released-shared", "vb-wishart-paper-typed", "em-default", "dynamic"])
def test_real_shapes_are_within_the_error_budget_and_give_the_same_bits_twice(case, layer):
    p = problem(make_routing(case, REAL[layer]["parents"]), **REAL[layer])
    assert_kernel_equals_reference(p)
    assert_same_bits(routed(p, "triton"), routed(p, "triton"))


@gpu
@pytest.mark.parametrize("case", ["vb-gamma-released-shared", "em-default"])
def test_another_stream_gives_the_same_bits(case):
    p = problem(make_routing(case, 16), **REAL["conv"])
    expected = routed(p, "triton")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10**7)  # what runs on the default stream would come too early
        p = p._replace(a=p.a.clone(), pose=p.pose.clone(), W=p.W.clone())
        results = routed_here(p)
    stream.synchronize()
    assert_same_bits(results, expected)


@gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("routing", ["vb", "em"])
def test_a_device_that_is_not_the_current_one_gives_the_same_bits(routing):
    layer = ClassCaps(4, 5, routing=routing, backend="triton")
    a, pose = torch.rand(8, 3, 3, 4), torch.randn(8, 3, 3, 4, 4, 4)
    first, second = (
        layer.to(device)(Capsules(a.to(device), pose.to(device))).logits.cpu() for device in ("cuda:0", "cuda:1")
    )
    assert torch.equal(first, second)


def stack_and_batch(routing, batch=32):
    net = CapsuleStack(8, 8, 5, 3, routing=routing, backend="triton").to(DEVICE)
    return net, torch.rand(batch, 6, 6, 8, device=DEVICE), torch.randn(batch, 6, 6, 8, 4, 4, device=DEVICE)


@gpu
@pytest.mark.parametrize("routing", ["vb", "em", "dynamic"])
def test_a_captured_graph_gives_the_same_bits(routing):
    """Forward and backward, replayed for inputs that the capture did not see."""
    net, a, pose = stack_and_batch(routing)
    parameters = list(net.parameters())
    upstream = torch.randn(32, 5, device=DEVICE), torch.randn(32, 5, 4, 4, device=DEVICE)

    def run():
        out = net(Capsules(a, pose))
        return out.logits, out.poses, *torch.autograd.grad((out.logits, out.poses), parameters, upstream)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(2):
        a.uniform_()
        pose.normal_()
        graph.replay()
        for x, y in zip(captured, run(), strict=True):
            assert torch.equal(x, y)


@gpu
@pytest.mark.parametrize("routing", ["vb", "em", "dynamic"])
def test_a_compiled_stack_is_one_graph_and_gives_the_same(routing):
    torch._dynamo.reset()
    net, a, pose = stack_and_batch(routing)
    compiled = torch.compile(net, fullgraph=True)
    (out, gradients), (expected, expected_gradients) = (step(run, net, Capsules(a, pose)) for run in (compiled, net))
    for name, x in (expected | expected_gradients).items():
        if "beta" not in name:  # BatchNorm leaves those a gradient of nothing but rounding
            assert error((out | gradients)[name], x.double()) < 1e-4, name


@gpu
@pytest.mark.parametrize("routing", ["vb", "em"])
def test_a_network_under_autocast_routes_as_the_reference_does(routing):
    net = CapsNet((16, 8, 8, 8), routing=routing).to(DEVICE)
    x, upstream = torch.randn(16, 2, 32, 32, device=DEVICE), torch.randn(16, 5, device=DEVICE)
    logits = {}
    for backend in ("triton", "reference"):
        for layer in (net.conv_caps1, net.conv_caps2, net.class_caps):
            layer.backend = backend
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits[backend] = net(x).logits
        gradients = torch.autograd.grad(logits[backend], list(net.parameters()), upstream)
        assert all(g.isfinite().all() for g in gradients)
    assert logits["triton"].dtype == F32
    assert error(logits["triton"], logits["reference"].double()) < 1e-3


def stripes(batches, batch=32, classes=4, size=32):
    """Noisy images of two channels with a bright stripe whose height is the class; eight batches, again and again."""
    gen = torch.Generator().manual_seed(0)
    label = torch.randint(classes, (8, batch), generator=gen)
    x = 0.5 * torch.randn(8, batch, 2, size, size, generator=gen)
    stripe = torch.arange(size) * classes // size == label[..., None]  # batches n rows
    x += stripe[:, :, None, :, None]
    again = torch.arange(batches) % 8
    return x[again].to(DEVICE), label[again].to(DEVICE)


@gpu
@pytest.mark.parametrize("routing", ["vb", "em", "dynamic"])
def test_200_steps_of_training_have_the_losses_of_the_reference(routing):
    """Rounding grows as training goes on, in the reference too.

    The stated drift: up to each step, at most four times what it is between references whose first weights differ in
    the last bit. And two trainings with the kernels have the same losses to the bit.
    """
    net = CapsNet((32, 8, 8, 8), num_classes=4, routing=routing, logit_scale=True).to(DEVICE)
    batches = stripes(200)

    def losses(net, backend):
        with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
            return losses_of(net, batches, backend, lambda p: torch.optim.Adam(p, 1e-4, eps=1e-3))

    kernel, expected = losses(net, "triton"), losses(net, "reference")
    drift = torch.zeros(200)
    for _ in range(3):
        other = copy.deepcopy(net)
        with torch.no_grad():
            for p in other.parameters():
                p.mul_(1 + EPS * torch.randint(-1, 2, p.shape, device=DEVICE))
        drift = torch.maximum(drift, (losses(other, "reference") - expected).abs().cummax(0).values)
    assert expected[-1] < expected[0] - 0.1
    assert ((kernel - expected).abs() <= 4 * drift + 1e-5).all()
    assert torch.equal(losses(net, "triton"), kernel)

"""The fused kernels against the reference: outputs, every gradient, hard inputs, errors, and two trainings compared.

Without a CUDA device they run in Triton's interpreter (conftest.py), so shapes here are tiny; what has real ones, or
needs a GPU's streams and graphs, is skipped. With one, ``pytest -m gpu`` runs this whole file on it.
"""

import copy

import literal
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from kernels.harness import (
    F32,
    F64,
    HARD,
    OPCHECKS,
    ROUTINGS,
    assert_backend_equals_reference,
    assert_hard_input_is_finite_and_within_budget,
    assert_layer_equals_reference,
    assert_operators_pass_opcheck,
    assert_same_bits,
    error,
    gradients_of,
    make_routing,
    on_a_fresh_stack,
    routed,
    routed_here,
)
from kernels.harness import problem as problem_on
from kernels.training import assert_training_drifts_no_further_than_rounding, losses_of, stripes
from torch import nn

from vbcaps import CapsNet, Capsules, ClassCaps, ConvCaps, Prior
from vbcaps.routing import VBRouting

pytest.importorskip("triton")

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")

# The interpreter computes with NumPy, which warns where a GPU quietly makes an infinity.
pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning"), *([pytest.mark.gpu] if CUDA else [])]


def problem(routing, **options):
    return problem_on(routing, device=DEVICE, **options)


gpu = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")


@pytest.fixture(autouse=True)
def _seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


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
    assert_backend_equals_reference(
        problem(make_routing(case, layer["parents"], iters, layer["seed"]), **layer), "triton"
    )


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
    assert_layer_equals_reference(layer, torch.rand(shape), torch.randn(*shape, 4, 4), "triton", DEVICE)


def test_priors_may_lie_in_memory_in_any_order():
    m0, Psi0 = torch.randn(16, 2).T, 0.5 + torch.rand(16, 2).T
    assert not m0.is_contiguous()
    routing = VBRouting(2, iters=2, prior=Prior(m0=m0, Psi0=Psi0, learn="all"))
    assert_backend_equals_reference(problem(routing, size=(1, 2), kernel=(1, 1), types=3, parents=2), "triton")


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


# --- hard inputs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hard", [hard for hard in HARD if not hard.startswith("half")])
@pytest.mark.parametrize("case", ["vb-gamma-released-shared", "em-default", "dynamic"])
def test_hard_inputs_are_finite_and_within_the_error_budget(case, hard):
    p = HARD[hard](problem(make_routing(case, 2), size=(2, 3), kernel=(2, 2), types=1, parents=2))
    assert_hard_input_is_finite_and_within_budget(p, "triton")


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
    assert_backend_equals_reference(problem(routing, whole=whole, **sizes), "triton")


@pytest.mark.parametrize("case", ["vb-gamma-paper-typed", "vb-wishart-released-fixed"])
@pytest.mark.parametrize("iters", [1, 3])
def test_gradients_through_the_last_iteration_are_within_the_error_budget(case, iters):
    routing = make_routing(case, 2, iters)
    routing.through = "last"
    p = problem(routing, size=(2, 3), kernel=(2, 2), types=2, parents=2)
    assert_backend_equals_reference(p, "triton")
    through_last = routed(p)
    routing.through = "all"
    assert torch.equal(through_last["dpose"], routed(p)["dpose"]) == (iters == 1)


# --- the operators ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["vb-gamma-paper-typed", "em-default", "dynamic"])
def test_operators_pass_opcheck(case, monkeypatch):
    """In the interpreter those checks alone that depend on the order of memory; test_cpu.py has the others."""
    p = problem(make_routing(case, 2, iters=2), size=(1, 2), types=1, parents=2, whole=True)
    checks = OPCHECKS if CUDA else ("test_schema", "test_faketensor")
    assert_operators_pass_opcheck(p, "triton", monkeypatch, checks)


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
    """It is for tests of Triton's kernels; these are the bits of the C++ kernels."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    layer = ClassCaps(2, 3, routing=routing).eval()
    a, pose = torch.rand(2, 3, 3, 2), torch.randn(2, 3, 3, 2, 4, 4)
    out = layer(Capsules(a, pose))
    layer.backend = "cpu"
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


@pytest.mark.parametrize("routing", ["vb", "em", "dynamic"])
def test_the_first_steps_of_training_have_the_losses_of_the_reference(routing):
    """To five digits: before rounding has had the time to grow. Two steps in the interpreter, five on a GPU."""
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
    assert_backend_equals_reference(p, "triton")
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
        results = routed_here(p, "triton")
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


@gpu
@pytest.mark.parametrize("routing", ["vb", "em", "dynamic"])
def test_200_steps_of_training_have_the_losses_of_the_reference(routing):
    net = CapsNet((32, 8, 8, 8), num_classes=4, routing=routing, logit_scale=True).to(DEVICE)
    with torch.backends.cudnn.flags(enabled=True, benchmark=False, deterministic=True, allow_tf32=False):
        assert_training_drifts_no_further_than_rounding(net, "triton", stripes(200, device=DEVICE))

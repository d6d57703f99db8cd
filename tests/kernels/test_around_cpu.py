"""What lies around routing on a CPU, BatchNorm and convolutions, against PyTorch: values, gradients, bits, threads."""

import copy
import functools

import pytest
import torch
from kernels.harness import EPS, F32, F64, OPCHECKS, assert_same_bits, assert_within_budget, gradients_of, poisoned

from vbcaps import PrimaryCaps
from vbcaps.kernels import convolve, parents
from vbcaps.kernels.cpu import build, launch, library
from vbcaps.kernels.cpu import norm as norm_cpu
from vbcaps.kernels.plain import Plain
from vbcaps.norm import BatchNorm

pytestmark = pytest.mark.skipif(
    build.find_compiler() is None and not library.file_of("baseline").exists(),
    reason="needs built kernels or a compiler",
)
# images, rows, columns, types
MAPS = [(2, 3, 5, 3), (1, 4, 3, 2), (5, 1, 1, 1), (33, 3, 2, 5), (4, 7, 5, 16)]
LAYERS = [(2, 9, 3), (1, 4, 2), (5, 1, 1), (33, 6, 5), (8, 1, 64)]  # images, parent positions, types


@pytest.fixture(autouse=True)
def _alone():
    """One thread."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def results(module, backend, dtype, leaves, run):
    """Return outputs, running statistics and the gradients of leaves, by the C++ kernels with poisoned memory."""
    module = copy.deepcopy(module).to(dtype)
    leaves = {name: x.to(dtype).requires_grad_() for name, x in leaves.items()}
    if backend == "auto":
        with poisoned() as allocated:
            outputs = run(module, leaves, backend)
            gradients = gradients_of(outputs, leaves)
        assert len(allocated) >= 6
    else:
        outputs = run(module, leaves, backend)
        gradients = gradients_of(outputs, leaves)
    running = {name: x for name, x in module.named_buffers() if x.is_floating_point()}
    return {name: x.detach() for name, x in outputs.items()} | gradients | running


def assert_equals_reference(module, leaves, run):
    nudged = [{name: x * (1 + EPS * k) for name, x in leaves.items()} for k in (-2, -1, 1, 2)]
    singles = [results(module, "reference", F32, inputs, run) for inputs in (leaves, *nudged)]
    exact = results(module, "reference", F64, leaves, run)
    assert_within_budget(results(module, "auto", F32, leaves, run), exact, *singles)


def of_primary(module, leaves, backend):
    caps = module(leaves["x"], backend)
    return dict(logits=caps[1], a=caps[0], poses=caps[2])


class Primary(torch.nn.Module):
    """The BatchNorms of PrimaryCaps, without its convolution."""

    def __init__(self, types, norm_pose):
        super().__init__()
        self.types, self.norm_a, self.norm_pose = types, BatchNorm(types), BatchNorm(types) if norm_pose else None

    def forward(self, x, backend):
        run = Plain() if backend == "reference" else launch.Cpu()
        return run.primary(x, self.types, self.norm_a, self.norm_pose)


class Parents(torch.nn.Module):
    """The BatchNorms of ConvCaps."""

    def __init__(self, types, norm_logit, norm_pose):
        super().__init__()
        self.norm_a = BatchNorm(types) if norm_logit else None
        self.norm_pose = BatchNorm(types) if norm_pose else None

    def forward(self, logit, m, backend):
        return parents(logit, m, self.norm_a, self.norm_pose, backend)


def of_parents(module, leaves, backend):
    a, logits, poses = module(leaves["logit"], leaves["m"], backend)
    return dict(logits=logits, a=a, poses=poses)


def features(n, h, w, types, offset=2.0):
    return torch.randn(n, 17 * types, h, w) * torch.rand(17 * types, 1, 1) + offset


@pytest.mark.parametrize("size", MAPS, ids=str)
@pytest.mark.parametrize("channels_last", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm_pose", [True, False])
def test_primary_capsules_are_within_the_error_budget(size, channels_last, training, norm_pose):
    x = features(*size)
    if channels_last:
        x = x.contiguous(memory_format=torch.channels_last)
    assert_equals_reference(Primary(size[3], norm_pose).train(training), dict(x=x), of_primary)


@pytest.mark.parametrize("size", LAYERS, ids=str)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norms", [(True, True), (True, False), (False, True)], ids=["both", "logit", "pose"])
def test_parents_are_within_the_error_budget(size, training, norms):
    n, L, J = size
    leaves = dict(logit=4 * torch.randn(L, J, n).permute(2, 0, 1), m=torch.randn(L, J, 4, 4, n).permute(4, 0, 1, 2, 3))
    assert_equals_reference(Parents(J, *norms).train(training), leaves, of_parents)


@pytest.mark.parametrize("offset", [1e4, -1e4])
def test_a_mean_far_from_zero_costs_no_digits_of_the_variance(offset):
    """The float32 reference loses its own; the kernel keeps to what float32 inputs hold."""
    x = features(6, 5, 5, 3, offset)
    exact = Primary(3, True).double()(x.double(), "reference")
    for found, y in zip(Primary(3, True)(x, "auto"), exact, strict=True):
        assert (found.double() - y).abs().max() < 1e-6 * max(1.0, float(y.abs().max()))


@pytest.mark.parametrize("size", [(33, 7, 7, 16), (1, 14, 14, 17)], ids=str)
def test_any_number_of_threads_gives_the_same_bits(size):
    n, h, w, types = size
    x, parent = features(*size), dict(logit=torch.randn(n, h * w, types), m=torch.randn(n, h * w, types, 4, 4))

    def both():
        of_map = results(Primary(types, True), "auto", F32, dict(x=x), of_primary)
        of_layer = results(Parents(types, True, True), "auto", F32, parent, of_parents)
        return of_map | {f"parents {name}": value for name, value in of_layer.items()}

    first = both()
    for threads in (2, 3):
        torch.set_num_threads(threads)
        assert_same_bits(both(), first)


def test_the_result_lies_as_routing_reads_it_and_costs_no_copy():
    caps = PrimaryCaps(4, 3)(torch.randn(2, 4, 5, 6))
    assert caps.activations.flatten(1).T.is_contiguous()
    assert launch.Cpu().lay_poses(caps.poses.flatten(1, 3)).data_ptr() == caps.poses.data_ptr()


@pytest.mark.parametrize("used", ["activations", "logits", "poses"])
def test_outputs_that_nobody_uses_need_no_gradient(used):
    leaves = dict(x=features(3, 4, 4, 2))
    name = "a" if used == "activations" else used
    run = lambda *args: {name: of_primary(*args)[name]}  # noqa: E731
    assert_equals_reference(Primary(2, True), leaves, run)
    leaves = dict(logit=torch.randn(3, 4, 2), m=torch.randn(3, 4, 2, 4, 4))
    found = {}
    for backend, dtype in (("auto", F32), ("reference", F64)):
        x = {k: v.to(dtype).requires_grad_() for k, v in leaves.items()}
        y = of_parents(Parents(2, True, True).to(dtype), x, backend)[name]
        found[backend] = torch.autograd.grad(
            (y * torch.arange(y.numel()).view(y.shape)).sum(), x["m" if used == "poses" else "logit"]
        )
    torch.testing.assert_close(found["auto"][0].double(), found["reference"][0], rtol=1e-4, atol=1e-4)


def test_one_value_of_a_type_is_normalised_by_the_running_statistics():
    """As BatchNorm does by itself: there is no spread; the poses have 16 values."""
    layer = Primary(3, True)
    layer.norm_a.running_mean += 1
    x = features(1, 1, 1, 3)
    expected = copy.deepcopy(layer)(x, "reference")
    for found, y in zip(layer(x, "auto"), expected, strict=True):
        torch.testing.assert_close(found, y)
    assert (int(layer.norm_a.num_batches_tracked), int(layer.norm_pose.num_batches_tracked)) == (0, 1)


@pytest.mark.parametrize("obstacle", ["gather", "hook", "float64", "pose size"])
def test_what_the_kernels_do_not_cover_is_done_by_pytorch(obstacle, monkeypatch):
    """Several processes, modules that somebody watches, other numbers, other poses."""
    calls = []
    monkeypatch.setattr(launch, "normalise_primary", lambda *args: calls.append("primary"))
    layer, x = PrimaryCaps(4, 3, pose_size=3 if obstacle == "pose size" else 4), torch.randn(2, 4, 3, 3)
    if obstacle == "gather":
        layer.norm_a.gather = lambda x: x[None]
    if obstacle == "hook":
        layer.norm_a.register_forward_hook(lambda *_: calls.append("hook"))
    if obstacle == "float64":
        layer, x = layer.double(), x.double()
    assert layer(x).activations.shape == (2, 3, 3, 3)
    assert calls == (["hook"] if obstacle == "hook" else [])
    PrimaryCaps(4, 3, backend="reference")(x.float())
    assert "primary" not in calls


def test_the_reference_has_second_derivatives_and_the_kernels_say_so():
    for backend in ("reference", "auto"):
        layer, x = PrimaryCaps(4, 3, backend=backend), torch.randn(2, 4, 3, 3, requires_grad=True)
        (grad,) = torch.autograd.grad(layer(x).poses.pow(3).sum(), x, create_graph=True)
        if backend == "reference":
            grad.square().sum().backward()
            assert x.grad.abs().max() > 0
        else:
            with pytest.raises(RuntimeError, match="backend='reference'"):
                grad.square().sum().backward()


def test_operators_pass_opcheck():
    given = norm_cpu.scheme(BatchNorm(2).plan(9))
    check = functools.partial(torch.library.opcheck, test_utils=OPCHECKS)
    x, logit, pose = torch.randn(3, 2, 2, 34), torch.randn(4, 2, 3), torch.randn(4, 2, 4, 4, 3)
    leaves = [y.requires_grad_() for y in (x, logit, pose)]
    for op, inputs in ((norm_cpu.primary, leaves[:1]), (norm_cpu.parents, leaves[1:])):
        assert set(check(op.operator, (*inputs, *given, *given)).values()) == {"SUCCESS"}


@pytest.mark.parametrize("size", [(1, 2, 9, 8), (3, 5, 7, 7), (17, 1, 6, 6)], ids=str)
@pytest.mark.parametrize("kernel", [dict(kernel_size=1), dict(kernel_size=3, padding=1), dict(kernel_size=5, stride=2)])
@pytest.mark.parametrize("gradients", [True, False])
def test_convolutions_are_pytorchs_with_channels_innermost(size, kernel, gradients):
    conv, x = torch.nn.Conv2d(size[1], 4, bias=gradients, **kernel), torch.randn(size)
    with torch.set_grad_enabled(gradients):
        y = convolve(conv, x)
    exact = copy.deepcopy(conv).double()(x.double())
    torch.testing.assert_close(y.double(), exact, rtol=1e-5, atol=1e-5)
    assert y.requires_grad == gradients
    if size[1] > 1:  # of one channel both orders are the same, and PyTorch takes the other
        assert y.is_contiguous(memory_format=torch.channels_last)


def test_convolutions_that_are_more_than_that_are_called(monkeypatch):
    """With a hook, under autocast, with other padding, in float64."""
    conv, x = torch.nn.Conv2d(2, 4, 3, padding=1), torch.randn(2, 2, 5, 5)
    monkeypatch.setattr(torch, "mkldnn_convolution", lambda *_: pytest.fail("not called as a module"))
    with torch.no_grad():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert convolve(conv, x).dtype == torch.bfloat16
        for other in (torch.nn.Conv2d(2, 4, 3, padding="same"), torch.nn.Conv2d(2, 4, 3, padding_mode="reflect")):
            assert convolve(other, x).shape[1] == 4
        assert convolve(conv.double(), x.double()).dtype == F64
        calls = []
        conv.float().register_forward_hook(lambda *_: calls.append(0))
        convolve(conv, x)
        assert calls == [0]

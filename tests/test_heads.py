"""Capsules on a backbone: maps of any size, backbones of several kinds, what is frozen, and what is exported."""

import copy
import itertools
import sys
import types
import warnings
from collections import OrderedDict
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

from vbcaps import BackboneCapsNet, CapsHead, CapsNet
from vbcaps.kernels import backend_for
from vbcaps.trace import cloud_of, parts_of
from vbcaps.uncertainty import head_scores, scores

ROUTINGS = ("vb", "em", "dynamic")


@pytest.fixture(autouse=True)
def _seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def stack(in_channels=3, channels=12):
    """A plain stack of convolutions: 224 pixels become 7."""
    return nn.Sequential(
        nn.Conv2d(in_channels, 8, 7, stride=8, padding=3), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, channels, 3, stride=4, padding=1), nn.BatchNorm2d(channels), nn.ReLU(),
    )  # fmt: skip


class Residual(nn.Module):
    """A backbone with a shortcut and a parameter of its own that reads the size of its input."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 6, 3, 16, 1), nn.Conv2d(6, 6, 3, 2, 1)
        self.shortcut, self.scale = nn.Conv2d(6, 6, 1, 2), nn.Parameter(torch.ones(6, 1, 1))

    def forward(self, x):
        x = self.conv1(x) / x.shape[-1] ** 0.5
        return F.relu(self.conv2(x) * self.scale + self.shortcut(x))


class Maps(NamedTuple):
    low: torch.Tensor
    high: torch.Tensor


class Pyramid(nn.Module):
    """A backbone that gives two maps, in the container that it is told; channels last if it is asked to."""

    def __init__(self, pack, last=False):
        super().__init__()
        self.low, self.high, self.pack, self.last = nn.Conv2d(3, 4, 8, 8), nn.Conv2d(4, 10, 4, 4), pack, last

    def forward(self, x):
        low = self.low(x)
        maps = low, self.high(low)
        return self.pack(*(one.permute(0, 2, 3, 1) if self.last else one for one in maps))


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("size", [(7, 7), (14, 14), (10, 8), (1, 1), (2, 5), (40, 30)])
def test_a_head_takes_maps_of_any_size(routing, size):
    head = CapsHead(8, 3, caps=(4, 4), routing=routing)
    out = head(torch.randn(2, 8, *size, requires_grad=True))
    assert out.logits.shape == out.activations.shape == (2, 3)
    assert out.poses.shape == (2, 3, 4, 4)
    assert out.posterior.m.shape == (2, 3, 16)
    assert all(x.isfinite().all() for x in tree_leaves(out) if isinstance(x, torch.Tensor))


@pytest.mark.parametrize("caps", [(4,), (4, 6), (4, 6, 5, 4)])
def test_a_head_has_as_many_layers_as_it_is_told(caps):
    head = CapsHead(8, 3, caps=caps, routing_options=dict(iters=2))
    assert [layer.out_caps for layer in head.conv_caps] == list(caps[1:])
    assert [layer.stride[0] for layer in head.conv_caps] == ([2, 1, 1])[: len(caps) - 1]
    trace = head.eval().trace(torch.randn(1, 8, 7, 7))
    assert len(trace.layers) == len(caps)
    assert {len(layer.iterations) for layer in trace.layers.values()} == {2}


def test_large_maps_are_averaged_down_in_their_proportions():
    x = torch.randn(1, 8, 56, 40)
    head = CapsHead(8, 3, caps=(4,), largest_map=14).eval()
    pooled = x.reshape(1, 8, 14, 4, 10, 4).mean((3, 5))
    torch.testing.assert_close(head.pool(x), pooled)
    torch.testing.assert_close(head(x).logits, head(pooled).logits, rtol=1e-5, atol=1e-5)
    assert CapsHead(8, 3, caps=(4,), largest_map=None).pool(x) is x
    assert head.pool(x[..., :14, :14]).shape == (1, 8, 14, 14)


@pytest.mark.parametrize("size", [14, 7])
def test_the_kernels_of_the_cpu_serve_every_layer(size, monkeypatch):
    if backend_of_a_call() is None:
        pytest.skip("no C++ compiler, so no kernels")
    asked = []

    def noted(*args):
        asked.append(backend_for(*args))
        return asked[-1]

    monkeypatch.setattr("vbcaps.kernels.backend_for", noted)
    head = CapsHead(32, 10)
    reference = copy.deepcopy(head)
    for layer in (*reference.conv_caps, reference.class_caps):
        layer.backend = "reference"
    x = torch.randn(4, 32, size, size)
    out = head(x)
    assert [run.name for run in asked] == ["cpu", "cpu"]
    torch.testing.assert_close(out.logits, reference(x).logits, atol=1e-3, rtol=1e-3)


def backend_of_a_call():
    from vbcaps.kernels.cpu.launch import why_no_library

    return None if why_no_library() else "cpu"


@pytest.mark.parametrize("make", [stack, Residual, lambda: Pyramid(lambda *maps: list(maps))])
@pytest.mark.parametrize("size", [(224, 224), (320, 256)])
def test_gradients_reach_every_weight_of_a_backbone(make, size):
    net = BackboneCapsNet(make(), 4, caps=(4, 4))
    out = net(torch.randn(2, 3, *size))
    F.cross_entropy(out.logits, torch.tensor([0, 3])).backward()
    unused = {name for name, p in net.named_parameters() if p.grad is None or not p.grad.isfinite().all()}
    assert unused == set()
    assert all(p.grad.abs().sum() > 0 for name, p in net.backbone.named_parameters() if name.endswith("weight"))


@pytest.mark.parametrize(
    ("pack", "options", "channels"),
    [
        (lambda low, high: [low, high], {}, 10),
        (lambda low, high: (low, high), dict(feature=0), 4),
        (Maps, {}, 10),
        (Maps, dict(feature="low"), 4),
        (lambda low, high: OrderedDict(low=low, high=high), dict(feature="high"), 10),
        (lambda low, high: types.SimpleNamespace(low=low, high=high), dict(feature="low"), 4),
        (lambda low, high: high, {}, 10),
    ],
)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_a_map_is_chosen_among_several(pack, options, channels, layout):
    backbone = Pyramid(pack, last=layout == "nhwc")
    net = BackboneCapsNet(backbone, 3, caps=(4,), layout=layout, image_size=64, **options)
    assert net.head.in_channels == channels
    x = torch.randn(2, 3, 64, 64)
    low = backbone.low(x)
    expected = low if channels == 4 else backbone.high(low)
    assert torch.equal(net.features(x), expected)
    assert net(x).logits.shape == (2, 3)


def test_finding_the_channels_changes_and_computes_nothing():
    backbone = stack().train()
    backbone[1].eval()  # a mode of its own
    before = {name: x.clone() for name, x in backbone.state_dict().items()}
    net = BackboneCapsNet(backbone, 3, image_size=10_000)  # an image of 10,000 pixels a side has no storage
    assert net.head.in_channels == 12
    assert net.backbone is backbone
    assert [module.training for module in backbone] == [True, False, True, True, True, True]
    assert all(torch.equal(x, before[name]) for name, x in backbone.state_dict().items())


def test_a_frozen_backbone_stays_as_it_is():
    net = BackboneCapsNet(stack(), 3, caps=(4, 4), freeze=True)
    before = {name: x.clone() for name, x in net.backbone.state_dict().items()}
    head = {name: x.clone() for name, x in net.head.named_parameters()}
    optimiser = torch.optim.SGD(net.parameter_groups(0.1), momentum=0.9, weight_decay=0.1)
    for _ in range(2):
        net.train()
        x = torch.randn(4, 3, 64, 64)
        optimiser.zero_grad()
        F.cross_entropy(net(x).logits, torch.tensor([0, 1, 2, 0])).backward()
        optimiser.step()
    assert net.training
    assert net.head.training
    assert not any(module.training for module in net.backbone.modules())
    assert all(torch.equal(x, before[name]) for name, x in net.backbone.state_dict().items())
    assert not torch.equal(net.head.primary_caps.conv.weight, head["primary_caps.conv.weight"])
    net.freeze(False)
    net(x)
    assert not torch.equal(net.backbone[1].running_mean, before["1.running_mean"])
    assert all(p.requires_grad for p in net.parameters())


def test_an_image_has_a_gradient_through_a_frozen_backbone():
    x = torch.randn(1, 3, 64, 64, requires_grad=True)
    BackboneCapsNet(stack(), 3, caps=(4,), freeze=True).eval()(x).logits[0, 1].backward()
    assert x.grad.abs().sum() > 0


def test_parameter_groups_have_their_rates_and_every_weight_once():
    net = BackboneCapsNet(stack(), 3)
    groups = net.parameter_groups(1e-2, backbone_lr=1e-4)
    assert [group["lr"] for group in groups] == [1e-2, 1e-4]
    assert net.parameter_groups(1e-2)[1]["lr"] == pytest.approx(1e-3)
    assert {id(p) for group in groups for p in group["params"]} == {id(p) for p in net.parameters()}
    assert sum(len(group["params"]) for group in groups) == len(list(net.parameters()))
    net.freeze()
    assert len(net.parameter_groups(1e-2)) == 1
    assert {id(p) for p in net.parameter_groups(1e-2)[0]["params"]} == {id(p) for p in net.head.parameters()}


@pytest.mark.parametrize("routing", ROUTINGS)
def test_a_state_dict_makes_the_same_network(routing, tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    net, other = (BackboneCapsNet(stack(), 3, caps=(4, 4), routing=routing) for _ in range(2))
    x = torch.randn(3, 3, 64, 64)
    net(x)  # running statistics leave their start
    safetensors.save_file(net.state_dict(), tmp_path / "net.safetensors")
    other.load_state_dict(safetensors.load_file(tmp_path / "net.safetensors"))
    assert torch.equal(net.eval()(x).logits, other.eval()(x).logits)
    head = CapsHead(12, 3, caps=(4, 4), routing=routing).eval()
    head.load_state_dict(net.head.state_dict())
    assert torch.equal(head(net.features(x)).logits, net(x).logits)


@pytest.mark.parametrize("caps", [(4,), (4, 5), (4, 5, 6)])
def test_a_trace_is_what_forward_does_and_divides_a_class_among_the_map(caps):
    net = BackboneCapsNet(stack(), 3, caps=caps, backend="reference")
    x = torch.randn(1, 3, 200, 150)
    net.train()(torch.randn(4, 3, 200, 150))
    net.eval()
    with torch.no_grad():
        trace = net.trace(x)
        torch.testing.assert_close(trace.output.logits, net(x).logits)
    parts = parts_of(trace, "class_caps", 0, type=1)
    assert parts.shape == net.features(x).shape[2:] == (7, 5)
    assert parts.sum().item() == pytest.approx(1, abs=1e-4)
    assert parts.min() >= 0
    assert cloud_of(trace, "class_caps", 0, type=2).votes.shape[1] == 2
    with pytest.raises(ValueError, match="layer must be one of"):
        parts_of(trace, "conv_caps7", 0, type=0)


def test_a_head_has_the_scores_of_a_network():
    """The same stem and layers as `CapsNet`, whose scores the library knows, by way of a model."""
    import vbcaps

    model = vbcaps.load("fashion_small", device="cpu")
    head = CapsHead(64, 10, caps=model.net.arch[1:3])
    images = torch.randint(0, 256, (5, 28, 28), dtype=torch.uint8)
    # The capsule layers of the model take the place of the head's: one that is not padded, then one more.
    head.primary_caps, head.class_caps = model.net.primary_caps, model.net.class_caps
    head.conv_caps = nn.ModuleList([model.net.conv_caps1, model.net.conv_caps2])
    net = BackboneCapsNet(model.net.stem, 10, in_channels=1, channels=64)
    net.head = head.eval()
    found = head_scores(net, model.view.test(model.read(images)).float(), model.temperature)
    expected = scores(model, images)
    assert {"precision", "elbo", "epistemic"} < set(found)
    for name, x in found.items():
        torch.testing.assert_close(x, expected[name], atol=1e-4, rtol=1e-4)


def test_scores_leave_the_network_in_its_mode_and_em_has_those_of_logits():
    net = BackboneCapsNet(stack(), 3, caps=(4,), routing="em").train()
    mean = net.backbone[1].running_mean.clone()
    assert set(head_scores(net, torch.randn(2, 3, 64, 64))) == {"max_softmax", "entropy", "energy"}
    assert net.training
    assert torch.equal(net.backbone[1].running_mean, mean)


def test_a_head_learns_which_part_of_a_map_is_bright():
    """Features in one of four quarters: the pooled map says nothing, so the poses must."""
    head = CapsHead(4, 4, caps=(4, 4), routing_options=dict(iters=2))
    optimiser = torch.optim.Adam(head.parameters(), 1e-2)
    label = torch.arange(32) % 4
    losses = []
    for _ in range(30):
        x = 0.1 * torch.randn(32, 4, 6, 6)
        for one, k in zip(x, label.tolist(), strict=True):
            one[:, 3 * (k // 2) : 3 * (k // 2) + 3, 3 * (k % 2) : 3 * (k % 2) + 3] += 1.0
        out = head(x)
        loss = F.cross_entropy(out.logits, label)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0], losses
    assert (head.eval()(x).logits.argmax(1) == label).float().mean() > 0.7


# --- compiled, in 16 bits, exported -----------------------------------------------------------------------------


def test_compiled_in_one_graph_equals_eager():
    torch._dynamo.reset()
    net = BackboneCapsNet(stack(), 3, caps=(3, 3), routing_options=dict(iters=2)).double()
    eager = copy.deepcopy(net)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    out, expected = compiled(x), eager(x)
    for a, b in zip(tree_leaves(out), tree_leaves(expected), strict=True):
        torch.testing.assert_close(a, b)
    out.logits.square().sum().backward()
    expected.logits.square().sum().backward()
    for p, q in zip(net.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_bfloat16_autocast_keeps_the_capsules_in_float32():
    net = BackboneCapsNet(stack(), 3, caps=(4, 4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        features = net.features(torch.randn(4, 3, 96, 96))
        out = net.head(features)
    assert features.dtype == torch.bfloat16
    assert {x.dtype for x in tree_leaves(out) if isinstance(x, torch.Tensor)} == {torch.float32}
    out.logits.square().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in net.parameters())


def test_exported_for_any_batch_it_gives_the_same(tmp_path):
    net = BackboneCapsNet(stack(), 3, caps=(3, 3), largest_map=4, routing_options=dict(iters=2))
    net(torch.randn(4, 3, 224, 224))
    net.eval()
    batch = torch.export.Dim("batch", max=64)
    program = torch.export.export(net, (torch.randn(2, 3, 224, 224),), dynamic_shapes={"x": {0: batch}})
    x = torch.randn(3, 3, 224, 224)
    with torch.no_grad():
        expected = net(x).logits
        torch.testing.assert_close(program.module()(x).logits, expected, atol=1e-4, rtol=1e-4)
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    names = ["activations", "poses", "logits"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(program, f=str(tmp_path / "net.onnx"), dynamo=True, verbose=False, output_names=names)
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx")
    (found,) = session.run(["logits"], {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(found), expected, atol=1e-4, rtol=1e-4)


# --- timm -------------------------------------------------------------------------------------------------------


class MadeUpTimm(nn.Module):
    """What `timm.create_model(..., features_only=True)` gives, as far as the library uses it."""

    def __init__(self, channels, layout):
        super().__init__()
        self.stages = nn.ModuleList(nn.Conv2d(few, many, 2, 2) for few, many in itertools.pairwise(channels))
        self.feature_info = types.SimpleNamespace(channels=lambda: list(channels[1:]))
        self.output_fmt = layout

    def forward(self, x):
        maps = []
        for stage in self.stages:
            x = stage(x)
            maps.append(x.permute(0, 2, 3, 1) if self.output_fmt == "Format.NHWC" else x)
        return maps


@pytest.mark.parametrize("layout", ["Format.NCHW", "Format.NHWC"])
def test_a_name_makes_a_network_of_timm(layout, monkeypatch):
    asked = {}

    def create_model(name, **options):
        asked.update(options, name=name)
        return MadeUpTimm((options["in_chans"], 4, 6, 9), layout)

    monkeypatch.setitem(sys.modules, "timm", types.SimpleNamespace(create_model=create_model))
    net = BackboneCapsNet("resnet18.a1_in1k", 3, caps=(4,), in_channels=1, pretrained=True, backbone_options=dict(a=1))
    assert asked == dict(name="resnet18.a1_in1k", features_only=True, pretrained=True, in_chans=1, a=1)
    assert net.head.in_channels == 9
    assert net(torch.randn(2, 1, 40, 32)).logits.shape == (2, 3)
    assert net.features(torch.randn(2, 1, 40, 32)).shape == (2, 9, 5, 4)
    assert BackboneCapsNet("resnet18", 3, feature=0).head.in_channels == 4


def test_a_real_network_of_timm():
    pytest.importorskip("timm", exc_type=ImportError)
    net = BackboneCapsNet("resnet18", 3, in_channels=2)
    assert net.head.in_channels == 512
    assert net(torch.randn(2, 2, 96, 96)).logits.shape == (2, 3)


# --- errors -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(caps=()), ValueError, "caps must be numbers of capsule types"),
        (dict(caps=(16, 0)), ValueError, r"caps\[1\] must be a whole number of at least 1, got 0"),
        (dict(kernel_size=4), ValueError, "kernel_size must be odd, got 4"),
        (dict(largest_map=0), ValueError, "largest_map must be a whole number of at least 1, got 0"),
        (dict(routing="votes"), ValueError, "routing must be one of"),
        (dict(padding=1), TypeError, "padding"),
    ],
)
def test_arguments_that_a_head_refuses(options, error, message):
    with pytest.raises(error, match=message):
        CapsHead(8, 3, **options)


@pytest.mark.parametrize("x", [torch.randn(2, 7, 5, 5), torch.randn(2, 8), [1]])
def test_a_map_that_does_not_fit_is_an_error(x):
    with pytest.raises((ValueError, TypeError), match=r"x must have shape \(n, 8, h, w\)|takes a feature map"):
        CapsHead(8, 3)(x)


@pytest.mark.parametrize(
    ("backbone", "options", "error", "message"),
    [
        (nn.Sequential(nn.Conv2d(3, 4, 8, 8), nn.Flatten()), {}, ValueError, "take its pooling and classifier off"),
        (nn.Conv2d(5, 4, 8, 8), {}, ValueError, "give channels, or in_channels and image_size"),
        (Pyramid(lambda low, high: dict(low=low, high=high)), {}, ValueError, r"one of \['low', 'high'\], got None"),
        (Pyramid(Maps), dict(feature="middle"), ValueError, r"\['low', 'high'\], got 'middle'"),
        (Pyramid(Maps), dict(feature=2), ValueError, "feature must be below 2"),
        (stack(), dict(layout="chw"), ValueError, "layout must be one of"),
        (stack(), dict(pretrained=True), ValueError, "are for a name of timm's"),
        (lambda x: x, {}, TypeError, "backbone must be a torch module or a name of timm's, got function"),
    ],
)
def test_backbones_that_are_refused(backbone, options, error, message):
    with pytest.raises(error, match=message):
        BackboneCapsNet(backbone, 3, **options)


def test_images_of_other_channels_are_an_error():
    net = BackboneCapsNet(stack(), 3)
    with pytest.raises(ValueError, match=r"images must have shape \(n, 3, height, width\), got \(2, 1, 64, 64\)"):
        net(torch.randn(2, 1, 64, 64))


def test_a_head_does_not_disturb_the_paper_s_network():
    """`CapsNet` and a head of the same layers are built of the same parts, so they have as many parameters."""
    net = CapsNet((8, 4, 5, 6), in_channels=3, num_classes=3)
    head = CapsHead(8, 3, caps=(4, 5, 6))
    of_net = sum(p.numel() for name, p in net.named_parameters() if not name.startswith("stem"))
    assert sum(p.numel() for p in head.parameters()) == of_net

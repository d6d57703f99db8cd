"""CapsNet, ConvNet and CapsVAE: the paper's sizes, any routing by a word, bad input, robustness, learning."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

from vbcaps import CapsNet, CapsVAE, ConvNet, Prior
from vbcaps.losses import activation_nll_loss
from vbcaps.models import IMAGE_SIZES, ResidualBlock, current_names
from vbcaps.routing import Agreement, Mixture, Posterior
from vbcaps.routing.votes import in_fields

ROUTINGS = ("vb", "em", "dynamic")
SMALL = (8, 4, 4, 4)
TINY = (4, 2, 2, 2)


@pytest.fixture(autouse=True)
def _seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def bars(n, classes, size):
    """Noisy images of two channels with a bright bar whose height is the class."""
    label = torch.arange(n) % classes
    x = 0.3 * torch.randn(n, 2, size, size)
    width = size // classes
    for image, k in zip(x, label.tolist(), strict=True):
        image[:, k * width : (k + 1) * width] += 1.0
    return x, label


def settle(model, x, *args):
    """Running statistics of this batch, then evaluation: fresh ones saturate or hide what the capsules say."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        model(x, *args)
    for norm in norms:
        norm.momentum = 0.1
    return model.eval()


def count(module):
    return sum(p.numel() for p in module.parameters())


# --- the paper's network ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "in_channels", "classes", "exact", "paper"),
    [
        ((64, 16, 16, 16), 2, 5, 169802, 169),
        ((64, 8, 16, 16), 2, 5, 142666, 142),
        ((64, 16, 32, 32), 2, 5, 318602, 318),
        ((64, 16, 16, 16), 3, 10, 172692, 172),
        ((64, 8, 16, 16), 3, 10, 145556, 145),
        ((64, 16, 32, 32), 3, 10, 322772, 323),
    ],
)
def test_parameter_counts_are_the_papers(arch, in_channels, classes, exact, paper):
    """The paper rounds some down and some to the nearest thousand."""
    parameters = count(CapsNet(arch, in_channels, classes, logit_scale=False))
    assert parameters == exact
    assert paper in (parameters // 1000, round(parameters / 1000))


def test_defaults_are_the_papers_smallnorb_network():
    net = CapsNet()
    assert count(net) == 169802 + 1  # the factor on the class logits is ours
    assert net.image_size == (32, 32)
    assert net.class_caps.routing.iters == 3


@pytest.mark.parametrize(("stem", "sizes"), [("conv", (14, 6, 4)), ("residual", (16, 7, 5))])
def test_maps_at_32x32(stem, sizes):
    net, seen = CapsNet(TINY, stem=stem), []
    for layer in (net.primary_caps, net.conv_caps1, net.conv_caps2):
        layer.register_forward_hook(lambda _, __, out: seen.append(tuple(out.activations.shape)))
    net(torch.randn(2, 2, 32, 32))
    assert seen == [(2, size, size, 2) for size in sizes]


def test_outputs_are_named_and_shaped():
    net = CapsNet((8, 4, 3, 2), in_channels=3, num_classes=7, pose_size=3)
    out = net(torch.randn(2, 3, 32, 32))
    assert out.logits.shape == out.activations.shape == (2, 7)
    assert out.poses.shape == (2, 7, 3, 3)
    assert out.posterior.m.shape == (2, 7, 9)
    torch.testing.assert_close(out.activations, 1 / (1 + (-out.logits).exp()))
    torch.testing.assert_close(out.poses.flatten(2), net.class_caps.norm_pose(out.posterior.m))


@pytest.mark.parametrize("stem", ["conv", "residual"])
@pytest.mark.parametrize("size", [20, 21, (20, 33), (57, 22), (256, 20), (31, 256)])
def test_square_and_rectangular_images(size, stem):
    net = CapsNet(TINY, 1, 3, size, stem=stem)
    out = net(torch.randn(2, 1, *net.image_size))
    assert out.activations.shape == (2, 3)
    assert out.activations.isfinite().all()


@pytest.mark.parametrize("stem", ["conv", "residual"])
def test_every_image_size_from_20_to_256_fits_the_kernels(stem):
    assert (IMAGE_SIZES[0], IMAGE_SIZES[-1]) == (20, 256)
    net = CapsNet(TINY, 1, 3, stem=stem)
    for size in IMAGE_SIZES:
        with torch.no_grad():
            h, w = net.stem(torch.zeros(1, 1, size, 20)).shape[2:]
        for layer in (net.conv_caps1, net.conv_caps2):
            h, w = layer.output_size(h, w)
        assert h >= 1
        assert w >= 1


def test_residual_stem_is_four_blocks_of_two_3x3_layers():
    stem = CapsNet(SMALL, stem="residual").stem
    blocks = [m for m in stem.modules() if isinstance(m, ResidualBlock)]
    layers = [m for m in stem.modules() if isinstance(m, nn.Conv2d) and m.kernel_size == (3, 3)]
    assert (len(blocks), len(layers)) == (4, 8)
    assert not [m for m in CapsNet(SMALL).modules() if isinstance(m, ResidualBlock)]


def test_a_residual_block_adds_its_input():
    block = ResidualBlock(3, 3).eval()
    nn.init.zeros_(block.conv2[0].weight)
    x = torch.rand(2, 3, 5, 5)
    torch.testing.assert_close(block(x), x)


def test_logit_scale_is_a_learned_factor_on_the_class_logits():
    x = torch.randn(3, 2, 20, 20)
    plain, scaled = CapsNet(TINY, image_size=20, logit_scale=False), CapsNet(TINY, image_size=20)
    scaled.load_state_dict(plain.state_dict(), strict=False)
    assert count(scaled) == count(plain) + 1
    assert plain.class_caps.scale is None
    torch.testing.assert_close(scaled(x).logits, plain(x).logits)
    with torch.no_grad():
        scaled.class_caps.scale.fill_(3.0)
    out = scaled(x)
    torch.testing.assert_close(out.logits, 3 * plain(x).logits)
    torch.testing.assert_close(out.activations, out.logits.sigmoid())
    F.cross_entropy(out.logits, torch.tensor([0, 1, 2])).backward()
    assert scaled.class_caps.scale.grad != 0


def test_logit_bias_is_a_learned_term_of_each_class_logit():
    x = torch.randn(3, 2, 20, 20)
    plain, moved = CapsNet(TINY, image_size=20), CapsNet(TINY, image_size=20, logit_bias=-1.5)
    moved.load_state_dict(plain.state_dict(), strict=False)
    classes = plain.class_caps.num_classes
    assert count(moved) == count(plain) + classes
    assert plain.class_caps.bias is None
    torch.testing.assert_close(moved(x).logits, plain(x).logits - 1.5)
    with torch.no_grad():
        moved.class_caps.bias.copy_(torch.arange(classes))
        moved.class_caps.scale.fill_(2.0)
        plain.class_caps.scale.fill_(2.0)
    out = moved(x)
    torch.testing.assert_close(out.logits, plain(x).logits + torch.arange(classes))
    torch.testing.assert_close(out.activations, out.logits.sigmoid())
    moved.eval()
    torch.testing.assert_close(moved.trace(x[:1]).output.logits, moved(x[:1]).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("network", [CapsNet, CapsVAE])
def test_a_state_that_calls_the_factor_scale_is_read(network):
    """As files of earlier versions do; what optimisers keep of it has a name of the same kind."""
    net, other = network(TINY, image_size=20), network(TINY, image_size=20)
    caps = net if network is CapsNet else net.net
    with torch.no_grad():
        caps.class_caps.scale.fill_(7.0)
    earlier = {name.replace("class_caps.scale", "scale"): x for name, x in net.state_dict().items()}
    assert sum(name.split(".")[-1] == "scale" for name in earlier) == 1
    assert earlier.keys() != net.state_dict().keys()
    other.load_state_dict(earlier)
    for name, x in other.state_dict().items():
        assert torch.equal(x, net.state_dict()[name])
    names = ("optimiser.scale.exp_avg", "ema.scale", "ema.class_caps.scale", "optimiser.class_caps.scale.step", "other")
    assert list(current_names(dict.fromkeys(names))) == [
        "optimiser.class_caps.scale.exp_avg",
        "ema.class_caps.scale",
        "optimiser.class_caps.scale.step",
        "other",
    ]


def test_class_logits_without_batchnorm_are_those_of_routing():
    net = CapsNet(SMALL, norm_logit=False).train()
    x = torch.randn(3, 2, 32, 32)
    with torch.no_grad():
        net.class_caps.scale.fill_(2.0)
        caps = net.conv_caps2(net.conv_caps1(net.primary_caps(net.stem(x))))
        a, pose, W, fields, where, _ = net.class_caps.children_of(caps)
        raw, _ = net.class_caps.routing(*in_fields(a, pose, W, fields, where), fields.child, a.shape[1])
        torch.testing.assert_close(net.class_caps(caps).logits, 2 * raw[:, 0], rtol=1e-4, atol=1e-4)
    assert net.conv_caps1.norm_a is not None
    assert net.class_caps.routing.offsets()["beta_a"] is net.class_caps.routing.beta_a  # its gradient is not 0 here


def test_init_noise_and_norm_pose_reach_every_capsule_layer():
    net = CapsNet(SMALL, init="identity", noise=0.3, norm_pose=False, pose_size=3)
    assert net.primary_caps.norm_pose is None
    for layer in (net.conv_caps1, net.conv_caps2, net.class_caps):
        assert torch.equal(layer.weight.diagonal(dim1=-2, dim2=-1), torch.ones(layer.weight.shape[:-1]))
        assert 0.25 < layer.weight[..., 0, 1:].max() <= 0.3
        assert layer.norm_pose is None


def test_gain_reaches_every_capsule_layer():
    torch.manual_seed(0)
    plain = CapsNet(SMALL)
    torch.manual_seed(0)
    small = CapsNet(SMALL, gain=0.25)
    for name in ("conv_caps1", "conv_caps2", "class_caps"):
        assert torch.equal(getattr(small, name).weight, getattr(plain, name).weight / 4)
    assert torch.equal(small.primary_caps.conv.weight, plain.primary_caps.conv.weight)


# --- routing by a word ------------------------------------------------------------------------------------------


def test_networks_of_different_routing_differ_only_in_their_betas():
    def shapes(routing):
        return {k: v.shape for k, v in CapsNet(SMALL, routing=routing).named_parameters()}

    vb, em, dynamic = map(shapes, ROUTINGS)
    assert vb == em
    assert dynamic == {k: v for k, v in vb.items() if "beta" not in k}
    assert len(vb) == len(dynamic) + 6


@pytest.mark.parametrize(("routing", "posterior"), [("vb", Posterior), ("em", Mixture), ("dynamic", Agreement)])
def test_routing_is_swapped_by_a_word(routing, posterior):
    out = CapsNet(TINY, num_classes=3, image_size=20, routing=routing)(torch.randn(2, 2, 20, 20))
    assert out.activations.shape == (2, 3)
    assert isinstance(out.posterior, posterior)


def test_routing_options_reach_every_capsule_layer():
    options = dict(iters=2, activation="paper", prior=Prior(Psi0=0.5, learn="all"))
    net = CapsNet(TINY, routing_options=options)
    routings = [layer.routing for layer in (net.conv_caps1, net.conv_caps2, net.class_caps)]
    assert {(r.iters, r.activation, r.prior.learn) for r in routings} == {
        (2, "paper", ("alpha0", "m0", "kappa0", "Psi0", "nu0"))
    }
    assert len({id(p) for r in routings for p in r.prior.parameters()}) == 15  # no layer shares its prior


@pytest.mark.parametrize(
    ("routing", "options", "stem"),
    [
        ("vb", {}, "conv"),
        ("vb", dict(prior=Prior(learn="all")), "conv"),
        ("vb", dict(prior=Prior(precision="wishart"), activation="paper"), "conv"),
        ("vb", dict(prior=Prior(precision="full"), iters=2), "conv"),
        ("vb", {}, "residual"),
        ("em", {}, "conv"),
        ("dynamic", {}, "conv"),
    ],
)
def test_training_learns_bars(routing, options, stem):
    net = CapsNet(SMALL, num_classes=3, image_size=28, routing=routing, routing_options=options, stem=stem)
    x, label = bars(12, 3, 28)
    optimiser = torch.optim.Adam(net.parameters(), 3e-3)
    losses = []
    for _ in range(20):
        optimiser.zero_grad()
        loss = activation_nll_loss(net(x).activations, label)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.15, losses
    assert (net(x).activations.argmax(1) == label).float().mean() > 0.8


def test_learned_priors_move():
    net = CapsNet(SMALL, num_classes=3, image_size=20, routing_options=dict(prior=Prior(learn="all")))
    x, label = bars(6, 3, 20)
    activation_nll_loss(net(x).activations, label).backward()
    raw = {k: p for k, p in net.named_parameters() if "prior" in k}
    assert len(raw) == 15
    assert not [k for k, p in raw.items() if p.grad is None or p.grad.abs().max() == 0]


# --- the CNN beside it ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("in_channels", "classes", "size"), [(1, 10, 40), (2, 5, 32)])
def test_the_cnn_is_as_large_as_the_capsule_network(in_channels, classes, size):
    cnn, caps = ConvNet((64, 64, 72, 72), in_channels, classes, size), CapsNet((64, 16, 16, 16), in_channels, classes)
    assert count(cnn) == pytest.approx(count(caps), rel=0.05)
    assert {k: v.shape for k, v in cnn.stem.state_dict().items()} == {
        k: v.shape for k, v in caps.stem.state_dict().items()
    }


@pytest.mark.parametrize(("stem", "sizes"), [("conv", (14, 6, 4)), ("residual", (16, 7, 5))])
def test_the_cnn_sees_the_same_fields_and_gives_scores(stem, sizes):
    net, seen = ConvNet((4, 3, 5, 7), num_classes=6, stem=stem), []
    for layer in (net.conv1, net.conv2, net.conv3):
        layer.register_forward_hook(lambda _, __, out: seen.append(tuple(out.shape)))
    x = torch.randn(2, 2, 32, 32)
    out = net(x)
    assert seen == [(2, filters, size, size) for filters, size in zip((3, 5, 7), sizes, strict=True)]
    assert out.logits.shape == (2, 6)
    torch.testing.assert_close(out.activations, out.logits.sigmoid())
    kinds = [m for m in net.modules() if isinstance(m, nn.Conv2d | nn.BatchNorm2d)]
    assert len([m for m in kinds if isinstance(m, nn.BatchNorm2d)]) == len(kinds) / 2


def test_the_cnn_ends_in_relu_the_mean_over_positions_and_a_linear_map():
    net, seen = ConvNet((4, 3, 5, 7)).eval(), []
    net.conv3.register_forward_hook(lambda _, __, out: seen.append(out))
    logits = net(torch.randn(2, 2, 32, 32)).logits
    (last,) = seen
    assert last.min() < 0
    torch.testing.assert_close(logits, last.clamp_min(0).mean((2, 3)) @ net.head.weight.T + net.head.bias)


def test_the_cnn_learns_bars():
    net = ConvNet((8, 8, 8, 8), num_classes=3, image_size=28)
    x, label = bars(12, 3, 28)
    optimiser = torch.optim.Adam(net.parameters(), 1e-2)
    for _ in range(30):
        optimiser.zero_grad()
        loss = F.cross_entropy(net(x).logits, label)
        loss.backward()
        optimiser.step()
    assert loss < 0.3
    assert (net(x).logits.argmax(1) == label).all()


# --- bad input --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(arch="small"), ValueError, "arch must be four positive numbers (F, d1, d2, d3), got 'small'"),
        (dict(arch=64), ValueError, "arch must be four positive numbers (F, d1, d2, d3), got 64"),
        (dict(arch=(64, 16, 16)), ValueError, "arch must be four positive numbers (F, d1, d2, d3), got (64, 16, 16)"),
        (dict(arch=(64, 0, 16, 16)), ValueError, "arch must be four positive numbers (F, d1, d2, d3), got (64, 0,"),
        (dict(arch=(8, 4, 4, 2.5)), ValueError, "arch must be four positive numbers (F, d1, d2, d3), got (8, 4, 4, 2"),
        (dict(in_channels=0), ValueError, "in_channels must be a whole number of at least 1, got 0"),
        (dict(in_channels="rgb"), ValueError, "in_channels must be a whole number of at least 1, got 'rgb'"),
        (dict(num_classes=0), ValueError, "num_classes must be a whole number of at least 1, got 0"),
        (dict(num_classes=2.5), ValueError, "num_classes must be a whole number of at least 1, got 2.5"),
        (dict(image_size=19), ValueError, "image_size must be a number or (height, width) from 20 to 256, got 19"),
        (dict(image_size=257), ValueError, "image_size must be a number or (height, width) from 20 to 256, got 257"),
        (
            dict(image_size=(32, 10)),
            ValueError,
            "image_size must be a number or (height, width) from 20 to 256, got (3",
        ),
        (dict(image_size=32.0), ValueError, "image_size must be a number or (height, width) from 20 to 256, got 32.0"),
        (dict(image_size=(32, 32, 3)), ValueError, "image_size must be a number or (height, width) from 20 to 256"),
        (dict(routing="svd"), ValueError, "routing must be one of ('vb', 'em', 'dynamic'), got 'svd'"),
        (dict(stem="vit"), ValueError, "stem must be one of ('conv', 'residual'), got 'vit'"),
        (dict(init="zeros"), ValueError, "init must be one of ('glorot', 'identity'), got 'zeros'"),
        (dict(pose_size=0), ValueError, "pose_size must be a whole number of at least 1, got 0"),
        (dict(routing_options=dict(iters=-1)), ValueError, "iters must be a whole number of at least 1, got -1"),
        (
            dict(routing_options=dict(temperature=1.0)),
            TypeError,
            "routing_options of routing='vb' may be ['iters', 'activation', 'temper', 'through', 'prior']: "
            "VBRouting.__init__() got an unexpected keyword argument 'temperature'",
        ),
        (
            dict(routing="dynamic", routing_options=dict(prior=Prior())),
            TypeError,
            "routing_options of routing='dynamic' may be ['iters']: DynamicRouting.__init__() got an unexpected "
            "keyword argument 'prior'",
        ),
        (
            dict(routing_options=dict(activation="relu")),
            ValueError,
            "activation must be one of ('agreement', 'information', 'released', 'paper'), got 'relu'",
        ),
        (
            dict(routing="em", routing_options=dict(growth=2.0)),
            ValueError,
            "growth must lie between 0 and 1, both excluded, got 2.0",
        ),
        (
            dict(pose_size=3, routing_options=dict(prior=Prior())),
            ValueError,
            "prior was made for dim=16",
        ),
    ],
)
@pytest.mark.parametrize("network", [CapsNet, CapsVAE])
def test_construction_refuses_bad_arguments(network, options, error, message):
    with pytest.raises(error, match=re.escape(message)):
        network(**{"arch": TINY, **options})


@pytest.mark.parametrize(
    "options",
    [dict(arch=(64, 16, 16)), dict(num_classes=0), dict(in_channels=0), dict(stem="big"), dict(image_size=19)],
)
def test_the_cnn_refuses_what_the_capsule_network_does(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be") as ours:
        ConvNet(**options)
    with pytest.raises(ValueError, match=re.escape(str(ours.value))):
        CapsNet(**options)


@pytest.mark.parametrize(
    ("images", "error", "message"),
    [
        (torch.zeros(2, 32, 20), ValueError, "images must have shape (n, 2, 32, 20), got (2, 32, 20)"),
        (torch.zeros(1, 1, 2, 32, 20), ValueError, "images must have shape (n, 2, 32, 20), got (1, 1, 2, 32, 20)"),
        (torch.zeros(1, 3, 32, 20), ValueError, "images must have shape (n, 2, 32, 20), got (1, 3, 32, 20)"),
        (torch.zeros(1, 2, 20, 32), ValueError, "images must have shape (n, 2, 32, 20), got (1, 2, 20, 32)"),
        (torch.zeros(1, 2, 8, 8), ValueError, "images must have shape (n, 2, 32, 20), got (1, 2, 8, 8)"),
        (
            torch.zeros(1, 2, 32, 20, dtype=torch.uint8),
            TypeError,
            "images must be floating point, standardised, got torch.uint8; `View.test` makes them so",
        ),
        (torch.zeros(1, 2, 32, 20, dtype=torch.int64), TypeError, "images must be floating point, standardised, got"),
    ],
)
@pytest.mark.parametrize("network", [CapsNet, CapsVAE, ConvNet])
def test_forward_refuses_bad_images(network, images, error, message):
    with pytest.raises(error, match=re.escape(message)):
        network(TINY, image_size=(32, 20))(images)


# --- robustness -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(
    ("n", "classes", "size", "scale"),
    [
        (2, 3, 20, 0.0),
        (1, 3, 20, 1.0),
        (1, 3, 28, 0.0),
        (2, 1, 20, 1.0),
        (1, 1, 20, 0.0),
        (2, 3, 20, 1e4),
        (2, 3, 24, 1e-6),
    ],
    ids=["black", "one image", "one black", "one class", "one of each", "huge", "minute"],
)
def test_outputs_and_gradients_are_finite(n, classes, size, scale, routing, training):
    net = CapsNet(TINY, num_classes=classes, image_size=size, routing=routing, logit_scale=True).train(training)
    x = (scale * torch.randn(n, 2, size, size)).requires_grad_()
    out = net(x)
    loss = (
        activation_nll_loss(out.activations, torch.zeros(n, dtype=torch.long))
        + (out.poses * torch.randn_like(out.poses)).sum()
    )
    loss.backward()
    assert all(t.isfinite().all() for t in tree_leaves(out))
    assert x.grad.isfinite().all()
    assert not [k for k, p in net.named_parameters() if not p.grad.isfinite().all()]


@pytest.mark.parametrize("precision", ["gamma", "wishart", "full"])
@pytest.mark.parametrize("activation", ["released", "paper"])
def test_black_images_are_finite_for_every_precision_and_activation_rule(precision, activation):
    options = dict(prior=Prior(precision=precision, learn="all"), activation=activation)
    net = CapsNet(TINY, num_classes=3, image_size=20, routing_options=options)
    out = net(torch.zeros(1, 2, 20, 20))
    (out.logits.square().sum() + (out.poses * torch.randn_like(out.poses)).sum()).backward()
    assert out.logits.isfinite().all()
    assert not [k for k, p in net.named_parameters() if not p.grad.isfinite().all()]


@pytest.mark.parametrize("network", [CapsNet, CapsVAE])
def test_forward_assigns_nothing_to_self(network):
    net = network(TINY, num_classes=3, image_size=20)

    def snapshot():
        seen = {}
        for name, module in net.named_modules():
            for key, value in module.__dict__.items():
                inner = value.items() if isinstance(value, dict) else [("", value)]
                seen |= {(name, key, k): v for k, v in inner}
        return seen

    before = snapshot()
    net(torch.randn(2, 2, 20, 20))
    after = snapshot()
    assert before.keys() == after.keys()
    assert not [key for key, value in before.items() if after[key] is not value]


@pytest.mark.parametrize("routing", ROUTINGS)
def test_an_image_is_classified_alike_alone_and_in_a_batch(routing):
    net = CapsNet(SMALL, num_classes=3, image_size=20, routing=routing)
    x, _ = bars(6, 3, 20)
    settle(net, x)
    together = net(x)
    assert together.activations.std(0).min() > 0.05
    for k in range(6):
        alone = net(x[k : k + 1])
        torch.testing.assert_close(alone.logits[0], together.logits[k], atol=1e-4, rtol=1e-4)

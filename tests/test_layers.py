"""PrimaryCaps, ConvCaps and ClassCaps against loops that gather, multiply and route by hand."""

import itertools
import math
import re

import literal
import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_leaves, tree_map_only

import vbcaps.layers
from vbcaps import Capsules, ClassCaps, ConvCaps, PrimaryCaps, Prior
from vbcaps.routing import dynamic_routing, em_routing, vb_routing
from vbcaps.routing.fields import coordinates
from vbcaps.routing.vb import ACTIVATIONS
from vbcaps.routing.votes import at_right_hand_column

ROUTINGS = ("vb", "em", "dynamic")


@pytest.fixture(autouse=True)
def _seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def capsules(n, h, w, c, p, dtype=torch.float64):
    """Activations n h w c in (0, 1) and poses n h w c p p."""
    return Capsules(torch.rand(n, h, w, c, dtype=dtype), torch.randn(n, h, w, c, p, p, dtype=dtype))


def with_random_betas(layer):
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "beta" in name:
                parameter.uniform_(-1, 1)
    return layer


def route_by_hand(layer, a, V, child, children):
    r = layer.routing
    if isinstance(r, vbcaps.routing.VBRouting):
        return vb_routing(a, V, child, r.prior, children=children, beta_a=r.beta_a, beta_u=r.beta_u)
    if isinstance(r, vbcaps.routing.EMRouting):
        return em_routing(a, V, child, children=children, beta_a=r.beta_a, beta_u=r.beta_u)
    return dynamic_routing(a, V, child, children=children)


def standardised(x, dims):
    """What a training BatchNorm without affine gives."""
    return (x - x.mean(dims, keepdim=True)) / (x.var(dims, correction=0, keepdim=True) + 1e-5).sqrt()


def naive_conv_caps(layer, caps):
    """One field, one tap, one type, one parent at a time: a l i, V l i j d, child l i and the map's size."""
    (kh, kw), (sh, sw), (ph, pw) = layer.kernel_size, layer.stride, layer.padding
    a, pose = caps[:2]
    n, h, w, c = a.shape
    rows, cols = range(0, h + 2 * ph - kh + 1, sh), range(0, w + 2 * pw - kw + 1, sw)
    fields = []
    for top, left in itertools.product(rows, cols):
        field = []
        for dy, dx, t in itertools.product(range(kh), range(kw), range(c)):
            y, x = top + dy - ph, left + dx - pw
            inside = 0 <= y < h and 0 <= x < w
            a_i = a[:, y, x, t] if inside else a.new_zeros(n)
            M = pose[:, y, x, t] if inside else pose.new_zeros(n, layer.pose_size, layer.pose_size)
            votes = torch.stack([(M @ layer.weight[dy, dx, t, j]).flatten(1) for j in range(layer.out_caps)], 1)
            number = ((top + dy) * (w + 2 * pw) + left + dx) * c + t
            field.append((a_i, votes, number))
        fields.append(field)
    a_l = torch.stack([torch.stack([a_i for a_i, _, _ in field], 1) for field in fields], 1)
    V = torch.stack([torch.stack([v for _, v, _ in field], 1) for field in fields], 1)
    child = torch.tensor([[number for _, _, number in field] for field in fields])
    logit, q = route_by_hand(layer, a_l, V, child, (h + 2 * ph) * (w + 2 * pw) * c)
    size = (n, len(rows), len(cols), layer.out_caps)
    m = standardised(q.m, (0, 1, 3)) if layer.norm_pose is not None else q.m
    return standardised(logit, (0, 1)).reshape(size), m.reshape(*size, layer.pose_size, layer.pose_size), q


# in_caps, out_caps, kernel, stride, padding, pose, (h, w)
SHAPES = [
    (2, 3, 3, 1, 0, 4, (5, 5)),
    (3, 2, 3, 2, 0, 4, (7, 7)),
    (3, 5, 3, 2, 1, 2, (6, 5)),
    (1, 1, 2, 1, 1, 3, (3, 4)),
    (5, 3, (2, 3), (1, 2), 0, 2, (4, 8)),
    (2, 3, (3, 1), (2, 3), (2, 0), 3, (5, 7)),
    (3, 2, (1, 4), (1, 1), (0, 3), 2, (2, 4)),
    (2, 7, 1, 1, 0, 4, (3, 2)),
    (1, 3, 3, 1, 0, 1, (4, 4)),
]


@pytest.mark.parametrize(
    ("shape", "routing"), [*((s, "vb") for s in SHAPES), (SHAPES[2], "em"), (SHAPES[2], "dynamic"), (SHAPES[5], "em")]
)
@pytest.mark.parametrize("norm_pose", [True, False])
def test_conv_caps_equal_a_loop_over_fields_taps_and_types(shape, routing, norm_pose):
    c, j, kernel, stride, padding, p, (h, w) = shape
    layer = ConvCaps(c, j, kernel, stride, padding, pose_size=p, routing=routing, norm_pose=norm_pose).double()
    with_random_betas(layer)
    caps = capsules(2, h, w, c, p)
    out = layer(caps)
    logits, poses, q = naive_conv_caps(layer, caps)
    assert out.logits.shape == (2, *layer.output_size(h, w), j)
    torch.testing.assert_close(out.logits, logits)
    torch.testing.assert_close(out.activations, 1 / (1 + (-logits).exp()))
    torch.testing.assert_close(out.poses, poses)
    for name, x in literal.tensors(q).items():
        torch.testing.assert_close(getattr(out.posterior, name), x, msg=lambda m, s=name: f"{s}: {m}")


@pytest.mark.parametrize("precision", ["gamma", "wishart", "full"])
def test_conv_caps_hand_their_prior_to_routing(precision):
    nu0 = 0.5 if precision == "gamma" else 4.5
    prior = Prior(0.3, 0.7, 2.0, 0.4, nu0, dim=4, precision=precision, dtype=torch.float64)
    layer = ConvCaps(2, 3, 2, pose_size=2, routing_options=dict(prior=prior), norm_pose=False).double()
    caps = capsules(2, 3, 3, 2, 2)
    out = layer(caps)
    logits, poses, q = naive_conv_caps(layer, caps)
    torch.testing.assert_close(out.logits, logits)
    torch.testing.assert_close(out.poses, poses)
    torch.testing.assert_close(out.posterior.psi, q.psi)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("kernel", "stride", "padding"), [(3, 1, 1), (3, 2, 2), ((2, 3), (1, 2), (1, 0))])
def test_padding_adds_children_that_are_off(routing, kernel, stride, padding):
    """Zeros laid around the activations by hand give the same, and so does any pose for those children."""
    padded = ConvCaps(3, 2, kernel, stride, padding, pose_size=2, routing=routing).double()
    plain = ConvCaps(3, 2, kernel, stride, 0, pose_size=2, routing=routing).double()
    plain.load_state_dict(padded.state_dict())
    a, pose = capsules(2, 5, 4, 3, 2)[:2]
    top, left = padded.padding
    around = (0, 0, left, left, top, top)
    off = torch.ones_like(a[:1, ..., :1])
    off = F.pad(off, around, value=0.0)[..., None, None] == 0
    a_big, pose_big = F.pad(a, around), F.pad(pose, (0, 0, 0, 0, *around))
    out = padded(Capsules(a, pose))
    for fill in (0.0, torch.randn_like(pose_big)):
        by_hand = plain(Capsules(a_big, torch.where(off, fill, pose_big)))
        torch.testing.assert_close(out.logits, by_hand.logits)
        torch.testing.assert_close(out.poses, by_hand.poses)


@pytest.mark.parametrize("b", [0.0, 0.01, 0.5])
@pytest.mark.parametrize("pose", [2, 4])
def test_identity_init_is_one_on_the_diagonal_and_uniform_beside_it(b, pose):
    weight = ConvCaps(8, 8, (3, 2), pose_size=pose, init="identity", noise=b).weight.detach()
    beside = weight[..., ~torch.eye(pose, dtype=torch.bool)]
    assert torch.equal(weight.diagonal(dim1=-2, dim2=-1), torch.ones(3, 2, 8, 8, pose))
    assert beside.min() >= 0
    assert beside.max() <= b
    assert beside.mean() == pytest.approx(b / 2, rel=0.1)
    assert beside.std() == pytest.approx(b / math.sqrt(12), rel=0.1)


@pytest.mark.parametrize(
    ("kernel", "c", "j", "pose", "gain"), [(3, 16, 16, 4, 1.0), (1, 32, 10, 4, 0.25), ((2, 5), 6, 9, 3, 2.0)]
)
def test_glorot_init_has_the_papers_range_times_gain(kernel, c, j, pose, gain):
    """r = sqrt(6) / sqrt(c_i k^2 p^2 + d_j k^2 p^2); a uniform's variance is r^2 / 3."""
    weight = ConvCaps(c, j, kernel, pose_size=pose, init="glorot", gain=gain).weight.detach()
    k2 = weight.shape[0] * weight.shape[1]
    r = gain * math.sqrt(6) / math.sqrt(c * k2 * pose**2 + j * k2 * pose**2)
    assert weight.abs().max() <= r
    assert weight.abs().max() > 0.99 * r
    assert weight.mean() == pytest.approx(0, abs=0.05 * r)
    assert weight.var() == pytest.approx(r**2 / 3, rel=0.05)


def layers_with_inputs(norm_pose=True, n=4, size=(5, 6), routing="vb"):
    """Each kind of layer with an input, in float64."""
    caps = capsules(n, *size, 3, 4)
    options = dict(routing=routing, norm_pose=norm_pose)
    kernel = min(3, *size)
    return [
        (PrimaryCaps(6, 3, norm_pose=norm_pose).double(), torch.randn(n, 6, *size, dtype=torch.float64)),
        (ConvCaps(3, 5, kernel, **options).double(), caps),
        (ClassCaps(3, 5, **options).double(), caps),
    ]


@pytest.mark.parametrize("kind", [0, 1, 2], ids=["primary", "conv", "class"])
def test_logits_have_zero_mean_and_unit_variance_per_type_in_training(kind):
    layer, inputs = layers_with_inputs(n=8)[kind]
    layer.norm_a.eps = layer.norm_pose.eps = 1e-15
    out = layer(inputs)
    logits, poses = out.logits.flatten(0, -2), out.poses.movedim(-3, 0).flatten(1)
    types = logits.shape[1]
    assert list(layer.norm_a.parameters()) == list(layer.norm_pose.parameters()) == []
    torch.testing.assert_close(logits.mean(0), torch.zeros(types).double())
    torch.testing.assert_close(logits.var(0, correction=0), torch.ones(types).double())
    torch.testing.assert_close(poses.mean(1), torch.zeros(types).double())
    torch.testing.assert_close(poses.var(1, correction=0), torch.ones(types).double())
    torch.testing.assert_close(out.activations, out.logits.sigmoid())


@pytest.mark.parametrize("kind", [0, 1, 2], ids=["primary", "conv", "class"])
def test_evaluation_uses_running_statistics(kind):
    """One image gives the same whether it comes alone or in a batch; in training it does not."""
    layer, inputs = layers_with_inputs()[kind]
    layer(inputs)
    one = tree_map_only(torch.Tensor, lambda x: x[:1], inputs)
    assert not torch.allclose(layer(one).logits, layer(inputs).logits[:1])
    layer.eval()
    torch.testing.assert_close(layer(one).logits, layer(inputs).logits[:1])
    torch.testing.assert_close(layer(one).poses, layer(inputs).poses[:1])


@pytest.mark.parametrize("kind", [1, 2], ids=["conv", "class"])
def test_without_norm_pose_the_poses_are_the_posterior_means(kind):
    layer, inputs = layers_with_inputs(norm_pose=False)[kind]
    out = layer(inputs)
    assert layer.norm_pose is None
    assert torch.equal(out.poses, out.posterior.m.view_as(out.poses))


def test_primary_caps_are_a_convolution_split_into_poses_and_logits():
    layer = PrimaryCaps(5, 3, pose_size=2, norm_pose=False).eval()
    x = torch.randn(2, 5, 4, 3)
    out = layer(x)
    for y, z, c in itertools.product(range(4), range(3), range(3)):
        features = x[:, :, y, z] @ layer.conv.weight[:, :, 0, 0].T
        pose = features[:, c * 4 : c * 4 + 4].view(2, 2, 2)
        torch.testing.assert_close(out.poses[:, y, z, c], pose)
        torch.testing.assert_close(out.logits[:, y, z, c], features[:, 12 + c] / math.sqrt(1 + 1e-5))


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("kind", [0, 1, 2], ids=["primary", "conv", "class"])
def test_one_value_per_type_in_training_is_finite(kind, routing):
    """One image on a 1x1 map: it is normalised by the running statistics and leaves them alone."""
    layer, inputs = layers_with_inputs(n=1, size=(1, 1), routing=routing)[kind]
    before = {name: buffer.clone() for name, buffer in layer.norm_a.named_buffers()}
    inputs = tree_map_only(torch.Tensor, lambda x: x.requires_grad_(), inputs)
    out = layer(inputs)
    (out.logits.sum() + out.poses.square().sum()).backward()
    assert out.logits.isfinite().all()
    assert out.poses.isfinite().all()
    assert all(
        t.grad.isfinite().all()
        for t in (*(x for x in tree_leaves(inputs) if x is not None), *layer.parameters())
        if t.grad is not None
    )
    assert all(torch.equal(buffer, before[name]) for name, buffer in layer.norm_a.named_buffers())
    torch.testing.assert_close(out.logits, layer.eval()(inputs).logits)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("kind", [ConvCaps, ClassCaps])
def test_poses_of_1e9_are_finite(kind, training, routing):
    torch.manual_seed(0)
    layer = kind(2, 3, routing=routing).train(training)
    a, pose = capsules(2, 4, 4, 2, 4, dtype=torch.float32)[:2]
    a, pose = a.requires_grad_(), (1e9 * pose).requires_grad_()
    out = layer(Capsules(a, pose))
    (out.logits.square().sum() + out.poses.square().mean()).backward()
    gradients = [x.grad for x in (a, pose, *layer.parameters()) if x.grad is not None]
    assert all(x.isfinite().all() for x in (out.logits, out.poses, *gradients, *layer.buffers()))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_offsets_that_batch_norm_takes_away_have_no_gradient_in_training(activation):
    layer = ConvCaps(3, 2, 2, routing_options=dict(activation=activation)).double()
    caps = capsules(2, 4, 4, 3, 4)
    beta_a, beta_u = layer.routing.beta_a, layer.routing.beta_u
    layer(caps).logits.pow(3).sum().backward()
    assert torch.equal(beta_a.grad, torch.zeros(2).double())
    assert bool(beta_u.grad.any()) == (activation in ("agreement", "paper"))  # times r_j, so it is no offset
    layer.zero_grad()
    layer.eval()(caps).logits.pow(3).sum().backward()
    assert beta_a.grad.abs().min() > 0.01
    assert beta_u.grad.abs().min() > 0.01


def quiet_field(a, pose):
    a = a.clone()
    a[:, :2, :2] = 0
    return a, pose


@pytest.mark.parametrize("norm_pose", [True, False])
@pytest.mark.parametrize(
    ("routing", "options"),
    [
        ("vb", dict(prior=Prior(learn="all"))),
        ("vb", dict(prior=Prior(learn="all"), activation="paper")),
        ("vb", dict(prior=Prior(precision="wishart", learn="all"))),
        ("vb", dict(prior=Prior(precision="full", learn="all"))),
        ("em", {}),
        ("dynamic", {}),
    ],
)
@pytest.mark.parametrize(
    "change",
    [
        lambda a, pose: (a * 0, pose),
        quiet_field,
        lambda a, pose: (a, pose * 1e4),
        lambda a, pose: (a, pose * 1e-6),
        lambda a, pose: (a * 0 + 1, pose[:1, :1, :1, :1].expand_as(pose)),
    ],
    ids=["all off", "a field off", "poses of 1e4", "poses of 1e-6", "equal votes"],
)
def test_awkward_children_give_finite_outputs_and_gradients(change, routing, options, norm_pose):
    options = dict(routing=routing, routing_options=options, norm_pose=norm_pose, init="identity", noise=0.0)
    for layer in (ConvCaps(3, 2, 2, **options), ClassCaps(3, 2, **options)):
        a, pose = (x.detach().requires_grad_() for x in change(*capsules(2, 4, 4, 3, 4, dtype=torch.float32)[:2]))
        out = layer(Capsules(a, pose))
        (
            out.logits * torch.randn_like(out.logits) + (out.poses * torch.randn_like(out.poses)).sum((-2, -1))
        ).sum().backward()
        assert all(t.isfinite().all() for t in tree_leaves(out))
        assert all(t.grad.isfinite().all() for t in (a, pose, *layer.parameters()))


@pytest.mark.parametrize(("h", "w", "p"), [(3, 4, 4), (1, 1, 4), (2, 5, 2), (4, 3, 3)])
def test_coordinates_go_to_the_first_two_entries_of_the_right_hand_column(h, w, p):
    added = at_right_hand_column(coordinates(h, w, 1, torch.float64, torch.device("cpu")), p).view(h, w, p, p)
    expected = torch.zeros(h, w, p, p, dtype=torch.float64)
    for y, x in itertools.product(range(h), range(w)):
        expected[y, x, 0, p - 1] = (y + 0.5) / h
        expected[y, x, 1, p - 1] = (x + 0.5) / w
    torch.testing.assert_close(added, expected)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(("c", "classes", "p", "h", "w"), [(2, 3, 4, 3, 2), (3, 1, 2, 1, 4), (1, 5, 3, 2, 2)])
def test_class_caps_equal_a_loop_with_shared_weights_and_coordinates(routing, c, classes, p, h, w):
    layer = with_random_betas(ClassCaps(c, classes, pose_size=p, routing=routing, norm_pose=False).double())
    assert layer.weight.shape == (1, 1, c, classes, p, p)
    a, pose = capsules(3, h, w, c, p)[:2]
    V = []
    for y, x, t, j in itertools.product(range(h), range(w), range(c), range(classes)):
        vote = pose[:, y, x, t] @ layer.weight[0, 0, t, j]
        vote = vote.clone()
        vote[:, 0, p - 1] += (y + 0.5) / h
        vote[:, 1, p - 1] += (x + 0.5) / w
        V.append(vote.flatten(1))
    V = torch.stack(V, 1).view(3, 1, h * w * c, classes, p * p)
    logit, q = route_by_hand(layer, a.reshape(3, 1, -1), V, torch.arange(h * w * c)[None], h * w * c)
    out = layer(Capsules(a, pose))
    torch.testing.assert_close(out.logits, standardised(logit, (0, 1)).view(3, classes))
    torch.testing.assert_close(out.poses, q.m.view(3, classes, p, p))
    for name, x in literal.tensors(q).items():
        torch.testing.assert_close(getattr(out.posterior, name), x[:, 0], msg=lambda m, s=name: f"{s}: {m}")


@pytest.mark.parametrize("routing", ROUTINGS)
def test_class_caps_see_positions_only_through_their_coordinates(routing, monkeypatch):
    """Positions moved about change the result; moved together with their coordinates they do not."""
    layer = ClassCaps(3, 4, routing=routing).double()
    caps = capsules(3, 3, 4, 3, 4)
    order = torch.randperm(12)
    moved = tree_map_only(torch.Tensor, lambda x: x.flatten(1, 2)[:, order].view_as(x), caps)
    out, scrambled = layer(caps), layer(moved)
    assert not torch.allclose(out.poses, scrambled.poses)
    monkeypatch.setattr(
        vbcaps.layers, "coordinates", lambda *args: coordinates(*args).view(12, 3, 2)[order].flatten(0, 1)
    )
    together = layer(moved)
    torch.testing.assert_close(out.logits, together.logits)
    torch.testing.assert_close(out.poses, together.poses)


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("kind", [0, 1, 2], ids=["primary", "conv", "class"])
def test_forward_assigns_nothing_to_self(kind, routing):
    """Every attribute, parameter and buffer is the same object after a call, and only BatchNorm's have new values."""
    layer, inputs = layers_with_inputs(routing=routing)[kind]

    def snapshot():
        seen = {}
        for name, module in layer.named_modules():
            for key, value in module.__dict__.items():
                inner = value.items() if isinstance(value, dict) else [("", value)]
                seen |= {(name, key, k): v for k, v in inner}
        return seen

    before, state = snapshot(), {name: t.clone() for name, t in layer.state_dict().items() if "norm" not in name}
    layer(inputs)
    after = snapshot()
    assert before.keys() == after.keys()
    assert not [key for key, value in before.items() if after[key] is not value]
    assert all(torch.equal(layer.state_dict()[name], t) for name, t in state.items())


@pytest.mark.parametrize("a_dtype", [torch.float32, torch.float64])
def test_gradients_reach_activations_poses_and_weights(a_dtype):
    layer = ConvCaps(2, 3, 2).to(a_dtype)
    a, pose = (x.requires_grad_() for x in capsules(2, 3, 3, 2, 4, dtype=a_dtype)[:2])
    out = layer(Capsules(a, pose))
    (out.logits.square() * torch.rand_like(out.logits)).sum().backward()
    assert all(t.grad.abs().max() > 0 for t in (a, pose, layer.weight))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (dict(in_caps=0), ValueError, "in_caps must be a whole number of at least 1, got 0"),
        (dict(out_caps=2.5), ValueError, "out_caps must be a whole number of at least 1, got 2.5"),
        (dict(pose_size=True), ValueError, "pose_size must be a whole number of at least 1, got True"),
        (dict(kernel_size=0), ValueError, "kernel_size must be a whole number of at least 1, or a pair of them, got 0"),
        (
            dict(kernel_size=2.5),
            ValueError,
            "kernel_size must be a whole number of at least 1, or a pair of them, got 2.5",
        ),
        (dict(stride=(1, 2, 3)), ValueError, "stride must be a whole number of at least 1, or a pair"),
        (dict(padding=-1), ValueError, "padding must be a whole number of at least 0, or a pair of them, got -1"),
        (dict(padding=(0, 3)), ValueError, "padding must be below kernel_size (3, 3), got (0, 3)"),
        (dict(init="zeros"), ValueError, "init must be one of ('glorot', 'identity'), got 'zeros'"),
        (dict(init="identity", noise=-0.1), ValueError, "noise must be a number of at least 0, got -0.1"),
        (dict(init="identity", noise=math.nan), ValueError, "noise must be a number of at least 0, got nan"),
        (dict(gain=0.0), ValueError, "gain must be a number above 0, got 0.0"),
        (dict(gain=math.nan), ValueError, "gain must be a number above 0, got nan"),
        (dict(gain=math.inf), ValueError, "gain must be a number above 0, got inf"),
        (dict(routing="svd"), ValueError, "routing must be one of ('vb', 'em', 'dynamic'), got 'svd'"),
        (dict(routing_options=dict(iters=0)), ValueError, "iters must be a whole number of at least 1, got 0"),
        (
            dict(routing_options=dict(depth=3)),
            TypeError,
            "routing='vb' may be ['iters', 'activation', 'temper', 'through', 'prior']",
        ),
        (dict(routing_options=dict(prior=Prior(dim=9))), ValueError, "prior was made for dim=9"),
        (dict(routing_options=dict(prior=dict(alpha0=1))), TypeError, "prior must be a Prior, as Prior(alpha0=0.1)"),
        (
            dict(routing_options=dict(prior=Prior(torch.ones(5)))),
            ValueError,
            "prior was made for other numbers of types ({'alpha0': 5})",
        ),
    ],
)
def test_conv_caps_refuse_bad_arguments(options, error, message):
    with pytest.raises(error, match=re.escape(message)):
        ConvCaps(**{"in_caps": 2, "out_caps": 3, **options})


@pytest.mark.parametrize(
    ("a", "pose", "error", "message"),
    [
        ((2, 4, 4), (2, 4, 4, 2, 4, 4), ValueError, "activations must have shape (n, h, w, 2), got (2, 4, 4)"),
        ((1, 4, 4, 3), (1, 4, 4, 3, 4, 4), ValueError, "activations must have shape (n, h, w, 2), got (1, 4, 4, 3)"),
        ((1, 4, 4, 2), (1, 4, 4, 2, 3, 3), ValueError, "poses must have shape (1, 4, 4, 2, 4, 4) to go with the act"),
        ((1, 4, 4, 2), (2, 4, 4, 2, 4, 4), ValueError, "poses must have shape (1, 4, 4, 2, 4, 4) to go with the act"),
        (
            (1, 0, 4, 2),
            (1, 0, 4, 2, 4, 4),
            ValueError,
            "there are no capsules: activations have the shape (1, 0, 4, 2)",
        ),
    ],
)
@pytest.mark.parametrize("kind", [ConvCaps, ClassCaps])
def test_capsule_layers_refuse_wrong_shapes(kind, a, pose, error, message):
    with pytest.raises(error, match=re.escape(message)):
        kind(2, 3)(Capsules(torch.rand(a), torch.rand(pose)))


def test_capsule_layers_refuse_integers_and_maps_below_the_kernel():
    caps = capsules(1, 2, 4, 2, 4, dtype=torch.float32)
    with pytest.raises(ValueError, match=re.escape("a map of 2 x 4 capsules (padding (0, 0)) is too small for kernel")):
        ConvCaps(2, 3)(caps)
    with pytest.raises(TypeError, match=r"activations and poses must be floating point, got torch.int64 and torch.flo"):
        ClassCaps(2, 3)(caps._replace(activations=caps.activations.long()))
    with pytest.raises(TypeError, match=r"a capsule layer takes Capsules\(activations, poses\), got Tensor"):
        ClassCaps(2, 3)(caps.activations)


@pytest.mark.parametrize("kind", [ConvCaps, ClassCaps])
def test_capsule_layers_refuse_weights_of_another_type(kind):
    caps = capsules(1, 4, 4, 2, 4, dtype=torch.float32)
    mixed = caps._replace(activations=caps.activations.double())
    wrong = (
        (kind(2, 3), tree_map_only(torch.Tensor, torch.Tensor.double, caps)),
        (kind(2, 3), mixed),
    )
    for layer, given in wrong:
        with pytest.raises(TypeError, match=r"the weights torch.float\d+: all must be float32, or all float64"):
            layer(given)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_shapes_can_be_had_without_memory(routing):
    layer = ConvCaps(2, 3, routing=routing).to("meta")
    out = layer(tree_map_only(torch.Tensor, lambda x: x.to("meta"), capsules(5, 4, 4, 2, 4, dtype=torch.float32)))
    assert (out.logits.shape, out.poses.shape) == ((5, 2, 2, 3), (5, 2, 2, 3, 4, 4))


@pytest.mark.parametrize("shape", [(6, 4, 4), (1, 5, 4, 4)])
def test_primary_caps_refuse_wrong_rank_and_channels(shape):
    with pytest.raises(ValueError, match=re.escape(f"x must have shape (n, 6, h, w), got {shape}")):
        PrimaryCaps(6, 3)(torch.rand(shape))

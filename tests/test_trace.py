"""What layers and networks say of how they routed: every iteration, equal to what ``forward`` gives.

Below: what ``vbcaps.trace`` reads from it, against loops, numpy and autograd.
"""

import itertools

import literal
import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_leaves

from vbcaps import CapsNet, Capsules, ClassCaps, ConvCaps, Prior
from vbcaps.kernels.cpu.build import find_compiler
from vbcaps.routing import Mixture, Posterior
from vbcaps.routing.fields import conv_fields
from vbcaps.trace import LAYERS, Box, cloud_of, frame_of_parts, parts_of, receptive_field

CASES = {
    "vb": dict(routing="vb"),
    "vb wishart": dict(routing="vb", routing_options=dict(prior=Prior(precision="wishart"), activation="paper")),
    "vb full": dict(routing="vb", routing_options=dict(prior=Prior(precision="full"), iters=2)),
    "em": dict(routing="em", routing_options=dict(temperature=1.0)),
    "dynamic": dict(routing="dynamic", routing_options=dict(iters=4)),
}


@pytest.fixture(autouse=True)
def _alone():
    """One thread."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def layers(case, **options):
    """Each kind of layer that routes, and its input."""
    caps = Capsules(torch.rand(3, 5, 4, 3), torch.randn(3, 5, 4, 3, 4, 4))
    options |= CASES[case]
    return (ConvCaps(3, 4, 3, 1, 1, **options).eval(), caps), (ClassCaps(3, 5, **options).eval(), caps)


@pytest.mark.parametrize("case", CASES)
def test_a_layers_trace_ends_in_what_the_reference_gives(case):
    for layer, caps in layers(case, backend="reference"):
        trace, out = layer.trace(caps), layer(caps)
        assert len(trace.iterations) == layer.routing.iters
        assert trace.children is caps
        for found in (trace.parents, trace.parents._replace(posterior=trace.iterations[-1])):
            for x, y in zip(tree_leaves(found), tree_leaves(out), strict=True):
                assert torch.equal(x, y)
        for before, after in itertools.pairwise(trace.iterations):
            assert not torch.allclose(before.m, after.m)
            assert not torch.allclose(before.r, after.r)


@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("case", ["vb", "vb wishart", "em", "dynamic"])
def test_a_layers_trace_ends_in_what_the_kernels_give(case):
    for layer, caps in layers(case, backend="cpu"):
        for x, y in zip(tree_leaves(layer.trace(caps).parents), tree_leaves(layer(caps)), strict=True):
            torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_iterations_are_those_of_a_routing_that_ends_there(case):
    for layer, caps in layers(case, backend="reference"):
        trace = layer.trace(caps)
        for k, q in enumerate(trace.iterations, 1):
            layer.routing.iters = k
            for name, x in literal.tensors(layer(caps).posterior).items():
                torch.testing.assert_close(getattr(q, name), x, msg=lambda m, at=name: f"{at}: {m}")


def test_votes_are_poses_times_transformations_and_children_are_numbered():
    """Over the padded map, row by row, column by column, type by type."""
    layer, caps = layers("vb")[0]
    trace = layer.trace(caps)
    assert torch.equal(trace.fields.child, conv_fields(7, 6, 3, (3, 3), (1, 1), torch.device("cpu")).child)
    assert trace.votes.shape == (3, 20, 27, 4, 16)
    l, i, j = 7, 14, 2  # field in row 1, column 3; tap in row 1, column 1; type 2
    number = int(trace.fields.child[l, i])
    y, x, t = number // 18 - 1, number % 18 // 3 - 1, number % 3
    assert (y, x, t) == (1, 3, 2)
    vote = caps.poses[:, y, x, t] @ layer.weight[1, 1, t, j]
    torch.testing.assert_close(trace.votes[:, l, i, j], vote.flatten(1))
    assert torch.equal(trace.activations[:, l, i], caps.activations[:, y, x, t])
    assert (trace.activations[:, 0, :9] == 0).all()  # padding is off
    layer, caps = layers("vb")[1]
    trace = layer.trace(caps)
    vote = caps.poses[:, 2, 1, 1] @ layer.weight[0, 0, 1, j]
    vote[:, :2, 3] += torch.tensor([2.5 / 5, 1.5 / 4])
    torch.testing.assert_close(trace.votes[:, (2 * 4 + 1) * 3 + 1, j], vote.flatten(1))


@pytest.mark.parametrize("case", ["vb", "vb full"])
def test_the_bound_rises_over_the_iterations(case):
    for layer, caps in layers(case):
        layer.routing.iters = 5
        trace = layer.trace(caps)
        bounds = [q.elbo(trace.activations, trace.votes).total for q in trace.iterations]
        assert bounds[0].shape == (3,)
        for before, after in itertools.pairwise(bounds[1:]):
            assert (after >= before - 1e-3).all()
        assert (bounds[-1] > bounds[1] + 0.01).all()


@pytest.mark.parametrize("case", CASES)
def test_a_networks_trace_has_its_logits_and_every_layer(case):
    net = CapsNet((8, 4, 3, 2), 2, 5, 20, **CASES[case])
    x = torch.randn(4, 2, 20, 20)
    net(x)
    net.eval()
    trace, out = net.trace(x), net(x)
    for found, expected in zip(tree_leaves(trace.output), tree_leaves(out), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(trace.features, net.stem(x))
    conv1, conv2, last = trace.layers.values()
    assert list(trace.layers) == ["conv_caps1", "conv_caps2", "class_caps"]
    assert torch.equal(conv1.children.poses, net.primary_caps(trace.features).poses)
    assert conv2.children is conv1.parents
    assert last.children is conv2.parents
    assert last.parents is trace.output


def test_a_posterior_without_positions_has_the_same_entropies_divergences_and_bound():
    """The methods with the axis l and without; the prior of one type is not that of another."""
    prior = Prior(alpha0=torch.tensor([0.5, 1.0, 2.0]), m0=torch.randn(3, 16), Psi0=torch.rand(3, 16) + 0.5)
    layer = ClassCaps(2, 3, routing_options=dict(prior=prior)).eval()
    caps = Capsules(torch.rand(4, 3, 2, 2), torch.randn(4, 3, 2, 2, 4, 4))
    trace = layer.trace(caps)
    _, q = layer.routing(trace.activations[:, None], trace.votes[:, None], trace.fields.child)
    flat = trace.iterations[-1]
    for found, expected in zip((*flat.entropy(), *flat.kl()), (*q.entropy(), *q.kl()), strict=True):
        torch.testing.assert_close(found, expected[:, 0])
    torch.testing.assert_close(flat.variance(), q.variance()[:, 0])
    bounds = flat.elbo(trace.activations, trace.votes), q.elbo(trace.activations[:, None], trace.votes[:, None])
    for found, expected in zip(*bounds, strict=True):
        assert found.shape == (4,)
        torch.testing.assert_close(found, expected)
    torch.manual_seed(1)
    found = flat.sample()
    torch.manual_seed(1)
    for x, y in zip(found, q.sample(), strict=True):
        assert torch.equal(x, y[:, 0])


def traced(case, **options):
    """A network, and how it routes one image."""
    net = CapsNet((6, 3, 2, 4), 1, 3, (20, 24), **CASES[case], **options).eval()
    with torch.no_grad():
        return net, net.trace(torch.randn(1, 1, 20, 24))


def shares_by_loop(trace, layer, position, type, iteration=-1):
    """The share of each primary capsule in a parent: child by child, layer by layer."""
    one, names = trace.layers[layer], list(trace.layers)
    r = one.iterations[iteration].r[0].reshape(*one.fields.child.shape, -1).double()
    a = one.activations[0].reshape(one.fields.child.shape).double()
    types = one.children.activations.shape[-1]
    R = [float(a[position, i] * r[position, i, type]) for i in range(a.shape[1])]
    total = np.zeros(trace.layers["conv_caps1"].children.activations.numel())
    for i, weight in enumerate(R):
        c = int(one.fields.child[position, i])
        if layer == "conv_caps1":
            total[c] += weight / sum(R)
        else:
            below = names[names.index(layer) - 1]
            total += weight / sum(R) * shares_by_loop(trace, below, c // types, c % types)
    return total


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("layer", "position", "type"), [("conv_caps1", 5, 1), ("conv_caps2", 1, 3), ("class_caps", 0, 2)]
)
def test_parts_follow_the_responsibilities_down_to_the_primary_capsules(case, layer, position, type):
    _, trace = traced(case)
    for t in range(len(trace.layers[layer].iterations)):
        parts = parts_of(trace, layer, position, type, t)
        y, x, types = trace.layers["conv_caps1"].children.activations.shape[1:]
        expected = shares_by_loop(trace, layer, position, type, t).reshape(y, x, types).sum(2)
        np.testing.assert_allclose(parts, expected, rtol=1e-4, atol=1e-7)
        assert float(parts.sum()) == pytest.approx(1, abs=1e-5)
    assert torch.equal(parts_of(trace, layer, position, type), parts)  # the last iteration


def test_before_routing_all_classes_hold_the_same_and_after_it_not():
    _, trace = traced("vb")
    first, last = (torch.stack([parts_of(trace, "class_caps", 0, j, t) for j in range(3)]) for t in (0, -1))
    torch.testing.assert_close(first, first[:1].expand_as(first))
    assert not torch.allclose(last[0], last[1], atol=1e-7)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(("layer", "position", "type"), [("conv_caps2", 1, 1), ("class_caps", 0, 1)])
def test_a_cloud_is_the_votes_in_the_plane_of_a_singular_value_decomposition(case, layer, position, type):
    _, trace = traced(case)
    one, cloud = trace.layers[layer], cloud_of(trace, layer, position, type)
    L, I = one.fields.child.shape

    def of_parent(x, axes):  # the posterior's n l j or n j, and further axes
        return x[0].reshape(L, -1, *x.shape[x.ndim - axes :])[position, type].double().numpy()

    V = one.votes[0].reshape(L, I, -1, 16)[position, :, type].double().numpy()
    a = one.activations[0].reshape(L, I)[position].double().numpy()
    weight = np.stack([a * q.r[0].reshape(L, I, -1)[position, :, type].double().numpy() for q in one.iterations])
    np.testing.assert_allclose(cloud.weight, weight, rtol=1e-6)
    share = weight[-1] / weight[-1].sum() + 1e-9  # which decides where one vote has all the weight
    share = share / share.sum()
    centre = share @ V
    _, s, axes = np.linalg.svd(np.sqrt(share)[:, None] * (V - centre), full_matrices=False)
    plane = axes[:2].T
    plane = plane * np.sign(plane[np.abs(plane).argmax(0), [0, 1]])
    near = dict(rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(cloud.votes, (V - centre) @ plane, **near)
    np.testing.assert_allclose(cloud.explained, (s**2 / (s**2).sum())[:2], **near)
    for t, q in enumerate(one.iterations):
        np.testing.assert_allclose(cloud.mean[t], (of_parent(q.m, 1) - centre) @ plane, **near)
        if isinstance(q, Posterior):
            precision = of_parent(q.nu, 0) * (of_parent(q.psi, 2) if q.full else np.diag(of_parent(q.psi, 1)))
            expected = plane.T @ np.linalg.inv(precision) @ plane
            np.testing.assert_allclose(cloud.spread[t], expected, **near)
            np.testing.assert_allclose(cloud.spread_of_mean[t], expected / of_parent(q.kappa, 0), **near)
        elif isinstance(q, Mixture):
            np.testing.assert_allclose(cloud.spread[t], plane.T @ np.diag(of_parent(q.var, 1)) @ plane, **near)
    assert (cloud.spread is None) == (case == "dynamic")
    assert (cloud.spread_of_mean is None) == (case in ("dynamic", "em"))


def seen_from(x, value):
    """The box of pixels on which a tensor depends, by its gradient with a random direction."""
    (gradient,) = torch.autograd.grad((value * torch.randn_like(value)).sum(), x, retain_graph=True)
    ys, xs = (gradient.abs().sum((0, 1)) > 0).nonzero(as_tuple=True)
    return Box(int(ys.min()), int(xs.min()), int(ys.max()) + 1, int(xs.max()) + 1)


@pytest.mark.parametrize("stem", ["conv", "residual"])
@pytest.mark.parametrize("size", [20, 28, 33, (32, 40)])
def test_the_receptive_field_is_where_the_votes_have_a_gradient(stem, size):
    # One iteration: with more, the poses of a layer depend on further pixels through the competition for children.
    net = CapsNet((12, 2, 2, 2), 1, 3, size, stem=stem, routing_options=dict(iters=1)).double().eval()
    x = torch.randn(4, 1, *net.image_size, dtype=torch.float64, requires_grad=True)  # some units are off in one image
    trace = net.trace(x)
    for layer in LAYERS[:2]:
        votes = trace.layers[layer].votes
        L = votes.shape[1]
        for position in sorted({0, min(1, L - 1), L // 2, L - 1}):
            assert receptive_field(net, layer, position) == seen_from(x, votes[:, position])
    assert receptive_field(net, "class_caps", 0) == (0, 0, *net.image_size)


@pytest.mark.parametrize("stem", ["conv", "residual"])
@pytest.mark.parametrize("size", [20, (32, 40)])
def test_each_cell_of_the_map_of_parts_lies_in_the_middle_of_what_its_capsule_sees(stem, size):
    net = CapsNet((12, 2, 2, 2), 1, 3, size, stem=stem).double().eval()
    x = torch.randn(4, 1, *net.image_size, dtype=torch.float64, requires_grad=True)
    poses = net.primary_caps(net.stem(x)).poses
    rows, columns = poses.shape[1:3]
    top, left, bottom, right = frame_of_parts(net)
    height, width = (bottom - top) / rows, (right - left) / columns
    row, column = rows // 2, columns // 2 - 1  # in the residual stem, at 20x20, the only ones that see no edge
    box = seen_from(x, poses[:, row, column])
    if min(box[:2]) > 0 and box.bottom < net.image_size[0] and box.right < net.image_size[1]:
        assert (box.top + box.bottom) / 2 == top + height * (row + 0.5)
        assert (box.left + box.right) / 2 == left + width * (column + 0.5)
    assert (height, width) == (2, 2)


def test_what_is_not_in_a_trace_is_an_error_that_says_what_is():
    net, trace = traced("vb")
    for read in (parts_of, cloud_of):
        with pytest.raises(ValueError, match=r"layer must be one of \('conv_caps1', 'conv_caps2', 'class_caps'\)"):
            read(trace, "stem", 0, 0)
        with pytest.raises(ValueError, match="position must lie from 0 to 0 in class_caps, got 1"):
            read(trace, "class_caps", 1, 0)
        with pytest.raises(ValueError, match="type must lie from 0 to 2 in class_caps, got 3"):
            read(trace, "class_caps", 0, 3)
        with pytest.raises(ValueError, match="type must lie from 0 to 1 in conv_caps1, got -1"):
            read(trace, "conv_caps1", 0, -1)
        with pytest.raises(ValueError, match="must be of one image, got 2: trace images one by one"):
            read(net.trace(torch.randn(2, 1, 20, 24)), "class_caps", 0, 0)
    with pytest.raises(ValueError, match="layer must be one of"):
        receptive_field(net, "stem", 0)
    with pytest.raises(ValueError, match="position must lie from 0 to 11 in conv_caps1, got 12"):
        receptive_field(net, "conv_caps1", 12)

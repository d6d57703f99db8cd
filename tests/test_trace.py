"""What layers and networks say of how they routed: every iteration, equal to what ``forward`` gives."""

import itertools

import literal
import pytest
import torch
from torch.utils._pytree import tree_leaves

from vbcaps import CapsNet, Capsules, ClassCaps, ConvCaps, Prior
from vbcaps.kernels.cpu.build import find_compiler
from vbcaps.routing.fields import conv_fields

CASES = {
    "vb": dict(routing="vb"),
    "vb wishart": dict(routing="vb", routing_options=dict(prior=Prior(precision="wishart"), activation="paper")),
    "vb full": dict(routing="vb", routing_options=dict(prior=Prior(precision="full"), iters=2)),
    "em": dict(routing="em", routing_options=dict(temperature=1.0)),
    "dynamic": dict(routing="dynamic", routing_options=dict(iters=4)),
}


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    """One thread, and Triton's interpreter (conftest.py) out of the way."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
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

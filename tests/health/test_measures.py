"""Each measure of `health` against a literal loop, another library, or the trace of the readable reference."""

import itertools
import math

import numpy as np
import planted
import pytest
import torch
import torch.nn.functional as F
from sklearn.linear_model import Ridge
from sklearn.metrics import r2_score

from vbcaps import Capsules, ConvCaps
from vbcaps.heads import CapsHead
from vbcaps.health.assignments import Assignments, correlations, map_of_votes, parts_of_classes
from vbcaps.health.measure import most
from vbcaps.health.network import normed_anew, route_once, stack_of, with_iterations
from vbcaps.health.poses import MOVES, moved, moving, others, readout
from vbcaps.health.starved import Range, largest_gradients, untaught
from vbcaps.kernels import route
from vbcaps.routing.fields import conv_fields
from vbcaps.routing.votes import at_right_hand_column
from vbcaps.trace import parts_of


@pytest.fixture(autouse=True)
def _alone():
    """One thread."""
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def literal_assignments(a, r, child, types):
    """Return sharpness, information and its share of every child by loops, weighted by activation."""
    n, rows = len(a), []
    for c in range(a.shape[1]):
        slots = [(l, i) for l, i in itertools.product(*map(range, child.shape)) if child[l, i] == c]
        if len(slots) * types < 2:
            continue
        ps = []
        for image in range(n):
            p = np.array([r[image, l, i, j] for l, i in slots for j in range(types)])
            ps.append(p / p.sum())
        weight = a[:, c] / a[:, c].sum()
        entropies = [-sum(q * math.log(q) for q in p if q > 0) for p in ps]
        mean = sum(w * p for w, p in zip(weight, ps, strict=True))
        of_mean = -sum(q * math.log(q) for q in mean if q > 0)
        entropy, most_of = float(weight @ entropies), math.log(len(slots) * types)
        rows.append((a[:, c].sum(), 1 - entropy / most_of, of_mean - entropy, (of_mean - entropy) / most_of))
    rows = np.array(rows)
    return (rows[:, :1] * rows[:, 1:]).sum(0) / rows[:, 0].sum()


@pytest.mark.parametrize("stride", [1, 2])
def test_assignments_are_those_of_a_loop(stride):
    fields = conv_fields(4, 5, 2, (2, 3), (stride, stride), torch.device("cpu"))
    types = 3
    a = torch.rand(6, 4 * 5 * 2)
    r = torch.rand(6, *fields.child.shape, types) ** 3
    r[:, 0, 1, 2] = 0  # a slot that nothing takes
    sums = Assignments(fields, types)
    for part in (slice(0, 4), slice(4, 6)):
        sums.add(a[part], r[part])
    want = literal_assignments(a.double().numpy(), r.double().numpy(), fields.child.numpy(), types)
    np.testing.assert_allclose(sums.found(), want, rtol=1e-5)


def test_one_parent_that_takes_all_is_sharp_and_tells_of_the_image_only_if_it_changes():
    fields = conv_fields(1, 1, 3, (1, 1), (1, 1), torch.device("cpu"))
    a = torch.ones(2, 3)
    same = F.one_hot(torch.tensor([0, 1, 0]), 2).float().expand(2, 1, 3, 2)
    other = F.one_hot(torch.tensor([[0, 1, 0], [1, 0, 1]]), 2).float()[:, None]
    found = []
    for r in (same, other, torch.full_like(other, 0.5)):
        sums = Assignments(fields, 2)
        sums.add(a, r)
        found.append(sums.found())
    assert found[0] == pytest.approx((1, 0, 0), abs=1e-6)
    assert found[1] == pytest.approx((1, math.log(2), 1), abs=1e-6)
    assert found[2] == pytest.approx((0, 0, 0), abs=1e-6)


def test_children_without_a_choice_or_a_vote_say_nothing():
    fields = conv_fields(1, 2, 1, (1, 1), (1, 1), torch.device("cpu"))
    only = Assignments(fields, 1)
    only.add(torch.ones(3, 2), torch.ones(3, 2, 1, 1))
    assert only.found() is None
    off = Assignments(fields, 2)
    off.add(torch.zeros(3, 2), torch.full((3, 2, 1, 2), 0.5))
    assert off.found() is None


def test_padding_says_nothing():
    caps = Capsules(torch.rand(3, 4, 4, 2), torch.randn(3, 4, 4, 2, 4, 4))
    layer = ConvCaps(2, 3, 3, 1, 1, backend="reference").eval()
    with torch.no_grad():
        one = route_once(layer, caps)
    sums = Assignments(one.children.fields, 3)
    sums.add(one.children.a, one.r)
    want = literal_assignments(
        one.children.a.double().numpy()[:, inside := one.children.a.sum(0).numpy() > 0],
        one.r.double().numpy(),
        renumbered(one.children.fields.child.numpy(), inside),
        3,
    )
    np.testing.assert_allclose(sums.found(), want, rtol=1e-4)


def renumbered(child, kept):
    """Number the kept children from 0, and the others -1."""
    return np.where(kept, kept.cumsum() - 1, -1)[child]


@pytest.mark.parametrize("routing", ["vb", "em", "dynamic"])
def test_maps_and_parts_are_those_of_the_trace(routing):
    net, x = planted.network(routing=routing, gain=4.0), planted.images(3)
    with torch.no_grad():
        _, routed = stack_of(net).routed(x)
        of = torch.tensor([2, 0, 3])
        votes, parts = map_of_votes(routed[-1], of), parts_of_classes(routed, of)
        for n, j in enumerate(of.tolist()):
            trace = net.trace(x[n : n + 1])
            torch.testing.assert_close(parts[n], parts_of(trace, "class_caps", 0, j).flatten(), atol=1e-4, rtol=1e-3)
            top = trace.layers["class_caps"]
            weight = top.activations[0] * top.iterations[-1].r[0, :, j]
            want = weight.unflatten(0, top.children.activations.shape[1:]).sum(2).flatten()
            torch.testing.assert_close(votes[n], want, atol=1e-4, rtol=1e-3)


def test_parts_through_padding_are_those_of_the_trace():
    head, x = CapsHead(5, 3, caps=(3, 4, 2), backend="reference").eval(), torch.randn(1, 5, 6, 7)
    with torch.no_grad():
        _, routed = stack_of(head).routed(x)
        parts = parts_of_classes(routed, torch.tensor([1]))
        want = parts_of(head.trace(x), "class_caps", 0, 1)
    assert parts.shape == (1, 42)
    torch.testing.assert_close(parts[0], want.flatten())


def test_correlations_are_numpys():
    x, y = torch.rand(4, 9), torch.rand(4, 9)
    y[1] = 2 * x[1] + 1
    y[2] = 0.5
    got = correlations(x, y)
    want = [np.corrcoef(p, q)[0, 1] for p, q in zip(x[[0, 1, 3]].numpy(), y[[0, 1, 3]].numpy(), strict=True)]
    np.testing.assert_allclose(got[[0, 1, 3]], want, rtol=1e-5)
    assert got[2].isnan()


def test_most_is_above_all_others_and_a_tie_is_not():
    score = torch.tensor([[3.0, 1, 2], [3, 3, 1], [3, 3 - 1e-6, 1], [1, 3, 2], [-1, -3, -2]])
    assert most(score, torch.zeros(5, 1, dtype=torch.int64)).tolist() == [True, False, False, False, True]
    assert most(score, torch.tensor([[0, 2]]).expand(5, 2)).tolist() == [True, False, False, False, True]


def test_moving_counts_entries_of_one_answer():
    answers = torch.tensor([0] * 8 + [1] * 4 + [2] * 3)
    poses = torch.zeros(15, 16)
    poses[:8, 3] = torch.linspace(0, 1, 8)  # an entry with a coordinate
    poses[:8, 5] = torch.linspace(0, 0.1, 8)  # its standard deviation is .033
    poses[:8, 6] = torch.linspace(0, 0.2, 8)  # and here .065
    poses[8:12, :2] = torch.linspace(0, 1, 4)[:, None]
    poses[8:12, 7] = torch.linspace(0, 1, 4)  # the other entry with a coordinate
    poses += answers[:, None]  # what only tells classes apart does not count
    poses[12:] = torch.randn(3, 16)  # too few images
    all_of, without = moving(poses, answers)
    assert all_of == pytest.approx((8 * 2 + 4 * 3) / 12)
    assert without == pytest.approx((8 * 1 + 4 * 2) / 12)
    assert others(16) == [d for d in range(16) if d not in (3, 7)]
    assert moving(poses[12:], answers[12:]) is None


def test_coordinates_are_added_to_the_entries_that_others_leaves_out():
    for p in (2, 4):
        added = at_right_hand_column(torch.ones(1, 2), p)[0].nonzero().flatten().tolist()
        assert sorted([*added, *others(p * p)]) == list(range(p * p))


def test_moved_shifts_and_turns():
    x = torch.zeros(2, 1, 6, 8)
    x[:, 0, 2, 3] = 1
    x[:, 0, 3, 3] = 2
    none = torch.zeros(2, 2), torch.zeros(2)
    torch.testing.assert_close(moved(x, *none), x)
    shifted = moved(x, torch.tensor([[2.0, 1.0], [-1.0, -2.0]]), none[1])
    torch.testing.assert_close(shifted[0], x[0].roll((1, 2), (1, 2)))
    torch.testing.assert_close(shifted[1], x[1].roll((-2, -1), (1, 2)))
    square = torch.rand(1, 3, 7, 7)
    torch.testing.assert_close(moved(square, none[0][:1], torch.tensor([90.0])), square.rot90(1, (2, 3)))
    wide = torch.zeros(1, 1, 9, 15)
    wide[0, 0, 4, 10] = 1  # three pixels to the right of the middle
    torch.testing.assert_close(moved(wide, none[0][:1], torch.tensor([90.0]))[0, 0, 1, 7], torch.tensor(1.0))
    edge = torch.arange(4.0).expand(1, 1, 4, 4)
    assert moved(edge, torch.tensor([[2.0, 0.0]]), torch.zeros(1))[0, 0, 0].tolist() == [0, 0, 0, 1]


def test_readout_is_ridge_regression_for_each_class():
    n, k, d = 60, 4, 6
    answers, first = torch.arange(n) % 3, torch.arange(n) // 3 % 2 == 0
    moves = torch.rand(n, k, 2) - 0.5
    poses = torch.randn(n, k, d) * 0.3
    poses[..., :2] += moves * (1 + answers[:, None, None])
    missed, spread = np.zeros(2), np.zeros(2)
    for j in range(3):
        fit, test = (answers == j) & first, (answers == j) & ~first
        X, Y = poses[fit].flatten(0, 1).double().numpy(), moves[fit].flatten(0, 1).double().numpy()
        ridge = Ridge(alpha=len(X) * MOVES**2).fit(X, Y)
        X, Y = poses[test].flatten(0, 1).double().numpy(), moves[test].flatten(0, 1).double().numpy()
        missed += ((Y - ridge.predict(X)) ** 2).sum(0)
        spread += ((Y - Y.mean(0)) ** 2).sum(0)
    assert readout(poses, moves, answers, first) == pytest.approx((1 - missed / spread).mean(), rel=1e-6)
    one = answers == 0
    found = readout(poses[one], moves[one], answers[one], first[one])
    X, Y = poses[one & first].flatten(0, 1).double().numpy(), moves[one & first].flatten(0, 1).double().numpy()
    ridge = Ridge(alpha=len(X) * MOVES**2).fit(X, Y)
    X, Y = poses[one & ~first].flatten(0, 1).double().numpy(), moves[one & ~first].flatten(0, 1).double().numpy()
    assert found == pytest.approx(r2_score(Y, ridge.predict(X)), rel=1e-6)
    assert readout(poses[:6], moves[:6], answers[:6], first[:6]) is None


def test_a_pose_that_is_the_move_is_read_and_a_pose_that_hardly_moves_is_not():
    answers, first = torch.zeros(80, dtype=torch.int64), torch.arange(80) % 2 == 0
    half = 2 * torch.rand(80, 2, 1) - 1
    moves = torch.cat([half, -half], 1)
    assert readout(moves, moves, answers, first) > 0.99
    assert readout(moves / 1000, moves, answers, first) < 0.01


@pytest.mark.parametrize("routing", ["vb", "em"])
def test_largest_gradients_are_those_by_the_logits(routing):
    net = planted.network(routing=routing, backend="reference", routing_options=dict(iters=2)).double()
    x, labels = planted.images(3).double(), torch.tensor([0, 2, 1])
    pairs = torch.tensor([[0, 1], [2, 0], [1, 3]])
    stack = stack_of(net)
    with torch.no_grad():
        got, of_pairs = (largest_gradients(stack, x, one) for one in (labels[:, None], pairs))
        caps = stack.begin(x)
    for depth in range(4):  # the derivative by the logits of one layer
        layers = list(stack.layers.values())
        with torch.no_grad():
            caps = stack.begin(x)
            for layer in layers[:depth]:
                caps = layer(caps)
        logit = caps.logits.clone().requires_grad_()
        above = caps._replace(activations=logit.sigmoid())
        for layer in layers[depth:]:
            above = layer(above)
        scores = logit if depth == 3 else above.logits
        there = F.one_hot(pairs, 4).sum(1).double()
        losses = (
            F.cross_entropy(scores, labels, reduction="sum"),
            F.binary_cross_entropy_with_logits(scores, there, reduction="sum"),
        )
        for loss, found in zip(losses, (got, of_pairs), strict=True):
            (gradient,) = torch.autograd.grad(loss, logit, retain_graph=True)
            torch.testing.assert_close(found[depth], gradient.abs().flatten(0, -2).amax(0))


def test_untaught_types_have_a_hundredth_of_the_largest_gradient():
    assert untaught(torch.tensor([1.0, 0.011, 0.009, 0.0])) == 2
    assert untaught(torch.zeros(3)) == 3


def test_starved_types_by_their_range():
    a = torch.tensor([[[0.04, 0.96, 0.3], [0.01, 0.97, 0.99]], [[0.02, 0.99, 0.01], [0.049, 0.951, 0.5]]])
    parts = [Range.of(Capsules(part, part)) for part in a[:, None]]
    assert parts[0].joined(parts[1]).starved() == (1, 1)
    assert parts[0].starved() == (1, 1)


def test_statistics_taken_anew_are_those_of_the_images():
    net, x = planted.network(gain=4.0), planted.images()
    stack, norm = stack_of(net), net.conv_caps1.norm_a
    before = {name: b.clone() for name, b in net.named_buffers()}
    with torch.no_grad(), with_iterations(stack, 1), normed_anew(stack, x):
        assert net.conv_caps2.routing.iters == 1
        logits = norm_input(net.conv_caps1, stack.begin(x))
        torch.testing.assert_close(norm.running_mean, logits.flatten(0, 1).mean(0))
        torch.testing.assert_close(norm.running_var, logits.flatten(0, 1).var(0))
        assert torch.equal(net.primary_caps.norm_a.running_mean, before["primary_caps.norm_a.running_mean"])
        out = stack(x)
        assert out.poses.mean((0, 2, 3)).abs().max() < 1e-4
        torch.testing.assert_close(
            out.poses.var((0, 2, 3), correction=0), torch.ones(4), atol=0.01, rtol=0
        )  # eps of BatchNorm
    after = dict(net.named_buffers())
    assert all(torch.equal(b, after[name]) for name, b in before.items())
    assert net.conv_caps2.routing.iters == 3
    net.train()
    with torch.no_grad(), normed_anew(stack, x):
        assert not norm.training
    assert all(module.training for module in net.modules())


def norm_input(layer, caps):
    """Return the logits of routing before BatchNorm, ``n l j``."""
    a, pose, W, fields, where, _ = layer.children_of(caps)
    return route(layer.routing, a, pose, W, fields, where)[0]

"""Receptive fields, the competition for a child, and what the three routings refuse."""

import itertools

import literal
import pytest
import torch

from vbcaps import Prior
from vbcaps.routing import dynamic_routing, em_routing, vb_routing
from vbcaps.routing.fields import check_routing_inputs, conv_fields, softmax_over_parents

CPU = torch.device("cpu")


def vb(a, V, child, **options):
    return vb_routing(a, V, child, Prior(dim=V.shape[-1] if V.ndim else 1), **options)


ROUTINGS = pytest.mark.parametrize("routing", [vb, em_routing, dynamic_routing], ids=["vb", "em", "dynamic"])


@pytest.mark.parametrize(
    ("size", "kernel", "stride"),
    [((7, 6), (k, k), (s, s)) for k, s in itertools.product(range(1, 6), range(1, 4))]
    + [((5, 9), (1, 3), (2, 1)), ((9, 5), (4, 2), (1, 3)), ((3, 8), (3, 5), (1, 2)), ((1, 4), (1, 4), (3, 3))],
)
@pytest.mark.parametrize("types", [1, 3])
def test_conv_fields_equals_a_loop_over_fields(size, kernel, stride, types):
    fields = []
    for top in range(0, size[0], stride[0]):
        for left in range(0, size[1], stride[1]):
            if top + kernel[0] > size[0] or left + kernel[1] > size[1]:
                continue
            field = []
            for y in range(top, top + kernel[0]):
                for x in range(left, left + kernel[1]):
                    for c in range(types):
                        field.append((y * size[1] + x) * types + c)
            fields.append(field)
    child, parents, seen, _ = conv_fields(*size, types, kernel, stride, CPU)
    assert child.dtype == torch.int64
    assert child.tolist() == fields
    slots = [[] for _ in range(size[0] * size[1] * types)]
    for slot, c in enumerate(itertools.chain(*fields)):
        slots[c].append(slot)
    assert seen.tolist() == [len(s) for s in slots]
    assert [sorted(row[:k]) for row, k in zip(parents.tolist(), seen.tolist(), strict=True)] == slots
    assert all(slot == -1 for row, k in zip(parents.tolist(), seen.tolist(), strict=True) for slot in row[k:])


def random_scores(seed, dtype=torch.float64, scale=1.0, **options):
    _, V, child = literal.random_problem(seed, dim=1, dtype=dtype, scale=scale, **options)
    return V[..., 0], child, int(child.max()) + 1


def per_child(child, children, values):
    """Sum of ``n l i`` over the slots that hold each child: ``n children``."""
    total = values.new_zeros(len(values), children)
    return total.index_add(1, child.flatten(), values.flatten(1))


@pytest.mark.parametrize("stride", [(1, 1), (2, 2), (1, 3)])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_softmax_over_parents_equals_a_loop(stride, scale):
    ln_p, child, children = random_scores(0, size=(5, 6), types=2, stride=stride, scale=scale)
    r = softmax_over_parents(ln_p, child, children)
    expected = literal.normalise_over_parents(ln_p.numpy(), child.numpy())
    torch.testing.assert_close(r, torch.from_numpy(expected), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1.0, 1e4, 1e30])
def test_responsibilities_of_a_child_sum_to_one_over_all_its_parents(dtype, scale):
    ln_p, child, children = random_scores(1, dtype, scale, size=(6, 6), types=2)
    total = per_child(child, children, softmax_over_parents(ln_p, child, children).sum(-1))
    seen = torch.zeros(children, dtype=torch.bool).index_fill(0, child.flatten(), True)
    assert not seen.all()
    torch.testing.assert_close(total, seen.to(dtype).expand_as(total))


@pytest.mark.parametrize("shift", [1e4, -1e4, 1e8, -1e8])
def test_softmax_over_parents_ignores_a_shift_per_child(shift):
    ln_p, child, children = random_scores(2)
    r = softmax_over_parents(ln_p, child, children)
    shifts = shift * torch.linspace(0.5, 1.0, children, dtype=ln_p.dtype)[child][..., None]
    rtol = 8 * torch.finfo(ln_p.dtype).eps * abs(shift)
    torch.testing.assert_close(softmax_over_parents(ln_p + shifts, child, children), r, rtol=rtol, atol=0)


def test_a_child_seen_by_nine_fields_is_shared_among_them():
    child = conv_fields(5, 5, 1, (3, 3), (1, 1), CPU).child
    r = softmax_over_parents(torch.zeros(1, *child.shape, 4), child, 25)
    assert r[0][child == 12].unique().tolist() == pytest.approx([1 / 36])
    assert r[0][child == 0].unique().tolist() == pytest.approx([1 / 4])


def test_softmax_over_parents_gradcheck():
    ln_p, child, children = random_scores(3, size=(4, 3), parents=2)
    assert torch.autograd.gradcheck(lambda x: softmax_over_parents(x, child, children), ln_p.requires_grad_())


def test_children_are_counted_where_not_given():
    a, V, child = literal.random_problem(0)
    assert check_routing_inputs(a, V, child, None, 3) == child.max() + 1
    assert check_routing_inputs(a, V, child, 99, 3) == 99


@ROUTINGS
def test_giving_the_number_of_children_changes_nothing(routing):
    a, V, child = literal.random_problem(4)
    for x, y in zip(routing(a, V, child)[1], routing(a, V, child, children=int(child.max()) + 7)[1], strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


@ROUTINGS
def test_a_child_that_is_off_has_no_say(routing):
    a, V, child = literal.random_problem(5)
    off = child == child[0, 0]
    logits, means = [], []
    for votes in (V, torch.where(off[..., None, None], V + 100, V)):
        logit, q = routing(a.masked_fill(off, 0.0), votes, child)
        logits.append(logit)
        means.append(q.m)
    torch.testing.assert_close(*logits)
    torch.testing.assert_close(*means)


@ROUTINGS
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(V=torch.rand(2, 4, 9, 3)), ValueError, "V must have shape"),
        (dict(V=torch.rand(2, 4, 9, 0, 5)), ValueError, "V must have shape"),
        (dict(a=torch.rand(2, 4, 8)), ValueError, r"a must have shape \(n, l, i\) = \(2, 4, 9\).*got \(2, 4, 8\)"),
        (dict(a=torch.rand(4, 9)), ValueError, "a must have shape"),
        (dict(child=torch.zeros(4, 8, dtype=torch.int64)), ValueError, "child must have shape"),
        (dict(child=torch.zeros(4, 9)), TypeError, "child must be a tensor of int64"),
        (dict(child=torch.zeros(4, 9, dtype=torch.int32)), TypeError, "child must be a tensor of int64"),
        (dict(child=torch.full((4, 9), -1)), ValueError, "child must number the lower capsules from 0, got -1"),
        (dict(a=torch.ones(2, 4, 9, dtype=torch.int64)), TypeError, "a and V must be floating point"),
        (dict(a=torch.rand(2, 4, 9).double()), TypeError, "a and V must be floating point of one dtype"),
        (dict(iters=0), ValueError, "iters must be a whole number of at least 1, got 0"),
        (dict(iters=-1), ValueError, "iters"),
        (dict(iters=1.5), ValueError, "iters"),
        (dict(iters=True), ValueError, "iters"),
    ],
)
def test_wrong_inputs_raise_an_error_that_names_the_argument(routing, change, error, message):
    good = dict(a=torch.rand(2, 4, 9), V=torch.rand(2, 4, 9, 3, 5), child=torch.arange(36).view(4, 9))
    routing(**good)
    with pytest.raises(error, match=message):
        routing(**(good | change))

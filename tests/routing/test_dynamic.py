"""Dynamic routing: the printed procedure, its logit, gradients and extremes."""

import literal
import numpy as np
import pytest
import torch

from vbcaps.routing import DynamicRouting, dynamic_routing

F64 = torch.float64


@pytest.mark.parametrize(("size", "stride"), [((4, 4), (1, 1)), ((5, 5), (2, 2)), ((4, 7), (1, 2))])
@pytest.mark.parametrize("iters", [1, 2, 3, 5])
def test_routing_equals_a_literal_procedure(size, stride, iters):
    a, V, child = literal.random_problem(iters, size=size, stride=stride)
    assert len(child.unique()) < child.numel()
    logit, q = dynamic_routing(a, V, child, iters=iters)
    expected = literal.dynamic_routing(a.numpy(), V.numpy(), child.numpy(), iters=iters)
    np.testing.assert_allclose(q.m, expected.m, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(q.r, expected.r, rtol=1e-10)
    np.testing.assert_allclose(logit.sigmoid(), expected.length, rtol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("scale", [1e-4, 1.0, 1e3])
def test_sigmoid_of_the_logit_is_the_length_of_the_pose(dtype, scale):
    a, V, child = literal.random_problem(0, dtype=dtype, scale=scale)
    logit, q = dynamic_routing(a, V, child)
    length = torch.linalg.vector_norm(q.m, dim=-1)
    rtol = 1e-4 if dtype == torch.float32 else 1e-12
    torch.testing.assert_close(logit.sigmoid(), length, rtol=rtol, atol=1e-18)
    assert (length < 1 + torch.finfo(dtype).eps).all()


@pytest.mark.parametrize("iters", [1, 3])
def test_gradcheck(iters):
    a, V, child = literal.random_problem(2, size=(3, 4), parents=2, dim=2, batch=1)

    def route(a, V):
        logit, q = dynamic_routing(a, V, child, iters=iters)
        return logit, *(q if iters > 1 else q[:1])

    assert torch.autograd.gradcheck(route, (literal.leaf(a), literal.leaf(V)))


@pytest.mark.parametrize("dim", [1, 4, 16])
@pytest.mark.parametrize("case", literal.extreme_inputs())
def test_extreme_inputs_give_finite_outputs_and_gradients(case, dim):
    a, V, child = literal.extreme_inputs(dim=dim)[case]
    a, V = literal.leaf(a), literal.leaf(V)
    logit, q = dynamic_routing(a, V, child)
    literal.assert_finite_with_gradients((logit, *q), [a, V])
    assert (logit[a.sum(2) == 0] < -40).all()


def test_module_is_the_function_and_has_nothing_to_learn():
    a, V, child = literal.random_problem(3)
    module = DynamicRouting(3, 4, iters=2)
    assert not list(module.parameters())
    (logit, q), (expected, p) = module(a, V, child), dynamic_routing(a, V, child, iters=2)
    for x, y in zip((logit, *q), (expected, *p), strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)
    with pytest.raises(ValueError, match="iters"):
        DynamicRouting(3, 4, iters=0)

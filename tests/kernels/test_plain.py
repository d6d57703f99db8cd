"""The passes in plain PyTorch against the readable reference: the order of passes, in float64."""

import pytest
import torch
from kernels.harness import ROUTINGS, make_routing, problem, routed_here

F64 = torch.float64


@pytest.mark.parametrize("whole", [False, True], ids=["conv", "class"])
@pytest.mark.parametrize("iters", [1, 2, 4])
@pytest.mark.parametrize("case", ROUTINGS)
def test_outputs_and_gradients_are_those_of_the_reference(case, iters, whole):
    p = problem(make_routing(case, 3, iters), size=(4, 5), stride=(1, 2), batch=3, whole=whole)
    plain, reference = (routed_here(p, backend, F64) for backend in ("plain", "reference"))
    assert plain.keys() == reference.keys()
    for name, x in reference.items():
        torch.testing.assert_close(plain[name], x, rtol=1e-9, atol=1e-11, msg=lambda m, at=name: f"{at}: {m}")


@pytest.mark.parametrize("iters", [1, 3])
def test_gradients_through_the_last_iteration_are_those_of_the_reference(iters):
    routing = make_routing("vb-gamma-paper-typed", 3, iters)
    routing.through = "last"
    plain, reference = (routed_here(problem(routing), backend, F64) for backend in ("plain", "reference"))
    for name, x in reference.items():
        torch.testing.assert_close(plain[name], x, rtol=1e-9, atol=1e-11, msg=lambda m, at=name: f"{at}: {m}")

"""Derivatives that kernels have not: the reference takes them over where it may, and where not an error says so."""

import pytest
import torch

from vbcaps import Capsules, ConvCaps
from vbcaps.kernels.cpu import build

pytestmark = pytest.mark.skipif(build.find_compiler() is None, reason="needs a C++ compiler")


@pytest.fixture(params=["vb", "em", "dynamic"])
def layers(request):
    """The same weights as they come, and by the reference; and an input."""
    torch.manual_seed(0)
    fast, reference = (ConvCaps(2, 3, routing=request.param, backend=name).eval() for name in ("auto", "reference"))
    reference.load_state_dict(fast.state_dict())
    return fast, reference, torch.rand(2, 4, 4, 2), torch.randn(2, 4, 4, 2, 4, 4)


def test_derivatives_of_torch_func_and_forward_mode_are_the_references(layers):
    *both, a, pose = layers
    tangent = torch.randn_like(pose)

    def forward_mode(f):
        with torch.autograd.forward_ad.dual_level():
            out = f(torch.autograd.forward_ad.make_dual(pose, tangent))
            return torch.autograd.forward_ad.unpack_dual(out).tangent

    ways = dict(
        jvp=lambda f: torch.func.jvp(f, (pose,), (tangent,))[1],
        forward_mode=forward_mode,
        grad=lambda f: torch.func.grad(lambda x: f(x).square().sum())(pose),
        vmap=lambda f: torch.func.vmap(lambda x: f(torch.stack([x, x])))(pose),
        hessian=lambda f: torch.func.hessian(lambda x: f(pose * x).square().sum())(torch.tensor(1.0)),
    )
    for name, way in ways.items():
        found, expected = (way(lambda x, layer=layer: layer(Capsules(a, x)).logits) for layer in both)
        torch.testing.assert_close(found, expected, msg=name)
        assert found.abs().max() > 0, name


def test_kernels_that_are_insisted_on_refuse_them(layers):
    fast, _, a, pose = layers
    fast.backend = "cpu"
    with pytest.raises(ValueError, match=r"torch\.func and forward-mode derivatives; use backend='auto'"):
        torch.func.grad(lambda x: fast(Capsules(a, x)).logits.sum())(pose)


def test_second_derivatives_and_those_of_responsibilities_are_refused(layers):
    fast, _, a, pose = layers
    pose.requires_grad_()
    (grad,) = torch.autograd.grad(fast(Capsules(a, pose)).logits.square().sum(), pose, create_graph=True)
    with pytest.raises(RuntimeError, match="only once; use backend='reference'"):
        grad.sum().backward()
    out = fast(Capsules(a, pose))
    with pytest.raises(RuntimeError, match="no gradient of its responsibilities; use backend='reference'"):
        out.posterior.r.square().sum().backward()
    out = fast(Capsules(a, pose))
    out.posterior.r.detach().sum()
    out.logits.sum().backward()  # whoever does not ask for it has no error
    assert pose.grad.abs().max() > 0


def test_through_the_last_iteration_responsibilities_are_given():
    layer = ConvCaps(2, 3, routing_options=dict(through="last"))
    out = layer(Capsules(torch.rand(2, 4, 4, 2), torch.randn(2, 4, 4, 2, 4, 4)))
    assert out.posterior.m.requires_grad
    assert not out.posterior.r.requires_grad

"""Muon: its steps against singular vectors and against PyTorch's own, its matrices against the maps they stand for."""

import copy

import pytest
import torch

from vbcaps import CapsNet
from vbcaps.training.muon import Muon, as_matrix, from_matrix, is_map, orthogonal


def weight(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_the_matrix_of_a_capsule_layer_takes_the_poses_of_a_field_to_the_sum_of_votes():
    W, poses = weight(3, 2, 4, 5, 4, 4), weight(3 * 2 * 4, 4, 4)
    votes = torch.einsum("ipq,ijqr->ijpr", poses, W.flatten(0, 2)).sum(0)  # j p r
    mapped = poses.transpose(0, 1).flatten(1) @ as_matrix(W)
    torch.testing.assert_close(mapped.view(4, 5, 4).transpose(0, 1), votes, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(3, 2, 4, 5, 4, 4), (1, 1, 4, 5, 2, 2), (6, 3, 5, 5)])
def test_a_matrix_becomes_the_weight_again(shape):
    W = weight(*shape)
    assert torch.equal(from_matrix(as_matrix(W), W.shape), W)


def test_steps_have_the_singular_vectors_of_the_momentum_and_values_near_one():
    matrices = [weight(12, 40), weight(40, 12), 1e-6 * weight(12, 40) + 1e-6, weight(9, 9), 1e-12 * weight(7, 3)]
    for matrix, step in zip(matrices, orthogonal(matrices), strict=True):
        u, _, v = torch.linalg.svd(matrix, full_matrices=False)
        rotated = u.T @ step @ v.T
        assert step.shape == matrix.shape
        assert 0.5 < float(rotated.diagonal().min()) <= float(rotated.diagonal().max()) < 1.3
        assert float((rotated - rotated.diagonal().diag()).abs().max()) < 1e-4


def test_a_matrix_of_zeros_takes_no_step():
    for step in orthogonal([torch.zeros(3, 5), torch.zeros(5, 3)]):
        assert torch.equal(step, torch.zeros_like(step))


def test_steps_are_those_of_pytorchs_own_muon():
    theirs_of = getattr(torch.optim, "Muon", None)
    if theirs_of is None:
        pytest.skip("PyTorch has had one since 2.9")
    first = weight(8, 3, 3, 3)
    ours, theirs = first.clone().requires_grad_(), first.flatten(1).clone().requires_grad_()
    muon = Muon([ours], lr=0.02, weight_decay=0.1)
    other = theirs_of([theirs], lr=0.02, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    for k in range(5):
        ours.grad = weight(8, 3, 3, 3 + k)[..., :3].clone()
        theirs.grad = ours.grad.flatten(1).clone()
        muon.step()
        other.step()
    moved = (theirs.detach() - first.flatten(1)).norm()
    assert float((ours.detach().flatten(1) - theirs.detach()).norm() / moved) < 0.02  # theirs is in bfloat16


def test_what_is_no_map_is_refused_and_what_has_no_gradient_stays():
    with pytest.raises(ValueError, match=r"convolutions and of capsules, got shape \(3,\)"):
        Muon([torch.zeros(3, requires_grad=True)], lr=0.1)
    W = weight(4, 2, 3, 3).requires_grad_()
    before = W.detach().clone()
    Muon([W], lr=0.1, weight_decay=0.5).step()
    assert torch.equal(W, before)


def test_it_is_used_as_any_optimiser():
    """Parameters one after the other, groups that come later, a closure."""
    first, later = weight(4, 2, 3, 3).requires_grad_(), weight(5, 2, 3, 3).requires_grad_()
    alone = [p.detach().clone().requires_grad_() for p in (first, later)]
    muon = Muon((p for p in [first]), lr=0.1)
    muon.add_param_group(dict(params=[later], lr=0.2))

    def closure() -> torch.Tensor:
        loss = first.square().sum() + later.square().sum()
        loss.backward()
        return loss

    assert muon.step(closure).item() == pytest.approx(sum(p.square().sum().item() for p in alone))
    for p, lr in zip(alone, (0.1, 0.2), strict=True):
        p.grad = 2 * p.detach()
        Muon([p], lr=lr).step()
    assert torch.equal(first, alone[0])
    assert torch.equal(later, alone[1])
    with pytest.raises(ValueError, match=r"got shape \(7,\)"):
        muon.add_param_group(dict(params=[torch.zeros(7, requires_grad=True)]))
    assert len(muon.param_groups) == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(lr=-1.0), "must not be below 0, got -1.0"),
        (dict(lr=0.1, weight_decay=-1.0), "must not be below 0"),
        (dict(lr=0.1, momentum=1.0), "momentum must be from 0 to below 1, got 1.0"),
    ],
)
def test_what_it_cannot_take_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        Muon([weight(4, 2, 3, 3)], **options)


def test_every_layer_with_weights_is_a_map_and_learns():
    torch.manual_seed(0)
    net = CapsNet((8, 4, 4, 4), 1, 3, 20, logit_scale=True)
    names = {name for name, p in net.named_parameters() if is_map(p)}
    assert names == {
        "stem.conv1.0.weight", "stem.conv2.0.weight", "stem.conv3.0.weight", "primary_caps.conv.weight",
        "conv_caps1.weight", "conv_caps2.weight", "class_caps.weight",
    }  # fmt: skip
    muon = Muon([p for p in net.parameters() if is_map(p)], lr=0.01)
    before, x, y = copy.deepcopy(net), weight(16, 1, 20, 20), torch.arange(16) % 3
    losses = []
    for _ in range(8):
        net.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(x).logits, y)
        loss.backward()
        losses.append(loss.item())
        muon.step()
    assert losses[-1] < 0.9 * losses[0]
    for (name, a), b in zip(net.named_parameters(), before.parameters(), strict=True):
        assert torch.equal(a, b) == (name not in names)

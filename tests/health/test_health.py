"""`health` finds what was planted in a network, and leaves the network as it was."""

import json

import planted
import pytest
import torch

from vbcaps import CapsNet, CapsVAE
from vbcaps.heads import BackboneCapsNet, CapsHead
from vbcaps.health import Health, health
from vbcaps.models import ConvNet
from vbcaps.routing import Agreement

LABELS = torch.arange(96) % 4


@pytest.fixture(autouse=True)
def _alone():
    """One thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def measured(net, **options) -> Health:
    return health(net, planted.images(), LABELS, **options)


def test_a_healthy_network():
    found = measured(planted.healthy())
    assert (found.most_votes, found.fewest_votes, found.inverted) == (1, 0, False)
    assert sorted(found.votes_by_rank, reverse=True) == list(found.votes_by_rank)
    assert sum(found.votes_by_rank) == pytest.approx(1)
    assert found.moving > 10
    assert found.moving_others > 8
    assert [layer.name for layer in found.layers] == ["primary_caps", "conv_caps1", "conv_caps2", "class_caps"]
    assert [layer.types for layer in found.layers] == [4, 3, 5, 4]
    assert all(layer.sharpness > 0.02 and layer.information > 0 for layer in found.layers[1:])
    assert all(layer.never_on == layer.always_on == layer.untaught == 0 for layer in found.layers[:-1])
    assert found.parts < 0.999


def test_an_inverted_network():
    found = measured(planted.inverted())
    assert (found.most_votes, found.fewest_votes, found.inverted) == (0, 1, True)
    assert sorted(found.votes_by_rank) == list(found.votes_by_rank)


def test_a_network_with_dead_poses():
    found = measured(planted.dead())
    assert (found.moving, found.moving_others, found.moving_all) == (0, 0, 0)
    moves = found.moves
    assert all(abs(one) < 0.01 for one in (moves.shift, moves.shift_others, moves.angle, moves.angle_others))


def test_poses_that_follow_the_image_by_their_coordinates_alone():
    net = planted.network()
    with torch.no_grad():
        net.class_caps.weight.zero_()  # votes are the coordinates of their children
        net(planted.images())
        net.class_caps.train()
        net(planted.images())
    found = measured(net)
    assert found.moving > 0
    assert found.moving_others == 0
    assert found.moves.shift_others == pytest.approx(0, abs=0.01)
    assert found.moves.shift > 0.1


def test_a_network_that_routes_uniformly():
    found = measured(planted.uniform())
    assert (found.most_votes, found.fewest_votes, found.inverted) == (0, 0, False)  # all classes have equally many
    for layer in found.layers[1:]:
        assert layer.sharpness == pytest.approx(0, abs=1e-6)
        assert layer.information == pytest.approx(0, abs=1e-6)
    assert found.votes_by_rank == pytest.approx([0.25] * 4)
    assert found.maps == pytest.approx(1)
    assert found.parts == pytest.approx(1)
    assert found.at_iterations[0].same == 1


def test_starved_types():
    net = planted.network()
    net.primary_caps.norm_a.running_mean[:2] += torch.tensor([1e3, -1e3])  # never and always on
    net.conv_caps2.norm_a.running_mean[0] += 1e3
    found = {layer.name: layer for layer in measured(net).layers}
    assert [found["primary_caps"].never_on, found["primary_caps"].always_on, found["primary_caps"].untaught] == [
        1,
        1,
        2,
    ]
    assert [found["conv_caps2"].never_on, found["conv_caps2"].always_on, found["conv_caps2"].untaught] == [1, 0, 1]
    assert found["conv_caps1"].never_on == found["conv_caps1"].always_on == 0


@pytest.mark.parametrize("routing", ["vb", "em", "dynamic"])
def test_every_routing_in_any_batches_by_any_backend(routing):
    found = measured(planted.network(routing=routing))
    assert found.routing == routing
    assert (found.tightest is None) == (routing == "dynamic")
    assert [one.iters for one in found.at_iterations] == [1, 2, 3, 4, 6, 10]
    assert [one.same for one in found.at_iterations if one.iters == 3] == [1]
    assert found.iters == 3
    assert Health.from_json(json.loads(json.dumps(found.to_json()))).to_json() == found.to_json()
    assert all(isinstance(value, str | int | float | None) for value in found.row().values())
    one_by_one = measured(planted.network(routing=routing, backend="reference"), batch_size=7)
    assert flat(one_by_one) == pytest.approx(flat(found), abs=0.05)


def flat(found: Health) -> dict:
    return {name: value for name, value in found.row().items() if isinstance(value, int | float)}


def test_without_labels_there_are_no_errors_and_with_them_they_are_counted():
    net, x = planted.healthy(), planted.images()
    with torch.no_grad():
        answers = net(x).logits.argmax(1)
    unlabelled, right = health(net, x), health(net, x, answers)
    assert unlabelled.error is unlabelled.uniform.error is unlabelled.at_iterations[0].error is None
    assert right.error == right.uniform.as_trained == 0
    wrong = health(net, x, (answers + 1) % 4)
    assert wrong.error == wrong.uniform.as_trained == 1
    for one, other in zip(right.at_iterations, wrong.at_iterations, strict=True):
        assert one.error == pytest.approx(1 - one.same)
        assert other.same == one.same


def test_uniform_routing_is_that_of_a_copy_with_one_iteration_and_its_own_statistics():
    net, x = planted.healthy(), planted.images()
    found = health(net, x, LABELS).uniform
    first = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)) < len(x) // 2
    copy = planted.healthy()
    for layer in (copy.conv_caps1, copy.conv_caps2, copy.class_caps):
        layer.routing.iters = 1
        layer.norm_pose.reset_running_stats()
        layer.norm_pose.train()
        if layer.norm_a is not None:
            layer.norm_a.reset_running_stats()
            layer.norm_a.train()
    with torch.no_grad():
        copy(x[first])
        new, own = (one.eval()(x[~first]).logits.argmax(1) for one in (copy, net))
    assert found.images == 48
    assert found.same == pytest.approx(float((new == own).double().mean()))
    assert found.error == pytest.approx(float((new != LABELS[~first]).double().mean()))
    assert found.as_trained == pytest.approx(float((own != LABELS[~first]).double().mean()))


def test_several_objects_in_an_image():
    net, x = planted.healthy(), planted.images()
    with torch.no_grad():
        order = net(x).logits.argsort(1, descending=True)
    found = health(net, x, order[:, [1, 0]])
    assert (found.objects, found.error, found.most_votes, found.fewest_votes) == (2, 0, 1, 0)
    assert found.at_iterations[0].error == pytest.approx(1 - found.at_iterations[0].same)
    assert health(net, x, order[:, [0, 2]]).error == health(net, x, order[:, [1, 2]]).error == 1
    one, same = (health(net, x, labels) for labels in (order[:, 0], order[:, :1]))
    assert one == same
    assert one.objects == 1
    assert health(planted.inverted(), x, order[:, :2]).fewest_votes == 1


def test_the_order_of_images_decides_nothing_but_the_halves():
    net, x = planted.healthy(), planted.images()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(3))
    one, other = (
        {name: value for name, value in flat(found).items() if not name.startswith(("uniform", "moves"))}
        for found in (health(net, x, LABELS), health(net, x[order], LABELS[order]))
    )
    assert one == pytest.approx(other, abs=1e-4)


def state_of(net) -> tuple:
    return (
        {name: x.clone() for name, x in net.state_dict().items()},
        [module.training for module in net.modules()],
        [module.iters for module in net.modules() if hasattr(module, "iters")],
        [parameter.grad for parameter in net.parameters()],
    )


def assert_same_state(before, after) -> None:
    assert before[1:] == after[1:]
    assert all(torch.equal(x, after[0][name]) for name, x in before[0].items())


@pytest.mark.parametrize("mode", [True, False])
def test_the_network_stays_as_it_was(mode):
    net = planted.healthy().train(mode)
    net.conv_caps1.eval()
    net.conv_caps2.routing.iters = 2
    before = state_of(net)
    with torch.inference_mode():
        measured(net)
    assert_same_state(before, state_of(net))


def test_the_network_stays_as_it_was_after_an_error_anywhere():
    net = planted.healthy()
    before, calls = state_of(net), 0

    def fail(*_):
        nonlocal calls
        calls += 1
        if calls == at:
            raise RuntimeError("planted")

    net.class_caps.register_forward_hook(fail)
    at = 10**6
    measured(net)
    for last in range(1, calls + 1):
        calls, at = 0, last
        with pytest.raises(RuntimeError, match="planted"):
            measured(net)
        assert_same_state(before, state_of(net))


def test_other_networks_of_capsules():
    vae = CapsVAE((4, 2, 3, 2), in_channels=1, num_classes=4, image_size=24).eval()
    assert health(vae, planted.images(), LABELS) == health(vae.net, planted.images(), LABELS)
    head = CapsHead(6, 4, caps=(3, 4, 2)).eval()
    found = health(head, torch.randn(12, 6, 7, 7))
    assert [layer.name for layer in found.layers] == ["primary_caps", "conv_caps1", "conv_caps2", "class_caps"]
    backbone = BackboneCapsNet(torch.nn.Conv2d(1, 6, 3, stride=4), 4, caps=(3,), in_channels=1).eval()
    assert [layer.name for layer in health(backbone, planted.images()).layers] == ["primary_caps", "class_caps"]
    wide = planted.network().double()
    assert flat(measured(wide)) == pytest.approx(flat(measured(planted.network())), abs=0.05)


def test_few_images_leave_out_what_they_cannot_say():
    found = health(planted.healthy(), planted.images(1), LABELS[:1])
    assert (found.images, found.uniform, found.moving, found.moves.shift) == (1, None, None, None)
    assert json.dumps(found.to_json())
    assert health(planted.healthy(), planted.images(5)).uniform is not None


def test_what_cannot_be_measured_is_an_error():
    net, x = planted.network(), planted.images()
    with pytest.raises(ValueError, match="a CNN has no capsules"):
        health(ConvNet((4, 2, 2, 2), 1, 4, 24), x)
    with pytest.raises(TypeError, match="got Linear"):
        health(torch.nn.Linear(3, 2), x)
    with pytest.raises(TypeError, match="model must be a network, got str"):
        health("fashion", x)
    with pytest.raises(ValueError, match="got none"):
        health(net, x[:0])
    with pytest.raises(ValueError, match="96 images and 3 labels"):
        health(net, x, LABELS[:3])
    with pytest.raises(ValueError, match="labels must lie from 0 to 3, got 0 to 4"):
        health(net, x, torch.arange(96) % 5)
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        health(net, x, batch_size=0)
    with pytest.raises(ValueError, match="iterations must be at least 1, got 0"):
        health(net, x, iterations=[0])


def test_a_routing_without_iterations_is_measured_without_them():
    class Fixed(torch.nn.Module):
        def forward(self, a, V, child, children=None, history=None):
            r = torch.full_like(V[..., 0], 1 / V.shape[3])
            m = (r[..., None] * a[..., None, None] * V).sum(2)
            return m.square().sum(-1), Agreement(m, r)

    net = CapsNet((4, 2, 2, 2), 1, 4, 24)
    for layer in (net.conv_caps1, net.conv_caps2, net.class_caps):
        layer.routing = Fixed()
    found = health(net.eval(), planted.images(), LABELS)
    assert (found.routing, found.iters, found.at_iterations, found.uniform) == ("Fixed", None, (), None)

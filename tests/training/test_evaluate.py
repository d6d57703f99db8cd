"""Errors, their intervals, and crops."""

import numpy as np
import pytest
import tiny
import torch
from scipy import stats

from vbcaps import Model
from vbcaps.inference import probabilities
from vbcaps.training.evaluate import Scorer, evaluate, summary, wilson
from vbcaps.training.step import WARM_UP


@pytest.fixture(scope="module")
def net():
    torch.manual_seed(0)
    net = tiny.recipe().net(1, 3)
    net(torch.randn(16, 1, 20, 20))
    return net


VIEW = tiny.recipe(standardise="image").view()


def scorer(net, images, **options):
    return Scorer(net, images, VIEW, 3, **options)


@pytest.mark.parametrize(("wrong", "count"), [(0, 7), (7, 7), (1, 30), (160, 1000), (388, 24300)])
def test_the_interval_is_scipys(wrong, count):
    expected = stats.binomtest(wrong, count).proportion_ci(method="wilson")
    np.testing.assert_allclose(wilson(wrong, count), expected, atol=1e-12)


def test_counts_by_class():
    scores = torch.eye(3)[torch.tensor([0, 0, 1, 2, 2, 1])]
    result = summary(scores, torch.tensor([0, 0, 0, 2, 1, 1]), ("a", "b", "c"))
    assert result.confusion == [[2, 1, 0], [0, 1, 1], [0, 0, 1]]
    assert result.error == pytest.approx(2 / 6)
    assert [row["error"] for row in result.per_class] == pytest.approx([1 / 3, 1 / 2, 0])
    assert [row["count"] for row in result.per_class] == [3, 2, 1]
    assert result.interval == wilson(2, 6)


def test_batches_of_any_size_give_the_same_scores(net):
    images = tiny.split(23, 0).images
    with torch.no_grad():
        net.eval()
        expected = probabilities(net(VIEW.test(images)))
        net.train()
    for batch in (1, 7, 23, 256):
        torch.testing.assert_close(scorer(net, images, batch_size=batch)(), expected, rtol=1e-4, atol=1e-6)
    assert net.training  # as it was


def test_several_crops_are_averaged(net):
    images = tiny.split(10, 0).images
    net.eval()
    with torch.no_grad():
        each = [probabilities(net(x)) for x in VIEW.crops(images, 5)]
    torch.testing.assert_close(scorer(net, images, crops=5, batch_size=16)(), torch.stack(each).mean(0))
    assert not torch.equal(each[0], each[1])
    with pytest.raises(ValueError, match="crops must be 1, 5 or a square"):
        evaluate(Model(net, tiny.recipe(), tiny.CLASSES, VIEW), tiny.split(10, 0), crops=3)


def test_a_scorer_sees_the_weights_as_they_are_now(net):
    score = scorer(net, tiny.split(9, 0).images)
    before = score().clone()
    with torch.no_grad():
        net.class_caps.weight.neg_()
    assert not torch.equal(score(), before)


def test_scores_are_computed_without_tf32_and_leave_the_setting_alone(net):
    seen, cudnn = [], torch.backends.cudnn
    hook = net.register_forward_hook(lambda *_: seen.append((cudnn.enabled, cudnn.allow_tf32)))
    before = cudnn.allow_tf32
    scorer(net, tiny.split(9, 0).images)()
    hook.remove()
    assert seen == [(True, False)]
    assert cudnn.allow_tf32 == before


def test_the_batches_that_warm_a_capture_up_may_pass_the_last(net):
    net.eval()
    score = scorer(net, tiny.split(9, 0).images, batch_size=8)
    for _ in range(WARM_UP):
        score.work()
    torch.testing.assert_close(score(), scorer(net, tiny.split(9, 0).images)())
    assert score.batches < WARM_UP


def test_scores_of_saturated_logits_still_rank():
    net = tiny.recipe(loss_on="logits").net(1, 3)
    out = net.eval()(torch.zeros(1, 1, 20, 20))._replace(logits=torch.tensor([[30.0, 60.0, 31.0]]))
    assert probabilities(out).argmax() == 1

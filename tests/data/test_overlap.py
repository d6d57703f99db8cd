"""Overlapping objects: which images are put together, where they lie, and what the new image shows."""

import pytest
import torch
from scipy import stats

from vbcaps.data import DataError, Split, load_dataset, overlapping
from vbcaps.data.overlap import Overlap

COUNTS = (3, 0, 7, 1, 5)  # images of each class


def singles(side=6, counts=COUNTS):
    """Image i is a dot of brightness 30 + 5 i in one of four corners; images of a class do not follow one another."""
    labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(4))]
    images = torch.zeros(len(labels), 1, side, side, dtype=torch.uint8)
    for i, image in enumerate(images):
        image[0, -(i % 2), -(i // 2 % 2)] = 30 + 5 * i
    return Split(images, labels)


def uniform(count, draws, seed=0):
    return torch.rand(count, draws, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("objects", [2, 3, 4])
def test_every_object_is_of_another_class_and_the_first_is_the_image_itself(objects):
    split = singles()
    overlap = Overlap(split, objects, side=9)
    index = torch.arange(16).repeat(50)
    images, labels = overlap(index, uniform(800, overlap.draws))
    assert images.shape == (800, 1, 9, 9)
    assert images.dtype == torch.uint8
    assert torch.equal(labels[:, 0], split.labels[index])
    assert all(len(set(row)) == objects for row in labels.tolist())


@pytest.mark.parametrize("u", [0.0, 1 - 2**-24])
def test_the_least_and_the_greatest_uniform_number_are_allowed(u):
    overlap = Overlap(singles(), 3, side=9)
    images, labels = overlap(torch.arange(16), torch.full((16, overlap.draws), u))
    assert all(len(set(row)) == 3 for row in labels.tolist())
    assert bool((images.flatten(1).max(1).values > 0).all())


@pytest.mark.parametrize("objects", [2, 3])
def test_each_image_of_the_other_classes_is_drawn_equally_often(objects):
    """By chi-square; of three objects, against the probabilities of drawing from what two classes leave."""
    split, count = singles(), 20_000
    overlap = Overlap(split, objects, side=9)
    for first in (0, 5):
        chosen = overlap.choose(torch.full((count,), first), uniform(count, objects - 1, seed=first))
        others = split.labels != split.labels[first]
        p = torch.zeros(16, 16).double()  # second, third
        for k in others.nonzero()[:, 0].tolist():
            left = others & (split.labels != split.labels[k])
            p[k] = left.double() / left.sum() / others.sum()
        last = p.sum(0) if objects == 3 else p.sum(1)
        times = torch.bincount(chosen[:, -1], minlength=16)
        there = last > 0
        assert times[~there].sum() == 0
        assert stats.chisquare(times[there].numpy(), (count * last[there]).numpy()).pvalue > 0.001


def test_an_image_is_the_maximum_of_its_objects():
    torch.manual_seed(1)
    split = Split(torch.randint(0, 256, (8, 3, 5, 5), dtype=torch.uint8), torch.arange(8) % 4)
    overlap = Overlap(split, 3, side=8)
    index, u = torch.arange(8), uniform(8, overlap.draws)
    images, labels = overlap(index, u)
    chosen, corners = overlap.choose(index, u[:, :2]), (u[:, 2:].reshape(8, 3, 2) * 4).long()
    for n in range(8):
        canvas = torch.zeros(3, 8, 8, dtype=torch.uint8)
        for k in range(3):
            y, x = corners[n, k].tolist()
            part = canvas[:, y : y + 5, x : x + 5]
            part.copy_(torch.maximum(part, split.images[chosen[n, k]]))
        assert torch.equal(images[n], canvas)
        assert labels[n].tolist() == split.labels[chosen[n]].tolist()


def test_objects_lie_anywhere_on_the_canvas_equally_often_and_independently():
    split = Split(torch.full((2, 1, 28, 28), 200, dtype=torch.uint8), torch.tensor([0, 1]))
    overlap, count = Overlap(split, 2, side=36), 5_000
    placed = overlap.place(torch.tensor([[0, 1]]).expand(count, 2), uniform(count, 4))
    assert placed.shape == (count, 2, 1, 36, 36)
    assert bool(((placed > 0).flatten(2).sum(2) == 28 * 28).all())  # whole objects
    top = (placed.amax((2, 4)) > 0).int().argmax(2)  # n k
    left = (placed.amax((2, 3)) > 0).int().argmax(2)
    for corner in (top[:, 0], top[:, 1], left[:, 0], left[:, 1]):
        assert (int(corner.min()), int(corner.max())) == (0, 8)  # four pixels either way from the middle
        assert stats.chisquare(torch.bincount(corner, minlength=9).numpy()).pvalue > 0.001
    both = torch.bincount(top[:, 0] * 9 + left[:, 1], minlength=81).view(9, 9).numpy()
    assert stats.chi2_contingency(both).pvalue > 0.001


def test_the_test_images_are_always_the_same_and_say_how_much_they_overlap():
    split = load_dataset("sample").test
    made, again, other = (overlapping(split, 2, 36, seed=seed) for seed in (0, 0, 1))
    assert torch.equal(made.images, again.images)
    assert torch.equal(made.labels, again.labels)
    assert not torch.equal(made.labels, other.labels)
    assert torch.equal(made.labels[:, 0], split.labels)  # every image is once the first
    assert made.take(torch.tensor([3])).shared.tolist() == made.shared[[3]].tolist()


def test_the_share_of_the_foreground_that_objects_share():
    full = torch.full((2, 1, 4, 4), 200, dtype=torch.uint8)
    full[0, :, :, 2:] = 25  # no foreground
    shared = overlapping(Split(full, torch.tensor([0, 1])), 2, side=4).shared
    assert shared.tolist() == [0.5, 0.5]


def test_what_cannot_be_put_together_says_why():
    split = singles()
    with pytest.raises(ValueError, match="crop must be at least the side of the objects, 6, got 5"):
        Overlap(split, 2, side=5)
    with pytest.raises(ValueError, match="objects must be at least 2 to overlap, got 1"):
        Overlap(split, 1, side=9)
    with pytest.raises(DataError, match="5 objects of different classes need as many classes of images, got 4"):
        Overlap(split, 5, side=9)
    with pytest.raises(DataError, match=r"must be bytes, uint8, got images of torch.float32"):
        Overlap(split._replace(images=split.images.float()), 2, side=9)

"""What the network sees, held to literal loops over pixels."""

import dataclasses
import json
import math
from collections.abc import Iterator

import numpy as np
import pytest
import scipy.ndimage
import torch

from vbcaps.data import Split, View
from vbcaps.data.augment import mixup

VIEWS = {
    "smallNORB": View(crop=8),
    "smallNORB, released": View(crop=8, standardise="crop"),
    "Fashion-MNIST": View(crop=12, pad=4, standardise="dataset"),
    "CIFAR-10": View(crop=12, pad=4, standardise="dataset", flip=True),
    "CIFAR-10, padded with zeros": View(crop=12, pad=4, standardise="dataset", flip=True, fill="mean"),
    "MNIST in a frame": View(crop=17, standardise="dataset", place=True),
    "all": View(crop=9, pad=2, standardise="crop", flip=True, brightness=0.3, contrast=0.5),
    "all, by the image": View(crop=9, pad=2, flip=True, brightness=1.0, contrast=1.0, fill="mean"),
    "edges": View(crop=12, pad=5, standardise="crop", flip=True, fill="edge"),
    "edges, by the image": View(crop=17, brightness=0.4, place=True, fill="edge"),
    "as it is": View(crop=12, standardise="none", contrast=0.2),
}
TURNED = {
    "turned, bicubic": View(crop=8, rotate=20.0, zoom=0.2, resample="bicubic"),
    "turned, edges": View(crop=8, flip=True, rotate=20.0, zoom=0.2, stretch=0.3, cutout=3, fill="edge"),
}


def images_of(n: int = 5, c: int = 2, h: int = 12, w: int = 12) -> torch.Tensor:
    return torch.randint(256, (n, c, h, w), dtype=torch.uint8, generator=torch.Generator().manual_seed(h))


def moments(values: list[float]) -> tuple[float, float]:
    mean = sum(values) / len(values)
    return mean, math.sqrt(sum((v - mean) ** 2 for v in values) / len(values))


def literal(view: View, image: list, top: int, left: int, flip: bool, bright: float, contrast: float) -> list:
    """One image, in loops: crop, flip, brightness, contrast, standardise."""
    crop, h, w = view.crop, len(image[0]), len(image[0][0])
    out, inside = [], []
    if flip and len(image) == 2:
        image = [image[1], image[0]]
    if view.fill == "edge":
        pixel = lambda channel, y, x: channel[min(max(y, 0), h - 1)][min(max(x, 0), w - 1)] / 255  # noqa: E731
    else:
        pixel = lambda channel, y, x: channel[y][x] / 255 if 0 <= y < h and 0 <= x < w else frame  # noqa: E731
    for c, channel in enumerate(image):
        frame = 0.0
        if view.fill == "mean" and view.standardise == "dataset":
            frame = view.mean[c]
        elif view.fill == "mean":
            frame, _ = moments([v / 255 for row in channel for v in row])
        rows = []
        for y in range(top, top + crop):
            row = [pixel(channel, y, x) for x in range(left, left + crop)]
            rows.append(row[::-1] if flip else row)
        out.append(rows)
    for y in range(top, top + crop):
        row = [0 <= y < h and 0 <= x < w for x in range(left, left + crop)]
        inside.append(row[::-1] if flip else row)
    clamp = lambda v: min(max(v, 0.0), 1.0)  # noqa: E731
    out = [[[clamp(v * bright) for v in row] for row in rows] for rows in out]
    middle, _ = moments([v for rows in out for row in rows for v in row])
    out = [[[clamp(middle + contrast * (v - middle)) for v in row] for row in rows] for rows in out]
    for c, rows in enumerate(out):
        if view.standardise == "dataset":
            mean, std = view.mean[c], view.std[c]
        elif view.standardise == "image":
            mean, std = moments([v / 255 for row in image[c] for v in row])
        elif view.standardise == "crop":
            mean, std = moments([v for row in rows for v in row])
        else:
            mean, std = 0.0, 1.0
        for y, row in enumerate(rows):
            for x, v in enumerate(row):
                row[x] = 0.0 if view.fill == "mean" and not inside[y][x] else (v - mean) / max(std, 1 / 255)
    return out


def literal_train(view: View, images: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    out = []
    for image, numbers in zip(images.tolist(), u.tolist(), strict=True):
        numbers, corner = iter(numbers), []
        for size in images.shape[2:]:
            pad = view.crop - size if view.place else view.pad
            corner.append(math.floor(next(numbers) * (size + 2 * pad - view.crop + 1)) - pad)
        flip = view.flip and next(numbers) < 0.5
        bright, contrast = (1 + s * (2 * next(numbers) - 1) if s else 1.0 for s in (view.brightness, view.contrast))
        out.append(literal(view, image, *corner, flip, bright, contrast))
    return torch.tensor(out)


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("channels", [1, 2, 3])
@pytest.mark.parametrize("size", [(12, 12), (13, 16)])
def test_train_is_the_loop(name, size, channels):
    images = images_of(5, channels, *size)
    view = VIEWS[name].fit(Split(images, torch.zeros(5).long()))
    u = torch.rand(5, view.draws, generator=torch.Generator().manual_seed(7))
    u[0], u[1] = 0, 1 - 2**-24  # the first and the last that torch.rand gives
    ours = view.train(images, u)
    assert ours.dtype == torch.float32
    torch.testing.assert_close(ours, literal_train(view, images, u), atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("size", [(12, 12), (13, 16)])
def test_test_is_the_loop(name, size):
    images = images_of(h=size[0], w=size[1])
    view = VIEWS[name].fit(Split(images, torch.zeros(5).long()))
    top, left = ((s - view.crop) // 2 for s in size)
    want = [literal(view, image, top, left, False, 1.0, 1.0) for image in images.tolist()]
    torch.testing.assert_close(view.test(images), torch.tensor(want), atol=2e-5, rtol=1e-5)
    assert torch.equal(view.crops(images, 1), view.test(images)[None])


def test_a_smaller_image_is_padded_to_the_crop_at_the_test():
    """Fashion-MNIST: 28x28 in the middle of 32x32."""
    image = torch.full((1, 1, 28, 28), 255, dtype=torch.uint8)
    seen = View(crop=32, pad=4, standardise="none").test(image)
    assert torch.equal(seen, torch.nn.functional.pad(torch.ones(1, 1, 28, 28), (2, 2, 2, 2)))


def test_every_corner_is_drawn_equally_often():
    view = View(crop=32, pad=4, standardise="none")
    image = torch.arange(28 * 28).view(1, 1, 28, 28).remainder(251).byte()
    n = 5000
    u = torch.rand(n, 2, generator=torch.Generator().manual_seed(0))
    shown = view.train(image.expand(n, -1, -1, -1), u)
    _, counts = shown.flatten(1).unique(dim=0, return_counts=True)
    assert len(counts) == 25  # 36 - 32 + 1 in each direction
    assert (counts - n / 25).abs().max() < 5 * math.sqrt(n / 25)


def test_place_puts_the_whole_digit_anywhere_in_the_frame():
    view = View(crop=40, standardise="none", place=True)
    n = 4000
    shown = view.train(torch.full((n, 1, 28, 28), 255, dtype=torch.uint8), torch.rand(n, 2))
    assert (shown.flatten(1).sum(1) == 28 * 28).all()
    tops = (shown[:, 0].amax(2) > 0).int().argmax(1)
    assert tops.unique().tolist() == list(range(13))
    framed = images_of(3, 1, 40, 40)  # an affNIST image fills the frame already
    assert torch.equal(view.test(framed), framed.float() / 255)


@pytest.mark.parametrize("standardise", ["image", "crop", "dataset"])
@pytest.mark.parametrize("grey", [0, 1, 77, 255])
def test_constant_images_become_zeros(standardise, grey):
    images = torch.full((2, 3, 12, 12), grey, dtype=torch.uint8)
    view = View(crop=8, standardise=standardise).fit(Split(images, torch.zeros(2).long()))
    assert view.train(images, torch.rand(2, 2)).abs().max() < 1e-4
    assert view.test(images).abs().max() < 1e-4


def test_standardised_images_have_mean_0_and_variance_1():
    images = images_of(4, 3, 20, 20)
    seen = View(crop=20, standardise="image").test(images)
    torch.testing.assert_close(seen.mean((2, 3)), torch.zeros(4, 3), atol=1e-5, rtol=0)
    torch.testing.assert_close(seen.var((2, 3), correction=0), torch.ones(4, 3))
    view = View(crop=20, standardise="dataset").fit(Split(images, torch.zeros(4).long()))
    torch.testing.assert_close(view.test(images).mean((0, 2, 3)), torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(view.test(images).var((0, 2, 3), correction=0), torch.ones(3))


def test_crops():
    view = View(crop=3, pad=1, standardise="none")
    image = torch.arange(1, 26).view(1, 1, 5, 5).byte()
    framed = torch.nn.functional.pad(image, (1, 1, 1, 1))[0, 0].float() / 255
    at = lambda y, x: framed[y : y + 3, x : x + 3]  # noqa: E731
    five = view.crops(image, 5)
    assert five.shape == (5, 1, 1, 3, 3)
    for seen, corner in zip(five[:, 0, 0], [(0, 0), (0, 4), (4, 0), (4, 4), (2, 2)], strict=True):
        assert torch.equal(seen, at(*corner))
    nine = view.crops(image, 9)[:, 0, 0]
    for seen, corner in zip(nine, [(y, x) for y in (0, 2, 4) for x in (0, 2, 4)], strict=True):
        assert torch.equal(seen, at(*corner))
    assert view.crops(image, 25).flatten(1).unique(dim=0).shape[0] == 25
    for k in (0, -4, 2, 6):
        with pytest.raises(ValueError, match=f"crops must be 1, 5 or a square .*, got {k}"):
            view.crops(image, k)


def turned(images: torch.Tensor, flip: bool, fill: str, resample: str) -> Iterator[tuple]:
    """Of each image: itself, what a view made of it, and the rows and columns at which that lies in the image."""
    turns = dict(rotate=50.0, zoom=0.4, stretch=0.3)
    view = View(crop=7, pad=3, standardise="none", flip=flip, fill=fill, resample=resample, **turns)
    u = torch.rand(len(images), view.draws, generator=torch.Generator().manual_seed(1))
    found = view.train(images, u)
    for image, numbers, x in zip(images.double() / 255, u.tolist(), found, strict=True):
        top, left = (math.floor(v * (size + 6 - 7 + 1)) - 3 for v, size in zip(numbers, image.shape[1:], strict=False))
        mirror = -1 if flip and numbers[2] < 0.5 else 1
        angle, size, wide = (strength * (2 * v - 1) for strength, v in zip((50, 0.4, 0.3), numbers[-3:], strict=True))
        angle, size, wide = math.radians(angle), 1 + size, 1 + wide
        step = np.arange(7) - 3.0
        y, across = np.meshgrid(step, mirror * step, indexing="ij")
        rows = top + 3 + (math.cos(angle) * y - math.sin(angle) * across) / size * wide
        cols = left + 3 + (math.sin(angle) * y + math.cos(angle) * across) / size / wide
        yield image.numpy(), x.numpy(), rows, cols


@pytest.mark.parametrize(("fill", "mode"), [("black", "grid-constant"), ("edge", "nearest")])
@pytest.mark.parametrize("flip", [False, True])
def test_turned_enlarged_and_stretched_windows_are_those_of_scipy(flip, fill, mode):
    for image, x, rows, cols in turned(images_of(4, 3, 12, 15), flip, fill, "bilinear"):
        for channel, out in zip(image, x, strict=True):
            expected = scipy.ndimage.map_coordinates(channel, [rows, cols], order=1, mode=mode)
            np.testing.assert_allclose(out, expected, atol=2e-6)


def keys(t: float) -> float:
    """Keys's cubic convolution with a = -3/4: what a pixel at this distance counts."""
    t, a = abs(t), -0.75
    if t <= 1:
        return (a + 2) * t**3 - (a + 3) * t**2 + 1
    return a * t**3 - 5 * a * t**2 + 8 * a * t - 4 * a if t < 2 else 0.0


@pytest.mark.parametrize("fill", ["black", "edge"])
@pytest.mark.parametrize("flip", [False, True])
def test_bicubic_windows_are_sums_over_sixteen_pixels(flip, fill):
    for image, x, rows, cols in turned(images_of(2, 3, 12, 15), flip, fill, "bicubic"):
        h, w = image.shape[1:]
        expected = np.zeros_like(x, dtype=np.float64)
        for at in np.ndindex(rows.shape):
            row, col = rows[at], cols[at]
            for y in range(math.floor(row) - 1, math.floor(row) + 3):
                for z in range(math.floor(col) - 1, math.floor(col) + 3):
                    if fill == "edge" or (0 <= y < h and 0 <= z < w):
                        pixel = image[:, min(max(y, 0), h - 1), min(max(z, 0), w - 1)]
                        expected[:, *at] += pixel * keys(row - y) * keys(col - z)
        np.testing.assert_allclose(x, expected, atol=5e-5)


@pytest.mark.parametrize("resample", ["bilinear", "bicubic"])
@pytest.mark.parametrize(
    "changes",
    [dict(rotate=40.0), dict(zoom=0.5), dict(contrast=1.0), dict(rotate=40.0, contrast=0.5)],
)
def test_an_image_in_a_frame_of_its_mean_has_no_edge(changes, resample):
    """Whatever is mixed with the frame: the image is as grey as the mean all over, and must be 0 as all around it."""
    images = torch.full((6, 1, 12, 12), 102, dtype=torch.uint8)
    options = dict(crop=20, pad=8, fill="mean", resample=resample, **changes)
    of_dataset = View(**options, standardise="dataset", mean=(0.4,), std=(0.25,))
    of_image = View(**options, standardise="image")
    for view in (of_dataset, of_image):
        u = torch.rand(6, view.draws, generator=torch.Generator().manual_seed(2))
        assert view.train(images, u).abs().max() < 1e-3 / 0.25


def test_a_quarter_turn_moves_pixels_and_blurs_none():
    image = images_of(1, 2, 8, 8)
    x = View(crop=8, standardise="none", rotate=90.0).train(image, torch.tensor([[0.0, 0.0, 0.0]]))  # by -90 degrees
    torch.testing.assert_close(x, torch.rot90(image, 1, (2, 3)).float() / 255, atol=1e-5, rtol=0)


def test_a_view_that_may_turn_but_does_not_is_the_plain_one():
    images, u = images_of(5), torch.rand(5, 3)
    still = torch.cat([u[:, :2], torch.full((5, 1), 0.5)], 1)
    turned = View(crop=8, rotate=30.0).train(images, still)
    torch.testing.assert_close(turned, View(crop=8).train(images, u[:, :2]), atol=1e-5, rtol=1e-5)


def test_cutout_blanks_a_square_anywhere():
    view, images = View(crop=8, cutout=4), images_of(300, 1)
    u = torch.rand(300, 4)
    x, plain = view.train(images, u), View(crop=8).train(images, u[:, :2])
    blank = (x == 0) & (plain != 0)
    assert torch.equal(x[~blank], plain[~blank])
    at = (u[:, 2:] * 8 - 2, u[:, 2:] * 8 + 2)
    for k in range(300):
        rows, cols = (
            [i for i in range(8) if at[0][k, axis] <= i + 0.5 <= at[1][k, axis]] for axis in (0, 1)
        )  # fmt: skip
        square = torch.zeros(8, 8, dtype=torch.bool)
        square[rows[0] : rows[-1] + 1, cols[0] : cols[-1] + 1] = True
        assert torch.equal(x[k, 0] == 0, square | (plain[k, 0] == 0))
    assert blank.float().mean((0, 1)).min() > 0.05  # every pixel is, sometimes


@pytest.mark.parametrize("n", [1, 4, 5])
def test_mixup_blends_neighbours_and_their_labels(n):
    x, y, share = torch.rand(n, 2, 3, 3), torch.arange(n) % 3, torch.rand(n) / 2
    mixed, labels = mixup(x, y, share[:, None, None, None], 3)
    for k in range(n):
        other = min(k + 1 if k % 2 == 0 else k - 1, n - 1)
        torch.testing.assert_close(mixed[k], (1 - share[k]) * x[k] + share[k] * x[other])
        expected = torch.zeros(3)
        expected[y[k]] += 1 - share[k]
        expected[y[other]] += share[k]
        torch.testing.assert_close(labels[k], expected)
    if n == 4:  # dealt out to two
        halves = [mixup(x[part], y[part], share[part, None, None, None], 3) for part in (slice(0, 2), slice(2, 4))]
        assert torch.equal(torch.cat([half[0] for half in halves]), mixed)


def test_an_image_does_not_depend_on_its_batch():
    images, view = images_of(6), VIEWS["all"]
    u = torch.rand(6, view.draws)
    together = view.train(images, u)
    for i in range(6):
        torch.testing.assert_close(view.train(images[i : i + 1], u[i : i + 1])[0], together[i])


def test_draws():
    assert [View(crop=4, flip=f, brightness=b, contrast=c).draws for f in (0, 1) for b in (0, 1) for c in (0, 1)] == [
        *(2, 3, 3, 4),
        *(3, 4, 4, 5),
    ]
    assert View(crop=4, flip=True, rotate=9.0, stretch=0.1, cutout=2).draws == 7
    assert [View(crop=4, rotate=r, zoom=z, cutout=c).draws for r in (0, 9) for z in (0, 0.1) for c in (0, 2)] == [
        *(2, 4, 3, 5),
        *(3, 5, 4, 6),
    ]


def test_a_view_travels_as_json():
    view = View(crop=8, standardise="dataset", flip=True).fit(Split(images_of(), torch.zeros(5).long()))
    assert View.from_json(json.loads(json.dumps(dataclasses.asdict(view)))) == view


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(crop=0), "crop must be at least 1, got 0"),
        (dict(pad=-1), "pad must be at least 0, got -1"),
        (dict(standardise="global"), "standardise must be one of .*'image'.*, got 'global'"),
        (dict(fill="white"), "fill must be one of"),
        (dict(brightness=-0.1), "brightness must be from 0 to 1"),
        (dict(contrast=2.0), "contrast must be from 0 to 1"),
        (dict(resample="nearest"), "resample must be one of .*'bicubic'.*, got 'nearest'"),
        (dict(rotate=-1.0), "rotate must be from 0 to 180, got -1"),
        (dict(zoom=1.0), "zoom must be from 0 to 0.9, got 1"),
        (dict(stretch=-0.1), "stretch must be from 0 to 0.9, got -0.1"),
        (dict(cutout=9), "cutout must be from 0 to 8, got 9"),
        (dict(place=True, pad=2), "pad must be 0"),
        (dict(place=True, fill="mean"), "place"),
        (dict(standardise="crop", fill="mean"), "crop"),
        (dict(mean=(0.5,), std=()), "mean and std"),
        (dict(mean=(0.5,), std=(0.0,)), "std above 0"),
    ],
)
def test_impossible_views(fields, message):
    with pytest.raises(ValueError, match=message):
        View(**(dict(crop=8) | fields))


def test_impossible_inputs():
    images = images_of(2, 1, 12, 12)
    with pytest.raises(ValueError, match="call fit first"):
        View(crop=8, standardise="dataset").test(images)
    with pytest.raises(ValueError, match="crop 32 is larger than an image of 12 with pad 4"):
        View(crop=32, pad=4).train(images, torch.rand(2, 2))
    with pytest.raises(ValueError, match=r"u must have shape \(2, 3\), got \(2, 2\)"):
        View(crop=8, flip=True).train(images, torch.rand(2, 2))
    with pytest.raises(ValueError, match="images must be uint8 n c h w"):
        View(crop=8).test(images.float())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", [*VIEWS, *TURNED])
def test_a_view_can_be_captured(name):
    """As a CUDA graph, without a warm-up: no copy from the host, no waiting; and it gives what the CPU gives."""
    images = images_of(5, 2, 12, 12)
    view = (VIEWS | TURNED)[name].fit(Split(images, torch.zeros(5).long()))
    u = torch.rand(5, view.draws)
    x, v = images.cuda(), u.cuda()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        seen, tested, crops = view.train(x, v), view.test(x), view.crops(x, 4)
    graph.replay()
    torch.testing.assert_close(seen.cpu(), view.train(images, u), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(tested.cpu(), view.test(images), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(crops.cpu(), view.crops(images, 4), atol=1e-5, rtol=1e-5)

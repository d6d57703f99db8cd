"""Reliability diagrams and risk-coverage curves hold the arrays that they were given."""

import numpy as np
import pytest
import torch
from PIL import Image

from vbcaps.cli.uncertainty import DRAWN
from vbcaps.figures import uncertainty as pictures
from vbcaps.uncertainty import reliability, risk_coverage
from vbcaps.uncertainty.scores import OF_ALL, OF_POSTERIOR


@pytest.fixture
def figure(monkeypatch: pytest.MonkeyPatch):
    """The last figure that was drawn, before it became a PNG."""
    seen = []
    save = pictures.save
    monkeypatch.setattr(pictures, "save", lambda figure, path: seen.append(figure) or save(figure, path))
    return lambda: seen[-1]


def answers():
    gen = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(200, 4, generator=gen)
    return logits, torch.multinomial(logits.softmax(1), 1, generator=gen)[:, 0]


def test_bars_are_the_accuracy_of_bins_with_images_and_the_gap_reaches_the_confidence(tmp_path, figure):
    logits, labels = answers()
    bins = dict(
        before=reliability((3 * logits).softmax(1), labels, 10), after=reliability(logits.softmax(1), labels, 10)
    )
    path = pictures.reliability_diagram(bins, tmp_path / "r.png")
    with Image.open(path) as image:
        image.load()
    axes = figure().axes
    assert [one.get_title(loc="left") for one in axes[::2]] == ["before", "after"]
    for (name, one), upper, lower in zip(bins.items(), axes[::2], axes[1::2], strict=True):
        used = one.images > 0
        (accuracy,) = upper.containers
        assert [bar.get_height() for bar in accuracy] == pytest.approx(one.accuracy[used].tolist())
        confidence = next(line for line in upper.lines if line.get_label() == "mean confidence")
        assert list(confidence.get_ydata()) == pytest.approx(one.confidence[used].tolist())
        ends = np.array([segment[:, 1] for segment in upper.collections[0].get_segments()])
        expected = np.sort(np.stack([one.accuracy[used], one.confidence[used]], 1), 1)
        assert ends == pytest.approx(expected)
        centres = [bar.get_x() + bar.get_width() / 2 for bar in accuracy]
        assert centres == pytest.approx(((np.flatnonzero(used) + 0.5) / 10).tolist())
        assert [bar.get_height() for bar in lower.containers[0]] == one.images.tolist()
        assert f"ECE {100 * one.error():.2f}%" in [text.get_text() for text in upper.texts], name


def test_curves_are_the_risks_and_end_in_one_error(tmp_path, figure):
    logits, labels = answers()
    p, wrong = logits.softmax(1), logits.argmax(1) != labels
    curves = dict(sure=risk_coverage(1 - p.max(1).values, wrong), noise=risk_coverage(torch.rand(200), wrong))
    pictures.risk_coverage_curves(curves, tmp_path / "c.png")
    (axes,) = figure().axes
    lines = {line.get_label().split("  ")[0]: line for line in axes.get_lines()}
    for name, curve in curves.items():
        assert list(lines[name].get_xdata()) == pytest.approx((100 * curve.coverage).tolist())
        assert list(lines[name].get_ydata()) == pytest.approx((100 * curve.risk).tolist())
        assert lines[name].get_label() == f"{name}  {100 * curve.area():.2f}%"
    best = risk_coverage(wrong.double() + 0.001 * torch.arange(200), wrong)  # errors last, and no ties
    assert list(lines["every error last"].get_ydata()) == pytest.approx((100 * best.risk).tolist())


def test_the_overview_has_both_also_without_errors(tmp_path, figure):
    logits, _ = answers()
    labels = logits.argmax(1)
    curve = risk_coverage(torch.rand(200), torch.zeros(200, dtype=torch.bool))
    pictures.overview(dict(before=reliability(logits.softmax(1), labels)), dict(noise=curve), tmp_path / "o.png")
    assert len(figure().axes) == 3
    assert (tmp_path / "o.png").exists()


def test_every_score_has_words_and_a_line_of_its_own():
    found = [pictures.said(name) for name in (*OF_ALL, *OF_POSTERIOR, "density.class_caps.kappa")]
    assert len(set(found)) == len(found)
    assert not any("_" in words for words in found)
    assert pictures.said("density a.m+b.m, per class") == "density of a.m + b.m, per class"
    assert len(set(pictures.STYLES)) == len(pictures.STYLES) >= DRAWN  # told apart in grey, too
    assert np.lcm(len(pictures.STYLES), len(pictures.COLOURS)) >= len(found)

"""The pictures of `docs/capsules.md`: the example does what the page says of it, and the page shows what is drawn."""

import importlib
import re
import sys
from pathlib import Path

import pytest

from vbcaps.routing.vb import ACTIVATIONS

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))  # as for `python tools/capsules.py`
scene, capsules = importlib.import_module("scene"), importlib.import_module("capsules")
PAGE = (ROOT / "docs" / "capsules.md").read_text()
CHOICES = (ROOT / "docs" / "choices.md").read_text()


def test_routing_deals_the_parts_to_the_house_and_the_boat():
    routed = scene.route(scene.house_and_boat())
    share = [q.r[0, 0, :, 0] for q in routed.iterations]  # of the house
    assert share[0].tolist() == [0.5] * 8
    assert ((share[1] > 0.5).tolist(), (share[2] > 0.9).tolist()) == ([True] * 4 + [False] * 4,) * 2
    assert routed.bounds == sorted(routed.bounds)
    assert routed.bounds[2] - routed.bounds[1] > 10 > routed.bounds[3] - routed.bounds[2]


def test_votes_meet_in_the_whole_whatever_its_place():
    for at, degrees in (((2.0, 1.0), 0), ((6.0, 3.0), 70)):
        for j, name in enumerate(scene.WHOLES):
            V = scene.votes(scene.whole(name, at, degrees, seed=0))[:, :, :2]
            assert (V[:, j] - V.new_tensor(at)).norm(dim=1).max() < 0.4
            assert V[:, 1 - j].std(0).norm() > 0.7


def test_the_page_has_the_numbers_of_the_picture():
    right, heap = (
        capsules.said(scene.route(parts)).split()[-1]
        for parts in (scene.whole("house", (4.5, 1.9), 0, seed=2), scene.jumbled_house())
    )
    said = re.search(r"house on the left has an activation of ([\d.]+), the heap on the\s+right ([\d.]+)\.", PAGE)
    assert said.groups() == (right, heap)


def test_choices_has_the_logits_of_every_rule():
    rows = re.findall(r'^\| `"(\w+)"` \|.*\| (-?[\d.]+) \| (-?[\d.]+) \|$', CHOICES, re.MULTILINE)
    assert [rule for rule, *_ in rows] == list(ACTIVATIONS)
    scenes = scene.whole("house", (4.5, 1.9), 0, seed=2), scene.jumbled_house()
    for rule, *said in rows:
        assert said == [f"{float(scene.route(parts, activation=rule).logits[0]):.1f}" for parts in scenes], rule
    higher = {rule: float(house) > float(heap) for rule, house, heap in rows}
    assert higher == dict(agreement=True, information=False, released=True, paper=False)


def test_the_page_shows_every_picture_and_each_has_a_dark_twin():
    shown = re.findall(r"\]\(pictures/(\w+)\.svg\)", PAGE)
    assert sorted(shown) == sorted(capsules.PICTURES)
    files = {path.name for path in (ROOT / "docs" / "pictures").iterdir()}
    assert {f"{name}{theme.suffix}.svg" for name in shown for theme in (capsules.LIGHT, capsules.DARK)} <= files


@pytest.mark.parametrize("theme", [capsules.LIGHT, capsules.DARK])
def test_a_picture_is_drawn_alike_each_time_with_letters_as_text(theme, tmp_path):
    for name in ("one.svg", "one.svg"):
        before = (tmp_path / name).read_bytes() if (tmp_path / name).exists() else None
        capsules.save(capsules.draw_jumble(theme), tmp_path / name)
    text = (tmp_path / "one.svg").read_text()
    assert before == text.encode()
    assert theme.paper in text
    assert capsules.said(scene.route(scene.jumbled_house())) in text

"""The sentences and the picture of a record say what the record has."""

from dataclasses import replace

import planted
import pytest

from vbcaps.figures import health as picture
from vbcaps.health import AtIterations, Health, LayerHealth, Moves
from vbcaps.health.findings import findings

HEALTHY = Health.from_json(planted.RECORD)


def said(**changes: object) -> str:
    return "\n".join(findings(replace(HEALTHY, **changes)))


def test_a_healthy_record():
    assert findings(HEALTHY) == [
        "The answer is the class with the most votes for 98% of images: routing by agreement",
        "The class of the answer has the tightest posterior for 97% of images",
        "Routing is 80% sharp in class_caps, where it is sharpest; the image decides 75% of this",
        "The first and the last class take different parts of the image: these correlate by 0.43",
        "15.8 of 16 entries of the winner's pose move with the image (13.9 of those without coordinates)",
        "A linear readout of the winner's pose explains 45% of the variance of shifts (33% without the entries with "
        "coordinates) and 70% of the variance of rotations (none without the entries with coordinates)",
        "Routing settles: with 10 iterations 97% of answers are those of the 2 that the network was trained with",
        "With uniform routing, and BatchNorm's statistics taken anew, 50% of answers are wrong, and 9% as trained",
        "No type of capsule is starved: each is on in some images and off in others, and has gradients",
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (dict(most_votes=0.6), "most votes for 60% of images: votes decide it only in part"),
        (
            dict(most_votes=0.01, fewest_votes=0.87),
            "Routing is inverted: the answer is the class with the fewest votes for 87% of images, and with the most "
            "for 1%",
        ),
        (dict(most_votes=0.0, votes_by_rank=(1 / 3,) * 3), "All classes have equally many votes"),
        (dict(objects=2), "The 2 answers are the classes with the most votes for 98% of images: routing by agreement"),
        (dict(objects=2), "The classes of the 2 answers have the tightest posteriors for 97% of images"),
        (dict(parts=0.99), "take the same parts of the image"),
        (dict(moving=0.4, moving_others=0.0), "Poses are dead: 0.4 of 16"),
        (dict(moving=2.0, moving_others=0.0), "Poses are dead but for the added coordinates: 2.0 of 16"),
        (dict(at_iterations=(AtIterations(10, 0.9, 0.1),)), "Routing does not settle: with 10 iterations 10% of"),
        (dict(layers=(LayerHealth("class_caps", 3, 0.03, 0.02, 0.01, 0, 0, 0),)), "nearly uniform: at most 3.0% sharp"),
        (dict(layers=(LayerHealth("class_caps", 3, 0.0, 0.0, 0.0, 0, 0, 0),)), "Routing is uniform: every child"),
        (
            dict(layers=(LayerHealth("conv_caps1", 8, 0.5, 0.2, 0.1, 2, 0, 1), LayerHealth("x", 4, 0, 0, 0, 0, 3, 0))),
            "starved: 2 never on, 1 without a gradient in conv_caps1 (of 8); 3 always on in x (of 4)",
        ),
    ],
)  # fmt: skip
def test_what_is_ill_is_said(changes, words):
    assert words in said(**changes)


def test_what_was_not_measured_is_not_said():
    little = said(
        tightest=None, parts=None, moving=None, moving_others=None, uniform=None, at_iterations=(),
        moves=Moves(None, None, None, None), layers=(LayerHealth("class_caps", 3, None, None, None, 0, 0, 0),),
    )  # fmt: skip
    assert little.count("\n") == 1


def test_the_row_is_flat_and_json_comes_back():
    row = HEALTHY.row()
    assert (row["most_votes"], row["class_caps.sharpness"], row["error_10"], row["same_10"]) == (0.98, 0.8, 0.09, 0.97)
    assert (row["uniform_error"], row["moves_angle"], row["winner_votes"]) == (0.5, 0.7, 0.6)
    assert "primary_caps.sharpness" not in row
    assert HEALTHY.to_json() == planted.RECORD
    assert Health.from_json(planted.RECORD | dict(another=3)) == HEALTHY
    assert replace(HEALTHY, maps=float("nan"), error=1 / 3).to_json()["maps"] is None
    assert replace(HEALTHY, error=1 / 3).to_json()["error"] == 0.3333
    assert replace(HEALTHY, uniform=None).row()["uniform_error"] is None


@pytest.fixture
def figure(monkeypatch: pytest.MonkeyPatch):
    """The last figure that was drawn, before it became a file."""
    seen = []
    save = picture.save
    monkeypatch.setattr(picture, "save", lambda figure, path: seen.append(figure) or save(figure, path))
    return lambda: seen[-1]


def test_the_picture_has_the_numbers(tmp_path, figure):
    assert picture.overview(HEALTHY, "mine", tmp_path / "h.png").stat().st_size > 1000
    votes, layers, iterations = figure().axes
    assert [bar.get_height() for bar in votes.patches] == pytest.approx([60, 30, 10])
    by_image, alike = layers.containers
    assert [bar.get_height() for bar in by_image] == pytest.approx([5, 60])
    assert [bar.get_height() for bar in alike] == pytest.approx([5, 20])
    assert list(iterations.lines[0].get_ydata()) == pytest.approx([70, 8, 9])
    assert list(iterations.lines[1].get_ydata()) == pytest.approx([8])
    assert "mine: The answer is the class with the most votes" in figure().get_suptitle()


def test_the_picture_without_labels_or_iterations(tmp_path, figure):
    unlabelled = tuple(replace(one, error=None) for one in HEALTHY.at_iterations)
    picture.overview(replace(HEALTHY, error=None, at_iterations=unlabelled), "mine", tmp_path / "h.svg")
    assert list(figure().axes[2].lines[0].get_ydata()) == pytest.approx([75, 0, 3])
    picture.overview(replace(HEALTHY, at_iterations=()), "mine", tmp_path / "h.pdf")
    with pytest.raises(ValueError, match="must end in"):
        picture.overview(HEALTHY, "mine", tmp_path / "h.txt")

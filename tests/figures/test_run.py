"""Pictures hold what was recorded: looked at as figures, and once as the PNG that is written."""

import csv
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from vbcaps.figures import run as pictures

CLASSES = ("circle", "square", "triangle")
EVALUATION = dict(
    error=0.25,
    per_class=[dict(name=name) for name in CLASSES],
    confusion=[[8, 2, 0], [1, 5, 0], [0, 2, 2]],
)


@pytest.fixture
def figure(monkeypatch: pytest.MonkeyPatch):
    """The last figure that was drawn, before it became a PNG."""
    seen = []
    save = pictures.save
    monkeypatch.setattr(pictures, "save", lambda figure, path: seen.append(figure) or save(figure, path))
    return lambda: seen[-1]


def metrics(folder: Path, rows: list[dict]) -> Path:
    folder.mkdir(exist_ok=True)
    with open(folder / "metrics.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, ("epoch", "loss", "train_error", "validation_error"))
        writer.writeheader()
        writer.writerows(rows)
    return folder


def lines(axes) -> dict[str, list[float]]:
    return {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}


def test_curves_are_the_columns_of_the_file(tmp_path, figure):
    rows = [dict(epoch=e, loss=2 / e, train_error=0.5 / e, validation_error=0.6 / e) for e in (1, 2, 3)]
    pictures.curves([metrics(tmp_path, rows)], tmp_path / "curves.png")
    loss, error = figure().axes
    assert lines(loss) == {"training": pytest.approx([2, 1, 2 / 3])}
    assert lines(error) == {"training": pytest.approx([50, 25, 50 / 3]), "validation": pytest.approx([60, 30, 20])}
    assert list(loss.get_lines()[0].get_xdata()) == [1, 2, 3]


def test_curves_of_several_runs_are_one_line_each_and_one_word_in_the_legend(tmp_path, figure):
    runs = [metrics(tmp_path / str(k), [dict(epoch=1, loss=k, train_error=0.1 * k)]) for k in (1, 2)]
    pictures.curves(runs, tmp_path / "curves.png")
    loss, error = figure().axes
    assert [line.get_ydata()[0] for line in loss.get_lines()] == [1, 2]
    assert [text.get_text() for text in error.get_legend().get_texts()] == ["training"]


def test_curves_of_an_empty_table_say_so(tmp_path, figure):
    pictures.curves([metrics(tmp_path, [])], tmp_path / "curves.png")
    for axes in figure().axes:
        assert [text.get_text() for text in axes.texts] == ["nothing was recorded"]


def test_confusion_shows_counts_rows_as_truth_and_the_error(tmp_path, figure):
    pictures.confusion(EVALUATION, tmp_path / "confusion.png")
    (axes,) = figure().axes
    written = {text.get_position(): text.get_text() for text in axes.texts}  # (column, row)
    assert written == {(0, 0): "8", (1, 0): "2", (0, 1): "1", (1, 1): "5", (1, 2): "2", (2, 2): "2"}
    np.testing.assert_allclose(axes.images[0].get_array()[2], [0, 0.5, 0.5])
    assert [label.get_text() for label in axes.get_yticklabels()] == list(CLASSES)
    assert axes.get_title(loc="left") == "25.00% error on 20 images"


def test_confusion_without_an_image_of_some_class(tmp_path, figure):
    pictures.confusion(EVALUATION | dict(confusion=[[3, 0, 0], [0, 0, 0], [0, 0, 1]]), tmp_path / "confusion.png")
    assert np.isfinite(figure().axes[0].images[0].get_array()).all()


def test_confusion_of_another_number_of_classes_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="3 by 3 for 3 classes"):
        pictures.confusion(EVALUATION | dict(confusion=[[1]]), tmp_path / "confusion.png")
    assert not list(tmp_path.iterdir())


def test_predictions_name_class_and_probability_and_mark_errors(tmp_path, figure):
    scores = np.array([[0.9, 0.1, 0.0], [0.2, 0.7, 0.1], [0.6, 0.3, 0.1]])
    images = np.arange(3 * 4 * 4, dtype=np.uint8).reshape(3, 1, 4, 4)
    pictures.predictions(images, scores, CLASSES, tmp_path / "predictions.png", labels=[[0], [1], [2]])
    titles = [(axes.get_title(), axes.title.get_color()) for axes in figure().axes]
    assert titles == [
        ("circle\n90%", pictures.GREEN),
        ("square\n70%", pictures.GREEN),
        ("circle\n60%, is triangle", pictures.RED),
    ]
    for axes, image in zip(figure().axes, images, strict=True):
        np.testing.assert_array_equal(axes.images[0].get_array(), image[0])


def test_names_are_no_mathematics(tmp_path, figure):
    names = ["$_$", "$5 $10"]
    rows = [dict(name=name) for name in names]
    pictures.confusion(dict(confusion=[[1, 0], [0, 1]], per_class=rows, error=0.0), tmp_path / "c.png")
    scores = np.array([[0.9, 0.1], [0.1, 0.9]])
    pictures.predictions(np.zeros((2, 1, 4, 4), np.uint8), scores, names, tmp_path / "p.png", labels=[[0], [0]])


def test_predictions_of_colour_stereo_and_a_single_image(tmp_path, figure):
    colour = np.random.default_rng(0).integers(0, 256, (1, 3, 5, 5), dtype=np.uint8)
    pictures.predictions(colour, np.array([[1.0, 0.0]]), ("a", "b"), tmp_path / "one.png")
    np.testing.assert_array_equal(figure().axes[0].images[0].get_array(), colour[0].transpose(1, 2, 0))
    pictures.predictions(colour[:, :2], np.array([[1.0, 0.0]]), ("a", "b"), tmp_path / "two.png")
    assert figure().axes[0].images[0].get_array().shape == (5, 10)


def test_predictions_need_a_row_of_scores_for_each_image(tmp_path):
    with pytest.raises(ValueError, match=r"probabilities must be \(n, classes\) = \(2, 3\)"):
        pictures.predictions(np.zeros((2, 1, 4, 4)), np.zeros((1, 3)), CLASSES, tmp_path / "p.png")


def test_the_png_is_whole_readable_and_alone(tmp_path):
    path = pictures.confusion(EVALUATION, tmp_path / "new folder" / "confusion.png")
    with Image.open(path) as image:
        image.load()
        assert image.format == "PNG"
        assert min(image.size) > 400
        assert len(image.convert("RGB").getcolors(1 << 20)) > 20
    assert [p.name for p in path.parent.iterdir()] == ["confusion.png"]


def test_without_matplotlib_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(pictures.NoMatplotlib, match=r"pip install 'vbcaps\[plot\]'"):
        pictures.confusion(EVALUATION, tmp_path / "confusion.png")

"""`vbcaps routing`, on networks that train in a second and on one of the package."""

import shutil
import sys

import numpy as np
import pytest
import tiny
from PIL import Image
from typer.testing import CliRunner

import vbcaps
from vbcaps.cli.main import app
from vbcaps.training.loop import fit


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("routing")
    with tiny.in_place_of_data():
        for name, fields in dict(
            caps={}, em=dict(routing="em"), cnn=dict(network="cnn", iters=3, backend="auto")
        ).items():
            fit(tiny.recipe(epochs=1, **fields), folder / name, device="cpu")
    pixels = tiny.split(3, 0).images.numpy()
    np.save(folder / "images.npy", pixels)
    np.save(folder / "image.npy", pixels[:1])
    Image.fromarray(pixels[0, 0]).save(folder / "image.png")
    (folder / "text.png").write_text("no image")
    return folder


@pytest.fixture
def place(made, tmp_path, monkeypatch):
    """A copy of the folder, in which commands run."""
    shutil.copytree(made, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def run(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["routing", *map(str, words)], env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return " ".join(result.output.replace("│", " ").split())


def test_it_says_the_answer_and_draws_in_the_format_of_the_suffix(place):
    model = vbcaps.load("caps")
    scores = model.predict("image.png")[0]
    answer = f"{model.classes[int(scores.argmax())]}, probability {100 * float(scores.max()):.2f}%"
    said = run("image.png", "--model", "caps")
    assert "weights caps/last.safetensors: 1 epoch of tiny" in said
    assert said.endswith(f"{answer} drew routing.png")
    assert Image.open("routing.png").width == 2100
    assert run("image.npy", "--model", "em/last.safetensors", "-o", "new/figure.pdf").endswith("drew new/figure.pdf")
    assert (place / "new" / "figure.pdf").read_bytes().startswith(b"%PDF")
    assert answer in run("image.png", "--model", "caps", "--class", "bottom", "--out", "r.svg")  # the answer stays
    assert "<svg" in (place / "r.svg").read_text()


def test_without_a_name_it_is_the_newest_run_or_a_small_network_of_the_package(place):
    assert "weights fashion_laptop: " in run("image.png")
    shutil.copytree("caps", "runs/caps-1")
    assert "weights runs/caps-1/last.safetensors: " in run("image.png")


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (("none.png",), 2, "none.png is no file"),
        (("none/none.npy",), 2, "none/none.npy is no file"),
        (("text.png",), 1, "text.png"),
        (("images.npy",), 2, "routing is drawn of one image, got 3: give one of them"),
        (("image.png", "--model", "cnn"), 2, "is a CNN, which has no routing: draw a capsule network"),
        (("image.png", "--model", "fashion_lap"), 1, "no weights called 'fashion_lap' come with the package"),
        (("image.png", "--model", "none/run"), 1, "none/run"),
        (("image.png", "-o", "r.jpg"), 2, "the picture's name must end in .png, .pdf or .svg, got r.jpg"),
        (("image.png", "-o", "r"), 2, "the picture's name must end in .png, .pdf or .svg, got r"),
        (("image.png", "-o", "text.png/r.png"), 1, "no figure: "),
        (("image.png", "--class", "tip"), 2, "label must be one of top, middle, bottom"),
        (("image.png", "--device", "gpu"), 2, "gpu"),
    ],
)
def test_what_cannot_be_done_is_one_sentence(place, words, code, message):
    words = words if "--model" in words else (*words, "--model", "caps")
    said = run(*words, code=code)
    assert message in said
    assert "Traceback" not in said
    assert not list(place.glob("r*"))  # nothing is drawn


def test_a_wrong_suffix_is_said_before_any_network_is_read(place, monkeypatch):
    monkeypatch.setattr(vbcaps, "load", None)
    assert "must end in" in run("image.png", "-o", "r.jpg", code=2)


def test_without_matplotlib_it_says_what_to_install(place, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "no figure: pictures need matplotlib: pip install 'vbcaps[plot]'" in run(
        "image.png", "--model", "caps", code=1
    )

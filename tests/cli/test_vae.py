"""`vbcaps reconstruct`, `tweak` and `sample`, on a Capsule-VAE that trains in a second."""

import numpy as np
import pytest
import tiny
from PIL import Image
from typer.testing import CliRunner

from vbcaps.cli.main import app
from vbcaps.training.loop import fit


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vae")
    with tiny.in_place_of_data():
        recipe = tiny.recipe(network="vae", standardise="none", decoder=8, eta=0.1, epochs=1)
        fit(recipe, folder / "vae", device="cpu")
        fit(tiny.recipe(epochs=1), folder / "caps", device="cpu")
    np.save(folder / "images.npy", tiny.split(3, 0).images.numpy())
    np.save(folder / "image.npy", tiny.split(1, 0).images.numpy())
    return folder


def run(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return " ".join(result.output.replace("│", " ").split())


def test_reconstruct_prints_the_error_of_each_image_and_draws(run_folder, tmp_path):
    out = tmp_path / "x.png"
    said = run("reconstruct", run_folder / "images.npy", "--weights", run_folder / "vae", "--out", out)
    assert f"{run_folder / 'images.npy'}[2]" in said
    assert "squared error a pixel" in said
    assert f"drew {out}" in said
    assert Image.open(out).size[0] > 100


def test_tweak_draws_all_entries_or_one(run_folder, tmp_path):
    whole, one = tmp_path / "all.png", tmp_path / "one.png"
    words = ("tweak", run_folder / "image.npy", "--weights", run_folder / "vae")
    run(*words, "--out", whole)
    run(*words, "--entry", 3, "--values", "-1,0,0.5", "--class", "top", "--out", one)
    assert Image.open(whole).size[1] > 2 * Image.open(one).size[1]


def test_sample_draws_every_class(run_folder, tmp_path):
    run("sample", "--weights", run_folder / "vae", "--count", 3, "--source", "prior", "--out", tmp_path / "s.png")
    assert (tmp_path / "s.png").exists()


def test_eval_says_the_squared_error(run_folder):
    with tiny.in_place_of_data():
        said = run("eval", run_folder / "vae", "--device", "cpu")
    assert "squared error 0." in said
    assert " a pixel" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("tweak", "image.npy", "--weights", "vae", "--entry", "16"),
            "entry must be a pose entry from 0 to 15, got 16",
        ),
        (("tweak", "image.npy", "--weights", "vae", "--values", "a,b"), "such as -0.5,0,0.5; got 'a,b'"),
        (("tweak", "image.npy", "--weights", "vae", "--values", "0,nan"), "must be finite numbers"),
        (("tweak", "image.npy", "--weights", "vae", "--values", "inf"), "such as -0.5,0,0.5; got 'inf'"),
        (("tweak", "images.npy", "--weights", "vae"), "one image, got 3: give them one by one"),
        (("tweak", "image.npy", "--weights", "vae", "--class", "tip"), "or a number from 0 to 2; got 'tip'"),
        (("sample", "--weights", "vae", "--source", "x"), "source must be one of ('class', 'prior'), got 'x'"),
        (("reconstruct", "image.npy", "--weights", "caps"), "is a CapsNet without a decoder: load a Capsule-VAE"),
        (("tweak", "image.npy", "--weights", "fashion"), "fashion is a CapsNet without a decoder"),
        (("sample", "--weights", "caps"), "train one with `vbcaps train vae_mnist_laptop`"),
    ],
)
def test_what_cannot_be_done_says_what_can(run_folder, monkeypatch, words, message):
    monkeypatch.chdir(run_folder)
    assert message in run(*words, code=2)

"""The command line on a network that names two overlapping objects in an image."""

import csv
import json
import shutil

import pytest
import tiny
import torch
from PIL import Image
from typer.testing import CliRunner

import vbcaps
from vbcaps.cli.main import app
from vbcaps.data import overlapping
from vbcaps.uncertainty import fit_densities, scores
from vbcaps.weights.card import card_text
from vbcaps.weights.export import export

FLAGS = dict(
    data_folder="none", device="cpu", objects=2, crop=26, image_size=22, arch="4,2,2,2", batch=8, epochs=2, lr=0.01,
    backend="reference", warmup=0.5, validation=0.25,
)  # fmt: skip


def run(*words: object, code: int = 0) -> str:
    with tiny.in_place_of_data():
        result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200", "RANK": None})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return " ".join(result.output.replace("│", " ").split())


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run of `vbcaps train`, and three images of pairs."""
    folder = tmp_path_factory.mktemp("overlap")
    words = [word for name, value in FLAGS.items() for word in ("--" + name.replace("_", "-"), value)]
    said = run("train", "overlap_laptop", *words, "--out", folder / "run")
    pairs = overlapping(tiny.split(30, 2), 2, 26)
    for k in range(3):
        Image.fromarray(pairs.images[k, 0].numpy()).save(folder / f"{k}.png")
    (folder / "said.txt").write_text(said)
    return folder


@pytest.fixture
def place(made, tmp_path, monkeypatch):
    shutil.copytree(made, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def test_a_run_is_trained_tested_and_drawn(made):
    said = (made / "said.txt").read_text()
    result = json.loads((made / "run" / "result.json").read_text())["test"]
    assert f"test: error {100 * result['error']:.2f}%" in said
    assert f"{100 * result['objects_found']:.2f}% of the objects are named" in said
    for name in ("confusion.png", "curves.png", "predictions.png", "routing.png"):
        assert (made / "run" / name).exists(), name


def test_eval_gives_the_same_error_and_the_error_by_overlap(place):
    said, result = run("eval", "run", "--json", "e.json", "--csv", "e.csv"), vbcaps.load("run").about
    assert f"error {100 * result['test_error']:.2f}%" in said
    assert "an image is right if its 2 most probable classes are those of its objects" in said
    assert said.count("of the foreground is shared: error") == 4
    assert "kappa" not in said
    assert json.loads((place / "e.json").read_text())["error"] == result["test_error"]


def test_eval_on_images_of_one_object_says_why_not(place):
    said = run("eval", "run", "--data", place, code=2)
    assert "names 2 objects in an image, and the images in" in said
    assert "show one each: test it without --data" in said


def test_predict_names_all_objects(place):
    model = vbcaps.load("run")
    found = model.predict(["0.png", "1.png", "2.png"])
    said = run("predict", "0.png", "1.png", "2.png", "--weights", "run", "--csv", "p.csv", "--json", "p.json",
               "--picture", "p.png")  # fmt: skip
    assert "image objects probability next" in said
    with open("p.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    of_json = json.loads((place / "p.json").read_text())["predictions"]
    for k, score in enumerate(found):
        a, b, c = score.argsort(descending=True).tolist()
        sure = [f"{100 * float(score[j]):.2f}%" for j in (a, b, c)]
        names = [model.classes[j] for j in (a, b, c)]
        assert f"{k}.png {names[0]} + {names[1]} {sure[0]} {sure[1]} {names[2]} {sure[2]}" in said
        assert (rows[k]["class 1"], rows[k]["class 2"]) == (names[0], names[1])
        assert float(rows[k]["probability 2"]) == pytest.approx(float(score[b]), abs=1e-6)
        assert of_json[k]["objects"] == names[:2]
    assert (place / "p.png").exists()


def test_routing_draws_the_class_capsules_of_the_objects(place, monkeypatch):
    from vbcaps.figures import routing

    seen = []
    monkeypatch.setattr(routing, "_parts", lambda *args, parts=routing._parts: (seen.append(args[-1]), parts(*args))[1])
    said, model = run("routing", "0.png", "--model", "run"), vbcaps.load("run")
    score = model.predict("0.png")[0]
    best = score.topk(2)
    assert seen == [best.indices.tolist()]
    first, second = (f"{100 * p:.2f}%" for p in best.values.tolist())
    assert f"{model.together(score)}, probability {first} and {second}" in said


def test_uncertainty_says_that_it_is_of_one_answer(place):
    assert "names 2 objects in an image: scores of uncertainty" in run("uncertainty", "run", code=2)
    model, images = vbcaps.load("run"), torch.zeros(2, 26, 26, dtype=torch.uint8)
    for ask in (lambda: scores(model, images), lambda: fit_densities(model, images, torch.tensor([0, 1]))):
        with pytest.raises(ValueError, match="are of networks that give one answer"):
            ask()


def test_an_exported_network_gives_the_probability_of_each_class(place):
    model = vbcaps.load("run")
    done = export(model, "m.pt2")
    images = overlapping(tiny.split(30, 2), 2, 26).images[:3]
    found = torch.export.load("m.pt2").module()(images)
    torch.testing.assert_close(found, model.predict(images), rtol=1e-4, atol=1e-4)
    assert done.facts["input"]["shape"] == ["n", 1, 26, 26]


def test_the_card_says_what_the_error_counts(place):
    model = vbcaps.load("run")
    text = card_text(model, "user/name", None)
    assert "It names 2 overlapping objects in an image, of different classes of 3: top, middle, bottom." in text
    assert f"In {100 * model.about['test_error']:.2f}% of images, put together from the test images of" in text
    assert "not all objects are named rightly" in text

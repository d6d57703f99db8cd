"""`vbcaps uncertainty` from end to end, on a network and images that take a second."""

import csv
from contextlib import chdir
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tiny
import torch
from PIL import Image
from typer.testing import CliRunner

import vbcaps
from vbcaps.cli.main import app
from vbcaps.cli.uncertainty import chosen, strange_images
from vbcaps.data import Dataset, Split, load_dataset
from vbcaps.uncertainty import aupr, auroc, ece, fpr95, look, nll, risk_coverage, scores
from vbcaps.weights.model import Model


def run(*words: object, code: int = 0) -> str:
    """What `vbcaps uncertainty` prints on both streams; it must end with ``code``."""
    arguments = ["uncertainty", *map(str, words), "--device", "cpu"]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "300"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return " ".join(result.output.replace("│", " ").split())


@pytest.fixture(autouse=True)
def tiny_data(tmp_path):
    """Without monkeypatch: a test that has it patches the same name, which must be undone before this is."""
    with chdir(tmp_path), tiny.in_place_of_data():
        yield


@pytest.fixture(scope="module")
def model():
    """A network with random weights, and a temperature."""
    torch.manual_seed(0)
    recipe, train = tiny.recipe(arch=(8, 4, 4, 4), dataset="mnist"), tiny.dataset().train
    view = recipe.view().fit(train)
    net = recipe.net(1, 3)
    net(view.test(train.images))
    return Model(net.eval(), recipe, tiny.CLASSES, view, dict(temperature=0.5))


@pytest.fixture
def weights(model, tmp_path):
    return model.save(tmp_path / "w.safetensors")


@pytest.fixture
def others(tmp_path):
    """A folder of pictures in colour, of another size."""
    random = np.random.default_rng(0)
    (tmp_path / "others").mkdir()
    for k in range(12):
        Image.fromarray(random.integers(0, 256, (30, 40, 3), dtype=np.uint8)).save(tmp_path / "others" / f"{k}.png")
    return tmp_path / "others"


def test_the_test_set_is_measured_before_and_after_the_temperature(model, weights):
    said, test = run(weights), tiny.dataset().test
    z = look(model, test.images).logits
    before, after = z.softmax(1), (z / 0.5).softmax(1)
    assert "tiny, the test set of mnist (made up)" in said
    assert "measure T = 1 T = 0.5" in said
    error = 100 * float((z.argmax(1) != test.labels).double().mean())
    assert f"error {error:.2f}% {error:.2f}%" in said
    for name, adaptive in (("ECE, 15 bins", False), ("adaptive ECE", True)):
        measured = (100 * ece(p, test.labels, adaptive=adaptive) for p in (before, after))
        assert "{} {:.2f}% {:.2f}%".format(name, *measured) in said
    assert f"NLL {nll(before, test.labels):.4f} {nll(after, test.labels):.4f}" in said
    assert "temperature 0.5, fitted on held-out images" in said
    assert "flatter" not in said
    assert "scores of the posterior need" not in said
    wrong = z.argmax(1) != test.labels
    for name, x in scores(model, test.images).items():
        area = 100 * risk_coverage(x, wrong).area()
        assert f"{name} {auroc(x[~wrong], x[wrong]):.3f} {area:.2f}%" in said


def test_strangers_are_told_by_each_score(model, weights, others):
    said = run(weights, "--strangers", "sample, others", "--images", 25)
    assert "25 of 30 test images" in said
    assert "sample: AUROC AUPR FPR95 others: AUROC AUPR FPR95" in said
    test = tiny.dataset().test.images[chosen(30, 25)]
    pictures = sorted(others.iterdir())
    strange = load_dataset("sample").test.images[chosen(1000, 25)], [pictures[k] for k in chosen(12, 25).tolist()]
    others_scores = [scores(model, some) for some in strange]
    for name, x in scores(model, test).items():
        row = said[said.index(f" {name} ") + 1 :].split()[: 3 + 6]
        found = [f(x, other[name]) for other in others_scores for f in (auroc, aupr, fpr95)]
        assert [float(cell) for cell in row[3:]] == pytest.approx(found, abs=6e-4), name


def test_densities_are_fitted_first_and_saved(model, weights, others):
    said = run(
        weights, "--densities", "class_caps.m,logits+conv_caps2.m", "--save", "d.safetensors", "--picture", "p.png"
    )
    fitted = "densities of class_caps.m, logits+conv_caps2.m, one covariance for all classes, fitted to 48 training"
    assert f"{fitted} images wrote d.safetensors" in said
    assert said.endswith("drew p.png")
    with Image.open("p.png") as image:
        assert image.width > image.height
    kept = vbcaps.load("d.safetensors")
    assert list(kept.densities) == ["class_caps.m", "logits+conv_caps2.m"]
    assert kept.temperature == 0.5
    assert all(torch.equal(x, model.net.state_dict()[name]) for name, x in kept.net.state_dict().items())
    assert "density.class_caps.m" in run("d.safetensors", "--images", 20)


def test_a_density_for_each_class_takes_the_place_of_a_tied_one_and_says_so(weights):
    run(weights, "--densities", "class_caps.m", "--save", "tied.safetensors")
    said = run("tied.safetensors", "--densities", "class_caps.m", "--per-class", "--save", "each.safetensors")
    assert "densities of class_caps.m, a covariance for each class, fitted to 48 training images" in said
    assert "the density of class_caps.m in the weights, one covariance for all classes, is replaced" in said
    assert vbcaps.load("tied.safetensors").densities["class_caps.m"].tied
    assert not vbcaps.load("each.safetensors").densities["class_caps.m"].tied
    assert "is replaced" not in run(weights, "--densities", "class_caps.m", "--per-class")


def test_a_temperature_of_the_test_set_is_said_to_flatter(model, tmp_path):
    about = dict(temperature=0.5, temperature_from="half of the test images")
    other = Model(model.net, model.recipe, tiny.CLASSES, model.view, about)
    said = run(other.save(tmp_path / "half.safetensors"))
    assert "temperature 0.5, fitted on half of the test images: these flatter it" in said


def test_images_get_a_row_each_and_all_scores_as_csv(model, weights, others):
    said = run(weights, others / "3.png", others / "5.png", "--csv", "s.csv")
    assert said.endswith("wrote s.csv")
    files = [others / "3.png", others / "5.png"]
    expected, p = scores(model, files), model.predict(files)
    with open("s.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [*rows[0]] == ["image", "class", "probability", *expected]
    for k, row in enumerate(rows):
        label = tiny.CLASSES[int(p[k].argmax())]
        assert (row["image"], row["class"]) == (str(files[k]), label)
        assert f"{files[k]} {label} {100 * p[k].max():.2f}%" in said
        assert float(row["probability"]) == pytest.approx(float(p[k].max()), rel=1e-4)
        for name, x in expected.items():
            assert float(row[name]) == pytest.approx(float(x[k]), rel=1e-3, abs=1e-5), name


def test_strange_images_have_the_networks_size_and_channels(model, others, monkeypatch):
    """Grey becomes colour and colour grey; a network with two channels gets the grey image twice."""
    pairs = Split(torch.randint(0, 256, (9, 2, 48, 48), dtype=torch.uint8), torch.zeros(9, dtype=torch.int64))
    real = load_dataset

    def load(name, folder=None):
        return Dataset("smallnorb", pairs, pairs, ("toy",), "made up") if name == "smallnorb" else real(name, folder)

    monkeypatch.setattr("vbcaps.data.load_dataset", load)
    for channels in (1, 2, 3):
        net = model.recipe.net(channels, 3)
        other = Model(net, model.recipe, tiny.CLASSES, model.view)
        for name, count in (("sample", 7), ("smallnorb", 7), (str(others), 7)):
            pixels = strange_images(other, name, count, None)
            assert pixels.shape == (7, channels, 22, 22)
            assert pixels.dtype == torch.uint8
            assert channels != 2 or torch.equal(pixels[:, 0], pixels[:, 1])
            assert torch.equal(other.read(pixels), pixels)
    assert len(strange_images(model, "smallnorb", 0, None)) == 9
    assert torch.equal(chosen(100, 7), chosen(100, 7))
    assert chosen(5, 0).tolist() == chosen(5, 9).tolist() == [0, 1, 2, 3, 4]


def test_a_network_without_temperature_or_posterior_is_measured_too(tmp_path):
    recipe = tiny.recipe(network="cnn", arch=(8, 8, 8, 8), backend="auto", iters=3)
    view = recipe.view().fit(tiny.dataset().train)
    Model(recipe.net(1, 3).eval(), recipe, tiny.CLASSES, view).save(tmp_path / "c.safetensors")
    said = run("c.safetensors", "--images", 10)
    assert "there is no temperature: training with a --validation share fits one" in said
    assert "measure T = 1 error" in said
    assert "energy" in said
    assert "elbo" not in said
    assert "scores of the posterior need a capsule network with VB routing, got a CNN" in said


def test_em_is_said_to_have_no_scores_of_a_posterior(tmp_path, others):
    recipe = tiny.recipe(routing="em", learn=())
    view = recipe.view().fit(tiny.dataset().train)
    Model(recipe.net(1, 3).eval(), recipe, tiny.CLASSES, view).save(tmp_path / "e.safetensors")
    sentence = "scores of the posterior need a capsule network with VB routing, got routing='em'"
    assert sentence in run("e.safetensors", "--images", 10)
    assert sentence in run("e.safetensors", others / "3.png")


@pytest.mark.parametrize(
    ("own", "name"),
    [("svhn", "svhn"), ("fashion-mnist", "sample"), ("sample", "fashion-mnist"), ("affnist", "mnist")],
)
def test_a_networks_own_images_are_no_strangers(model, tmp_path, own, name):
    other = Model(model.net, replace(model.recipe, dataset=own, image_size=None), tiny.CLASSES, model.view)
    path = other.save(tmp_path / "own.safetensors")
    assert f"'{name}' are this network's own images, no strangers" in run(path, "--strangers", name, code=2)


def test_the_folder_that_a_network_was_trained_on_has_no_strangers(model, tmp_path, others):
    other = Model(model.net, replace(model.recipe, data=str(others)), tiny.CLASSES, model.view)
    path = other.save(tmp_path / "own.safetensors")
    assert "'others' are this network's own images, no strangers" in run(path, "--strangers", "others", code=2)


def test_what_cannot_be_done_is_said(weights, others, monkeypatch):
    image = others / "1.png"
    for words, message in (
        (
            (weights, "--strangers", "mnits"),
            "'mnits' is neither a dataset nor a folder of images; did you mean 'mnist'",
        ),
        ((weights, "--strangers", ""), "a name is empty: give datasets or folders of images"),
        ((weights, "--strangers", "svhn,"), "a name is empty: give datasets or folders of images"),
        ((weights, "--strangers", "svhn,mnist"), "'mnist' are this network's own images, no strangers"),
        ((weights, "--per-class"), "it is about the densities of --densities"),
        ((weights, image, "--strangers", "mnist"), "it needs the test set: it cannot be combined with IMAGE"),
        ((weights, image, "--picture", "p.png"), "it needs the test set: it cannot be combined with IMAGE"),
        ((weights, "--csv", "s.csv"), "it writes the scores of images: name them after MODEL"),
        ((weights, "--save", "s.safetensors"), "it writes weights with the densities that --densities fits"),
        ((weights, "--densities", "class_cap.m"), "no features class_cap.m; it has conv_caps1.m"),
        ((weights, "--densities", "class_caps.m", "--images", "3"), "needs at least two images of each"),
        ((weights, "--images", "-1"), "--images"),
    ):
        assert message in run(*words, code=2), message
    assert "no weights called 'fashon' come with the package" in run("fashon", code=1)
    assert "is missing" in run(weights, "--strangers", "svhn", "--data-folder", "nowhere", code=1)
    other = Dataset("tiny", tiny.split(48, 1), tiny.split(30, 2), ("a", "b", "c"), "made up")
    monkeypatch.setattr("vbcaps.training.loop.load_dataset", lambda *_, **__: other)
    assert "tells top, middle, bottom apart in images of 1 channels; the data have a, b, c" in run(weights, code=1)
    assert not Path("p.png").exists()

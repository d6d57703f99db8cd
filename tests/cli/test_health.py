"""`vbcaps health` from end to end, on a network and images that take a second."""

import json
from contextlib import chdir
from dataclasses import replace

import pytest
import tiny
import torch
from PIL import Image
from typer.testing import CliRunner

import vbcaps
from vbcaps.cli.main import app
from vbcaps.cli.uncertainty import some_of
from vbcaps.health import Health
from vbcaps.health.findings import findings
from vbcaps.weights.model import Model


def run(*words: object, code: int = 0, columns: int = 300) -> str:
    """What `vbcaps health` prints on both streams; it must end with ``code``."""
    arguments = ["health", *map(str, words), "--device", "cpu"]
    result = CliRunner().invoke(app, arguments, env={"COLUMNS": str(columns)})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return " ".join(result.output.replace("│", " ").split())


@pytest.fixture(autouse=True)
def tiny_data(tmp_path):
    """Without monkeypatch: a test that has it patches the same name, which must be undone before this is."""
    with chdir(tmp_path), tiny.in_place_of_data():
        yield


def made(**fields: object) -> Model:
    torch.manual_seed(0)
    recipe, train = tiny.recipe(arch=(8, 4, 4, 4), dataset="mnist", **fields), tiny.dataset().train
    view = recipe.view().fit(train)
    net = recipe.net(1, 3)
    net(view.test(train.images))
    return Model(net.eval(), recipe, tiny.CLASSES, view)


@pytest.fixture
def weights(tmp_path):
    return made().save(tmp_path / "w.safetensors")


def test_the_page_says_what_was_measured(weights, tmp_path):
    said, test = run(weights, "--json", "h.json", "--plot", "h.png"), tiny.dataset().test
    found = vbcaps.load(weights).health(test.images, test.labels, of="30 test images of mnist")
    assert "on 30 test images of mnist (made up):" in said
    for sentence in findings(found):
        assert f"- {sentence}." in said
    for layer in found.layers[1:]:
        shares = f"{100 * layer.sharpness:.1f}% {100 * layer.information_share:.1f}% {layer.information:.3f}"
        assert f"{layer.name} {layer.types} {shares} {layer.never_on}" in said
    for point in found.at_iterations:
        name = f"{point.iters} (as trained)" if point.iters == 2 else f"{point.iters}"
        assert f"{name} {100 * point.error:.2f}% {100 * point.same:.1f}%" in said
    written = json.loads((tmp_path / "h.json").read_text())
    assert Health.from_json(written).to_json() == found.to_json()
    assert written["weights"] == str(weights)
    with Image.open(tmp_path / "h.png") as image:
        image.load()


def test_some_of_the_images_are_the_same_each_time_and_the_record_is_kept(weights, tmp_path):
    said = run(weights, "--images", 12, "--save", "kept.safetensors")
    assert "on 12 test images of mnist" in said
    test = some_of(tiny.dataset().test, 12)
    model = vbcaps.load(tmp_path / "kept.safetensors")
    found = model.health(test.images, test.labels, of="12 test images of mnist")
    assert model.about["health"] == found.to_json()
    assert Health.from_json(model.about["health"]).images == 12


def test_a_cnn_has_no_capsules(tmp_path):
    weights = made(network="cnn", iters=3, backend="auto").save(tmp_path / "cnn.safetensors")
    said = run(weights, code=2)
    assert "a CNN has no capsules, so there is nothing to say of their health: give a capsule network" in said
    assert "Traceback" not in said


def test_what_cannot_be_written_or_read_is_said_before_anything_is_measured(weights, tmp_path):
    assert "there is no folder none" in run(weights, "--json", "none/h.json", code=1)
    assert "must end in .png, .pdf or .svg" in run(weights, "--plot", "h.txt", code=2)
    assert "no weights called 'fashoin'" in run("fashoin", code=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["w.safetensors"]


def test_no_test_images_are_an_error(weights):
    whole = tiny.dataset()
    empty = replace(whole, test=whole.test.take(torch.arange(0)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vbcaps.training.loop.load_dataset", lambda *_, **__: empty)
        assert "there are no test images of mnist" in run(weights, code=1)


def test_the_help_is_readable():
    said = run("--help", columns=100)
    for word in ("MODEL", "--images", "--json", "--plot", "--save", "--data-folder"):
        assert word in said

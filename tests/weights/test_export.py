"""Exported networks: their preprocessing, their files in other programs, what the files say, and clear errors."""

import json
from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
from typer.testing import CliRunner

import vbcaps
from vbcaps.cli.main import app
from vbcaps.data import View
from vbcaps.training.files import RunError
from vbcaps.weights import export as exporting
from vbcaps.weights.model import Model
from vbcaps.weights.preprocess import CentralView, Deployed


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(threads)


def untrained(**fields) -> Model:
    """A network with running statistics of some images, and a temperature."""
    recipe = tiny.recipe(**dict(iters=1) | fields)
    split = tiny.split(48, 1)
    view, net = recipe.view().fit(split), recipe.net(1, 3)
    with torch.no_grad():
        for _ in range(20):
            net.train()(view.test(split.images))
    return Model(net.eval(), recipe, tiny.CLASSES, view, dict(temperature=1.7, test_error=0.25)).eval()


def cnn() -> Model:
    """The network that is exported fastest."""
    return untrained(network="cnn", iters=3, backend="auto")


# --- preprocessing ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", [36, 24, 19, 20])
@pytest.mark.parametrize(
    "fields",
    [
        *(dict(standardise=how) for how in ("image", "crop", "dataset", "none")),
        *(dict(standardise=how, fill="mean") for how in ("image", "dataset", "none")),
        *(dict(standardise=how, fill="edge") for how in ("image", "crop", "dataset")),
        dict(standardise="image", place=True),
    ],
    ids=lambda fields: "-".join(map(str, fields.values())),
)
def test_the_preprocessing_in_the_file_is_the_networks(fields, side):
    images = torch.randint(0, 256, (5, 2, side, side), dtype=torch.uint8)
    images[0] = 7  # an image without contrast
    of_dataset = dict(mean=(0.4, 0.5), std=(0.2, 0.3)) if fields["standardise"] == "dataset" else {}
    view = View(crop=24, **fields, **of_dataset)
    expected = view.test(images)
    torch.testing.assert_close(CentralView(view, side)(images), expected, rtol=0, atol=0)
    torch.testing.assert_close(CentralView(view, side)(images.float() / 255), expected, rtol=0, atol=1e-6)


# --- files -----------------------------------------------------------------------------------------------------------


def test_a_network_in_onnxruntime_gives_the_same_probabilities(tmp_path):
    """Batches of any size, uint8, and what the file says; `-m slow` and the table below have those of the package."""
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    model = untrained()
    done = model.export(tmp_path / "net.onnx")
    session = onnxruntime.InferenceSession(done.path, providers=["CPUExecutionProvider"])
    images = tiny.split(64, 5).images
    for n in (1, 3, 64):
        (found,) = session.run(None, {"images": images[:n].numpy()})
        np.testing.assert_allclose(found, model.predict(images[:n]), atol=1e-5)
    assert done.difference < 1e-5
    (image,), (scores,) = session.get_inputs(), session.get_outputs()
    assert (image.name, image.type, image.shape) == ("images", "tensor(uint8)", ["n", 1, 22, 22])
    assert (scores.name, scores.shape) == ("probabilities", ["n", 3])
    said = session.get_modelmeta().custom_metadata_map
    assert tuple(json.loads(said["classes"])) == model.classes
    assert json.loads(said["recipe"]) == model.recipe.to_json()
    assert json.loads(said["temperature"]) == model.temperature != 1
    assert "resize the shorter side to 22" in json.loads(said["input"])["resizing"]
    assert said["network"] == "tiny"
    assert list(tmp_path.iterdir()) == [done.path]


def test_an_exported_program_gives_the_same_probabilities(tmp_path):
    """Of a network that ONNX cannot have."""
    model = untrained(precision="full")
    done = vbcaps.export(model, tmp_path / "net.pt2", dtype="float32")
    said = {exporting.FACTS: ""}
    run = torch.export.load(done.path, extra_files=said).module()
    images = tiny.split(7, 5).images
    for n in (1, 7):
        torch.testing.assert_close(run(images[:n].float() / 255), model.predict(images[:n]), atol=1e-5, rtol=0)
    facts = json.loads(said[exporting.FACTS])
    assert facts == done.facts
    assert facts["classes"] == list(tiny.CLASSES)
    assert facts["input"]["values"] == "0 to 1"
    assert facts["about"]["test_error"] == 0.25


def test_of_a_vae_the_classifier_is_exported():
    model = untrained(network="vae", standardise="none", decoder=4)
    deployed = Deployed(model.net, model.view, model.temperature, 22)
    images = tiny.split(7, 5).images
    torch.testing.assert_close(deployed(images), model.predict(images), atol=1e-5, rtol=0)
    assert not any("decoder" in name for name, _ in deployed.named_parameters())


def test_a_network_that_places_images_takes_the_side_of_the_image_or_of_its_frame():
    model = untrained(place=True, crop=28, standardise="image")
    assert exporting.checked_side(model, None) == 22
    assert exporting.checked_side(model, 28) == 28
    with pytest.raises(ValueError, match="side must be 22 or 28 for tiny, got 24"):
        vbcaps.export(model, "net.pt2", side=24)
    with pytest.raises(ValueError, match="side must be 22 for tiny, got 28"):
        exporting.checked_side(untrained(), 28)


@pytest.mark.slow
@pytest.mark.parametrize("name", vbcaps.list_models())
def test_every_network_of_the_package_in_onnxruntime(name, tmp_path):
    assert vbcaps.export(name, tmp_path / "net.onnx").difference < exporting.TOLERANCE


# --- what cannot be written ------------------------------------------------------------------------------------------


def test_what_onnx_does_not_have_is_said(tmp_path):
    with pytest.raises(ValueError, match=r"Cholesky factorisations.*format='torch-export' has them"):
        untrained(precision="full").export(tmp_path / "net.onnx")


def test_a_file_that_gives_something_else_is_not_written(tmp_path, monkeypatch):
    """The network of the file has another temperature."""
    model, file = cnn(), tmp_path / "net.pt2"
    file.write_text("what was there")
    right = exporting.as_program

    def wrong(program, facts):
        content, _ = right(program, facts)
        return content, replaced

    def replaced(images):
        with torch.no_grad():
            return exporting.Deployed(model.net, model.view, 1.0, 22)(images)

    monkeypatch.setattr(exporting, "as_program", wrong)
    with pytest.raises(RunError, match=r"net.pt2 is not written: its probabilities differ from PyTorch's by up to 0\."):
        model.export(file)
    assert file.read_text() == "what was there"


def run(*words: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["export", *map(str, words)], env={"COLUMNS": "200"})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return " ".join(result.output.replace("│", " ").split())


def test_the_command_says_what_it_wrote_and_what_it_cannot(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = cnn()
    model.recipe = replace(model.recipe, data="tiny")
    model.save("tiny.safetensors")
    said = run("tiny.safetensors", "-o", "net.pt2", "--input", "float32")
    assert "images n 1 22 22, float32 with values 0 to 1, to probabilities n 3" in said
    assert said.endswith("wrote net.pt2")
    assert torch.export.load("net.pt2").module()(torch.rand(2, 1, 22, 22)).shape == (2, 3)
    assert "format must be given for net.x" in run("tiny.safetensors", "-o", "net.x", code=2)
    assert "format='onnx' writes .onnx files" in run("tiny.safetensors", "-o", "n.pt2", "--format", "onnx", code=2)
    assert "format must be one of" in run("tiny.safetensors", "-o", "net.onnx", "--format", "tf", code=2)
    assert "dtype must be one of ('uint8', 'float32')" in run(
        "tiny.safetensors", "-o", "n.pt2", "--input", "int", code=2
    )
    assert "there is no folder none" in run("tiny.safetensors", "-o", "none/net.pt2", code=1)

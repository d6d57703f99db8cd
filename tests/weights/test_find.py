"""Trained networks by name, by the folder of a run and by file."""

import shutil
import subprocess
import sys

import pytest
import tiny
import torch

import vbcaps
from vbcaps.training.files import RunError
from vbcaps.training.loop import evaluate, fit
from vbcaps.weights import find


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a finished run."""
    folder = tmp_path_factory.mktemp("run") / "tiny"
    with tiny.in_place_of_data():
        fit(tiny.recipe(epochs=2), folder, device="cpu")
    return folder


@pytest.fixture
def package(run, tmp_path, monkeypatch):
    monkeypatch.setattr(find, "FOLDER", tmp_path)
    shutil.copy(run / "last.safetensors", tmp_path / "tiny.safetensors")
    return tmp_path


def test_a_name_gives_the_model_with_its_recipe_and_its_error(package, run):
    model = vbcaps.load("tiny")
    assert not model.training
    assert (model.recipe, model.classes, model.name) == (tiny.recipe(epochs=2), tiny.CLASSES, "tiny")
    assert evaluate(model, tiny.dataset().test).error == model.about["test_error"]
    for other in (run, str(run), run / "last.safetensors"):
        weights = vbcaps.load(other).state_dict()
        assert all(torch.equal(x, weights[name]) for name, x in model.state_dict().items())
        assert vbcaps.load(other).name == str(run / "last.safetensors")


def test_the_best_weights_of_a_run_go_before_the_last(run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    assert find.weights_file(tmp_path / "run").name == "last.safetensors"
    shutil.copy(run / "last.safetensors", tmp_path / "run" / "best.safetensors")
    assert find.weights_file(tmp_path / "run").name == "best.safetensors"


def test_an_unknown_name_says_the_nearest_and_what_there_is(package, tmp_path, monkeypatch):
    (package / "other.safetensors").touch()
    (package / "notes.txt").touch()
    assert vbcaps.list_models() == ["other", "tiny"]
    with pytest.raises(RunError, match=r"no weights called 'tony' .*; did you mean 'tiny'.; there are other, tiny$"):
        vbcaps.load("tony")
    with pytest.raises(RunError, match=r"x{300} is neither a file nor the folder of a run"):
        vbcaps.load("x" * 300)
    with pytest.raises(RunError, match=r"cannot read the weights ../tiny: No such file"):
        vbcaps.load("../tiny")


def test_a_folder_of_seeds_is_not_one_model(run, tmp_path):
    for seed in (0, 1):
        shutil.copytree(run, tmp_path / f"seed{seed}")
    with pytest.raises(RunError, match=r"has a run for each seed: choose one, as .*seed0"):
        vbcaps.load(tmp_path)


def test_what_is_shipped_can_be_used_and_says_its_error():
    """Whatever is in the package now, or in weights/ of the checkout."""
    assert "smallnorb" in vbcaps.list_models()
    for name in vbcaps.list_models():
        model = vbcaps.load(name)
        assert 0 < model.about["test_error"] < 1
        assert model.recipe.test == bool(model.recipe.validation)  # trained on all images, or a twin that held some out
        assert model.recipe.seed == 0
        if model.recipe.dataset != "affnist":
            assert model.about["temperature"] > 0
            held_out = "temperature_from" not in model.about
            assert held_out == bool(model.recipe.validation)
        x = torch.randn(2, model.net.in_channels, model.recipe.crop, model.recipe.crop)
        assert model(x).logits.shape == (2, len(model.classes))


def test_the_name_load_costs_nothing_before_it_is_asked_for():
    code = "import sys, vbcaps; assert {'load', 'fit'} <= set(dir(vbcaps)) and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_loading_needs_of_the_training_program_the_recipe_alone(tmp_path):
    code = (
        "import sys, vbcaps; vbcaps.load('fashion_small').save(sys.argv[1]);"
        "print(*(name for name in sys.modules if name.startswith('vbcaps.training.')))"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "x"], capture_output=True, text=True, check=True)
    needed = {"vbcaps.training.files", "vbcaps.training.recipe", "vbcaps.training.runfolder"}
    assert set(done.stdout.split()) == needed


@pytest.mark.parametrize(
    "content",
    [
        "[]", "{", "\\xff", '{"a": {}}', '{"a": {"size": "1", "sha256": "0", "dataset": "x", "test_error": 0.1}}',
        '{"../a": {"size": 1, "sha256": "0", "dataset": "x", "test_error": 0.1}}', "[" * 10_000,
    ],
)  # fmt: skip
def test_a_changed_list_of_published_networks_is_named(tmp_path, monkeypatch, content):
    (tmp_path / "published.json").write_text(content)
    monkeypatch.setattr(find, "FOLDER", tmp_path)
    with pytest.raises(RunError, match=r"published\.json is damaged: install vbcaps again"):
        find.list_models()

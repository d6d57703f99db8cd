"""Weights that come with the package: found by name, and in what is installed."""

import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import tiny
import torch

import vbcaps
from vbcaps.training.checkpoint import RunError, load_weights
from vbcaps.training.loop import evaluate, fit
from vbcaps.weights import shipped

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    with tiny.in_place_of_data():
        return fit(tiny.recipe(epochs=2), tmp_path_factory.mktemp("run"), device="cpu")[0]


@pytest.fixture
def folder(result, tmp_path, monkeypatch):
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    (tmp_path / "tiny.safetensors").write_bytes(result.weights.read_bytes())
    return tmp_path


def test_a_name_gives_the_network_with_its_recipe_and_its_error(folder, result):
    net, recipe, classes, view, about = vbcaps.load("tiny")
    assert not net.training
    assert (recipe, classes) == (result.recipe, tiny.CLASSES)
    assert about["test_error"] == result.test.error
    assert evaluate(net, tiny.dataset().test, view, classes) == result.test
    other = load_weights(result.weights).net.state_dict()
    assert all(torch.equal(x, other[name]) for name, x in net.state_dict().items())


def test_an_unknown_name_says_the_nearest_and_what_there_is(folder):
    (folder / "other.safetensors").touch()
    (folder / "notes.txt").touch()
    with pytest.raises(RunError, match=r"no weights called 'tony' .*; did you mean 'tiny'.; there are other, tiny$"):
        vbcaps.load("tony")
    with pytest.raises(RunError, match=r"no weights called '../tiny'"):
        vbcaps.load("../tiny")


def test_what_is_shipped_can_be_used_and_says_its_error():
    """Whatever is in the package now."""
    for name in shipped.names():
        net, recipe, classes, _, about = vbcaps.load(name)
        assert 0 < about["test_error"] < 1
        assert not recipe.validation
        assert recipe.seed == 0
        x = torch.randn(2, net.in_channels, recipe.crop, recipe.crop)
        assert net(x).logits.shape == (2, len(classes))


def test_the_name_load_costs_nothing_before_it_is_asked_for():
    code = "import sys, vbcaps; assert 'load' in vbcaps.__all__ and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_wheel_and_source_archive_hold_the_weights(tmp_path, result):
    """Built from a copy of what setuptools reads, with weights in it."""
    pytest.importorskip("setuptools", minversion="77")
    here = tmp_path / "source"
    package = here / "src" / "vbcaps"
    (package / "weights").mkdir(parents=True)
    for name in ("pyproject.toml", "README.md", "LICENSE", "src/vbcaps/__init__.py"):
        (here / name).write_bytes((ROOT / name).read_bytes())
    (package / "weights" / "tiny.safetensors").write_bytes(result.weights.read_bytes())
    (package / "weights" / "notes.txt").touch()
    build = "from setuptools import build_meta as b; b.build_wheel('..'); b.build_sdist('..')"
    subprocess.run([sys.executable, "-c", build], cwd=here, check=True, capture_output=True)
    (wheel,), (archive,) = tmp_path.glob("*.whl"), tmp_path.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as file:
        held = [name for name in file.namelist() if "weights/" in name]
    assert held == ["vbcaps/weights/tiny.safetensors"]
    with tarfile.open(archive) as file:
        assert any(name.endswith("src/vbcaps/weights/tiny.safetensors") for name in file.getnames())

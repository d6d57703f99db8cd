"""Weights files: what is in them, and what is no weights file."""

import pytest
import tiny
import torch

from vbcaps.data import View
from vbcaps.training.files import RunError
from vbcaps.training.loop import evaluate, fit
from vbcaps.uncertainty import fit_densities
from vbcaps.weights.file import pack_weights, read_weights
from vbcaps.weights.model import load
from vbcaps.weights.tensors import pack_tensors, unpack_tensors


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    with tiny.in_place_of_data():
        fit(tiny.recipe(epochs=2), folder, device="cpu")
    return folder


def test_a_weights_file_is_all_it_takes(run):
    kept, model = read_weights(run / "last.safetensors"), load(run)
    assert (kept.recipe, kept.classes, kept.in_channels) == (tiny.recipe(epochs=2), tiny.CLASSES, 1)
    assert kept.about["epoch"] == 2
    assert kept.about["commit"]
    assert kept.view == View(crop=20, standardise="dataset", mean=kept.view.mean, std=kept.view.std)
    assert len(kept.view.mean) == 1
    assert evaluate(model, tiny.dataset().test).error == kept.about["test_error"]


@pytest.mark.parametrize("keep", [0, 7, 500, -3])
def test_a_truncated_weights_file(run, tmp_path, keep):
    path = tmp_path / "short.safetensors"
    path.write_bytes((run / "last.safetensors").read_bytes()[:keep])
    with pytest.raises(RunError, match="damaged or no safetensors file"):
        load(path)


def test_files_of_something_else(run, tmp_path):
    from safetensors.torch import save_file

    with pytest.raises(RunError, match=r"cannot read the weights .*: No such file"):
        load(tmp_path / "none.safetensors")
    with pytest.raises(RunError, match=r"is a saved state: use last.safetensors"):
        load(run / "state.safetensors")
    other = tmp_path / "other.safetensors"
    save_file({"x": torch.zeros(3)}, other)
    with pytest.raises(RunError, match="another program's"):
        load(other)
    tensors, about = unpack_tensors((run / "last.safetensors").read_bytes(), "it")
    for arch, message in (
        ([4, 2, 2, 4], r"of another network: conv_caps2.weight is \(3, 3, 2, 2, 4, 4\), the network's"),
        ([4, 2, 2], "cannot read: arch must be four"),
    ):
        about["recipe"]["arch"] = arch
        other.write_bytes(pack_tensors(tensors, about))
        with pytest.raises(RunError, match=message):
            load(other)
    about["recipe"] = {"rooting": "vb"}
    other.write_bytes(pack_tensors(tensors, about))
    with pytest.raises(RunError, match="cannot read: a recipe has no field 'rooting'"):
        load(other)
    about["recipe"], about["in_channels"] = tiny.recipe().to_json(), 0
    other.write_bytes(pack_tensors(tensors, about))
    with pytest.raises(RunError, match=r"cannot read: in_channels must be"):
        load(other)


def test_names_and_shapes_that_differ_are_counted(tmp_path):
    recipe = tiny.recipe()
    path = tmp_path / "w.safetensors"
    path.write_bytes(pack_weights(recipe.net(1, 3), recipe, tiny.CLASSES, recipe.view(), {}))
    tensors, about = unpack_tensors(path.read_bytes(), "it")
    tensors["more"] = tensors.pop("class_caps.scale")
    path.write_bytes(pack_tensors(tensors, about))
    with pytest.raises(
        RunError, match=r"w\.safetensors is of another network: class_caps\.scale is missing; more is not known$"
    ):
        load(path)


def test_densities_lie_beside_the_networks_tensors(run, tmp_path):
    plain = read_weights(run / "last.safetensors")
    assert plain.densities == {}
    assert "temperature" not in plain.about
    model, data = load(run), tiny.dataset().train
    assert model.temperature == 1
    fit_densities(model, data.images, data.labels, ["class_caps.m"], tied=False)
    kept = read_weights(model.save(tmp_path / "w.safetensors"))
    assert kept.tensors.keys() == plain.tensors.keys()
    assert list(kept.densities) == ["class_caps.m"]
    for one, other in zip(kept.densities["class_caps.m"], model.densities["class_caps.m"], strict=True):
        assert torch.equal(one, other)
    assert all(torch.equal(x, plain.tensors[name]) for name, x in kept.tensors.items())
    assert kept.about == plain.about

    tensors, about = unpack_tensors((tmp_path / "w.safetensors").read_bytes(), "it")
    del tensors["density.class_caps.m.whiten"]
    (tmp_path / "w.safetensors").write_bytes(pack_tensors(tensors, about))
    with pytest.raises(RunError, match=r"density\.class_caps\.m\.whiten must have floats .*, but it is missing"):
        load(tmp_path / "w.safetensors")

"""What needs a package that is not there says which extra has it, in Python and on the command line."""

import ast
import re
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from typer.testing import CliRunner

import vbcaps
from vbcaps import kernels
from vbcaps.cli.main import app
from vbcaps.kernels import backend
from vbcaps.routing import EMRouting

ROOT = Path(__file__).parents[1]
OTHER = {"all", "dev", "docs", "lint", "release", "test"}  # extras that no feature asks for


def draw():
    from vbcaps.figures.run import new_figure

    new_figure(1, 1)


def serve():
    import vbcaps.explore.server  # noqa: F401


def download():
    vbcaps.Model.from_pretrained("somebody/something")


def export():
    vbcaps.export("fashion_laptop", "net.onnx")


def log():
    from vbcaps.training.runlog import Board

    Board(Path("run"), 0)


def read():
    vbcaps.load("fashion_laptop").predict("many.tif")


def search():
    from vbcaps.sweeps.study import open_sweep

    open_sweep(Path("sweep"), storage="postgresql://name:word@localhost/base")


def look():
    vbcaps.BackboneCapsNet("resnet18", 3)


def route():
    layer = vbcaps.ConvCaps(2, 2, backend="triton")
    layer(vbcaps.Capsules(torch.rand(1, 5, 5, 2), torch.randn(1, 5, 5, 2, 4, 4)))


class Case(NamedTuple):
    """A package, its extra, what uses it in Python, and the command that does."""

    package: str
    extra: str
    call: Callable
    words: str = ""


TRAIN = "train default --arch 4,2,2,2 --epochs 1 --device cpu --out run"
SWEEP = "sweep default --field lr=log:1e-4,1e-2 --out sweep"
CASES = [
    Case("matplotlib", "plot", draw, "routing image.png --model fashion_laptop -o routing.png"),
    Case("starlette", "explore", serve, "explore --no-open"),
    Case("uvicorn", "explore", serve, "explore --no-open"),
    Case("triton", "gpu", route, f"{TRAIN} --backend triton"),
    Case("huggingface_hub", "hub", download),
    Case("onnx", "onnx", export, "export fashion_laptop -o net.onnx"),
    Case("onnxruntime", "onnx", export, "export fashion_laptop -o net.onnx"),
    Case("onnxscript", "onnx", export, "export fashion_laptop -o net.onnx"),
    Case("optuna", "sweep", search, SWEEP),
    Case("psycopg", "sweep", search, f"{SWEEP} --storage postgresql://name:word@localhost/base"),
    Case("tensorboard", "tensorboard", log, f"{TRAIN} --tensorboard"),
    Case("tifffile", "tiff", read, "predict many.tif --weights fashion_laptop"),
    Case("timm", "timm", look),
]


@pytest.fixture(params=CASES, ids=lambda case: case.package)
def missing(request, monkeypatch, tmp_path):
    """A case whose package cannot be imported, in a folder with images."""
    case = request.param
    monkeypatch.chdir(tmp_path)
    Image.fromarray(np.zeros((28, 28), np.uint8)).save("image.png")
    pages = [Image.fromarray(np.full((28, 28), k, np.uint8)) for k in range(2)]
    pages[0].save("many.tif", save_all=True, append_images=pages[1:])
    ours = ("vbcaps.explore.server", "vbcaps.weights.hub", "vbcaps.kernels.triton.", "torch.utils.tensorboard")
    for name in list(sys.modules):
        if name.startswith((f"{case.package}.", *ours)):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, case.package, None)
    monkeypatch.delitem(backend._LOADED, "triton", raising=False)
    return case


def sentence(case):
    return rf"[^\n]*{case.package}[^\n]*: pip install 'vbcaps\[{case.extra}\]'"


def test_in_python(missing):
    with pytest.raises(Exception, match=sentence(missing)):
        missing.call()


def test_on_the_command_line(missing):
    if not missing.words:
        pytest.skip("no command needs it")
    done = CliRunner().invoke(app, missing.words.split(), env={"COLUMNS": "300"})
    assert done.exit_code in (1, 2), done.output
    assert isinstance(done.exception, SystemExit), "it ends in a traceback"
    assert re.search(sentence(missing), done.output), done.output


def test_on_a_gpu_without_triton_routing_runs_and_says_what_it_lacks(monkeypatch):
    """With the values of a GPU's tensor that the choice asks for, because there may be no GPU here."""
    monkeypatch.setattr(kernels, "HAS_TRITON", False)
    kernels._warn_of_triton.cache_clear()
    a = SimpleNamespace(is_cuda=True, device=torch.device("cuda"), dtype=torch.float32)
    with pytest.warns(UserWarning, match=r"triton is not installed: pip install 'vbcaps\[gpu\]'"):
        found = kernels.backend_for("auto", EMRouting(2, 16), a, torch.zeros(1, 2, 4, 4), torch.zeros(2, 2, 4, 4), None)
    assert found is None


def test_every_optional_package_is_tried_here():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {name: name.replace("-", "_") for name in map(_name, project["dependencies"])}
    always = {names.pop("pillow"), names.pop("scikit-learn"), *names.values(), "PIL", "sklearn", "vbcaps"}
    imported = {name for path in (ROOT / "src").rglob("*.py") for name in _imports(path)}
    tried = {case.package for case in CASES} | {"sqlalchemy", "h11"}  # which Optuna and uvicorn bring
    assert imported - always - set(sys.stdlib_module_names) - tried == set()
    assert {case.extra for case in CASES} == set(project["optional-dependencies"]) - OTHER


def _name(requirement):
    return re.match(r"[\w-]+", requirement)[0]


def _imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module.partition(".")[0]

"""The public names, and what importing them costs."""

import importlib
import subprocess
import sys

import pytest

import vbcaps

SUSPECTS = (
    "torch._dynamo",
    "sympy",
    "triton",
    "scipy",
    "matplotlib",
    "torch.utils.tensorboard",
    "sklearn",
    "onnx",
    "huggingface_hub",
)


def imported_by(code: str) -> set[str]:
    """Return the modules that a new process has after running ``code``."""
    code += "\nimport sys; print(*sys.modules)"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


def test_the_package_is_imported_without_pytorch():
    assert not imported_by("import vbcaps; vbcaps.recipe('smallnorb'); vbcaps.list_models()") & {"torch", "numpy"}


@pytest.mark.parametrize(
    "code",
    ["vbcaps.CapsNet", "vbcaps.CapsNet()", "vbcaps.BackboneCapsNet", "vbcaps.load('fashion_small')", "vbcaps.fit"],
)
def test_pytorch_is_all_that_a_network_waits_for(code):
    """PyTorch's compiler alone takes 0.7 seconds to import, which only those who compile should wait."""
    modules = imported_by(f"import vbcaps; {code}")
    assert "torch" in modules
    assert not modules & set(SUSPECTS)


def test_every_public_name_is_found():
    for name in vbcaps.__all__:
        assert getattr(vbcaps, name) is not None
    assert {*vbcaps.__all__} <= {*dir(vbcaps)}
    with pytest.raises(AttributeError, match="has no attribute 'CapsNett'"):
        vbcaps.CapsNett  # noqa: B018


def test_a_name_and_a_module_do_not_hide_each_other():
    for module in ("weights.model", "training.loop", "training.recipes"):
        assert importlib.import_module(f"vbcaps.{module}").__name__ == f"vbcaps.{module}"

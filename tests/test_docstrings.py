"""The examples in the library's docstrings run, and every public name has one."""

import doctest
import inspect
from importlib import import_module

import pytest
import torch

import vbcaps
import vbcaps.health
import vbcaps.losses
import vbcaps.routing
import vbcaps.uncertainty

MODULES = (
    "distributions", "heads", "health.measure", "layers", "losses", "models", "norm", "prior", "routing.dynamic",
    "routing.em", "routing.fields", "routing.vb", "training.evaluate", "training.recipes", "uncertainty.damage",
    "uncertainty.density",
    "uncertainty.metrics", "uncertainty.predictive", "uncertainty.scores", "vae", "weights.find",
    "weights.model",
)  # fmt: skip


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    result = doctest.testmod(
        import_module(f"vbcaps.{name}"), optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    )
    assert result.attempted > 0
    assert result.failed == 0


def test_public_functions_and_modules_have_an_example():
    """Values have theirs where a function returns them."""
    modules = (vbcaps, vbcaps.health, vbcaps.routing, vbcaps.uncertainty)
    public = {name: getattr(module, name) for module in modules for name in module.__all__}
    public |= {name: f for name, f in vars(vbcaps.losses).items() if name.endswith(("loss", "margin"))}
    wanted = [
        name
        for name, f in public.items()
        if inspect.isfunction(f) or (inspect.isclass(f) and issubclass(f, torch.nn.Module))
    ]
    missing = [name for name in wanted if ">>>" not in public[name].__doc__]
    assert len(wanted) > 15
    assert missing == []

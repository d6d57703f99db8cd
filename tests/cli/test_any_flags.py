"""Whatever flags are given: a command begins its work, or refuses in a sentence before anything is written."""

import dataclasses
import os
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from vbcaps.cli.train import app
from vbcaps.training import loop
from vbcaps.training.recipe import CHOICES, Recipe
from vbcaps.training.recipes import RECIPES

FIELDS = [field.name for field in dataclasses.fields(Recipe) if field.name != "name"]
OTHERS = ["out", "resume", "from", "seeds", "device", "data-folder", "cache", "quiet", "tensorboard", "wrong"]
PLAIN = [
    "0",
    "1",
    "-1",
    "3",
    "0.5",
    "1e-3",
    "1e999",
    "nan",
    "inf",
    "",
    "none",
    "auto",
    "4,2,2,2",
    "9" * 40,
    "--",
    "../x",
]


class Reached(Exception):
    """Raised in the place of a training."""


@pytest.fixture(scope="module", autouse=True)
def no_training(tmp_path_factory):
    def reached(*_: object, **__: object) -> None:
        raise Reached

    before, folder = Path.cwd(), tmp_path_factory.mktemp("empty")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "fit", reached)
        patch.setattr(loop, "fit_seeds", reached)
        os.chdir(folder)
        yield
        os.chdir(before)


def flag(name: str) -> st.SearchStrategy[list[str]]:
    """One flag, with a value that it takes, that another takes, or that none takes."""
    values = st.one_of(
        st.sampled_from([*map(str, CHOICES.get(name, ())), *PLAIN]), st.integers().map(str), st.floats().map(str),
        st.text(max_size=8),
    )  # fmt: skip
    written = f"--{name.replace('_', '-')}"
    return values.flatmap(lambda value: st.sampled_from([[written, value], [f"{written}={value}"], [written]]))


FLAGS = st.lists(st.sampled_from([*FIELDS, *OTHERS]).flatmap(flag), max_size=5).map(lambda found: list(chain(*found)))
RECIPE = st.one_of(
    st.just([]), st.sampled_from(sorted(RECIPES)).map(lambda name: [name]), st.text(max_size=6).map(lambda s: [s])
)


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(RECIPE, FLAGS)
def test_any_flags_of_train(recipe, flags):
    done = CliRunner().invoke(app, [*recipe, *flags], prog_name="vbcaps train")
    if isinstance(done.exception, Reached) or done.exit_code == 0:  # 0: --help
        return
    assert isinstance(done.exception, SystemExit), (recipe, flags, done.exception)
    assert done.exit_code in (1, 2)
    assert "Traceback" not in done.output
    said = done.output.partition("Error")[2] or done.output.partition("vbcaps: ")[2]
    assert len(said.strip(" ─╮│╰╯\n")) > 10, (recipe, flags, done.output)
    assert list(Path.cwd().iterdir()) == [], (recipe, flags)

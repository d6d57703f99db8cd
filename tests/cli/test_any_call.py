"""Any combination of flags and arguments of any command runs, or is refused in one sentence before a file is written.

Training, drawing, exporting, serving and fetching are replaced, so that an example takes milliseconds.
"""

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tiny
import torch.nn.functional as F
import typer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from typer.testing import CliRunner

from vbcaps.cli.main import app
from vbcaps.cli.train import app as train_app
from vbcaps.data import Split, View
from vbcaps.training import loop
from vbcaps.training.files import check_writable, write
from vbcaps.training.recipe import CHOICES, field_types
from vbcaps.weights.export import Exported
from vbcaps.weights.file import outline, pack_weights

PATHS = (
    "tiny.safetensors", "vae.safetensors", "broken.safetensors", "none.safetensors", "run", "photos", "picture.png",
    "images.npy", "notes.txt", "new/out.png", "out.png", "out.csv", "out.json", "out.onnx", "out.pt2", "", ".", "..",
    "/dev/null", "/proc/none/x", "notes.txt/x", "name[/b]", "a\x1b[31mb", "\udcff", "~", "x" * 300,
)  # fmt: skip
NUMBERS = ("0", "1", "2", "5", "-1", "0.5", "1e-3", "0.9", "1e400", "nan", "inf", "9" * 25, "x", "3.7", "")
WORDS = (
    "none", "auto", "cpu", "cuda", "cuda:99", "tiny", "fashion_laptop", "default", "sample", "smallnorb", "a", "all",
    "class_caps.m", "logits", "photos", "prior", "class", "lr=log:1e-4,1e-2", "lr=choice:", "a,b", "1,2", "4,2,2,2",
    "[/red]", "[bold]", "\x1b[31m", "ä", " ", "",
)  # fmt: skip


def commands() -> dict[str, Any]:
    """Return the commands by their words; `train` has the flags of a recipe."""
    found: dict[str, Any] = {}

    def walk(command: Any, words: str) -> None:
        if hasattr(command, "commands"):
            for name, one in command.commands.items():
                walk(one, f"{words} {name}".strip())
        else:
            found[words] = command

    walk(typer.main.get_command(app), "")
    return found | dict(train=typer.main.get_command(train_app))


COMMANDS = commands()


def values(parameter: Any) -> st.SearchStrategy[str]:
    """Return words for a parameter: mostly of its kind, at times of another."""
    metavar, name = str(parameter.metavar), parameter.name
    kinds = {"PATH": PATHS, "FILE": PATHS, "FOLDER": PATHS, "IMAGE": PATHS, "INT": NUMBERS, "NUMBER": NUMBERS}
    own: tuple[str, ...] = next((pool for kind, pool in kinds.items() if kind in metavar), (*WORDS, *PATHS))
    own = CHOICES.get(name, own)
    return st.one_of(st.sampled_from(own), st.sampled_from(own), st.sampled_from((*PATHS, *NUMBERS, *WORDS)))


@st.composite
def calls(draw: Any, name: str) -> list[str]:
    """Draw the words of a call of a command."""
    words = name.split()
    parameters = [one for one in COMMANDS[name].params if one.name not in ("help", "version")]
    for one in parameters:
        if one.param_type_name == "argument" and draw(st.integers(0, 9 if one.required else 1)):
            words += [draw(values(one)) for _ in range(draw(st.integers(1, 2)) if one.nargs == -1 else 1)]
    options = [one for one in parameters if one.param_type_name == "option"]
    needed = [one for one in options if one.required and draw(st.integers(0, 9))]
    for one in needed + (draw(st.lists(st.sampled_from(options), max_size=4)) if options else []):
        words.append(draw(st.sampled_from([*one.opts, *one.secondary_opts])))
        if not one.is_flag:
            words.append(draw(values(one)))
    return words


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with weights, a run, pictures, and files of other kinds."""
    folder = tmp_path_factory.mktemp("any") / "template"
    (folder / "home").mkdir(parents=True)
    recipe = tiny.recipe()
    vae = tiny.recipe(network="vae", standardise="none", decoder=4)
    for name, one in dict(tiny=recipe, vae=vae).items():
        view = one.view() if one is vae else View(crop=20, standardise="dataset", mean=(0.4,), std=(0.3,))
        (folder / f"{name}.safetensors").write_bytes(pack_weights(one.net(1, 3), one, tiny.CLASSES, view, {}))
    (folder / "run").mkdir()
    shutil.copy(folder / "tiny.safetensors", folder / "run" / "last.safetensors")
    write(folder / "run" / "recipe.json", json.dumps(recipe.to_json()).encode())
    (folder / "broken.safetensors").write_bytes((folder / "tiny.safetensors").read_bytes()[:5000])
    (folder / "notes.txt").write_text("notes")
    np.save(folder / "images.npy", np.zeros((4, 22, 22), np.uint8))
    random = np.random.default_rng(0)
    for label in ("a", "b"):
        (folder / "photos" / label).mkdir(parents=True)
        for k in range(10):
            Image.fromarray(random.integers(0, 256, (24, 24), np.uint8)).save(folder / "photos" / label / f"{k}.png")
    shutil.copy(folder / "photos" / "a" / "0.png", folder / "picture.png")
    return folder


@pytest.fixture(scope="module")
def here(template: Path) -> Iterator[Path]:
    """Work in a copy of the template, with everything replaced that takes long or leaves the machine."""
    pytest.importorskip("onnxruntime")  # which writes into the user's cache when it is imported
    folder = template.with_name("here")
    shutil.copytree(template, folder)

    def train(recipe: Any, out: Path, data: Any, *_: Any) -> Any:
        outline(recipe, data.train.images.shape[1], len(data.classes))
        check_writable(out, 1)
        (out / "trained").touch()
        return SimpleNamespace(result=None)
        yield

    def export(model: Any, path: Path, **_: Any) -> Exported:
        write(path, b"exported")
        shaped = dict(shape=["n"], dtype="uint8", values="0 to 255")
        return Exported(path, "onnx", dict(input=shaped, output=shaped), 0.0)

    def save(figure: Any, path: Path) -> Path:
        write(path, b"drawn") if path.parent.is_dir() else None
        return path

    real = loop.load_dataset

    def load_dataset(name: Any, folder: Any = None, size: int | None = None, **options: Any) -> Any:
        if isinstance(name, Path):
            return real(name, size=size, **options)
        data = tiny.dataset()
        if size == 22:
            return data
        train, test = (Split(F.pad(one.images, (3, 3, 3, 3)), one.labels) for one in (data.train, data.test))
        return replace(data, train=train, test=test)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "load_dataset", load_dataset)
        patch.chdir(folder)
        for name in ("VBCAPS_CACHE", "VBCAPS_DATA", "HOME", "XDG_CACHE_HOME"):
            patch.setenv(name, str(folder / "home"))
        patch.setenv("COLUMNS", "100000")
        patch.setattr("vbcaps.training.loop.train", train)
        patch.setattr("vbcaps.cli.train.draw_run", lambda *_: None)
        patch.setattr("vbcaps.explore.server.serve", lambda *_: None)
        patch.setattr("vbcaps.sweeps.worker.work", lambda *_, **__: [])
        patch.setattr("vbcaps.data.download.fetch_file", lambda *_, **__: ["there is no network"])
        patch.setattr("vbcaps.weights.export.compared", lambda *_: 0.0)
        patch.setattr("vbcaps.weights.export.as_onnx", lambda *_: (b"exported", None))
        patch.setattr("vbcaps.weights.export.as_program", lambda *_: (b"exported", None))
        patch.setattr("vbcaps.weights.export.program_of", lambda *_: None)
        patch.setattr("matplotlib.figure.Figure.savefig", lambda self, file, **_: file.write(b"drawn"))
        yield folder


def tree(folder: Path) -> dict[str, bytes | None]:
    return {str(path): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def check(words: list[str], here: Path, template: Path) -> int:
    """Run a call, and hold it to what this file promises."""
    before = tree(here)
    result = CliRunner().invoke(app, words)
    said = f"{words}: exit {result.exit_code}\n{result.output}"
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise AssertionError(said) from result.exception
    assert result.exit_code in (0, 1, 2), said
    after = tree(here)
    if after != before:
        for path in here.iterdir():  # the folder itself stays: the tests work in it
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        shutil.copytree(template, here, dirs_exist_ok=True)
    if result.exit_code:
        if words[:2] == ["data", "fetch"]:  # what is refused is then the network's part: the empty folder stays
            after = {name: content for name, content in after.items() if name in before or content is not None}
        assert sorted(after) == sorted(before), f"{said}\n{sorted(set(after) ^ set(before))}"
        assert after == before, said
        sentences = re.findall(r"^vbcaps: (.+)$", result.output, re.MULTILINE)
        framed = re.findall(r"Error ─+╮\n│ (.+?) +│\n╰", result.output)
        listed = words[:2] == ["data", "check"] and result.output.startswith(("missing", "damaged"))
        listed = listed or words[:2] == ["figures", "all"]  # a line for each file, or for each figure
        assert listed or len(sentences) + len(framed) == 1, said
        assert "\x1b" not in result.output, said
    print(said)  # which pytest shows where a test fails
    return result.exit_code


# How many calls of each command: those with many flags, and those that are quick, have more.
COUNTS = dict(train=60, predict=40, eval=40, uncertainty=25, sweep=25, explore=6)


@pytest.mark.parametrize("name", COMMANDS)
def test_any_call_runs_or_is_refused_in_one_sentence_before_anything_is_written(name, here, template):
    @settings(
        max_examples=COUNTS.get(name, 15), derandomize=True, deadline=None, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(calls(name))
    def holds(words: list[str]) -> None:
        check(words, here, template)

    holds()


RUN = (
    "recipes", "recipes fashion_laptop", "train fashion_laptop", "train --resume run", "train --out new/run --seeds 2",
    "train --from tiny.safetensors", "train --data photos", "predict images.npy --weights tiny.safetensors --csv o.csv",
    "eval tiny.safetensors --device cpu --json out.json", "uncertainty tiny.safetensors images.npy",
    "export tiny.safetensors --out out.onnx", "routing picture.png --model tiny.safetensors",
    "reconstruct images.npy --weights vae.safetensors", "tweak picture.png --weights vae.safetensors --values 0,1",
    "sample --weights vae.safetensors --count 2", "explore tiny.safetensors --no-open", "figures", "weights list",
    "weights path fashion_laptop", "data list", "sweep fashion_laptop --field lr=log:1e-4,1e-2",
)  # fmt: skip


@pytest.mark.parametrize("words", RUN)
def test_calls_that_run(words, here, template):
    """Otherwise a program that refused everything would pass."""
    assert check(words.split(), here, template) == 0


@pytest.mark.parametrize(
    "words",
    [
        "predict images.npy --weights tiny.safetensors --csv out.csv --json none/out.json",
        "predict images.npy --weights tiny.safetensors --csv out.csv --json photos",
        "eval tiny.safetensors --device cpu --csv out.csv --json none/out.json",
        "uncertainty tiny.safetensors images.npy --densities logits --save out.safetensors --csv none/out.csv",
    ],
)
def test_no_file_is_written_where_another_cannot_be(words, here, template):
    assert check(words.split(), here, template) == 1


def test_each_flag_of_a_recipe_alone(here, template):
    for field, kind in field_types().items():
        flag = f"--{field.replace('_', '-')}"
        for word in () if field == "name" else (None,) if kind is bool else ("[/b]",):
            check(["train", "fashion_laptop", flag, *([] if word is None else [word])], here, template)

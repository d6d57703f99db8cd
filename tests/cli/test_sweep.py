"""``vbcaps sweep``: what it prints, and its errors."""

from pathlib import Path

import pytest
import tiny
from typer.testing import CliRunner

from vbcaps.cli.main import app
from vbcaps.training.runfolder import read_recipe

pytest.importorskip("optuna")


@pytest.fixture(autouse=True)
def _tiny(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("vbcaps.cli.sweep.changed", lambda name, fields: tiny.recipe(epochs=1, name="tiny"))
    with tiny.in_place_of_data():
        yield


def sweep(*words: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["sweep", *words], env={"COLUMNS": "160"})
    return done.exit_code, " ".join(done.output.split())


def test_a_sweep_is_trained_shown_and_continued():
    code, said = sweep(
        "tiny", "--field", "lr=log:1e-3,1e-1,2", "--field", "iters=1", "--method", "grid", "--device", "cpu"
    )
    assert code == 0, said
    assert "sweeps/tiny-1: 2 trials of tiny, lr=log:0.001,0.1,2, by grid" in said
    assert "trial 0: lr 0." in said
    assert "error on 10% of the training images, which were held out" in said
    assert read_recipe(Path("sweeps/tiny-1/trial-0000")).iters == 1
    best = said[said.index("best: trial ") :]
    assert "train it on all training images, and test it once: vbcaps train tiny --iters 1 --lr 0." in best
    code, again = sweep("--show", "sweeps/tiny-1")
    assert code == 0
    assert again == said[said.index("trial state lr ") :]
    code, said = sweep("--resume", "sweeps/tiny-1", "--device", "cpu")
    assert code == 0
    assert "trial 0: lr" not in said  # nothing is left to do
    code, said = sweep("tiny", "--field", "lr=log:1e-3,1e-1", "--trials", "1", "--device", "cpu", "--quiet")
    assert (code, said) == (0, "")
    assert Path("sweeps/tiny-2/trial-0000/result.json").exists()


def test_settings_that_fail_are_told_and_the_others_go_on():
    # four crops of 24 are larger than the images of 22
    code, said = sweep("tiny", "--field", "crop=choice:20,24", "--method", "grid", "--device", "cpu", "--out", "s")
    assert code == 0, said
    assert "failed: crop" in said
    assert "best: trial" in said


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (["tiny", "--field", "lrr=log:1,2"], "a recipe has no field 'lrr'; did you mean 'lr'?"),
        (["tiny"], "a sweep needs a field that varies, such as --field lr=log:1e-4,1e-2"),
        (["--resume", "nowhere"], "there is no sweep in nowhere"),
        (["tiny", "--resume", "s"], "the sweep in s has its recipe and fields"),
        (["--resume", "s", "--show", "s"], "--resume and --show cannot be combined"),
        (["tiny", "--field", "lr=log:1,2", "--storage", "postgresql://x"], "--storage needs --out FOLDER"),
    ],
)
def test_errors_are_one_sentence(words, wrong):
    code, said = sweep(*words)
    assert code != 0
    assert wrong in said.replace("│ ", "").replace(" │", "")
    assert not list(Path().iterdir())

"""Settings compared on what is held out: fields by name, a row for each run, and no run left behind."""

import contextlib
import csv
import importlib
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tiny

from vbcaps.training.loop import fit
from vbcaps.training.recipes import recipe

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))  # as for `python tools/choices.py`
choices = importlib.import_module("choices")


def test_a_choice_changes_the_fields_that_it_names():
    base = recipe("smallnorb_fast")
    for choice in choices.CHOICES:
        made = choices.changed(base, choice)
        named = {word.partition("=")[0] for word in choice.split()}
        assert {name for name in base.to_json() if getattr(made, name) != getattr(base, name)} == named
    made = choices.changed(base, "flip=yes norm_pose=no nu0=20 lr=0.001 epochs=70 standardise=crop arch=8,4,4,4")
    assert (made.flip, made.norm_pose, made.nu0, made.lr, made.epochs, made.standardise, made.arch) == (
        True, False, 20.0, 0.001, 70, "crop", (8, 4, 4, 4),
    )  # fmt: skip
    assert choices.changed(base, "learn=alpha0,m0").learn == ("alpha0", "m0")
    assert choices.changed(made, "nu0=none").nu0 is None


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--held=2", r"held must be above 0 and at most 0\.9, got 2"),
        ("--held=0", r"held must be above 0 and at most 0\.9, got 0"),  # the test set would be all there is to look at
        ("--workers=0", "workers must be at least 1, got 0"),
        ("lr=0.01 split=5", "'split=5': split is what all choices share"),
        ("validation=0.1", "validation is what all choices share"),
        ("test=yes", "test is what all choices share"),
        ("name=other", "name is what all choices share"),
        ("activaton=paper", "no field 'activaton'; did you mean 'activation'"),
        ("activation=papr", "activation must be one of .*; did you mean 'paper'"),
        ("flip=1", "flip is yes or no"),
        ("epochs=many", "'epochs=many': 'many' is not a whole number"),
    ],
)
def test_a_choice_that_is_none_is_refused_before_anything_runs(word, message, tmp_path):
    with pytest.raises(SystemExit, match=message):
        choices.main([word, "--csv", str(tmp_path / "rows.csv")])
    assert not list(tmp_path.iterdir())


def test_a_run_of_a_choice_is_a_row(tmp_path):
    made = tiny.recipe(name="default", epochs=6, validation=0.25, split=3)
    job = choices.Job("lr=0.01", made, 0.25, None, "cpu", until=float("inf"))
    with tiny.in_place_of_data():
        row = choices.run(job)
        assert choices.run(job._replace(until=0.0)) is None
        fit(made, tmp_path / "run", device="cpu")
    errors = [float(epoch["validation_error"]) for epoch in read_rows(tmp_path / "run" / "metrics.csv")]
    assert (row["base"], row["choice"], row["split"], row["held"]) == ("default", "lr=0.01", 3, 0.25)
    assert (row["epochs"], row["note"]) == (6, "")
    assert row["commit"] == json.loads((tmp_path / "run" / "environment.json").read_text())["commit"]
    assert float(row["last"]) == pytest.approx(errors[-1], abs=1e-5)
    assert float(row["least"]) == pytest.approx(min(errors), abs=1e-5)
    assert float(row["last_five"]) == pytest.approx(statistics.mean(errors[1:]), abs=1e-5)
    assert choices.last_and_least([]) == dict(last="nan", last_five="nan", least="nan")
    for _ in range(2):
        choices.append(tmp_path / "rows.csv", row)
    assert read_rows(tmp_path / "rows.csv") == [{key: str(value) for key, value in row.items()}] * 2


def test_of_its_own_choices_those_that_a_recipe_cannot_have_are_left_out(capsys):
    parser = choices.options(None, base="smallnorb_fast", csv="choices.csv")
    jobs = choices.jobs_of(recipe("svhn_em_fast"), parser.parse_args(["--splits", "0"]), choices.CHOICES)
    made = [job.choice for job in jobs]
    assert "through=last" not in made
    assert {"", "lr=0.006", "norm_pose=no"} <= set(made)
    said = capsys.readouterr().err
    assert "left out: through belongs to routing='vb'" in said
    assert len(made) + said.count("left out") == len(choices.CHOICES)
    with pytest.raises(ValueError, match="activation belongs to routing='vb'"):
        choices.jobs_of(recipe("svhn_em_fast"), parser.parse_args(["activation=paper"]), choices.CHOICES)


def test_rows_of_another_comparison_are_not_mixed(tmp_path):
    (tmp_path / "rows.csv").write_text("base,choice,novel\r\n")
    with pytest.raises(SystemExit, match=r"rows\.csv has other columns"):
        choices.append(tmp_path / "rows.csv", dict(base="a", choice="b", last="c"))
    assert (tmp_path / "rows.csv").read_text() == "base,choice,novel\n"


def test_a_choice_that_cannot_be_trained_does_not_stop_the_others(tmp_path, monkeypatch, capsys):
    """In a thread, which need not import PyTorch again; the test below has processes."""
    monkeypatch.setattr(choices, "ProcessPoolExecutor", lambda workers, *_: ThreadPoolExecutor(workers))
    monkeypatch.setattr(choices, "end_in_order", lambda: None)
    words = ["crop=40", "crop=20", "--base", "default", "--also", "arch=4,2,2,2 batch=500 iters=1", "--splits", "0"]
    words += ["--epochs", "1", "--workers", "1", "--device", "cpu", "--csv", str(tmp_path / "rows.csv")]
    with pytest.raises(SystemExit, match=r"^1 of 2 runs failed$"):
        choices.main(words)
    assert "crop=40' on split 0: ValueError: crop 40 is larger than an image of 28" in capsys.readouterr().err
    (row,) = read_rows(tmp_path / "rows.csv")
    assert row["choice"].endswith("crop=20")
    assert "--no-test" in row["flags"]  # of which `default` itself does the opposite


@pytest.mark.parametrize("who", ["all", "a run"])
def test_who_ends_the_comparison_or_a_run_ends_all_runs(who, tmp_path):
    words = [sys.executable, str(ROOT / "tools" / "choices.py"), "", "--base", "default", "--splits", "0", "1"]
    words += ["--workers", "2", "--device", "cpu", "--csv", str(tmp_path / "rows.csv")]
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    process = subprocess.Popen(words, env=os.environ | dict(TMPDIR=str(temporary)), start_new_session=True)
    try:
        until = time.time() + 120
        while len(list(temporary.glob("*/run/metrics.csv"))) < 2:
            assert time.time() < until
            time.sleep(0.1)
        os.kill(process.pid if who == "all" else runs_of(process.pid)[0], signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
        assert not list(temporary.glob("*/run"))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def runs_of(pid):
    """Its children that work, by /proc."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text()]


def read_rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))

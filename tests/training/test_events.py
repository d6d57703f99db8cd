"""The hook of a run, ``on_event``: what it is told, and what its exceptions do."""

import re
from pathlib import Path

import pytest
import tiny
from typer.testing import CliRunner

from vbcaps.cli.train import app
from vbcaps.training import events
from vbcaps.training.events import Event, named_hook
from vbcaps.training.learner import Learner, NonFinite, Totals
from vbcaps.training.loop import fit
from vbcaps.training.runfolder import read_metrics


@pytest.fixture(autouse=True)
def _tiny():
    with tiny.in_place_of_data():
        yield


def train(folder: Path, hook, resume: bool = False, **fields: object):
    return fit(tiny.recipe(epochs=2, **fields), folder, device="cpu", on_event=hook, resume=resume)


def test_a_run_tells_its_start_each_epoch_and_its_end(tmp_path):
    seen: list[Event] = []
    model = train(tmp_path, seen.append, validation=0.25, test=True)
    kinds = [event.kind for event in seen]
    assert kinds[0] == "start"
    assert kinds[-1] == "end"
    assert [kinds.count(kind) for kind in ("start", "epoch", "end", "stop")] == [1, 2, 1, 0]
    start, *_, end = seen
    assert start.recipe == model.result.recipe
    assert start.metrics == {}
    assert end.result is model.result
    assert end.metrics["test_error"] == model.result.test.error
    assert end.metrics["best_epoch"] == model.result.best_epoch
    rows = [{k: v for k, v in row.items() if k != "epoch" and v is not None} for row in read_metrics(tmp_path)]
    assert [event.metrics for event in seen if event.kind == "epoch"] == rows
    step = next(event for event in seen if event.kind == "step")
    assert step.metrics["loss"] == step.loss
    assert set(step.metrics) == {"loss", "train_error", "lr", "images_per_second"}


@pytest.mark.parametrize("kind", ["start", "step", "epoch", "end"])
def test_an_exception_of_the_hook_ends_the_run_which_resumes_with_the_same_bits(tmp_path, kind):
    whole = train(tmp_path / "whole", None)
    seen: list[tuple[str, int, int]] = []

    def hook(event: Event) -> None:
        seen.append((event.kind, event.epoch, event.step))
        if event.kind == kind and (event.kind != "step" or event.step == 4):
            raise ConnectionError("the server is away")

    with pytest.raises(ConnectionError, match="the server is away"):
        train(tmp_path / "part", hook)
    assert [kind for kind, *_ in seen].count("stop") == (kind != "end")
    after: list[Event] = []
    resumed = train(tmp_path / "part", after.append, resume=True)
    assert resumed.file.read_bytes() == whole.file.read_bytes()
    if kind == "step":  # nothing that the first process did is done again
        start = next(event for event in after if event.kind == "start")
        assert (start.epoch, start.step) == (1, 4)


def test_a_run_that_diverges_tells_why_it_stopped(tmp_path, monkeypatch):
    seen: list[Event] = []

    def hook(event: Event) -> None:
        seen.append(event)
        if event.kind == "stop":
            raise RuntimeError("dropped, since another error stopped the run")

    monkeypatch.setattr(Learner, "totals", lambda learner: Totals(0.0, 0.0, 0, {}))
    monkeypatch.setattr("vbcaps.training.loop.diagnose", lambda *_: NonFinite("the loss is NaN"))
    with pytest.raises(NonFinite):
        train(tmp_path, hook)
    assert seen[-1].kind == "stop"
    assert seen[-1].message == "NonFinite: the loss is NaN"


TRACKER = """
seen = []
def log(event):
    seen.append(event.kind)
def fail(event):
    if event.kind == "epoch":
        raise ConnectionError("the server is away")
number = 3
"""


@pytest.fixture
def tracker(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(events.sys, "path", list(events.sys.path))
    Path("own_tracker.py").write_text(TRACKER)
    yield
    events.sys.modules.pop("own_tracker", None)


def test_the_command_calls_a_function_by_name(tracker, monkeypatch):
    monkeypatch.setattr("vbcaps.cli.train.changed", lambda name, fields: tiny.recipe(epochs=1))
    done = CliRunner().invoke(app, ["--out", "run", "--device", "cpu", "--on-event", "own_tracker:log"])
    assert done.exit_code == 0, done.output
    seen = events.sys.modules["own_tracker"].seen
    assert (seen[0], seen[-1], seen.count("epoch")) == ("start", "end", 1)
    done = CliRunner().invoke(app, ["--out", "other", "--device", "cpu", "--on-event", "own_tracker:fail"])
    assert done.exit_code == 1
    assert "own_tracker:fail raised ConnectionError: the server is away; other is saved" in " ".join(
        done.output.split()
    )


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        ("own_tracker", "must be MODULE:FUNCTION, such as trackers:log, got 'own_tracker'"),
        ("nowhere:log", "there is no module 'nowhere'"),
        ("own_tracker:nope", "the module 'own_tracker' has no 'nope'"),
        ("own_tracker:number", "must be a function of one event, got int"),
    ],
)
def test_a_name_that_leads_to_no_function_is_an_error(tracker, words, wrong):
    with pytest.raises(ValueError, match=re.escape(wrong)):
        named_hook(words)

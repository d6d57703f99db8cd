"""Runs that are killed, interrupted, resumed, resumed wrongly."""

import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file
from same import assert_same_run
from tiny import forked

from vbcaps.training import files
from vbcaps.training.checkpoint import sum_of
from vbcaps.training.files import RunError, lock, read_json, write_json
from vbcaps.training.loop import Event, Interrupted, fit, fit_seeds, listening
from vbcaps.training.runfolder import read_recipe, read_result
from vbcaps.weights.tensors import pack_tensors, unpack_tensors


def test_a_run_killed_at_random_moments_ends_with_the_same_bits(tmp_path):
    report = forked("kill", tmp_path)
    assert report["kills"] >= 20
    for k in range(report["runs"]):
        assert_same_run(tmp_path / "whole", tmp_path / f"killed{k}")
        assert not list((tmp_path / f"killed{k}").glob(".*"))  # nothing half written is left


def test_a_run_killed_at_each_call_that_writes_ends_with_the_same_bits(tmp_path):
    report = forked("die", tmp_path)
    assert report["runs"] > 30
    for k in range(report["runs"]):
        assert_same_run(tmp_path / "whole", tmp_path / f"killed{k}")
        assert not list((tmp_path / f"killed{k}").glob(".*"))


def test_a_signal_saves_says_how_to_go_on_and_loses_nothing(tmp_path):
    report = forked("signal", tmp_path)
    for name, code in dict(SIGTERM=143, SIGINT=130, SIGHUP=129).items():
        assert report[name] == [code, 0]
        assert f"{name}: the state is saved in {tmp_path / name}; the same command with --resume" in report["stderr"]
        assert_same_run(tmp_path / "whole", tmp_path / name)
    assert report["SIGINTSIGINT"] == [99, 0]  # a KeyboardInterrupt in the middle of it
    assert_same_run(tmp_path / "whole", tmp_path / "SIGINTSIGINT")


def test_a_run_under_nohup_outlives_its_terminal():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with listening() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.signal == 0
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_second_process_is_refused_until_the_first_is_dead(tmp_path):
    report = forked("second", tmp_path)
    assert report["codes"] == [99, 99, 0]
    assert "already holds a run: resume it, or choose another folder" in report["stderr"]
    assert "is in use by another run: wait for its end" in report["stderr"]
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_a_training_goes_on_where_nobody_reads_its_output(tmp_path):
    assert forked("unheard", tmp_path)["codes"] == [0, 0]
    for name in ("pipe", "closed"):
        assert read_result(tmp_path / name)["epochs"] == 2


@pytest.fixture
def tiny_data():
    with tiny.in_place_of_data():
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run of one epoch; copy what is to be changed."""
    with tiny.in_place_of_data():
        folder = tmp_path_factory.mktemp("run") / "one"
        fit(tiny.recipe(epochs=1), folder, device="cpu")
    return folder


def half_way(finished: Path, tmp_path: Path) -> Path:
    """The same as if it had been killed before its last file."""
    folder = tmp_path / "half"
    folder.mkdir()
    for name in ("recipe.json", "state.safetensors"):
        (folder / name).write_bytes((finished / name).read_bytes())
    return folder


def test_two_runs_with_one_seed_are_the_same_and_with_another_are_not(tmp_path, tiny_data, finished):
    fit(tiny.recipe(epochs=1), tmp_path / "again", device="cpu")
    assert_same_run(finished, tmp_path / "again")
    fit(tiny.recipe(epochs=1, seed=1), tmp_path / "other", device="cpu")
    a, b = (load_file(folder / "last.safetensors") for folder in (finished, tmp_path / "other"))
    assert not torch.equal(a["stem.conv1.0.weight"], b["stem.conv1.0.weight"])


def test_a_finished_run_says_so_and_gives_its_result(tiny_data, finished):
    events = []
    before = (finished / "state.safetensors").stat().st_mtime_ns
    result = fit(tiny.recipe(epochs=1), finished, device="cpu", resume=True, on_event=events.append).result
    assert [event.kind for event in events] == ["note"]
    assert "finished" in events[0].message
    written = read_result(finished)
    assert written.pop("sums").keys() == {"metrics.csv", "recipe.json"}
    assert json.loads(json.dumps(result.to_json())) == written
    assert (finished / "state.safetensors").stat().st_mtime_ns == before


def test_a_killed_run_whose_last_file_is_missing_only_tests(tmp_path, tiny_data, finished):
    folder = half_way(finished, tmp_path)
    events = []
    fit(tiny.recipe(epochs=1), folder, device="cpu", resume=True, on_event=events.append)
    assert [event.kind for event in events] == ["note", "start", "end"]
    assert events[0].message == "resumed after 6 steps"
    assert_same_run(finished, folder)


def test_a_run_that_goes_on_keeps_the_command_it_began_with(tmp_path, tiny_data, finished, monkeypatch):
    folder = half_way(finished, tmp_path)
    began = read_json(finished / "environment.json")
    write_json(folder / "environment.json", began)
    for k in range(3):  # the second is as the first was
        monkeypatch.setattr(sys, "argv", ["/bin/vbcaps", "train", "--resume", f"half{k // 2}"])
        fit(tiny.recipe(epochs=1), folder, device="cpu", resume=True)
        (folder / "result.json").unlink()
    environment = read_json(folder / "environment.json")
    assert {field: environment[field] for field in began} == began
    assert [part["command"][-1] for part in environment["resumed"]] == ["half0", "half1"]
    assert environment["resumed"][0]["torch"] == torch.__version__


def test_an_epoch_interrupted_after_its_last_step_has_a_speed(tmp_path, tiny_data):
    def interrupt(event: Event) -> None:
        if event.kind == "step" and event.step == event.steps:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        fit(tiny.recipe(epochs=1), tmp_path, device="cpu", on_event=interrupt)
    events = []
    fit(tiny.recipe(epochs=1), tmp_path, device="cpu", resume=True, on_event=events.append)
    assert [event.kind for event in events] == ["note", "start", "epoch", "end"]
    assert 0 < events[2].images_per_second < 1e5


def test_a_folder_with_a_run_is_not_overwritten(tiny_data, finished):
    with pytest.raises(RunError, match="already holds a run: resume it, or choose another folder"):
        fit(tiny.recipe(epochs=1), finished, device="cpu")


def test_nothing_to_resume(tmp_path, tiny_data):
    with pytest.raises(RunError, match="there is no run to resume in"):
        fit(tiny.recipe(), tmp_path / "none", device="cpu", resume=True)


def test_another_recipe_is_named_field_by_field(tmp_path, tiny_data, finished):
    folder = half_way(finished, tmp_path)
    with pytest.raises(RunError, match=r"another recipe \(batch was 8, is now 6; lr was 0.01, is now 0.1\)"):
        fit(tiny.recipe(epochs=1, lr=0.1, batch=6), folder, device="cpu", resume=True)
    (folder / "recipe.json").unlink()  # the state knows, too
    with pytest.raises(RunError, match="seed was 0, is now 5"):
        fit(tiny.recipe(epochs=1, seed=5), folder, device="cpu", resume=True)


def summed(tensors: dict, fields: dict) -> bytes:
    """Return a state with a right checksum."""
    fields.pop("sum")
    return pack_tensors(tensors, fields | dict(sum=sum_of(tensors, fields)))


def test_a_run_from_before_a_field_was_there_goes_on(tmp_path, tiny_data, finished):
    folder = half_way(finished, tmp_path)
    tensors, about = unpack_tensors((folder / "state.safetensors").read_bytes(), "state")
    for recipe in (fields := json.loads((folder / "recipe.json").read_text())), about["recipe"]:
        for field in ("stretch", "resample"):
            del recipe[field]
    (folder / "recipe.json").write_text(json.dumps(fields))
    (folder / "state.safetensors").write_bytes(summed(tensors, about))
    fit(tiny.recipe(epochs=1), folder, device="cpu", resume=True)
    (folder / "recipe.json").write_text(json.dumps(fields | dict(speed=3)))
    with pytest.raises(RunError, match="a recipe has no field 'speed'"):
        fit(tiny.recipe(epochs=1), folder, device="cpu", resume=True)


def test_how_often_to_save_may_change(tmp_path, tiny_data, finished):
    fit(tiny.recipe(epochs=1, save_seconds=7.0), half_way(finished, tmp_path), device="cpu", resume=True)


def test_other_images_are_noticed(tmp_path, monkeypatch, finished):
    other = tiny.dataset()
    other.train.images[0, 0, 0, 0] += 1
    monkeypatch.setattr("vbcaps.training.loop.load_dataset", lambda *_, **__: other)
    with pytest.raises(RunError, match="trained on other images"):
        fit(tiny.recipe(epochs=1), half_way(finished, tmp_path), device="cpu", resume=True)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_a_damaged_state_is_an_error(tmp_path, tiny_data, finished, keep):
    folder = half_way(finished, tmp_path)
    (folder / "state.safetensors").write_bytes((finished / "state.safetensors").read_bytes()[:keep])
    with pytest.raises(RunError, match="damaged or no safetensors"):
        fit(tiny.recipe(epochs=1), folder, device="cpu", resume=True)


def test_weights_in_place_of_the_state_are_an_error(tmp_path, tiny_data, finished):
    folder = half_way(finished, tmp_path)
    (folder / "state.safetensors").write_bytes((finished / "last.safetensors").read_bytes())
    with pytest.raises(RunError, match="is not the state of a run"):
        fit(tiny.recipe(epochs=1), folder, device="cpu", resume=True)


@pytest.mark.parametrize("epoch", [1, 3])
def test_a_disk_that_fills_in_the_run_ends_it_with_the_state_before(tmp_path, monkeypatch, tiny_data, epoch):
    write, states = files.write, []

    def fails(path: Path, content: bytes) -> None:
        states.append(content) if path.name == "state.safetensors" else None
        if len(states) > epoch:  # the first is the state at the start
            raise RunError(f"cannot write {path}: no room")
        write(path, content)

    monkeypatch.setattr("vbcaps.training.files.write", fails)
    with pytest.raises(RunError, match=r"state\.safetensors: no room"):
        fit(tiny.recipe(epochs=3), tmp_path, device="cpu")
    assert (tmp_path / "state.safetensors").read_bytes() == states[epoch - 1]
    assert not (tmp_path / "result.json").exists()


def test_a_folder_that_cannot_be_made(tmp_path, tiny_data):
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="choose another folder"):
        fit(tiny.recipe(), tmp_path / "file" / "run", device="cpu")


def test_several_seeds_are_the_runs_of_each(tmp_path, tiny_data, finished):
    recipe = tiny.recipe(epochs=1)
    models = fit_seeds(recipe, tmp_path, 2, device="cpu")
    assert [model.result.folder.name for model in models] == ["seed0", "seed1"]
    assert_same_run(finished, tmp_path / "seed0")
    assert read_recipe(tmp_path / "seed1") == replace(recipe, seed=1)
    (tmp_path / "seed1").rename(tmp_path / "kept")  # as if it had ended before the second began
    fit_seeds(recipe, tmp_path, 2, device="cpu", resume=True)
    assert_same_run(tmp_path / "kept", tmp_path / "seed1")


def test_a_folder_of_seeds_is_not_resumed_as_one_run(tmp_path, tiny_data):
    fit_seeds(tiny.recipe(epochs=1), tmp_path, 2, device="cpu")
    with pytest.raises(RunError, match="has a folder for each seed: resume them with --seeds"):
        fit(tiny.recipe(epochs=1), tmp_path, device="cpu", resume=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["seed0", "seed1"]


def test_a_folder_belongs_to_one_run_at_a_time(tmp_path, tiny_data, finished):
    folder = half_way(finished, tmp_path)
    held = lock(folder)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(RunError, match="is in use by another run: wait for its end, or choose another folder"):
        fit(tiny.recipe(epochs=1), folder, device="cpu", resume=True)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    os.close(held)
    other = [fit(tiny.recipe(epochs=1), folder, device="cpu", resume=True)]
    os.close(lock(folder))  # free again
    assert other[0].result.test is not None


def test_a_run_that_fails_lets_go_of_its_folder(tmp_path, tiny_data):
    def fail(event: Event) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fit(tiny.recipe(epochs=1), tmp_path, device="cpu", on_event=fail)
    os.close(lock(tmp_path))


def test_two_runs_begun_at_once_do_not_share_a_folder(tmp_path, tiny_data):
    """Both find it empty; the second is refused when the first has opened it."""

    def again(event: Event) -> None:
        if event.kind == "start":
            with pytest.raises(RunError, match=r"already holds a run|in use by another run"):
                fit(tiny.recipe(epochs=1, lr=0.1), tmp_path, device="cpu")

    fit(tiny.recipe(epochs=1), tmp_path, device="cpu", on_event=again)
    assert read_recipe(tmp_path).lr == tiny.recipe().lr


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("result.json", "", r"result.json is damaged \(.*\): remove it, and resume, to test again"),
        ("result.json", "{}", r"result.json is damaged \(it has no 'test'\): remove it"),
        ("result.json", "[]", "result.json is damaged"),
        ("recipe.json", "[]", r"cannot read .*recipe.json: it has no fields"),
        ("recipe.json", "3", r"cannot read .*recipe.json: it has no fields"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, tiny_data, finished, name, content, message):
    folder = half_way(finished, tmp_path)
    (folder / name).write_text(content)
    with pytest.raises(RunError, match=message):
        fit(tiny.recipe(epochs=1), folder, device="cpu", resume=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(rows=None), "state.safetensors is damaged: its header has no 'rows'"),
        (dict(recipe=None), "state.safetensors is damaged: its header has no 'recipe'"),
        (dict(epoch=99), "state.safetensors is damaged: it stands at epoch 99, step 0, with 1 rows"),
        (dict(step=-1), "state.safetensors is damaged: it stands at epoch 1, step -1"),
    ],
)
def test_a_damaged_position_is_an_error(tmp_path, tiny_data, finished, change, message):
    folder = half_way(finished, tmp_path)
    path = folder / "state.safetensors"
    tensors, state = unpack_tensors(path.read_bytes(), "state")
    state = {key: value for key, value in (state | change).items() if value is not None or key not in change}
    path.write_bytes(summed(tensors, state))
    with pytest.raises(RunError, match=message):
        fit(tiny.recipe(epochs=1), folder, device="cpu", resume=True)


def test_best_weights_that_are_gone_are_missed(tmp_path, tiny_data):
    recipe = tiny.recipe(epochs=1, validation=0.25)
    fit(recipe, tmp_path, device="cpu")
    for name in ("result.json", "best.safetensors"):
        (tmp_path / name).unlink()
    with pytest.raises(RunError, match=r"best\.safetensors is missing"):
        fit(recipe, tmp_path, device="cpu", resume=True)

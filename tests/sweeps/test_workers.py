"""Real workers of one sweep: no trial is lost and none is trained twice, although one worker is killed."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import postgres
import pytest
import sweeping

from vbcaps.sweeps.study import open_sweep
from vbcaps.training.runfolder import read_metrics, read_result

pytest.importorskip("optuna")
SERVER = pytest.mark.skipif(bool(postgres.why_no_server()), reason=postgres.why_no_server() or "there is a server")


@pytest.fixture(params=["file", pytest.param("database", marks=SERVER)])
def storage(request):
    if request.param == "file":
        yield None
        return
    with postgres.server() as url:
        yield url


def test_a_killed_worker_loses_no_trial_and_none_is_trained_twice(tmp_path, storage):
    folder = tmp_path / "sweep"
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | dict(VBCAPS_COMMIT="abc1234")
    command = [sys.executable, str(Path(sweeping.__file__)), str(folder), *([storage] if storage else [])]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == dict(killed=-9, others=[0] * sweeping.WORKERS), done.stderr

    study = open_sweep(folder, storage=storage)
    trials = study.trials()
    study.close()
    assert [one.state for one in trials] == ["done"] * sweeping.TRIALS
    assert len({tuple(one.params.items()) for one in trials}) == sweeping.TRIALS
    starts = {study.run_folder(one.number).name: one.about["starts"] for one in trials}
    assert sorted(starts.values()) == [1] * (sweeping.TRIALS - 1) + [2]
    (left,) = (name for name, count in starts.items() if count == 2)

    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    times = Counter((one["trial"], one["kind"], one["epoch"]) for one in events if one["kind"] in ("epoch", "end"))
    expected = [(name, "epoch", epoch) for name in starts for epoch in range(1, sweeping.EPOCHS + 1)]
    assert times == Counter([*expected, *((name, "end", sweeping.EPOCHS) for name in starts)])
    workers = {name: {one["pid"] for one in events if one["trial"] == name} for name in starts}
    assert {name: len(pids) for name, pids in workers.items()} == starts
    assert len(set.union(*workers.values())) >= 3
    again = [one for one in events if one["trial"] == left and one["kind"] == "start"]
    assert [(one["epoch"], one["step"]) for one in again] == [(1, 0), (2, 0)]  # from the checkpoint

    for one in trials:
        run = study.run_folder(one.number)
        rows = read_metrics(run)
        assert one.error == min(row["validation_error"] for row in rows)
        assert len(rows) == sweeping.EPOCHS
        assert read_result(run)["test"] is None

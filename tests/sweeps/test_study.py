"""What a sweep hands out, and to whom, without any training."""

import re

import postgres
import pytest
import tiny

from vbcaps.sweeps.plan import make_plan
from vbcaps.sweeps.space import Axis
from vbcaps.sweeps.study import DEATHS, open_sweep
from vbcaps.training.files import RunError

pytest.importorskip("optuna")


def plan(fields=("lr=log:1e-4,1e-2", "routing=choice:vb,em"), method="tpe", trials=4):
    return make_plan(tiny.recipe(), list(fields), method, trials, validation=0.25)[0]


def test_workers_get_different_trials_and_the_trials_of_the_dead(tmp_path):
    one, two = open_sweep(tmp_path / "s", plan()), open_sweep(tmp_path / "s")
    first, second = one.take(), two.take()
    assert (first.number, second.number) == (0, 1)
    assert first.params != second.params
    assert [trial.state for trial in two.trials()] == ["running", "running"]
    one.close()  # as the system does when a process dies
    assert [trial.state for trial in two.trials()] == ["running", "waiting"]
    again = two.take()
    assert (again.number, again.params, again.starts) == (0, first.params, 2)
    assert one.tell(first, 0.1) is False  # it is another worker's by now
    assert two.tell(again, 0.2, epochs=1)
    assert two.best().error == 0.2
    assert two.best().about["epochs"] == 1


def test_a_result_counts_once(tmp_path):
    one, two = open_sweep(tmp_path / "s", plan()), open_sweep(tmp_path / "s")
    work = one.take()
    one.claims.release(work.number)  # a connection that broke, and nobody took the trial: it is still its own
    assert one.tell(work, 0.3)
    assert not one.tell(work, 0.1)
    assert not two.tell(work, 0.1)
    assert two.best().error == 0.3


def test_a_trial_that_kills_its_workers_ends(tmp_path):
    for start in range(DEATHS):
        study = open_sweep(tmp_path / "s", plan(trials=1))
        assert study.take().starts == start + 1
        study.close()
    study = open_sweep(tmp_path / "s")
    assert study.take() is None
    (trial,) = study.trials()
    assert (trial.state, trial.about["error"]) == ("failed", f"{DEATHS} workers died of it")


def test_a_worker_that_leaves_its_trial_does_not_count_as_dead(tmp_path):
    study = open_sweep(tmp_path / "s", plan(trials=1))
    for _ in range(DEATHS + 2):
        work = study.take()
        assert work.starts == 1
        study.leave(work)
    assert study.tell(study.take(), None, error="it diverged")
    assert [(one.state, one.about["error"]) for one in study.trials()] == [("failed", "it diverged")]
    assert study.best() is None


def test_a_worker_may_die_while_it_draws(tmp_path, monkeypatch):
    one = open_sweep(tmp_path / "s", plan(trials=1))
    suggest = Axis.suggest

    def dies(axis, trial):
        if axis.field == "routing":
            raise KeyboardInterrupt
        return suggest(axis, trial)

    monkeypatch.setattr(Axis, "suggest", dies)
    with pytest.raises(KeyboardInterrupt):
        one.take()
    monkeypatch.undo()
    work = open_sweep(tmp_path / "s").take()
    assert (work.number, set(work.params)) == (0, {"lr", "routing"})


@pytest.mark.parametrize("method", ["tpe", "random", "grid"])
def test_no_setting_is_drawn_twice(tmp_path, method):
    few = plan(["iters=int:1,2", "routing=choice:vb,em,dynamic"], method, 20)
    studies = [open_sweep(tmp_path / "s", few), open_sweep(tmp_path / "s")]
    seen = []
    while (work := studies[len(seen) % 2].take()) is not None:
        seen.append(tuple(work.params.items()))
        studies[(len(seen) - 1) % 2].tell(work, 0.01 * len(seen))
    assert len(set(seen)) == len(seen) == 6
    assert [one.error for one in studies[0].trials()] == sorted(0.01 * k for k in range(1, 7))


def test_one_worker_draws_the_same_settings_again(tmp_path):
    drawn = []
    for name in "ab":
        study, drawn_here = open_sweep(tmp_path / name, plan(trials=6)), []
        while (work := study.take()) is not None:
            drawn_here.append(work.params)
            study.tell(work, work.params["lr"])
        drawn.append(drawn_here)
    assert drawn[0] == drawn[1]


def test_tpe_draws_near_the_best(tmp_path):
    study = open_sweep(tmp_path / "s", plan(["lr=log:1e-4,1"], trials=18))
    drawn = []
    while (work := study.take()) is not None:
        drawn.append(work.params["lr"])
        study.tell(work, abs(work.params["lr"] - 0.01))
    near = [sum(0.001 < lr < 0.1 for lr in part) / len(part) for part in (drawn[:10], drawn[10:])]
    assert near[1] > max(near[0], 0.7)


def test_another_sweep_in_the_folder_is_an_error_and_more_trials_are_not(tmp_path):
    folder = tmp_path / "s"
    open_sweep(folder, plan(trials=2)).close()
    with pytest.raises(RunError, match=r"s is another sweep \(lr was log:0.0001,0.01, is now log:0.0001,0.1.*--resume"):
        open_sweep(folder, plan(["lr=log:1e-4,1e-1", "routing=choice:vb,em"]))
    old = open_sweep(folder)
    more = open_sweep(folder, plan(trials=3))
    for _ in range(3):
        more.tell(more.take(), 0.5)
    assert more.take() is None
    more.extend(4)
    assert old.take() is not None  # it reads the plan again
    assert old.take() is None


def test_what_cannot_be_opened_is_an_error(tmp_path):
    with pytest.raises(RunError, match=f"there is no sweep in {re.escape(str(tmp_path))}"):
        open_sweep(tmp_path)
    with pytest.raises(ValueError, match=r"storage must be the URL of a PostgreSQL database, .* got 'mysql://host/x'"):
        open_sweep(tmp_path / "s", plan(), "mysql://host/x")
    with pytest.raises(RunError, match=r"the database of the sweep does not answer: .*No such file"):
        open_sweep(tmp_path / "s", plan(), f"postgresql://me:secret@/x?host={tmp_path}")
    assert not list(tmp_path.rglob("sweep.*"))
    open_sweep(tmp_path / "t", plan()).close()
    with pytest.raises(RunError, match=r"t keeps its trials in sweep.db: leave --storage out"):
        open_sweep(tmp_path / "t", plan(), "postgresql://me@host/x")


def test_without_the_package_the_error_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "optuna", None)
    with pytest.raises(
        RunError, match=re.escape("optuna is not installed, which sweeps need: pip install 'vbcaps[sweep]'")
    ):
        open_sweep(tmp_path, plan())


@pytest.mark.skipif(bool(postgres.why_no_server()), reason=postgres.why_no_server() or "there is a server")
def test_a_connection_that_breaks_ends_the_claim_and_not_the_sweep(tmp_path):
    import psycopg

    with postgres.server() as url:

        def cut() -> None:
            with psycopg.connect(url) as own:
                own.execute("select pg_terminate_backend(pid) from pg_stat_activity where pid <> pg_backend_pid()")

        with_password = url.replace("postgres@", "postgres:secret@")
        one = open_sweep(tmp_path / "a" / "s", plan(), with_password)
        assert "secret" not in (tmp_path / "a" / "s" / "sweep.json").read_text()
        with pytest.raises(RunError, match=r"there is no sweep other in .*: begin it with"):
            open_sweep(tmp_path / "b" / "other", storage=url)
        two = open_sweep(tmp_path / "b" / "s", storage=url)  # another machine: it knows the name and the database
        assert two.plan == one.plan

        work = one.take()
        assert [trial.state for trial in two.trials()] == ["running"]
        cut()
        assert one.tell(work, 0.3)  # nobody took the trial meanwhile, so it is still this worker's
        work = one.take()
        cut()
        again = two.take()
        assert (again.number, again.starts) == (work.number, 2)
        assert not one.tell(work, 0.1)
        assert two.tell(again, 0.2)
        assert [trial.error for trial in one.trials()] == [0.2, 0.3]
        three = open_sweep(tmp_path / "a" / "s")  # the folder knows its database
        assert len(three.trials()) == 2
    with pytest.raises(RunError, match=r"the database of the sweep does not answer: "):
        one.take()


@pytest.mark.skipif(bool(postgres.why_no_server()), reason=postgres.why_no_server() or "there is a server")
def test_a_server_that_restarts_ends_claims_and_loses_no_result(tmp_path):
    with postgres.restarting() as (url, restart):
        one, two = open_sweep(tmp_path / "s", plan(), url), open_sweep(tmp_path / "s", storage=url)
        first, second = one.take(), two.take()
        restart()
        assert one.tell(first, 0.1, epochs=1)  # nobody took it meanwhile
        again = one.take()  # the claim of the other worker has ended with its connection
        assert (again.number, again.starts) == (second.number, 2)
        assert not two.tell(second, 0.2)
        assert one.tell(again, 0.3)
        assert [trial.error for trial in two.trials()] == [0.1, 0.3]
        for study in (one, two):
            study.close()

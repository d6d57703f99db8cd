"""Damaged and hostile files of a sweep: every error is a sentence that names the file, and nothing else changes."""

import json
import os
import random
import re
import shutil
import sqlite3
from pathlib import Path

import pytest
import tiny

pytest.importorskip("optuna")

from vbcaps.sweeps.claims import JOURNAL
from vbcaps.sweeps.plan import Plan, make_plan
from vbcaps.sweeps.study import open_sweep
from vbcaps.training.files import RunError

FIELDS = ["lr=log:1e-4,1e-2", "routing=choice:vb,em"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("sweeps") / "s"
    study = open_sweep(folder, make_plan(tiny.recipe(), FIELDS, "random", 5, validation=0.25)[0])
    for k in range(3):
        study.tell(study.take(), 0.1 * k, epochs=1, best_epoch=1, seconds=1.0, parameters=5)
    study.take()
    study.close()
    return folder


@pytest.fixture
def sweep(whole, tmp_path) -> Path:
    return shutil.copytree(whole, tmp_path / "s")


def use(folder: Path) -> None:
    study = open_sweep(folder)
    try:
        study.trials()
        if (work := study.take()) is not None:
            study.plan.recipe(work.params)
            study.leave(work)
    finally:
        study.close()


def change(folder: Path, statement: str, *values: object) -> None:
    with sqlite3.connect(folder / "sweep.db") as database:
        assert database.execute(statement, values).rowcount > 0


def test_a_damaged_file_of_trials_is_named(whole, sweep):
    """Letters in its texts, so that SQLite still reads it, and any bytes."""
    content = (whole / "sweep.db").read_bytes()
    words = [found.start() for found in re.finditer(rb'[a-z0-9_":.]{3,}', content)]
    drawn = random.Random(0)
    refused = 0
    for _ in range(150):
        damaged = bytearray(content)
        for _ in range(1 + int(drawn.expovariate(0.7))):
            at = drawn.choice(words) + drawn.randrange(3) if drawn.random() < 0.7 else drawn.randrange(len(damaged))
            damaged[at] = drawn.randrange(256)
        (sweep / "sweep.db").write_bytes(damaged)
        try:
            use(sweep)
        except RunError as error:
            refused += 1
            said = str(error)
            assert "sweep.db" in said
            assert said.isprintable(), said
    assert refused > 20


@pytest.mark.parametrize(
    ("statement", "values", "message"),
    [
        (
            "UPDATE trial_user_attributes SET value_json = ? WHERE key = 'worker'", ['"\x1b[2J"'],
            "sweep.db: it is damaged, or another program's",  # JSON has no such characters
        ),
        (
            "UPDATE trial_user_attributes SET value_json = ? WHERE key = 'worker'", ['"\\u001b[2J"'],
            r"sweep\.db is damaged: trial 0 has words with control characters",
        ),
        (
            "UPDATE trial_user_attributes SET value_json = ? WHERE key = 'epochs'", ['"many"'],
            r"sweep\.db is damaged: trial 0 has epochs = 'many'",
        ),
        (
            "UPDATE trial_params SET distribution_json = replace(distribution_json, '\"em\"', ?)", ['"\\u001b[2J"'],
            r"sweep\.db",
        ),
        ("UPDATE study_user_attributes SET value_json = '[]'", [], r"the plan of \S+sweep\.db is damaged"),
        (
            "UPDATE study_user_attributes SET value_json = replace(value_json, '\"random\"', '\"best\"')", [],
            r"the plan of \S+sweep\.db is damaged.*method 'best'",
        ),
        (
            "UPDATE study_user_attributes SET value_json = replace(value_json, '\"trials\": 5', '\"trials\": -5')", [],
            r"the plan of \S+sweep\.db is damaged.*-5 trials",
        ),
        (
            "UPDATE study_user_attributes SET value_json = replace(value_json, '0.0001', '1e999')", [],
            r"the plan of \S+sweep\.db is damaged.*the axis lr must have numbers",
        ),
        (
            "UPDATE study_user_attributes SET value_json = replace(value_json, '\"kind\": \"log\"', '\"kind\": 3')", [],
            r"the plan of \S+sweep\.db is damaged.*an axis must have a field, and a kind",
        ),
    ],
)  # fmt: skip
def test_what_another_program_wrote_is_refused(sweep, statement, values, message):
    change(sweep, statement, *values)
    with pytest.raises(RunError, match=message) as caught:
        use(sweep)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize("name", ["sweep.db", "sweep.db-journal", "sweep.db-wal", ".claims/sweep.lock"])
@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "device", "folder"])
def test_nothing_is_opened_through_a_link_or_a_pipe(sweep, tmp_path, name, kind):
    elsewhere, path = tmp_path / "elsewhere", sweep / name
    elsewhere.write_bytes(b"precious")
    path.unlink(missing_ok=True)
    dict(
        link=lambda: path.symlink_to(elsewhere), dangling=lambda: path.symlink_to(tmp_path / "new"),
        pipe=lambda: os.mkfifo(path), device=lambda: path.symlink_to("/dev/zero"), folder=path.mkdir,
    )[kind]()  # fmt: skip
    with pytest.raises(RunError, match=f"{re.escape(path.name)}: it is no file but a link, a folder, a pipe or a devi"):
        use(sweep)
    assert elsewhere.read_bytes() == b"precious"
    assert not (tmp_path / "new").exists()


def test_folders_of_claims_and_trials_are_no_links(sweep, tmp_path):
    (tmp_path / "other").mkdir()
    (sweep / "trial-0003").symlink_to(tmp_path / "other")
    study = open_sweep(sweep)
    with pytest.raises(RunError, match="trial-0003: it is a link"):
        study.run_folder(3)
    study.close()
    shutil.rmtree(sweep / ".claims")
    (sweep / ".claims").symlink_to(tmp_path / "other")
    with pytest.raises(RunError, match=r"\.claims: it is a link"):
        use(sweep)
    assert not list((tmp_path / "other").iterdir())


def test_a_journal_that_names_another_file_is_refused(sweep, tmp_path):
    """SQLite would remove the file that it names."""
    (sweep / "sweep.db-journal").write_bytes(bytes(512) + str(tmp_path / "x").encode() + bytes(8) + JOURNAL)
    with pytest.raises(RunError, match="is the journal of another program"):
        use(sweep)


def test_a_file_of_a_terabyte_is_refused(sweep):
    (sweep / "sweep.db").unlink()
    with open(sweep / "sweep.db", "xb") as file:
        file.truncate(2 << 30)
    with pytest.raises(RunError, match=r"sweep\.db: it has 2,147,483,648 bytes, more than"):
        use(sweep)


@pytest.mark.parametrize("storage", ["[1]", '"\\u001b[2J"', "3"])
def test_a_database_that_is_no_address_is_refused(sweep, storage):
    (sweep / "sweep.json").write_text(f'{{"storage": {storage}}}')
    with pytest.raises(RunError, match=r"sweep\.json is damaged: storage must be the URL of a database, got"):
        use(sweep)


@pytest.mark.parametrize("storage", ["cpu", "../x", "mysql://host/x"])
def test_an_address_that_is_no_postgresql_database_names_the_file(sweep, storage):
    (sweep / "sweep.json").write_text(f'{{"storage": "{storage}"}}')
    with pytest.raises(RunError, match=r"sweep\.json is damaged: storage must be the URL of a PostgreSQL database"):
        use(sweep)


def test_plans_come_back_from_json():
    plan = make_plan(tiny.recipe(), [*FIELDS, "iters=int:1,4,2", "epochs=3"], "tpe", 4, validation=0.25)[0]
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan

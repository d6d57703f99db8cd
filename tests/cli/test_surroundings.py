"""The command line for a user without a home, in a plain locale, and with closed streams."""

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from vbcaps.cli import main
from vbcaps.cli.main import app


@pytest.fixture
def no_home(monkeypatch, tmp_path):
    for name in ("HOME", "XDG_CACHE_HOME", "LOCALAPPDATA", "VBCAPS_DATA", "VBCAPS_CACHE", "VBCAPS_WEIGHTS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda number: {}["no entry"])
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        ("data list", 1, "this user has no home: give --data-folder (data_folder), or set VBCAPS_DATA"),
        ("data check mnist", 1, "this user has no home"),
        ("train smallnorb --device cpu", 1, "this user has no home"),
        ("weights list", 0, "fashion_laptop"),
        ("recipes", 0, "smallnorb"),
        ("predict ~/x.png --weights fashion_laptop", 1, "~/x.png"),
    ],
)
def test_a_user_without_a_home(no_home, words, code, said):
    result = CliRunner().invoke(app, words.split(), env={"COLUMNS": "1000"})
    assert (result.exit_code, said in result.output) == (code, True), (result.output, result.exception)


def test_a_locale_that_has_no_letters_beyond_ascii():
    """Python then writes ASCII, which has no ±."""
    plain = dict(LANG="C", LC_ALL="C", PYTHONCOERCECLOCALE="0", PYTHONUTF8="0")
    command = [sys.executable, "-m", "vbcaps", "recipes", "smallnorb"]
    done = subprocess.run(command, env=os.environ | plain, capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert rb"test error 1.6 \xb1 0.06%" in done.stdout


def test_closed_streams_are_opened_before_a_file_can_take_their_place(tmp_path):
    code = (
        "import os, sys; from vbcaps.cli import main; main.app = lambda **_: None; main.main();"
        f"print(os.open({str(tmp_path / 'x')!r}, os.O_CREAT | os.O_WRONLY), file=open({str(tmp_path / 'y')!r}, 'w'))"
    )
    subprocess.run(["sh", "-c", 'exec "$0" -c "$1" <&- >&- 2>&-', sys.executable, code], check=True, timeout=60)
    assert int((tmp_path / "y").read_text()) > 2


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, ("PASSIVE", "1000")),
        (dict(GOMP_SPINCOUNT="7"), ("PASSIVE", "7")),
        (dict(OMP_WAIT_POLICY="ACTIVE"), ("ACTIVE", None)),
    ],
)
def test_threads_sleep_soon_unless_the_user_says_otherwise(given, expected, monkeypatch):
    environment = dict(given)
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(main, "app", lambda **_: None)
    monkeypatch.setattr(main.fetch, "show", main.fetch.show)
    main.main()
    assert (environment.get("OMP_WAIT_POLICY"), environment.get("GOMP_SPINCOUNT")) == expected

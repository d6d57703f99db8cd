"""`vbcaps figures`: lists, draws, and says what is missing."""

import made_up
import pytest
from typer.testing import CliRunner

from vbcaps.cli.main import app
from vbcaps.figures.catalogue import FIGURES


@pytest.fixture
def vbcaps(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda *words: CliRunner().invoke(app, ["figures", *words])


def test_without_a_name_the_figures_are_listed(vbcaps):
    done = vbcaps()
    assert done.exit_code == 0
    assert all(name in done.output and figure.help in done.output for name, figure in FIGURES.items())


def test_one_figure_and_all_of_them(vbcaps, tmp_path):
    made_up.all_of_them(tmp_path / "results")
    done = vbcaps("affnist", "--out", "pictures")
    assert done.exit_code == 0
    assert "drew pictures/affnist.png" in done.output
    assert [path.name for path in (tmp_path / "pictures").iterdir()] == ["affnist.png"]
    assert vbcaps("all").exit_code == 0
    drawn = {path.name for path in (tmp_path / "figures").iterdir()}
    names = {*FIGURES} - {"votes"} | {"votes-airplane", "votes-car"}
    assert drawn == {f"{name}.png" for name in names}


def test_an_unknown_name_suggests_the_nearest(vbcaps):
    done = vbcaps("prior")
    assert done.exit_code == 2
    assert "did you mean" in " ".join(done.output.split())
    assert "priors" in done.output


def test_what_is_missing_names_its_command_and_the_others_are_drawn(vbcaps, tmp_path):
    made_up.affnist(tmp_path / "results")
    done = vbcaps("all")
    assert done.exit_code == 1
    assert "tools/series.py priors" in done.output
    assert "drew figures/affnist.png" in done.output
    assert vbcaps("affnist", "--results", "nowhere").exit_code == 1

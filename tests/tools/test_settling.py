"""The page on settling: its tables and figure are those of the records, and its gain is that of routing."""

import csv
import re
import sys
from pathlib import Path

import pytest
import torch

from vbcaps.distributions import expected_log_pi
from vbcaps.figures.run import GREY
from vbcaps.prior import Prior
from vbcaps.routing.vb import expected_logdet, expected_mahalanobis, update_q_parameters
from vbcaps.training.recipes import recipe

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import settling

ROWS = settling.small(settling.RESULTS)


def test_the_page_has_the_tables_of_the_records():
    page = settling.PAGE.read_text()
    assert settling.with_tables(page, settling.RESULTS) == page
    emptied = re.sub(r"(<!-- results: made by[^>]*-->).*?(<!-- end)", r"\1\n\2", page, flags=re.DOTALL)
    assert emptied != page
    assert settling.with_tables(emptied, settling.RESULTS) == page


@pytest.mark.parametrize(("votes", "t"), [(3.0, 1.0), (10.0, 0.25), (30.0, 0.0625)])
@pytest.mark.parametrize("prior", [*settling.GAIN_PRIORS, dict(alpha0=0.3, kappa0=2.0, nu0=40.0, psi0=0.5)])
def test_the_gain_is_how_fast_routing_lets_an_advantage_grow(votes, t, prior):
    types, ahead = 10, 1e-5
    given = settling.PRIOR | prior
    values = dict(alpha0=given["alpha0"], kappa0=given.get("kappa0", 1.0), nu0=given["nu0"], Psi0=given["psi0"])
    children = int(votes * types)
    a, V = torch.ones(1, 1, children).double(), torch.zeros(1, 1, children, types, 16).double()
    r = torch.full((1, 1, children, types), 1 / types).double()
    r = r + ahead * (torch.arange(types) == 0) - ahead / (types - 1) * (torch.arange(types) > 0)
    q = update_q_parameters(r, a, V, Prior(**values, dtype=torch.float64)(), "gamma")
    scores = expected_log_pi(q.alpha) + 0.5 * expected_logdet(q, "gamma")
    after = (t * (scores[:, :, None] - 0.5 * expected_mahalanobis(V, q))).softmax(-1)
    grown = float((after[..., 0] - 1 / types).mean()) / ahead
    del values["Psi0"]
    assert settling.gain(votes, t, **values) == pytest.approx(grown, rel=1e-3)


def test_a_setting_is_one_row_or_an_error():
    row = settling.the_row(ROWS, settling.OF_RECIPE)
    assert (float(row["alpha0"]), row["sharpness"][:5]) == (1, "0.285")
    with pytest.raises(ValueError, match="0 have"):
        settling.the_row(ROWS, ("agreement", 1 / 3, None, None, None, 3))
    with pytest.raises(ValueError, match="2 have"):
        settling.the_row([row, row], settling.OF_RECIPE)


def test_the_recipe_that_the_figure_names_is_the_default():
    one = recipe("default")
    assert (one.activation, one.temper, one.nu0, one.psi0, None, one.iters) == settling.OF_RECIPE
    assert one.alpha0 == settling.PRIOR["alpha0"]


def test_cells_leave_out_what_was_not_measured_or_means_nothing():
    em = settling.the_row(ROWS, ("em", None, None, None, None, 3))
    even = settling.the_row(ROWS, ("agreement", None, None, None, None, 1))
    assert settling.cells_of(em)[:3] == ["EM", "", ""]
    assert settling.cells_of(em)[7] == settling.cells_of(even)[7] == ""
    assert settling.cells_of(even)[0] == "agreement, one iteration"
    assert settling.cells_of(even)[-2:] == ["0.0", "0.0"]
    assert settling.prior_of(em) == "17 (17)"
    assert settling.prior_of(even | dict(nu0="100", psi0="0.1", alpha0="1000")) == "10 (100, α₀ = 1000)"
    assert settling.softness(0.0625) == "1/16"


def test_the_page_says_how_many_networks_are_drawn():
    shown = settling.drawn(ROWS)
    of_three = [row for row in ROWS if row["iters"] == "3" and row["sharpness"]]
    page = settling.PAGE.read_text()
    assert f"for {len(shown)} small networks" in page
    assert f"{len(of_three) - len(shown)} of {len(of_three)} networks" in page
    left = [row for row in of_three if row not in shown]
    assert min(settling.value(row, "nu0") * settling.value(row, "psi0") for row in left) == 25
    assert {settling.kind(row)[0] for row in shown} == {settling.HARD, settling.SOFT, settling.SETTLED, GREY}


def test_the_numbers_of_shipped_networks_are_those_of_the_record():
    with open(settling.RESULTS / "health.csv", newline="") as file:
        health = {row["network"]: row for row in csv.DictReader(file)}
    said = {"smallnorb": (3, 4, 6), "fashion": (3, 4, 6), "fashion_evidence": (2, 3, 6)}
    text = " ".join(settling.PAGE.read_text().split("## What makes it settle")[0].split())
    for name, iters in said.items():
        after = text.split(f"`{name}`", 1)[1]
        numbers = [float(x) for x in re.findall(r"\d+\.\d", after)[: len(iters)]]
        assert numbers == [round(100 * float(health[name][f"error_{k}"]), 1) for k in iters], name


def test_everything_is_drawn_and_written(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    page = tmp_path / "page.md"
    page.write_text(settling.PAGE.read_text())
    monkeypatch.setattr(settling, "PAGE", page)
    settling.main(["--out", str(tmp_path)])
    assert (tmp_path / "settling.png").stat().st_size > 10_000
    assert page.read_text() == (settling.ROOT / "docs" / "settling.md").read_text()

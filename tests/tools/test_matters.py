"""The tables of docs/matters.md, from made-up errors."""

import sys
from pathlib import Path

import pytest

from vbcaps.training.recipes import recipe

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import matters


def test_every_kind_of_the_series_is_a_valid_recipe_and_has_a_column(monkeypatch):
    monkeypatch.setattr(matters, "errors", lambda recorded, base, fields: {0: float(len(recipe(base, **fields).name))})
    rows = matters.by_dataset("laptop", {})
    assert list(rows) == ["two overlapping digits", "smallNORB", "Fashion-MNIST", "two overlapping clothes"]
    assert all(list(kinds) == list(matters.KINDS) for kinds in rows.values())
    bases = [base for base, _ in matters.matters("laptop")]
    assert [base for base in bases if "_cnn" in base] == bases[8:12]
    assert [base for base in bases if "_em" in base] == bases[12:16]


def test_a_cell_has_mean_deviation_and_seeds():
    assert matters.cell({}) == ""
    assert matters.cell({3: 1.5}) == "1.50 (1)"
    assert matters.cell({0: 1.0, 1: 2.0, 4: 3.0}) == "2.00 ± 1.00 (3)"


@pytest.mark.parametrize(
    ("differences", "p"), [([1.0, 2.0], 0.5), ([1.0, -1.0], 1.0), ([1, 1, 1, 1, 1], 2 / 32), ([-5.0, 1.0, -2.0], 0.5)]
)
def test_the_permutation_test_counts_signs(differences, p):
    assert matters.permutation_p(differences) == pytest.approx(p)


def test_differences_are_paired_by_seed(monkeypatch):
    made = {
        "settled": {0: 3.0, 1: 5.0, 2: 9.0}, "uniform": {1: 4.0, 2: 7.0}, "CNN": {7: 1.0}, "EM": {}, "Algorithm 1": {},
        "Dynamic": {},
    }  # fmt: skip
    monkeypatch.setattr(matters, "by_dataset", lambda scale, recorded: {"toys": made, "none": {"settled": {}}})
    monkeypatch.setattr(matters, "by_recipe", lambda results: {})
    text = matters.pages_tables("laptop")
    assert "| toys | settled - uniform | +1.50 | +1.00, +2.00 | 0.50 |" in text
    assert text.count("| toys |") == 2  # one row of means, one pair
    assert "none" not in text

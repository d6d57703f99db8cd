"""The figures and tables of uncertainty, from a table of measures that nobody measured."""

import json
import sys
from pathlib import Path

import made_up
import pytest

from vbcaps.figures import trust
from vbcaps.figures.records import MissingRecords

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
import trusted


@pytest.fixture
def results(tmp_path):
    made_up.uncertainty(tmp_path)
    for seed, error in enumerate((0.07, 0.09)):
        name = tmp_path / f"series/some/fashion_laptop-evidence-{seed}"
        made_up.record(name, "fashion_laptop", test=error + 0.01, lr=0.004, evidence=1.0, seed=seed)
        change(name, validation=error)
    change(
        made_up.record(tmp_path / "fashion_evidence_laptop-0", "fashion_evidence_laptop", test=0.085, lr=0.004), 0.08
    )
    return tmp_path


def change(folder, validation):
    path = folder / "result.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | dict(validation=validation)))


def test_the_best_score_is_chosen_on_one_pair_alone(results):
    measures = trust.read_measures(results)
    assert measures.best("") == "logits"
    assert measures.best("", trust.of_posterior) == "density class_caps.kappa"
    assert measures.best("_cnn") == "max_softmax"
    assert measures.best("_cnn", ensemble=5) == "disagreement"
    assert measures.best("_em") is None


def test_seeds_and_ensembles_are_kept_apart(results):
    measures = trust.read_measures(results)
    assert measures.strangers("", "max_softmax") == {("fashion", "mnist"): [0.6, 0.62], ("mnist", "svhn"): [0.6, 0.64]}
    assert measures.strangers("_cnn", "disagreement") == {}
    assert measures.strangers("_cnn", "disagreement", 5) == {("fashion", "mnist"): [0.75]}


@pytest.mark.parametrize("draw", [trust.strangers, trust.damaged, trust.calibration])
def test_a_figure_is_drawn(draw, results, tmp_path):
    pytest.importorskip("matplotlib")
    (path,) = draw(results, tmp_path / "out")
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def figure(monkeypatch):
    """The last figure that was drawn, before it became a PNG."""
    seen = []
    monkeypatch.setattr(trust, "save", lambda figure, path: seen.append(figure) or path)
    return lambda: seen[-1]


def marked(axes, label):
    return next(line for line in axes.lines if line.get_label().replace("\n", " ") == label)


def test_strangers_have_a_panel_for_each_kind_with_means_and_what_is_missing(results, tmp_path, figure):
    trust.strangers(results, tmp_path)
    of_vb, of_cnn = figure().axes
    assert [axes.get_title(loc="left") for axes in figure().axes] == ["VB", "CNN"]
    softmax = marked(of_vb, "maximum softmax")
    assert softmax.get_xdata() == pytest.approx([1 - 0.61, 1 - 0.62, 1 - 0.615])  # two pairs and their mean
    density = marked(of_vb, "density of class evidence")
    assert density.get_xdata()[:2] == pytest.approx([1 - 0.91, 1 - 0.92])
    ranges = [list(line.get_xdata()) for line in of_vb.lines]
    assert any(ends == pytest.approx([1 - 0.6, 1 - 0.62]) for ends in ranges), "from one seed to the other"
    assert [text.get_text() for text in of_vb.texts] == [".615", ".915"]
    assert marked(of_cnn, "5 x CNN, disagreement").get_xdata() == pytest.approx([0.25])
    assert [text.get_text() for text in of_cnn.texts] == [".450", "not run", "no mean"]
    assert len(set(softmax.get_ydata()) | set(density.get_ydata())) == 6  # no marker hides another
    low, high = of_vb.get_xlim()
    assert low > high, "better is to the right"


def test_a_perfect_score_is_at_the_edge():
    assert trust.edge(1.0) == trust.edge(0.999) == pytest.approx(0.005)
    assert trust.edge(0.39) == pytest.approx(0.61)
    assert trust.borders([("a", "b"), ("a", "c"), ("b", "a")]) == [1.5]


def test_damage_has_scores_above_errors_and_undamaged_images_first(results, tmp_path, figure):
    trust.damaged(results, tmp_path)
    upper, lower = figure().axes[0], figure().axes[4]
    line = marked(upper, "VB, maximum softmax")
    assert list(line.get_ydata()) == pytest.approx([0.5, 0.8])
    assert lower.get_xlabel() == "turned, by degrees"
    assert [label.get_text() for label in lower.get_xticklabels()] == ["0", "1"]
    assert list(marked(lower, "VB").get_ydata()) == pytest.approx([30])  # of undamaged images nothing was made up
    assert marked(lower, "VB").get_xdata() == pytest.approx([1])


def test_reliability_has_counts_below_and_no_points_of_few_images(results, tmp_path, figure, monkeypatch):
    trust.calibration(results, tmp_path)
    upper, counts = figure().axes[:2]
    assert list(marked(upper, "VB").get_xdata()) == pytest.approx([50, 90])
    assert list(marked(counts, "VB").get_ydata()) == pytest.approx([50, 50])
    assert len(set(trust.STYLES.values())) == len(trust.KINDS)  # told apart in grey, too
    monkeypatch.setattr(trust, "FEW", 51)
    trust.calibration(results, tmp_path)
    assert "VB" not in [line.get_label() for line in figure().axes[0].lines]


@pytest.mark.parametrize("draw", [trust.strangers, trust.damaged, trust.calibration])
def test_without_records_the_command_that_makes_them_is_named(draw, tmp_path):
    with pytest.raises(MissingRecords, match=r"tools/uncertainty\.py"):
        draw(tmp_path, tmp_path / "out")


def test_the_tables_hold_mean_and_spread_over_seeds(results):
    calibration, errors, strangers, viewpoints, damage, evidence = trusted.on_uncertainty(results)
    assert "| Fashion-MNIST | VB | 11.0 ± 1.4 | 2.00 ± 0.00 |" in calibration
    assert "| Fashion-MNIST | 5 x CNN |  |  | 1.30 |" in calibration
    assert "| VB, maximum softmax | 61.0 ± 1.4 | 62.0 ± 2.8 | 61.5 |" in strangers
    assert "| 5 x CNN, disagreement | 75.0 |  |  |" in strangers  # no mean over pairs that it has not seen
    assert "VB 90.0" in strangers
    assert "| VB | energy | 66.0 | 1 |" in viewpoints
    assert "| blurred, pixels: 1 | 30.0 ± 0.0 | 80.0 ± 0.0 | 80.0 ± 0.0 |  |" in damage
    assert "| `fashion_laptop --evidence 1.0` | 8.00 ± 1.41 | 9.00 ± 1.41 | 97.0 |" in evidence
    assert "| `fashion_laptop --no-norm-logit --evidence 0.1` | 8.00 | 8.50 | 94.0 ± 2.8 |" in evidence
    assert errors.startswith("## Finding errors")


def test_temperatures_stand_for_both_halves(tmp_path):
    head = "network,fitted_on,judged_on,images,temperature,error,ece_before,ece,adaptive_ece,nll_before,nll"
    (tmp_path / "temperatures.csv").write_text(
        f"{head}\nfashion,first,other,5000,1.18,0.05,0.018,0.008,0.009,0.18,0.16\n"
        "fashion,second,other,5000,1.21,0.05,0.016,0.005,0.006,0.17,0.15\n"
    )
    (table,) = trusted.on_uncertainty(tmp_path)
    assert "| `fashion` | 1.18 / 1.21 | 1.80 / 1.60 | 0.80 / 0.50 |" in table
    assert "0 miss it: none" in table


def test_a_temperature_of_held_out_images_stands_alone_and_missed_aims_are_named(tmp_path):
    head = "network,fitted_on,judged_on,images,temperature,error,ece_before,ece,adaptive_ece,nll_before,nll"
    (tmp_path / "temperatures.csv").write_text(
        f"{head}\na,held-out images,all test images,10000,0.99,0.05,0.012,0.0138,0.009,0.18,0.16\n"
        "b,first,other,5000,1.18,0.05,0.018,0.012,0.009,0.18,0.16\nb,second,other,5000,1.2,0.05,0.01,0.007,0.1,0.1,0.1\n"
    )
    (table,) = trusted.on_uncertainty(tmp_path)
    assert "| `a` | 0.99 | 1.20 | 1.38 | 0.90 | 0.180 → 0.160 | 10,000 |" in table
    assert "1 miss it: `a` (1.38)" in table


def test_curves_of_several_seeds_are_averaged_by_images():
    row = dict(recipe="a", curve="reliability", score="softmax")
    rows = [
        row | dict(seeds="0", x="0.5", y="0.4", images="10"), row | dict(seeds="0", x="0.9", y="1.0", images="90"),
        row | dict(seeds="1", x="0.6", y="0.8", images="30"), row | dict(seeds="1", x="0.9", y="0.5", images="10"),
        row | dict(seeds="0", x="0.1", y="0.1", images="9") , row | dict(seeds="1", x="0.1", y="0.1", images="10"),
    ]  # fmt: skip
    points = trust.over_seeds(rows, "a", "reliability", "softmax")
    assert points == [pytest.approx((0.575, 0.7, 40)), pytest.approx((0.9, 0.95, 100)), pytest.approx((0.1, 0.1, 19))]
    assert trust.over_seeds(rows, "b", "reliability", "softmax") == []

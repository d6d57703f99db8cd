"""The figures of `vbcaps figures`: what they show of made-up records, what is missing, and the committed records."""

from pathlib import Path

import made_up
import numpy as np
import pytest
from PIL import Image

from vbcaps.figures import affnist, catalogue, priors, records, routings, votes
from vbcaps.figures.records import MissingRecords
from vbcaps.training.recipes import recipe

ROOT = Path(__file__).parents[2]


@pytest.fixture
def results(tmp_path):
    (tmp_path / "results").mkdir()
    return tmp_path / "results"


@pytest.fixture
def figures(monkeypatch):
    """The figures that were drawn, by the names of their files, before they became PNGs."""
    seen = {}

    def keep(figure, path):
        seen[path.stem] = figure
        return path

    for module in (affnist, priors, routings, votes):
        monkeypatch.setattr(module, "save", keep)
    return seen


def lines(axes) -> dict[str, dict[float, float]]:
    return {line.get_label(): dict(zip(*line.get_data(), strict=True)) for line in axes.lines}


def texts(axes) -> list[str]:
    return [text.get_text() for text in axes.texts]


# --- curves ----------------------------------------------------------------------------------------------------------


def test_curves_are_means_over_seeds_with_a_band_of_all(results, figures):
    made_up.curves(results)
    routings.curves(results, Path("out"))
    axes, beside, other, *_ = figures["curves"].axes
    assert lines(axes) == {"VB": {1: 50, 2: 25}, "EM": {1: 50, 2: 40}}
    assert axes.get_title(loc="left") == "smallNORB"
    assert axes.get_ylabel() == "small networks\nvalidation error (%, log)"
    tests = [sorted(line.get_ydata()) for line in beside.lines]
    assert tests == [pytest.approx([19, 21]), pytest.approx([35])]
    assert len(set(beside.lines[0].get_xdata())) == 2  # no seed hides another
    assert (axes.get_yscale(), axes.get_ylim()) == ("log", beside.get_ylim())
    assert axes.get_ylim()[0] < 19 < 60 < axes.get_ylim()[1]
    band = axes.collections[0].get_paths()[0].vertices
    assert {tuple(v) for v in band.round(6)} >= {(1, 40), (1, 60), (2, 20), (2, 30)}
    assert "seeds: VB 2, EM 1" in texts(axes)
    assert "Fashion-MNIST:\nnot run yet" in texts(other)


def test_without_a_held_out_share_training_errors_and_tests_are_shown(results, figures):
    for name, test in (("svhn_fast", 0.03), ("svhn_em_fast", 0.05)):
        made_up.record(results / name, name, training=(0.5, 0.1), test=test)
    routings.curves(results, Path("out"))
    k, axes = next((k, axes) for k, axes in enumerate(figures["curves"].axes) if axes.lines)
    assert lines(axes)["VB"] == {1: 50, 2: 10}
    beside = figures["curves"].axes[k + 1]
    assert [list(line.get_ydata()) for line in beside.lines] == [[3], [5]]
    assert axes.get_title(loc="left") == "SVHN"
    assert axes.get_ylabel() == "full size\ntraining error (%, log)"


def test_runs_with_other_hyperparameters_are_not_compared(results):
    made_up.record(results / "vb", "svhn_laptop", validation=(0.3,), test=0.3)
    made_up.record(results / "em", "svhn_em_laptop", validation=(0.3,), test=0.3, lr=0.001)
    with pytest.raises(MissingRecords, match=r"series\.py curves"):
        routings.curves(results, Path("out"))


def test_recipes_of_today_come_before_longer_trainings(results):
    made_up.curves(results)
    for name in ("smallnorb_laptop", "smallnorb_em_laptop"):
        made_up.record(results / f"long/{name}", name, epochs=90, validation=(0.9,), test=0.9)
    (pair,) = routings.pairs_by_dataset(records.read_records(results)).values()
    assert [record.folder.name for record in pair["vb"]] == ["vb0", "vb1"]


def test_a_laptop_and_a_gpu_have_a_row_each(results, figures):
    made_up.curves(results)
    for name in ("smallnorb_fast", "smallnorb_em_fast"):
        made_up.record(results / name, name, test=0.02)
    routings.curves(results, Path("out"))
    labels = [axes.get_ylabel() for axes in figures["curves"].axes if axes.get_ylabel()]
    assert labels == ["small networks\nvalidation error (%, log)", "full size\ntraining error (%, log)"]


# --- priors ----------------------------------------------------------------------------------------------------------


def test_a_cell_is_the_mean_of_its_runs(results, figures):
    made_up.priors(results)
    priors.priors(results, Path("out"))
    heat, beside = figures["priors"].axes
    assert sorted(texts(heat)) == ["\n1 failed", "11.00", "12.00", "14.00", "14.00\n± 1.41", *["not run"] * 12]
    where = {text.get_text(): text.get_position() for text in heat.texts}
    assert where["12.00"] == (2, 1)  # psi0 = 1, alpha0 = 0.1
    assert where["14.00"] == (2, 4)  # learned, psi0 = 1
    assert [label.get_text() for label in heat.get_xticklabels()] == ["0.01", "0.1", "1", "10"]
    assert [label.get_text() for label in heat.get_yticklabels()] == ["0.01", "0.1", "1", "10", "learned"]
    assert "small networks, 1 epoch, mean ± standard deviation of up to 2 seeds" in heat.get_title(loc="left")
    drawn = {line.get_label(): list(line.get_ydata()) for line in beside.lines}
    assert drawn["0.1"] == pytest.approx([np.nan, 11, 12, np.nan], nan_ok=True)
    assert drawn["1"] == pytest.approx([np.nan, np.nan, 14, np.nan], nan_ok=True)  # a gap where a run failed
    assert drawn["learned"] == pytest.approx([np.nan, np.nan, 14, np.nan], nan_ok=True)
    assert any(list(line.get_ydata()) == pytest.approx([13, 15]) for line in beside.lines)


def test_settings_with_other_fields_are_not_in_the_map(results):
    made_up.priors(results)
    made_up.record(results / "other", "fashion_laptop", alpha0=0.1, psi0=0.1, epochs=2, test=0.9)
    grid, learned = priors.runs_by_prior(records.read_records(results))
    assert [record.error() for record in grid[0.1, 0.1]] == [11]
    assert len(learned) == 1


def test_without_priors_the_series_is_named(results):
    made_up.curves(results, "fashion")  # one setting alone is no map
    with pytest.raises(MissingRecords, match=r"series\.py priors"):
        priors.priors(results, Path("out"))


# --- iterations ------------------------------------------------------------------------------------------------------


def test_error_and_time_by_iterations(results, figures):
    made_up.iterations(results)
    made_up.record(results / "other", "fashion_laptop", iters=3, epochs=7, test=0.9)
    routings.iterations(results, Path("out"))
    error, time = figures["iterations"].axes
    assert lines(error) == {"VB": pytest.approx({1: 10, 2: 20}), "EM": pytest.approx({1: 11, 2: 21})}
    assert lines(time) == {"VB": {1: 10, 2: 20}, "EM": {1: 11, 2: 21}}
    assert "64 images" in time.get_title(loc="left")
    assert "not run: VB 3 4, EM 3 4" not in texts(error)
    made_up.step_times(results, 4)
    routings.iterations(results, Path("out"))
    assert "not run: VB 3 4, EM 3 4" in texts(figures["iterations"].axes[0])


def test_each_learning_rate_has_a_panel_the_highest_first(results, figures):
    made_up.iterations(results)
    for name in ("fashion_laptop", "fashion_em_laptop"):
        for iters in (1, 2):
            made_up.record(results / f"{name}{iters}", name, iters=iters, epochs=1, lr=0.1, test=0.9)
    routings.iterations(results, Path("out"))
    titles = [axes.get_title(loc="left") for axes in figures["iterations"].axes]
    assert len(titles) == 3
    assert titles[0].endswith("rate 0.1")
    assert titles[1].endswith("rate 0.008")
    left = figures["iterations"].axes[:2]
    assert {(axes.get_yscale(), axes.get_ylabel()) for axes in left} == {("log", "test error (%, log)")}  # 10% and 90%
    assert left[0].get_ylim() == left[1].get_ylim()


@pytest.mark.parametrize("missing", ["runs", "times"])
def test_without_iterations_or_times_the_command_is_named(results, missing):
    made_up.iterations(results)
    if missing == "times":
        (results / "step_times.csv").unlink()
    else:
        for path in results.rglob("vb2/*"):
            path.unlink()
    with pytest.raises(MissingRecords, match=r"step_times\.py" if missing == "times" else r"series\.py iterations"):
        routings.iterations(results, Path("out"))


# --- votes -----------------------------------------------------------------------------------------------------------


def test_votes_have_a_row_for_each_iteration_and_a_ridge_for_each_epoch(results, figures):
    made_up.votes(results)
    votes.votes(results, Path("out"))
    assert set(figures) == {"votes-airplane", "votes-car"}
    grid = figures["votes-car"].axes
    assert [axes.get_title() for axes in grid] == ["airplane", "car", *[""] * 4]  # 3 iterations, 2 capsules
    assert [texts(axes)[0] for axes in grid[:2]] == ["median 12.00", "median 2.00"]
    medians = [line.get_xdata()[0] for line in grid[1].lines if line.get_marker() == "|"]
    assert sorted(medians) == [1, 2]
    assert "8 car images" in figures["votes-car"].get_suptitle()
    limits = {axes.get_xlim() for axes in grid}
    assert len(limits) == 1  # distances are compared over rows, too
    every = np.load(results / "series/votes/one/votes.npz")["distances"][:, 1]
    beyond = round(100 * float((every > limits.pop()[1]).mean()))
    assert f"{beyond}% of all distances lie beyond" in figures["votes-car"].get_suptitle()
    tops = [patch.get_data().values for patch in grid[1].patches]
    assert [int(values.max()) for values in tops] == [0, 0, 1, 1]  # no ridge reaches another


def test_of_many_epochs_some_are_shown_the_first_and_the_last_among_them():
    assert votes.evenly(5) == [0, 1, 2, 3, 4]
    some = votes.evenly(350)
    assert (some[0], some[-1], len(some)) == (0, 349, votes.MOST)


# --- affNIST ---------------------------------------------------------------------------------------------------------


def test_affnist_has_the_printed_numbers_and_the_recipes_of_today(results, figures):
    made_up.affnist(results)
    bars = {bar.name: bar for bar in affnist.bars(records.read_records(results))}
    ours = bars["VB-Routing, ours"]
    assert (ours.affnist, ours.mnist) == pytest.approx((3, 0.3))  # of two seeds, without the former recipe
    assert bars["CNN of the same size, ours"].affnist == pytest.approx(5)  # as it was last
    assert bars["Dynamic (Sabour et al. 2017)"][1:3] == pytest.approx((21, 0.8))
    assert len(bars) == 9 + 2 + 2
    assert affnist.number(3.1000000000000085) == "3.1"
    affnist.affnist(results, Path("out"))
    labels = [label.get_text() for label in figures["affnist"].axes[0].get_yticklabels()]
    assert labels[0] == "Dynamic (Sabour et al. 2017)"
    assert labels[-1] == "VB-Routing, the paper"


# --- records ---------------------------------------------------------------------------------------------------------


def test_other_priors_and_rules_are_not_pooled_with_the_runs_that_are_compared(results):
    made_up.iterations(results)
    for name, fields in (
        ("alpha", dict(alpha0=0.1)),
        ("learn", dict(learn=("alpha0",))),
        ("rule", dict(activation="paper")),
    ):
        made_up.record(results / name, "fashion_laptop", iters=2, epochs=1, test=0.9, **fields)
    (pair,) = routings.pairs_by_iterations(records.read_records(results))
    assert [record.folder.name for record in pair["vb"]] == ["vb1", "vb2"]


def test_vb_and_em_share_settings_but_for_what_belongs_to_one_of_them():
    assert records.shared(recipe("svhn_fast")) == records.shared(recipe("svhn_em_fast", seed=3))
    assert records.shared(recipe("svhn_fast")) != records.shared(recipe("svhn_em_fast", lr=0.5))
    assert records.shared(recipe("svhn_fast", alpha0=0.5)) != records.shared(recipe("svhn_em_fast"))


def test_the_tenth_run_is_read_after_the_ninth(results):
    for number in (10, 9):
        made_up.record(results / f"default-{number}", "default", test=0.1)
    assert [record.folder.name for record in records.read_records(results)] == ["default-9", "default-10"]


def test_no_folder_of_results_is_an_error(tmp_path):
    with pytest.raises(MissingRecords, match="no folder"):
        records.read_records(tmp_path / "nowhere")


# --- what is committed -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", catalogue.FIGURES)
def test_every_figure_draws_from_the_committed_records(name, tmp_path):
    drawn = catalogue.FIGURES[name].draw(ROOT / "results", tmp_path)
    for path in drawn:
        assert min(Image.open(path).size) > 400
        assert (ROOT / "docs" / "figures" / path.name).exists(), "draw it anew: vbcaps figures all --out docs/figures"

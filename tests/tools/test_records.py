"""Recording runs, and the tables made from records: what is kept, what is refused, how a number comes into its row."""

import importlib
import json
import shlex
import shutil
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import tiny
from scipy import stats

from vbcaps.cli.train import app as train_app
from vbcaps.training.evaluate import wilson
from vbcaps.training.loop import fit_seeds
from vbcaps.training.recipe import Recipe
from vbcaps.training.recipes import EXPERIMENTS, RECIPES, parameters, recipe
from vbcaps.training.runfolder import sums_of
from vbcaps.weights.file import read_weights

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))  # as for `python tools/tables.py`
record, recorded, tables, held_out, choices = (
    importlib.import_module(name) for name in ("record", "recorded", "tables", "held_out", "choices")
)

H200 = dict(
    commit="abc1234", command=["vbcaps", "train"], device="NVIDIA H200", device_type="cuda", processes=1, threads=8
)


# --- recording -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """runs/two/seed0 and seed1, which end in different errors; their commit is given."""
    out = tmp_path_factory.mktemp("runs") / "two"
    with tiny.in_place_of_data(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("VBCAPS_NOTE", "a note")
        fit_seeds(tiny.recipe(name="default", epochs=2), out, 2, device="cpu")
    for folder in out.iterdir():
        change(folder / "environment.json", commit="abc1234", command=["vbcaps", "train", "--out", "/home/me/two"])
    return out


@pytest.fixture
def run(trained, tmp_path):
    shutil.copytree(trained, tmp_path / "two")
    return tmp_path / "two"


@pytest.fixture
def places(tmp_path):
    return SimpleNamespace(results=tmp_path / "results", weights=tmp_path / "weights")


def change(path, **fields):
    """Change a file as if the run had written it so."""
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    if path.name == "recipe.json" and "sums" in path.with_name("result.json").read_text():
        change(path.with_name("result.json"), sums=sums_of(path.parent))


def put(places, *words):
    record.main([str(word) for word in words], places.results, places.weights)


def refused(places, *words):
    """What `record` says, and that it wrote nothing."""
    with pytest.raises(SystemExit) as end:
        put(places, *words)
    assert not places.results.exists()
    assert not places.weights.exists()
    return str(end.value)


def test_a_run_is_kept_without_weights_and_state(run, places):
    put(places, run)
    for seed in ("seed0", "seed1"):
        kept = {path.name for path in (places.results / "two" / seed).iterdir()}
        assert kept == {"recipe.json", "environment.json", "metrics.csv", "result.json"}
        for name in ("recipe.json", "metrics.csv", "result.json"):
            assert (places.results / "two" / seed / name).read_bytes() == (run / seed / name).read_bytes()
    assert not places.weights.exists()


def test_one_run_is_kept_by_its_own_name(run, places):
    (run / "seed1").rename(run.parent / "alone")
    put(places, run.parent / "alone")
    assert [path.name for path in places.results.iterdir()] == ["alone"]
    assert (places.results / "alone" / "recipe.json").exists()


@pytest.mark.parametrize(
    ("word", "kept"),
    [
        ("/home/me/data", "data"),
        ("--data-folder=/home/me/data", "--data-folder=data"),
        ("smallnorb", "smallnorb"),
        ("--lr=0.1", "--lr=0.1"),
    ],
)
def test_nobody_is_told_where_somebodys_folders_are(run, places, word, kept):
    change(run / "seed0" / "environment.json", command=["vbcaps", "train", word])
    put(places, run)
    environment = json.loads((places.results / "two" / "seed0" / "environment.json").read_text())
    assert environment["command"] == ["vbcaps", "train", kept]
    assert environment["commit"] == "abc1234"
    assert environment["note"] == "a note"


def test_what_a_run_went_on_with_is_seen_to_alike(run, places):
    """Its source must be there to check out, and where its folders are is nobody's business."""
    change(run / "seed0" / "environment.json", resumed=[H200 | dict(commit="abc-dirty")])
    assert "ran from commit 'abc-dirty'" in refused(places, run)
    change(run / "seed0" / "environment.json", resumed=[H200 | dict(command=["vbcaps", "--resume", "/home/me/two"])])
    put(places, run)
    environment = json.loads((places.results / "two" / "seed0" / "environment.json").read_text())
    assert environment["resumed"][0]["command"] == ["vbcaps", "--resume", "two"]


def test_one_seed_of_several_is_refused(run, places):
    assert f"all that were run count: give {run}" in refused(places, run / "seed0")


def test_what_is_not_finished_is_refused_unless_it_is_a_failure(run, places):
    (run / "seed1" / "result.json").unlink()
    assert "seed1 is not finished" in refused(places, run)
    put(places, run, "--unfinished")
    assert {path.name for path in (places.results / "two" / "seed1").iterdir()} == {
        "recipe.json",
        "environment.json",
        "metrics.csv",
    }


@pytest.mark.parametrize("commit", ["unknown", "abc1234-dirty"])
def test_source_that_nobody_can_check_out_is_refused_unless_told(run, places, commit):
    change(run / "seed1" / "environment.json", commit=commit)
    assert f"ran from commit '{commit}'" in refused(places, run)
    put(places, run, "--dirty")
    assert (places.results / "two" / "seed1" / "environment.json").exists()


def test_what_nobody_can_make_again_is_refused(run, places, tmp_path):
    change(run / "seed0" / "recipe.json", data="/home/me/photos")
    assert "images of your own" in refused(places, run)
    change(run / "seed0" / "recipe.json", data=None, folds=5, fold=1)
    assert "is a fold of a cross-validation" in refused(places, run)
    change(run / "seed0" / "recipe.json", data=None, folds=0, fold=0, name="mine")
    assert "'mine', which recipes.py does not have" in refused(places, run)
    assert "not the folder of a run" in refused(places, tmp_path / "nothing")


def test_more_files_may_be_recorded_later_but_no_run_takes_anothers_place(run, places):
    put(places, run)
    crops = dict(error=0.1, interval=[0, 0.2], count=30, crops=5, environment=H200)
    (run / "seed0" / "crops5.json").write_text(json.dumps(crops))
    put(places, run)
    kept = json.loads((places.results / "two" / "seed0" / "crops5.json").read_text())
    assert kept == crops

    change(run / "seed0" / "result.json", seconds=1.0)
    with pytest.raises(SystemExit, match=r"result.json is of another run"):
        put(places, run)
    assert json.loads((places.results / "two" / "seed0" / "result.json").read_text())["seconds"] != 1.0


def test_crops_of_changed_source_are_refused_too(run, places):
    crops = dict(error=0.1, interval=[0, 0.2], count=30, crops=5, environment=H200 | dict(commit="abc-dirty"))
    (run / "seed0" / "crops5.json").write_text(json.dumps(crops))
    assert "commit 'abc-dirty'" in refused(places, run)


def test_the_weights_of_seed_0_are_shipped_as_they_are(run, places):
    put(places, run, "--ship", "tiny")
    assert [path.name for path in places.weights.iterdir()] == ["tiny.safetensors"]
    shipped = places.weights / "tiny.safetensors"
    assert shipped.read_bytes() == (run / "seed0" / "last.safetensors").read_bytes()
    kept = read_weights(shipped)
    result = json.loads((places.results / "two" / "seed0" / "result.json").read_text())
    assert kept.about["test_error"] == result["test"]["error"]
    assert kept.recipe.seed == 0


def test_a_run_of_a_recorded_series_is_shipped_and_not_recorded_again(run, places):
    there = places.results / "series" / "some" / "alone"
    there.mkdir(parents=True)
    alone = run / "seed0"
    shutil.copy(alone / "result.json", there)
    alone.rename(run.parent / "alone")
    put(places, run.parent / "alone", "--ship", "tiny")
    assert [path.name for path in places.results.iterdir()] == ["series"]
    assert (places.weights / "tiny.safetensors").exists()
    change(there / "result.json", seconds=-1.0)  # another run of that name
    put(places, run.parent / "alone")
    assert (places.results / "alone" / "result.json").exists()


def test_weights_that_are_not_to_be_shipped(run, trained, places):
    assert "small letters" in refused(places, run, "--ship", "../tiny")
    shutil.copy(run / "seed1" / "last.safetensors", run / "seed0" / "last.safetensors")
    assert "not of this run" in refused(places, run, "--ship", "tiny")
    shutil.copy(trained / "seed0" / "last.safetensors", run / "seed0" / "last.safetensors")
    change(run / "seed0" / "result.json", test=evaluation(0.012345))
    assert "its test error differ" in refused(places, run, "--ship", "tiny")
    change(run / "seed0" / "result.json", test=None)
    assert "was not tested" in refused(places, run, "--ship", "tiny")
    shutil.rmtree(run / "seed0")
    assert "no seed 0" in refused(places, run, "--ship", "tiny")
    with pytest.raises(SystemExit):
        put(places, run, run, "--ship", "tiny")


# --- tables ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def house(tmp_path):
    """A repository with nothing but what the tables are made of and put into."""
    (tmp_path / "results").mkdir()
    (tmp_path / "README.md").write_text(f"before\n{tables.BEGIN}\nold\n{tables.END}\nafter\n")
    return tmp_path


def note(house, name, made, error, *, seconds=600.0, environment=H200, source="original files", **fields):
    """Put a record of one run there, as `vbcaps train` writes it, with that test error of 1,000 images."""
    folder = house / "results" / name
    folder.mkdir(parents=True)
    (folder / "recipe.json").write_text(json.dumps(made.to_json()))
    (folder / "environment.json").write_text(json.dumps(environment))
    if error is None:
        return
    result = dict(
        seed=made.seed, recipe=made.to_json(), parameters=parameters(made.name), epochs=made.epochs, source=source,
        seconds=seconds + made.seed, validation=None, matched=None, test=evaluation(error), familiar=None,
    )  # fmt: skip
    (folder / "result.json").write_text(json.dumps(result | fields))


def evaluation(error):
    return dict(error=error, interval=wilson(round(1000 * error), 1000), count=1000, crops=1)


def seeds(house, name, made, errors, **fields):
    for k, error in enumerate(errors):
        note(house, f"{name}/seed{k}", replace(made, seed=k), error, **fields)


def made(house):
    """(results/README.md, README.md), and the cells of each row of the first by its first cell."""
    tables.main([], house)
    text = (house / "results" / "README.md").read_text()
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| [")]
    return text, (house / "README.md").read_text(), {cells[0]: cells[1:] for cells in lines}


def test_the_tables_here_are_up_to_date():
    tables.main(["--check"])


def short(readme):
    """The rows of README's table."""
    lines = readme.split("| --- | --- | --- | --- |")[1].strip().splitlines()
    return [line.strip("|").split(" | ") for line in lines[: lines.index("")]]


def test_before_there_is_a_result_the_bold_cells_say_so(house):
    text, readme, rows = made(house)
    assert not rows
    assert text.count("\n## ") == 1
    bold = [name for name, one in EXPERIMENTS.items() if one.paper and "±" in one.paper]
    assert bold == ["smallnorb", "fashion", "svhn", "cifar10"]
    for name in bold:
        assert f"| {EXPERIMENTS[name].label} | {EXPERIMENTS[name].paper} | not run yet |" in text
    assert text.count("not run yet") == 4
    assert "none yet" in text
    assert readme.startswith("before\n")
    assert readme.endswith(f"{tables.END}\nafter\n")
    assert "old" not in readme
    assert len(short(readme)) == sum(one.front for one in EXPERIMENTS.values())


def test_the_front_page_shows_the_fast_recipe_where_it_has_run_and_the_cnn_beside_it(house):
    note(house, "a", recipe("smallnorb"), 0.05)
    assert "| smallNORB | 1.6 ± 0.06 | 5.00, 1 run [1] |" in (readme := made(house)[1])
    assert f"\n[1] {tables.PAPERS_SCHEDULE}\n" in readme
    note(house, "b", recipe("smallnorb_fast"), 0.01, seconds=1.0)
    note(house, "c", recipe("affnist_fast"), 0.02, seconds=2.0, familiar=evaluation(0.003))
    note(house, "d", recipe("affnist_cnn_fast"), 0.03, seconds=3.0, familiar=evaluation(0.004))
    readme = made(house)[1]
    assert "| smallNORB | 1.6 ± 0.06 | 1.00, 1 run |" in readme
    assert "| 1.9 (0.3) | 2.00 (0.30), 1 run | 3.00 (0.40), 1 run |" in readme
    assert "5.00" not in readme
    assert tables.PAPERS_SCHEDULE not in readme


def test_a_run_of_an_earlier_versions_recipe_keeps_its_row(house):
    seeds(house, "old-0", recipe("fashion"), [0.05, 0.06])
    for folder in (house / "results" / "old-0").iterdir():
        change(folder / "recipe.json", name="fashion_gone", paste=False, cutouts=1)
    text, readme, rows = made(house)
    assert f"## {tables.EARLIER}\n" in text
    cells = rows["[fashion_gone](old-0)"]
    assert cells[:2] == ["", "5.50 ± 0.71, 2 runs"]
    assert cells[-2:] == ["abc1234", "`git checkout abc1234 && vbcaps train fashion_gone --seeds 2`"]
    assert "5.50" not in readme
    change(house / "results" / "old-0" / "seed0" / "recipe.json", paste=True)
    with pytest.raises(ValueError, match=r"paste=True was removed in vbcaps 0\.2\.0"):
        made(house)


def test_a_row_has_the_mean_over_all_seeds_and_all_that_makes_it_again(house):
    errors = [0.016, 0.015, 0.019, 0.017, 0.018]
    seeds(house, "norb", recipe("smallnorb"), errors)
    text, _, rows = made(house)
    paper, ours, interval, count, epochs, training, commit, command = rows["[smallnorb](norb)"]
    mean, std = 100 * statistics.mean(errors), 100 * statistics.stdev(errors)
    assert (paper, ours) == ("1.6 ± 0.06", f"{mean:.2f} ± {std:.2f}, 5 runs")
    low, high = stats.t.interval(0.95, 4, mean, stats.sem([100 * error for error in errors]))
    assert interval == f"{low:.2f} to {high:.2f}"
    assert (count, epochs, commit) == ("169,802", "350", "abc1234")
    assert training == "10.1 min, 5 at once, NVIDIA H200"  # 600 to 604 s
    assert command == "`vbcaps train smallnorb --seeds 5`"
    assert "## Table 1: smallNORB\n" in text
    assert text.count("\n## ") == 2
    assert f"| smallNORB | 1.6 ± 0.06 | {mean:.2f} ± {std:.2f}, 5 runs | {training} |" in text


def test_one_run_has_the_interval_of_its_images(house):
    note(house, "x", recipe("cifar10_small"), 0.131, environment=H200 | dict(device_type="cpu", device="x86_64"))
    cells = made(house)[2]["[cifar10_small](x)"]
    low, high = wilson(131, 1000)
    assert cells[:3] == ["13.1", "13.10, 1 run", f"{100 * low:.2f} to {100 * high:.2f}"]
    assert cells[5] == "10.0 min, x86_64, 8 threads"


def test_the_squared_error_of_a_capsule_vae_stands_beside_its_interval(house):
    for seed, squared in enumerate((0.0100, 0.0104)):
        test = evaluation(0.011) | dict(reconstruction=squared)
        note(house, f"v/seed{seed}", replace(recipe("vae_mnist_laptop"), seed=seed), 0.011, test=test)
    note(house, "c", recipe("fashion_laptop"), 0.1, test=evaluation(0.1) | dict(reconstruction=None), seconds=9.0)
    rows = made(house)[2]
    assert rows["[vae_mnist_laptop](v)"][2].endswith("; squared error 0.0102 ± 0.0003 a pixel")
    assert "squared" not in rows["[fashion_laptop](c)"][2]


def test_a_note_stands_by_the_time_of_training(house):
    beside = H200 | dict(note="beside 3 other runs")
    note(house, "a", recipe("fashion_em"), 0.06, environment=beside)
    note(house, "b", replace(recipe("fashion_em"), seed=1), 0.06)
    cells = made(house)[2]["[fashion_em](a) [2](b)"]
    assert cells[5] == "10.0 min, NVIDIA H200, beside 3 other runs; 10.0 min, NVIDIA H200"


def test_a_run_that_went_on_from_another_commit_or_elsewhere_has_both(house):
    cpu = H200 | dict(commit="def5678", device="x86_64", device_type="cpu", threads=2)
    began = H200 | dict(note="beside another run")
    note(house, "a", recipe("fashion_em"), 0.06, environment=began | dict(resumed=[began, cpu]))
    training, commits = made(house)[2]["[fashion_em](a)"][5:7]
    assert training == "10.0 min, NVIDIA H200, beside another run, then x86_64, 2 threads"
    assert commits == "abc1234, def5678"


def test_a_failure_counts(house):
    seeds(house, "norb", recipe("smallnorb"), [0.01, None, 0.03])
    seeds(house, "svhn", recipe("svhn"), [None])
    text, _, rows = made(house)
    cells = rows["[smallnorb](norb)"]
    assert cells[1] == "2.00 ± 1.41, 3 runs, 1 failed"
    assert cells[-1] == "`vbcaps train smallnorb --seeds 3`"
    assert rows["[svhn](svhn)"][1:6] == ["none, 1 run, 1 failed", "", "-", "-", "-"]
    assert "| smallNORB | 1.6 ± 0.06 | 2.00 ± 1.41, 3 runs, 1 failed |" in text


def test_where_the_data_are_not_the_original_files_it_is_said(house):
    seeds(house, "norb", recipe("smallnorb"), [0.016, 0.018], source="re-encoded | somehow")
    seeds(house, "svhn", recipe("svhn"), [0.04], seconds=5.0)
    seeds(house, "em", recipe("smallnorb_em"), [0.02], seconds=7.0, source="re-encoded | somehow")
    text, readme, rows = made(house)
    assert "data: re-encoded \\| somehow" in text
    assert "original" not in rows["[svhn](svhn)"][2]
    assert "| 1.70 ± 0.14, 2 runs [1] [2] |" in readme
    main = text.split("## Table 1")[0]
    assert "| 1.70 ± 0.14, 2 runs [1] |" in main
    assert "| smallNORB, EM routing | 1.97 | 2.00, 1 run [1] |" in main
    assert main.count("\n[1] data: re-encoded | somehow\n") == 1
    assert "[2]" not in main


def test_a_fast_twin_and_a_changed_recipe_have_their_own_rows(house):
    seeds(house, "a", recipe("smallnorb"), [0.016, 0.018])
    seeds(house, "b", recipe("smallnorb_fast"), [0.021], seconds=60.0)
    note(house, "c", replace(recipe("smallnorb_fast"), lr=0.001, learn=("alpha0", "nu0"), seed=3), 0.022, seconds=70.0)
    text, _, rows = made(house)
    assert list(rows) == [
        "[smallnorb](a)",
        "[smallnorb_fast](b)",
        "[smallnorb_fast](c) `--learn alpha0,nu0 --lr 0.001`",
    ]
    assert [cells[0] for cells in rows.values()] == ["1.6 ± 0.06"] * 3
    last = [cells[-1] for cells in rows.values()][-1]
    assert last == "`vbcaps train smallnorb_fast --learn alpha0,nu0 --lr 0.001 --seed 3`"
    main = text.split("## Table 1")[0]
    assert "| smallNORB, fast: 100 epochs | 1.6 ± 0.06 | 2.10, 1 run |" in main
    assert "2.20" not in main


def test_a_cell_whose_recipe_has_changed_keeps_what_was_recorded_last(house):
    base = recipe("fashion_em_fast")
    for k, error in ((2, 0.061), (10, 0.062), (9, 0.063)):
        note(house, f"fashion_em_fast-{k}", base.with_epochs(100 + k), error, seconds=float(k))
    note(house, "held-11", replace(base, validation=0.2), None)
    label = f"| {EXPERIMENTS['fashion_em'].label}, fast:"
    main = made(house)[0]
    assert f"{label} 110 epochs | 6.14 | 6.20, 1 run [1] |" in main
    assert main.count("\n[1] today's recipe with `--epochs 110`\n") == 1
    assert main.count(label) == 1
    note(house, "as_it_is-1", base, 0.064, seconds=80.0)
    main = made(house)[0]
    assert f"{label} {base.epochs} epochs | 6.14 | 6.40, 1 run |" in main
    assert main.count(label) == 1
    assert "today's recipe" not in main


def test_runs_of_the_same_recipe_recorded_apart_are_one_row(house):
    note(house, "a", recipe("svhn"), 0.04)
    note(
        house, "b", replace(recipe("svhn"), seed=5, save_seconds=60.0), 0.05, environment=H200 | dict(commit="def5678")
    )
    cells = made(house)[2]["[svhn](a) [2](b)"]
    assert cells[1] == "4.50 ± 0.71, 2 runs"
    assert cells[5:] == ["10.0 min, NVIDIA H200", "abc1234, def5678", "`vbcaps train svhn; vbcaps train svhn --seed 5`"]


def test_a_run_recorded_twice_is_found(house):
    note(house, "a", recipe("svhn"), 0.04)
    shutil.copytree(house / "results" / "a", house / "results" / "b")
    with pytest.raises(ValueError, match="b and a are one run, recorded twice"):
        made(house)


def test_what_is_familiar_stands_beside_what_is_novel(house):
    familiar = dict(matched=True, epochs=40, familiar=evaluation(0.037))
    note(house, "a/seed0", recipe("smallnorb_azimuth"), 0.112, **familiar)
    other = familiar | dict(matched=False, epochs=350, familiar=evaluation(0.041))
    note(house, "a/seed1", replace(recipe("smallnorb_azimuth"), seed=1), 0.114, **other)
    text, readme, rows = made(house)
    cells = rows["[smallnorb_azimuth](a)"]
    assert cells[:2] == ["11.33 (3.71)", "11.30 ± 0.14 (3.90 ± 0.28), 2 runs"]
    assert cells[2].endswith("; 1 of 2 did not reach the error to match")
    assert cells[4] == "40 to 350"
    assert "## Table 2" in text
    assert "novel azimuths (familiar error) | 11.33 (3.71) | 11.30 ± 0.14 (3.90 ± 0.28), 2 runs [1] |" in readme
    note(house, "b", recipe("smallnorb_elevation_em_fast"), 0.12, seconds=60.0, **familiar)
    assert (
        "(familiar error), EM routing, fast: 40 epochs or fewer | 12.04 (4.29) | 12.00 (3.70), 1 run |"
        in made(house)[0]
    )


def test_several_crops_have_their_own_table(house):
    seeds(house, "norb", recipe("smallnorb"), [0.016, 0.018])
    for seed, error in ((0, 0.013), (1, 0.014)):
        path = house / "results" / "norb" / f"seed{seed}" / "crops25.json"
        path.write_text(json.dumps(evaluation(error) | dict(crops=25)))
    text, _, _ = made(house)
    crops = text.split(f"## {tables.CROPS}")[1]
    assert "| [smallnorb](norb) | 1.29 | 1.35 ± 0.07, 2 runs | 25 crops; 0.71 to 1.99 |" in crops
    assert "`vbcaps train smallnorb --seeds 2`, then `vbcaps eval --crops 25` of each run" in crops
    assert "| smallNORB, the mean of 25 crops | 1.29 | 1.35 ± 0.07, 2 runs |  |" in text
    (house / "results" / "norb" / "seed1" / "crops25.json").unlink()
    assert "1.30, 1 run | 25 crops; 0.76 to 2.21; 1 of 2 without this test" in made(house)[0]


def test_choices_made_on_a_validation_share_are_compared_apart(house):
    base = replace(recipe("smallnorb_fast"), validation=0.2)
    for k, (choice, validation) in enumerate([(base, 0.031), (replace(base, iters=2), 0.042)]):
        note(house, f"v{k}", choice, 0.5, seconds=10.0 * k, validation=validation, test=None)
    text, _, rows = made(house)
    assert "## Table 1" not in text
    assert rows["[smallnorb_fast](v0)"][:3] == ["as it is", "3.10, 1 run", "20% held out"]
    assert rows["[smallnorb_fast](v1)"][:2] == ["`--iters 2`", "4.20, 1 run"]
    assert rows["[smallnorb_fast](v1)"][-1] == "`vbcaps train smallnorb_fast --validation 0.2 --iters 2`"
    assert text.count("not run yet") == 4


def test_rows_of_choices_become_a_table(house):
    """Of the same epochs and splits the least error is first; what was made again counts once."""
    common = dict(base="smallnorb_fast", held="0.4", epochs="30", least="0.1", train_error="0.001", commit="abc1234")
    common |= dict(note="")
    runs = [("", 0, 0.2), ("paste=yes", 1, 0.08), ("", 1, 0.9), ("", 1, 0.3), ("paste=yes", 0, 0.1)]
    for choice, split, last in [*runs, ("crop=40", 0, 0.4)]:
        choices.append(house / "results" / "choices.csv", common | dict(choice=choice, split=split, last=str(last)))
    longer = dict(choice="iters=2", split=0, last="0.01", epochs="100")
    choices.append(house / "results" / "choices.csv", common | longer)
    other = dict(base="svhn_fast", choice="iters=1", split=0, last="0.02")
    choices.append(house / "results" / "choices.csv", common | other)
    for split, last in ((0, "nan"), (1, "nan")):
        failed = dict(base="cifar10_fast", choice="lr=1", split=split, last=last, epochs="0", note="not finite")
        choices.append(house / "results" / "choices.csv", common | failed)
    text, _, _ = made(house)
    lines = [line.strip("| ").split(" | ")[:4] for line in text.splitlines() if line.startswith(("| `", "| as"))]
    assert lines == [
        ["`crop=40`", "40.00", "10.00", "0.10"],
        ["`paste=yes`, earlier version", "9.00 ± 1.41", "10.00 ± 0.00", "0.10 ± 0.00"],
        ["as it is", "25.00 ± 7.07", "10.00 ± 0.00", "0.10 ± 0.00"],
        ["`iters=2`", "1.00", "10.00", "0.10"],
        ["`iters=1`", "2.00", "10.00", "0.10"],
        ["`lr=1`, failed", "failed", "10.00 ± 0.00", "0.10 ± 0.00"],
    ]


def test_choices_are_set_beside_each_other_where_they_are_equally_good_on_familiar_views(house):
    path = house / "results" / "viewpoints.csv"
    common = dict(base="smallnorb_elevation_fast", held="0.4", epochs="100", commit="abc1234")
    for choice, split, familiar, novel in [
        ("", 0, "80.00 14.00 9.00 7.00", "80.00 30.00 20.00 19.00"),
        ("", 1, "9.00 11.00", "20.00 10.00"),
        ("zoom=0.2", 0, "", ""),
    ]:
        choices.append(path, common | dict(choice=choice, split=split, familiar=familiar, novel=novel))
    digits = dict(base="affnist_matched_fast", held="0.1", epochs="2", choice="epochs=2", split=0)
    choices.append(path, common | digits | dict(familiar="1.40 0.60", novel="8.00 4.00"))
    text, _, _ = made(house)
    lines = [line.strip("| ").split(" | ")[:6] for line in text.splitlines() if line.startswith(("| `", "| as"))]
    assert lines == [
        ["as it is", "23.00 ± 4.24", "21.00 ± 1.41", "", "", "14.50 ± 6.36 (9.00 ± 2.83)"],
        ["`zoom=0.2`", "", "", "", "", "none (none)"],
        ["`epochs=2`", "8.00", "7.00", "6.00", "5.00", "4.00 (0.60)"],
    ]
    assert held_out.novel_at(8, [80, 14, 9, 7], [80, 30, 20, 19]) == 19.5
    assert held_out.novel_at(14, [80, 14, 9, 7], [80, 30, 20, 19]) == 30


def test_check_fails_until_the_tables_are_made(house, capsys):
    with pytest.raises(SystemExit, match=r"results/README.md, README.md: not up to date, run scripts/tables"):
        tables.main(["--check"], house)
    assert not (house / "results" / "README.md").exists()
    assert "old" in (house / "README.md").read_text()
    tables.main([], house)
    tables.main(["--check"], house)
    note(house, "a", recipe("svhn"), 0.04)
    with pytest.raises(SystemExit, match="not up to date"):
        tables.main(["--check"], house)
    assert "+| SVHN | 3.9 ± 0.06 | 4.00, 1 run |" in capsys.readouterr().out


def test_a_readme_without_markers_is_an_error(house):
    (house / "README.md").write_text("no markers")
    with pytest.raises(ValueError, match=r"README.md must have the lines"):
        tables.main([], house)


def test_weights_in_the_package_are_named_with_their_errors(house, trained):
    (house / "src" / "vbcaps" / "weights").mkdir(parents=True)
    shutil.copy(trained / "seed0" / "last.safetensors", house / "src" / "vbcaps" / "weights" / "tiny.safetensors")
    error = json.loads((trained / "seed0" / "result.json").read_text())["test"]["error"]
    assert f"test errors: `tiny` ({100 * error:.2f}%)." in made(house)[0]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        dict(seed=4),
        dict(flip=True, norm_pose=False, arch=(32, 8, 8, 8), weight_decay=1e-6, nu0=20.0, learn=("alpha0", "Psi0")),
        dict(
            validation=0.2,
            viewpoint="azimuth",
            loss_on="logits",
            schedule="steps",
            milestones=(3, 5),
            final=0.123456789,
        ),
        dict(network="cnn", loss_on="logits"),
        dict(epochs=20),
    ],
)
def test_the_command_makes_the_recipe_again(fields, monkeypatch):
    """The words are parsed by `vbcaps train` itself."""
    wanted = replace(recipe("smallnorb"), **fields)
    seen: list[Recipe] = []
    monkeypatch.setattr(
        "vbcaps.training.loop.fit", lambda recipe, *_, **__: SimpleNamespace(result=seen.append(recipe))
    )
    words = shlex.split(recorded.command([recorded.Run(Path("x"), wanted, {}, None, {})]))
    assert words[:2] == ["vbcaps", "train"]
    train_app([*words[2:], "--device", "cpu"], standalone_mode=False)
    assert seen == [wanted]


def test_a_field_that_is_none_or_empty_can_be_said(monkeypatch):
    monkeypatch.setitem(RECIPES, "changed", lambda: replace(recipe("fashion"), nu0=20.0, schedule="cosine"))
    assert recorded.flags(replace(recipe("fashion"), name="changed", schedule="cosine", milestones=())) == (
        "--nu0 none --milestones none"
    )

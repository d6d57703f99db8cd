"""Each script of benchmarks/ in its smallest case on a CPU (without a GPU, by the reference); and their arithmetic."""

import csv
import importlib
import math
import sys
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from vbcaps import CapsNet, ClassCaps, ConvCaps

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
TINY = "4,2,3,2,5"


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    """One thread; and scripts import each other."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.backends.cudnn.benchmark = False


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run a script with flags; the rows it wrote."""

    def run_script(name, *flags):
        path = tmp_path / f"{name}.csv"
        monkeypatch.setattr(sys, "argv", [name, "--csv", str(path), *map(str, flags)])
        importlib.import_module(name).main()
        with open(path, newline="") as file:
            return list(csv.DictReader(file))

    return run_script


ON_CPU = ("--device", "cpu", "--seconds", 0)


# --- train_step.py ----------------------------------------------------------------------------------------------


def test_a_training_step_and_an_inference_beside_the_reference(run):
    rows = run("train_step", "--arch", TINY, "--image", 20, "--batch", 2, "--routing", "vb", *ON_CPU)
    assert [(row["mode"], row["peer"]) for row in rows] == [("training", "reference"), ("inference", "reference")]
    for row in rows:
        ms = {key: float(row[key]) for key in row if key.startswith(("peer_", "ours_")) and row[key]}
        assert 0 < ms["ours_low"] <= ms["ours_ms"] <= ms["ours_high"]
        assert float(row["ratio"]) == pytest.approx(ms["peer_ms"] / ms["ours_ms"], abs=0.06)
        assert row["commit"]
        assert row["torch"] == torch.__version__


def test_a_peer_without_memory_leaves_a_row_that_says_so(run, monkeypatch):
    train_step = importlib.import_module("train_step")
    make_call = train_step.make_call

    def full(case, mode, how, device):
        if how == "ours":
            return make_call(case, mode, how, device)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB. GPU 0 has a total of 1 GiB.")

    monkeypatch.setattr(train_step, "make_call", full)
    (row,) = run("train_step", "--arch", TINY, "--image", 20, "--batch", 1, "--mode", "inference", *ON_CPU,
                 "--routing", "em")  # fmt: skip
    assert (row["peer_ms"], row["ratio"]) == ("", "")
    assert row["note"] == "CUDA out of memory. Tried to allocate 9.00 GiB"
    assert float(row["ours_ms"]) > 0


def test_a_peer_that_computes_something_else_is_an_error(run, monkeypatch):
    train_step = importlib.import_module("train_step")
    make_call = train_step.make_call

    def wrong(case, mode, how, device):
        call = make_call(case, mode, how, device)()
        return lambda: call if how == "ours" else lambda: call() + 1

    monkeypatch.setattr(train_step, "make_call", wrong)
    with pytest.raises(SystemExit, match="1 rows in which ours and the peer do not compute the same"):
        run(
            "train_step", "--arch", TINY, "--image", 20, "--batch", 2, "--mode", "inference", "--routing", "vb", *ON_CPU
        )


# --- scaling.py -------------------------------------------------------------------------------------------------


def test_scaling_compares_each_row_with_the_base(run):
    rows = run("scaling", "--arch", "4,2,2,2,5", "--batch", 1, "--sweep", "iterations", "--values", 1, 3, 4, *ON_CPU)
    assert [row["units"] for row in rows] == ["1", "3", "4"]
    assert rows[1]["ratio"] == "1.00"
    assert float(rows[2]["linear_ms"]) == pytest.approx(4 / 3 * float(rows[1]["ours_ms"]), rel=0.01)
    assert float(rows[2]["marginal_ns"]) == pytest.approx(
        1e6 * (float(rows[2]["ours_ms"]) - float(rows[1]["ours_ms"])), rel=0.01, abs=2e3
    )
    assert rows[0]["marginal_ns"] == ""


@pytest.mark.parametrize(("sweep", "value"), [("image", 45), ("types", 3), ("batch", 2)])
def test_votes_are_as_many_as_the_network_makes(sweep, value):
    scaling = importlib.import_module("scaling")
    case = scaling.changed(scaling.BASE._replace(network="4,2,3,4,5", batch=1), sweep, value)
    *arch, classes = map(int, case.network.split(","))
    net = CapsNet(arch, case.channels, classes, case.image)
    made = []

    def count(layer, args, caps):
        taps = args[0].activations.shape[1:3].numel() if isinstance(layer, ClassCaps) else math.prod(layer.kernel_size)
        made.append(caps.activations[0].numel() * taps * layer.in_caps)

    for layer in net.modules():
        if isinstance(layer, ConvCaps):
            layer.register_forward_hook(count)
    net(torch.randn(case.batch, case.channels, case.image, case.image))
    assert scaling.votes(case) == sum(made)


# --- hotos.py ---------------------------------------------------------------------------------------------------


def test_hotos_shares_of_the_peak(run):
    rows = run("hotos", "--types", 2, "--batch", 2, "--iters", 1, *ON_CPU)
    assert [row["peer"] for row in rows] == ["einsum, votes only", "reference, routed"]
    for row in rows:
        assert int(row["votes"]) == 2 * 49 * 9 * 2 * 2  # images, fields, taps, children, parents
        achieved = 2 * int(row["votes"]) * 128 / float(row["ours_ms"]) / 1e9
        assert float(row["ours_TFLOPs"]) == pytest.approx(achieved, rel=0.02)
        assert float(row["share_of_peak"]) == pytest.approx(
            achieved / float(row["peak_matmul_TFLOPs"]), rel=0.05, abs=1e-3
        )


def test_operations_of_three_iterations():
    """Eight makings of 64 multiply-adds: three times two in the moments, two in the scores."""
    made, every = importlib.import_module("hotos").operations(votes=10, iters=3)
    assert made == 10 * 8 * 2 * 64
    assert every == made + 10 * (3 * 98 + 2 * 64)


def test_chains_of_multiply_adds_are_what_they_are_counted_as():
    pytest.importorskip("triton")
    peak = importlib.import_module("peak_triton")
    x, out = peak.new_chains(torch.device("cuda" if torch.cuda.is_available() else "cpu"), programs=2)
    x[: peak.LANES] = torch.linspace(0, 1, peak.LANES)
    operations = peak.run_chains(x, out, rounds=2)
    assert operations == 2 * 2 * peak.LANES * 8 * 16
    chains = x[: peak.LANES, None] + torch.arange(8, device=x.device)
    for _ in range(16):
        chains = chains * 0.5 + x[: peak.LANES, None]
    torch.testing.assert_close(out, chains.sum(1).expand(2, -1))


# --- cpu.py and layouts.py --------------------------------------------------------------------------------------


def test_the_arrangement_of_the_released_code_gives_the_references_logits(monkeypatch):
    cpu, layers = importlib.import_module("cpu"), importlib.import_module("vbcaps.layers")
    reference = cpu.measure("reference", batch=2, repeats=1)
    monkeypatch.setattr(layers, "route", layers.route)  # which "nine axes" replaces
    released = cpu.measure("nine axes", batch=2, repeats=1)
    torch.testing.assert_close(torch.tensor(released["logits"]), torch.tensor(reference["logits"]), rtol=0, atol=1e-2)


def test_the_code_before_takes_turns_with_the_code_here_and_the_cnn(monkeypatch, tmp_path):
    """Medians of each, and of the ratios of turns, in which both met the same machine."""
    cpu, turns = importlib.import_module("cpu"), []

    def of_a_process(way, batch, repeats, *more, source=None):
        turns.append((way, source is None))
        slow = 1 + (len(turns) - 3) // 3  # a machine that becomes slower from turn to turn
        return dict.fromkeys(cpu.NAMES, slow * (5 if way == "cnn" else 10 if source is None else 20))

    monkeypatch.setattr(cpu, "of_a_process", of_a_process)
    (tmp_path / "vbcaps").mkdir()
    rows = cpu.compare(str(tmp_path), batch=32, repeats=1, rounds=3, routing="em", network="32", clock="cpu")
    assert turns[2:5] == [("cpu", False), ("cpu", True), ("cnn", True)]
    assert len(turns) == 11
    assert {row[4:9] for row in rows} == {("40.000", "20.000", "10.000", "0.500", "2.000")}
    assert [row[:4] for row in rows][::3] == [
        ("forward and backward, ms", "em", "32", 32),
        ("one image, ms", "em", "32", 1),
    ]


def test_a_revision_that_is_not_there_is_named(tmp_path):
    cpu = importlib.import_module("cpu")
    with pytest.raises(SystemExit, match="git revision, got 'nowhere'"):
        cpu.source_of("nowhere", str(tmp_path))


def test_layouts(run):
    rows = run("layouts", "--batch", 1, "--repeats", 1)
    assert [row["layout"] for row in rows] == ["nine_axes", "by_child", "batch_last", "by_parent"]


# --- folder.py --------------------------------------------------------------------------------------------------


def test_a_folder_is_decoded_and_trained_on(run, monkeypatch, tmp_path):
    folder = importlib.import_module("folder")
    monkeypatch.setattr(folder.store, "IN_MEMORY", folder.store.IN_MEMORY)  # which the parts set
    monkeypatch.setenv("VBCAPS_CACHE", str(tmp_path / "decoded"))
    monkeypatch.setattr(folder, "alone", lambda part, at, side: folder.measured(lambda: folder.PARTS[part](at, side)))
    (row,) = run("folder", "--images", 200, "--side", 32, "--folder", tmp_path)
    assert len(list(tmp_path.glob("decoded/images-32-*/*.npy"))) == 1
    assert row["images"] == "200"
    assert float(row["decoded_MB"]) == pytest.approx(200 * 3 * 32**2 / 1e6, abs=0.5)
    assert float(row["cpu_us_per_image"]) > 10
    assert 50 < float(row["train_own_MB"]) < float(row["train_mapped_MB"])


# --- plot.py ----------------------------------------------------------------------------------------------------


def write(path, *rows):
    columns = ("network", "routing", "iters", "image", "batch", "mode", "peer", "peer_ms", "ours_ms", "peer_GB",
               "ours_GB", "commit", "device")  # fmt: skip
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        for batch, peer, peer_ms, ours_ms, device in rows:
            writer.writerow(
                dict(network="64,16,16,16,5", routing="vb", iters=3, image=32, batch=batch, mode="training", peer=peer,
                     peer_ms=peer_ms, ours_ms=ours_ms, peer_GB=2, ours_GB=0.1, commit="abc", device=device)
            )  # fmt: skip


def test_the_plot_shows_the_last_row_of_each_series_on_one_device(tmp_path):
    plot = importlib.import_module("plot")
    path = tmp_path / "steps.csv"
    write(
        path,
        (32, "reference", 40, 2, "NVIDIA H200"),
        (128, "reference", 64, 5, "some other card"),
        (32, "compiled", 13, 1.5, "NVIDIA H200"),
        (512, "reference", "", 9, "NVIDIA H200"),
        (32, "reference", 38, 1, "NVIDIA H200"),
    )
    found = plot.read(path)
    assert found.series["reference"] == {32: (38.0, 2.0)}
    assert found.series["compiled"] == {32: (13.0, 2.0)}
    assert found.series["ours"] == {32: (1.0, 0.1), 512: (9.0, 0.1)}
    assert found.series["released"] == plot.RELEASED["64,16,16,16,5"]

    pytest.importorskip("matplotlib")
    plot.draw(found, plot.NETWORK, tmp_path / "speed.svg")
    assert (tmp_path / "speed.svg").stat().st_size > 5000


def test_a_plot_of_no_rows_is_an_error_that_says_which(tmp_path):
    write(tmp_path / "steps.csv")
    with pytest.raises(SystemExit, match=r"no row of a training step of 64,16,16,16,5"):
        importlib.import_module("plot").read(tmp_path / "steps.csv")


def test_the_rows_in_the_repository_can_be_drawn():
    found = importlib.import_module("plot").read(BENCHMARKS / "steps.csv")
    assert {32, 128} <= set(found.series["ours"])


# --- measure.py -------------------------------------------------------------------------------------------------


def test_rows_go_below_those_with_the_same_columns_only(tmp_path):
    measure = importlib.import_module("measure")
    path = str(tmp_path / "rows.csv")
    for value in (1, 2):
        measure.record(dict(what="x", ms=value), torch.device("cpu"), path)
    assert [line.split(",")[1] for line in Path(path).read_text().splitlines()] == ["ms", "1", "2"]
    with pytest.raises(SystemExit, match="has other columns"):
        measure.record(dict(what="x", seconds=1), torch.device("cpu"), path)


def test_compiling_ahead_runs_every_case_once_and_names_the_one_that_fails(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text("import sys; open(sys.argv[1], 'a').write(sys.argv[2])")
    cases = [[str(tmp_path / "a")], [str(tmp_path / "b")], [str(tmp_path / "no" / "c")]]
    importlib.import_module("measure").compile_ahead(str(script), cases, processes=2)
    assert (tmp_path / "a").read_text() == (tmp_path / "b").read_text() == "--once"
    assert "could not compile" in capsys.readouterr().err


def test_without_a_gpu_scripts_say_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="no CUDA device"):
        importlib.import_module("measure").the_device("cuda")


def test_the_commit_is_that_of_git_or_of_the_environment(monkeypatch):
    measure = importlib.import_module("measure")
    monkeypatch.setenv("VBCAPS_COMMIT", "0123abc")
    assert measure.here(torch.device("cpu"))["commit"] == "0123abc"
    monkeypatch.delenv("VBCAPS_COMMIT")
    monkeypatch.setenv("PATH", "")
    assert measure.here(torch.device("cpu"))["commit"] == "unknown"


def test_flags_of_a_case_make_that_case(monkeypatch):
    train_step = importlib.import_module("train_step")
    case = train_step.Case("4,2,2,2,5", "em", 2, 20, 3)
    monkeypatch.setattr(sys, "argv", ["train_step", *case.flags])
    assert list(train_step.cases(train_step.flags())) == [case]


def test_the_latency_of_the_explorer(run, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS.parent / "tools"))
    if reason := importlib.import_module("browser").missing():
        pytest.skip(reason)
    (row,) = run("explore", "--moves", "3", "--networks", "fashion_laptop")
    assert 1 < float(row["picture_ms"]) <= float(row["routing_ms"])
    assert float(row["picture_ms"]) <= float(row["picture_p90_ms"])


PARTS = ("routing forward", "routing backward", "capsule norms", "convolutions", "BatchNorm and ReLU")


# --- threads.py, cpu_parts.py, demo.py --------------------------------------------------------------------------


def test_threads_are_compared_with_one(monkeypatch, run):
    """Two take 0.8 of the time of one: 1 / 1.6 of the ideal. No more threads than cores."""
    threads = importlib.import_module("threads")
    times = {1: [10.0, 12.0], 2: [9.0, 8.0]}
    monkeypatch.setattr(threads, "cores", lambda: 2)
    monkeypatch.setattr(
        threads, "of_a_process", lambda routing, batch, count: dict(both=times[count].pop(), inference=1.0)
    )
    rows = run("threads", "--routing", "vb", "--rounds", 2)
    assert [(row["threads"], row["both_ms"], row["both_ideal"]) for row in rows] == [
        ("1", "10.00", "1.00"),
        ("2", "8.00", "0.62"),
    ]
    assert rows[1]["inference_ideal"] == "0.50"


def test_the_parts_of_a_step_are_in_the_row(monkeypatch, run):
    cpu_parts = importlib.import_module("cpu_parts")
    step = lambda: torch.nn.functional.conv2d(torch.ones(8, 3, 32, 32), torch.ones(8, 3, 5, 5)).mul(2)  # noqa: E731
    monkeypatch.setattr(cpu_parts, "make_step", lambda recipe: step)
    (row,) = run("cpu_parts", "--steps", 2)
    assert float(row["convolutions"]) > float(row["routing forward"]) == 0
    assert float(row["step"]) > 0
    net = CapsNet((4, 2, 2, 2), 1, 3, 20)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        net(torch.randn(2, 1, 20, 20)).logits.sum().backward()
    found = {
        part: [event.key for event in seen.key_averages() if cpu_parts.part_of(event.key) == part] for part in PARTS
    }
    assert all(found.values()), found


def test_the_demonstration_is_trained_by_both_revisions(monkeypatch, run):
    demo = importlib.import_module("demo")
    here, asked = str(BENCHMARKS.parent / "src"), []

    def train(source, seed, epochs):
        asked.append((source == here, seed, epochs))
        return (30.0 + seed, 11.0 + seed) if source == here else (60.0, 12.0 + seed)

    monkeypatch.setattr(demo, "train", train)
    monkeypatch.setattr(demo, "source_of", lambda revision, folder: f"{revision} in {folder}")
    (row,) = run("demo", "--before", "v1", "--rounds", 3)
    assert asked == [
        (False, 0, 1),
        (True, 0, 1),
        *((which, seed, None) for seed in range(3) for which in (False, True)),
    ]
    assert [row[name] for name in ("before_s", "now_s", "ratio")] == ["60.0", "31.0", "0.517"]
    assert [row[name] for name in ("before_error", "now_error")] == ["13.00", "12.00"]


def test_the_stem_in_bfloat16_beside_float32(run):
    (row,) = run("stem_bf16", "--rounds", 1, "--batch", 1)
    assert 0 < float(row["error_float32"]) < 1e-4 < float(row["error_bfloat16"]) < 0.1
    assert float(row["step_bfloat16_ms"]) > float(row["stem_bfloat16_ms"]) > 0

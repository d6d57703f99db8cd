"""The command line from end to end, on networks and images that take a second."""

import csv
import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw
from rich.console import Console
from typer.testing import CliRunner

import vbcaps.data
from vbcaps.cli import main as cli
from vbcaps.cli import progress, report
from vbcaps.cli.flags import NOT_FLAGS
from vbcaps.cli.help import FRAMED
from vbcaps.cli.main import app
from vbcaps.data import FACTS, read_image
from vbcaps.figures import run as pictures
from vbcaps.training.files import RunError
from vbcaps.training.loop import Event, Interrupted, evaluate, fit, prepare
from vbcaps.training.recipe import Recipe
from vbcaps.training.recipes import RECIPES, parent
from vbcaps.training.runfolder import read_recipe
from vbcaps.weights.file import pack_weights
from vbcaps.weights.model import Model

SHAPES = ("circle", "square", "triangle")
SETTINGS = dict(
    arch="16,4,4,4",
    crop="20",
    pad="1",
    iters="2",
    batch="8",
    lr="0.01",
    loss_on="logits",
    warmup="0",
    validation="0",
    device="cpu",
)  # 20x20 is the smallest image a network takes


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


SMALL = [word for name, value in SETTINGS.items() for word in (flag(name), value)]


def run(*words: object, code: int = 0) -> str:
    """What `vbcaps` prints on both streams; it must end with ``code``, and never with a traceback."""
    result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200", "RANK": None})
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    assert "Traceback" not in result.output
    return " ".join(result.output.replace("│", " ").split())  # however it was wrapped and framed


def draw_shape(name: str, random: np.random.Generator, side: int = 24) -> Image.Image:
    image = Image.new("L", (side, side), int(random.integers(0, 60)))
    x, y, r = random.integers(9, side - 9), random.integers(9, side - 9), random.integers(6, 9)
    box, pen = (x - r, y - r, x + r, y + r), ImageDraw.Draw(image)
    light = int(random.integers(160, 255))
    if name == "circle":
        pen.ellipse(box, fill=light)
    elif name == "square":
        pen.rectangle(box, fill=light)
    else:
        pen.polygon([(x, y - r), (x - r, y + r), (x + r, y + r)], fill=light)
    return image


def draw_shapes(folder: Path, count: int, seed: int = 0) -> Path:
    random = np.random.default_rng(seed)
    for name in SHAPES:
        (folder / name).mkdir(parents=True)
        for k in range(count):
            draw_shape(name, random).save(folder / name / f"{k}.png")
    return folder


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    """A folder of a few shapes, for runs whose result does not matter."""
    return draw_shapes(tmp_path_factory.mktemp("few") / "shapes", 8)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """(folder of images, folder of a run that learned them, what it printed)."""
    folder = tmp_path_factory.mktemp("trained")
    images = draw_shapes(folder / "shapes", 40)
    said = run("train", "--data", images, *SMALL, "--epochs", 12, "--out", folder / "run")
    return images, folder / "run", said


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VBCAPS_DATA", str(tmp_path / "data"))


def test_a_folder_of_shapes_is_learned(trained):
    images, folder, said = trained
    test = json.loads((folder / "result.json").read_text())["test"]
    assert test["count"] == 24
    assert test["error"] <= 0.2
    assert f"accuracy {100 * (1 - test['error']):.2f}%" in said
    assert [row["name"] for row in test["per_class"]] == list(SHAPES)
    assert read_recipe(folder).data == str(images)


def test_elsewhere_than_in_a_terminal_an_epoch_is_a_plain_line(trained):
    _, _, said = trained
    assert "\x1b" not in said
    for epoch in range(1, 13):
        assert f"epoch {epoch}/12 loss" in said
    assert "images/s" in said
    assert "left" in said


def test_the_run_has_its_pictures(trained):
    _, folder, said = trained
    for name in ("curves.png", "confusion.png", "predictions.png"):
        assert name in said
        with Image.open(folder / name) as image:
            image.load()


def test_eval_gives_what_the_run_recorded_and_draws_it(trained):
    images, folder, _ = trained
    error = json.loads((folder / "result.json").read_text())["test"]["error"]
    said = run("eval", folder, "--picture", "c.png")
    assert f"error {100 * error:.2f}%" in said
    for name in SHAPES:
        assert f"{name} 8" in said
    assert Path("c.png").exists()
    assert "95% interval" in run("eval", folder / "last.safetensors", "--crops", 5)
    assert "24 images" in run("eval", folder, "--data", images)  # what was held out of its own


def test_eval_writes_the_measures_of_each_class_as_a_table_csv_and_json(trained):
    said = run("eval", trained[1], "--csv", "classes.csv", "--json", "all.json", "--ordinal")
    assert said.startswith("class images error 95% interval precision recall F1 AUC circle 8 ")
    result = json.loads(Path("all.json").read_text())
    assert f"balanced accuracy {result['balanced_accuracy']:.3f}, macro F1 {result['macro_f1']:.3f}" in said
    assert f"quadratic kappa {result['quadratic_kappa']:.3f}" in said
    assert "quadratic" not in run("eval", trained[1])
    with open("classes.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for row, of_class, counts in zip(rows, result["per_class"], result["confusion"], strict=True):
        assert (row["class"], int(row["images"])) == (of_class["name"], of_class["count"])
        for name in ("precision", "recall", "f1", "auc"):
            assert row[name] == ("" if of_class[name] is None else f"{of_class[name]:.6f}")
        assert [int(row[f"as {name}"]) for name in SHAPES] == counts


def test_eval_takes_all_images_that_it_was_not_trained_on(trained):
    images, folder, _ = trained
    for name, count in zip(SHAPES, (3, 1, 2), strict=True):
        files = sorted((images / name).iterdir())[:count]
        for part in ("some", "parts/train", "parts/test"):
            (Path(part) / name).mkdir(parents=True)
            for file in files if part != "parts/test" else files[:1]:
                shutil.copy(file, Path(part) / name)
    assert "6 images" in run("eval", folder, "--data", "some")
    assert "3 images" in run("eval", folder, "--data", "parts")


def test_eval_knows_the_images_it_was_trained_on_wherever_they_lie(trained, monkeypatch):
    images, folder, _ = trained
    shutil.copytree(images, "moved")
    assert "24 images" in run("eval", folder, "--data", "moved")
    monkeypatch.chdir("moved")
    draw_shapes(Path("shapes"), 4, seed=1)  # called as the folder that it was trained on
    assert "12 images" in run("eval", folder, "--data", "shapes")
    monkeypatch.chdir("..")

    draw_shapes(Path("own"), 6)
    run("train", "--data", "own", *SMALL, "--epochs", 1, "--validation", 0.25, "--out", "run", "--quiet")
    assert "3 images" in run("eval", "run", "--data", "own")
    shutil.copy("own/circle/0.png", "own/circle/new.png")
    said = run("eval", "run", "--data", "own")
    assert "19 images" in said
    assert "own has changed since the network was trained" in said
    for name in SHAPES:  # too few for a validation share
        for file in sorted((Path("own") / name).iterdir())[1:]:
            file.unlink()
    assert "3 images" in run("eval", "run", "--data", "own")


@pytest.mark.parametrize("folder", ["images", "im[/ages]"])
def test_eval_and_predict_frame_images_as_the_recipe_does(folder, monkeypatch):
    """Weights of a dataset of 28x28 in crops of 32: an image gets a frame, it is not enlarged."""
    recipe = RECIPES["fashion"]()
    recipe = dataclasses.replace(recipe, arch=(4, 2, 2, 2), standardise="none", pad=2)
    Path("w.safetensors").write_bytes(pack_weights(recipe.net(1, 3), recipe, SHAPES, recipe.view(), {}))
    random, seen = np.random.default_rng(0), []
    for name in SHAPES:
        (Path(folder) / name).mkdir(parents=True)
        draw_shape(name, random, side=28).save(Path(folder) / name / "1.png")
    expected = torch.stack([read_image(Path(folder) / name / "1.png", 28, 1) for name in SHAPES])
    monkeypatch.setattr("vbcaps.training.loop.evaluate", lambda _, split, **__: seen.append(split.images) or stop())
    monkeypatch.setattr(Model, "predict", lambda _, images: seen.append(images) or stop())
    for command in (("eval", "w.safetensors", "--data", folder), ("predict", folder, "--weights", "w.safetensors")):
        assert "enough" in run(*command, code=1)
        assert torch.equal(seen.pop(), expected)


def stop() -> None:
    raise RunError("enough")


def test_eval_saves_a_test_of_several_crops_beside_the_result(trained, tmp_path):
    _, folder, _ = trained
    shutil.copytree(folder, "run")
    assert "wrote run/crops5.json" in run("eval", "run", "--crops", 5, "--save", "--device", "cpu")
    recorded = json.loads(Path("run/crops5.json").read_text())
    test = prepare(read_recipe(Path("run")), None, torch.device("cpu")).test
    expected = json.loads(json.dumps(evaluate(vbcaps.load("run"), test, crops=5).to_json()))
    assert {key: recorded[key] for key in expected} == expected
    assert recorded["weights"] == "last.safetensors"
    assert recorded["environment"]["commit"]
    assert recorded["crops"] == 5

    before = sorted(Path("run").iterdir())
    assert "crops must be above 1, got 1" in run("eval", "run", "--save", code=1)
    assert "--save cannot be combined with --data" in run(
        "eval", "run", "--crops", 5, "--save", "--data", "run", code=2
    )
    shutil.copy("run/last.safetensors", "run/best.safetensors")
    assert "no test of best.safetensors" in run("eval", "run", "--crops", 5, "--save", code=1)
    Path("run/best.safetensors").unlink()
    assert sorted(Path("run").iterdir()) == before
    Path("run/result.json").unlink()
    assert "there is no run/result.json" in run("eval", "run", "--crops", 5, "--save", code=1)


def test_weights_of_the_package_are_used_by_name(trained, monkeypatch):
    images, folder, _ = trained
    picture = images / "circle" / "0.png"
    monkeypatch.setattr("vbcaps.weights.find.FOLDER", Path("shipped"))
    for command in (("eval", "shapes"), ("predict", picture, "--weights", "shapes")):
        said = run(*command, code=1)
        assert "shapes is neither a file nor the folder of a run, and no weights called 'shapes' come with" in said
        assert "there are none in this version" in said
    Path("shipped").mkdir()
    shutil.copy(folder / "last.safetensors", "shipped/shapes.safetensors")
    error = json.loads((folder / "result.json").read_text())["test"]["error"]
    said = run("eval", "shapes")
    assert f"error {100 * error:.2f}%" in said
    assert f"the weights file says {100 * error:.2f}%" in said
    assert f"{picture} circle" in run("predict", picture, "--weights", "shapes")
    assert "did you mean 'shapes'?; there are shapes" in run("eval", "shape", code=1)
    Path("shapes").mkdir()  # a folder of images, say: not a run
    assert f"error {100 * error:.2f}%" in run("eval", "shapes")


def test_predict_says_class_and_probability_and_draws_where_asked(trained):
    images, folder, _ = trained
    random = np.random.default_rng(5)
    for name in SHAPES:
        draw_shape(name, random).resize((71, 71)).convert("RGB").save(f"a_{name}.png")
    said = run("predict", *(f"a_{name}.png" for name in SHAPES), "--weights", folder, "--picture", "seen.png")
    for name in SHAPES:
        assert f"a_{name}.png {name} " in said
    rows = said[said.index("next") :]
    assert rows.count("%") == 6
    assert said.startswith(f"weights {folder / 'last.safetensors'}: 12 epochs of default, written 2")
    assert Path("seen.png").exists()
    known, before = images / "circle" / "0.png", sorted(Path().iterdir())
    assert f"{known} circle" in run("predict", known, "--weights", folder / "last.safetensors")
    assert sorted(Path().iterdir()) == before


def test_predict_writes_every_probability_as_csv_and_json(trained):
    images, folder, _ = trained
    model, file = vbcaps.load(folder), images / "square" / "1.png"
    arrays = np.stack([np.asarray(Image.open(images / name / "0.png")) for name in SHAPES])
    np.save("shapes.npy", arrays[:, None])
    said = run("predict", file, "shapes.npy", "--weights", folder, "--csv", "p.csv", "--json", "p.json")
    assert said.endswith("wrote p.csv wrote p.json")
    names = [str(file), *(f"shapes.npy[{k}]" for k in range(3))]
    expected = torch.cat([model.predict(file), model.predict(arrays[:, None])])
    rows = [line.split(",") for line in Path("p.csv").read_text().splitlines()]
    assert rows[0] == ["image", "class", "probability", *SHAPES]
    assert [row[0] for row in rows[1:]] == names
    found = json.loads(Path("p.json").read_text())
    assert (found["weights"], found["classes"]) == (str(folder / "last.safetensors"), list(SHAPES))
    for row, one, name, score in zip(rows[1:], found["predictions"], names, expected, strict=True):
        first = SHAPES[int(score.argmax())]
        assert (row[1], one["class"], one["image"]) == (first, first, name)
        assert [float(p) for p in row[3:]] == pytest.approx(score.tolist(), abs=1e-5)
        assert float(row[2]) == pytest.approx(float(score.max()), abs=1e-5)
        assert list(one["probabilities"].values()) == pytest.approx(score.tolist(), abs=1e-5)
        assert f"{name} {first} " in said
    np.save("two.npy", np.zeros((4, 2, 20, 20), np.uint8))
    assert "two.npy must have 1 or 3 channels" in run("predict", "two.npy", "--weights", folder, code=2)
    Path("no.npy").write_text("no array")
    assert "no.npy: cannot be read as a NumPy array" in run("predict", "no.npy", "--weights", folder, code=2)


def test_predict_of_a_folder_is_of_all_its_images(trained, monkeypatch):
    _, folder, _ = trained
    random = np.random.default_rng(5)
    Path("new/below").mkdir(parents=True)
    for path in ("new/1.png", "new/below/2.PNG", "new/below/3.jpg"):
        draw_shape("circle", random).save(path)
    Path("new/notes.txt").write_text("no image")
    said = run("predict", "new", "new/1.png", "--weights", folder)
    files = [word for word in said.split() if word.startswith("new/")]
    assert files == ["new/1.png", "new/below/2.PNG", "new/below/3.jpg", "new/1.png"]
    assert "the picture has" not in said
    draw = ("--picture", "drawn.png")
    drawn: list[tuple[int, int]] = []
    monkeypatch.setattr(cli, "DRAWN", 2)
    monkeypatch.setattr(
        pictures, "predictions", lambda pixels, scores, *_, **__: drawn.append((len(pixels), len(scores)))
    )
    assert "the picture has the first 2 of 4" in run("predict", "new", "new/1.png", "--weights", folder, *draw)
    assert drawn == [(2, 2)]
    Path("empty").mkdir()
    assert "empty: has no images (.bmp" in run("predict", "new", "empty", "--weights", folder, code=1)


def test_predict_leaves_its_own_picture_out(trained):
    _, folder, _ = trained
    draw_shape("circle", np.random.default_rng(5)).save("1.png")
    for _ in range(2):
        said = run("predict", ".", "--weights", folder, "--picture", "seen.png")
        assert "1.png circle" in said
        assert "seen.png circle" not in said
    said = run("predict", "seen.png", "--weights", folder, "--picture", "seen.png", code=1)
    assert "seen.png is the picture that is drawn" in said
    assert "seen.png circle" in run("predict", "seen.png", "--weights", folder)


def test_predict_takes_the_newest_run(few):
    said = run("predict", few / "circle" / "0.png", code=1)
    assert "no weights in runs" in said
    assert ", ".join(vbcaps.list_models()) in " ".join(said.split())
    for seed in (0, 1):
        run("train", "--data", few, *SMALL, "--epochs", 1, "--seed", seed, "--quiet")
    os.utime("runs/shapes-1/last.safetensors", (2e9, 2e9))
    said = run("predict", few / "circle" / "0.png")
    assert "weights runs/shapes-1/last.safetensors: 1 epoch of default, written 2033-05-18" in said
    said = run("predict", few / "circle" / "0.png", "--weights", "runs/latest")
    assert "weights runs/shapes-2/last.safetensors" in said
    assert "runs/shapes-2 is finished" in run("train", "--resume", "runs/latest")


def test_quiet_says_nothing_and_no_run_overwrites_another(few):
    quick = ("train", "--data", few, *SMALL, "--epochs", 1, "--quiet")
    for _ in range(2):
        assert run(*quick) == ""
    assert sorted(path.name for path in Path("runs").iterdir()) == ["latest", "shapes-1", "shapes-2"]
    before = Path("runs/shapes-1/result.json").read_bytes()
    assert "already holds a run" in run(*quick, "--out", "runs/shapes-1", code=1)
    assert Path("runs/shapes-1/result.json").read_bytes() == before


def test_seeds_are_named_and_averaged(few):
    said = run("train", "--data", few, *SMALL, "--epochs", 1, "--seeds", 2, "--seed", 3, "--out", "both")
    assert sorted(path.name for path in Path("both").iterdir()) == ["seed3", "seed4"]
    assert "seed 3 epoch 1/1" in said
    assert "over 2 seeds" in said
    assert "finished" in run("train", "--resume", "both", "--seeds", 2)
    assert "both/seed3 is one run: resume it without --seeds" in run(
        "train", "--resume", "both/seed3", "--seeds", 2, code=1
    )
    assert "has a folder for each seed: resume them with --seeds" in run("train", "--resume", "both", code=1)
    assert "a run for each seed: choose one, as both/seed3" in run("eval", "both", code=1)
    Path("both/seed3/last.safetensors").unlink()
    assert "vbcaps train --resume both/seed3" in run("eval", "both/seed3", code=1)
    assert sorted(path.name for path in Path("both").iterdir()) == ["seed3", "seed4"]


def test_a_validation_share_leaves_the_test_set_alone_and_its_best_weights_are_used(few):
    said = run("train", "--data", few, *SMALL, "--epochs", 2, "--validation", 0.25, "--out", "run")
    assert "lowest validation error" in said
    assert "test:" not in said
    assert {path.name for path in Path("run").glob("*.png")} == {"curves.png", "predictions.png", "routing.png"}
    assert "weights run/best.safetensors: " in run("predict", few / "circle" / "0.png", "--weights", "run")


def test_without_matplotlib_a_run_ends_well_and_says_what_is_missing(few, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    said = run("train", "--data", few, *SMALL, "--epochs", 1, "--out", "run")
    assert "pip install 'vbcaps[plot]'" in said
    assert "accuracy" in said
    assert "1 epoch in" in said
    assert vbcaps.load("run").classes == SHAPES
    assert not list(Path("run").glob("*.png"))


def test_train_from_weights_has_their_network_and_a_short_schedule(trained, few):
    _, folder, _ = trained
    said = run("train", "--from", folder, "--data", few, "--epochs", 1, "--batch", 8, "--device", "cpu")
    assert "epoch 1/1" in said
    out = Path("runs/shapes-1")
    recipe, source = read_recipe(out), read_recipe(folder)
    assert (recipe.arch, recipe.crop, recipe.standardise) == (source.arch, source.crop, source.standardise)
    assert (recipe.name, recipe.optimiser, recipe.lr, recipe.epochs) == ("default_tuned", "adamw", 0.002, 1)
    start = json.loads((out / "environment.json").read_text())["began_with"]
    assert start["weights"] == str((folder / "last.safetensors").resolve())
    assert "begun with" in str(vbcaps.load(out))
    assert "is finished" in run("train", "--resume", out)
    assert "--from cannot be used with --resume" in run("train", "--resume", out, "--from", folder, code=2)
    said = run("train", "default", "--from", folder, "--data", few, "--device", "cpu", code=1)
    assert "another network (arch is (16, 4, 4, 4), the recipe's (32, 8, 8, 8))" in said
    assert "did you mean 'fashion'" in run("train", "--from", "fashon", code=1)


def test_interrupted_it_says_how_to_go_on_and_going_on_ends_the_run(few):
    command = [sys.executable, "-m", "vbcaps"]
    words = ["train", "--data", str(few), *SMALL, "--epochs", "300", "--out", "run"]
    with subprocess.Popen([*command, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("epoch"):
                break
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert errors.endswith("vbcaps train --resume run\n")
    assert "Traceback" not in errors
    done = len(Path("run/metrics.csv").read_text().splitlines()) - 1
    assert 1 <= done < 300
    assert not Path("run/result.json").exists()

    message = run("train", "--resume", "run", "--lr", 0.03, code=1)
    assert "another recipe" in message
    assert "lr was 0.01, is now 0.03" in message
    assert "another recipe" in run("train", "smallnorb", "--resume", "run", code=1)
    assert "--out cannot be used with --resume" in run("train", "--resume", "run", "--out", "other", code=2)
    assert not Path("run/result.json").exists()


def test_interrupted_seeds_are_counted_in_what_it_says(few, monkeypatch):
    def fit_seeds(*_: object, **__: object) -> None:
        raise Interrupted(signal.SIGTERM, Path("out/seed0"))

    monkeypatch.setattr("vbcaps.training.loop.fit_seeds", fit_seeds)
    said = run("train", "--data", few, "--seeds", 3, "--out", "my runs", "--device", "cpu", code=143)
    assert said.endswith("vbcaps train --resume 'my runs' --seeds 3")


def test_resume_goes_on(few):
    """After the first of two epochs."""
    whole = ("train", "--data", few, *SMALL, "--epochs", 2, "--out", "whole")
    run(*whole)

    def stop(event: Event) -> None:
        if event.kind == "epoch":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(read_recipe(Path("whole")), "part", device="cpu", on_event=stop)
    said = run("train", "--resume", "part")
    assert "epoch 2/2" in said
    assert "epoch 1/2" not in said
    weights = [Path(folder, "last.safetensors") for folder in ("whole", "part")]
    one, other = (vbcaps.load(path).net.state_dict() for path in weights)
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--epoch 3", "--epochs"),
        ("--epochs many", "'many' is not a whole number"),
        ("--epochs 2.9", "did you mean 3?"),
        ("--lr fast", "'fast' is not a number"),
        ("--arch 8,4,x,4", "'x' is not a whole number"),
        ("--arch 8,4,4", "arch must be four"),
        ("--routing dynamc", "did you mean 'dynamic'?"),
        ("--learn alpha", "did you mean 'alpha0'?"),
        ("--batch 0", "batch must lie from 1"),
        ("--routing em --alpha0 2", "alpha0 belongs to routing='vb'"),
        ("--dataset photos/mine", "own images is given as data"),
        ("--schedule steps", "milestones"),
        ("--seeds 0", "--seeds"),
        ("--device tpu", "device must be auto, cpu, cuda"),
        ("smallnorb_fats", "did you mean 'smallnorb_fast'?"),
        ("nothing-like-it", "`vbcaps recipes` lists them"),
        ("..", "your own images are given as --data .."),
        ("default more", "more"),
    ],
)
def test_a_bad_flag_names_the_nearest_good_one(words, message):
    assert message in run("train", *words.split(), code=2)
    assert not Path("runs").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_one(few, trained):
    for words in (("train", "--data", few), ("eval", trained[1]), ("predict", few)):
        assert "no CUDA device" in run(*words, "--device", "cuda", code=2)
    assert not Path("runs").exists()


def broken_folders(folder: Path) -> dict[str, str]:
    """Folders of images that cannot be used, and what is said of them."""
    (folder / "none").mkdir()
    (folder / "one" / "circle").mkdir(parents=True)
    draw_shapes(folder / "hollow", 2)
    (folder / "hollow" / "star").mkdir()
    draw_shapes(folder / "unreadable", 2)
    (folder / "unreadable" / "circle" / "1.png").write_bytes(b"\x89PNG\r\n\x1a\n and no more")
    return {
        "none": "has no class folders",
        "one": "has one class only",
        "hollow": "star: has no images",
        "unreadable": "1.png: cannot be read as an image",
        "missing": "missing is not a folder",
    }


def test_image_folders_that_cannot_be_used(tmp_path):
    for name, message in broken_folders(tmp_path).items():
        assert message in run("train", "--data", tmp_path / name, *SMALL, code=1)
        assert not Path("runs").exists(), name


def test_a_dataset_whose_files_are_missing_or_damaged(tmp_path):
    missing = run("train", "fashion", "--device", "cpu", code=1)
    assert "vbcaps data fetch fashion-mnist" in missing
    place = tmp_path / "data" / "fashion-mnist"
    place.mkdir(parents=True)
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (place / f"{name}-ubyte").write_bytes(b"\0\0\x08\x01 cut short")
    assert "train-images-idx3-ubyte" in run("train", "fashion", "--device", "cpu", code=1)
    assert "damaged" in run("data", "check", "fashion-mnist", code=1)
    assert not Path("runs").exists()


def test_a_crop_that_does_not_fit_the_images():
    said = run("train", "--crop", 64, "--pad", 0, "--device", "cpu", code=2)
    assert "crop" in said
    assert not Path("runs").exists()


def test_a_folder_that_cannot_be_written(few):
    Path("file").write_text("in the way")
    assert "cannot write in file/run" in run("train", "--data", few, *SMALL, "--out", "file/run", code=1)


def test_a_resume_folder_that_is_none(few):
    assert "recipe.json" in run("train", "--resume", few, code=1)
    assert "recipe.json" in run("train", "--resume", "nowhere", code=1)


def test_weights_that_cannot_be_used(trained, few):
    _, folder, _ = trained
    content = (folder / "last.safetensors").read_bytes()
    Path("cut.safetensors").write_bytes(content[:-100])
    Path("text.safetensors").write_text("not weights")
    other = content.replace(b'\\"arch\\": [16, 4, 4, 4]', b'\\"arch\\": [16, 4, 4, 5]')
    assert other != content
    Path("other.safetensors").write_bytes(other)
    picture = few / "circle" / "0.png"
    for name, message in (
        ("cut", "damaged"),
        ("text", "damaged"),
        ("other", "of another network"),
        ("missing", "cannot read the weights"),
    ):
        path = f"{name}.safetensors"
        assert message in run("eval", path, code=1)
        assert message in run("predict", picture, "--weights", path, code=1)
    assert "saved state" in run("eval", folder / "state.safetensors", code=1)


def test_eval_on_other_classes_or_crops(trained, tmp_path):
    _, folder, _ = trained
    others = draw_shapes(tmp_path / "others", 4)
    (others / "circle").rename(others / "disc")
    assert "disc, square, triangle" in run("eval", folder, "--data", others, code=1)
    assert "--crops" in run("eval", folder, "--crops", 7, code=2)


def test_predict_on_what_is_no_image(trained):
    _, folder, _ = trained
    Path("notes.txt").write_text("words")
    assert "cannot be read as an image" in run("predict", "notes.txt", "--weights", folder, code=1)


def test_help_has_every_field_with_its_text():
    said = run("train", "--help")
    for field in dataclasses.fields(Recipe):
        if field.name not in NOT_FLAGS:
            assert f" {flag(field.name)} " in said
            assert field.metadata["help"] in said
    for heading in ("Data", "Images", "Network and routing", "Training"):
        assert f"─ {heading} ─" in said


def test_every_flag_becomes_its_field(monkeypatch):
    """Each field of every type is set to a value that differs from the recipe's, one at a time."""
    seen = []

    def fit(recipe: Recipe, *_: object, **__: object) -> SimpleNamespace:
        seen.append(recipe)
        return SimpleNamespace(result=None)

    monkeypatch.setattr("vbcaps.training.loop.fit", fit)
    base = RECIPES["default"]()
    for field, words, value in (
        ("epochs", "--epochs 7", 7),
        ("lr", "--lr 1e-4", 1e-4),
        ("arch", "--arch 8,4,4,4", (8, 4, 4, 4)),
        ("learn", "--learn alpha0,Psi0", ("alpha0", "Psi0")),
        ("learn", "--learn none", ()),
        ("flip", "--flip", True),
        ("norm_pose", "--no-norm-pose", False),
        ("loss_on", "--loss-on activations", "activations"),
        ("nu0", "--nu0 20", 20.0),
        ("nu0", "--nu0 none", None),
        ("validation", "--validation 0.1", 0.1),
    ):
        run("train", "--device", "cpu", *words.split())
        assert seen[-1] == base.with_fields(**{field: value})


def test_a_recipe_is_shown_with_the_fields_that_it_uses():
    said = run("recipes", "smallnorb_em_fast")
    for line in ("cutout 12", "epochs 100", "arch 64,16,16,16", "min_var 0.1", "mixup 0.5"):
        assert line in said, line
    assert "alpha0" not in said
    assert "routing" not in run("recipes", "affnist_cnn")
    assert "did you mean 'svhn'?" in run("recipes", "svhm", code=2)


def test_the_version_is_told():
    assert run("--version").strip() == f"vbcaps {vbcaps.__version__}"


def test_recipes_are_listed_with_the_papers_numbers():
    said = run("recipes")
    for name in RECIPES:
        assert f"{parent(name)} " in said
    assert "smallnorb 64,16,16,16 vb 169,802 350/100 1.6 ± 0.06" in said
    assert "cifar10_residual 64,16,32,32 residual vb" in said
    assert "affnist_cnn 64,64,72,72 cnn 169,082" in said


def test_what_is_said_of_a_dataset_is_true_of_its_images():
    sample, facts = vbcaps.data.load_dataset("sample"), FACTS["sample"]
    assert sample.train.images.shape[1:] == (facts.channels, facts.side, facts.side)
    assert len(sample.classes) == facts.classes
    assert facts.about.startswith(f"{len(sample.train.labels) + len(sample.test.labels):,} ")


def test_data_list_check_and_fetch(tmp_path, monkeypatch):
    said = run("data", "list")
    for name in FACTS:
        assert name in said
    assert str(tmp_path / "data") in said
    assert "in elsewhere" in run("data", "list", "--data-folder", "elsewhere")
    assert "missing" in run("data", "check", "mnist", code=1)
    assert run("data", "check", "sample") == ""
    (tmp_path / "data" / "svhn").mkdir(parents=True)
    (tmp_path / "data" / "svhn" / "sheet.webp").touch()
    assert "present" in run("data", "check", "svhn")
    for command in ("check", "fetch"):
        assert "did you mean 'smallnorb'?" in run("data", command, "smalnorb", code=2)

    def no_network(*_: object, **__: object) -> None:
        raise OSError("no route to host")

    monkeypatch.setattr("urllib.request.urlopen", no_network)
    said = run("data", "fetch", "mnist", code=1)
    assert "no route to host" in said
    assert str(tmp_path / "data" / "mnist" / "train-images-idx3-ubyte.gz") in said
    assert "by hand" in said


def event(kind: str, **fields: object) -> Event:
    return Event(kind, 4, Path("run"), **({"epoch": 2, "epochs": 3, "steps": 10} | fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_in_a_terminal_and_elsewhere(monkeypatch, terminal):
    screen = StringIO()
    console = Console(file=screen, force_terminal=terminal, width=120, highlight=False)
    monkeypatch.setattr(progress, "console", console)
    monkeypatch.setattr("vbcaps.cli.report.console", console)
    measured: dict = dict(loss=1.25, error=0.125, images_per_second=4321.0, eta=75.0)
    with progress.Display(seeds=2) as display:
        display(event("start"))
        display(event("note", message="something [of] note"))
        display(event("step", step=5, **measured))
        live = screen.getvalue()
        display(event("epoch", step=10, validation=0.25, **measured))
        display(event("end", step=10))
    shown = screen.getvalue()
    assert "seed 4  something [of] note" in shown
    assert (
        "epoch 2/3  loss 1.250  training error 12.50%  validation error 25.00%  4,321 images/s  1 min 15 s left"
        in shown
    )
    assert ("\x1b[" in shown) == terminal
    assert "loss" not in live or terminal  # plain lines are for whole epochs, unless one takes long


def test_a_long_epoch_writes_lines_of_its_own(monkeypatch, capsys):
    monkeypatch.setattr(progress, "EVERY", 0.0)
    with progress.Display() as display:
        display(event("step", step=5, loss=1.25, images_per_second=10.0, eta=3700.0))
    assert capsys.readouterr().out == "epoch 2/3 step 5/10  loss 1.250  10 images/s  1 h 01 min left\n"


def test_the_program_starts_without_pytorch_and_writes_errors_to_stderr(tmp_path):
    imports = "import sys, vbcaps.cli.main, vbcaps.cli.train; vbcaps.cli.main.recipes()"
    slow = {"torch", "numpy", "PIL", "matplotlib", "scipy", "sklearn", "safetensors", "starlette", "uvicorn"}
    subprocess.run([sys.executable, "-c", f"{imports}; assert not {slow} & {{*sys.modules}}"], check=True)
    ended = subprocess.run([sys.executable, "-m", "vbcaps", "--help"], check=True, capture_output=True, text=True)
    for name in ("train", "eval", "predict", "uncertainty", "recipes", "data"):
        assert f" {name} " in ended.stdout
    ended = subprocess.run([sys.executable, "-m", "vbcaps", "eval", "./nowhere.st"], capture_output=True, text=True)
    assert ended.returncode == 1
    assert ended.stdout == ""
    assert ended.stderr == "vbcaps: cannot read the weights nowhere.st: No such file or directory\n"


def test_the_example_runs():
    example = Path(__file__).parents[2] / "examples" / "route_a_batch.py"
    ended = subprocess.run([sys.executable, example, "--batch", "1"], check=True, capture_output=True, text=True)
    for name in ("vb ", "em ", "dynamic "):
        assert f"{name} " in ended.stdout
    assert "nats learned" in ended.stdout


def test_own_images_are_tried_as_they_come(few):
    """Nothing but a folder: what was chosen is said and recorded; each choice can be made otherwise."""
    said = run("train", "--data", few, "--epochs", 2, "--arch", "8,2,2,2", "--device", "cpu")
    assert "3 classes (circle, square, triangle): 18 images to train on, 6 to test" in said
    assert "too few images to choose the best epoch" in said
    assert "network input 28x28 (the shorter side of the images is 24, in the median)" in said
    assert "few images: batches of 8" in said
    assert "test: error" in said
    recipe = read_recipe(Path("runs/latest"))
    assert (recipe.flip, recipe.validation, recipe.crop, recipe.batch) == (False, 0.0, 28, 8)
    own = ("--flip", "--validation", 0.25, "--crop", 20, "--batch", 4, "--out", "own", "--quiet")
    assert run("train", "--data", few, "--epochs", 1, "--arch", "8,2,2,2", "--device", "cpu", *own) == ""
    recipe = read_recipe(Path("own"))
    assert (recipe.flip, recipe.validation, recipe.crop, recipe.batch, recipe.test) == (True, 0.25, 20, 4, False)


def test_a_network_that_knows_its_images_by_heart_is_told_of():
    result = SimpleNamespace(
        seed=0, test=None, familiar=None, validation=0.4, best_epoch=3, train_error=0.0, recipe=RECIPES["default"](),
        weights=Path("w"), folder=Path("run"), epochs=4, seconds=1.0, parameters=7, health=None,
    )  # fmt: skip
    result.recipe = dataclasses.replace(result.recipe, brightness=0.3, flip=False)
    for train_error, told in ((0.0, True), (0.3, False), (0.19, True)):
        result.train_error = train_error
        with report.console.capture() as captured:
            report.say_results([result])
        assert ("knows its training images by heart" in captured.get()) == told
    result.train_error = 0.0
    assert "far below the validation error" in report.by_heart(result)
    assert "--rotate 10 --zoom 0.2 changes them" in report.by_heart(result)
    assert "--flip" in report.by_heart(result)
    result.validation, result.test = None, SimpleNamespace(error=0.5)
    assert not report.by_heart(result)  # a paper's dataset
    result.recipe = dataclasses.replace(result.recipe, data="photos")
    assert "far below the test error" in report.by_heart(result)


@pytest.mark.parametrize(
    "words", ["", "train", "eval", "predict", "routing", "uncertainty", "recipes", "data", "data list"]
)
@pytest.mark.parametrize("width", [50, 60, 80, 120])
def test_help_names_every_flag_whole_and_no_type_of_a_switch(words, width):
    result = CliRunner().invoke(app, [*words.split(), "--help"], env={"COLUMNS": str(width)})
    assert "bool" not in result.output
    assert width < FRAMED or max(map(len, result.output.splitlines())) <= width  # the runner wraps plain text at 80
    if words == "train":
        for field in dataclasses.fields(Recipe):
            assert field.name in NOT_FLAGS or flag(field.name) in result.output

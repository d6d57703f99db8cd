"""A run from recipe to result: what is trained, chosen, tested, told and written; and when it cannot go on."""

import copy
import json
from dataclasses import replace

import pytest
import tiny
import torch
import torch.nn.functional as F

from vbcaps import models
from vbcaps.data import load_dataset
from vbcaps.data.augment import mixup
from vbcaps.losses import activation_nll_loss, evidence_loss
from vbcaps.training.files import read_json
from vbcaps.training.learner import Learner, NonFinite, epoch_plan
from vbcaps.training.loop import Interrupted, evaluate, fit, fit_seeds, pick_device, prepare
from vbcaps.training.muon import Muon
from vbcaps.training.runfolder import read_metrics, read_recipe, read_result
from vbcaps.training.step import WARM_UP
from vbcaps.uncertainty import fit_temperature, look
from vbcaps.weights.model import load

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def tiny_data():
    with tiny.in_place_of_data():
        yield


def learner_of(device="cpu", **fields):
    recipe, data = tiny.recipe(**fields), tiny.dataset()
    train = data.train.to(device)
    return Learner(recipe, train, recipe.view().fit(train), 3)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """(result, events) of a run with nothing special."""
    events = []
    with tiny.in_place_of_data():
        recipe = tiny.recipe(epochs=12, arch=(8, 4, 4, 4), lr=0.03, loss_on="activations")
        result = fit(
            recipe, tmp_path_factory.mktemp("run"), device="cpu", tensorboard=True, on_event=events.append
        ).result
    return result, events


# --- few steps -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields", [dict(epochs=40), dict(epochs=30, ema=0.998, arch=(8, 4, 4, 4))], ids=["last", "ema"]
)
def test_forty_steps_are_tested_with_statistics_that_fit(tmp_path, fields):
    result = fit(tiny.recipe(batch=48, lr=0.02, **fields), tmp_path, device="cpu").result
    assert result.train_error == 0
    assert result.test.error <= 0.1


# --- the epoch and the step ------------------------------------------------------------------------------------------


def test_an_epoch_is_a_pure_function_of_seed_and_epoch():
    order, u = epoch_plan(3, 7, 50, 2)
    again = epoch_plan(3, 7, 50, 2)
    assert torch.equal(order, again[0])
    assert torch.equal(u, again[1])
    assert sorted(order.tolist()) == list(range(50))
    assert u.shape == (50, 2)
    assert 0 <= float(u.min()) < float(u.max()) < 1
    others = [epoch_plan(3, 8, 50, 2), epoch_plan(4, 7, 50, 2), epoch_plan(3 + 2**32, 7, 50, 2)]
    assert not any(torch.equal(order, other) for other, _ in others)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        dict(optimiser="sgd", lr=0.1, weight_decay=1e-3),
        dict(optimiser="adamw", weight_decay=0.1, rotate=10.0),
        dict(optimiser="muon", weight_decay=0.1),
        dict(ema=0.7),
        dict(loss_on="activations"),
        dict(mixup=0.4, cutout=5),
        dict(evidence=0.5, norm_logit=False),
    ],
)
def test_a_step_is_the_loop_everyone_writes(fields):
    learner = learner_of(**fields)
    r, net = learner.recipe, copy.deepcopy(learner.net)
    parameters, optimisers = list(net.parameters()), []
    if r.optimiser == "muon":
        optimisers = [Muon([p for p in parameters if p.ndim > 2], lr=1.0, weight_decay=r.weight_decay)]
        parameters = [p for p in parameters if p.ndim < 2]
    if r.optimiser == "adam":
        optimisers += [torch.optim.Adam(parameters, fused=True)]
    elif r.optimiser in ("adamw", "muon"):
        optimisers += [torch.optim.AdamW(parameters, weight_decay=r.weight_decay, fused=True)]
    else:
        optimisers += [torch.optim.SGD(parameters, momentum=r.momentum, weight_decay=r.weight_decay, fused=True)]
    average = {name: x.clone() for name, x in net.state_dict().items()}
    total, wrong = 0.0, 0
    learner.begin()
    order, u = epoch_plan(r.seed, 0, 48, learner.view.draws + (r.mixup > 0))
    for k in range(4):
        learner()
        batch, drawn = order[8 * k : 8 * k + 8], u[8 * k : 8 * k + 8]
        x = learner.view.train(learner.train.images[batch], drawn[:, : learner.view.draws])
        y = target = learner.train.labels[batch]
        if r.mixup:
            x, target = mixup(x, y, r.mixup * drawn[:, -1, None, None, None], 3)
        net.zero_grad()
        out = net(x)
        if r.loss_on == "activations":
            loss = activation_nll_loss(out.activations, target)
        else:
            loss = F.cross_entropy(out.logits, target)
        if r.evidence:
            loss = loss + r.evidence * evidence_loss(out.posterior, target)
        loss.backward()
        for optimiser in optimisers:
            optimiser.param_groups[0]["lr"] = torch.tensor(r.learning_rate(k, 6))
            optimiser.step()
        total, wrong = total + loss.item(), wrong + int((out.logits.argmax(1) != y).sum())
        for name, value in net.state_dict().items():
            keep = min(r.ema, (1 + k) / (10 + k))
            averaged = keep * average[name] + (1 - keep) * value
            average[name] = averaged if value.is_floating_point() else value.clone()
    expected = average if r.ema else net.state_dict()
    for name, value in learner.weights.state_dict().items():
        if r.ema:
            torch.testing.assert_close(value, expected[name], msg=lambda m, name=name: f"{name}: {m}")
        else:
            assert torch.equal(value, expected[name]), name
    totals = learner.totals()
    assert totals.loss == pytest.approx(total / 4, rel=1e-5)
    assert totals.error == wrong / 32


def test_the_margin_of_the_spread_loss_grows():
    learner = learner_of(loss="spread", loss_on="activations", epochs=4)
    margins = []
    for epoch in range(4):
        learner.epoch = epoch
        learner.begin()
        margins += learner.rates[:, 1].tolist()
    assert margins[0] == pytest.approx(0.2)
    assert margins == sorted(margins)
    assert margins[12:] == pytest.approx([0.9] * 12)
    learner.step = 0
    learner()
    assert learner.totals().loss > 0


def test_an_incomplete_batch_is_left_out_unless_it_is_all_there_is():
    assert learner_of(batch=20).steps == 2
    alone = learner_of(batch=100)
    assert (alone.steps, alone.batch) == (1, 48)


def test_the_steps_that_warm_a_capture_up_may_pass_the_end_of_the_epoch():
    learner = learner_of(batch=48)
    learner.begin()
    for _ in range(WARM_UP):
        learner.work()
    assert learner.steps < WARM_UP
    assert learner.totals().loss > 0


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("optimiser", ["adam", "adamw", "muon", "sgd"])
def test_a_captured_epoch_equals_an_eager_one(optimiser):
    fields = dict(optimiser=optimiser, lr=0.01, ema=0.9, backend="auto", arch=(8, 4, 4, 4))
    captured, eager = learner_of("cuda", **fields), learner_of("cuda", **fields)
    captured.begin()
    eager.begin()
    for _ in range(6):
        captured()
        eager.work()
        eager.step += 1
    assert captured.totals().loss == pytest.approx(eager.totals().loss, rel=1e-4)
    for name, value in captured.tensors().items():
        torch.testing.assert_close(
            value, eager.tensors()[name], rtol=1e-3, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}"
        )


def test_there_must_be_another_image_to_blend_with(tiny_data, tmp_path):
    with pytest.raises(ValueError, match="mixup blends two images: a batch must have two, got batch=1"):
        fit(tiny.recipe(batch=1, mixup=0.4), tmp_path / "run", device="cpu")


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
@pytest.mark.parametrize("optimiser", ["adam", "muon"])
def test_seeds_at_the_same_time_are_the_seeds_alone(tmp_path, optimiser):
    recipe = tiny.recipe(backend="auto", arch=(8, 4, 4, 4), validation=0.25, optimiser=optimiser)
    fit_seeds(recipe, tmp_path / "both", 2, device="cuda")
    for seed in (0, 1):
        fit(replace(recipe, seed=seed), tmp_path / f"alone{seed}", device="cuda")
        both, alone = (load(tmp_path / name / "last.safetensors").net for name in (f"both/seed{seed}", f"alone{seed}"))
        for a, b in zip(both.state_dict().values(), alone.state_dict().values(), strict=True):
            assert torch.equal(a, b)


# --- a whole run -----------------------------------------------------------------------------------------------------


def test_it_learns_and_says_so(finished):
    result, events = finished
    assert result.test.error <= 0.1
    assert result.test.count == 30
    assert result.validation is None
    assert [event.kind for event in events if event.kind not in ("step", "epoch")] == ["start", "end"]
    epochs = [event for event in events if event.kind == "epoch"]
    assert [event.epoch for event in epochs] == list(range(1, 13))
    assert epochs[-1].loss < epochs[0].loss
    assert all(event.images_per_second > 0 for event in epochs)
    steps = [event for event in events if event.kind == "step"]
    assert [(event.epoch, event.step) for event in steps[:7]] == [(1, k) for k in range(1, 7)] + [(2, 1)]
    assert all(event.images_per_second > 0 and event.steps == 6 and event.epochs == 12 for event in steps)
    assert steps[0].eta > steps[-1].eta >= 0
    assert events[-1].result == result


def test_the_folder_explains_itself(finished):
    result, events = finished
    files = {path.name for path in result.folder.iterdir()}
    written = ("recipe.json", "environment.json", "metrics.csv", "state.safetensors", "last.safetensors", "result.json")
    assert files == {*written, "tensorboard"}
    assert read_recipe(result.folder) == result.recipe
    assert read_json(result.folder / "environment.json")["torch"] == torch.__version__
    rows = read_metrics(result.folder)
    assert [row["epoch"] for row in rows] == list(range(1, 13))
    for column in ("loss", "images_per_second"):
        assert [row[column] for row in rows] == [getattr(event, column) for event in events if event.kind == "epoch"]
    assert rows[0]["validation_error"] is None
    assert read_result(result.folder)["test"]["error"] == result.test.error
    assert list((result.folder / "tensorboard").iterdir())


def test_a_validation_share_chooses_and_the_test_set_stays_closed(tmp_path, monkeypatch):
    result = fit(tiny.recipe(epochs=3, validation=0.25), tmp_path / "a", device="cpu").result
    assert result.test is None
    rows = read_metrics(tmp_path / "a")
    errors = [row["validation_error"] for row in rows]
    assert result.validation == min(errors)
    assert result.best_epoch == 1 + errors.index(min(errors))
    best = load(tmp_path / "a" / "best.safetensors")
    assert best.about["epoch"] == result.best_epoch
    assert best.about["test_error"] is None
    tested = fit(tiny.recipe(epochs=3, validation=0.25, test=True), tmp_path / "b", device="cpu").result
    assert tested.test == evaluate(load(tmp_path / "b"), tiny.dataset().test)


def test_a_validation_share_gives_the_temperature_that_fits_it(tmp_path):
    recipe = tiny.recipe(epochs=3, validation=0.25, test=True)
    model = fit(recipe, tmp_path / "whole", device="cpu")
    data = prepare(recipe, None, torch.device("cpu"))
    logits = look(model, data.validation.images).logits
    assert model.temperature == pytest.approx(fit_temperature(logits, data.validation.labels), rel=1e-3)
    assert model.temperature != pytest.approx(1, abs=0.01)
    again = load(tmp_path / "whole")
    assert again.about["temperature"] == again.temperature == model.temperature
    expected = (look(model, data.test.images).logits / model.temperature).softmax(1)
    torch.testing.assert_close(again.predict(data.test.images), expected)
    assert "temperature" not in load(tmp_path / "whole" / "last.safetensors").about or model.result.best_epoch == 3

    def stop(event):
        if event.kind == "epoch" and event.epoch == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(recipe, tmp_path / "part", device="cpu", on_event=stop)
    resumed = fit(recipe, tmp_path / "part", device="cpu", resume=True)
    assert resumed.temperature == model.temperature
    finished = fit(recipe, tmp_path / "part", device="cpu", resume=True)  # which only reads it
    assert finished.temperature == model.temperature


def test_without_images_held_out_the_temperature_is_one(finished, tmp_path, monkeypatch):
    model = load(finished[0].folder)
    assert "temperature" not in model.about
    assert model.temperature == 1
    monkeypatch.setattr(
        "vbcaps.training.loop.viewpoints", lambda data, axis: (data.train, data.test, tiny.split(15, 9))
    )
    recipe = tiny.recipe(epochs=2, dataset="smallnorb", viewpoint="azimuth", match=0.01)
    matched = fit(recipe, tmp_path, device="cpu")  # the images that choose its weights are test images
    assert matched.result.validation is not None
    assert "temperature" not in matched.about


def test_a_matched_run_stops_at_the_error_it_should_match(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "vbcaps.training.loop.viewpoints", lambda data, axis: (data.train, data.test, tiny.split(15, 9))
    )
    recipe = tiny.recipe(epochs=12, dataset="smallnorb", viewpoint="azimuth", match=0.4, arch=(8, 4, 4, 4))
    result = fit(recipe, tmp_path, device="cpu").result
    errors = [row["validation_error"] for row in read_metrics(tmp_path)]
    assert result.matched
    assert errors[-1] <= 0.4 < min(errors[:-1], default=1.0)
    assert result.epochs == len(errors) < 12
    assert result.familiar.error == errors[-1]  # the weights that are tested are those that matched
    assert result.test.count == 15


@pytest.mark.parametrize("optimiser", ["adam", "muon"])
def test_a_cnn_is_trained_resumed_and_tested_by_the_same_path(tmp_path, monkeypatch, optimiser):
    monkeypatch.setattr("vbcaps.training.loop.why_no_library", lambda: "no compiler was found")
    plain: dict = dict(network="cnn", arch=(8, 8, 8, 8), iters=3, backend="auto", ema=0.9, epochs=12)
    plain |= dict(optimiser=optimiser)
    events = []
    model = fit(tiny.recipe(**plain), tmp_path / "whole", device="cpu", on_event=events.append)
    result, net = model.result, model.net
    assert not [event for event in events if event.kind == "note"]  # it does without kernels for routing
    assert result.test.error <= 0.2
    assert isinstance(net, models.ConvNet)
    assert (model.recipe, model.about["test_error"]) == (result.recipe, result.test.error)
    assert evaluate(model, tiny.dataset().test) == result.test
    images = tiny.dataset().test.images
    with torch.no_grad():
        expected = net(model.view.test(images)).logits.softmax(1)
    torch.testing.assert_close(model.predict(images), expected)

    def stop(event):
        if event.kind == "epoch" and event.epoch == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fit(tiny.recipe(**plain), tmp_path / "part", device="cpu", on_event=stop)
    other = fit(tiny.recipe(**plain), tmp_path / "part", device="cpu", resume=True).net.state_dict()
    assert all(torch.equal(x, other[name]) for name, x in net.state_dict().items())


def test_your_own_images(tmp_path, monkeypatch):
    """A folder of class folders, shapes of two kinds, is learned."""
    image = pytest.importorskip("PIL.Image")
    draw = pytest.importorskip("PIL.ImageDraw")
    monkeypatch.setattr("vbcaps.training.loop.load_dataset", load_dataset)
    generator = torch.Generator().manual_seed(0)
    for kind in ("disc", "square"):
        (tmp_path / "shapes" / kind).mkdir(parents=True)
        for k in range(40):
            picture = image.new("L", (24, 24))
            x, y = torch.randint(2, 8, (2,), generator=generator).tolist()
            shape = draw.Draw(picture)
            (shape.ellipse if kind == "disc" else shape.rectangle)((x, y, x + 12, y + 12), fill=200)
            picture.save(tmp_path / "shapes" / kind / f"{k}.png")
    recipe = tiny.recipe(data=str(tmp_path / "shapes"), epochs=15, arch=(8, 4, 4, 4), standardise="image")
    model = fit(recipe, tmp_path / "run", device="cpu")
    assert model.result.test.error <= 0.2
    assert model.classes == ("disc", "square")


def test_a_cpu_without_kernels_is_told_of(tmp_path, monkeypatch):
    monkeypatch.setattr("vbcaps.training.loop.why_no_library", lambda: "no compiler was found")
    notes = []
    fit(tiny.recipe(epochs=1, backend="auto"), tmp_path / "a", device="cpu", on_event=notes.append)
    assert [e.message for e in notes if e.kind == "note"] == [
        "there are no kernels for this CPU, so training takes some 20 times as long: no compiler was found"
    ]
    notes.clear()
    fit(tiny.recipe(epochs=1), tmp_path / "b", device="cpu", on_event=notes.append)  # the reference was asked for
    assert not [e for e in notes if e.kind == "note"]


@pytest.mark.parametrize(
    ("name", "message"),
    [("tpu", "device must be auto, cpu, cuda or cuda:NUMBER, got 'tpu'"), ("cuda:x", "device must be")]
    + ([("cuda", "finds no CUDA device")] if DEVICE == "cpu" else [("cuda:99", "there are")]),
)
def test_a_device_that_is_not_there(name, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        fit(tiny.recipe(), tmp_path, device=name)
    assert pick_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(("asked", "side"), [(None, 28), (24, 24)])
def test_images_are_resized_where_a_recipe_says_so(asked, side, monkeypatch):
    monkeypatch.setattr("vbcaps.training.loop.load_dataset", load_dataset)
    data = prepare(tiny.recipe(image_size=asked), None, torch.device("cpu"))
    for split in (data.train, data.test):
        assert split.images.shape[2:] == (side, side)


def test_a_crop_that_does_not_fit_is_found_before_training(tmp_path):
    with pytest.raises(ValueError, match="crop 60 is larger"):
        fit(tiny.recipe(crop=60), tmp_path / "run", device="cpu")
    assert not (tmp_path / "run").exists()


# --- numbers that are none -------------------------------------------------------------------------------------------


def test_a_layer_whose_output_is_not_finite_is_named_with_the_step(tmp_path, monkeypatch):
    """A layer that fails on one image: in training it is found where that image comes."""
    data, recipe = tiny.dataset(), tiny.recipe(standardise="none", pad=0, epochs=2)
    data.train.images[17] = 255
    monkeypatch.setattr("vbcaps.training.loop.load_dataset", lambda *_, **__: data)
    order, _ = epoch_plan(recipe.seed, 0, 48, 2)
    step = order.tolist().index(17) // 8
    forward = models.ConvStem.forward

    def fails(self, x):
        white = (x == 1).flatten(1).all(1)
        return torch.where(white[:, None, None, None], torch.inf, forward(self, x))

    monkeypatch.setattr(models.ConvStem, "forward", fails)
    with pytest.raises(NonFinite, match=rf"epoch 1, step {step + 1}: it first appeared in layer stem; try a lower lr"):
        fit(recipe, tmp_path, device="cpu")


def test_an_update_that_is_not_finite_names_the_weight(tmp_path, monkeypatch):
    step = Learner.work

    def blows_up(self):
        handle = self.net.conv_caps1.weight.register_hook(lambda grad: grad * (torch.inf if int(self.k) == 2 else 1))
        step(self)
        handle.remove()

    monkeypatch.setattr(Learner, "work", blows_up)
    with pytest.raises(NonFinite, match=r"epoch 1, step 4: conv_caps1.weight is not, since the last update"):
        fit(tiny.recipe(), tmp_path, device="cpu")


# --- what a run gives ---------------------------------------------------------------------------------------------


def test_interrupted_has_the_exit_status_of_its_signal(tmp_path):
    assert Interrupted(2, tmp_path).code == 130
    assert Interrupted(15, tmp_path).code == 143


def test_a_result_is_json(finished):
    text = json.dumps(finished[0].to_json())
    assert str(finished[0].folder.parent) not in text  # a folder that is moved stays true

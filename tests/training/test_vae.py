"""A Capsule-VAE in the training program: its loss and columns, resuming, its test, and its samples."""

import csv
import os
import signal
from dataclasses import replace

import pytest
import tiny
import torch

from vbcaps.losses import total_loss, vae_loss
from vbcaps.training.learner import Learner, epoch_plan
from vbcaps.training.loop import Event, Interrupted, evaluate, fit
from vbcaps.training.recipe import Recipe
from vbcaps.training.runfolder import COLUMNS, read_metrics, read_result
from vbcaps.vae import CapsVAE
from vbcaps.weights.model import load

OF_VAE = ("classification", "divergence", "reconstruction", "validation_reconstruction")


@pytest.fixture(autouse=True)
def tiny_data():
    with tiny.in_place_of_data():
        yield


def recipe_of(**fields):
    settings = dict(network="vae", standardise="none", sampling="posterior", decoder=8, eta=0.1, beta=0.5)
    return tiny.recipe(**settings | fields)


@pytest.mark.parametrize("sampling", ["shortcut", "posterior"])
def test_a_step_is_the_papers_loss_of_the_planned_samples(sampling):
    recipe, data = recipe_of(sampling=sampling, kl_warmup=2.0), tiny.dataset()
    learner = Learner(recipe, data.train, recipe.view().fit(data.train), 3)
    net = learner.net
    assert isinstance(net, CapsVAE)
    before = {name: x.clone() for name, x in net.state_dict().items()}
    learner.begin()
    learner()
    after = learner.totals()
    order, u = epoch_plan(recipe.seed, 0, 48, learner.view.draws + net.draws)
    net.load_state_dict(before)
    x = learner.view.train(data.train.images[order[:8]], u[:8, : learner.view.draws])
    y = data.train.labels[order[:8]]
    assert 0 <= float(x.min()) <= float(x.max()) <= 1
    out = net(x, y, u[:8, learner.view.draws :])
    of_vae = vae_loss(x, out, beta=0.5 / 12)  # the first of 12 steps in which beta rises
    classification = torch.nn.functional.cross_entropy(out.logits, y)
    assert after.loss == pytest.approx(total_loss(classification, of_vae, eta=0.1).item(), rel=1e-5)
    expected = (classification, of_vae.divergence, of_vae.reconstruction / 400)
    assert list(after.parts) == list(OF_VAE[:3])
    assert list(after.parts.values()) == pytest.approx([x.item() for x in expected], rel=1e-5)


def test_beta_rises_in_the_warm_up_and_then_stays():
    recipe = recipe_of(kl_warmup=2.0, epochs=4)
    weights = [recipe.divergence_weight(step, 5) for step in range(20)]
    assert weights == pytest.approx([0.05 * k for k in range(1, 11)] + [0.5] * 10)
    assert recipe_of().divergence_weight(0, 5) == 0.5
    assert recipe.with_epochs(8).kl_warmup == 4.0


def test_a_run_has_the_parts_of_the_loss_and_is_the_same_when_resumed(tmp_path):
    recipe = recipe_of(validation=0.25, epochs=3, test=True, ema=0.5)
    whole = fit(recipe, tmp_path / "whole", device="cpu")

    def interrupt(event: Event) -> None:
        if event.kind == "step" and (event.epoch, event.step) == (2, 2):
            os.kill(os.getpid(), signal.SIGTERM)

    torch.manual_seed(1)  # the samples are those of the plan, not of torch's random numbers
    with pytest.raises(Interrupted):
        fit(recipe, tmp_path / "part", device="cpu", on_event=interrupt)
    torch.manual_seed(2)
    fit(recipe, tmp_path / "part", device="cpu", resume=True)
    part, all_at_once = (tmp_path / name / "last.safetensors" for name in ("part", "whole"))
    assert part.read_bytes() == all_at_once.read_bytes()

    with open(tmp_path / "whole" / "metrics.csv", newline="") as file:
        assert next(csv.reader(file)) == [*COLUMNS, *OF_VAE]
    rows, again = (read_metrics(tmp_path / name) for name in ("whole", "part"))
    timeless = [{k: v for k, v in row.items() if k not in ("seconds", "images_per_second")} for row in rows]
    assert timeless == [{k: v for k, v in row.items() if k not in ("seconds", "images_per_second")} for row in again]
    for row in rows:
        total = row["classification"] + 0.1 * (0.5 * row["divergence"] + 400 * row["reconstruction"])
        assert row["loss"] == pytest.approx(total, rel=1e-4)
        assert 0 < row["validation_reconstruction"] < 1
    assert read_result(tmp_path / "whole")["test"]["reconstruction"] == whole.result.test.reconstruction
    assert whole.about["reconstruction"] == whole.result.test.reconstruction
    assert "squared error 0." in repr(whole)


def test_its_test_is_of_the_predicted_class_and_its_samples_are_of_the_training_codes(tmp_path):
    model = fit(recipe_of(epochs=4), tmp_path, device="cpu")
    data = tiny.dataset()
    found = evaluate(model, data.test)
    assert found == model.result.test
    x = model.view.test(data.test.images)
    error = (x - model.reconstruct(data.test.images)).square().mean().item()
    assert found.reconstruction == pytest.approx(error, rel=1e-5)
    again = load(tmp_path).net
    codes = []
    with torch.no_grad():
        for image, label in zip(data.train.images, data.train.labels, strict=True):
            codes.append(again(model.view.test(image[None]), label[None]).mean[0])
    means = torch.stack([torch.stack(codes)[data.train.labels == j].mean(0) for j in range(3)])
    torch.testing.assert_close(again.code_mean, means, rtol=1e-4, atol=1e-5)


def test_the_columns_of_other_networks_are_as_before(tmp_path):
    fit(tiny.recipe(epochs=1), tmp_path, device="cpu")
    assert (tmp_path / "metrics.csv").read_text().splitlines()[0] == ",".join(COLUMNS)
    assert read_result(tmp_path)["test"]["reconstruction"] is None


def test_weights_of_a_vae_begin_another_with_other_classes_and_channels(tmp_path):
    fit(recipe_of(epochs=1), tmp_path / "first", device="cpu")
    first = load(tmp_path / "first")
    for classes, channels in ((5, 1), (3, 3), (4, 2)):
        model = load(tmp_path / "first", num_classes=classes, in_channels=channels)
        assert model.reconstruct(torch.zeros(2, channels, 20, 20, dtype=torch.uint8)).shape == (2, channels, 20, 20)
        kept, fresh = "net.conv_caps1.weight", "decoder.deconv1.0.weight"
        assert torch.equal(model.net.state_dict()[kept], first.net.state_dict()[kept])
        same = classes == 3 and torch.equal(model.net.state_dict()[fresh], first.net.state_dict()[fresh])
        assert same == (classes == 3)
    again = fit(recipe_of(epochs=1), tmp_path / "second", device="cpu", weights=tmp_path / "first")
    assert again.about["began_with"]["weights"].endswith("last.safetensors")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(network="vae", standardise="none", routing="em"), "routing must be 'vb', got 'em'"),
        (dict(network="vae"), "network='vae' decodes images of 0 to 1: standardise must be 'none', got 'image'"),
        (dict(network="vae", standardise="none", mixup=0.2), "mixup must be 0, got 0.2"),
        (
            dict(network="vae", standardise="none", precision="full", sampling="posterior"),
            "precision must be 'gamma' or 'wishart', got 'full'",
        ),
        (dict(network="vae", standardise="none", kl_warmup=400.0), "kl_warmup must be at most epochs=350, got 400"),
        (dict(eta=0.5), "eta belongs to network='vae', got eta=0.5 with network='caps'"),
        (dict(network="cnn", loss_on="logits", decoder=8), "decoder belongs to network='vae', got decoder=8"),
        (dict(network="vae", standardise="none", decoder=2), "decoder must lie from 4 to 4096, got 2"),
        (dict(network="vae", standardise="none", sampling="gibbs"), "sampling must be one of .*, got 'gibbs'"),
    ],
)
def test_an_impossible_vae_names_the_field(fields, message):
    with pytest.raises(ValueError, match=message):
        Recipe(**fields)


def test_fields_of_a_vae_change_no_other_recipe():
    recipe = Recipe()
    new = ("eta", "beta", "kl_warmup", "sampling", "decoder")
    earlier = {field: value for field, value in recipe.to_json().items() if field not in new}
    assert Recipe.from_json(earlier) == recipe
    assert (Recipe.eta, Recipe.beta, Recipe.kl_warmup, Recipe.sampling) == (1e-3, 1.0, 0.0, "shortcut")  # the paper's
    assert replace(recipe, network="vae", standardise="none").net(1, 3).sampling == "shortcut"

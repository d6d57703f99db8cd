"""Trained capsules for other classes and channels: what is copied, what is fresh, what does not fit; fine-tuning."""

import os
import signal
from dataclasses import replace

import pytest
import tiny
import torch

import vbcaps
from vbcaps.data import Dataset, Split
from vbcaps.training.files import RunError, read_json
from vbcaps.training.loop import Event, Interrupted, fit, fit_seeds
from vbcaps.training.recipe import Recipe
from vbcaps.weights.transfer import CLASS_LAYERS, fine_tuning


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """The folder of a run that has learned bars at three heights."""
    folder = tmp_path_factory.mktemp("source") / "bars"
    with tiny.in_place_of_data():
        model = fit(tiny.recipe(epochs=12, arch=(8, 4, 4, 4), lr=0.03), folder, device="cpu")
    assert model.result.test.error <= 0.1
    return folder


def shifted(*_: object, **__: object) -> Dataset:
    """The same bars two pixels lower and darker, in another order, named otherwise."""
    made = tiny.dataset()
    train, test = (Split(s.images.roll(2, 2) // 2, (s.labels + 1) % 3) for s in (made.train, made.test))
    return Dataset("shifted", train, test, ("low", "high", "mid"), "made up")


@pytest.fixture
def shifted_data(monkeypatch):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr("vbcaps.training.loop.load_dataset", shifted)
    yield
    torch.set_num_threads(threads)


# --- load ------------------------------------------------------------------------------------------------------------


def test_the_capsules_are_the_trained_ones_and_the_class_layer_is_fresh(source):
    old, new = vbcaps.load(source), vbcaps.load(source, num_classes=5)
    assert new.classes == ("0", "1", "2", "3", "4")
    assert new(torch.zeros(2, 1, 20, 20)).logits.shape == (2, 5)
    assert not new.training
    same = [k for k, x in new.net.state_dict().items() if torch.equal(x, old.net.state_dict().get(k, torch.zeros(0)))]
    counters = [k for k in new.net.state_dict() if k.endswith("num_batches_tracked")]
    assert all(new.net.state_dict()[k] == 0 for k in counters)  # the first new batch replaces the statistics
    trained = [k for k in old.net.state_dict() if not k.startswith(CLASS_LAYERS) and k not in counters]
    assert set(trained) <= set(same)
    assert "class_caps.weight" not in same
    assert new.net.class_caps.scale.item() == 1 != old.net.class_caps.scale.item()
    assert new.about == dict(began_with=dict(weights=str(source)))
    assert "begun with" in str(new)


def test_classes_that_stay_keep_their_layer(source):
    old = vbcaps.load(source)
    for options in (dict(num_classes=3), dict(classes=list(tiny.CLASSES))):
        same = vbcaps.load(source, **options)
        assert same.classes == tiny.CLASSES
        assert all(torch.equal(x, old.state_dict()[name]) for name, x in same.state_dict().items())
    other = vbcaps.load(source, classes=["cat", "dog", "cow"])
    assert other.classes == ("cat", "dog", "cow")
    assert not torch.equal(other.net.class_caps.weight, old.net.class_caps.weight)


@pytest.mark.parametrize("stem", ["conv", "residual"])
def test_other_channels_give_the_response_to_equal_ones(stem, tmp_path):
    recipe = tiny.recipe(stem=stem)
    view = replace(recipe.view(), mean=(0.2, 0.3, 0.7), std=(0.1, 0.2, 0.3))
    net = recipe.net(3, 3)
    net(torch.randn(8, 3, 20, 20))
    path = vbcaps.Model(net, recipe, tiny.CLASSES, view).save(tmp_path / "three")
    one = torch.randn(4, 1, 20, 20)
    old = vbcaps.load(path)
    for channels in (1, 2, 5):
        new = vbcaps.load(path, in_channels=channels)
        assert new.net.in_channels == channels
        assert new.classes == tiny.CLASSES
        torch.testing.assert_close(
            new(one.expand(-1, channels, -1, -1)).logits, old(one.expand(-1, 3, -1, -1)).logits, rtol=1e-3, atol=1e-4
        )
        assert new.view.mean == pytest.approx((0.4,) * channels)
        assert new.predict(torch.rand(5, channels, 30, 40)).shape == (5, 3)
    both = vbcaps.load(path, num_classes=2, in_channels=1)
    assert both(one).logits.shape == (4, 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(num_classes=1), "num_classes must be a whole number of at least 2, got 1"),
        (dict(num_classes=2.5), "num_classes must be a whole number"),
        (dict(num_classes=2, classes=["a", "b", "c"]), "classes has 3 names, but num_classes is 2"),
        (dict(classes=["a"]), "at least two different names"),
        (dict(classes=["a", "a"]), "at least two different names"),
        (dict(classes="ab"), "classes must be a list of names"),
        (dict(in_channels=0), "in_channels must be a whole number"),
    ],
)
def test_numbers_of_classes_and_channels_that_there_cannot_be(source, options, message):
    with pytest.raises(ValueError, match=message):
        vbcaps.load(source, **options)


# --- fine-tuning -----------------------------------------------------------------------------------------------------


def test_a_shifted_problem_is_learned_faster_from_trained_weights(source, shifted_data, tmp_path):
    """In 12 steps, over three seeds: a single one is chance in part."""
    recipe = tiny.recipe(epochs=2, arch=(8, 4, 4, 4), lr=0.003)
    errors = {"scratch": 0.0, "tuned": 0.0}
    for seed in range(3):
        for name, weights in (("scratch", None), ("tuned", source)):
            model = fit(replace(recipe, seed=seed), tmp_path / name / str(seed), device="cpu", weights=weights)
            assert model.classes == ("low", "high", "mid")
            errors[name] += model.result.test.error
            assert ("began_with" in model.about) == (name == "tuned")
    assert errors["tuned"] < 0.5 * errors["scratch"]


def test_a_fine_tuning_says_what_it_began_with(source, shifted_data, tmp_path):
    tuned = fit(tiny.recipe(epochs=1, arch=(8, 4, 4, 4)), tmp_path / "tuned", device="cpu", weights=source)
    about = read_json(tmp_path / "tuned" / "environment.json")["began_with"]
    assert about["weights"] == str(source / "last.safetensors")
    assert tuned.about["began_with"] == about


def test_the_same_weights_by_path_by_model_and_the_class_layer_of_the_same_classes(source, shifted_data, tmp_path):
    recipe = tiny.recipe(epochs=1, arch=(8, 4, 4, 4))
    models = [
        fit(recipe, tmp_path / str(k), device="cpu", weights=weights)
        for k, weights in enumerate((source, source / "last.safetensors", vbcaps.load(source)))
    ]
    for model in models[1:]:
        assert model.about == models[0].about
        assert all(torch.equal(x, models[0].state_dict()[name]) for name, x in model.state_dict().items())
    with tiny.in_place_of_data():
        again = fit(tiny.recipe(epochs=1, arch=(8, 4, 4, 4), lr=1e-9), tmp_path / "same", device="cpu", weights=source)
    old = vbcaps.load(source)
    assert again.result.test.error <= 0.1
    torch.testing.assert_close(again.net.class_caps.weight, old.net.class_caps.weight, rtol=1e-4, atol=1e-6)


def test_channels_of_the_data_may_differ(source, monkeypatch, tmp_path):
    made = shifted()
    train, test = (split._replace(images=split.images.repeat(1, 3, 1, 1)) for split in (made.train, made.test))
    colour = replace(made, train=train, test=test)
    monkeypatch.setattr("vbcaps.training.loop.load_dataset", lambda *_, **__: colour)
    model = fit(tiny.recipe(epochs=1, arch=(8, 4, 4, 4)), tmp_path, device="cpu", weights=source)
    assert model.net.in_channels == 3


def test_a_fine_tuning_that_is_interrupted_goes_on_with_the_same_bits_without_its_source(
    source, shifted_data, tmp_path
):
    recipe = tiny.recipe(epochs=3, arch=(8, 4, 4, 4), ema=0.9)
    moved = tmp_path / "source.safetensors"
    moved.write_bytes((source / "last.safetensors").read_bytes())
    whole = fit(recipe, tmp_path / "whole", device="cpu", weights=moved)

    def interrupt(event: Event) -> None:
        if event.kind == "step" and (event.epoch, event.step) == (2, 3):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Interrupted):
        fit(recipe, tmp_path / "part", device="cpu", weights=moved, on_event=interrupt)
    moved.unlink()
    fit(recipe, tmp_path / "part", device="cpu", resume=True)
    part, all_at_once = (tmp_path / name / "last.safetensors" for name in ("part", "whole"))
    assert part.read_bytes() == all_at_once.read_bytes()
    assert whole.about["began_with"] == read_json(tmp_path / "part" / "environment.json")["began_with"]
    assert vbcaps.load(tmp_path / "part").about["began_with"]["weights"] == str(moved)


def test_a_run_without_a_state_is_not_begun_again_with_random_weights(source, shifted_data, tmp_path):
    recipe = tiny.recipe(epochs=1, arch=(8, 4, 4, 4))
    whole = fit(recipe, tmp_path / "run", device="cpu", weights=source)
    for path in (tmp_path / "run").iterdir():
        if path.name not in ("environment.json", "recipe.json"):  # as if it had been killed in its first second
            path.unlink()
    with pytest.raises(RunError, match=r"was to begin with the weights .*last.safetensors and has no state yet"):
        fit(recipe, tmp_path / "run", device="cpu", resume=True)
    again = fit(recipe, tmp_path / "run", device="cpu", resume=True, weights=source)
    assert all(torch.equal(x, whole.state_dict()[name]) for name, x in again.state_dict().items())


def test_several_seeds_begin_with_the_same_capsules(source, shifted_data, tmp_path):
    recipe = tiny.recipe(epochs=1, arch=(8, 4, 4, 4), lr=1e-9)
    models = fit_seeds(recipe, tmp_path, 2, device="cpu", weights=source)
    weights = [model.net.conv_caps1.weight for model in models]
    torch.testing.assert_close(weights[0], weights[1], rtol=1e-4, atol=1e-6)
    assert not torch.allclose(models[0].net.class_caps.weight, models[1].net.class_caps.weight, atol=1e-3)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(arch=(8, 4, 4, 6)), r"another network \(arch is \(8, 4, 4, 4\), the recipe's \(8, 4, 4, 6\)\)"),
        (dict(routing="em"), "routing is 'vb', the recipe's 'em'"),
        (dict(stem="residual", norm_pose=False), "stem is 'conv', the recipe's 'residual'; norm_pose is True"),
    ],
)
def test_another_network_is_named_before_anything_is_written(source, shifted_data, tmp_path, fields, message):
    with pytest.raises(RunError, match=message):
        fit(tiny.recipe(**dict(arch=(8, 4, 4, 4)) | fields), tmp_path / "run", device="cpu", weights=source)
    assert not (tmp_path / "run").exists()
    with pytest.raises(RunError, match=r"no weights called 'fashoin' .* did you mean 'fashion'"):
        fit(tiny.recipe(), tmp_path / "run", device="cpu", weights="fashoin")


def test_a_loss_on_activations_has_no_scale_to_copy(source, shifted_data, tmp_path):
    recipe = tiny.recipe(epochs=1, arch=(8, 4, 4, 4), loss_on="activations")
    assert fit(recipe, tmp_path / "a", device="cpu", weights=source).net.class_caps.scale is None
    with tiny.in_place_of_data():
        assert fit(recipe, tmp_path / "b", device="cpu", weights=source).net.class_caps.scale is None


SIDES = dict(
    affnist=28, cifar10=32, fashion=28, smallnorb=36, svhn=32, vae=28, vae_smallnorb=32
)  # of the images they were trained on


def test_the_recipe_of_fine_tuning_has_the_network_and_the_input_of_the_weights():
    for name in vbcaps.list_models():
        source = vbcaps.load(name).recipe
        recipe = fine_tuning(source, data="photos", epochs=7)
        assert (recipe.data, recipe.epochs, recipe.batch, recipe.optimiser) == ("photos", 7, 32, "adamw")
        for field in ("arch", "stem", "routing", "activation", "crop", "pad", "standardise", "fill", "loss_on"):
            assert getattr(recipe, field) == getattr(source, field), (name, field)
        assert recipe.image_size == SIDES[name if name in SIDES else name.partition("_")[0]]
        assert not any([recipe.flip, recipe.cutout, recipe.mixup, recipe.validation])
        assert Recipe.from_json(recipe.to_json()) == recipe
    assert fine_tuning(vbcaps.load("affnist").recipe).dataset == "affnist"

"""Recipes: the paper's settings, and what an impossible one says."""

import dataclasses
import json
import math
import re
from dataclasses import fields, replace

import pytest

from vbcaps import kernels, layers, models, prior
from vbcaps.cli.flags import changed
from vbcaps.data import FACTS, augment, catalogue, splits
from vbcaps.removed import REMOVED
from vbcaps.routing import ROUTINGS, EMRouting, vb
from vbcaps.training.recipe import CHOICES, RANGES, Recipe, field_types
from vbcaps.training.recipes import EXPERIMENTS, RECIPES, TUNED, experiment_of, fast, parameters, parent, recipe, task


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_survives_json_and_knows_its_name(name):
    r = recipe(name)
    assert r.name == name
    assert Recipe.from_json(json.loads(json.dumps(r.to_json()))) == r


def test_every_field_has_a_type_a_default_and_a_meaning():
    for field in fields(Recipe):
        assert field.metadata["help"], field.name
        assert field.default is not ..., field.name
    assert set(CHOICES) | set(RANGES) <= set(field_types())


def test_the_choices_are_those_of_the_modules_that_know_them():
    theirs = dict(
        stem=models.STEMS, routing=tuple(ROUTINGS), activation=vb.ACTIVATIONS, through=vb.THROUGH,
        precision=prior.PRECISIONS, learn=prior.NAMES, init=layers.INITS, backend=kernels.BACKENDS,
        standardise=augment.STANDARDISE, fill=augment.FILL, resample=augment.RESAMPLE,
        viewpoint=tuple(sorted(splits.FAMILIAR_VIEWS)), hold_out=splits.HELD, dataset=("sample", *catalogue.LOADERS),
    )  # fmt: skip
    assert {field: CHOICES[field] for field in theirs} == theirs
    assert RANGES["crop"] == (models.IMAGE_SIZES[0], models.IMAGE_SIZES[-1])


def test_another_routing_or_network_leaves_the_fields_behind_that_are_not_for_it():
    em, cnn = changed("smallnorb_fast", dict(routing="em")), changed("affnist_fast", dict(network="cnn"))
    assert recipe("smallnorb_fast", routing="em") == em
    assert replace(em, name="smallnorb_em_fast") == recipe("smallnorb_em_fast")
    assert replace(cnn, name="affnist_cnn_fast", arch=(64, 64, 72, 72)) == recipe("affnist_cnn_fast")
    kept = changed("smallnorb_fast", dict(routing="vb", activation="released"))
    assert kept == replace(recipe("smallnorb_fast"), activation="released")
    assert changed("default", dict(network="cnn")).loss_on == "logits"


@pytest.mark.parametrize("name", RECIPES)
def test_a_network_learns_as_many_numbers_as_is_said(name):
    facts = FACTS[recipe(name).dataset]
    assert parameters(name) == sum(p.numel() for p in recipe(name).net(facts.channels, facts.classes).parameters())


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_docstring_holds_the_papers_number(name):
    paper, doc = EXPERIMENTS[name].paper, RECIPES[name].__doc__
    assert ("not in the paper" in doc or name in ("default", "affnist_matched_cnn")) == (paper is None)
    assert paper is None or f"{paper.replace('±', '+-')}%" in doc


@pytest.mark.parametrize("name", [name for name, one in EXPERIMENTS.items() if one.familiar])
def test_a_recipe_stops_at_the_papers_error_on_familiar_views(name):
    familiar = EXPERIMENTS[name].familiar
    assert f"{familiar}%" in RECIPES[name].__doc__
    assert 100 * recipe(name).match in (0, pytest.approx(float(familiar)))


def test_every_experiment_has_a_row_of_its_own():
    labels = [one.label for one in EXPERIMENTS.values()]
    assert len(labels) == len(set(labels))
    assert [name for name in RECIPES if parent(name) == name] == list(EXPERIMENTS)
    assert {parent(name) for name in RECIPES} == set(EXPERIMENTS)
    assert sum(one.front for one in EXPERIMENTS.values()) <= 8


def test_each_best_network_of_table_1_has_its_twins_of_other_routings():
    for name in ("smallnorb", "fashion", "svhn", "cifar10"):
        for routing in ("em", "dynamic"):
            assert recipe(f"{name}_{routing}") == replace(recipe(name), name=f"{name}_{routing}", routing=routing)


@pytest.mark.parametrize("name", ["affnist", "affnist_matched"])
def test_the_cnn_is_as_large_as_the_capsules_beside_it_and_trained_alike(name):
    assert parameters(f"{name}_cnn") == pytest.approx(parameters(name), rel=0.05)
    caps, cnn = recipe(name), recipe(f"{name}_cnn")
    assert differing(caps, cnn) == {"name", "network", "arch", "loss_on"}
    caps, cnn = recipe(f"{name}_fast"), recipe(f"{name}_cnn_fast")
    assert differing(caps, cnn) == {"name", "network", "arch", "activation", "gain"}  # the last two are capsules' alone


def differing(one, other):
    return {field.name for field in fields(Recipe) if getattr(one, field.name) != getattr(other, field.name)}


def test_a_fast_twin_is_measured_against_its_parent():
    assert experiment_of("smallnorb_fast") is experiment_of("smallnorb") is EXPERIMENTS["smallnorb"]
    assert fast(lambda: replace(recipe("affnist"), dataset="sample")).epochs == 20  # a tenth
    assert recipe("smallnorb_fast").epochs == 100  # as it was tuned


@pytest.mark.parametrize("name", ["smallnorb", "fashion", "svhn", "cifar10", "mnist"])
def test_the_laptop_twins_of_a_dataset_differ_in_their_network_alone(name):
    caps = recipe(f"{name}_laptop")
    for routing in ("em", "dynamic"):
        twin = recipe(f"{name}_{routing}_laptop")
        assert twin == replace(caps, name=twin.name, routing=routing, lr=twin.lr)  # the rate was chosen for each
    cnn = recipe(f"{name}_cnn_laptop")
    assert differing(caps, cnn) <= {"name", "network", "arch", "iters", "lr"}  # iters is the capsules' alone
    assert parameters(cnn.name) == pytest.approx(parameters(caps.name), rel=0.05)
    assert (caps.validation, caps.test) == (0.1, True)
    assert experiment_of(caps.name) is EXPERIMENTS[name]


def test_a_view_has_every_field_that_it_shares_with_the_recipe():
    other = dict(
        crop=40, pad=3, standardise="none", flip=True, place=True, brightness=0.1, contrast=0.2, rotate=3.0, zoom=0.4,
        stretch=0.5, resample="bicubic", cutout=7, fill="edge",
    )  # fmt: skip
    names = [{field.name for field in fields(one)} for one in (augment.View, Recipe)]
    assert set(other) == names[0] & names[1]
    needed = dict(resample=dict(rotate=5.0))
    for field, value in other.items():
        r = Recipe(**{field: value}, **needed.get(field, {}))
        assert getattr(r.view(), field) == value != getattr(Recipe, field)


@pytest.mark.parametrize("key", TUNED)
def test_what_is_tuned_reaches_the_fast_twins_of_its_dataset_and_routing(key):
    of, _, routing = key.partition(" ")
    twins = [recipe(name) for name in RECIPES if name.endswith("_fast") and task(recipe(name)) == of]
    twins = [twin for twin in twins if twin.routing == (routing or "vb") and twin.network == "caps"]
    if f"{key}_fast" in RECIPES:
        twins.append(recipe(f"{key}_fast"))
    assert twins
    for twin in twins:
        its_own = TUNED.get(twin.name.removesuffix("_fast"), {})
        expected = {field: its_own.get(field, value) for field, value in TUNED[key].items()}
        assert {field: getattr(twin, field) for field in TUNED[key]} == expected


# the bold cells of Table 1
BEST = {recipe(name).dataset: name for name, one in EXPERIMENTS.items() if one.paper and "±" in one.paper}


@pytest.mark.parametrize(
    "name",
    [one for one in EXPERIMENTS if task(recipe(one)) in BEST and one not in TUNED and f"{one}_fast" in RECIPES],
)
def test_fast_twins_of_a_dataset_differ_as_their_parents_do(name):
    """Routings are compared in the same network, on the same data, for as long; how they learn is each one's own."""
    best = BEST[recipe(name).dataset]
    ours, theirs = (
        {field: getattr(recipe(of), field) != getattr(recipe(to), field) for field in recipe(of).to_json()}
        for of, to in ((name, best), (f"{name}_fast", f"{best}_fast"))
    )
    changed = {field for field in ours if ours[field] != theirs[field]}
    allowed = {"activation", "optimiser", "lr", "weight_decay", "gain"}  # the first is VB's
    assert changed <= allowed | ({"arch", "loss_on"} if name.endswith("_cnn") else set())


@pytest.mark.parametrize(
    ("name", "channels", "classes"),
    [("smallnorb", 2, 5), ("smallnorb_small", 2, 5), ("smallnorb_large", 2, 5)]
    + [(f"{data}{size}", 3, 10) for data in ("svhn", "cifar10") for size in ("", "_small", "_medium")],
)
def test_the_networks_have_as_many_parameters_as_the_paper_says(name, channels, classes):
    (thousands,) = re.findall(r"(\d+)K", RECIPES[name].__doc__)
    count = sum(p.numel() for p in recipe(name).net(channels, classes).parameters())
    assert count / 1000 == pytest.approx(int(thousands), abs=1.5)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("smallnorb", dict(optimiser="adam", lr=3e-3, epochs=350, batch=32, iters=3, schedule="exponential", crop=32)),
        ("fashion", dict(optimiser="sgd", lr=0.1, epochs=200, weight_decay=1e-6, milestones=(80, 120, 160), pad=4)),
        ("svhn", dict(optimiser="sgd", lr=0.1, epochs=350, milestones=(150, 250, 300), arch=(64, 16, 32, 32))),
        ("cifar10", dict(flip=True, pad=4, arch=(64, 16, 32, 32), epochs=350)),
        ("smallnorb_em", dict(routing="em", arch=(64, 16, 16, 16))),
        ("affnist", dict(place=True, crop=40, arch=(64, 16, 16, 16))),
    ],
)
def test_the_papers_settings(name, settings):
    r = recipe(name)
    assert {field: getattr(r, field) for field in settings} == settings


def test_the_default_recipe_can_be_tried_for_one_epoch_and_gives_probabilities():
    r = replace(recipe("default"), epochs=1)
    assert 0 < r.warmup < 1
    assert r.net(1, 10).class_caps.scale is not None
    assert (r.validation, r.test) == (0.05, True)  # the held-out share fits a temperature


def test_the_learning_rate_of_each_schedule():
    r = recipe("fashion")
    at_epoch = [r.learning_rate(10 * epoch, 10) for epoch in (0, 79, 80, 119, 120, 160, 199)]
    assert at_epoch == pytest.approx([0.1, 0.1, 0.01, 0.01, 1e-3, 1e-4, 1e-4])

    r = replace(recipe("smallnorb"), epochs=10, final=0.01)
    assert r.learning_rate(0, 7) == r.lr
    assert r.learning_rate(35, 7) == pytest.approx(0.1 * r.lr)  # half way in the logarithm
    assert r.learning_rate(70, 7) == pytest.approx(0.01 * r.lr)

    r = replace(r, schedule="cosine", warmup=2.0)
    assert r.learning_rate(0, 7) == pytest.approx(r.lr / 14)
    assert r.learning_rate(13, 7) == pytest.approx(r.lr)
    assert r.learning_rate(14 + 28, 7) == pytest.approx(r.lr * 0.505)
    assert r.learning_rate(70, 7) == pytest.approx(0.01 * r.lr)

    r = replace(r, schedule="onecycle")
    assert r.learning_rate(14 + 28, 7) == pytest.approx(r.lr * 0.505)
    rates = [r.learning_rate(t, 7) for t in range(70)]
    assert rates == sorted(rates[:14]) + sorted(rates[14:], reverse=True)
    assert replace(r, schedule="constant", warmup=0.0).learning_rate(50, 7) == r.lr


def test_gain_reaches_the_network():
    assert replace(recipe("default"), gain=0.5).net(1, 10).class_caps.gain == 0.5


def test_what_a_recipe_says_of_em_reaches_every_layer():
    net = replace(recipe("smallnorb_em"), temperature=0.5, min_var=0.25, arch=(4, 2, 2, 2)).net(2, 5)
    layers = [layer.routing for layer in net.modules() if hasattr(layer, "routing")]
    assert [(layer.temperature, layer.min_var) for layer in layers] == [(0.5, 0.25)] * 3
    assert (Recipe.min_var, Recipe.temperature) == (EMRouting(5).min_var, EMRouting(5).temperature)


def test_an_average_of_weights_forgets_how_they_began():
    r = replace(recipe("smallnorb"), ema=0.999)
    shares = [r.average_share(t) for t in range(20_000)]
    assert shares[0] == pytest.approx(0.9)
    assert shares[-1] == pytest.approx(0.001)
    left = math.prod(1 - share for share in shares[:250])
    assert left < 1e-9 < 0.999**250


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(routing="wb"), "routing must be one of .*'vb'"),
        (dict(schedule="cosin"), "did you mean 'cosine'"),
        (dict(learn=("alpha",)), "learn must be one of .* did you mean 'alpha0'"),
        (dict(batch="32"), "batch must be a whole number, got '32'"),
        (dict(batch=True), "batch must be a whole number, got True"),
        (dict(batch=0), "batch must lie from 1"),
        (dict(lr=float("nan")), "lr must be a number"),
        (dict(lr=0.0), "lr must be above 0"),
        (dict(flip=1), "flip must be True or False"),
        (dict(arch=[64, 8, 8, 8]), "arch must be a tuple"),
        (dict(arch=(64, 8, 8)), "arch must be four"),
        (dict(arch=(64, 8, 8.0, 8)), "arch must be a whole number"),
        (dict(crop=16), "crop must lie from 20 to 256"),
        (dict(nu0=-1.0), "nu0 must be positive"),
        (dict(kappa0=0.0), "kappa0 must be positive"),
        (dict(precision="full", nu0=15.0), "nu0 must be"),
        (dict(place=True, pad=4), "pad must be 0"),
        (dict(fill="mean", standardise="crop"), 'fill="mean" cannot be had'),
        (dict(routing="em", alpha0=2.0), "alpha0 belongs to routing='vb'"),
        (dict(min_var=0.2), "min_var belongs to routing='em', got min_var=0.2 with routing='vb'"),
        (dict(temperature=0.1, routing="dynamic"), "temperature belongs to routing='em'"),
        (dict(temperature=0.0, routing="em"), "temperature must lie from 1e-06"),
        (dict(min_var=0.2, network="cnn", loss_on="logits"), "min_var belongs to network='caps'"),
        (
            dict(routing="dynamic", network="cnn", loss_on="logits"),
            "routing belongs to network='caps', got routing='dyn",
        ),
        (dict(iters=2, network="cnn", loss_on="logits"), "iters belongs to network='caps', got iters=2"),
        (dict(alpha0=2.0, network="cnn", loss_on="logits"), "alpha0 belongs to network='caps'"),
        (dict(backend="reference", network="cnn", loss_on="logits"), "backend belongs to network='caps'"),
        (dict(network="cnn"), "network='cnn' has only logits: loss_on must be 'logits', got 'activations'"),
        (dict(network="cnm"), "network must be one of .*did you mean 'cnn'"),
        (dict(loss="spread", loss_on="logits"), "loss='spread' needs loss_on='activations'"),
        (dict(schedule="steps"), "needs milestones"),
        (dict(schedule="steps", milestones=(5, 3)), "milestones must be rising"),
        (dict(epochs=3, warmup=3.0), "warmup must be shorter than epochs=3"),
        (dict(dataset="mnist", viewpoint="azimuth"), "viewpoint needs dataset='smallnorb', got 'mnist'"),
        (dict(cutout=33), "cutout must not be larger than crop=32, got 33"),
        (dict(dataset="mnist", hold_out="objects"), "hold_out='objects' needs dataset='smallnorb', got 'mnist'"),
        (dict(match=0.1), "match needs an error on familiar views"),
        (dict(viewpoint="azimuth", match=0.1, validation=0.2), "validation must be 0, got 0.2"),
        (dict(dataset="affnist", image_size=36), "images of two sizes, which cannot be resized: got image_size=36"),
        (dict(loss="spread", mixup=0.1), "mixup belongs to loss='nll'"),
        (dict(resample="bicubic"), "resample='bicubic' needs rotate, zoom or stretch above 0"),
        (dict(mixup=0.6), "mixup must lie from 0 to 0.5, got 0.6"),
        (dict(validation=1.0), "validation must lie from 0 to 0.9"),
    ],
)
def test_an_impossible_recipe_names_the_field(fields, message):
    with pytest.raises(ValueError, match=message):
        Recipe(**fields)


def test_unknown_names_give_the_nearest():
    with pytest.raises(ValueError, match="no field 'rooting'; did you mean 'routing'"):
        Recipe.from_json({"rooting": "vb"})
    with pytest.raises(ValueError, match="no recipe 'smalnorb'; did you mean 'smallnorb'"):
        recipe("smalnorb")


def test_a_recipe_of_an_earlier_version_is_read_where_its_removed_fields_are_off():
    """As recorded runs and the weights in the package have them."""
    now = recipe("smallnorb_fast")
    off = {field: value for field, (value, _) in REMOVED.items()}
    assert set(off) == {"sharpness", "cutouts", "paste", "smoothing"}
    assert Recipe.from_json(now.to_json() | off) == now
    view = dataclasses.asdict(now.view())
    assert (
        augment.View.from_json(view | {field: off[field] for field in ("sharpness", "cutouts", "paste")}) == now.view()
    )
    for field, value in dict(sharpness=1.0, cutouts=3, paste=True, smoothing=0.1).items():
        with pytest.raises(
            ValueError, match=rf"{field}={value!r} was removed in vbcaps 0.2.0: .*only {field}={off[field]!r}"
        ):
            Recipe.from_json(now.to_json() | {field: value})
        with pytest.raises(ValueError, match=f"{field}={value!r} was removed"):
            augment.View.from_json(view | {field: value})


def test_no_field_is_both_there_and_removed():
    assert not set(REMOVED) & {field.name for one in (Recipe, augment.View) for field in fields(one)}


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("epochs", [1, 12, 1000])
def test_another_number_of_epochs_stretches_the_schedule(name, epochs):
    """Every recipe can be trained for any number of epochs, and the learning rate then falls at the same shares."""
    old = recipe(name)
    new = old.with_epochs(epochs)
    assert new.epochs == epochs
    assert new.warmup / new.epochs == pytest.approx(old.warmup / old.epochs)
    assert (
        all(
            abs(m / epochs - n / old.epochs) <= 0.5 / epochs
            for m, n in zip(new.milestones, old.milestones, strict=False)
        )
        or epochs == 1
    )
    assert differing(old, new) <= {"epochs", "warmup", "milestones"}


def test_what_is_given_beside_epochs_stays():
    old = recipe("fashion_fast")
    assert old.with_fields(epochs=12) == replace(old, epochs=12, warmup=1.2)
    assert old.with_fields(epochs=12, warmup=3.0).warmup == 3.0
    assert recipe("fashion").with_fields(epochs=20).milestones == (8, 12, 16)
    assert recipe("fashion").with_fields(epochs=20, milestones=(2,)).milestones == (2,)
    assert old.with_fields(lr=0.5) == replace(old, lr=0.5)
    assert old.with_epochs(68).warmup == 6.8
    for epochs, message in ((0, "epochs must lie from 1"), ("12", "epochs must be a whole number, got '12'")):
        with pytest.raises(ValueError, match=message):
            old.with_epochs(epochs)

"""The settings of a sweep: how they are written, checked and turned into recipes and commands."""

import math
import re

import pytest
import tiny

from vbcaps.sweeps.plan import Plan, make_plan
from vbcaps.sweeps.space import Axis, changed, check_space, flags_of, grid_of, read_fields, size_of
from vbcaps.training.recipe import Recipe
from vbcaps.training.recipes import recipe as named_recipe
from vbcaps.training.words import value_of, words_of


def test_fields_that_vary_and_fields_that_are_fixed():
    fixed, axes = read_fields(
        [
            "lr=log:1e-4,1e-2",
            "contrast=uniform:0,0.5,3",
            "filters=int:16,64,16",
            "routing=choice:vb,em",
            "epochs=5",
            "weight-decay=choice:0,1e-4",
        ]
    )
    assert fixed == {"epochs": "5"}
    assert [str(axis) for axis in axes] == [
        "log:0.0001,0.01", "uniform:0,0.5,3", "int:16,64,16", "choice:vb,em", "choice:0,1e-4"
    ]  # fmt: skip
    assert axes[4].field == "weight_decay"
    assert axes[1].grid() == [0, 0.25, 0.5]
    assert axes[2].grid() == [16, 32, 48, 64]
    assert axes[0].grid() == pytest.approx([1e-4, 10**-3.5, 1e-3, 10**-2.5, 1e-2], rel=1e-5)
    assert axes[0].grid()[0] == 1e-4
    assert axes[0].grid()[-1] == 1e-2
    assert size_of(axes, grid=True) == 5 * 3 * 4 * 2 * 2
    assert size_of(axes, grid=False) == math.inf
    (arch,) = read_fields(["arch=choice:4,2,2,2;8,2,2,2"])[1]
    assert arch.words == ("4,2,2,2", "8,2,2,2")
    assert str(arch) == "choice:4,2,2,2;8,2,2,2"
    assert read_fields(["data=C:/photos", "iters=int:1,2"])[0] == {"data": "C:/photos"}


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        (["lrr=log:1,2"], "a recipe has no field 'lrr'; did you mean 'lr'?"),
        (["filter=int:1,2"], "did you mean 'filters'?"),
        (["lr=lgo:1e-4,1e-2"], "lr: the kind must be one of ('log', 'uniform', 'int', 'choice'), got 'lgo'; did you"),
        (["lr"], "field must be NAME=KIND:VALUES or NAME=VALUE, such as lr=log:1e-4,1e-2, got 'lr'"),
        (["epochs=5"], "a sweep needs a field that varies"),
        (["lr=log:1e-4,1e-2", "lr=0.1"], "field 'lr' is given twice"),
        (["arch=choice:4,2,2,2;8,2,2,2", "filters=8"], "filters is a number of arch"),
        (["lr=log:0,1"], "lr=log needs 0 < LOW < HIGH, got '0,1'"),
        (["lr=log:0.1"], "lr=log needs LOW,HIGH or LOW,HIGH,POINTS, got '0.1'"),
        (["lr=log:1e-4,1e-2,1"], "lr=log: the third number must be at least 2, got 1"),
        (["lr=int:1,2"], "lr=int: this field takes log or uniform, or choice"),
        (["iters=log:1,2"], "iters=log: this field takes int, or choice"),
        (["routing=int:1,2"], "routing=int: this field takes choice, or choice"),
        (["lr=log:a,1"], "lr: 'a' is not a number"),
        (["iters=int:1.5,2"], "iters: '1.5' is not a whole number; did you mean 2?"),
        (["routing=choice:vb,vb"], "routing=choice: the words must differ"),
        (["flip=choice:yes,perhaps"], "flip: 'perhaps' is neither true nor false"),
        (["test=choice:true,false"], "a sweep cannot change the field 'test'; --validation sets the share"),
        (["match=0.1"], "a sweep cannot change the field 'match'"),
        (["folds=5"], "a sweep cannot change the field 'folds'"),
    ],
)
def test_wrong_fields_are_errors_that_say_what_is_allowed(fields, wrong):
    with pytest.raises(ValueError, match=re.escape(wrong)):
        read_fields(fields)


def test_a_value_that_no_setting_can_have_is_an_error_at_once():
    base = tiny.recipe()
    with pytest.raises(ValueError, match=r"lr=1000.0: lr must lie from 0 to 100"):
        check_space(base, read_fields(["lr=log:0.1,1000"])[1])
    with pytest.raises(ValueError, match=r"routing=emm: routing must be one of .*did you mean 'em'"):
        check_space(base, read_fields(["routing=choice:vb,emm"])[1])
    # evidence belongs to VB: possible together with VB, though the recipe has EM
    other = tiny.recipe(routing="em")
    check_space(other, read_fields(["routing=choice:vb,em", "evidence=choice:0,0.1"])[1])
    with pytest.raises(ValueError, match="evidence belongs to routing='vb'"):
        check_space(other, read_fields(["lr=log:0.01,0.1", "evidence=choice:0,0.1"])[1])


def test_settings_become_recipes_and_commands():
    base = named_recipe("fashion_laptop")
    words = {"lr": 0.0123, "routing": "em", "filters": 24, "types2": 4, "flip": "false"}
    recipe = changed(base, words)
    assert (recipe.lr, recipe.routing, recipe.flip) == (0.0123, "em", False)
    assert recipe.arch == (24, base.arch[1], 4, base.arch[3])
    assert recipe.activation == Recipe.activation  # VB's own, which EM does not have
    flags = flags_of(words, base.arch)
    assert flags == [
        "--lr", "0.0123", "--routing", "em", "--no-flip", "--arch", f"24,{base.arch[1]},4,{base.arch[3]}"
    ]  # fmt: skip
    grid = list(grid_of(read_fields(["iters=int:1,2", "routing=choice:vb,em"])[1]))
    assert grid == [{"iters": i, "routing": r} for i in (1, 2) for r in ("vb", "em")]


@pytest.mark.parametrize("value", [(16, 4, 4, 4), (), None, 0.1, True, "vb", 3])
def test_words_are_read_as_the_values_that_they_were(value):
    kinds = {tuple: tuple[int, ...], type(None): float | None}
    assert value_of(words_of(value), kinds.get(type(value), type(value))) == value


def test_every_trial_holds_images_out_and_leaves_the_test_set_alone():
    plan, _ = make_plan(named_recipe("smallnorb"), ["lr=log:1e-4,1e-2"])
    assert (plan.base.validation, plan.base.hold_out, plan.base.test) == (0.2, "objects", False)
    plan, _ = make_plan(tiny.recipe(test=True, validation=0.3), ["lr=log:1e-4,1e-2"])
    assert (plan.base.validation, plan.base.test) == (0.3, False)
    plan, _ = make_plan(tiny.recipe(), ["lr=log:1e-4,1e-2"])
    assert plan.base.validation == 0.1
    for share in (0.0, 1.0):
        with pytest.raises(ValueError, match=r"validation must be above 0 and at most 0.9"):
            make_plan(tiny.recipe(), ["lr=log:1e-4,1e-2"], validation=share)


def test_a_plan_is_stored_and_compared():
    plan, _ = make_plan(tiny.recipe(), ["lr=log:1e-4,1e-2", "epochs=2"], trials=3)
    assert Plan.from_json(plan.to_json()) == plan
    other, _ = make_plan(tiny.recipe(iters=1), ["lr=log:1e-4,1e-1", "epochs=2"], "random", trials=9)
    assert other.differences(plan) == [
        "iters was 2, is now 1", "lr was log:0.0001,0.01, is now log:0.0001,0.1", "method was tpe, is now random"
    ]  # fmt: skip
    assert plan.differences(plan) == []
    grid, _ = make_plan(tiny.recipe(), ["iters=int:1,3"], "grid")
    assert grid.trials == 3
    assert grid.axes == (Axis("iters", "int", 1, 3),)
    with pytest.raises(ValueError, match=r"method must be one of .* got 'bayes'"):
        make_plan(tiny.recipe(), ["iters=int:1,3"], "bayes")

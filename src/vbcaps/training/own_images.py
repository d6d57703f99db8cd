"""The defaults for a folder of your own images, which apply unless you choose otherwise."""

from collections.abc import Collection
from pathlib import Path
from typing import Any

from vbcaps.training.recipe import Recipe

SIDES = (28, 48)  # the smallest and the largest network input that is chosen; --crop may be larger
VALIDATION, ENOUGH = 0.2, 30  # share of the training images held out, where that is at least so many
BATCHES, SMALLEST = 4, 8  # least batches in an epoch; no batch is made smaller than SMALLEST for that
STEPS, EPOCHS = 600, 200  # least steps of a training; no more than EPOCHS epochs are run for that


def for_own_images(recipe: Recipe, given: Collection[str] = ()) -> tuple[Recipe, list[str]]:
    """Return the recipe as `vbcaps train` trains it on your own images, and sentences that say what was chosen.

    Args:
        recipe: a recipe whose ``data`` is a folder of images.
        given: names of fields that the user chose; they are not changed.

    These are all defaults for your own images:

    - images are not mirrored, because a mirrored digit or letter is not the same one;
    - the network's input follows from the size of the images, within ``SIDES``; where several objects overlap, it is
      larger, so that they can move by an eighth of it, as digits of 28 pixels do in 36;
    - a share of the training images, or the folder ``val``, chooses the best epoch, which is then tested. If there are
      few images, none are held out, whatever the recipe's share: a choice among a hundred epochs by nine images is
      chance, and nine more training images help. A share that the user chose leaves the test set alone, unless the user
      chose ``test``, too;
    - batches are small enough, and epochs numerous enough, that few images give enough steps.
    """
    from vbcaps.data.folder import survey
    from vbcaps.data.pixels import Form
    from vbcaps.data.splits import held_out

    assert recipe.data is not None
    found = survey(Path(recipe.data), recipe.axes, whole=recipe.folds > 0)
    rest = found.train
    if recipe.folds:
        found = found._replace(train=tuple(count - -(-count // recipe.folds) for count in rest))
    changes: dict[str, Any] = {}
    said: list[str] = []

    def choose(**fields: Any) -> None:
        changes.update({field: value for field, value in fields.items() if field not in given})

    choose(flip=False)
    would = sum(held_out(count, VALIDATION) for count in found.train)
    few = would < ENOUGH or min(found.train) < 2
    if "validation" in given:
        choose(test=False)  # such a share is for the choice of settings
    else:
        hold_out = not found.validation and not few
        choose(validation=VALIDATION if hold_out else 0.0, test=hold_out)
    share = changes.get("validation", recipe.validation)
    held = [held_out(count, share) if share else 0 for count in found.train]
    train, validation = sum(found.train) - sum(held), sum(held) or found.validation
    names = ", ".join(found.classes) if len(found.classes) <= 10 else f"{', '.join(found.classes[:9])} and others"
    about = "about " if recipe.groups else ""
    chooses = f"{about}{validation} to choose the best epoch, " if validation else ""
    tested = f"{about}{sum(rest) - sum(found.train) if recipe.folds else found.test} to test"
    folds = f" in each of {recipe.folds} folds" if recipe.folds else ""
    said.append(f"{len(found.classes)} classes ({names}): {about}{train} images to train on, {chooses}{tested}{folds}")
    if found.form not in (Form(1, "uint8"), Form(3, "uint8")):
        said.append(f"images of {found.form}")
    said.extend(found.left_out)
    if few and not validation and "validation" not in given:
        said.append(f"too few images to choose the best epoch: the last is tested; --validation {VALIDATION} chooses")

    if not {"crop", "image_size"} & set(given) and not recipe.place:
        low, high = SIDES
        side = min(max(found.side // 4 * 4, low), high)
        crop = side if recipe.objects == 1 else side * 9 // 28 * 4
        choose(crop=crop, image_size=None)
        why = "" if side == found.side else f" (the shorter side of the images is {found.side}, in the median)"
        said.append(f"network input {crop}x{crop}{why}; --crop chooses another")
    if recipe.objects > 1 and "image_size" not in given:
        canvas = changes.get("crop", recipe.crop)
        changes["image_size"] = canvas * 7 // 9
        said.append(
            f"each of {recipe.objects} objects is {canvas * 7 // 9} pixels high and wide; --image-size chooses another"
        )

    batch = changes["batch"] = recipe.batch if "batch" in given else fitting_batch(train, recipe.batch)
    steps = max(train // min(batch, train), 1)
    if "epochs" not in given and recipe.epochs * steps < STEPS:
        changes["epochs"] = max(min(-(-STEPS // steps), EPOCHS), recipe.epochs)
    chosen = [f"batches of {min(batch, train)}"] if batch != recipe.batch else []
    chosen += [f"{changes['epochs']} epochs"] if changes.get("epochs", recipe.epochs) != recipe.epochs else []
    if chosen:
        said.append(f"few images: {' and '.join(chosen)}")
    schedule = {field: getattr(recipe, field) for field in ("warmup", "milestones") if field in given}
    return recipe.with_fields(**changes, **schedule), said


def fitting_batch(images: int, largest: int) -> int:
    """Return the largest power of two that gives ``BATCHES`` batches in an epoch, from ``SMALLEST`` to ``largest``."""
    batch = SMALLEST
    while 2 * batch * BATCHES <= images:
        batch *= 2
    return min(batch, largest)

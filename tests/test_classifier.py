"""``CapsuleClassifier`` in scikit-learn: its checks, images of every layout, any labels, searches and pickles."""

import math
import pickle
import tempfile

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.exceptions import NotFittedError
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils.estimator_checks import parametrize_with_checks

import vbcaps
from vbcaps import CapsuleClassifier
from vbcaps.classifier import channels_first
from vbcaps.training.files import RunError
from vbcaps.weights.model import Model

QUICK = dict(arch=(4, 2, 2, 2), iters=3, side=20, device="cpu", random_state=0)


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def digits():
    """300 images of 8 x 8 with values 0.0 to 16.0, and names of their digits."""
    data = load_digits()
    names = np.array(["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"])
    few = data.target[:500] < 3
    return data.images[:500][few], names[data.target[:500][few]]


class OfFeatures(CapsuleClassifier):
    """The classifier for rows of any length, which scikit-learn's checks have: they are filled up to a square."""

    def _shape_of_images(self, X):
        side = math.isqrt(X.shape[1] - 1) + 1
        return side, side

    def _pixels(self, X, side):
        return super()._pixels(np.pad(X, ((0, 0), (0, math.prod(self.image_shape_) - X.shape[1]))), side)


@parametrize_with_checks([OfFeatures(epochs=1, batch=16, **QUICK)])
def test_scikit_learns_own_checks(estimator, check):
    """All of them: none is expected to fail."""
    check(estimator)


# --- images ----------------------------------------------------------------------------------------------------------


def test_images_of_every_layout_are_the_same(digits):
    images, labels = digits
    layouts = [images, images[:, None], images[..., None], images.reshape(len(images), -1)]
    fitted = [CapsuleClassifier(epochs=1, **QUICK).fit(x, labels) for x in layouts]
    expected = fitted[0].predict_proba(images)
    for one, x in zip(fitted, layouts, strict=True):
        np.testing.assert_array_equal(one.predict_proba(x), expected)
        np.testing.assert_array_equal(one.predict_proba(images.reshape(len(images), -1)), expected)
        assert one.n_features_in_ == 64


def test_the_values_of_floats_are_scaled_and_bytes_stay(digits):
    images, labels = digits
    grey = np.rint(images * (255 / 16)).astype(np.uint8)
    of_floats, of_bytes, of_range = (
        CapsuleClassifier(epochs=1, **QUICK, value_range=bounds).fit(x, labels)
        for x, bounds in ((images, None), (grey, None), (images * 2 - 16, (-16, 16)))
    )
    assert of_floats.value_range_ == (0, 16)
    assert of_bytes.value_range_ == (0, 255)
    np.testing.assert_array_equal(of_floats.predict_proba(images), of_bytes.predict_proba(grey))
    np.testing.assert_array_equal(of_floats.predict_proba(images), of_range.predict_proba(images * 2 - 16))
    white = np.full_like(images, 16)
    np.testing.assert_array_equal(of_floats.predict_proba(images + 99), of_floats.predict_proba(white))


@pytest.mark.parametrize(
    ("shape", "pixels"),
    [((40, 30, 3), (3, 20, 20)), ((3, 22, 22), (3, 20, 20)), ((24, 24, 200), (200, 20, 20)), ((30, 50), (1, 20, 20))],
)
def test_images_with_channels_and_sides_of_any_number(shape, pixels):
    images = np.random.default_rng(0).integers(0, 256, (12, *shape), dtype=np.uint8)
    one = CapsuleClassifier(epochs=1, **QUICK).fit(images, np.arange(12) % 2)
    assert tuple(one._pixels(images, 20).shape) == (12, *pixels)
    assert one.model_.net.in_channels == pixels[0]
    assert one.predict(images).shape == (12,)
    rows = CapsuleClassifier(epochs=1, image_shape=shape, **QUICK).fit(images.reshape(12, -1), np.arange(12) % 2)
    np.testing.assert_array_equal(rows.predict_proba(images), one.predict_proba(images))


def test_an_image_that_is_cut_keeps_its_middle():
    images = np.zeros((4, 20, 30), dtype=np.uint8)
    images[:, :, 5:25] = 200
    one = CapsuleClassifier(epochs=1, **QUICK).fit(images, np.arange(4) % 2)
    assert one._pixels(images, 20).unique().tolist() == [200]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((8, 9), (1, 8, 9)), ((3, 8, 8), (3, 8, 8)), ((8, 8, 3), (3, 8, 8)),
        ((2, 30, 40), (2, 30, 40)), ((30, 40, 2), (2, 30, 40)), ((200, 24, 24), (200, 24, 24)),
    ],
)  # fmt: skip
def test_the_channels_of_an_image(shape, expected):
    assert channels_first(shape) == expected


# --- training --------------------------------------------------------------------------------------------------------


def test_it_learns_digits_by_name_in_a_search(digits):
    images, labels = digits
    base = CapsuleClassifier(epochs=3, lr=0.02, batch=8, **QUICK | dict(arch=(8, 4, 4, 4)))
    search = GridSearchCV(base, dict(epochs=[1, 3], routing=["vb"]), cv=2, error_score="raise").fit(images, labels)
    assert search.best_params_["epochs"] == 3
    assert search.best_score_ > 0.8
    assert set(search.predict(images)) == {"zero", "one", "two"}
    scores = cross_val_score(
        make_pipeline(FunctionTransformer(), base), images.reshape(len(images), -1), labels, cv=2, error_score="raise"
    )
    assert scores.mean() == pytest.approx(search.best_score_)


def test_a_seed_decides_and_a_clone_has_none_of_the_training(digits):
    images, labels = digits
    one = CapsuleClassifier(epochs=1, **QUICK).fit(images, labels)
    twin = clone(one)
    with pytest.raises(NotFittedError):
        twin.predict(images)
    np.testing.assert_array_equal(twin.fit(images, labels).predict_proba(images), one.predict_proba(images))
    other = clone(one).set_params(random_state=1).fit(images, labels)
    assert not np.array_equal(other.predict_proba(images), one.predict_proba(images))


def test_a_pickle_gives_the_same_bits(digits):
    images, labels = digits
    one = CapsuleClassifier(epochs=1, **QUICK).fit(images, labels)
    again = pickle.loads(pickle.dumps(one))
    np.testing.assert_array_equal(again.predict_proba(images), one.predict_proba(images))
    assert again.get_params() == one.get_params()


def test_nothing_stays_on_the_disk_unless_it_is_asked_for(digits, tmp_path, monkeypatch):
    images, labels = digits
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    one = CapsuleClassifier(epochs=1, **QUICK).fit(images, labels)
    assert list((tmp_path / "temporary").iterdir()) == []
    assert one.model_.file is None
    kept = CapsuleClassifier(epochs=1, folder=tmp_path / "run", **QUICK).fit(images, labels)
    assert (tmp_path / "run" / "metrics.csv").exists()
    pixels = kept._pixels(images, 20)
    np.testing.assert_allclose(vbcaps.load(tmp_path / "run").predict(pixels), kept.predict_proba(images), atol=1e-6)
    with pytest.raises(RunError, match="already holds a run"):
        kept.fit(images, labels)


def test_progress_is_told_and_a_share_is_held_out(digits, capsys):
    images, labels = digits
    events = []
    one = CapsuleClassifier(epochs=2, validation=0.2, verbose=True, on_event=events.append, **QUICK)
    one.fit(images, labels)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["epoch 1/2", "epoch 2/2"]
    assert all("validation error" in line for line in lines)
    assert [event.kind for event in events][:1] + [event.kind for event in events][-1:] == ["start", "end"]
    assert len(one.history_) == one.n_iter_ == 2
    assert one.model_.temperature != 1
    assert isinstance(one.model_, Model)
    assert one.model_.classes == ("one", "two", "zero")


def test_parameters_reach_the_recipe():
    recipe = vbcaps.recipe("default", ema=0.5)
    one = CapsuleClassifier(recipe, epochs=7, lr=0.5, network="cnn", fields=dict(cutout=3), random_state=4)
    one.image_shape_ = (8, 8)
    made = one._recipe(200)
    assert (made.epochs, made.lr, made.network, made.cutout, made.ema) == (7, 0.5, "cnn", 3, 0.5)
    assert (made.crop, made.image_size, made.batch, made.flip) == (28, 28, 32, False)
    assert one._recipe(200).seed == made.seed
    few = CapsuleClassifier(random_state=0)
    few.image_shape_ = (64, 64)
    made = few._recipe(30)
    assert (made.crop, made.batch, made.epochs) == (48, 8, 200)


@pytest.mark.parametrize(
    ("images", "labels", "fields", "words"),
    [
        (np.zeros((4, 10)), [0, 1, 0, 1], {}, "rows of 10 features are no square images: give image_shape"),
        (np.zeros((4, 10)), [0, 1, 0, 1], dict(image_shape=(3, 3)), r"image_shape \(3, 3\) has 9 values"),
        (np.zeros((4, 9)), [1, 1, 1, 1], {}, "at least two classes, got one class"),
        (np.zeros((4, 9)), [0, 1, 0, 1], dict(value_range=(3, 3)), "two rising numbers"),
        (np.zeros((4, 9)), [0, 1, 0, 1], dict(epochs=0), "epochs must lie from 1"),
        (np.zeros((4, 9)), [0, 1, 0, 1], dict(batch=0), "batch must lie from 1"),
        (np.zeros((4, 9)), [0, 1, 0, 1], dict(recipe="defalt"), "did you mean 'default'"),
        (np.zeros((4, 9)), [0, 1, 0, 1], dict(fields=dict(lrr=1)), "lrr"),
        (np.zeros((4, 9, 10, 11)), [0, 1, 0, 1], {}, "may be h w c or c h w"),
    ],
)
def test_errors_name_the_argument(images, labels, fields, words):
    with pytest.raises((ValueError, TypeError), match=words):
        CapsuleClassifier(**QUICK | fields).fit(images, labels)


def test_images_of_another_shape_than_in_fit_are_refused(digits):
    images, labels = digits
    one = CapsuleClassifier(epochs=1, **QUICK).fit(images, labels)
    with pytest.raises(ValueError, match=r"shape \(9, 9\), but those of fit had \(8, 8\)"):
        one.predict(np.zeros((2, 9, 9)))
    with pytest.raises(ValueError, match="X has 81 features, but CapsuleClassifier is expecting 64 features"):
        one.predict(np.zeros((2, 81)))

"""Densities against torch.distributions and scikit-learn, and as a part of a model."""

import pytest
import tiny
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.mixture import GaussianMixture
from torch.distributions import Categorical, MixtureSameFamily, MultivariateNormal

from vbcaps.uncertainty import Density, fit_densities, fit_density, look, scores
from vbcaps.uncertainty.density import SHRINK, pack_densities, unpack_densities
from vbcaps.uncertainty.scores import feature_sizes
from vbcaps.weights.model import Model, load

COUNTS = (600, 300, 100)


@pytest.fixture(scope="module")
def cloud():
    """(features, labels) of three classes whose covariances differ, in units of very different size."""
    gen = torch.Generator().manual_seed(0)
    parts = []
    for c, count in enumerate(COUNTS):
        mix = torch.randn(4, 4, generator=gen, dtype=torch.float64)
        parts.append(torch.randn(count, 4, generator=gen, dtype=torch.float64) @ mix + 3 * c)
    x = torch.cat(parts) * torch.tensor([1.0, 100.0, 0.01, 1.0]) + torch.tensor([0.0, 50.0, 0.0, -3.0])
    return x, torch.arange(3).repeat_interleave(torch.tensor(COUNTS))


def standard(x):
    return (x - x.mean(0)) / x.std(0)


def covariance(density):
    """Return the covariances that ``whiten`` belongs to."""
    W = density.whiten.double()
    return torch.linalg.inv(W.mT @ W).expand(len(density.mean), -1, -1)


@pytest.mark.parametrize("tied", [True, False])
def test_log_prob_is_that_of_torchs_mixture(cloud, tied):
    x, y = cloud
    density = fit_density(x, y, 3, tied=tied)
    assert density.tied == tied
    normals = MultivariateNormal(density.mean.double(), covariance(density))
    mixture = MixtureSameFamily(Categorical(logits=density.log_share.double()), normals)
    strange = torch.cat([x[::50], 3 * x[::50].flip(0)])
    expected = mixture.log_prob((strange - density.centre) / density.spread)
    torch.testing.assert_close(density.log_prob(strange), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(density.log_share.exp(), torch.tensor(COUNTS) / sum(COUNTS))


@pytest.mark.parametrize("tied", [True, False])
def test_the_covariance_is_that_of_the_sample_shrunk_to_its_diagonal(cloud, tied):
    x, y = cloud
    z = standard(x)
    found = covariance(fit_density(x, y, 3, tied=tied))
    for c, count in enumerate(COUNTS):
        own = torch.cov(z[y == c].T)
        if tied:
            own = sum((n - 1) * torch.cov(z[y == k].T) for k, n in enumerate(COUNTS)) / (sum(COUNTS) - 3)
            count = sum(COUNTS)
        share = 4 / (4 + count)
        expected = (1 - share) * own + share * own.diag().diag() + SHRINK * own.diag().mean() * torch.eye(4)
        torch.testing.assert_close(found[c], expected, rtol=1e-4, atol=1e-5)


def test_a_tied_density_is_that_of_scikit_learns_linear_discriminant(cloud):
    """The means, shares and, but for the shrinkage, which has a hundredth's effect here, the probabilities."""
    x, y = cloud
    z = standard(x)
    peer = LinearDiscriminantAnalysis(solver="lsqr", store_covariance=True).fit(z.numpy(), y.numpy())
    density = fit_density(x, y, 3)
    torch.testing.assert_close(density.mean.double(), torch.from_numpy(peer.means_), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(covariance(density)[0], torch.from_numpy(peer.covariance_), rtol=0.02, atol=0.01)
    each = MultivariateNormal(density.mean.double(), covariance(density)).log_prob(z[:, None]) + density.log_share
    torch.testing.assert_close(each.softmax(1), torch.from_numpy(peer.predict_proba(z.numpy())), rtol=0, atol=0.02)


def test_a_density_for_each_class_is_scikit_learns_mixture(cloud):
    x, y = cloud
    z, density = standard(x), fit_density(x, y, 3, tied=False)
    peer = GaussianMixture(3)
    peer.weights_, peer.means_ = density.log_share.exp().numpy(), density.mean.double().numpy()
    peer.covariances_ = covariance(density).numpy()
    peer.precisions_cholesky_ = density.whiten.double().mT.numpy()
    log_p = torch.from_numpy(peer.score_samples(z.numpy()))
    torch.testing.assert_close(density.log_prob(x), log_p, rtol=1e-4, atol=1e-4)
    assert float((fit_density(x, y, 3).log_prob(x) - log_p).abs().median()) > 0.2  # a tied one is another


def test_the_unit_of_a_feature_does_not_matter_and_a_constant_one_does_no_harm(cloud):
    x, y = cloud
    expected = fit_density(x, y, 3).log_prob(x)
    units = torch.tensor([1e3, 1e-3, 1.0, 7.0])
    torch.testing.assert_close(fit_density(units * x + 5, y, 3).log_prob(units * x + 5), expected, rtol=1e-3, atol=1e-3)
    constant = torch.cat([x, torch.full((len(x), 1), 4.0)], 1)
    density = fit_density(constant, y, 3)
    assert bool(density.log_prob(constant).isfinite().all())
    moved = constant.clone()
    moved[:, 4] += 0.1
    assert bool((density.log_prob(moved) < density.log_prob(constant)).all())


def test_more_features_than_images_have_a_density_that_tells_strangers():
    gen = torch.Generator().manual_seed(0)
    x, y = torch.randn(30, 64, generator=gen), torch.arange(30) % 3
    for tied in (True, False):
        density = fit_density(x, y, 3, tied=tied)
        new = density.log_prob(torch.randn(30, 64, generator=gen))
        assert bool((new > density.log_prob(5 + torch.randn(30, 64, generator=gen)).max()).all())


def test_what_no_density_can_be_fitted_to_is_an_error(cloud):
    x, y = cloud
    lonely = y.clone()
    lonely[lonely == 2] = 1
    lonely[0] = 2
    for labels, classes in ((lonely, 3), (y, 4)):
        needs = rf"density of {classes} classes needs at least two images of each, there are \[.*: give more training"
        with pytest.raises(ValueError, match=needs):
            fit_density(x, labels, classes)
    for labels, classes in ((y, 2), (y - 1, 3)):
        with pytest.raises(ValueError, match=rf"labels must lie from 0 to {classes - 1}, got .*: leave out images of"):
            fit_density(x, labels, classes)
    for labels, kind in ((y.tolist(), "list"), (y.float(), "float32"), (y.int(), "int32")):
        with pytest.raises(TypeError, match=rf"labels must be a tensor of int64, .*, got {kind}: torch.as_tensor"):
            fit_density(x, labels, 3)
    with pytest.raises(ValueError, match=r"features \(n, f\) and labels \(n,\), got \(1000, 4\) and \(999,\)"):
        fit_density(x, y[:-1], 3)
    with pytest.raises(ValueError, match="features must be finite"):
        fit_density(x.index_fill(0, torch.tensor([3]), torch.nan), y, 3)
    density = fit_density(x, y, 3)
    for other in (x[:, :3], x[0]):
        with pytest.raises(ValueError, match=r"the density is of 4 features, got .* fit it again"):
            density.log_prob(other)


def test_densities_are_packed_under_names_with_dots_and_plus_signs(cloud):
    x, y = cloud
    kept = {"class_caps.m": fit_density(x, y, 3), "a.m+b.kappa": fit_density(x, y, 3, tied=False)}
    found = unpack_densities(pack_densities(kept))
    assert found.keys() == kept.keys()
    for name, density in kept.items():
        for one, other in zip(density, found[name], strict=True):
            assert torch.equal(one, other)
    assert unpack_densities({}) == {}


def test_a_file_has_one_half_of_a_matrix_or_from_earlier_versions_all(cloud):
    x, y = cloud
    density = fit_density(x, y, 3, tied=False)
    packed = pack_densities({"m": density})
    assert packed["m.whiten"].shape == (3, 4 * 5 // 2)
    for f in (1, 2, 3, 500):  # the side is found from the number of entries
        one = density._replace(whiten=torch.rand(1, f, f).tril())
        assert torch.equal(unpack_densities(pack_densities({"m": one}))["m"].whiten, one.whiten)
    earlier = unpack_densities(packed | {"m.whiten": density.whiten})["m"]
    assert torch.equal(earlier.log_prob(x), density.log_prob(x))


# --- in a model ------------------------------------------------------------------------------------------------------


@pytest.fixture
def model():
    """A network that was not trained, with a temperature, and densities of two kinds of features."""
    torch.manual_seed(0)
    recipe, data = tiny.recipe(), tiny.dataset()
    view = recipe.view().fit(data.train)
    net = recipe.net(1, 3)
    net(view.test(data.train.images))  # running statistics
    model = Model(net.eval(), recipe, tiny.CLASSES, view, dict(epoch=1, temperature=2.5))
    fit_densities(model, data.train.images, data.train.labels, ["class_caps.m", "conv_caps2.m+conv_caps2.kappa"])
    return model


def test_a_saved_model_has_the_same_densities_and_scores(model, tmp_path):
    images = tiny.dataset().test.images
    again = load(model.save(tmp_path / "w.safetensors"))
    assert list(again.densities) == sorted(model.densities)
    for name, density in model.densities.items():
        assert isinstance(again.densities[name], Density)
        for one, other in zip(density, again.densities[name], strict=True):
            assert torch.equal(one, other)
    assert again.temperature == model.temperature == 2.5
    expected, found = scores(model, images), scores(again, images)
    assert found.keys() == expected.keys()
    assert {"density.class_caps.m", "density.conv_caps2.m+conv_caps2.kappa"} < found.keys()
    for name, x in expected.items():
        assert torch.equal(found[name], x), name


def test_weights_changed_by_hand_lose_densities_and_temperature(model, tmp_path):
    with torch.no_grad():
        model.net.class_caps.weight.mul_(1.01)
    changed = load(model.save(tmp_path / "w.safetensors"))
    assert changed.densities == {}
    assert changed.temperature == 1
    assert changed.about["trained"] == "by hand"


def test_a_density_of_another_network_is_an_error(model, tmp_path):
    data = tiny.dataset()
    wider = tiny.recipe(arch=(4, 2, 2, 3))
    net = wider.net(1, 3)
    message = r"conv_caps2\.m\+conv_caps2\.kappa belongs to another network: it is of 34 features and 3 classes, and"
    with pytest.raises(ValueError, match=f"{message} this network has 51 and 3; fit it again"):
        Model(net, wider, tiny.CLASSES, model.view, densities=model.densities)
    with pytest.raises(ValueError, match=r"density of class_caps\.m belongs .* is of 48 features and 3 classes"):
        Model(wider.net(1, 2), wider, tiny.CLASSES[:2], model.view, densities=model.densities)
    em = tiny.recipe(routing="em", learn=())
    kappa = {"conv_caps2.kappa": model.densities["class_caps.m"]}
    with pytest.raises(ValueError, match=r"has no features conv_caps2\.kappa; it has conv_caps1\.m, .*; fit it again"):
        Model(em.net(1, 3), em, tiny.CLASSES, model.view, densities=kappa)
    other = Model(net, wider, tiny.CLASSES, model.view)
    other.densities.update(model.densities)
    with pytest.raises(ValueError, match=r"the density is of 34 features, got .*51"):
        scores(other, data.test.images)


@pytest.mark.parametrize(
    "fields",
    [
        dict(),
        dict(routing="em", learn=()),
        dict(routing="dynamic", learn=()),
        dict(network="cnn", backend="auto", iters=3),
        dict(network="vae", standardise="none", decoder=8),
    ],
    ids=["vb", "em", "dynamic", "cnn", "vae"],
)
def test_the_sizes_of_features_are_known_without_a_look(fields):
    recipe = tiny.recipe(arch=(4, 2, 3, 5), **fields)
    other = Model(recipe.net(1, 3).eval(), recipe, tiny.CLASSES, recipe.view().fit(tiny.dataset().train))
    seen = look(other, tiny.dataset().test.images[:2]).features
    assert feature_sizes(other.net) == {name: x.shape[1] for name, x in seen.items()}


def test_densities_of_files_of_other_classes_are_left_behind(model, tmp_path):
    path = model.save(tmp_path / "w.safetensors")
    other = load(path, num_classes=5)
    assert other.densities == {}
    assert other.temperature == 1

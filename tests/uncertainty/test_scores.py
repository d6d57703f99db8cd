"""Scores against their definitions, computed by the readable reference, and the posterior against known truths."""

import math

import pytest
import tiny
import torch
from scipy import stats
from torch.distributions import Dirichlet

from vbcaps import Prior
from vbcaps.data import load_dataset
from vbcaps.kernels.cpu.build import find_compiler
from vbcaps.routing import vb_routing
from vbcaps.training.loop import fit
from vbcaps.uncertainty import auroc, fit_densities, look, posterior_scores, scores
from vbcaps.uncertainty.scores import OF_ALL, OF_POSTERIOR, of_logits
from vbcaps.weights.model import Model, load

IMAGES = tiny.dataset().test.images
LABELS = tiny.dataset().test.labels


def model_of(backend="reference", seed=0, **fields):
    """Return a network with random weights, and running statistics that fit them."""
    torch.manual_seed(seed)
    recipe, train = tiny.recipe(backend=backend, **fields), tiny.dataset().train
    view = recipe.view().fit(train)
    net = recipe.net(1, 3)
    with torch.no_grad():
        net(view.test(train.images))
    return Model(net.eval(), recipe, tiny.CLASSES, view, dict(temperature=1.5))


@pytest.fixture(scope="module")
def model():
    return model_of(arch=(8, 4, 4, 4), iters=3)


@pytest.fixture(scope="module")
def traced(model):
    """The trace of the network over all test images."""
    with torch.no_grad():
        return model.net.trace(model.view.test(IMAGES))


# --- definitions -----------------------------------------------------------------------------------------------------


def test_every_score_is_there_and_no_other(model):
    found = scores(model, IMAGES)
    assert (*found,) == (*OF_ALL, *OF_POSTERIOR)
    for name, x in found.items():
        assert x.shape == (30,), name
        assert x.dtype == torch.float32, name
        assert x.std() > 1e-6, name
    assert (*posterior_scores(model, IMAGES),) == OF_POSTERIOR


def test_scores_of_the_logits_are_their_definitions(model, traced):
    found, z = scores(model, IMAGES), traced.output.logits
    p = (z / 1.5).softmax(1)
    torch.testing.assert_close(p, model.predict(IMAGES))
    torch.testing.assert_close(found["max_softmax"], 1 - p.max(1).values)
    torch.testing.assert_close(found["entropy"], -(p * p.log()).sum(1))
    torch.testing.assert_close(found["energy"], -z.exp().sum(1).log())  # without the temperature


def test_scores_of_the_posterior_are_their_definitions(model, traced):
    """Each from the fields of the traced posterior, with torch.distributions and SciPy where these have them."""
    found, layer = scores(model, IMAGES), traced.layers["class_caps"]
    q, rows, answer = layer.iterations[-1], torch.arange(30), traced.output.logits.argmax(1)
    psi, nu, kappa = q.psi[rows, answer], q.nu[rows, answer], q.kappa[rows, answer]
    r_j = (layer.activations[..., None] * q.r).sum(1)
    total = layer.activations.sum(1)
    gamma = torch.distributions.Gamma((nu / 2)[:, None].expand_as(psi).double(), 1 / (2 * psi.double()))
    ln_lambda = torch.digamma(gamma.concentration) - gamma.rate.log()
    normal = 0.5 * (math.log(2 * math.pi * math.e) - kappa.double().log()[:, None] - ln_lambda)
    expected = dict(
        precision=-ln_lambda.sum(1),
        pose_entropy=(gamma.entropy() + normal).sum(1),
        class_entropy=Dirichlet(q.alpha.double()).entropy(),
        kl=-q.kl()[1][rows, answer],
        votes=-r_j[rows, answer],
        alpha=-Dirichlet(q.alpha).mean[rows, answer],
        epistemic=torch.tensor([
            float((stats.t(float(n), scale=(k * n * p) ** -0.5).var() * (n - 2) / n).mean())
            for n, k, p in zip(nu.numpy(), kappa.numpy(), psi.numpy(), strict=True)
        ]),
        elbo=-q.elbo(layer.activations, layer.votes).total / total,
    )  # fmt: skip
    assert expected.keys() == set(OF_POSTERIOR)
    for name, x in expected.items():
        torch.testing.assert_close(found[name], x.float(), rtol=1e-4, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def test_features_are_the_means_over_positions_of_what_each_layer_computed(model, traced):
    found = look(model, IMAGES).features
    kinds = ("m", "kappa", "precision")
    assert {*found} == {"logits"} | {f"{layer}.{kind}" for layer in traced.layers for kind in kinds}
    assert torch.equal(found["logits"], look(model, IMAGES).logits)
    q = traced.layers["conv_caps2"].iterations[-1]
    close = dict(rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found["conv_caps2.m"], q.m.mean(1).flatten(1), **close)
    torch.testing.assert_close(found["conv_caps2.kappa"], q.kappa.log().mean(1), **close)
    torch.testing.assert_close(found["conv_caps2.precision"], (1 / q.variance()).log().mean(1).flatten(1), **close)
    q = traced.layers["class_caps"].iterations[-1]
    torch.testing.assert_close(found["class_caps.m"], q.m.flatten(1), **close)
    assert look(model, IMAGES, features=False).features == {}


@pytest.mark.parametrize("batch_size", [1, 7, 30, 256])
def test_batches_of_any_size_give_the_same(model, batch_size):
    for name, x in scores(model, IMAGES, batch_size=batch_size).items():
        torch.testing.assert_close(x, scores(model, IMAGES)[name], rtol=1e-4, atol=1e-5)


def test_the_mode_and_the_images_stay_as_they_were(model):
    images = IMAGES.clone()
    model.net.train()
    statistics = model.net.class_caps.norm_a.running_var.clone()
    expected = scores(model, images)
    assert model.net.training
    model.net.eval()
    assert torch.equal(model.net.class_caps.norm_a.running_var, statistics)
    assert torch.equal(images, IMAGES)
    assert torch.equal(scores(model, images)["elbo"], expected["elbo"])
    assert not any(x.requires_grad for x in expected.values())


@pytest.mark.parametrize(
    "backend",
    ["plain", pytest.param("cpu", marks=pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler"))],
)
@pytest.mark.parametrize("fields", [{}, dict(activation="paper", precision="wishart"), dict(routing="em", learn=())])
def test_kernels_give_the_reference_scores_and_features(backend, fields):
    """|kernel - ref64| <= 4 |ref32 - ref64| + tiny, in norm: features are means over few positions."""
    fields = dict(arch=(8, 4, 4, 4), iters=3) | fields
    reference, fused = (model_of(name, **fields) for name in ("reference", backend))
    fused.net.load_state_dict(reference.net.state_dict())
    single, kernel = look(reference, IMAGES), look(fused, IMAGES)
    exact = look(Model(reference.net.double(), reference.recipe, reference.classes, reference.view), IMAGES)
    for one, other, best in zip(kernel[1:], single[1:], exact[1:], strict=True):
        assert one.keys() == other.keys() == best.keys()
        for name, x in best.items():
            off = [float((y - x).norm() / x.norm()) for y in (one[name], other[name])]
            assert off[0] <= 4 * off[1] + 1e-5, f"{name}: {off[0]:.1e}, reference {off[1]:.1e}"
            assert off[1] < 1e-3, name
    torch.testing.assert_close(kernel.logits, single.logits, rtol=1e-3, atol=1e-3)


def test_a_full_precision_has_the_same_scores():
    model = model_of(precision="full", iters=2)
    found = scores(model, IMAGES[:6])
    assert found.keys() == {*OF_ALL, *OF_POSTERIOR}
    assert all(bool(x.isfinite().all()) for x in found.values())
    with torch.no_grad():
        out = model.net(model.view.test(IMAGES[:6]))
    rows, answer, q = torch.arange(6), out.logits.argmax(1), out.posterior
    torch.testing.assert_close(found["pose_entropy"], q.entropy()[1][rows, answer])
    torch.testing.assert_close(found["epistemic"], (q.variance().mean(2) / q.kappa)[rows, answer])


# --- meaning ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A network that learned its images, with the printed rule."""
    recipe = tiny.recipe(epochs=10, arch=(8, 4, 4, 4), lr=0.03, activation="paper")
    with tiny.in_place_of_data():
        return fit(recipe, tmp_path_factory.mktemp("run"), device="cpu")


def test_strange_images_score_higher_with_densities(trained):
    """Noise and negatives: each density tells them from familiar images."""
    model, train = trained, tiny.dataset().train
    fit_densities(model, train.images, train.labels, ["class_caps.m", "conv_caps2.precision"])
    fit_densities(model, train.images, train.labels)  # of class_caps.m, anew
    assert list(model.densities) == ["class_caps.m", "conv_caps2.precision"]
    noise = torch.randint(0, 256, IMAGES.shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    familiar = scores(model, IMAGES)
    for strange in (noise, 255 - IMAGES):
        found = scores(model, strange)
        for name in ("density.class_caps.m", "density.conv_caps2.precision"):
            assert familiar[name].median() < found[name].median(), name


def test_by_the_printed_rule_a_trained_network_answers_with_the_class_that_took_few_votes(trained):
    """As the module says: votes lower the activation there, unless the loss counts them as evidence."""
    with torch.no_grad():
        trace = trained.net.trace(trained.view.test(IMAGES))
    q, a = trace.layers["class_caps"].iterations[-1], trace.layers["class_caps"].activations
    r_j, found = (a[..., None] * q.r).sum(1), scores(trained, IMAGES)
    answer = trace.output.logits.argmax(1, keepdim=True)
    torch.testing.assert_close(found["votes"], -r_j.gather(1, answer)[:, 0], rtol=1e-4, atol=1e-4)
    assert float(-found["votes"].mean()) < 0.5 * float(r_j.mean())


def test_scores_find_the_errors_of_a_network_of_the_package():
    """Its answers take few votes: of these, errors have many."""
    model, test = load("fashion_small"), load_dataset("sample").test.take(torch.arange(300))
    seen = look(model, test.images, features=False)
    wrong = seen.logits.argmax(1) != test.labels
    assert wrong.sum() > 9
    found = of_logits(seen.logits, model.temperature) | seen.scores
    for name in (*OF_ALL, *OF_POSTERIOR):
        turned = name in ("precision", "pose_entropy", "kl", "votes", "alpha", "epistemic")
        rate = auroc(found[name][~wrong], found[name][wrong])
        assert (rate < 0.25) if turned else (rate > (0.7 if name in OF_ALL else 0.5)), f"{name}: {rate:.2f}"


def test_where_votes_count_as_evidence_the_posterior_knows_errors_and_strangers():
    """Negatives of the images are the strangers; without that term of the loss these scores say little."""
    test = load_dataset("sample").test.take(torch.arange(400))
    rates = {}
    for name in ("fashion_evidence", "fashion_laptop"):
        model = load(name)
        seen, strange = look(model, test.images, features=False), look(model, 255 - test.images, features=False)
        wrong = seen.logits.argmax(1) != test.labels
        votes = seen.scores["votes"]
        rates[name] = auroc(votes[~wrong], votes[wrong]), auroc(seen.scores["elbo"], strange.scores["elbo"])
    assert min(rates["fashion_evidence"]) > 0.85
    assert max(rates["fashion_laptop"]) < 0.7


# --- other networks and wrong arguments ------------------------------------------------------------------------------


def test_em_has_scores_of_logits_and_densities_but_not_of_a_posterior():
    model, train = model_of(routing="em", learn=()), tiny.dataset().train
    assert (*scores(model, IMAGES),) == OF_ALL
    with pytest.raises(ValueError, match=r"need a capsule network with VB routing, got routing='em': train one with"):
        posterior_scores(model, IMAGES)
    with torch.no_grad():
        mixture = model.net(model.view.test(IMAGES)).posterior
    torch.testing.assert_close(look(model, IMAGES).features["class_caps.precision"], -mixture.var.log().flatten(1))
    fit_densities(model, train.images, train.labels)
    assert (*scores(model, IMAGES),) == (*OF_ALL, "density.class_caps.m")


def test_a_cnn_has_scores_of_logits_and_densities_only():
    model, train = model_of(network="cnn", backend="auto", iters=3), tiny.dataset().train
    assert (*scores(model, IMAGES),) == OF_ALL
    with torch.no_grad():
        x = model.view.test(IMAGES)
        torch.testing.assert_close(look(model, IMAGES).features["features"], model.net.features(x))
        torch.testing.assert_close(look(model, IMAGES).logits, model.net(x).logits)
    with pytest.raises(ValueError, match=r"got a CNN: .* or use max_softmax, entropy, energy and densities"):
        posterior_scores(model, IMAGES)
    fit_densities(model, train.images, train.labels)
    assert (*scores(model, IMAGES),) == (*OF_ALL, "density.features")


def test_what_densities_cannot_be_fitted_to_is_an_error(model):
    for labels in (LABELS + 2, LABELS - 1):
        with pytest.raises(ValueError, match=r"labels must lie from 0 to 2, got .*: leave out images of other classes"):
            fit_densities(model, IMAGES, labels)
    for labels, kind in ((LABELS.float(), "float32"), (LABELS.tolist(), "list")):
        with pytest.raises(TypeError, match=rf"labels must be a tensor of int64, .* got {kind}: torch.as_tensor"):
            fit_densities(model, IMAGES, labels)
    with pytest.raises(ValueError, match="density of 3 classes needs at least two images of each, there are"):
        fit_densities(model, IMAGES, LABELS.clamp(max=1))
    with pytest.raises(ValueError, match="there are 30 images and 29 labels"):
        fit_densities(model, IMAGES, LABELS[1:])
    with pytest.raises(ValueError, match=r"no features conv_caps3\.m; it has conv_caps1\.m, .*precision, logits"):
        fit_densities(model, IMAGES, LABELS, ["class_caps.m", "class_caps.m+conv_caps3.m"])
    assert model.densities == {}  # none of them is kept
    for batch_size in (0, -1):
        with pytest.raises(ValueError, match="batch_size must be at least 1"):
            scores(model, IMAGES, batch_size=batch_size)


# --- a posterior whose truth is known --------------------------------------------------------------------------------

RATES = (0.5, 0.8, 0.95)
DRAWS, CHILDREN, DIM = 4000, 10, 3
TRUTH = dict(m0=0.3, kappa0=0.7, Psi0=0.4, nu0=6.0, dim=DIM, dtype=torch.float64)


def draw_parents(prior, types=1):
    """Draw lambda and mu ``n j d`` from the prior."""
    p = prior()
    lam = torch.distributions.Gamma(p.nu0 / 2, p.inv_Psi0 / 2).sample((DRAWS, types))
    return lam, p.m0 + torch.randn_like(lam) / (p.kappa0 * lam).sqrt()


def assert_covered(q, lam, mu):
    """Central credible regions of each mu_d and lambda_d, ``n j d``, hold the truth at their rates."""
    m, psi = q.m[:, 0].numpy(), q.psi[:, 0].numpy()
    nu, kappa = (x[:, 0, :, None].numpy() for x in (q.nu, q.kappa))
    known = dict(
        mu=stats.t.cdf(mu.numpy(), nu, m, (kappa * nu * psi) ** -0.5),
        lam=stats.gamma.cdf(lam.numpy(), nu / 2, scale=2 * psi),
    )
    for name, share in known.items():
        assert stats.kstest(share.flatten(), "uniform").pvalue > 1e-3, name
        for rate in RATES:
            inside = (abs(share - 0.5) < rate / 2).mean()
            assert abs(inside - rate) < 4 * (rate * (1 - rate) / share.size) ** 0.5, f"{name}: {inside} of {rate}"


def test_the_posterior_covers_the_truth_where_one_parent_took_all_votes():
    """Half of the children are off, and their votes are far away: they must not count."""
    torch.manual_seed(0)
    prior = Prior(**TRUTH)
    lam, mu = draw_parents(prior)
    V = mu[:, None] + torch.randn(DRAWS, CHILDREN, 1, DIM, dtype=torch.float64) / lam[:, None].sqrt()
    a = torch.arange(CHILDREN).remainder(2).double().expand(DRAWS, -1)
    V = torch.where(a[..., None, None] > 0, V, 100.0)
    _, q = vb_routing(a[:, None], V[:, None], torch.arange(CHILDREN)[None], prior)
    assert bool((q.r == 1).all())
    assert_covered(q, lam, mu)
    for wrong in (dict(kappa0=7.0), dict(nu0=12.0)):  # another prior than the one that made the data
        _, other = vb_routing(a[:, None], V[:, None], torch.arange(CHILDREN)[None], Prior(**TRUTH | wrong))
        with pytest.raises(AssertionError):
            assert_covered(other, lam, mu)


def test_the_posterior_covers_the_truth_of_two_clusters_far_apart():
    """Routing finds the cluster of each child; then shares, means and precisions are covered as if it were told."""
    torch.manual_seed(0)
    m0 = torch.tensor([[-200.0], [200.0]]).expand(2, DIM)
    prior = Prior(**TRUTH | dict(m0=m0, alpha0=torch.tensor([2.0, 1.0])))
    lam, mu = draw_parents(prior, 2)
    share = Dirichlet(prior().alpha0).sample((DRAWS,))
    z = torch.multinomial(share, CHILDREN, replacement=True)  # n i
    at = z[..., None].expand(-1, -1, DIM)
    V = mu.gather(1, at) + torch.randn(DRAWS, CHILDREN, DIM, dtype=torch.float64) / lam.gather(1, at).sqrt()
    a = torch.ones(DRAWS, 1, CHILDREN, dtype=torch.float64)
    V = V[:, None, :, None].expand(-1, -1, -1, 2, -1)  # both parents get the same votes
    _, q = vb_routing(a, V, torch.arange(CHILDREN)[None], prior, iters=8)
    found = q.r[:, 0] > 0.999
    assert bool((found == torch.nn.functional.one_hot(z, 2).bool()).all())
    assert_covered(q, lam, mu)
    alpha = q.alpha[:, 0].numpy()
    below = stats.beta.cdf(share[:, 0].numpy(), alpha[:, 0], alpha[:, 1])
    assert stats.kstest(below, "uniform").pvalue > 1e-3
    for rate in RATES:
        inside = (abs(below - 0.5) < rate / 2).mean()
        assert abs(inside - rate) < 4 * (rate * (1 - rate) / DRAWS) ** 0.5

"""The Capsule-VAE: what is decoded, how its code is drawn, and what its parts do."""

import re

import numpy as np
import pytest
import scipy.stats
import torch
from torch import nn

from vbcaps import CapsVAE, Prior
from vbcaps.losses import total_loss, vae_loss
from vbcaps.vae import capsules_of

SMALL = (8, 4, 4, 4)
TINY = (4, 2, 2, 2)


@pytest.fixture(autouse=True)
def _seed():
    torch.set_num_threads(1)
    torch.manual_seed(0)


def bars(n, classes, size):
    """Noisy images of two channels with a bright bar whose height is the class."""
    label = torch.arange(n) % classes
    x = 0.3 * torch.randn(n, 2, size, size)
    width = size // classes
    for image, k in zip(x, label.tolist(), strict=True):
        image[:, k * width : (k + 1) * width] += 1.0
    return x, label


def settle(model, x, *args):
    """Running statistics of this batch, then evaluation: fresh ones saturate or hide what the capsules say."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    for norm in norms:
        norm.momentum = 1.0
    with torch.no_grad():
        model(x, *args)
    for norm in norms:
        norm.momentum = 0.1
    return model.eval()


def small_vae(**options):
    return CapsVAE(**{"arch": SMALL, "num_classes": 3, "image_size": 20, "filters": 8, **options})


@pytest.mark.parametrize("size", [20, 32, (20, 33), (37, 24)])
@pytest.mark.parametrize("channels", [1, 3])
def test_vae_decodes_images_of_the_size_it_was_given(size, channels):
    vae = small_vae(image_size=size, in_channels=channels, pose_size=3)
    x = torch.randn(2, channels, *vae.net.image_size)
    out = vae(x, torch.tensor([2, 0]))
    assert out.images.shape == x.shape
    assert out.logits.shape == out.activations.shape == (2, 3)
    assert out.poses.shape == (2, 3, 3, 3)
    assert out.code.shape == out.mean.shape == out.var.shape == (2, 9)
    assert out.posterior.m.shape == (2, 3, 9)


def test_vae_code_is_the_posterior_of_the_label_or_of_the_prediction():
    vae = small_vae()
    x, _ = bars(6, 3, 20)
    settle(vae, x)
    rows = torch.arange(6)
    predicted = vae(x)
    assert torch.equal(predicted.label, predicted.activations.argmax(1))
    assert predicted.label.unique().numel() > 1
    given = (predicted.label + 1) % 3
    for out, label in ((predicted, predicted.label), (vae(x, given), given)):
        q = out.posterior
        assert torch.equal(out.label, label)
        torch.testing.assert_close(out.mean, q.m[rows, label])
        torch.testing.assert_close(out.var, 1 / (q.nu[rows, label][:, None] * q.psi[rows, label]))
        torch.testing.assert_close(out.images, vae.decoder(out.mean, label))
    assert not torch.allclose(predicted.images, vae(x, given).images)


def test_vae_decoder_sees_only_the_chosen_capsule():
    """A code at another class is another input: all but one class are masked."""
    decoder = small_vae().decoder
    code = torch.randn(1, 16)
    first = decoder.deconv1[0].weight  # (classes d) filters h w
    for label in range(3):
        by_hand = nn.functional.conv_transpose2d(
            code[..., None, None], first[16 * label : 16 * label + 16], decoder.deconv1[0].bias
        )
        for layer in (decoder.deconv1[1], decoder.deconv2, decoder.deconv3, decoder.deconv4, decoder.deconv5):
            by_hand = layer(by_hand)
        torch.testing.assert_close(decoder(code, torch.tensor([label])), by_hand[..., :20, :20])


def test_vae_decoder_has_five_transposed_convolutions():
    layers = [m for m in small_vae().decoder.modules() if isinstance(m, nn.ConvTranspose2d)]
    assert len(layers) == 5


@pytest.mark.parametrize("precision", ["gamma", "wishart", "full"])
@pytest.mark.parametrize("sampling", ["shortcut", "posterior"])
def test_vae_sampling_is_differentiable_to_the_encoder(sampling, precision):
    vae = small_vae(sampling=sampling, routing_options=dict(prior=Prior(precision=precision, learn="all")))
    x, label = bars(3, 3, 20)
    out = vae(x, label)
    assert not torch.allclose(out.code, out.mean)
    on_psi, on_m = torch.autograd.grad(out.code.square().sum(), (out.posterior.psi, out.posterior.m), retain_graph=True)
    assert on_psi.isfinite().all()
    chosen, other = on_psi[torch.arange(3), label], on_psi[torch.arange(3), (label + 1) % 3]
    assert chosen.abs().amax() > 0
    assert other.abs().amax() == 0
    assert on_m[torch.arange(3), label].abs().min() > 0
    vae_loss(x, out).total.backward()
    assert vae.net.stem.conv1[0].weight.grad.abs().max() > 0
    assert not [k for k, p in vae.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]


@pytest.mark.parametrize("sampling", ["shortcut", "posterior"])
def test_vae_samples_have_the_papers_spread(sampling):
    """Shortcut: N(m, sigma^2). Posterior: Student's t with nu degrees of freedom, scale 1 / sqrt(kappa E[lambda])."""
    vae = small_vae(sampling=sampling)
    x, label = bars(3, 3, 20)
    out = vae(x.repeat(64, 1, 1, 1), label.repeat(64))
    z = (out.code - out.mean) / out.var.sqrt()
    q, rows = out.posterior, torch.arange(192)
    expected = torch.ones(192, 1)
    if sampling == "posterior":
        nu, kappa = q.nu[rows, out.label], q.kappa[rows, out.label]
        expected = (nu / (nu - 2) / kappa)[:, None]
    ratio = (z.square() / expected).mean().item()
    assert ratio == pytest.approx(1, abs=0.15)  # 3072 draws
    assert z.mean().item() == pytest.approx(0, abs=0.1)


def test_vae_evaluation_is_deterministic_and_training_is_not():
    vae = small_vae()
    x, label = bars(3, 3, 20)
    assert not torch.equal(vae(x, label).images, vae(x, label).images)
    vae.eval()
    first, second = vae(x, label), vae(x, label)
    assert torch.equal(first.images, second.images)
    assert torch.equal(first.code, first.mean)


def test_tweak_moves_one_pose_entry_of_the_code():
    vae = small_vae().double()
    x, label = bars(3, 3, 20)
    x = x.double()
    settle(vae, x, label)
    out = vae(x, label)
    tweaked = vae.tweak(x, 5, [0.0, -0.2, 0.4], label)
    assert tweaked.shape == (3, *x.shape)
    torch.testing.assert_close(tweaked[0], out.images)
    moved = out.mean.clone()
    moved[:, 5] += 0.4
    torch.testing.assert_close(tweaked[2], vae.decoder(moved, label))
    assert not torch.allclose(tweaked[0], tweaked[2])
    torch.testing.assert_close(vae.tweak(x, 0, torch.zeros(1))[0], vae(x).images)
    sampled = vae.train()(x, label)
    torch.testing.assert_close(vae.tweak(x, 5, [0.0], label)[0], vae.decoder(sampled.mean, label))


@pytest.mark.parametrize("sampling", ["shortcut", "posterior"])
@pytest.mark.parametrize("precision", ["gamma", "wishart", "full"])
def test_vae_learns_to_reconstruct(sampling, precision):
    vae = small_vae(sampling=sampling, routing_options=dict(prior=Prior(precision=precision)))
    x, label = bars(6, 3, 20)
    optimiser = torch.optim.Adam(vae.parameters(), 1e-2)
    losses = []
    for _ in range(10):
        optimiser.zero_grad()
        loss = vae_loss(x, vae(x, label)).total
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0], losses


@pytest.mark.parametrize("routing", ["em", "dynamic"])
def test_vae_refuses_a_routing_without_posterior(routing):
    message = f"routing must be 'vb', whose posterior a CapsVAE samples from, got '{routing}'"
    with pytest.raises(ValueError, match=message):
        CapsVAE(TINY, routing=routing)
    with pytest.raises(ValueError, match=message):
        CapsVAE(TINY, 2, 5, 32, routing)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda vae, x: small_vae(sampling="gibbs"), "sampling must be one of ('shortcut', 'posterior'), got 'gibbs'"),
        (lambda vae, x: small_vae(filters=2), "filters must be at least 4, got 2"),
        (
            lambda vae, x: vae(x, torch.zeros(3, 1).long()),
            "label must be (n,) = (2,) of int64, got (3, 1) of torch.int64",
        ),
        (lambda vae, x: vae(x, torch.zeros(2)), "label must be (n,) = (2,) of int64, got (2,) of torch.float32"),
        (lambda vae, x: vae.tweak(x, 16, [0.0]), "dim must be a pose entry from 0 to 15, got 16"),
        (lambda vae, x: vae(x, torch.zeros(2).long(), torch.rand(2, 3)), "u must be (n, draws) = (2, 16), got (2, 3)"),
        (lambda vae, x: vae(x, torch.tensor([0, 3])), "label must lie from 0 to 2, got 0 to 3"),
        (lambda vae, x: vae.sample(torch.tensor([3])), "label must lie from 0 to 2, got 3 to 3"),
        (lambda vae, x: vae.sample(torch.tensor([0]), "posterior"), "source must be one of ('class', 'prior'), got"),
    ],
)
def test_vae_refuses_bad_arguments(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call(small_vae(), torch.randn(2, 2, 20, 20))


@pytest.mark.parametrize("sampling", ["shortcut", "posterior"])
def test_uniform_numbers_decide_the_code(sampling):
    """The same numbers give the same code, of the distribution that the posterior has."""
    vae = small_vae(sampling=sampling)
    x, label = bars(3, 3, 20)
    x, label = x.repeat(64, 1, 1, 1), label.repeat(64)
    u = torch.rand(192, vae.draws)
    assert vae.draws == (16 if sampling == "shortcut" else 32)
    out = vae(x, label, u)
    assert torch.equal(out.code, vae(x, label, u).code)
    assert not torch.allclose(out.code, vae(x, label, u.flip(0)).code)
    z = ((out.code - out.mean) / out.var.sqrt()).detach()
    q, rows = out.posterior, torch.arange(192)
    nu, kappa = q.nu[rows, label][:, None].detach(), q.kappa[rows, label][:, None].detach()
    if sampling == "shortcut":
        uniform = scipy.stats.norm.cdf(z)
        torch.testing.assert_close(torch.from_numpy(uniform).float(), u, atol=1e-4, rtol=0)
    else:  # Student's t with nu degrees of freedom
        uniform = scipy.stats.t.cdf(z * kappa.sqrt(), nu)
    assert scipy.stats.kstest(uniform.ravel(), "uniform").pvalue > 1e-3
    on_psi, on_nu = torch.autograd.grad(out.code.square().sum(), (q.psi, q.nu))
    assert on_psi[rows, label].abs().amin() > 0
    assert on_nu[rows, label].abs().amin() > 0


def test_uniform_numbers_need_a_diagonal_precision():
    vae = small_vae(sampling="posterior", routing_options=dict(prior=Prior(precision="full")))
    x, label = bars(3, 3, 20)
    with pytest.raises(ValueError, match="diagonal precision only: give precision='gamma', or no u"):
        vae(x, label, torch.rand(3, 32))


def test_a_trained_decoder_reads_the_pose():
    """Bars of one class stand at several places: only a decoder that reads the pose can tell where."""
    place = torch.arange(24) % 8
    x = torch.zeros(24, 1, 20, 20)
    for image, k in zip(x, place.tolist(), strict=True):
        image[:, 2 * k : 2 * k + 4] = 1
    label = torch.zeros(24, dtype=torch.int64)
    vae = small_vae(in_channels=1, filters=16)
    optimiser = torch.optim.Adam(vae.parameters(), 0.01)
    for _ in range(100):
        optimiser.zero_grad()
        vae_loss(x, vae(x, label), beta=0.1).total.backward()
        optimiser.step()
    with torch.no_grad():
        codes = vae(x, label).mean
        error = (x - vae.decoder(codes, label)).square().mean()
        of_mean_image = (x - x.mean(0)).square().mean()
        of_mean_code = (x - vae.decoder(codes.mean(0).expand_as(codes), label)).square().mean()
    assert error < 0.5 * of_mean_image, (error, of_mean_image)
    assert error < 0.5 * of_mean_code, (error, of_mean_code)


def test_samples_of_a_class_are_decoded_codes_like_those_of_its_images():
    vae = small_vae().eval()
    mixing, centre = torch.randn(16, 16), torch.randn(16)
    labels = torch.arange(4000) % 2
    codes = torch.randn(4000, 16) @ mixing.T + centre
    codes[labels == 1] = torch.randn(2000, 16)
    vae.fit_codes(codes, labels)
    torch.testing.assert_close(vae.code_mean[0], codes[labels == 0].mean(0))
    for j in (0, 1):
        cov = torch.from_numpy(np.cov(codes[labels == j].double().numpy().T, bias=True)).float()
        torch.testing.assert_close(vae.code_root[j] @ vae.code_root[j].T, cov, rtol=1e-3, atol=1e-3)
    assert torch.equal(vae.code_mean[2], torch.zeros(16))  # a class without images keeps the prior
    assert torch.equal(vae.code_root[2], torch.eye(16))
    noise = torch.randn(2, 16, generator=torch.Generator().manual_seed(5))
    label = torch.tensor([0, 1])
    by_hand = torch.stack([vae.code_mean[j] + vae.code_root[j] @ noise[j] for j in (0, 1)])
    drawn = vae.sample(label, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(drawn, vae.decoder(by_hand, label))
    of_prior = vae.sample(label, "prior", torch.Generator().manual_seed(5))
    torch.testing.assert_close(of_prior, vae.decoder(noise, label))
    assert "code_mean" in vae.state_dict()
    assert not any(name.startswith("code") for name, _ in vae.named_parameters())


def test_the_weight_of_the_divergence():
    vae = small_vae().eval()
    x, label = bars(3, 3, 20)
    out = vae(x, label)
    whole, tenth = vae_loss(x, out), vae_loss(x, out, beta=0.1)
    assert (whole.divergence, whole.reconstruction) == (tenth.divergence, tenth.reconstruction)
    torch.testing.assert_close(whole.total, whole.divergence + whole.reconstruction)
    torch.testing.assert_close(tenth.total, 0.1 * tenth.divergence + tenth.reconstruction)
    torch.testing.assert_close(total_loss(torch.tensor(2.0), tenth, eta=0.5), 2 + 0.5 * tenth.total)


def test_the_capsules_of_each_network():
    from vbcaps import CapsNet, ConvNet

    vae, caps = small_vae(), CapsNet(TINY)
    assert capsules_of(vae) is vae.net
    assert capsules_of(caps) is caps
    assert capsules_of(ConvNet(TINY)) is None
    assert (vae.in_channels, vae.num_classes, vae.code_size) == (2, 3, 16)

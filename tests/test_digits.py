"""Networks in a loop of one's own, on scikit-learn's digits: what a newcomer tries first."""

import copy

import pytest
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits

from vbcaps import CapsNet, ConvNet
from vbcaps.kernels.cpu.build import find_compiler
from vbcaps.losses import activation_nll_loss

STEPS = (20, 44, 100)


@pytest.fixture(autouse=True)
def _kernels():
    """The C++ kernels, with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def digits():
    """Images of 28 x 28 and labels: 1400 to train, 397 to test."""
    found = load_digits()
    x = F.interpolate(torch.tensor(found.images, dtype=torch.float32)[:, None], size=28, mode="bilinear")
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = ((x - x.mean()) / x.std())[order], torch.tensor(found.target)[order]
    return x[:1400], y[:1400], x[1400:], y[1400:]


def batches(x, y, steps, size=64):
    random = torch.Generator().manual_seed(0)
    for _ in range(-(-steps * size // len(y)) + 1):
        for index in torch.randperm(len(y), generator=random)[: len(y) // size * size].split(size):
            if steps:
                yield x[index], y[index]
                steps -= 1


def train(net, x, y, steps, loss, look=lambda step: None):
    """A plain loop; ``look`` is called after every step."""
    optimiser = torch.optim.AdamW(net.parameters(), 3e-3)
    for step, (images, labels) in enumerate(batches(x, y, steps), 1):
        value = loss(net(images), labels)
        optimiser.zero_grad()
        value.backward()
        optimiser.step()
        look(step)


@torch.no_grad()
def accuracy(net, x, y, training):
    """The share of right answers by statistics of this batch, or by running ones."""
    net = copy.deepcopy(net).train(training)
    return (net(x).logits.argmax(1) == y).float().mean().item()


def network(routing):
    torch.manual_seed(0)
    return ConvNet((32, 8, 8, 8), 1, 10, 28) if routing == "cnn" else CapsNet((32, 8, 8, 8), 1, 10, 28, routing)


@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("routing", ["vb", "em", "dynamic", "cnn"])
def test_evaluation_is_as_good_as_training_from_the_first_steps_on(digits, routing):
    x, y, x_test, y_test = digits
    net = network(routing)
    found = {}

    def look(step):
        if step in STEPS:
            found[step] = [accuracy(net, x_test, y_test, training) for training in (True, False)]

    train(net, x, y, max(STEPS), lambda out, y: F.cross_entropy(out.logits, y), look)
    for step, (by_batch, by_running) in found.items():
        assert by_running > by_batch - 0.03, step
    assert by_running > (0.85 if routing == "cnn" else 0.94)


@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
def test_the_loss_that_everyone_writes_trains_as_well_as_ours(digits):
    x, y, x_test, y_test = digits
    losses = {
        "cross entropy": lambda out, y: F.cross_entropy(out.logits, y),
        "ours": lambda out, y: activation_nll_loss(out.activations, y),
    }
    found = {}
    for name, loss in losses.items():
        torch.manual_seed(0)
        net = CapsNet((32, 8, 8, 8), 1, 10, 28, logit_scale=name == "cross entropy")
        train(net, x, y, 44, loss)
        found[name] = accuracy(net, x_test, y_test, training=False)
    assert found["cross entropy"] > found["ours"] - 0.01
    assert found["cross entropy"] > 0.95


@pytest.mark.skipif(find_compiler() is None, reason="needs a C++ compiler")
def test_lightning_validates_a_network_as_well_as_it_trains_it(digits, tmp_path):
    lightning = pytest.importorskip("lightning")
    x, y, x_test, y_test = digits

    class Classifier(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = network("vb")
            self.right = []

        def training_step(self, batch, _):
            return F.cross_entropy(self.net(batch[0]).logits, batch[1])

        def validation_step(self, batch, _):
            self.right += (self.net(batch[0]).logits.argmax(1) == batch[1]).tolist()

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), 3e-3)

    model = Classifier()
    data = torch.utils.data
    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, num_sanity_val_steps=0, check_val_every_n_epoch=2, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(
        model,
        data.DataLoader(data.TensorDataset(x, y), 64, shuffle=True, drop_last=True),
        data.DataLoader(data.TensorDataset(x_test, y_test), 397),
    )
    assert len(model.right) == 397
    assert sum(model.right) / 397 > accuracy(model.net, x_test, y_test, training=True) - 0.03

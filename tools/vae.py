"""What does a Capsule-VAE know? Rows for results/vae_*.csv, of which tables.py and docs/vae.md quote.

python tools/vae.py eta [--etas 0 0.001 0.02 0.1 0.3] [--seeds 3] [--epochs 1] [--base vae_mnist_laptop]
python tools/vae.py samples WEIGHTS --reader CNN [--count 1000]
python tools/vae.py entries WEIGHTS
python tools/vae.py code WEIGHTS
python tools/vae.py readout WEIGHTS --cnn CNN
python tools/vae.py picture WEIGHTS [--picture docs/vae.png]

``eta`` trains the base for each weight of the VAE loss and each seed, and measures a tenth of the training images, held
out. ``samples`` has an independent network read samples of every class: the share that it reads as the class asked
for. ``entries`` moves each pose entry of test images from -3 to 3 of its standard deviations in the class, and measures
the greatest change of a pixel, and the greatest in one of six steps. ``code`` compares the spread of the codes of 2,000
training images with their noise. ``readout`` fits the viewpoint and the light of
smallNORB's training images by linear regression, one for each class, on the codes and on the CNN's features, and
measures R^2 on the test images, which have other toys. ``picture`` draws the first test image of each class again,
samples, and the pose entries of the last. WEIGHTS and CNN are what ``vbcaps.load`` takes.
"""

import argparse
import csv
import dataclasses
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import vbcaps
from vbcaps.data import Split
from vbcaps.figures.vae import SPREAD, overview
from vbcaps.models import ConvNet
from vbcaps.training.environment import environment
from vbcaps.training.loop import fit_seeds, pick_device, prepare
from vbcaps.training.recipes import recipe
from vbcaps.training.runfolder import read_metrics
from vbcaps.uncertainty.scores import look
from vbcaps.vae import SOURCES
from vbcaps.weights.decode import vae_of

RESULTS = Path(__file__).parents[1] / "results"
KEPT = ("commit", "device", "torch")


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("measure", choices=list(MEASURES))
    parser.add_argument("weights", nargs="?", help="the Capsule-VAE")
    parser.add_argument("--base", default="vae_mnist_laptop", help="eta: the recipe")
    parser.add_argument("--etas", type=float, nargs="+", default=[0, 0.001, 0.02, 0.1, 0.3])
    parser.add_argument("--seeds", type=int, default=3, help="eta: train this many seeds")
    parser.add_argument("--epochs", type=int, default=1, help="eta: epochs of each training")
    parser.add_argument("--reader", help="samples: the network that reads them")
    parser.add_argument("--count", type=int, default=1000, help="samples: of each class")
    parser.add_argument("--images", type=int, default=20, help="entries: test images of each class")
    parser.add_argument("--cnn", help="readout: the CNN beside the Capsule-VAE")
    parser.add_argument("--picture", type=Path, default=RESULTS.parent / "docs" / "vae.png", help="picture: the file")
    parser.add_argument("--data-folder")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the csv files, to which rows are added")
    arguments = parser.parse_args(words)
    needed = dict(samples="reader", readout="cnn")
    if arguments.measure != "eta" and arguments.weights is None:
        parser.error(f"{arguments.measure} needs WEIGHTS, the Capsule-VAE")
    if (flag := needed.get(arguments.measure)) and getattr(arguments, flag) is None:
        parser.error(f"{arguments.measure} needs --{flag}")
    about = environment(pick_device(arguments.device), 1)
    MEASURES[arguments.measure](arguments, {key: about[key] for key in KEPT})


def eta(arguments: argparse.Namespace, about: dict[str, Any]) -> None:
    """Train with each eta and all seeds at once, and write the errors on held-out images."""
    for weight in arguments.etas:
        one = recipe(arguments.base, epochs=arguments.epochs, eta=weight, validation=0.1, test=False)
        begun = time.time()
        with tempfile.TemporaryDirectory() as folder:
            fit_seeds(one, folder, arguments.seeds, data_folder=arguments.data_folder, device=arguments.device)
            ends = [read_metrics(Path(folder) / f"seed{seed}")[-1] for seed in range(arguments.seeds)]
        columns = ("validation_error", "validation_reconstruction", "classification", "divergence")
        for seed, last in enumerate(ends):
            row = dict(base=arguments.base, eta=weight, seed=seed, epochs=one.epochs)
            row |= {name: f"{last[name]:.5f}" for name in columns} | dict(seconds=f"{time.time() - begun:.0f}")
            append(arguments.out / "vae_eta.csv", row | about)


def samples(arguments: argparse.Namespace, about: dict[str, Any]) -> None:
    """Write the share of samples that the reader takes for the class asked for, and that of test images."""
    model, reader = vbcaps.load(arguments.weights), vbcaps.load(arguments.reader)
    if reader.classes != model.classes or not isinstance(reader.net, ConvNet):
        raise SystemExit(f"vae: the reader must be a CNN that tells {', '.join(model.classes)} apart")
    test = prepare(model.recipe, arguments.data_folder, torch.device("cpu")).test
    rows: dict[str, Callable[[int], Tensor]] = {"test images": lambda j: test.images[test.labels == j]}
    rows |= {
        source: lambda j, source=source: model.sample(j, arguments.count, source=source, seed=j)  # type: ignore[misc]
        for source in SOURCES
    }
    rows |= {"reconstructions": lambda j: model.reconstruct(test.images[test.labels == j])}
    for name, images_of in rows.items():
        right = [(reader.predict(images_of(j)).argmax(1) == j).float() for j in range(model.num_classes)]
        shares, count = torch.stack([one.mean() for one in right]), sum(map(len, right))
        row = dict(weights=model.recipe.name, reader=reader.recipe.name, images=name, count=count)
        row |= dict(read_as_asked=f"{shares.mean():.4f}", worst_class=model.classes[int(shares.argmin())])
        append(arguments.out / "vae_samples.csv", row | dict(its_share=f"{shares.min():.4f}") | about)


def entries(arguments: argparse.Namespace, about: dict[str, Any]) -> None:
    """Write for each pose entry how much and how smoothly it changes the picture."""
    model = vbcaps.load(arguments.weights)
    vae, test = vae_of(model), prepare(model.recipe, arguments.data_folder, torch.device("cpu")).test
    for d in range(vae.code_size):
        changes, steps = [], []
        for j in range(model.num_classes):
            spread = float(vae.code_root[j, d].norm())
            for image in test.images[test.labels == j][: arguments.images]:
                frames = model.tweak(image, d, [k * spread for k in SPREAD], label=j)
                changes.append((frames[-1] - frames[0]).abs().max())
                steps.append(frames.diff(dim=0).abs().max())
        row = dict(weights=model.recipe.name, entry=d, images=len(changes))
        row |= dict(change=f"{torch.stack(changes).mean():.4f}", greatest_step=f"{torch.stack(steps).mean():.4f}")
        append(arguments.out / "vae_entries.csv", row | about)


def code(arguments: argparse.Namespace, about: dict[str, Any]) -> None:
    """Write Psi0 of the class layer, kappa, and how far the codes of a class spread beside their noise."""
    model = vbcaps.load(arguments.weights)
    vae, train = vae_of(model), prepare(model.recipe, arguments.data_folder, torch.device("cpu")).train
    some = train.take(torch.arange(min(2000, len(train.labels))))
    with torch.no_grad():
        outs = [(vae(model.view.test(part.images), part.labels), part.labels) for _, part in by_class(some)]
    kappa = torch.cat([out.posterior.kappa[torch.arange(len(label)), label] for out, label in outs])
    noise = torch.cat([out.var for out, _ in outs]).sqrt()
    row: dict[str, Any] = dict(weights=model.recipe.name, images=len(kappa))
    row |= dict(psi0=f"{(1 / outs[0][0].posterior.prior.inv_Psi0).mean():.2f}", kappa=f"{kappa.mean():.2f}")
    row |= dict(
        spread=f"{torch.stack([out.mean.std(0) for out, _ in outs]).mean():.4f}",
        noise_of_shortcut=f"{noise.mean():.4f}", noise_of_posterior=f"{(noise / kappa[:, None].sqrt()).mean():.4f}",
    )  # fmt: skip
    append(arguments.out / "vae_code.csv", row | about)


def readout(arguments: argparse.Namespace, about: dict[str, Any]) -> None:
    """Write R^2 of linear readouts of viewpoint and light from codes and from the CNN's features."""
    model, cnn = vbcaps.load(arguments.weights), vbcaps.load(arguments.cnn)
    vae_of(model)
    for one in (model, cnn):
        if one.recipe.data is not None or one.recipe.dataset != "smallnorb":
            raise SystemExit(
                "vae: readout needs a Capsule-VAE and a CNN of smallNORB, whose images have a viewpoint; "
                f"{one.name} is of {one.recipe.data or one.recipe.dataset}"
            )
    if not isinstance(cnn.net, ConvNet):
        raise SystemExit(f"vae: --cnn must be a CNN, got {cnn.recipe.network!r}")
    data = prepare(dataclasses.replace(model.recipe, validation=0.0), arguments.data_folder, torch.device("cpu"))
    codes = [torch.cat([model.codes(part.images, label=j) for j, part in by_class(s)]) for s in (data.train, data.test)]
    there = prepare(dataclasses.replace(cnn.recipe, validation=0.0), arguments.data_folder, torch.device("cpu"))
    seen = [torch.cat([features(cnn, part.images) for _, part in by_class(s)]) for s in (there.train, there.test)]
    labels = [s.labels[s.labels.argsort(stable=True)] for s in (data.train, data.test)]
    targets = [torch.cat([viewpoint(part) for _, part in by_class(s)]) for s in (data.train, data.test)]
    for name, one, (train, test) in (("code", model, codes), ("CNN's features", cnn, seen)):
        score = r_squared(train, targets[0], labels[0], test, targets[1], labels[1])
        row = dict(weights=one.recipe.name, readout_of=name, numbers=train.shape[1])
        row |= {what: f"{value:.3f}" for what, value in score.items()}
        append(arguments.out / "vae_readout.csv", row | about)


def picture(arguments: argparse.Namespace, about: dict[str, Any]) -> None:
    """Draw the picture of docs/vae.md."""
    model = vbcaps.load(arguments.weights)
    test = prepare(model.recipe, arguments.data_folder, torch.device("cpu")).test
    first = [int((test.labels == j).nonzero()[0]) for j in range(model.num_classes)]
    print(overview(model, test.images[first], arguments.picture, labels=range(model.num_classes)))


def by_class(split: Split) -> list[tuple[int, Split]]:
    return [(j, split.take(split.labels == j)) for j in split.labels.unique().tolist()]


def features(cnn: vbcaps.Model, images: Tensor) -> Tensor:
    """Return what the CNN's last layer sees, the means of its filters, ``n filters``."""
    return look(cnn, images).features["features"]


VIEWS = dict(azimuth=slice(0, 2), elevation=slice(2, 3), light=slice(3, 9))  # columns of `viewpoint`


def viewpoint(split: Split) -> Tensor:
    """Return sine and cosine of the azimuth, the elevation, and one number for each of the six lights, ``n 9``."""
    assert split.info is not None
    _, elevation, azimuth, light = split.info.T
    angle = torch.deg2rad(10.0 * azimuth)
    one_hot = torch.nn.functional.one_hot(light.long(), 6)
    return torch.cat([angle.sin()[:, None], angle.cos()[:, None], elevation[:, None], one_hot], 1).double()


def r_squared(
    x: Tensor, y: Tensor, label: Tensor, x_test: Tensor, y_test: Tensor, label_test: Tensor
) -> dict[str, float]:
    """Return the share of the variance within classes that linear regressions explain, one for each class."""
    left, whole = torch.zeros(y.shape[1]).double(), torch.zeros(y.shape[1]).double()
    for j in label.unique().tolist():
        mine, tested = label == j, label_test == j
        ones = torch.ones(len(x), 1), torch.ones(len(x_test), 1)
        inputs, tests = (torch.cat([z.double(), one.double()], 1) for z, one in zip((x, x_test), ones, strict=True))
        fitted = torch.linalg.lstsq(inputs[mine], y[mine]).solution
        left += (y_test[tested] - tests[tested] @ fitted).square().sum(0)
        whole += (y_test[tested] - y_test[tested].mean(0)).square().sum(0)
    return {name: float(1 - left[part].sum() / whole[part].sum()) for name, part in VIEWS.items()}


def append(path: Path, row: dict[str, Any]) -> None:
    """Append a row at once, so that a measurement that is cut short keeps the rows that it has."""
    print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        table = csv.DictWriter(file, list(row), lineterminator="\n")
        if new:
            table.writeheader()
        table.writerow(row)


MEASURES = dict(eta=eta, samples=samples, entries=entries, code=code, readout=readout, picture=picture)

if __name__ == "__main__":
    main()

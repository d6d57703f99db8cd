"""Fit a density for each trained network, and write it and the scores of familiar images into its file.

python tools/densities.py [NAME...] [--data-folder FOLDER]

The density is of what knows strangers best among the smaller features of each kind of network: of VB by the pairs for
the choice of tools/shipped.py, of the others by that of tools/uncertainty.py. It is fitted to 4,000 training images,
and its covariance is kept in half precision. Of 2,000 test images the quantiles of every score are kept, so that
`vbcaps.uncertainty.percentiles` can say how strange another image is. The tensors of the network stay the same.
"""

import argparse

import torch
from temperatures import put_into
from uncertainty import TRAIN, some

import vbcaps
from vbcaps.data import FACTS
from vbcaps.training.loop import prepare
from vbcaps.uncertainty import Density, fit_densities, remember_familiar, scores
from vbcaps.vae import capsules_of
from vbcaps.weights.find import weights_file

FAMILIAR = 2000  # test images whose scores are remembered

# By routing: the features, and whether all classes share a covariance.
FEATURES = {
    "vb": ("conv_caps1.m", True),
    "em": ("logits", False),
    "dynamic": ("class_caps.m", True),
    "cnn": ("features", True),
}
# Of this recipe five seeds were measured, and tools/uncertainty.py chose among them: what is best on the mean of the
# shipped networks takes noise for familiar here.
OWN = {"fashion_laptop": ("class_caps.kappa", False)}


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="networks; by default all that are trained")
    parser.add_argument("--data-folder", metavar="FOLDER", help="folder of the datasets")
    arguments = parser.parse_args(words)
    for name in arguments.names or vbcaps.list_models():
        model = vbcaps.load(name)
        data = prepare(model.recipe, arguments.data_folder, torch.device("cpu"))
        train, test = some(data.train, TRAIN), some(data.test, FAMILIAR)
        kind = "cnn" if capsules_of(model.net) is None else model.recipe.routing
        features, tied = OWN.get(name, FEATURES[kind])
        model.densities.clear()
        fit_densities(model, train.images, train.labels, [features], tied=tied)
        model.densities = {one: half(density) for one, density in model.densities.items()}
        remember_familiar(
            model,
            scores(model, test.images),
            f"{len(test.labels):,} test images of {FACTS[model.recipe.dataset].title}",
        )
        put_into(weights_file(name), densities=model.densities, familiar=model.about["familiar"])
        print(f"{name}: a density of {features}, fitted to {len(train.labels):,} training images")


def half(density: Density) -> Density:
    """Return the density with a covariance of half as many bytes, whose scores differ in the fourth digit."""
    return density._replace(whiten=density.whiten.half())


if __name__ == "__main__":
    main()

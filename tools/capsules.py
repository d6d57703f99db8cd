"""Draw how a capsule network came to its answer for one image of its test set.

python tools/capsules.py MODEL [--index 0] [--data-folder FOLDER] [-o capsules.png]

MODEL is a name as in `vbcaps.list_models()`, a run's folder or a weights file. The picture on the front page is that of
test image 45 by a network trained with

    vbcaps train default --dataset mnist --no-flip --epochs 3 --iters 3
"""

import argparse

import torch

import vbcaps
from vbcaps.figures.capsules import capsules
from vbcaps.training.loop import prepare


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--index", type=int, default=0, help="which image of the test set")
    parser.add_argument("--data-folder", metavar="FOLDER", help="where datasets lie, as for `vbcaps train`")
    parser.add_argument("-o", "--out", default="capsules.png", help="the PNG to write")
    arguments = parser.parse_args()
    model = vbcaps.load(arguments.model)
    test = prepare(model.recipe, arguments.data_folder, torch.device("cpu")).test
    truth = model.classes[int(test.labels[arguments.index])]
    print(capsules(model, test.images[arguments.index], arguments.out, truth=truth))


if __name__ == "__main__":
    main()

"""Draw the figure of the front page: how a network of the package routes a test image of the package's sample.

python tools/routing.py [MODEL] [--index 479] [-o docs/routing.png]

MODEL is a name as in `vbcaps.list_models()`, a run's folder or a weights file, of a network for Fashion-MNIST;
fashion_evidence is the one on the front page. No other data are needed. `vbcaps routing` draws any image.
"""

import argparse

import vbcaps
from vbcaps.data.sample import sample
from vbcaps.figures.routing import routing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", nargs="?", default="fashion_evidence")
    parser.add_argument("--index", type=int, default=479, help="which of the 1,000 test images")
    parser.add_argument("-o", "--out", default="docs/routing.png", help="the PNG, PDF or SVG to write")
    arguments = parser.parse_args()
    test = sample().test
    truth = sample().classes[int(test.labels[arguments.index])]
    print(routing(vbcaps.load(arguments.model), test.images[arguments.index], arguments.out, truth=truth))


if __name__ == "__main__":
    main()

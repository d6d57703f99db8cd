"""The figures that `vbcaps figures` draws from results/, by name."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from vbcaps.figures.affnist import affnist
from vbcaps.figures.priors import priors
from vbcaps.figures.routings import curves, iterations
from vbcaps.figures.trust import calibration, damaged, strangers
from vbcaps.figures.votes import votes


class Figure(NamedTuple):
    """A figure of `vbcaps figures`."""

    draw: Callable[[Path, Path], list[Path]]  # from results/ into a folder; returns the PNG files
    help: str


FIGURES: dict[str, Figure] = {
    "curves": Figure(curves, "VB against EM routing: the error by epoch, on four datasets"),
    "priors": Figure(priors, "the error for each pair of priors alpha0 and Psi_0, and for a learned alpha0"),
    "iterations": Figure(iterations, "the error and the time of a step for 1 to 5 routing iterations, VB and EM"),
    "votes": Figure(votes, "how votes gather around class capsules in training, airplane and car"),
    "calibration": Figure(calibration, "reliability before and after the temperature, and the risk of partial answers"),
    "strangers": Figure(strangers, "how well scores tell images of other datasets"),
    "damage": Figure(damaged, "whether uncertainty rises as images are turned, blurred, noisy or hidden"),
    "affnist": Figure(affnist, "from MNIST to affNIST, beside the numbers that the paper prints"),
}

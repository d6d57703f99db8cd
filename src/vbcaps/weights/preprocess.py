"""A network with its preprocessing as one module that can be exported: from images to probabilities.

Axes: n image, c channel, y x pixel.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vbcaps.data import View
from vbcaps.inference import probabilities
from vbcaps.vae import Network, capsules_of


class CentralView(nn.Module):
    """``View.test`` for images of one fixed size, without indices that depend on the number of images.

    Args:
        view: how images become the network's input.
        side: height and width of the images.
    """

    inside: Tensor
    mean: Tensor
    std: Tensor
    low: Tensor
    high: Tensor

    def __init__(self, view: View, side: int):
        super().__init__()
        self.view = view
        corner = (side - view.crop) // 2  # below 0: the image gets a frame
        self.first, self.last = max(corner, 0), min(corner + view.crop, side)
        self.before, self.after = max(-corner, 0), max(corner + view.crop - side, 0)
        frame = [self.before, self.after] * 2
        size = self.last - self.first
        self.register_buffer("inside", F.pad(torch.ones(1, 1, size, size), frame), persistent=False)
        self.register_buffer("mean", torch.tensor(view.mean)[None, :, None, None], persistent=False)
        self.register_buffer("std", torch.tensor(view.std)[None, :, None, None], persistent=False)
        self.register_buffer("low", torch.tensor(view.low)[None, :, None, None], persistent=False)
        self.register_buffer("high", torch.tensor(view.high)[None, :, None, None], persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """Return the network's input ``n c crop crop`` from uint8 images, or floats from 0 to 1, ``n c side side``.

        A network that was trained on images of more than 8 bits takes their values, as floats.
        """
        values = self.values(images)
        mean, std = self.moments(values)
        x = values[:, :, self.first : self.last, self.first : self.last]
        if self.before or self.after:
            x = self.framed(x, mean)
        if self.view.standardise == "none":
            return x
        if self.view.standardise == "crop":
            mean, std = moments(x)
        x = (x - mean) / std.clamp_min(self.view.floor)
        return x * self.inside if self.view.fill == "mean" else x

    def values(self, images: Tensor) -> Tensor:
        """Return images scaled to 0 to 1; those of more than 8 bits have the values of the training images."""
        if self.view.low:
            return (images.float() - self.low) / (self.high - self.low)
        return images if images.is_floating_point() else images.float() / 255

    def moments(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and standard deviation of the dataset or of each whole image."""
        return (self.mean, self.std) if self.view.standardise == "dataset" else moments(values)

    def framed(self, x: Tensor, mean: Tensor) -> Tensor:
        """Return images ``n c y x`` in the frame that the view gives them."""
        edges = (self.before, self.after, self.before, self.after)
        if self.view.fill == "edge":
            return F.pad(x, edges, mode="replicate")
        x = F.pad(x, edges)
        return x + mean * (1 - self.inside) if self.view.fill == "mean" else x


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of each image's channels, ``n c 1 1``."""
    std, mean = torch.std_mean(x, (2, 3), correction=0, keepdim=True)
    return mean, std


class Deployed(nn.Module):
    """Images to probabilities ``n class``, as ``vbcaps.inference.probabilities`` gives them, with preprocessing.

    Args:
        net: the network; of a Capsule-VAE only what classifies.
        view: how images become the network's input.
        temperature: divides the logits.
        side: height and width of the images.
        objects: how many objects the network names in an image.
    """

    def __init__(self, net: Network, view: View, temperature: float, side: int, objects: int = 1):
        super().__init__()
        capsules = capsules_of(net)
        self.net = net if capsules is None else capsules
        self.view, self.temperature, self.objects = CentralView(view, side), temperature, objects

    def forward(self, images: Tensor) -> Tensor:
        """Return the probabilities of uint8 images, or of floats from 0 to 1, ``n c side side``."""
        return probabilities(self.net(self.view(images)), self.temperature, self.objects)

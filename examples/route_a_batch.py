"""Build the paper's network, route a batch with each algorithm, and look at what the posterior knows."""

import argparse
import time

import torch
import torch.nn.functional as F

from vbcaps import CapsNet
from vbcaps.routing import Posterior


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, default=4, help="images in the batch (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of weights and images (default: %(default)s)")
    arguments = parser.parse_args()

    torch.manual_seed(arguments.seed)
    images = torch.randn(arguments.batch, 2, 32, 32)
    labels = torch.randint(5, (arguments.batch,))
    for routing in ("vb", "em", "dynamic"):
        net = CapsNet(arch=(64, 16, 16, 16), in_channels=2, num_classes=5, image_size=32, routing=routing)
        start = time.perf_counter()
        out = net(images)
        loss = F.cross_entropy(out.logits, labels)
        loss.backward()
        seconds = time.perf_counter() - start
        parameters = sum(p.numel() for p in net.parameters())
        print(f"{routing:8s} {parameters:,} parameters, loss {loss:.3f}, forward and backward in {seconds:.2f} s")
        if isinstance(out.posterior, Posterior):
            _, information = out.posterior.kl()
            print("         activations of image 0:", " ".join(f"{a:.2f}" for a in out.activations[0].tolist()))
            print("         nats learned about each class capsule:", " ".join(f"{k:.1f}" for k in information[0]))


if __name__ == "__main__":
    main()

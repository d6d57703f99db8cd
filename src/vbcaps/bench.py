"""How fast a training step is on this machine."""

import platform
import statistics
import time

import torch

import vbcaps
from vbcaps.losses import nll_loss
from vbcaps.recipe import Recipe
from vbcaps.step import TrainStep


def seconds_a_step(recipe: Recipe, channels: int, classes: int, device: torch.device, seconds: float = 5.0) -> float:
    """Forward, backward and Adam on random images that lie on the device: the median over about ``seconds``."""
    torch.manual_seed(0)
    net = recipe.net(channels, classes).to(device)
    optimiser = torch.optim.Adam(net.parameters(), recipe.lr, fused=True)
    fused = recipe.backend != "reference"
    step = TrainStep(net, optimiser, lambda out, y: nll_loss(out.logits, y, on=recipe.loss_on), capture=fused)
    x = torch.randn(recipe.batch, channels, recipe.crop, recipe.crop, device=device)
    y = torch.randint(classes, (recipe.batch,), device=device)
    times: list[float] = []
    step(x, y)  # compiles
    while len(times) < 3 or sum(times) < seconds:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        start = time.perf_counter()
        step(x, y)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def machine(device: torch.device) -> dict[str, str]:
    """Device and versions, to be read beside a speed."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor() or platform.machine()
    return dict(
        device=name + ("" if device.type == "cuda" else f", {torch.get_num_threads()} threads"),
        system=f"{platform.system()} {platform.release()}",
        python=platform.python_version(),
        torch=torch.__version__,
        vbcaps=vbcaps.__version__,
    )

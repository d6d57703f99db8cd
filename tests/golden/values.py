"""Numbers that no refactoring may change: logits of the shipped networks, and losses of short trainings.

    python tests/golden/values.py        write them to values.safetensors beside this file

They were recorded when the C++ kernels began to sum over types in halves of a vector, and to go back through the first
iteration around the last mean. Both changed their last digits.
Rounding differs between processors and compilers, so the file says what it was recorded with (``machine``).
"""

import platform
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
import tiny

import vbcaps
from vbcaps import CapsNet
from vbcaps.kernels.cpu.build import find_compiler
from vbcaps.training.loop import fit

FILE = Path(__file__).with_name("values.safetensors")
BACKENDS, ROUTINGS = ("cpu", "reference"), ("vb", "em", "dynamic")


def machine() -> str:
    """Return what decides the last bits: processor, PyTorch and compiler."""
    try:
        about = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        about = []
    kinds = sorted({line for line in about if line.startswith(("model name", "flags"))})
    compiler = find_compiler()
    version = subprocess.run([*compiler, "--version"], capture_output=True, text=True).stdout if compiler else "none"
    return "\n".join([platform.machine(), *kinds, torch.__version__, version.partition("\n")[0]])


def logits(name: str, backend: str) -> Tensor:
    """Return the logits of a shipped network for three fixed images."""
    model = vbcaps.load(name)
    net, view = model.net, model.view
    for layer in (net.primary_caps, net.conv_caps1, net.conv_caps2, net.class_caps):
        layer.backend = backend
    random = torch.Generator().manual_seed(7)
    images = torch.randint(0, 256, (3, net.in_channels, 48, 48), generator=random, dtype=torch.uint8)
    with torch.no_grad():
        return net(view.test(images)).logits


def losses(routing: str, backend: str) -> Tensor:
    """Return the losses of 20 steps of Adam on images whose class is the height of a bright bar."""
    random = torch.Generator().manual_seed(3)
    x, label = torch.randn(24, 2, 20, 20, generator=random), torch.arange(24) % 3
    for k in range(3):
        x[label == k, :, 6 * k : 6 * k + 6] += 1
    torch.manual_seed(5)
    options = dict(activation="released") if routing == "vb" else {}
    net = CapsNet((8, 4, 4, 4), 2, 3, 20, routing, routing_options=options, logit_scale=True, backend=backend)
    optimiser = torch.optim.Adam(net.parameters(), 3e-3)
    found = []
    for _ in range(20):
        loss = F.cross_entropy(net(x).logits, label)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        found.append(loss.detach())
    return torch.stack(found)


def program(**fields: object) -> Tensor:
    """Return the mean training loss of each epoch of the training program, on the problem of tests/tiny.py."""
    with TemporaryDirectory() as folder, tiny.in_place_of_data():
        fit(tiny.recipe(**fields), folder, device="cpu")
        rows = (Path(folder) / "metrics.csv").read_text().splitlines()[1:]
    return torch.tensor([float(row.split(",")[1]) for row in rows], dtype=torch.float64)


PROGRAMS = {
    "adam": {},
    "muon": dict(optimiser="muon", weight_decay=0.1, ema=0.9, activation="paper"),
    "sgd": dict(optimiser="sgd", loss_on="activations", routing="em", cutout=6, rotate=10.0),
}


def compute() -> dict[str, Tensor]:
    """Return every golden value, by name; with one thread, and without Triton's interpreter."""
    later = ("vae_", "_laptop", "_evidence")  # networks that were not in the package when the values were recorded
    names = [name for name in vbcaps.list_models() if not any(word in name for word in later)]
    found = {f"logits.{name}.{backend}": logits(name, backend) for name in names for backend in BACKENDS}
    found |= {f"losses.{routing}.{backend}": losses(routing, backend) for routing in ROUTINGS for backend in BACKENDS}
    return found | {f"program.{name}": program(**fields) for name, fields in PROGRAMS.items()}


def read() -> tuple[dict[str, Tensor], str]:
    """Return the recorded values, and the machine they were recorded on."""
    with safe_open(FILE, "pt") as file:
        return {name: file.get_tensor(name) for name in file.offset_keys()}, file.metadata()["machine"]


if __name__ == "__main__":
    torch.set_num_threads(1)
    save_file(compute(), FILE, {"machine": machine()})

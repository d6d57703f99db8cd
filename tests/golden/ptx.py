"""What Triton makes of the GPU kernels, without a GPU: their PTX, registers and stack, in the order they are launched.

    python tests/golden/ptx.py       write them to ptx.json beside this file; it takes some minutes

Triton compiles for a GPU that is not there. A driver that only names a target takes the place of the real one, every
launch becomes a compilation, and a layer that runs forward and backward on tensors of the CPU shows which kernels it
launches with which signatures and constants. Names and line numbers are taken out of the PTX, so that kernels, files
and arguments may be renamed and moved, but nothing that a GPU would do may change.
"""

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from vbcaps import Capsules, ClassCaps, ConvCaps, Prior
from vbcaps.kernels.triton import launch, norm

FILE = Path(__file__).with_name("ptx.json")
BATCH = 32


class Driver:
    """A driver that knows which GPU to compile for and nothing else. Its device number is the architecture."""

    def __init__(self, capability: int):
        self.capability = capability

    def get_current_device(self) -> int:
        return self.capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)


def compiled(work: Callable[[], object], capability: int) -> list[Any]:
    """Return the compiled kernels that ``work`` would launch on a GPU of this capability, in order."""
    kernels: list[Any] = []
    run = JITFunction.run

    def compile_only(self: JITFunction, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        kernels.append(run(self, *args, grid=grid, warmup=True, **options))
        return kernels[-1]

    launch.multiprocessors = lambda device: 132  # of an H200
    launch._has_tensor_cores = lambda device: True
    launch.triton_interprets = lambda: True  # tensors of a CPU are taken for a GPU's
    driver.set_active(Driver(capability))
    JITFunction.run = compile_only
    try:
        work()
    finally:
        JITFunction.run = run
    return kernels


def layer_work(layer: ConvCaps, size: int) -> Callable[[], object]:
    """Return a forward and backward pass of a layer over a map of ``size`` by ``size``."""

    def work() -> None:
        a, pose = torch.rand(BATCH, size, size, layer.in_caps), torch.randn(BATCH, size, size, layer.in_caps, 4, 4)
        out = layer.eval()(Capsules(a.requires_grad_(), pose.requires_grad_()))
        (out.logits.sum() + out.poses.square().sum()).backward()

    return work


def norm_work(types: int) -> Callable[[], object]:
    """Return BatchNorm over activations and over poses, forward and backward, with its running statistics."""

    def work() -> None:
        for rows, numbers in ((36, BATCH), (36, 16 * BATCH)):
            x = torch.randn(rows, types, numbers, requires_grad=True)
            y, _, mean, var = norm.batch_norm(x, 1e-5)
            batches = torch.zeros((), dtype=torch.int64)
            norm.keep_statistics(mean.detach(), var.detach(), torch.zeros(types), torch.ones(types), batches, 0.1)
            y.sum().backward()

    return work


VB = dict(prior=Prior(precision="wishart", learn="all"), through="last")
ROUTINGS: dict[str, dict[str, Any]] = {
    "vb": dict(routing="vb"),
    "vb information": dict(routing="vb", routing_options=dict(activation="information", temper=0.25)),
    "vb released": dict(routing="vb", routing_options=dict(activation="released")),
    "vb paper": dict(routing="vb", routing_options=dict(activation="paper")),
    "vb wishart learned last": dict(routing="vb", routing_options=VB),
    "em": dict(routing="em"),
    "dynamic": dict(routing="dynamic"),
}
CONVS, CLASSES = ((16, 16), (8, 16), (16, 32), (32, 32)), ((16, 5), (16, 10), (32, 5), (32, 10))
SOME = ("vb conv 16 to 16", "vb paper class 16 to 5", "em class 16 to 5", "dynamic class 16 to 5", "norm 16")


def cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the name of every layer of the paper's networks, and a pass through it; ``SOME`` of them are for CI."""
    for name, how in ROUTINGS.items():
        for child, parent in CONVS:
            yield f"{name} conv {child} to {parent}", layer_work(ConvCaps(child, parent, 3, backend="triton", **how), 6)
        for child, parent in CLASSES:
            yield f"{name} class {child} to {parent}", layer_work(ClassCaps(child, parent, backend="triton", **how), 4)
    for types in (5, 8, 10, 16, 32):
        yield f"norm {types}", norm_work(types)


def summary(kernel: Any) -> str:
    """Return the checksum of a kernel's PTX without names and lines, and what it takes of registers and stack."""
    ptx = kernel.asm["ptx"]
    (name,) = re.findall(r"\.entry\s+(\w+)", ptx)
    code = ptx.replace(name, "kernel").partition(".section\t.debug")[0]
    lines = (re.sub(r"//.*", "", line).strip() for line in code.splitlines())
    kept = "\n".join(line for line in lines if line and not re.match(r"\.loc|\.file|\$L__(tmp|func_|info)", line))
    return f"{hashlib.sha256(kept.encode()).hexdigest()[:16]} {resources(kernel.asm['cubin'])}"


def resources(cubin: bytes) -> str:
    """Return how many registers a kernel has, and how many bytes of stack, which is where registers are spilled to."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        said = subprocess.run([tool, "--dump-resource-usage", file], check=True, capture_output=True, text=True).stdout
    return " ".join(re.findall(r"(?:REG|STACK|LOCAL):\d+", said))


def compute(capability: int, chosen: Callable[[str], bool]) -> dict[str, list[str]]:
    """Return a summary of every kernel that each chosen case launches."""
    torch.set_num_threads(1)
    return {
        f"sm_{capability} {name}": [summary(kernel) for kernel in compiled(work, capability)]
        for name, work in cases()
        if chosen(name)
    }


def main() -> None:
    """Write every value; with ``--some``, print those of CI as JSON instead."""
    if sys.argv[1:] == ["--some"]:
        print(json.dumps(compute(90, lambda name: name in SOME) | compute(80, lambda name: name in SOME[1:])))
        return
    everything = compute(90, lambda name: True) | compute(80, lambda name: True)
    if sys.argv[1:] == ["--all"]:
        print(json.dumps(everything))
    else:
        FILE.write_text(json.dumps(dict(triton=triton.__version__, kernels=everything), indent=1) + "\n")


if __name__ == "__main__":
    main()

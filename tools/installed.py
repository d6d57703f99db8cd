"""Use the installed package as somebody does for the first time, and print what happened, as JSON.

python tools/installed.py [prediction | routing] [--require-kernels]

`prediction` loads a network that is in the package and classifies four images twice; `routing` calls a capsule layer
twice, with PyTorch imported before. `benchmarks/packages.py` runs both in fresh environments, and the release does for
each wheel.
With --require-kernels it is an error if routing does not run in the compiled kernels of the package.
"""

import argparse
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=list(CALLS), default="prediction")
    parser.add_argument("--require-kernels", action="store_true")
    arguments = parser.parse_args()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = CALLS[arguments.what]()
    found |= about()
    found["warnings"] = [str(warning.message) for warning in caught]
    print(json.dumps(found))
    if arguments.require_kernels and found["kernels"] not in ("avx512", "avx2", "baseline"):
        sys.exit(f"routing does not run in the compiled kernels of the package: {found['kernels']}")


def prediction() -> dict[str, Any]:
    """Return the seconds from nothing to the first probabilities, and the probabilities."""
    begun = time.perf_counter()
    import numpy as np

    import vbcaps

    images = np.random.default_rng(0).integers(0, 256, (4, 28, 28), dtype=np.uint8)
    model = vbcaps.load("fashion_laptop")
    first = model.predict(images)
    seconds = time.perf_counter() - begun
    again = model.predict(images)
    if not (first == again).all() or abs(first.sum(1) - 1).max() > 1e-5:
        sys.exit(f"the probabilities are wrong: {first.tolist()}, and then {again.tolist()}")
    return dict(first_s=seconds, probabilities=first.tolist())


def routing() -> dict[str, Any]:
    """Return the seconds of the first and of the second routing call of a process, and the first one's CPU seconds."""
    import torch

    from vbcaps import Capsules, ConvCaps

    generator = torch.Generator().manual_seed(0)
    caps = Capsules(torch.rand(4, 14, 14, 8, generator=generator), torch.randn(4, 14, 14, 8, 4, 4, generator=generator))
    layer, seconds = ConvCaps(8, 16, kernel_size=3, stride=2), []
    with torch.inference_mode():
        for _ in range(2):
            begun = time.perf_counter(), time.process_time()
            out = layer(caps)
            seconds.append((time.perf_counter() - begun[0], time.process_time() - begun[1]))
    if not out.poses.isfinite().all():
        sys.exit("the poses are not finite")
    return dict(first_s=seconds[0][0], first_cpu_s=seconds[0][1], second_s=seconds[1][0])


def about() -> dict[str, Any]:
    """Return where the package is, what it took, and the instruction set of its kernels or why they do not run."""
    import torch

    import vbcaps
    from vbcaps.kernels.cpu import library

    try:
        kernels = library.best()
    except library.NoLibraryError as error:
        kernels = str(error)
    python, package = ".".join(map(str, sys.version_info[:3])), str(Path(vbcaps.__file__).parent)
    return dict(kernels=kernels, cpu_s=time.process_time(), python=python, torch=torch.__version__, package=package)


CALLS = dict(prediction=prediction, routing=routing)

if __name__ == "__main__":
    main()

"""Run tests of the C++ kernels on a build that watches every access and every operation that C++ leaves undefined.

python tools/sanitize.py            a few tests: every pass, odd sizes, numbers that are not finite
python tools/sanitize.py --all      all tests of the C++ kernels, in minutes
python tools/sanitize.py -k spoils  these

The kernels are compiled by GCC with AddressSanitizer and UndefinedBehaviorSanitizer, which end the process at the first
error and say where it was. Python itself is not watched, so the sanitizers' library is loaded before it.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from vbcaps.kernels.cpu.build import find_compiler

ROOT = Path(__file__).resolve().parents[1]
TESTS = ("tests/kernels/test_cpu.py", "tests/kernels/test_around_cpu.py")
ALL = "not a_package_gives"  # the bits of other builds are not those of one that watches
FEW = "layers_are_within and class and (vb or em) or spoils and inf or exponentials"
WATCH = "-fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer -g -O1"
OPTIONS = dict(ASAN_OPTIONS="detect_leaks=0", UBSAN_OPTIONS="print_stacktrace=1", OMP_NUM_THREADS="1")


def preloaded(compiler: list[str]) -> str:
    """Return the libraries that are loaded before Python, or stop where the compiler has no AddressSanitizer.

    That library looks at exceptions on their way, so it must find the standard library, which throws PyTorch's.
    """
    found = []
    for name in ("libasan.so", "libstdc++.so.6"):
        path = subprocess.run([*compiler, f"-print-file-name={name}"], capture_output=True, text=True).stdout.strip()
        if not Path(path).is_absolute():
            sys.exit(f"{shlex.join(compiler)} has no {name}; set CXX to a GCC that has it")
        found.append(path)
    return " ".join(found)


def run(words: list[str], folder: str) -> int:
    """Run pytest with these arguments on watched kernels, which are built into ``folder``; return its exit status."""
    compiler = find_compiler()
    if compiler is None:
        sys.exit("tools/sanitize.py needs a C++ compiler")
    watching = Path(folder, "c++")  # last, so that its -O1 holds
    watching.write_text(f'#!/bin/sh\nexec {shlex.join(compiler)} "$@" {WATCH}\n')
    watching.chmod(0o755)
    kernels = dict(
        CXX=str(watching),
        VBCAPS_CPU="native",
        VBCAPS_MEMORY="system",
        VBCAPS_CACHE=folder,
        LD_PRELOAD=preloaded(compiler),
    )
    command = [sys.executable, "-P", "-m", "pytest", "-q", "--capture=sys", *words]
    return subprocess.run(command, cwd=ROOT, env=os.environ | OPTIONS | kernels).returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="run all tests of the C++ kernels")
    parser.add_argument("-k", default=FEW, metavar="TESTS", help="run the tests of these names, as pytest selects them")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sys.exit(run([*TESTS, "-k", ALL if arguments.all else arguments.k], folder))


if __name__ == "__main__":
    main()

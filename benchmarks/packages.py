"""Do the packages install, and how long does somebody who has just installed one wait?

python benchmarks/packages.py [--python python3.11 python3.12] [--wheel-only] [--dist FOLDER] [--csv FILE]

Builds the source archive, and from it the wheel; checks both, and installs them into fresh environments:

- the wheel for every Python, with no compiler on the PATH;
- the source archive for the first Python, with a compiler and without one.

`tools/installed.py` then uses each of them. A row has the seconds of the first process that predicts after the
installation, from its start to its end; the milliseconds of the first and second routing call of a process; and CPU
seconds, on which other processes have little influence, of both and of `vbcaps --help`. It is an error if a wheel's
first prediction takes more than 3 s, or its first routing call more than 0.3 s, in the fastest of three processes, and
by its CPU seconds, too.

The environments are made in the folder for temporary files (TMPDIR), and removed again. pip takes the versions of
constraints.txt, where it takes them from otherwise: its configuration, its cache.
"""

import argparse
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from measure import processor, record

from vbcaps.kernels.cpu import build

ROOT = Path(__file__).parents[1]
PYTHONS = ("python3.11", "python3.12", "python3.13")
LARGEST = 8_000_000  # bytes of a wheel
LIMITS = dict(prediction=3.0, routing=0.3)  # seconds that the first one may take
TIMES = 3  # processes, of which the fastest must keep to these


class Environment(NamedTuple):
    """A fresh virtual environment: its folder, and the variables that its processes get."""

    folder: Path
    variables: dict[str, str]

    def run(self, *words: str | Path) -> str:
        """Run a program of the environment in an empty folder, and return what it prints."""
        empty = self.folder / "empty"
        empty.mkdir(exist_ok=True)
        return run([self.folder / "bin" / words[0], *words[1:]], empty, self.variables)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", nargs="+", help=f"default: those of {', '.join(PYTHONS)} that are on the PATH")
    parser.add_argument("--wheel-only", action="store_true", help="do not install the source archive")
    parser.add_argument("--dist", type=Path, help="keep wheel and source archive in this folder")
    parser.add_argument("--csv", help="append to this file")
    arguments = parser.parse_args()
    pythons = arguments.python or [name for name in PYTHONS if runs(name)]
    with tempfile.TemporaryDirectory(prefix="packages-") as made:
        archive, wheel = built(Path(made))
        check(archive, wheel)
        if arguments.dist:
            arguments.dist.mkdir(parents=True, exist_ok=True)
            for package in (archive, wheel):
                shutil.copy(package, arguments.dist)
        cases = [(python, wheel, False) for python in pythons]
        if not arguments.wheel_only:
            cases += [(pythons[0], archive, True), (pythons[0], archive, False)]
        answers = [tried(*case, Path(made), arguments.csv) for case in cases]
    worst = max(abs(a - b) for answer in answers for a, b in zip(answer, answers[0], strict=True))
    if worst > 1e-4:
        sys.exit(f"the packages disagree: probabilities differ by up to {worst:.2g}")
    print(f"all {len(cases)} environments agree: probabilities differ by at most {worst:.1g}")


def runs(python: str) -> bool:
    found = shutil.which(python)
    return found is not None and subprocess.run([found, "-P", "-c", ""], capture_output=True).returncode == 0


def built(made: Path) -> tuple[Path, Path]:
    """Build the packages from what git knows, so that nothing of an earlier build gets in."""
    source, dist = made / "source", made / "dist"
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in filter(None, run(listed, ROOT).split("\0")):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    variables = {**os.environ, "VBCAPS_REQUIRE_KERNELS": "1"}
    run([sys.executable, "-P", "-m", "build", "--outdir", dist, source], made, variables)
    (archive,), (wheel,) = dist.glob("*.tar.gz"), dist.glob("*.whl")
    return archive, wheel


def check(archive: Path, wheel: Path) -> None:
    """Check names, sizes and contents, and how PyPI would show the packages."""
    if not re.fullmatch(r"vbcaps-[\w.]+-py3-none-(?!any)\w+\.whl", wheel.name):
        sys.exit(f"{wheel.name}: the tag must be py3-none and a platform")
    if wheel.stat().st_size > LARGEST:
        sys.exit(f"{wheel.name}: has {wheel.stat().st_size} bytes, more than {LARGEST}")
    with zipfile.ZipFile(wheel) as file:
        libraries = {Path(name).stem.removeprefix("kernels_") for name in file.namelist() if name.endswith(".so")}
    if libraries != {*build.variants()}:
        sys.exit(f"{wheel.name}: has the kernels {sorted(libraries)}, expected {sorted(build.variants())}")
    with tarfile.open(archive) as packed:
        if binary := [name for name in packed.getnames() if name.endswith((".so", ".pyc"))]:
            sys.exit(f"{archive.name}: has {binary[0]}, which is no source")
    run([sys.executable, "-P", "-m", "twine", "check", "--strict", archive, wheel], ROOT)
    run([sys.executable, "-P", "-m", "check_wheel_contents", wheel], ROOT)
    for package in (archive, wheel):
        print(f"{package.name}: {package.stat().st_size / 1e6:.2f} MB")


def tried(python: str, package: Path, compiler: bool, made: Path, path: str | None) -> list[float]:
    """Install a package into a fresh environment, use it, record a row, and return the probabilities."""
    with tempfile.TemporaryDirectory(dir=made) as folder:
        begun = time.perf_counter()
        environment = installed(python, package, compiler, Path(folder))
        install = time.perf_counter() - begun
        environment.run("vbcaps", "--version")
        before = cpu_seconds()
        environment.run("vbcaps", "--help")
        helped = cpu_seconds() - before
        kinds = {what: [used(environment, what) for _ in range(TIMES)] for what in ("prediction", "routing")}
    first, call = kinds["prediction"][0], kinds["routing"][0]
    kind = "wheel" if package.suffix == ".whl" else "sdist"
    slow = [text for text in first["warnings"] if "20 times slower" in text]
    compiled = kind == "wheel" or compiler
    where = f"{package.name} on Python {first['python']}, {'with' if compiler else 'without'} a compiler"
    if compiled != (first["kernels"] in build.variants()) or len(slow) != (0 if compiled else 1):
        sys.exit(f"{where}: kernels {first['kernels']!r}, {len(slow)} warnings that routing is slow")
    waits = dict(prediction=min(min(one["process_s"], one["cpu_s"]) for one in kinds["prediction"]))
    waits |= dict(routing=min(min(one["first_s"], one["first_cpu_s"]) for one in kinds["routing"]))
    for what, limit in LIMITS.items():
        if kind == "wheel" and waits[what] > limit:
            sys.exit(f"{where}: the first {what} takes {waits[what]:.2f} s, more than {limit} s")
    row = dict(
        package=kind, size_MB=f"{package.stat().st_size / 1e6:.2f}", python=first["python"], with_torch=first["torch"],
        compiler="yes" if compiler else "no", kernels=first["kernels"] if compiled else "none", warnings=len(slow),
        install_s=f"{install:.0f}", prediction_s=f"{first['process_s']:.2f}", cpu_s=f"{first['cpu_s']:.2f}",
        fastest_s=f"{min(one['process_s'] for one in kinds['prediction']):.2f}",
        first_call_ms=f"{1e3 * call['first_s']:.0f}", first_call_cpu_ms=f"{1e3 * call['first_cpu_s']:.0f}",
        second_call_ms=f"{1e3 * call['second_s']:.0f}", help_cpu_s=f"{helped:.2f}",
        load=f"{os.getloadavg()[0]:.1f}", processor=processor(),
    )  # fmt: skip
    record(row, torch.device("cpu"), path)
    return [p for image in first["probabilities"] for p in image]


def installed(python: str, package: Path, compiler: bool, folder: Path) -> Environment:
    """Make a virtual environment with a package in it."""
    run([python, "-P", "-m", "venv", folder / "env"], folder)
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("VBCAPS_", "PYTHON", "CXX"))}
    kept |= dict(PIP_CACHE_DIR=run([sys.executable, "-P", "-m", "pip", "cache", "dir"], folder).strip())
    programs = str(folder / "env" / "bin")
    kept |= dict(XDG_CACHE_HOME=str(folder / "cache"), TMPDIR=str(folder))
    kept["PATH"] = os.pathsep.join([programs, os.environ["PATH"]]) if compiler else programs
    environment = Environment(folder / "env", kept)
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    constraints = folder / "constraints.txt"  # without Triton's version, which PyTorch for CUDA chooses itself
    constraints.write_text("\n".join(line for line in pinned if not line.startswith("triton==")))
    environment.run("python", "-P", "-m", "pip", "install", "--quiet", "-c", constraints, package)
    environment.run("python", "-P", "-m", "pip", "check")
    return environment


def used(environment: Environment, what: str) -> dict[str, Any]:
    """Run tools/installed.py, and return what it found and how long the process took."""
    begun = time.perf_counter()
    found = json.loads(environment.run("python", ROOT / "tools" / "installed.py", what))
    found["process_s"] = time.perf_counter() - begun
    if not Path(found["package"]).is_relative_to(environment.folder.resolve()):
        sys.exit(f"{environment.folder} uses the package in {found['package']}")
    return found


def cpu_seconds() -> float:
    """Return the CPU seconds of all processes that were started here and have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return ended.ru_utime + ended.ru_stime


def run(command: Sequence[str | Path], folder: Path, variables: Mapping[str, str] | None = None) -> str:
    """Run a program and return what it prints; if it fails, show all that it said."""
    done = subprocess.run([str(word) for word in command], cwd=folder, env=variables, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


if __name__ == "__main__":
    main()

"""What wheel and source archive hold. `scripts/packages` builds and installs the real ones, which takes minutes."""

import importlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
import zlib
from pathlib import Path

import pytest

import vbcaps
from vbcaps.kernels.cpu import build

ROOT = Path(__file__).parents[1]
CPU = Path("src/vbcaps/kernels/cpu")
LARGEST = 8_000_000  # bytes of a wheel
KERNELS = 500_000  # of them for libraries

KERNEL = """
#if defined(__AVX512F__)
extern "C" int in_NAME() { return 512; }
#elif defined(__AVX2__)
extern "C" int in_NAME() { return 2; }
#else
extern "C" int in_NAME() { return 1; }
#endif
"""

pytest.importorskip("setuptools", minversion="77")


@pytest.fixture
def checkout(tmp_path):
    """A copy of what setuptools reads, with kernels that compile in no time, and one network in each folder."""
    here = tmp_path / "source"
    package = here / "src" / "vbcaps"
    (package / "weights").mkdir(parents=True)
    (here / CPU).mkdir(parents=True)
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "src/vbcaps/__init__.py", "src/vbcaps/py.typed"):
        shutil.copy(ROOT / name, here / name)
    shutil.copy(ROOT / CPU / "build.py", here / CPU)
    for name in (*build.SOURCES, *build.HEADERS):
        (here / CPU / name).write_text(KERNEL.replace("NAME", Path(name).stem))
    (package / "weights" / "inside.safetensors").write_bytes(b"inside")
    (package / "weights" / "published.json").write_text("{}")
    (package / "weights" / "notes.txt").touch()
    (here / "weights").mkdir()
    (here / "weights" / "outside.safetensors").write_bytes(b"outside")
    return here


def make(checkout, what, **environment):
    """Build a wheel or a source archive; return its path and the names in it."""
    code = f"from setuptools import build_meta as b; print(b.build_{what}('..'))"
    run = [sys.executable, "-c", code]
    release = ("VBCAPS_REQUIRE_KERNELS", "CIBUILDWHEEL", "GITHUB_REF_TYPE")
    kept = {name: value for name, value in os.environ.items() if name not in release}
    done = subprocess.run(run, cwd=checkout, capture_output=True, text=True, env=kept | environment)
    if done.returncode:
        raise RuntimeError(done.stdout + done.stderr)
    path = checkout.parent / done.stdout.splitlines()[-1]
    if what == "wheel":
        with zipfile.ZipFile(path) as file:
            return path, file.namelist()
    with tarfile.open(path) as file:
        return path, [name.partition("/")[2] for name in file.getnames()]


@pytest.mark.skipif(build.find_compiler() is None, reason="needs a C++ compiler")
def test_a_wheel_holds_kernels_for_each_instruction_set_and_is_for_any_python(checkout):
    path, names = make(checkout, "wheel", VBCAPS_REQUIRE_KERNELS="1")
    assert "-py3-none-" in path.name
    assert not path.name.endswith("-any.whl")
    libraries = sorted(name for name in names if name.endswith(".so"))
    assert libraries == sorted(f"vbcaps/kernels/cpu/kernels_{variant}.so" for variant in build.variants())
    held = [name for name in names if "weights/" in name]
    assert sorted(held) == ["vbcaps/weights/inside.safetensors", "vbcaps/weights/published.json"]
    assert "vbcaps/py.typed" in names


def test_without_a_compiler_the_package_is_built_without_kernels_for_any_platform(checkout):
    nothing = dict(PATH=str(checkout / "no-such-folder"), CXX="")
    path, names = make(checkout, "wheel", **nothing)
    assert "vbcaps/__init__.py" in names
    assert not any(name.endswith(".so") for name in names)
    assert path.name.endswith("-py3-none-any.whl")  # not the name of a wheel with kernels
    with zipfile.ZipFile(path) as wheel:
        (about,) = (name for name in names if name.endswith(".dist-info/WHEEL"))
        assert {b"Root-Is-Purelib: true", b"Tag: py3-none-any"} <= {*wheel.read(about).splitlines()}


@pytest.mark.parametrize(
    "environment", [dict(VBCAPS_REQUIRE_KERNELS="1"), dict(CIBUILDWHEEL="1"), dict(GITHUB_REF_TYPE="tag")]
)
def test_a_release_is_not_built_without_kernels(checkout, environment):
    nothing = dict(PATH=str(checkout / "no-such-folder"), CXX="")
    with pytest.raises(RuntimeError, match=r"there is no C\+\+ compiler"):
        make(checkout, "wheel", **nothing, **environment)
    if "VBCAPS_REQUIRE_KERNELS" not in environment:
        make(checkout, "wheel", **nothing, **environment, VBCAPS_REQUIRE_KERNELS="0")


def test_a_source_archive_has_all_that_a_wheel_is_built_from(checkout):
    _, names = make(checkout, "sdist")
    for name in (*build.SOURCES, *build.HEADERS, "build.py"):
        assert (CPU / name).as_posix() in names
    assert {"setup.py", "pyproject.toml", "src/vbcaps/weights/inside.safetensors"} <= {*names}
    assert not any("outside" in name for name in names)


@pytest.mark.skipif(build.find_compiler() is None, reason="needs a C++ compiler")
def test_packages_are_checked(checkout, monkeypatch):
    """What `scripts/packages` checks before it installs anything."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    packages = importlib.import_module("packages")
    pytest.importorskip("twine")
    pytest.importorskip("check_wheel_contents")
    (wheel, _), (archive, _) = make(checkout, "wheel"), make(checkout, "sdist")
    packages.check(archive, wheel)
    monkeypatch.setattr(packages, "LARGEST", 1000)
    with pytest.raises(SystemExit, match="more than 1000"):
        packages.check(archive, wheel)
    with pytest.raises(SystemExit, match="py3-none and a platform"):
        packages.check(archive, wheel.rename(wheel.with_name("vbcaps-0.2.0-py3-none-any.whl")))


def test_what_ci_runs_is_there():
    files = [*(ROOT / ".github").rglob("*.*"), ROOT / "pyproject.toml"]
    named = {name for path in files for name in re.findall(r"(?:scripts|tools|src|\.ci)/[\w./]+\w", path.read_text())}
    assert {".ci/run", "scripts/packages", "tools/published.py", "tools/installed.py"} <= named
    assert not [name for name in named if not (ROOT / name).exists()]


def test_the_citation_is_of_this_version():
    assert f"\nversion: {vbcaps.__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_a_wheel_stays_small():
    """An estimate, which compresses what the package holds as a wheel does."""
    package = ROOT / "src" / "vbcaps"
    files = (path for path in package.rglob("*") if path.is_file() and path.suffix not in (".so", ".pyc"))
    assert sum(len(zlib.compress(path.read_bytes(), 1)) for path in files) + KERNELS < LARGEST

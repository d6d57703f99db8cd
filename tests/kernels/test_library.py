"""Which library of kernels is loaded: for the processor, by name, and where none was built from the sources."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vbcaps.kernels.cpu import build, library
from vbcaps.kernels.cpu.build import NoLibraryError

pytestmark = pytest.mark.skipif(build.find_compiler() is None, reason="needs a C++ compiler")


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """Small libraries as a package has them, which say of which instruction set they are, and their source."""
    folder = tmp_path_factory.mktemp("package")
    small = folder / "small.cpp"
    small.write_text(
        "#if defined(__AVX512VL__)\n#define LANES 4\n#elif defined(__AVX2__)\n#define LANES 2\n#else\n#define LANES 1\n"
        '#endif\nextern "C" {\nint lanes() { return LANES; }\n'
        "int sum(int n) {\n  int s = 0;\n#pragma omp parallel for reduction(+ : s) num_threads(2)\n"
        "  for (int k = 0; k < n; k++) s += k;\n  return s;\n}\n}\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "SOURCES", (str(small), "processor.cpp"))
        patch.setattr(build, "HEADERS", ())
        for variant in build.variants():
            build.build_variant(variant, folder / library.file_of(variant).name)
    return folder


@pytest.fixture
def package(built, monkeypatch, tmp_path):
    """A package with these libraries that nothing was loaded from yet."""
    here = tmp_path / "package"
    shutil.copytree(built, here)
    monkeypatch.setattr(build, "SOURCES", (str(here / "small.cpp"), "processor.cpp"))
    monkeypatch.setattr(build, "HEADERS", ())
    monkeypatch.setattr(library, "FOLDER", here)
    monkeypatch.setenv("VBCAPS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("VBCAPS_CPU", raising=False)
    forget(monkeypatch)
    return here


def forget(monkeypatch):
    monkeypatch.setattr(library, "_library", library.functools.cache(library._library.__wrapped__))


LANES = {"avx512": 4, "avx2": 2, "baseline": 1}


def test_the_best_that_the_processor_supports_is_loaded_and_nothing_is_compiled(package, monkeypatch, tmp_path):
    def refuse():
        raise AssertionError("looked for a compiler")

    monkeypatch.setattr(build, "find_compiler", refuse)
    assert library.library().lanes() == LANES[library.supported()[0]]
    assert library.library().sum(10) == 45  # its threads are those of PyTorch's runtime
    assert not (tmp_path / "cache").exists()


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="needs Linux's description of the processor")
def test_the_processor_is_asked_what_linux_says_too(package):
    flags = set(Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split())
    assert library.supported() == [variant for variant in build.variants() if flags.issuperset(build.VARIANTS[variant])]


@pytest.mark.parametrize("variant", build.variants())
def test_another_library_is_loaded_by_name(variant, package, monkeypatch):
    monkeypatch.setenv("VBCAPS_CPU", variant)
    if variant in library.supported():
        assert library.library().lanes() == LANES[variant]
    monkeypatch.setattr(library, "_supports", lambda probe, name: name == "baseline")
    forget(monkeypatch)
    if variant == "baseline":
        assert library.library().lanes() == 1
    else:
        with pytest.raises(
            ValueError, match=f"VBCAPS_CPU={variant}, but this processor does not have the instructions"
        ):
            library.library()


def test_a_processor_with_less_gets_less(package, monkeypatch):
    monkeypatch.setattr(library, "_supports", lambda probe, name: name == "baseline")
    assert library.library().lanes() == 1


def test_an_unknown_name_is_an_error(package, monkeypatch):
    monkeypatch.setenv("VBCAPS_CPU", "avx1024")
    with pytest.raises(ValueError, match=r"VBCAPS_CPU must be .*baseline or native, got 'avx1024'"):
        library.why_no_library()


@pytest.mark.parametrize("what", ["edited", "missing", "damaged"])
def test_where_no_library_is_of_the_sources_they_are_compiled(what, package, monkeypatch, tmp_path):
    if what == "edited":
        (package / "small.cpp").write_text((package / "small.cpp").read_text().replace("LANES;", "10 + LANES;"))
    for variant in build.variants():
        if what == "missing":
            (package / library.file_of(variant).name).unlink()
        elif what == "damaged":
            (package / library.file_of(variant).name).write_bytes(b"not a library")
    assert library.library().lanes() == LANES[library.supported()[0]] + 10 * (what == "edited")
    assert len(list((tmp_path / "cache" / "kernels").iterdir())) >= 1
    forget(monkeypatch)
    monkeypatch.setattr(build, "find_compiler", lambda: None)
    said = {"edited": "other sources", "missing": "without kernels_baseline.so", "damaged": "cannot be loaded"}[what]
    assert said in library.why_no_library()
    assert "there is no C++ compiler" in library.why_no_library()


def test_native_is_compiled_whatever_the_package_has(package, monkeypatch, tmp_path):
    monkeypatch.setenv("VBCAPS_CPU", "native")
    assert library.library().lanes() == LANES[library.supported()[0]]
    assert len(list((tmp_path / "cache" / "kernels").iterdir())) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere libraries are linked otherwise")
def test_a_package_brings_no_openmp_runtime(built):
    """A second runtime beside PyTorch's would have its own threads."""
    if "__clang__" in build._about(build.find_compiler()):
        pytest.skip("Clang's calls need Clang's runtime")
    for variant in build.variants():
        content = (built / library.file_of(variant).name).read_bytes()
        assert b"GOMP_parallel" in content
        assert b"libgomp" not in content
    alone = f"import ctypes; ctypes.CDLL({str(built / library.file_of('baseline').name)!r})"
    done = subprocess.run([sys.executable, "-c", alone], capture_output=True, text=True)
    assert "undefined symbol: " in done.stderr
    subprocess.run([sys.executable, "-c", f"import torch; {alone}"], check=True)


def test_every_function_that_is_called_is_exported():
    """Windows needs their names."""
    names = {*build.exported()}
    assert {"lanes", "moments", "grad_votes", "vb_parent", "em_grad_parent", "sources", "has_avx512"} <= names
    assert all(hasattr(library.library(), name) for name in names)


def test_a_compiler_that_fails_is_quoted(monkeypatch, tmp_path):
    monkeypatch.setattr(build, "find_compiler", lambda: ["false"])
    with pytest.raises(NoLibraryError, match="false failed"):
        build.build_variant("baseline", tmp_path / "it.so")

"""Build the C++ kernels for each instruction set into the package; everything else is in pyproject.toml.

Without a compiler the package installs all the same, as a wheel for any platform, and routing runs on the reference,
which says so once. `VBCAPS_REQUIRE_KERNELS=1` makes this an error. It is the default of a release build, which
cibuildwheel makes, or a tag; `VBCAPS_REQUIRE_KERNELS=0` allows a release without kernels.
"""

import importlib.util
import os
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

CPU = Path("src/vbcaps/kernels/cpu")


def module_of(path):
    """Return the module in a file, without its package, which needs PyTorch."""
    spec = importlib.util.spec_from_file_location(f"_{path.stem}", Path(__file__).parent / path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


kernels = module_of(CPU / "build.py")


class BuildKernels(build_ext):
    """Compile with the flags of kernels/cpu/build.py alone, not with those that Python was compiled with."""

    def get_ext_filename(self, name):
        return f"{name.replace('.', os.sep)}.so"

    def build_extension(self, ext):
        path = Path(self.get_ext_fullpath(ext.name))
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            kernels.build_variant(ext.name.rpartition("_")[2], path)
        except kernels.NoLibraryError as error:
            raise CompileError(str(error)) from error


class PlatformWheel(bdist_wheel):
    """A wheel for every Python: ctypes loads the kernels, which know nothing of Python.

    It is for one platform, unless it has no kernels: a mirror or a cache must not give such a wheel for one that has.
    """

    def get_tag(self):
        built = Path(self.get_finalized_command("build_ext").build_lib)
        self.root_is_pure = not any(built.glob("vbcaps/kernels/cpu/kernels_*.so"))
        return "py3", "none", "any" if self.root_is_pure else super().get_tag()[2]


release = "CIBUILDWHEEL" in os.environ or os.environ.get("GITHUB_REF_TYPE") == "tag"
required = os.environ.get("VBCAPS_REQUIRE_KERNELS", "1" if release else "0") == "1"
setup(
    cmdclass=dict(build_ext=BuildKernels, bdist_wheel=PlatformWheel),
    ext_modules=[
        Extension(
            f"vbcaps.kernels.cpu.kernels_{variant}",
            [(CPU / source).as_posix() for source in kernels.SOURCES],
            depends=[(CPU / header).as_posix() for header in kernels.HEADERS],
            optional=not required,
        )
        for variant in kernels.variants()
    ],
)

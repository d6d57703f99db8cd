"""Build the C++ kernels for each instruction set into the package; everything else is in pyproject.toml.

Without a compiler the package installs all the same, and routing runs on the reference, which says so once.
`VBCAPS_REQUIRE_KERNELS=1`, which the release sets, makes this an error.
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
    """A wheel for one platform and every Python: ctypes loads the kernels, which know nothing of Python."""

    def get_tag(self):
        return "py3", "none", super().get_tag()[2]


setup(
    cmdclass=dict(build_ext=BuildKernels, bdist_wheel=PlatformWheel),
    ext_modules=[
        Extension(
            f"vbcaps.kernels.cpu.kernels_{variant}",
            [(CPU / source).as_posix() for source in kernels.SOURCES],
            depends=[(CPU / header).as_posix() for header in kernels.HEADERS],
            optional=os.environ.get("VBCAPS_REQUIRE_KERNELS") != "1",
        )
        for variant in kernels.variants()
    ],
)

"""Without a CUDA device Triton's kernels run in its interpreter, which it must know before it is imported."""

import functools
import os
import sys
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"

    import triton.language as tl
    from triton.runtime import interpreter

    # The interpreter readies Triton's language again for every function that a kernel calls, which takes most of its
    # time. Once for each kernel is enough, if it is for all of the language.
    ready, language = interpreter._patch_lang, SimpleNamespace(__globals__={"tl": tl, "core": tl.core})
    interpreter._patch_lang = lambda fn: ready(language)
    interpreter.InterpretedFunction.__call__ = lambda self, *args, **kwargs: self.rewrite()(*args, **kwargs)


SERVED: Counter[str] = Counter()  # how many routing calls of this process each backend served


def pytest_configure():
    """Count routing calls, so that the report says whether tests ran the kernels that users run."""
    import vbcaps.kernels as kernels

    backend_for = kernels.backend_for

    @functools.wraps(backend_for)
    def counted(*args, **options):
        run = backend_for(*args, **options)
        if not torch.compiler.is_compiling():
            SERVED["reference" if run is None else run.name] += 1
        return run

    kernels.backend_for = counted


def pytest_terminal_summary(terminalreporter):
    if SERVED:
        served = ", ".join(f"{name} {count:,}" for name, count in SERVED.most_common())
        terminalreporter.write_line(f"routing calls served in this process: {served}")


@pytest.fixture(scope="module", autouse=True)
def datasets_are_put_back():
    """``tiny.in_place_of_data`` that is undone in the wrong order would train the tests after it on other images."""
    yield
    if loop := sys.modules.get("vbcaps.training.loop"):
        assert loop.load_dataset is sys.modules["vbcaps.data"].load_dataset

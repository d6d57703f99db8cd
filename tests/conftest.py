"""Without a CUDA device Triton's kernels run in its interpreter, which it must know before it is imported."""

import os
import sys
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


@pytest.fixture(scope="module", autouse=True)
def datasets_are_put_back():
    """``tiny.in_place_of_data`` that is undone in the wrong order would train the tests after it on other images."""
    yield
    if loop := sys.modules.get("vbcaps.training.loop"):
        assert loop.load_dataset is sys.modules["vbcaps.data"].load_dataset

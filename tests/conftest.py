"""Without a CUDA device Triton's kernels run in its interpreter, which it must know before it is imported."""

import os
from types import SimpleNamespace

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

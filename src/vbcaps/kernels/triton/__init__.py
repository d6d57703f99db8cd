"""The kernels for GPUs. This file imports no Triton, so that it can be asked where there is none."""

import os
from collections.abc import Callable
from typing import Any


def constant(question: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a question whose answer ``torch.compile`` may take for a constant.

    ``torch.compiler.assume_constant_result`` sets the same mark, but imports the compiler for it, which takes 0.7
    seconds that whoever does not compile would wait.
    """
    question._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return question


@constant
def triton_interprets() -> bool:
    """Return whether Triton's kernels run on a CPU, in its interpreter."""
    return os.environ.get("TRITON_INTERPRET") == "1"

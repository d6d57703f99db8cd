"""The kernels for GPUs. This file does not import Triton, so it also works where Triton is not installed."""

import os
from collections.abc import Callable
from typing import Any


def constant(question: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a function whose result ``torch.compile`` may treat as a constant.

    ``torch.compiler.assume_constant_result`` sets the same mark, but it imports the compiler, which takes 0.7 seconds
    even in programs that compile nothing.
    """
    question._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return question


@constant
def triton_interprets() -> bool:
    """Return whether Triton kernels run in Triton's interpreter, on the CPU."""
    return os.environ.get("TRITON_INTERPRET") == "1"

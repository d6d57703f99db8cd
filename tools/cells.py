"""Cells and tables in Markdown."""

import math
import statistics
from collections.abc import Iterable, Sequence


def spread(shares: Sequence[float]) -> str:
    """Return mean ± standard deviation in %, or "failed" if one of the runs did not finish."""
    if any(map(math.isnan, shares)):
        return "failed"
    if len(shares) < 2:
        return f"{100 * shares[0]:.2f}" if shares else "none"
    return f"{100 * statistics.mean(shares):.2f} ± {100 * statistics.stdev(shares):.2f}"


def low_to_high(numbers: set[int]) -> str:
    if not numbers:
        return "-"
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def table(head: str, rows: Iterable[Sequence[str]]) -> str:
    lines = [head.split(" | "), ["---"] * len(head.split(" | ")), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)

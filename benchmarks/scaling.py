"""Is the cost of a training step linear in iterations, positions, types and images, with no cliff at odd sizes?

python benchmarks/scaling.py [--sweep iterations image types batch] [--device cuda] [--csv benchmarks/scaling.csv]

Each row changes one size of {64,16,16,16,5} at 32x32, batch 32, 3 iterations. `linear_ms` is the time of the row if
cost were proportional to its units: routing iterations, votes (a layer has one for each parent and child in its field)
or images. A ratio below one shows a fixed cost that is spread over more units; a ratio above one is worse than linear.
`marginal_ns` is the cost of each unit more than in the row before; if cost is linear, it is the same in every row.
Every run measures the base.
"""

import argparse
import os
from typing import NamedTuple

import torch
from measure import Measured, compile_ahead, measure, record, the_device
from train_step import Case, make_call

BASE = Case("64,16,16,16,5", "vb", 3, 32, 32)


class Sweep(NamedTuple):
    unit: str
    values: tuple[int, ...]


SWEEPS = dict(
    iterations=Sweep("iteration", (1, 2, 3, 4, 5)),
    image=Sweep("vote", (32, 64, 96)),
    types=Sweep("vote", (8, 16, 32, 64)),
    batch=Sweep("image", (31, 32, 33, 64, 127, 128)),
)


def changed(base: Case, sweep: str, value: int) -> Case:
    if sweep == "types":
        filters, *_, classes = base.network.split(",")
        return base._replace(network=",".join([filters, *[str(value)] * 3, classes]))
    return base._replace(**{"iters" if sweep == "iterations" else sweep: value})  # type: ignore[arg-type]


def votes(case: Case) -> int:
    """Of one image, in all capsule layers of `CapsNet`."""
    _, d1, d2, d3, classes = map(int, case.network.split(","))
    primary = (case.image - 5) // 2 + 1
    first = (primary - 3) // 2 + 1
    second = first - 2
    return 9 * (first**2 * d1 * d2 + second**2 * d2 * d3) + second**2 * d3 * classes


def units(case: Case, sweep: str) -> int:
    return {"iteration": case.iters, "vote": votes(case), "image": case.batch}[SWEEPS[sweep].unit]


def row(sweep: str, value: int, case: Case, base: Case, before: Case | None, found: dict[Case, Measured]) -> dict:
    ours, count = found[case], units(case, sweep)
    linear = found[base].ms * count / units(base, sweep)
    marginal = ""
    if before is not None:
        marginal = f"{1e6 * (ours.ms - found[before].ms) / (count - units(before, sweep)):.4g}"
    ms, low, high = ours.cells
    return dict(
        sweep=sweep, value=value, **case._asdict(), units=count, unit=SWEEPS[sweep].unit, linear_ms=f"{linear:.3f}",
        ours_ms=ms, ours_low=low, ours_high=high, ratio=f"{ours.ms / linear:.2f}",
        ns_per_unit=f"{1e6 * ours.ms / count:.4g}", marginal_ns=marginal, ours_GB=ours.memory,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", nargs="+", choices=tuple(SWEEPS), default=list(SWEEPS))
    parser.add_argument("--values", type=int, nargs="+", help="instead of a sweep's own")
    parser.add_argument("--routing", default=BASE.routing, choices=("vb", "em"))
    parser.add_argument("--arch", default=BASE.network, help="of the base, as F,d1,d2,d3,classes")
    parser.add_argument("--batch", type=int, default=BASE.batch, help="of the base")
    parser.add_argument("--seconds", type=float, default=0.4, help="of repeats, for each measurement")
    parser.add_argument("--ahead", type=int, default=min(16, os.cpu_count() or 1), help="processes that compile ahead")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--csv", help="append to this file")
    arguments = parser.parse_args()
    device = the_device(arguments.device)
    torch.backends.cudnn.benchmark = True

    base = BASE._replace(network=arguments.arch, routing=arguments.routing, batch=arguments.batch)
    todo = [(s, v, changed(base, s, v)) for s in arguments.sweep for v in arguments.values or SWEEPS[s].values]
    if device.type == "cuda" and arguments.ahead > 1:
        script = os.path.join(os.path.dirname(__file__), "train_step.py")
        longest_first = sorted({base, *(case for *_, case in todo)}, key=lambda case: -case.iters)
        compile_ahead(script, [case.flags for case in longest_first], arguments.ahead)

    found = {base: measure(make_call(base, "training", "ours", device), device, arguments.seconds)}
    last: tuple[str, Case | None] = ("", None)
    for sweep, value, case in todo:
        if case not in found:
            found[case] = measure(make_call(case, "training", "ours", device), device, arguments.seconds)
        before = last[1] if last[0] == sweep else None
        record(row(sweep, value, case, base, before, found), device, arguments.csv)
        last = (sweep, case)


if __name__ == "__main__":
    main()

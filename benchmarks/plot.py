"""The README's picture: a training step's time and memory against the batch, from the rows of train_step.py.

python benchmarks/plot.py [--csv benchmarks/steps.csv] [--to benchmarks/speed.svg]

For each series and batch the last row counts that has the network named here and the device of our last row. Series
without such a row are left out.
"""

import argparse
import csv
import math
from pathlib import Path
from typing import NamedTuple

NETWORK = "64,16,16,16,5"
HERE = Path(__file__).parent

# The authors' released PyTorch code (2020), whose stem is one convolution where ours has three: 3 iterations, 32x32x2
# images, one NVIDIA H200; milliseconds and peak GB by batch. Recorded in this project's issue "Speed: fused routing on
# the GPU and a fast path on the CPU"; no script here measures them.
RELEASED = {
    "64,16,16,16,5": {32: (31.8, 2.9), 128: (96.5, 11.7)},
    "64,16,32,32,5": {32: (65.1, 7.9), 128: (227.0, 31.5)},
}

NAMES = dict(
    released="authors' released code",
    reference="reference, eager",
    compiled="reference, torch.compile",
    ours="vbcaps, fused",
)
# Middle greys and colours, on no background: they read on white and on black.
INK = "#79828d"
LOOKS = dict(released=("#a8792a", "s"), reference=("#8a8fa3", "o"), compiled=("#4a8fd9", "D"), ours=("#e0573a", "o"))

Series = dict[int, tuple[float, float]]  # batch to milliseconds and gigabytes


class Found(NamedTuple):
    series: dict[str, Series]
    device: str
    commit: str


def read(path: Path, network: str = NETWORK) -> Found:
    with open(path, newline="") as file:
        wanted = dict(network=network, routing="vb", iters="3", image="32", mode="training")
        rows = [row for row in csv.DictReader(file) if all(row[key] == value for key, value in wanted.items())]
    if not rows:
        raise SystemExit(f"{path} has no row of a training step of {network}")
    device, commit = rows[-1]["device"], rows[-1]["commit"]
    series: dict[str, Series] = {name: {} for name in NAMES}
    if "H200" in device:
        series["released"] = RELEASED.get(network, {})
    for row in rows:
        if row["device"] == device:
            for name, who in ((row["peer"], "peer"), ("ours", "ours")):
                if row[f"{who}_ms"]:
                    point = float(row[f"{who}_ms"]), float(row[f"{who}_GB"] or "nan")
                    series[name][int(row["batch"])] = point
    return Found({name: dict(sorted(points.items())) for name, points in series.items() if points}, device, commit)


def draw(found: Found, network: str, to: Path) -> None:
    import matplotlib

    matplotlib.use("svg" if to.suffix == ".svg" else "agg")
    import matplotlib.pyplot as plt

    matplotlib.rcParams.update({
        "font.size": 10, "text.color": INK, "axes.edgecolor": INK, "axes.labelcolor": INK, "xtick.color": INK,
        "ytick.color": INK, "xtick.labelcolor": INK, "ytick.labelcolor": INK, "svg.hashsalt": "vbcaps",
    })  # fmt: skip
    batches = sorted({batch for points in found.series.values() for batch in points})
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.7))
    for axis, which, label in ((axes[0], 0, "milliseconds"), (axes[1], 1, "peak memory, GB")):
        for name, points in found.series.items():
            values = {batch: point[which] for batch, point in points.items() if not math.isnan(point[which])}
            colour, marker = LOOKS[name]
            x = [batches.index(batch) for batch in values]
            style = dict(color=colour, marker=marker, markersize=5, linewidth=2.2 if name == "ours" else 1.4)
            axis.plot(x, list(values.values()), label=NAMES[name], zorder=3 if name == "ours" else 2, **style)
            if name == "ours":
                for at, value in zip(x, values.values(), strict=True):
                    axis.annotate(
                        f"{float(f'{value:.2g}'):g}",
                        (at, value),
                        (0, -13),
                        textcoords="offset points",
                        ha="center",
                        color=colour,
                    )
        axis.set_yscale("log")
        axis.minorticks_off()
        axis.margins(x=0.08, y=0.14)
        axis.set_xticks(range(len(batches)), [str(batch) for batch in batches])
        axis.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_xlabel("batch")
        axis.set_title(label, fontsize=10, loc="left")
        axis.grid(axis="y", color=INK, alpha=0.25, linewidth=0.6)
        axis.spines[["top", "right"]].set_visible(False)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="upper center", ncols=len(labels), frameon=False, bbox_to_anchor=(0.5, 0.94))
    title = f"One training step of {{{network}}}, 32x32, 3 iterations of VB routing, {found.device}"
    figure.suptitle(title, fontsize=11, y=0.985)
    figure.tight_layout(rect=(0, 0, 1, 0.92))
    metadata = {"Date": None} if to.suffix == ".svg" else None
    figure.savefig(to, transparent=True, dpi=160, metadata=metadata)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, default=HERE / "steps.csv")
    parser.add_argument("--to", type=Path, default=HERE / "speed.svg", help=".svg or .png")
    parser.add_argument("--arch", default=NETWORK, help="the network, as F,d1,d2,d3,classes")
    arguments = parser.parse_args()
    found = read(arguments.csv, arguments.arch)
    draw(found, arguments.arch, arguments.to)
    for name, points in found.series.items():
        print(f"{NAMES[name]:28s}", "  ".join(f"batch {b}: {ms:g} ms, {GB:g} GB" for b, (ms, GB) in points.items()))
    print(f"{arguments.to}, of commit {found.commit} on {found.device}")


if __name__ == "__main__":
    main()

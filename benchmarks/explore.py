"""How long after a slider moves is the new picture there? Measured in the browser.

python benchmarks/explore.py [--moves 60] [--csv benchmarks/explore.csv]

The script serves the explorer, opens it in a headless Chromium, moves the slider that rotates the image, and takes the
time from the event to the paint after which the new picture, probabilities and scores are shown, and to the one after
which the routing panel is shown, too. Each move waits for the one before it. With --csv rows are added to a table.
"""

import argparse
import os
import statistics
import sys
from pathlib import Path

import torch
from measure import record

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))
from browser import chromium, missing, serving, visit

from vbcaps.explore.networks import Networks

NETWORKS = (
    "fashion_laptop",
    "fashion",
    "svhn_small",
)  # 28x28 with three equal networks beside it, 32x32, 32x32 in colour

MOVE = """
const [value, names, done] = arguments;
const slider = document.querySelector("input[name=rotate]");
const begun = performance.now();
slider.value = value;
slider.dispatchEvent(new Event("input", { bubbles: true }));
const wanted = window.explorer.sequence;
const times = {};
const check = () => {
  for (const name of names) {
    if (!(name in times) && Number(document.body.dataset[name]) >= wanted) times[name] = performance.now() - begun;
  }
  if (Object.keys(times).length === names.length) done(names.map((name) => times[name]));
  else setTimeout(check, 1);
};
check();
"""


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--moves", type=int, default=60, help="moves of the slider for each network")
    parser.add_argument("--networks", nargs="+", default=list(NETWORKS), help="networks of the package")
    parser.add_argument("--csv", help="the table to which rows are added")
    arguments = parser.parse_args(words)
    if reason := missing():
        raise SystemExit(f"explore: {reason}")
    for name in arguments.networks:
        with serving(Networks()) as address, chromium() as driver:
            visit(driver, address, f"#model={name}&sample=21")
            degrees = [1 + (37 * k) % 90 for k in range(arguments.moves)]
            times = [driver.execute_async_script(MOVE, value, ["shown", "routed"]) for value in degrees]
        row: dict[str, object] = dict(network=name, moves=len(times), cores=os.cpu_count())
        for what, each in zip(("picture", "routing"), zip(*times, strict=True), strict=True):
            row |= {f"{what}_ms": f"{statistics.median(each):.0f}", f"{what}_p90_ms": f"{quantile(each):.0f}"}
        record(row | load(), torch.device("cpu"), arguments.csv)


def load() -> dict[str, str]:
    """Return how many programs ran in the last minute; the browser and the server are two of them."""
    return dict(load=f"{os.getloadavg()[0]:.1f}")


def quantile(each: tuple[float, ...]) -> float:
    """Return the time that nine of ten moves take at most."""
    return statistics.quantiles(each, n=10, method="inclusive")[-1]


if __name__ == "__main__":
    main()

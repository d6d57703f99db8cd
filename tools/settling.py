"""Draw docs/figures/settling.png, and make the tables of docs/settling.md, from results/agreement_*.csv alone.

python tools/settling.py [--out docs/figures]

`tools/agreement.py` trains the networks and measures them.
"""

import argparse
import csv
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from cells import table

from vbcaps.figures.run import GREY, label_axes, new_figure, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "results", ROOT / "docs" / "settling.md"
Row = dict[str, str]
END = "<!-- end of results -->"
DIM, PRIOR = 16, dict(alpha0=1.0, nu0=17.0, psi0=1.0)  # what a row leaves empty is the default
STIFF = 100.0  # nu0 from which on the votes of one image hardly move the precision
WORKS = 0.2  # error as trained up to which a network is drawn
NAMES = {"paper": "printed", "em": "EM", "dynamic": "Dynamic", "cnn": "CNN"}

HEAD = "rule | t | E[λ] (ν₀) | as trained | with 4 | with 6 | with 10 | most votes | sharp | by the image"
# The rows of the first table: rule, softness, nu0, psi0, alpha0 (None: the default) and iterations in training.
Setting = tuple[str, float | None, float | None, float | None, float | None, int]
CHOSEN: tuple[Setting, ...] = (
    ("agreement", None, None, None, None, 1),
    ("dynamic", None, None, None, None, 3),
    ("em", None, None, None, None, 3),
    ("paper", 1, None, None, None, 3),
    ("released", 1, None, None, None, 3),
    ("information", 1, None, None, None, 3),
    ("agreement", 1, None, None, None, 3),
    ("agreement", 1, 1e3, 0.03, None, 3),
    ("agreement", 1, 1e3, 0.03, 1e3, 3),
    ("agreement", 1 / 4, None, None, None, 3),
    ("agreement", 1 / 16, None, None, None, 3),
    ("paper", 1 / 16, None, None, None, 3),
    ("agreement", 1 / 4, 1e3, 0.01, None, 3),
    ("agreement", 1 / 4, 1e3, 0.03, None, 3),
    ("agreement", 1 / 4, 1e3, 0.1, None, 3),
    ("information", 1 / 4, 1e3, 0.03, None, 3),
    ("information", 1 / 4, 1e3, 0.1, None, 3),
    ("cnn", None, None, None, None, 3),
)
OF_RECIPE: Setting = ("agreement", 1 / 4, 1e3, 0.03, None, 3)  # that of the recipe ``default``
FULL_HEAD = "rule | t | E[λ] (ν₀) | as trained | with 4 | with 6 | with 10 | most votes | tightest | sharp"
GAIN_HEAD = "E[λ] (ν₀, α₀) | t = 1 | t = 1/4 | t = 1/16"
GAIN_PRIORS: tuple[dict[str, float], ...] = (dict(), dict(nu0=1e3, psi0=0.03), dict(nu0=1e3, psi0=0.03, alpha0=1e3))
GAIN_VOTES = 10.0

HARD, SOFT, SETTLED = "#d55e00", "#56b4e9", "#1a365d"  # by softness and prior; also apart in grey
MARKS = dict(agreement="o", information="^", released="s", paper="X", em="D", dynamic="P")
BAND = 0.02  # a rise of the error that 1,000 images hardly tell from none


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures", metavar="FOLDER")
    arguments = parser.parse_args(words)
    print(draw(small(RESULTS), arguments.out / "settling.png"))
    PAGE.write_text(with_tables(PAGE.read_text(), RESULTS))


def read(file: Path) -> list[Row]:
    """Return the rows of a file."""
    with open(file, newline="") as opened:
        return list(csv.DictReader(opened))


def small(results: Path) -> list[Row]:
    """Return the rows of the small networks, those with stiff priors last."""
    return [row for stage in ("first", "strong") for row in read(results / f"agreement_{stage}.csv")]


def value(row: Row, name: str) -> float:
    """Return a field of the prior, its default where the row has none."""
    return float(row.get(name) or PRIOR[name])


def rule_of(row: Row) -> str:
    """Return what decides in a network: the rule of its activation, or else its routing, or "cnn"."""
    return row.get("activation") or row.get("routing") or row.get("network") or "vb"


def the_row(rows: Iterable[Row], setting: Setting) -> Row:
    """Return the one row of a setting."""
    rule, t, nu0, psi0, alpha0, iters = setting
    given = dict(nu0=nu0, psi0=psi0, alpha0=alpha0)
    prior = PRIOR | {name: x for name, x in given.items() if x is not None}
    found = [
        row
        for row in rows
        if rule_of(row) == rule
        and int(row["iters"]) == iters
        and (t is None or float(row["temper"] or 1) == t)
        and all(value(row, name) == x for name, x in prior.items())
    ]
    if len(found) != 1:
        names = "rule, t, nu0, psi0, alpha0, iters"
        raise ValueError(f"one row must have the setting {setting} ({names}), {len(found)} have")
    return found[0]


def said_of(row: Row) -> list[str]:
    """Return the cells that say what a network is: rule, softness and prior."""
    rule = rule_of(row)
    name = NAMES.get(rule, rule)
    if row["iters"] == "1":
        return [f"{name}, one iteration", "", prior_of(row)]
    if not row["activation"]:
        return [name, "", ""]
    return [name, softness(float(row["temper"] or 1)), prior_of(row)]


def prior_of(row: Row) -> str:
    nu0 = value(row, "nu0")
    of_types = "" if value(row, "alpha0") == PRIOR["alpha0"] else f", α₀ = {value(row, 'alpha0'):g}"
    return f"{nu0 * value(row, 'psi0'):g} ({nu0:g}{of_types})"


def softness(t: float) -> str:
    return "1" if t == 1 else f"1/{round(1 / t)}"


def percent(row: Row, name: str, digits: int = 0) -> str:
    """Return a share in %, or nothing where it was not measured."""
    return f"{100 * float(row[name]):.{digits}f}" if row.get(name) else ""


def errors_of(row: Row) -> list[str]:
    return [percent(row, name, 1) for name in ("error", "error_4", "error_6", "error_10")]


def cells_of(row: Row) -> list[str]:
    """Return the cells of a small network; with even shares all classes have equally many votes."""
    most = "" if row["iters"] == "1" else percent(row, "most_votes")
    sharp = [f"{abs(float(row[name])) * 100:.1f}" if row[name] else "" for name in ("sharpness", "information")]
    return [*said_of(row), *errors_of(row), most, *sharp]


def full_cells(row: Row) -> list[str]:
    """Return the cells of a full-size network."""
    said = said_of(row)
    said[0] += ", learned Ψ₀" if row["learn"] else ""
    said[0] += f", weight decay {row['weight_decay']}" if row["weight_decay"] else ""
    most = "" if row["iters"] == "1" else percent(row, "most_votes")
    return [*said, *errors_of(row), most, percent(row, "tightest"), percent(row, "sharpness", 1)]


def gain(votes: float, t: float, alpha0: float = 1.0, kappa0: float = 1.0, nu0: float = 17.0) -> float:
    """Return how many votes one more vote brings a parent in the next iteration, with even shares and equal votes."""
    of_pi, of_precision = (
        float(torch.polygamma(1, torch.tensor(x, dtype=torch.float64))) for x in (alpha0 + votes, (nu0 + votes) / 2)
    )
    return t * votes * (of_pi + DIM / 4 * of_precision + DIM / 2 / (kappa0 + votes) ** 2)


def gain_cells(prior: dict[str, float]) -> list[str]:
    """Return the gain of a prior at each softness."""
    p = PRIOR | prior
    name = f"{p['nu0'] * p['psi0']:g} ({p['nu0']:g}, {p['alpha0']:g})"
    return [name, *(f"{gain(GAIN_VOTES, t, p['alpha0'], nu0=p['nu0']):.2f}" for t in (1, 1 / 4, 1 / 16))]


def with_tables(page: str, results: Path) -> str:
    """Return the page with its tables between their marks."""
    rows = small(results)
    full = [row | dict(iters=row["iters"] or "3") for row in read(results / "agreement_full_size.csv")]
    made = dict(
        gain=table(GAIN_HEAD, map(gain_cells, GAIN_PRIORS)),
        small=table(HEAD, (cells_of(the_row(rows, one)) for one in CHOSEN)),
        full=table(FULL_HEAD, map(full_cells, sorted(full, key=lambda row: float(row["error"])))),
    )
    for name, text in made.items():
        begin = f"<!-- results: made by tools/settling.py, {name} -->"
        before, rest = page.split(begin)
        page = f"{before}{begin}\n\n{text}\n\n{END}{rest.split(END, 1)[1]}"
    return page


def drawn(rows: Iterable[Row]) -> list[Row]:
    """Return the capsule networks that were trained with three iterations and learned their task."""
    of_three = [row for row in rows if row["iters"] == "3" and row["sharpness"]]
    return [row for row in of_three if float(row["error"]) <= WORKS]


def kind(row: Row) -> tuple[str, str]:
    """Return the colour of a network, and what the colour means."""
    if not row["activation"]:
        return GREY, "EM and Dynamic routing"
    if float(row["temper"]) == 1:
        return HARD, "hard: t = 1, Algorithm 1"
    if value(row, "nu0") < STIFF:
        return SOFT, "soft: t = 1/4 or 1/16"
    return SETTLED, "soft with a stiff prior: t = 1/4"


def draw(rows: list[Row], path: Path) -> Path:
    """Draw how much the error rises with ten iterations against how sharp routing is, a mark for each network."""
    figure = new_figure(8.6, 5.4)
    axes = figure.subplots()
    axes.axhspan(-BAND * 100, BAND * 100, color="#e2e8f0", lw=0, zorder=0)
    axes.text(96, 0.08, "settles", ha="right", va="bottom", color=GREY, fontsize=10)
    for row in drawn(rows):
        colour, _ = kind(row)
        x, y = 100 * float(row["sharpness"]), 100 * (float(row["error_10"]) - float(row["error"]))
        area = 36 if row["temper"] == "0.0625" else 72
        axes.scatter(x, y, area, color=colour, marker=MARKS[rule_of(row)], edgecolor="white", linewidth=0.7, zorder=3)
        if rule_of(row) in ("em", "dynamic"):
            axes.annotate(NAMES[rule_of(row)], (x, y), (7, 5), textcoords="offset points", color=GREY, fontsize=10)
    point_at_recipe(axes, rows)
    axes.set_yscale("symlog", linthresh=2, linscale=0.8)
    axes.set(xlim=(0, 98), ylim=(-1.2, 110))
    axes.set_yticks([0, 1, 2, 5, 10, 20, 50, 100], ["0", "+1", "+2", "+5", "+10", "+20", "+50", "+100"])
    axes.minorticks_off()
    title = "Routing settles where it is nearly even, or soft with a stiff prior"
    rise = "error with 10 iterations at test time\nminus error with 3, as trained (points)"
    label_axes(axes, title, "sharpness of routing in the class layer, %", rise)
    add_legends(axes, rows)
    return save(figure, path)


def point_at_recipe(axes: "Axes", rows: list[Row]) -> None:
    """Name the setting of the recipe ``default``."""
    row = the_row(rows, OF_RECIPE)
    place = 100 * float(row["sharpness"]), 100 * (float(row["error_10"]) - float(row["error"]))
    arrow = dict(arrowstyle="-", color=SETTLED, lw=1)
    axes.annotate("recipe default", place, (38, -0.75), color=SETTLED, fontsize=10, va="center", arrowprops=arrow)


def add_legends(axes: "Axes", rows: list[Row]) -> None:
    """Say below the axes what colours and marks mean."""
    from matplotlib.lines import Line2D

    def mark(colour: str, shape: str, label: str) -> Line2D:
        return Line2D([], [], color=colour, marker=shape, ls="", ms=8, markeredgecolor="white", label=label)

    found = dict(kind(row)[::-1] for row in drawn(rows) if row["activation"])
    colours = {label: colour for each in (HARD, SOFT, SETTLED) for label, colour in found.items() if colour == each}
    first = axes.legend(
        handles=[mark(colour, "o", label) for label, colour in colours.items()],
        loc="upper center", bbox_to_anchor=(0.46, -0.14), ncols=3, frameon=False, fontsize=9.5, handletextpad=0.2,
    )  # fmt: skip
    axes.add_artist(first)
    shapes = [mark(GREY, MARKS[rule], f"{NAMES.get(rule, rule)} rule") for rule in list(MARKS)[:4]]
    axes.legend(
        handles=shapes, loc="upper center", bbox_to_anchor=(0.46, -0.2), ncols=4, frameon=False, fontsize=9.5,
        handletextpad=0.2,
    )  # fmt: skip


if __name__ == "__main__":
    main()

"""The tables of results/README.md on uncertainty: from results/temperatures.csv and results/uncertainty.csv alone."""

import csv
import statistics
from collections.abc import Sequence
from pathlib import Path

from cells import table
from held_out import read_rows
from recorded import flags

from vbcaps.figures.trust import KINDS, NAMES, PLAIN, Measures, compared, of_posterior, read_measures, said
from vbcaps.training.files import read_json
from vbcaps.training.runfolder import read_recipe

MEMBERS = (1, 3, 5)
AIM = 0.01  # the calibration error that each shipped network should have at most


def on_uncertainty(results: Path) -> list[str]:
    """Return the sections on uncertainty that have rows."""
    sections = [temperatures(results / "temperatures.csv")] if (results / "temperatures.csv").exists() else []
    if (results / "uncertainty.csv").exists():
        measures = read_measures(results)
        sections += [calibration(measures), errors(measures), strangers(measures), viewpoints(measures)]
        sections += [damage(measures)]
        sections += [evidence(read_rows(results / "uncertainty.csv"), errors_by_name(results))]
    return sections


def several(values: Sequence[float], digits: int = 1, factor: float = 100) -> str:
    """Return mean ± standard deviation, or the only value; empty where there is none."""
    if not values:
        return ""
    scaled = [factor * value for value in values]
    if len(scaled) == 1:
        return f"{scaled[0]:.{digits}f}"
    return f"{statistics.mean(scaled):.{digits}f} ± {statistics.stdev(scaled):.{digits}f}"


def temperatures(path: Path) -> str:
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    cells = []
    for name in dict.fromkeys(row["network"] for row in rows):
        both = [row for row in rows if row["network"] == name]
        cells.append(
            [
                f"`{name}`",
                " / ".join(f"{float(row['temperature']):.2f}" for row in both),
                *(
                    " / ".join(f"{100 * float(row[field]):.2f}" for row in both)
                    for field in ("ece_before", "ece", "adaptive_ece")
                ),
                " / ".join(f"{float(row['nll_before']):.3f} → {float(row['nll']):.3f}" for row in both),
                f"{int(both[0]['images']):,}",
            ]
        )
    missed = [
        f"`{name}` ({100 * error:.2f})"
        for name in dict.fromkeys(row["network"] for row in rows)
        if (error := statistics.mean(float(row["ece"]) for row in rows if row["network"] == name)) > AIM
    ]
    said = f"""\
Most shipped networks have seen all training images. A temperature is therefore fitted on one half of the test images
and judged on the other, then the other way round; the two numbers of a cell are these two, and the weights files have
the first temperature. A network with one number held a tenth of the training images out: its temperature was fitted
there and is judged on all test images. Expected calibration errors (15 bins) are in %. Made by
`python tools/temperatures.py --write`.

The aim is at most {100 * AIM:g} for each network, of two numbers their mean; {len(missed)} miss it: \
{", ".join(missed) or "none"}."""
    head = "network | temperature | ECE before | ECE | adaptive ECE | NLL before → after | images judged"
    return f"## Calibration of the shipped networks\n\n{said}\n\n{table(head, cells)}\n"


def rows_of(measures: Measures) -> list[tuple[str, str, int, str]]:
    """Return dataset, kind of network, members and label of each row: single networks, then ensembles."""
    return [
        (dataset, kind, members, f"{members} x {name}" if members > 1 else name)
        for dataset in ("fashion", "mnist", "smallnorb", "svhn", "cifar10")
        for members in MEMBERS
        for kind, name in KINDS.items()
        if measures.values(
            dataset, kind, test="calibration", measure="ece", score="softmax with temperature", ensemble=members
        )
    ]


def calibration(measures: Measures) -> str:
    after, samples = "softmax with temperature", "samples of the posterior with temperature"
    columns: list[tuple[str, str, float, int]] = [  # measure, score, factor, digits
        ("error", "softmax", 100, 1), ("ece", "softmax", 100, 2), ("ece", after, 100, 2),
        ("nll", "softmax", 1, 3), ("nll", after, 1, 3), ("nll", samples, 1, 3),
    ]  # fmt: skip
    cells = []
    for dataset, kind, members, label in rows_of(measures):
        found = [
            several(
                measures.values(dataset, kind, test="calibration", measure=measure, score=score, ensemble=members),
                digits,
                factor,
            )
            for measure, score, factor, digits in columns
        ]
        cells.append([NAMES[dataset], label, *found])
    said = """\
Laptop twins of the recipes, on 2,000 test images: mean ± standard deviation over seeds. Temperatures are fitted on the
held-out tenth of the training images (of smallNORB, on held-out toys). `samples` averages over 32 samples of the class
layer's posterior, with a temperature of its own."""
    head = "dataset | network | error, % | ECE, % | with temperature | NLL | with temperature | NLL, samples"
    return f"## Calibration, laptop scale\n\n{said}\n\n{table(head, cells)}\n"


def errors(measures: Measures) -> str:
    cells = []
    for dataset, kind, members, label in rows_of(measures):
        own = {
            row.score for row in measures.rows if row.test == "errors" and row.recipe.startswith(f"{dataset}{kind}_")
        }
        at = dict(test="errors", measure="auroc", ensemble=members)
        found = {
            score: values
            for score in own
            if (values := measures.values(dataset, kind, score=score, **at))  # type: ignore[arg-type]
        }
        posterior = {s: v for s, v in found.items() if of_posterior(s) and not s.startswith("density")}
        best = max(posterior, key=lambda score: statistics.mean(posterior[score])) if posterior else ""
        area = measures.values(
            dataset, kind, test="errors", measure="area_under_risk_coverage", score="max_softmax", ensemble=members
        )
        cells.append(
            [
                NAMES[dataset], label, several(found.get("max_softmax", []), 1), several(found.get("energy", []), 1),
                f"{several(posterior[best], 1)} ({best.replace('_', ' ')})" if best else "", several(area, 4, 1),
            ]
        )  # fmt: skip
    said = """\
How well scores find errors, AUROC in %, and the area under the risk-coverage curve by maximum softmax. The posterior's
score is the best one on these test images, which flatters it."""
    head = "dataset | network | maximum softmax | energy | best score of the posterior | area under risk-coverage"
    return f"## Finding errors, laptop scale\n\n{said}\n\n{table(head, cells)}\n"


def strangers(measures: Measures) -> str:
    chosen = [one for one in compared(measures) if measures.strangers(*one[1:])]
    pairs = list(measures.strangers("", "max_softmax"))
    cells = []
    for label, kind, score, members in chosen:
        found = measures.strangers(kind, score, members)
        means = [statistics.mean(found[pair]) for pair in pairs if pair in found]
        whole = f"{100 * statistics.mean(means):.1f}" if len(means) == len(pairs) else ""
        cells.append([label, *(several(found.get(pair, []), 1) for pair in pairs), whole])
    names = [f"{NAMES[familiar]} / {NAMES[strange]}" for familiar, strange in pairs]
    after = "; ".join(f"{name} {one}" for kind, name in KINDS.items() if (one := hindsight(measures, kind, pairs)))
    told = f"""\
AUROC in % with which scores tell test images of other datasets from those of the dataset a network was trained on
(familiar / strange): mean ± standard deviation over seeds. Densities are fitted on 4,000 training images. Beside the
maximum softmax each row has the score that is best on one pair, the held-out share of Fashion-MNIST against training
images of CIFAR-10 ({choices(measures)}); all pairs in the table were tested once. `X and max softmax` adds
the surprises of two scores of one pass. `results/uncertainty.csv` has every score, AUPR and FPR95. In hindsight, which
nobody had, the single-pass score with the best mean of each kind is: {after}."""
    return f"## Strangers, laptop scale\n\n{told}\n\n{table(' | '.join(['score', *names, 'mean']), cells)}\n"


def hindsight(measures: Measures, kind: str, pairs: Sequence[tuple[str, str]]) -> str:
    """Return the score of single networks with the best mean over the pairs, and this mean by seeds."""
    means: dict[str, list[float]] = {}
    for score in {row.score for row in measures.rows if row.test == "strangers"}:
        found = measures.strangers(kind, score)
        if set(pairs) <= set(found):
            means[score] = [statistics.mean(one) for one in zip(*(found[pair] for pair in pairs), strict=False)]
    if not means:
        return ""
    best = max(sorted(means), key=lambda score: statistics.mean(means[score]))
    return f"{said(best)} {several(means[best], 1)}"


def choices(measures: Measures) -> str:
    """Return the AUROC of the chosen scores on the pair for choices."""
    found = []
    for kind, name in KINDS.items():
        best = measures.best(kind) if kind else measures.best(kind, of_posterior)
        if best is not None:
            at = dict(test="choice", measure="auroc", score=best, against="cifar10")
            found.append(f"{name} {several(measures.values('fashion', kind, **at), 1)}")  # type: ignore[arg-type]
    return ", ".join(found)


def viewpoints(measures: Measures) -> str:
    cells = []
    for kind, name in KINDS.items():
        best = measures.best(kind) if kind else measures.best(kind, of_posterior)
        for score in dict.fromkeys([*PLAIN, *([best] if best else [])]):
            found = measures.values(
                "smallnorb", kind, test="viewpoints", measure="auroc", score=score, against="novel", viewpoint="azimuth"
            )
            if found:
                cells.append([name, said(score), several(found, 1), str(len(found))])
    told = """\
smallNORB networks that were trained on six azimuths: AUROC in % with which scores tell test toys at the other azimuths
from test toys at the familiar ones."""
    return f"## Novel viewpoints, laptop scale\n\n{told}\n\n{table('network | score | AUROC | seeds', cells)}\n"


DAMAGE = {"rotate": "turned, degrees", "blur": "blurred, pixels", "noise": "noise", "occlude": "hidden share"}


def damage(measures: Measures) -> str:
    """Return the error on damaged images of Fashion-MNIST, and how well scores tell these from undamaged ones."""
    best = {kind: measures.best(kind, of_posterior if not kind else lambda score: True) for kind in ("", "_cnn")}
    columns = [
        ("VB: error", "", "error", "", 1), ("maximum softmax", "", "auroc", "max_softmax", 1),
        (said(best[""] or ""), "", "auroc", best[""], 1), ("ELBO", "", "auroc", "elbo", 1),
        ("CNN: error", "_cnn", "error", "", 1), ("maximum softmax", "_cnn", "auroc", "max_softmax", 1),
        (said(best["_cnn"] or ""), "_cnn", "auroc", best["_cnn"], 1),
        ("5 x CNN: error", "_cnn", "error", "", 5), ("disagreement", "_cnn", "auroc", "disagreement", 5),
    ]  # fmt: skip
    cells = []
    for what, title in DAMAGE.items():
        levels = {row.against.split()[1] for row in measures.rows if row.against.startswith(f"{what} ")}
        for level in sorted(levels, key=float):
            found = [
                several(
                    measures.values(
                        "fashion", kind, test="damage", measure=measure, score=score or "", against=f"{what} {level}",
                        ensemble=members,
                    )
                )
                for _, kind, measure, score, members in columns
            ]  # fmt: skip
            cells.append([f"{title}: {level}", *found])
    told = """\
500 test images of Fashion-MNIST, damaged more and more: the error in %, and the AUROC in % with which scores tell the
damaged images from the same images undamaged (50: not at all); mean ± standard deviation over seeds. Blur is the
standard deviation of a Gaussian, noise that of values from 0 to 1. `results/uncertainty.csv` has the other datasets."""
    head = " | ".join(["damage", *(column[0] for column in columns)])
    return f"## Damaged images, laptop scale\n\n{told}\n\n{table(head, cells)}\n"


CHOICES = {
    "fashion_laptop": "released rule, as it is",
    "fashion_laptop --evidence 1.0": "with the term of evidence",
    "fashion_laptop --activation paper": "printed rule",
    "fashion_laptop --no-norm-pose": "no BatchNorm on poses",
    "fashion_laptop --no-norm-logit": "no BatchNorm on the class logit",
    "fashion_laptop --evidence 0.1": "with a tenth of that term",
    "fashion_laptop --no-norm-logit --evidence 1.0": "with evidence, no BatchNorm on the class logit",
    "fashion_laptop --no-norm-logit --evidence 0.3": "the same, three tenths of the term",
    "fashion_laptop --no-norm-logit --evidence 0.1": "the same, a tenth of the term",
    "fashion_laptop --activation paper --evidence 1.0": "with evidence, printed rule",
}


SAME = {"fashion_evidence_laptop": "fashion_laptop --no-norm-logit --evidence 0.1"}  # two names of one setting


def errors_by_name(results: Path) -> dict[str, list[tuple[float, float]]]:
    """Return validation and test error of each recorded run of the choices, by recipe and flags."""
    found: dict[str, list[tuple[float, float]]] = {}
    of_series, others = "series/*/fashion_laptop-*/result.json", "fashion_evidence_laptop-*/**/result.json"
    for path in sorted([*results.glob(of_series), *results.glob(others)]):
        result, one = read_json(path), read_recipe(path.parent)
        name = " ".join(filter(None, [one.name, flags(one, leave_out=("hold_out", "validation", "test"))]))
        name = SAME.get(name, name)
        if name in CHOICES and result["test"] is not None:
            found.setdefault(name, []).append((result["validation"], result["test"]["error"]))
    return found


def evidence(rows: list[dict[str, str]], by_name: dict[str, list[tuple[float, float]]]) -> str:
    """Return the table of choices under which the posterior may count evidence."""

    def of(recipe: str, test: str, measure: str, score: str = "") -> str:
        wanted = (recipe, test, measure, score)
        by_seed: dict[str, list[float]] = {}
        for row in rows:
            name = SAME.get(row["recipe"], row["recipe"])
            if (name, row["test"], row["measure"], row["score"]) == wanted and "+" not in row["seeds"]:
                by_seed.setdefault(row["seeds"], []).append(float(row["value"]))
        return several([statistics.mean(values) for values in by_seed.values()])

    cells = []
    for recipe, words in CHOICES.items():
        if of(recipe, "calibration", "error", "softmax"):
            errors = [several(column, 2) for column in zip(*by_name.get(recipe, []), strict=True)] or ["", ""]
            found = [of(recipe, "evidence", f"answer_has_most_{what}") for what in ("votes", "agreement")]
            found += [of(recipe, "errors", "auroc", score) for score in ("votes", "precision", "pose_entropy")]
            of_strangers = ("max_softmax", "votes", "pose_entropy", "class_entropy", "elbo")
            found += [of(recipe, "strangers", "auroc", score) for score in of_strangers]
            cells.append([words, f"`{recipe}`", *errors, *found])
    counts = {len(errors) for name, errors in by_name.items() if name in CHOICES}
    runs = " to ".join(map(str, sorted({min(counts), max(counts)}))) if counts else "no runs"
    told = f"""\
Fashion-MNIST at laptop scale, VB routing; all numbers in %. First the errors on the held-out tenth and on all test
images, mean ± standard deviation over seeds ({runs}). Then, of the seeds that were measured (one, where there is no ±):
how often the answer is the class with most votes r_j, and the class whose votes agree most, by ln|E[Lambda_j]|; the
AUROC with which scores of the posterior find errors (above 50: the right way up), and their mean AUROC for strangers
(MNIST, SVHN, smallNORB), beside that of the maximum softmax; agreement is E[ln|Lambda_j|], entropy that of the pose.
`fashion_evidence_laptop` has the settings that were chosen, by the held-out errors and the pair for choices."""
    head = (
        "choice | recipe | held out | test | most votes | most agreement | errors: votes | errors: agreement | "
        "errors: entropy | strangers: maximum softmax | strangers: votes | strangers: entropy | "
        "strangers: H[q(pi)] | strangers: ELBO"
    )
    return f"## Evidence the right way up, laptop scale\n\n{told}\n\n{table(head, cells)}\n"

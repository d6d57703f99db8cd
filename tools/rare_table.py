"""Make the tables of class weights and balanced sampling where classes are rare (imbalance.csv)."""

from cells import spread, table
from held_out import column

HEAD = "setting | balanced accuracy | macro AUC | macro F1 | error, common | error, rare | runs | commit"
INTRODUCTION = """\
## Rare classes

Made by `tools/imbalance.py`, rows in [`imbalance.csv`](imbalance.csv): networks are trained on few images of one class
and many of others, with the same weights at the start and as many steps in every setting, and tested on all test images
of these classes, as many of each. In %, mean ± standard deviation over the seeds, which count from 0 in every row.
"""
PROBLEM = ("base", "epochs", "common_classes", "rare_classes", "common", "rare")


def on_rare_classes(rows: list[dict[str, str]]) -> list[str]:
    """Return a heading and a table for each problem, with a row for each setting."""
    problems: dict[tuple[str, ...], dict[str, list[dict[str, str]]]] = {}
    for row in rows:
        settings = problems.setdefault(tuple(row[key] for key in PROBLEM), {})
        settings.setdefault(row["setting"], []).append(row)
    made = []
    for (base, epochs, common, rare, many, few), settings in problems.items():
        title = f"### {rare} with {few} images, {common} with {many}: {base}, {epochs} epochs"
        made.append(f"{title}\n\n{table(HEAD, [setting_row(*one) for one in settings.items()])}\n")
    return [INTRODUCTION, *made] if made else []


def setting_row(setting: str, runs: list[dict[str, str]]) -> list[str]:
    measures = ("balanced_accuracy", "macro_auc", "macro_f1", "common_error", "rare_error")
    cells = [spread(column(runs, measure)) for measure in measures]
    commits = ", ".join(dict.fromkeys(run["commit"] for run in runs))
    name = f"`{setting}`" if setting.startswith("--") else setting
    return [name, *cells, str(len(runs)), commits]

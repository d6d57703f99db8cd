"""The output of the command line: sentences, tables, and the pictures of a run."""

import csv
import errno
import io
import os
import statistics
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.cells import cell_len
from rich.console import Console
from rich.status import Status

from vbcaps.data.errors import written

if TYPE_CHECKING:
    from vbcaps import Model
    from vbcaps.training.loop import Evaluation, Result


class Output(Console):
    """A console that falls silent where nobody listens any more: a pipe that was closed, as by ``head``, or a terminal.

    What the program does is worth more than what it says, so it goes on. The stream then leads nowhere, because Python
    writes what is left in it when the program ends.
    """

    def print(self, *parts: Any, **options: Any) -> None:
        try:  # a name of a file or a class may have what a terminal would obey
            super().print(*(written(part) if isinstance(part, str) else part for part in parts), **options)
        except OSError as error:
            self.quiet = True
            if error.errno != errno.EBADF:  # of a stream that was closed: its number may be another file's by now
                self.on_broken_pipe()

    def status(self, status: Any, **options: Any) -> Status:
        return super().status(written(status) if isinstance(status, str) else status, **options)

    def on_broken_pipe(self) -> None:
        self.quiet = True
        nowhere = os.open(os.devnull, os.O_WRONLY)
        with suppress(OSError, ValueError):  # a stream that is no file, as in a test
            os.dup2(nowhere, self.file.fileno())
        os.close(nowhere)


console = Output(highlight=False)
stderr = Output(stderr=True, highlight=False)
SHOWN = 24  # images in a run's picture of predictions
GAP, INDENT = "  ", "  "  # between the columns of a table; before the lines of a row that is not in columns
NARROW = 16  # least width to which texts in a table are wrapped
FAR = 0.15  # warn if the validation error is that far above the training error, and more than twice as high
MEASURES = ("precision", "recall", "f1", "auc")  # of a class, beside its error
KNOWN = 0.2  # training error up to which a network may be said to know its images


class Table:
    """Rows of text that fit the window: in columns, or if these do not fit, each row as a few short lines.

    No word is broken and no cell is cut off. Columns in ``spare`` are left out if the others fit only without them.
    Without a window, as in a pipe, columns are as wide as they need to be, so that each row is one line.
    """

    def __init__(self, headings: Sequence[str], numbers: Sequence[str] = (), spare: Sequence[str] = ()):
        self.headings, self.texts, self.spare = [*headings, *numbers], len(headings), spare
        self.rows: list[Sequence[str]] = []

    def add_row(self, *cells: str) -> None:
        self.rows.append([written(cell).replace("\n", "\\n") for cell in cells])

    def lines(self, width: int | None) -> list[str]:
        """Return the lines of the table, at most ``width`` wide as far as its longest word allows; the first line has
        the headings if the rows are in columns."""
        widths = self.widths(width)
        if widths is None and self.spare:
            kept = [k for k, heading in enumerate(self.headings) if heading not in self.spare]
            texts = sum(k < self.texts for k in kept)
            fewer = Table([self.headings[k] for k in kept[:texts]], [self.headings[k] for k in kept[texts:]])
            fewer.rows = [[row[k] for k in kept] for row in self.rows]
            if fewer.widths(width) is not None:
                return fewer.lines(width)
        if widths is None:
            assert width is not None
            return [line for row in self.rows for line in self.block(row, width)]
        return [line for row in [self.headings, *self.rows] for line in self.columns(row, widths)]

    def widths(self, width: int | None) -> list[int] | None:
        """Return the width of each column, with texts after the first wrapped if needed, or None if they do not fit."""
        cells = list(zip(self.headings, *self.rows, strict=True))
        widths = [max(map(cell_len, column)) for column in cells]
        over = 0 if width is None else sum(widths) + len(GAP) * (len(widths) - 1) - width
        for k in sorted(range(1, self.texts), key=lambda k: -widths[k]):
            word = max(cell_len(word) for cell in cells[k] for word in cell.split() or [""])
            spared = min(max(widths[k] - max(word, NARROW), 0), max(over, 0))
            widths[k], over = widths[k] - spared, over - spared
        return widths if over <= 0 else None

    def columns(self, row: Sequence[str], widths: Sequence[int]) -> Iterator[str]:
        wrapped = [
            [cell] if cell_len(cell) <= width else wrap(cell, width) for cell, width in zip(row, widths, strict=True)
        ]
        for cells in zip_longest(*wrapped, fillvalue=""):
            padded = (
                " " * (width - cell_len(cell)) + cell if k >= self.texts else cell + " " * (width - cell_len(cell))
                for k, (cell, width) in enumerate(zip(cells, widths, strict=True))
            )
            yield GAP.join(padded).rstrip()

    def block(self, row: Sequence[str], width: int) -> Iterator[str]:
        """Return the first cell, and below it the others with their headings."""
        yield row[0]
        line = ""
        for heading, cell in zip(self.headings[1:], row[1:], strict=True):
            pair = f"{heading} {cell}" if cell else ""
            if line and cell_len(INDENT + line + GAP + pair) > width:
                yield from wrap(line, width, INDENT)
                line = ""
            line = GAP.join(filter(None, [line, pair]))
        yield from wrap(line, width, INDENT)


def wrap(text: str, width: int, indent: str = "") -> list[str]:
    """Break text into lines between its words only."""
    return textwrap.wrap(
        text, width, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False,
        replace_whitespace=False, drop_whitespace=True,
    )  # fmt: skip


def table(*headings: str, numbers: Sequence[str] = (), spare: Sequence[str] = ()) -> Table:
    """Return an empty table whose columns ``numbers`` are flush right, after the other columns."""
    return Table(headings, numbers, spare)


def window() -> int | None:
    """Return the width of the window in characters, or None in a pipe or a file."""
    return console.width if console.is_terminal or "COLUMNS" in os.environ else None


def say(*parts: "str | Table") -> None:
    """Print sentences, each as one line that the window wraps, and tables that fit it."""
    for part in parts:
        lines = [part] if isinstance(part, str) else part.lines(window())
        for line in lines:
            console.print(line, markup=False, soft_wrap=True)


def complain(message: str) -> None:
    stderr.print(f"vbcaps: {message}", markup=False, soft_wrap=True)


def save_text(file: Path, text: str) -> None:
    from vbcaps.training.files import write

    write(file, text.encode("utf-8", "backslashreplace"))  # the name of a file may be no text
    say(f"wrote {file}")


def percent(share: float) -> str:
    return f"{100 * share:.2f}%"


def duration(seconds: float) -> str:
    """Return a duration as ``45 s``, ``3 min 20 s`` or ``2 h 05 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def say_results(results: Sequence["Result"]) -> None:
    """Print the results and the files of each run, then the mean over all runs."""
    from vbcaps.health.findings import findings

    for result in results:
        what = f"fold {result.recipe.fold}" if result.recipe.folds else f"seed {result.seed}"
        name = f"{what}: " if len(results) > 1 else ""
        for what, evaluation in (("test", result.test), ("familiar views", result.familiar)):
            if evaluation is not None:
                say(f"{name}{tested(evaluation, what)}")
        if result.validation is not None:
            what = "lowest validation error" if result.recipe.choose_by == "error" else "validation error"
            of_classes = "" if result.recipe.choose_by == "error" else ", best in the mean of its classes"
            say(f"{name}{what}: {percent(result.validation)}, in epoch {result.best_epoch}{of_classes}")
        if sentence := by_heart(result):
            say(name + sentence)
        if result.health is not None:
            say(f"{name}{findings(result.health)[0]}; `vbcaps health` says more")
        files = ", ".join([result.weights.name, *sorted(path.name for path in result.folder.glob("*.png"))])
        epochs = f"{result.epochs} epoch{'s' if result.epochs > 1 else ''}"
        say(f"{name}{epochs} in {duration(result.seconds)}, {result.parameters:,} parameters")
        say(f"{name}{result.folder}: {files}")
        if (figure := result.folder / "routing.png").exists():
            say(f"{name}{figure} shows how an image was routed; `vbcaps routing IMAGE` draws another")
    errors = [result.test.error for result in results if result.test is not None]
    if len(errors) > 1:
        mean, std = statistics.mean(errors), statistics.stdev(errors)
        what = "folds" if results[0].recipe.folds else "seeds"
        say(f"test error {percent(mean)} ± {percent(std)} over {len(errors)} {what}")


def by_heart(result: "Result") -> str:
    """Return advice if a network has learned its training images by heart, else an empty string.

    The error on held-out images decides; if there are none, and the images are the user's own, that on test images.
    """
    recipe, what, error = result.recipe, "validation", result.validation
    if error is None and result.test is not None and recipe.data is not None:
        what, error = "test", result.test.error
    if error is None or result.train_error > KNOWN or error <= max(result.train_error + FAR, 2 * result.train_error):
        return ""
    flags = [("--rotate 10 --zoom 0.2", recipe.rotate or recipe.zoom), ("--brightness 0.3", recipe.brightness)]
    unused = " ".join(flag for flag, used in flags if not used)
    changes = f"; {unused} changes them at random" if unused else ""
    mirror = "" if recipe.flip else "; so does --flip, if a mirrored image is still of its class"
    return (
        f"the training error, {percent(result.train_error)}, is far below the {what} error: the network knows its "
        f"training images by heart. More images help most{changes}{mirror}"
    )


def tested(evaluation: "Evaluation", what: str) -> str:
    low, high = evaluation.interval
    return (
        f"{what}: error {percent(evaluation.error)} (95% interval {percent(low)} to {percent(high)}), "
        f"accuracy {percent(1 - evaluation.error)}, {evaluation.count:,} images"
        + ("" if evaluation.reconstruction is None else f"; squared error {evaluation.reconstruction:.4f} a pixel")
        + (
            ""
            if evaluation.objects_found is None
            else f"; {percent(evaluation.objects_found)} of the objects are named"
        )
    )


def say_evaluation(evaluation: "Evaluation", what: str, ordinal: bool = False) -> None:
    """Print the measures of each class, then those of all; ``ordinal`` adds the kappa of ordered classes."""
    numbers = ("images", "error", "95% interval", "precision", "recall", "F1", "AUC")
    rows = table("class", numbers=numbers, spare=["95% interval"])
    for row in evaluation.per_class:
        low, high = row["interval"]
        more = (number(row.get(name)) for name in MEASURES)
        rows.add_row(
            row["name"], f"{row['count']:,}", percent(row["error"]), f"{percent(low)} to {percent(high)}", *more
        )
    said = dict(
        balanced_accuracy="balanced accuracy", macro_f1="macro F1", weighted_f1="weighted F1", macro_auc="macro AUC",
        kappa="kappa",
    )  # fmt: skip
    if ordinal:
        said["quadratic_kappa"] = "quadratic kappa"
    if evaluation.objects > 1:  # kappa is not defined for several answers
        said = {field: words for field, words in said.items() if "kappa" not in field}
    measured = [f"{words} {number(getattr(evaluation, field))}" for field, words in said.items()]
    say(rows, tested(evaluation, what), ", ".join(measured))
    if evaluation.objects > 1:
        say(
            f"an image is right if its {evaluation.objects} most probable classes are those of its objects; errors, "
            "precision and recall of a class are those of single objects"
        )
    for row in evaluation.by_overlap or []:
        shared = f"{percent(row['least'])} to {percent(row['most'])} of the foreground is shared"
        say(f"{shared}: error {percent(row['error'])}, {row['count']:,} images")


def number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def evaluation_csv(evaluation: "Evaluation") -> str:
    """Return a row for each class: its measures, and how many of its images were given each answer."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    answers = [f"as {row['name']}" for row in evaluation.per_class]
    writer.writerow(["class", "images", "error", "low", "high", *MEASURES, *answers])
    for row, counts in zip(evaluation.per_class, evaluation.confusion, strict=True):
        shares = [row["error"], *row["interval"], *(row.get(name) for name in MEASURES)]
        cells = ["" if share is None else f"{share:.6f}" for share in shares]
        writer.writerow([row["name"], row["count"], *cells, *counts])
    return text.getvalue()


def draw(picture: Callable[[], Path | Sequence[Path]], quiet: bool = False) -> None:
    """Draw a picture and print its path; if it cannot be drawn, print the reason and continue."""
    from vbcaps.figures.run import NoMatplotlib

    try:
        drawn = picture()
    except (NoMatplotlib, OSError) as error:
        complain(f"no picture: {error}")
        return
    if not quiet:
        say(f"drew {drawn}")


def draw_run(model: "Model", data_folder: Path | None) -> None:
    """Draw the pictures of a finished run beside its other files."""
    from vbcaps.figures import run
    from vbcaps.figures.routing import routing
    from vbcaps.figures.vae import reconstructions, samples
    from vbcaps.training.loop import prepare
    from vbcaps.training.measures import wrong
    from vbcaps.vae import CapsVAE, capsules_of

    result = model.result
    if result is None:
        return

    def pictures_of_run() -> list[Path]:
        drawn = run.of_run(result.folder)
        data = prepare(result.recipe, data_folder, next(model.parameters()).device)
        split = data.test if result.test is not None or data.validation is None else data.validation
        by_class = split.labels.view(len(split.labels), -1)[:, 0].cpu().argsort(stable=True)
        some = split.take(by_class[:: max(len(by_class) // SHOWN, 1)][:SHOWN].to(split.labels.device))
        images, labels = model.view.as_bytes(some.images).cpu().numpy(), some.labels.cpu()
        scores, path = model.predict(some.images), result.folder / "predictions.png"
        truths = labels.view(len(labels), -1).tolist()
        objects = result.recipe.objects
        drawn.append(run.predictions(images, scores.numpy(), model.classes, path, truths, objects=objects))
        if capsules_of(model.net) is not None:
            k = int(wrong(scores, labels).int().argmin())  # the first that is right, if any is
            path, truth = result.folder / "routing.png", " + ".join(model.classes[j] for j in truths[k])
            drawn.append(routing(model, some.images[k], path, truth=truth))
        if isinstance(model.net, CapsVAE):
            drawn.append(reconstructions(model, some.images, result.folder / "reconstructions.png"))
            drawn.append(samples(model, result.folder / "samples.png"))
        return drawn

    draw(pictures_of_run, quiet=True)

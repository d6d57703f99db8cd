"""What the command line says when the work is done: sentences, tables, and pictures beside the run."""

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console, RenderableType
from rich.table import Table

from vbcaps.figures import run as pictures

if TYPE_CHECKING:
    from vbcaps import Model
    from vbcaps.training.loop import Evaluation, Result

console = Console(highlight=False)
stderr = Console(stderr=True, highlight=False)
SHOWN = 24  # images in a run's picture of predictions


def say(*parts: RenderableType) -> None:
    """Print lines, whole however narrow the window is, and tables."""
    for part in parts:
        console.print(part, markup=False, soft_wrap=isinstance(part, str))


def table(*headings: str, numbers: Sequence[str] = ()) -> Table:
    """A table whose ``numbers`` are set flush right, after the other columns."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for heading in headings:
        made.add_column(heading, no_wrap=heading == headings[0], overflow="fold")
    for heading in numbers:
        made.add_column(heading, justify="right", no_wrap=True)
    return made


def complain(message: str) -> None:
    stderr.print(f"vbcaps: {message}", markup=False, soft_wrap=True)


def percent(share: float) -> str:
    return f"{100 * share:.2f}%"


def duration(seconds: float) -> str:
    """``45 s``, ``3 min 20 s``, ``2 h 05 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def say_results(results: Sequence["Result"]) -> None:
    """What each run gave and where it is, and what they gave together."""
    for result in results:
        name = f"seed {result.seed}: " if len(results) > 1 else ""
        for what, evaluation in (("test", result.test), ("familiar views", result.familiar)):
            if evaluation is not None:
                say(f"{name}{sentence(evaluation, what)}")
        if result.validation is not None:
            say(f"{name}validation error {percent(result.validation)}, the lowest, in epoch {result.best_epoch}")
        files = ", ".join([result.weights.name, *sorted(path.name for path in result.folder.glob("*.png"))])
        epochs = f"{result.epochs} epoch{'s' if result.epochs > 1 else ''}"
        say(f"{name}{epochs} in {duration(result.seconds)}, {result.parameters:,} parameters")
        say(f"{name}{result.folder}: {files}")
    errors = [result.test.error for result in results if result.test is not None]
    if len(errors) > 1:
        mean, std = statistics.mean(errors), statistics.stdev(errors)
        say(f"test error {percent(mean)} ± {percent(std)} over {len(errors)} seeds")


def sentence(evaluation: "Evaluation", what: str) -> str:
    low, high = evaluation.interval
    return (
        f"{what}: error {percent(evaluation.error)} (95% interval {percent(low)} to {percent(high)}), "
        f"accuracy {percent(1 - evaluation.error)}, {evaluation.count:,} images"
    )


def say_evaluation(evaluation: "Evaluation", what: str) -> None:
    rows = table("class", numbers=("images", "error", "95% interval"))
    for row in evaluation.per_class:
        low, high = row["interval"]
        rows.add_row(row["name"], f"{row['count']:,}", percent(row["error"]), f"{percent(low)} to {percent(high)}")
    say(rows, sentence(evaluation, what))


def draw(picture: Callable[[], Path | Sequence[Path]], quiet: bool = False) -> None:
    """Draw, and say where. Where that cannot be, say why: nothing but the picture is lost."""
    try:
        drawn = picture()
    except (pictures.NoMatplotlib, OSError) as error:
        complain(f"no picture: {error}")
        return
    if not quiet:
        say(f"drew {drawn}")


def draw_run(model: "Model", data_folder: Path | None) -> None:
    """Draw the pictures of a finished run, beside its other files."""
    from vbcaps.training.loop import prepare

    result = model.result
    if result is None:
        return

    def pictures_of_run() -> list[Path]:
        drawn = pictures.of_run(result.folder)
        data = prepare(result.recipe, data_folder, next(model.parameters()).device)
        split = data.test if result.test is not None or data.validation is None else data.validation
        by_class = split.labels.cpu().argsort(stable=True)
        some = split.take(by_class[:: max(len(by_class) // SHOWN, 1)][:SHOWN].to(split.labels.device))
        images, labels, scores = some.images.cpu().numpy(), some.labels.tolist(), model.predict(some.images).numpy()
        return [
            *drawn,
            pictures.predictions(images, scores, model.classes, result.folder / "predictions.png", labels),
        ]

    draw(pictures_of_run, quiet=True)

"""The display of a running training: live bars in a terminal, plain lines elsewhere, nothing with --quiet."""

import time
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TaskID, TextColumn

from vbcaps.cli.report import console, duration, percent, say

if TYPE_CHECKING:
    from vbcaps.training.events import Event

EVERY = 30.0  # seconds after which a plain line is written within an epoch


class Display:
    """Show the events of ``fit``, as a context manager; with several seeds each line names its seed."""

    def __init__(self, quiet: bool = False, seeds: int = 1):
        self.quiet, self.names = quiet, seeds > 1
        self.bars: Progress | None = None
        if console.is_terminal and not quiet:
            columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[numbers]}"))
            self.bars = Progress(*columns, console=console, transient=True)
        self.tasks: dict[int, TaskID] = {}  # by seed
        self.decoded: TaskID | None = None
        self.written = time.monotonic()

    def __enter__(self) -> "Display":
        if self.bars is not None:
            self.bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.bars is not None:
            with suppress(OSError):  # of a terminal that was closed
                self.bars.stop()

    def __call__(self, event: "Event") -> None:
        if self.quiet:
            return
        if event.kind == "note":
            self.say(event, event.message)
        if event.kind == "decode":
            self.decoding(event)
        if event.kind in ("step", "epoch"):
            self.advance(event)
            late = self.bars is None and time.monotonic() - self.written > EVERY
            if event.kind == "epoch" or late:
                self.say(event, f"{where(event)}  {numbers(event)}")
                self.written = time.monotonic()
        if event.kind == "end" and self.bars is not None and event.seed in self.tasks:
            self.bars.remove_task(self.tasks.pop(event.seed))

    def decoding(self, event: "Event") -> None:
        """Show how many images of a large folder have been decoded."""
        now, done = time.monotonic(), event.step == event.steps
        if self.bars is not None:
            if self.decoded is None:
                self.decoded = self.bars.add_task("decoding images", numbers="")
            self.bars.update(
                self.decoded, total=event.steps, completed=event.step, numbers=f"{event.step:,}/{event.steps:,}"
            )
            if done:
                self.bars.remove_task(self.decoded)
                self.decoded = None
        if done or (self.bars is None and now - self.written > EVERY):
            kept = ", which are kept for the next run" if done else ""
            say(f"decoded {event.step:,} of {event.steps:,} images{kept}")
            self.written = now

    def advance(self, event: "Event") -> None:
        if self.bars is None:
            return
        if event.seed not in self.tasks:
            self.tasks[event.seed] = self.bars.add_task("", numbers="")
        self.bars.update(
            self.tasks[event.seed],
            description=self.name(event) + f"epoch {event.epoch}/{event.epochs}",
            total=event.epochs * event.steps,
            completed=(event.epoch - 1) * event.steps + event.step,
            numbers=numbers(event),
        )

    def say(self, event: "Event", line: str) -> None:
        say(self.name(event) + line)

    def name(self, event: "Event") -> str:
        return f"seed {event.seed}  " if self.names else ""


def where(event: "Event") -> str:
    epoch = f"epoch {event.epoch:>{len(str(event.epochs))}}/{event.epochs}"
    return epoch if event.kind == "epoch" else f"{epoch} step {event.step}/{event.steps}"


def numbers(event: "Event") -> str:
    """Return loss, errors, images per second and the time left, as far as they are known."""
    said = []
    if event.loss is not None:
        said.append(f"loss {event.loss:.3f}")
    if event.error is not None:
        said.append(f"training error {percent(event.error)}")
    if event.validation is not None:
        said.append(f"validation error {percent(event.validation)}")
    said.append(f"{event.images_per_second:,.0f} images/s")
    said.append(f"{duration(event.eta)} left")
    return "  ".join(said)

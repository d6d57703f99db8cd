"""Read the code of a Markdown page: blocks of Python and of commands, and the marks in comments that concern them.

A mark is an HTML comment that begins a line, so a reader of the page does not see it:

    <!-- test: skip because it needs a GPU -->    leaves the next block out, and gives the reason
    <!-- test: run -->                            runs the commands of the next block, which are otherwise only parsed
    <!-- test: printed -->                        says that the code before it printed the lines of the next block;
    <!-- test: printed exactly -->                their numbers may differ, or not
    <!-- test: x = torch.rand(4, 1, 28, 28) -->   any other text is Python that runs at this place, on one line or on
                                                  several: what the page takes as given, or an assertion
"""

import linecache
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import typer

PIECE = re.compile(
    r"^<!-- test:(?P<mark>.*?)-->|^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=indent)```",
    re.DOTALL | re.MULTILINE,
)
NUMBER = re.compile(r"[-+]?\d[\d.,]*(?:e[-+]\d+)?")
SHELL = ("bash", "sh", "shell", "console")
JOINS = {"|", ">", ">>", "<", "&&", "||", ";", "&"}


@dataclass
class Block:
    """Code of a page: its language (``python``, ``bash`` or another), its text, its first line, and its marks."""

    language: str
    code: str
    line: int
    run: bool = False
    printed: bool = False
    exactly: bool = False
    skipped: str | None = None  # the reason


def read_blocks(text: str) -> list[Block]:
    """Return the blocks of a page in their order; the Python of marks is among them."""
    blocks: list[Block] = []
    marks: dict[str, Any] = {}
    for piece in PIECE.finditer(text):
        line = text.count("\n", 0, piece.start()) + 1
        if (mark := piece["mark"]) is None:
            blocks.append(Block(piece["language"], textwrap.dedent(piece["code"]), line + 1, **marks))
            marks = {}
        elif mark.split()[:1] == ["skip"]:
            words = mark.split(maxsplit=2)
            if words[1:2] != ["because"] or len(words) < 3:
                raise ValueError(f"line {line}: a skipped block needs its reason, `<!-- test: skip because … -->`")
            marks["skipped"] = " ".join(words[2].split())
        elif mark.split() in (["run"], ["printed"], ["printed", "exactly"]):
            marks |= dict.fromkeys(mark.split(), True)
        else:
            first = line + mark.lstrip(" ").startswith("\n")
            blocks.append(Block("python", textwrap.dedent(mark.strip(" \n")), first))
    if marks:
        raise ValueError(f"a mark at the end of the page has no block after it: {marks}")
    return blocks


def own_pictures(text: str) -> list[str]:
    """Return the names of the PNG files in its own folder that a page shows; its code makes them."""
    return re.findall(r"!\[[^]]*\]\(([\w-]+\.png)\)", text)


@contextmanager
def module_of(page: Path) -> Iterator[dict[str, Any]]:
    """Give the names of a new module for the page's Python, which pickles and annotations find while it is open."""
    module = ModuleType(f"page_{page.stem.replace('-', '_')}")
    sys.modules[module.__name__] = module
    try:
        yield module.__dict__
    finally:
        del sys.modules[module.__name__]


def run_python(page: Path, block: Block, names: dict[str, Any]) -> None:
    """Run a block; a traceback shows the page and its line."""
    linecache.checkcache(str(page))
    exec(compile("\n" * (block.line - 1) + block.code, str(page), "exec"), names)


def check_printed(block: Block, output: str) -> None:
    """Raise an error unless the output has the lines of a block in their order, with others between them or not.

    Numbers may differ unless the mark says "exactly", because a training ends with other ones on another kind of
    machine; an assertion in a mark holds those on which a page depends. A line of dots is left out.
    """

    def words_of(line: str) -> list[str]:
        return (line if block.exactly else NUMBER.sub("0", line)).split()

    there = iter([words_of(line) for line in output.split("\n")])
    for line in block.code.split("\n"):
        words = words_of(line)
        if words and words != ["..."] and words not in there:
            raise AssertionError(
                f"block of line {block.line}: the code before it did not print {line!r}, but\n{output}"
            )


def commands(code: str) -> list[list[str]]:
    """Return the words of each command of a block; a backslash continues a line, and ``#`` begins a comment."""
    lines = code.replace("\\\n", " ").split("\n")
    return [words for line in lines if (words := shlex.split(line.removeprefix("$ "), comments=True))]


def words_for_vbcaps(words: list[str]) -> list[str] | None:
    """Return the words after ``vbcaps`` or ``-m vbcaps``, assignments before it or not; None for another program."""
    start = next((k for k, word in enumerate(words) if not re.fullmatch(r"\w+=.*", word)), len(words))
    end = next((k for k, word in enumerate(words) if word in JOINS), len(words))
    if words[start : start + 1] == ["vbcaps"]:
        return words[start + 1 : end]
    if ["-m", "vbcaps"] in (words[k : k + 2] for k in range(start, end)):
        return words[words.index("vbcaps", start) + 1 : end]
    return None


def parse_command(words: list[str]) -> None:
    """Parse the words of a ``vbcaps`` command as the program does, and run nothing; its errors say what is wrong."""
    from vbcaps.cli import flags, main, train

    command: Any = typer.main.get_command(main.app)
    context = command.make_context("vbcaps", list(words))
    while hasattr(command, "resolve_command"):  # a group of commands
        rest = [*context._protected_args, *context.args]
        name, command, rest = command.resolve_command(context, rest)
        if name == "train":
            command = typer.main.get_command(train.app)
        context = command.make_context(name, rest, parent=context)
        if name == "train":
            given = flags.given({key: value for key, value in context.params.items() if key in flags.field_types()})
            name = context.params["recipe"]
            if name is not None or not (context.params["resume"] or context.params["source"]):
                flags.changed(name or "default", given)

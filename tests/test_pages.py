"""The pages of the repository: their Python runs, their commands parse, and their links lead somewhere.

`pages.py` says how a page marks what its blocks need.
"""

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path

import pages
import pytest
import torch
import typer
from typer.testing import CliRunner

from vbcaps.cli.main import app

ROOT = Path(__file__).parents[1]
PAGES = {
    str(page.relative_to(ROOT)): page
    for page in [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *sorted(ROOT.glob("docs/**/*.md")),
        *sorted(ROOT.glob("src/**/*.md")),
        *sorted(ROOT.glob("*/NOTES.md")),
    ]
}
BLOCKS = {name: pages.read_blocks(page.read_text()) for name, page in PAGES.items()}
SKIPPED = 6  # at most so many blocks of all pages are not run; each gives its reason


def having(*languages: str) -> list[str]:
    """Return the names of the pages that have a block in one of these languages."""
    return [name for name, blocks in BLOCKS.items() if any(block.language in languages for block in blocks)]


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """Run a page in a folder of its own, on kernels that are compiled, and without windows."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    torch.manual_seed(0)


def execute(page: Path, blocks: list[pages.Block]) -> None:
    """Run the Python of a page and the commands that it marks, in their order, and compare what it says they print."""
    output = ""
    with pages.module_of(page) as names:
        for block in blocks:
            if block.skipped:
                continue
            if block.language == "python":
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    pages.run_python(page, block, names)
                output = out.getvalue() or output
            elif block.run:
                output = "".join(execute_command(words) for words in pages.commands(block.code))
            elif block.printed:
                pages.check_printed(block, output)


def execute_command(words: list[str]) -> str:
    """Run a command, and return what it printed."""
    if words[0] == "vbcaps" and not pages.JOINS & set(words):
        result = CliRunner().invoke(app, words[1:], env={"COLUMNS": "120"})
        assert result.exit_code == 0, f"{' '.join(words)}\n{result.output}"
        return result.output
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])  # torchrun, vbcaps
    environment = os.environ | dict(PATH=programs)
    bash = ["bash", "-c", " ".join(words)]
    return subprocess.run(bash, check=True, stdout=subprocess.PIPE, text=True, env=environment).stdout


@pytest.mark.parametrize("name", having("python"))
def test_python_runs_in_its_order(name, alone):
    execute(PAGES[name], BLOCKS[name])
    if name.startswith("docs/tutorials/"):
        assert [one for one in pages.own_pictures(PAGES[name].read_text()) if not Path(one).exists()] == []


@pytest.mark.parametrize("name", having(*pages.SHELL))
def test_commands_are_those_of_the_program(name):
    for block in BLOCKS[name]:
        for words in pages.commands(block.code) if block.language in pages.SHELL else []:
            given = pages.words_for_vbcaps(words)
            if given is not None and not block.skipped:
                try:
                    pages.parse_command(given)
                except Exception as error:
                    raise AssertionError(f"{name}, block of line {block.line}: vbcaps {' '.join(given)}") from error


@pytest.mark.parametrize("name", PAGES)
def test_commands_in_sentences_exist(name):
    known = set(typer.main.get_command(app).commands)
    assert set(re.findall(r"(?<!`)`vbcaps\s+([a-z]\w*)", PAGES[name].read_text())) <= known


def test_python_that_is_skipped_compiles():
    for name, blocks in BLOCKS.items():
        for block in blocks:
            if block.skipped and block.language == "python":
                compile("\n" * (block.line - 1) + block.code, name, "exec")


def test_few_blocks_are_skipped():
    skipped = [f"{name}:{b.line}: {b.skipped}" for name, blocks in BLOCKS.items() for b in blocks if b.skipped]
    assert len(skipped) <= SKIPPED, skipped


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(
        r"^#+ +(.*?) *$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE
    )
    plain = [re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("name", PAGES)
def test_links_lead_to_files_and_headings(name):
    page, missing = PAGES[name], []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if "://" in link or link.startswith("mailto:"):
            continue
        if not target.exists() or (anchor and target.suffix == ".md" and anchor not in anchors(target.read_text())):
            missing.append(link)
    assert missing == []


def test_every_tutorial_is_in_the_list_of_tutorials():
    folder = ROOT / "docs/tutorials"
    listed = re.findall(r"^- \[[^]]*\]\(([\w-]+\.md)\): ", (folder / "index.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(page.name for page in folder.glob("*.md") if page.name != "index.md")


def test_the_front_page_is_short():
    assert len(PAGES["README.md"].read_text().splitlines()) <= 200


MADE_UP = """
<!-- test:
word = "some"
-->
Text, and `<!-- test: nonsense` in it.

```python
from dataclasses import dataclass
from pathlib import Path

@dataclass
class Thing:
    name: str

Path("thing").write_text(word + "thing")
```

<!-- test: skip because nobody has
     such a machine -->
```python
raise RuntimeError
```

<!-- test: run -->
```bash
cp thing other   # a comment
vbcaps recipes default
```

```bash
OMP=1 vbcaps train smallnorb \\
  --lrate 3 > file
```

<!-- test: assert Path("other").read_text() == "something", Thing -->
"""


def test_a_page_runs_as_it_is_marked(alone):
    blocks = pages.read_blocks(MADE_UP)
    assert [(b.language, b.run, b.skipped) for b in blocks] == [
        ("python", False, None),
        ("python", False, None),
        ("python", False, "nobody has such a machine"),
        ("bash", True, None),
        ("bash", False, None),
        ("python", False, None),
    ]
    assert all(
        MADE_UP.split("\n")[block.line - 1].strip("<!-> ").endswith(block.code.split("\n")[0]) for block in blocks
    )
    execute(Path("made-up.md"), blocks)
    (words,) = pages.commands(blocks[4].code)
    with pytest.raises(Exception, match="--lrate"):
        pages.parse_command(pages.words_for_vbcaps(words))


def test_what_a_page_says_is_printed_may_have_other_numbers(alone):
    said = "```python\nprint('error  3.25%', 'more', 'end', sep='\\n')\n```\n<!-- test: printed -->\n"
    execute(Path("made-up.md"), pages.read_blocks(said + "```text\nerror 12%\n...\nend\n```"))


@pytest.mark.parametrize(
    ("block", "wrong"),
    [
        ("```python\n1 / 0\n```", ZeroDivisionError),
        ("<!-- test: run -->\n```bash\nvbcaps recipes nope\n```", AssertionError),
        ("<!-- test: run -->\n```bash\nfalse\n```", subprocess.CalledProcessError),
        ("```python\nprint('3 cats')\n```\n<!-- test: printed -->\n```text\n3 dogs\n```", AssertionError),
        ("```python\nprint('3 cats')\n```\n<!-- test: printed exactly -->\n```text\n2 cats\n```", AssertionError),
        ("```python\nprint('a', 'b', sep='\\n')\n```\n<!-- test: printed -->\n```text\nb\na\n```", AssertionError),
    ],
)
def test_what_fails_on_a_page_fails_the_test(block, wrong, alone):
    with pytest.raises(wrong):
        execute(Path("made-up.md"), pages.read_blocks(block))


@pytest.mark.parametrize(
    "text", ["<!-- test: skip -->\n```python\n```", "<!-- test: skip because -->", "<!-- test: run -->"]
)
def test_a_mark_that_says_too_little_is_an_error(text):
    with pytest.raises(ValueError, match=r"reason|no block"):
        pages.read_blocks(text)


@pytest.mark.parametrize(
    "words",
    [
        "nope",
        "train nope",
        "train smallnorb --lrr 3",
        "train smallnorb --lr -1",
        "predict",
        "data fetch",
        "weights fetchh x",
    ],
)
def test_a_command_that_the_program_does_not_know_is_an_error(words):
    with pytest.raises(Exception, match=r"(?i)no such|no recipe|lie|missing"):
        pages.parse_command(words.split())

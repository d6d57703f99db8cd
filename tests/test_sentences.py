"""No sentence of the documentation stands twice: a page points to another one instead of repeating it.

Pages that are made by scripts or that the site includes from elsewhere are left out, as is all code.
"""

import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORDS = 8  # a shorter sentence, as a link to a page, may stand anywhere
IN_A_ROW = 14  # so many words in a row are a repetition, too, whatever stands around them
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]
NOT_PROSE = re.compile(
    r"^---\n.*?^---$|<!-- results: made by.*?<!-- end of results -->|<!--.*?-->|^( *)(```+|:::+).*?^\1\2$|\$\$.*?\$\$",
    re.DOTALL | re.MULTILINE,
)
BREAK = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*|>#]|\d+\.)\s)|\|")  # of paragraphs, items, headings and cells
END = re.compile(r"(?<=[.!?;:])[*_”\"')]*\s+")


def sentences(text: str) -> Iterator[list[str]]:
    """Give the words of each sentence of a page, without marks of any kind."""
    prose = NOT_PROSE.sub("\n\n", text)
    prose = re.sub(r"^#.*$", "\n", prose, flags=re.MULTILINE)  # a link may have the words of a title
    prose = re.sub(r"\[([^\[\]]*)\]\([^)]*\)", r"\1", re.sub(r"!\[[^]]*\]\([^)]*\)", "", prose))
    for paragraph in BREAK.split(prose):
        for sentence in END.split(paragraph):
            if words := re.findall(r"[\w'’.-]*\w", sentence.lower()):
                yield words


def repeated(pages: dict[str, str]) -> list[str]:
    """Return what stands twice on these pages, with the names of both pages."""
    places: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for name, text in pages.items():
        for words in sentences(text):
            if len(words) >= WORDS:
                places[tuple(words)].append(name)
    found = [f"{' and '.join(where)}: {' '.join(words)}" for words, where in places.items() if len(where) > 1]
    first: dict[tuple[str, ...], tuple[str, ...]] = {}
    for words, where in places.items():
        for row in {words[k : k + IN_A_ROW] for k in range(len(words) - IN_A_ROW + 1)}:
            other = first.setdefault(row, words)
            if other != words:
                found.append(f"{places[other][0]} and {where[0]}: {' '.join(row)}")
    return found


def test_no_sentence_stands_twice():
    assert repeated({str(page.relative_to(ROOT)): page.read_text() for page in PAGES}) == []


RUN_TOGETHER = re.compile(r"[.:;)] [-*] (?=\*\*|\[)")  # the mark of an item in the middle of a line


def test_no_list_is_run_together():
    found = {page.name: RUN_TOGETHER.findall(NOT_PROSE.sub("", page.read_text())) for page in PAGES}
    assert {name: marks for name, marks in found.items() if marks} == {}


MADE_UP = """# A title

The network reads [every image](a.md) of the folder
in the order of **its name**. It then stops.

- One item of a list whose words are many enough to count as one.

```bash
echo the network reads every image of the folder in the order of its name
```
<!-- test: x = "One item of a list whose words are many enough to count as one." -->
"""


def test_a_sentence_that_stands_twice_is_found():
    assert repeated({"a": MADE_UP, "b": "It then stops. " * 2}) == []
    twice = "Short. *The network reads every image of the `folder` in the order of its name!* Other."
    assert repeated({"a": MADE_UP, "b": twice}) == [
        "a and b: the network reads every image of the folder in the order of its name"
    ]
    item = "| x | one item of a list, whose words are many enough to count as one |"
    assert len(repeated({"a": MADE_UP, "b": item, "c": item})) == 1
    longer = "We know that one item of a list whose words are many enough to count as one is long."
    assert "a and b: one item of a list" in repeated({"a": MADE_UP, "b": longer})[0]
    assert len(repeated({"a": MADE_UP + MADE_UP})) == 2

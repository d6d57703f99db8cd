"""A Sphinx extension: links of a page to files of the repository.

On the page of a repository such a link leads to the file. On the site it leads to the page that includes this file, or
else to the address that ``VBCAPS_SOURCE`` names, like ``https://…/blob/main``. Without an address a link to a file
downloads it, and a link to a folder or to a page that is not on the site becomes its words alone.
"""

import os
import re
from pathlib import Path
from urllib.parse import urldefrag

from sphinx.application import Sphinx

DOCS = Path(__file__).parents[1]
ROOT = DOCS.parent
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"(^```.*?^```)", re.DOTALL | re.MULTILINE)
# Files outside docs/ that a page of the site includes.
PAGES = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "README.md": "index.md",
    "benchmarks/NOTES.md": "kernel-notes.md",
    "results/NOTES.md": "notes.md",
    "results/README.md": "tables.md",
    "src/vbcaps/data/README.md": "datasets.md",
    "src/vbcaps/routing/README.md": "mathematics.md",
}


def rewrite(text: str, folder: Path, source: str | None) -> str:
    """Return the Markdown ``text``, which stands in ``folder``, with links that work on the site."""

    def replace(match: re.Match[str]) -> str:
        words, link = match.groups()
        target, anchor = urldefrag(link)
        if "://" in target or link.startswith(("#", "mailto:")):
            return match[0]
        path = (folder / target).resolve()
        if not path.is_relative_to(ROOT) or not path.exists():
            return match[0]  # Sphinx warns of it
        inside = path.relative_to(ROOT).as_posix()
        hash = f"#{anchor}" if anchor else ""
        if inside in PAGES:
            return f"[{words}](/{PAGES[inside]}{hash})"
        if path.is_relative_to(DOCS):
            return f"[{words}](/{path.relative_to(DOCS).as_posix()}{hash})"
        if source:
            return f"[{words}]({source}/{inside}{hash})"
        return words if path.is_dir() or path.suffix == ".md" else f"[{words}](/../{inside})"

    parts = FENCE.split(text)
    return "".join(part if part.startswith("```") else LINK.sub(replace, part) for part in parts)


def on_source(app: Sphinx, name: str, content: list[str]) -> None:
    file = Path(app.env.doc2path(name))
    if file.suffix == ".md":
        content[0] = rewrite(content[0], file.parent, os.environ.get("VBCAPS_SOURCE"))


def on_include(app: Sphinx, path: Path, name: str, content: list[str]) -> None:
    content[0] = rewrite(content[0], (DOCS / path).resolve().parent, os.environ.get("VBCAPS_SOURCE"))


def setup(app: Sphinx) -> dict[str, bool]:
    app.connect("source-read", on_source)
    app.connect("include-read", on_include)
    return dict(parallel_read_safe=True, parallel_write_safe=True)

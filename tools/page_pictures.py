"""Make the pictures of the tutorials anew, by the code of their pages.

python tools/page_pictures.py [docs/tutorials/PAGE.md ...]     without a page: all tutorials

A tutorial that shows `NAME.png` from its own folder writes a file of this name; `tests/test_pages.py` checks that.
"""

import contextlib
import shutil
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

import pages  # noqa: E402
import test_pages  # noqa: E402


def main(words: list[str]) -> None:
    for page in [Path(word).resolve() for word in words] or sorted((ROOT / "docs/tutorials").glob("*.md")):
        text = page.read_text()
        if shown := pages.own_pictures(text):
            with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
                torch.manual_seed(0)
                test_pages.execute(page, pages.read_blocks(text))
                for name in shown:
                    shutil.copy(name, page.parent / name)
                    print(page.parent / name)


if __name__ == "__main__":
    main(sys.argv[1:])

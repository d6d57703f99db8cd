"""The site: it is built without a warning, its notebook is executed, and whatever is wrong fails the build."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("myst_nb", reason="the site needs Sphinx: pip install -e '.[docs]'")

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
NOTEBOOKS = sorted(DOCS.glob("**/*.ipynb"))


def build(source: Path, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    """Build pages with the settings of the site; a warning is an error."""
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-c", DOCS, *options, source, out]
    kernels = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}  # compiled ones
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=kernels)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """Build the site with its notebook."""
    out = tmp_path_factory.mktemp("site")
    done = build(DOCS, out)
    assert done.returncode == 0, done.stderr
    return out


def test_every_page_is_built(site):
    pages = [*DOCS.glob("**/*.md"), *NOTEBOOKS]
    assert pages
    for page in pages:
        assert (site / page.relative_to(DOCS)).with_suffix(".html").exists(), page


def test_the_notebook_has_run(site):
    for notebook in NOTEBOOKS:
        cells = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
        html = (site / notebook.relative_to(DOCS)).with_suffix(".html").read_text()
        assert html.count('class="cell_input docutils container"') == len(cells) > 5
        pictures = re.findall(r'<img[^>]*src="(_images/[^"]+\.png)"', html)
        assert len(pictures) >= 5
        assert all((site / picture).stat().st_size > 1000 for picture in pictures)


def test_notebooks_are_kept_without_outputs():
    assert NOTEBOOKS
    for notebook in NOTEBOOKS:
        for cell in json.loads(notebook.read_text())["cells"]:
            assert not any(cell.get(name) for name in ("outputs", "execution_count")), f"{notebook}: clear all outputs"


def test_pictures_of_both_themes_are_on_the_page(site):
    html = (site / "capsules.html").read_text()
    assert len(re.findall('class="only-light" src="_images/[a-z]+.svg"', html)) >= 5
    assert len(re.findall('class="only-dark" src="_images/[a-z]+-dark.svg"', html)) >= 5


CELL = {"cell_type": "code", "execution_count": None, "id": "a", "metadata": {}, "outputs": []}
PYTHON = {"display_name": "Python 3", "language": "python", "name": "python3"}


@pytest.mark.parametrize(
    ("name", "text", "wrong"),
    [
        ("index.md", "# Page\n\n[no page](nowhere.md) and [no heading](#nothing-here)", ["nowhere", "nothing-here"]),
        ("index.ipynb", "1 / 0", ["ExecutionError", "index.ipynb"]),
    ],
)
def test_what_is_wrong_fails_the_build(name, text, wrong, tmp_path):
    (tmp_path / "source").mkdir()
    if name.endswith(".ipynb"):
        notebook = dict(
            nbformat=4, nbformat_minor=5, metadata=dict(kernelspec=PYTHON), cells=[CELL | dict(source=text)]
        )
        text = json.dumps(notebook)
    (tmp_path / "source" / name).write_text(text)
    done = build(tmp_path / "source", tmp_path / "out")
    assert done.returncode != 0
    assert all(word in done.stderr for word in wrong), done.stderr

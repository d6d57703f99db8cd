"""Sphinx: how the pages of this folder become the site. ``scripts/docs`` builds it."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import vbcaps

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "_sphinx"))

project = "vbcaps"
author = "The vbcaps authors"
copyright = "the vbcaps authors"
version = release = vbcaps.__version__
language = "en"
highlight_language = "none"  # of a block that names no language

extensions = [
    "myst_nb",  # Markdown pages, and notebooks, which are executed
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.mathjax",
    "sphinx_copybutton",
    "docstrings",
    "links",
    "pictures",
]
exclude_patterns = ["_build", "_sphinx", "_static"]

myst_enable_extensions = ["dollarmath", "deflist"]
myst_heading_anchors = 4
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_timeout = 300
nb_execution_raise_on_error = True
nb_merge_streams = True
# The notebook works on small batches: on a busy machine a second thread spins and waits, which takes minutes.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Every reference to a name of the library must lead somewhere. Those to other libraries would need their indexes, which
# are on the network.
nitpicky = True
nitpick_ignore_regex = [
    ("py:.*", r"(?!vbcaps).*"),
    # Rooms of the library that the reference leaves out, and names for the type checker.
    ("py:class", r"vbcaps\.training\.(checkpoint|distributed|learner)\..*"),
    ("py:class", r"vbcaps\.(training\.loop\.Options|routing\.fields\.T|models\.Value)"),
]
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_inherit_docstrings = False
autodoc_class_signature = "mixed"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
napoleon_custom_sections = ["Shape", "Axes"]
napoleon_numpy_docstring = False
toc_object_entries_show_parents = "hide"

html_theme = "furo"
html_title = "vbcaps"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False

# One file of MathJax, from a package, so that the pages show formulas without a network.
bundled = find_spec("sphinx-mathjax-offline")
if bundled is not None and bundled.submodule_search_locations:
    html_static_path.append(str(Path(bundled.submodule_search_locations[0], "static/mathjax/tex-svg.js")))
    mathjax_path = "tex-svg.js"

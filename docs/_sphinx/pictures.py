"""A Sphinx extension: a picture that has a twin for dark pages shows each on pages of its own colour.

A page names ``votes.svg`` only, as the page of a repository shows it; if there is a ``votes-dark.svg`` beside it, the
theme chooses between the two.
"""

from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms import SphinxTransform


class DarkTwins(SphinxTransform):
    """Put the dark twin of a picture behind the picture."""

    default_priority = 200

    def apply(self, **options: object) -> None:
        for light in list(self.document.findall(nodes.image)):
            path = Path(light["uri"])
            twin = path.with_stem(path.stem + "-dark").as_posix()
            folder = Path(self.env.srcdir if path.is_absolute() else Path(self.env.doc2path(self.env.docname)).parent)
            if "://" in light["uri"] or not (folder / twin.lstrip("/")).exists():
                continue
            dark = light.deepcopy()
            dark["uri"] = twin
            light["classes"].append("only-light")
            dark["classes"].append("only-dark")
            light.parent.insert(light.parent.index(light) + 1, dark)


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_transform(DarkTwins)
    return dict(parallel_read_safe=True, parallel_write_safe=True)

"""The error of data, in a module that needs nothing: worker processes raise it, too."""

import re

# Control characters, which a terminal obeys; marks that turn the direction of text; halves of characters, which cannot
# be printed at all.
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
LONGEST = 3000  # letters of a message


class DataError(Exception):
    """Data that is missing, damaged or of the wrong kind. The message says which file and what to do.

    Args:
        message: one line; what a terminal would obey in it, as in the name of a file, is written out.
        lines: further lines.
    """

    def __init__(self, message: str, *lines: str):
        super().__init__("\n".join(shortened(written(line).replace("\n", "\\n")) for line in (message, *lines)))


def written(text: str) -> str:
    r"""Return text in which characters that a terminal obeys are written out, such as ``\x1b``.

    Tabs and the ends of lines stay.
    """
    return OBEYED.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def shortened(text: str) -> str:
    """Return text without the middle if it is too long to be read, as with a damaged value in it."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 300]} ... {text[-300:]}"

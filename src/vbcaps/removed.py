"""Fields that recipes and views had in earlier versions.

Recorded runs and weights files of those versions still name them. A file in which such a field is off is read as if the
field were not there; a file in which it is on cannot be reproduced by this version and is refused.
"""

from collections.abc import Mapping
from typing import Any

# For each field: the value that switched it off, and the first version without it.
REMOVED: dict[str, tuple[Any, str]] = dict(
    sharpness=(0.0, "0.2.0"), cutouts=(1, "0.2.0"), paste=(False, "0.2.0"), smoothing=(0.0, "0.2.0")
)  # fmt: skip


def without_removed(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``fields`` without those in ``REMOVED``; a removed field that is on raises a ``ValueError``."""
    for field in fields.keys() & REMOVED.keys():
        off, version = REMOVED[field]
        if fields[field] != off:
            raise ValueError(
                f"{field}={fields[field]!r} was removed in vbcaps {version}: this version reads only {field}={off!r}; "
                "use the version that made the file"
            )
    return {field: value for field, value in fields.items() if field not in REMOVED}

"""The values of a recipe's fields as words, on the command line and in the settings of a sweep, and back."""

import contextlib
import types
from typing import Any, get_args, get_origin

TRUE, FALSE = ("true", "yes", "1"), ("false", "no", "0")


def without_none(kind: Any) -> tuple[Any, bool]:
    """Return a field's type without None, and whether the field may be None."""
    optional = isinstance(kind, types.UnionType)
    (one,) = (member for member in get_args(kind) if member is not type(None)) if optional else (kind,)
    return one, optional


def value_of(text: str, kind: Any) -> Any:
    """Return the value of a field of this type; the recipe checks whether the value is allowed.

    >>> value_of("16,4,4,4", tuple[int, ...]), value_of("none", float | None)
    ((16, 4, 4, 4), None)
    """
    kind, optional = without_none(kind)
    if optional and text.lower() == "none":
        return None
    if get_origin(kind) is tuple:
        words = [] if text.lower() == "none" else text.strip("()[] ").split(",")
        return tuple(_value(word.strip(), get_args(kind)[0]) for word in words)
    return _value(text, kind)


def words_of(value: Any) -> str:
    """Return the word that ``value_of`` reads as this value.

    >>> words_of((16, 4, 4, 4)), words_of(None), words_of(0.001)
    ('16,4,4,4', 'none', '0.001')
    """
    if isinstance(value, tuple):
        return ",".join(map(str, value)) if value else "none"
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _value(word: str, kind: type) -> Any:
    if kind is bool:
        if word.lower() not in TRUE + FALSE:
            raise ValueError(f"{word!r} is neither true nor false")
        return word.lower() in TRUE
    try:
        return kind(word)
    except ValueError:
        what, near = "a number", ""
        if kind is int:
            what = "a whole number"
            with contextlib.suppress(ValueError, OverflowError):
                near = f"; did you mean {round(float(word))}?"
        raise ValueError(f"{word!r} is not {what}{near}") from None

"""The settings that a sweep tries: which fields of a recipe vary, between which values, and what stays.

``lr=log:1e-4,1e-2`` draws from a range by the logarithm, ``contrast=uniform:0,0.5`` evenly, ``iters=int:1,4`` whole
numbers, ``routing=choice:vb,em`` words, and ``epochs=5`` is fixed. Beside the fields of a recipe there are the four
numbers of ``arch``, each alone: ``filters`` and ``types1`` to ``types3``.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vbcaps.training.recipe import Recipe, field_types, left_behind, nearest
from vbcaps.training.words import value_of, without_none, words_of

if TYPE_CHECKING:
    import optuna

KINDS = ("log", "uniform", "int", "choice")
OF_ARCH = ("filters", "types1", "types2", "types3")  # the numbers of arch, which sweeps can vary one by one
# Fields that a sweep sets, that change no result, or that divide the images anew.
HELD = ("validation", "test", "match", "folds", "fold", "name", "save_seconds")
POINTS = 5  # of a range of numbers, in a grid
TRIED = 256  # combinations that are tried before a value counts as impossible
Word = str | int | float


@dataclass(frozen=True)
class Axis:
    """One field that varies.

    Args:
        field: a field of the recipe, or one of ``OF_ARCH``.
        kind: one of ``KINDS``.
        low: the smallest number of a range.
        high: the largest.
        step: of ``int``, between numbers; of ``log`` and ``uniform``, the points of a grid.
        words: of ``choice``, as they are on the command line.
    """

    field: str
    kind: str
    low: float = 0
    high: float = 0
    step: int = 1
    words: tuple[str, ...] = ()

    def grid(self) -> list[Word]:
        """Return the values of a grid."""
        if self.kind == "choice":
            return list(self.words)
        if self.kind == "int":
            return list(range(int(self.low), int(self.high) + 1, self.step))
        shares = [k / (self.step - 1) for k in range(self.step)]
        if self.kind == "log":
            inner = [math.exp(math.log(self.low) * (1 - s) + math.log(self.high) * s) for s in shares[1:-1]]
        else:
            inner = [self.low * (1 - s) + self.high * s for s in shares[1:-1]]
        return [self.low, *(float(f"{x:.6g}") for x in inner), self.high]

    def ends(self) -> list[Word]:
        """Return the values whose validity speaks for all: the ends of a range, or every word."""
        if self.kind == "choice":
            return list(self.words)
        return [int(x) if self.kind == "int" else x for x in (self.low, self.high)]

    def suggest(self, trial: "optuna.Trial") -> Word:
        """Return the trial's value, which the sampler draws unless the trial has one."""
        if self.kind == "choice":
            return trial.suggest_categorical(self.field, self.words)
        if self.kind == "int":
            return trial.suggest_int(self.field, int(self.low), int(self.high), step=self.step)
        return trial.suggest_float(self.field, self.low, self.high, log=self.kind == "log")

    def __str__(self) -> str:
        if self.kind == "choice":
            return f"choice:{(';' if any(',' in word for word in self.words) else ',').join(self.words)}"
        usual = 1 if self.kind == "int" else POINTS
        return f"{self.kind}:{self.low:g},{self.high:g}" + (f",{self.step}" if self.step != usual else "")


def read_fields(words: Sequence[str]) -> tuple[dict[str, str], tuple[Axis, ...]]:
    """Return the fixed fields with their words, and the axes, of words such as ``lr=log:1e-4,1e-2``.

    >>> read_fields(["epochs=5", "routing=choice:vb,em"])
    ({'epochs': '5'}, (Axis(field='routing', kind='choice', low=0, high=0, step=1, words=('vb', 'em')),))
    """
    fixed: dict[str, str] = {}
    axes: dict[str, Axis] = {}
    for one in words:
        field, equals, value = one.partition("=")
        field = field.strip().replace("-", "_")
        if not equals or not value:
            raise ValueError(f"field must be NAME=KIND:VALUES or NAME=VALUE, such as lr=log:1e-4,1e-2, got {one!r}")
        check_name(field)
        if field in fixed or field in axes:
            raise ValueError(f"field {field!r} is given twice")
        kind, colon, values = value.partition(":")
        if colon and kind in KINDS:
            axes[field] = read_axis(field, kind, values)
        elif colon and field != "data" and not set(kind) & set("/\\."):
            raise ValueError(f"{field}: the kind must be one of {KINDS}, got {kind!r}{nearest(kind, KINDS)}")
        else:
            fixed[field] = value
    if not axes:
        raise ValueError("a sweep needs a field that varies, such as --field lr=log:1e-4,1e-2")
    both = [field for field in (*fixed, *axes) if field in OF_ARCH]
    if both and "arch" in {*fixed, *axes}:
        raise ValueError(f"{both[0]} is a number of arch: give one of them")
    return fixed, tuple(axes.values())


def check_name(field: str) -> None:
    known = [*(name for name in field_types() if name not in HELD), *OF_ARCH]
    if field in HELD:
        own = "; --validation sets the share of held-out images" if field in ("validation", "test", "match") else ""
        raise ValueError(f"a sweep cannot change the field {field!r}{own}")
    if field not in known:
        raise ValueError(f"a recipe has no field {field!r}{nearest(field, known)} (`vbcaps recipes NAME` lists them)")


def read_axis(field: str, kind: str, values: str) -> Axis:
    """Return the axis of ``values``, for example ``"1e-4,1e-2"``."""
    of_field = int if field in OF_ARCH else without_none(field_types()[field])[0]
    if kind == "choice":
        words = tuple(word.strip() for word in values.split(";" if ";" in values else ","))
        if len(set(words)) != len(words) or "" in words:
            raise ValueError(f"{field}=choice: the words must differ, and none be empty, got {values!r}")
        for word in words:
            parsed(field, word)
        return Axis(field, kind, words=words)
    if of_field not in ((int,) if kind == "int" else (float,)):
        fits = {int: "int", float: "log or uniform"}.get(of_field, "choice")
        raise ValueError(f"{field}={kind}: this field takes {fits}, or choice")
    parts = values.split(",")
    if len(parts) not in (2, 3):
        raise ValueError(
            f"{field}={kind} needs LOW,HIGH or LOW,HIGH,{'STEP' if kind == 'int' else 'POINTS'}, got {values!r}"
        )
    low, high = (parsed(field, part.strip()) for part in parts[:2])
    step = value_of(parts[2].strip(), int) if len(parts) == 3 else 1 if kind == "int" else POINTS
    if not low < high or (kind == "log" and low <= 0):
        rule = "0 < LOW < HIGH" if kind == "log" else "LOW < HIGH"
        raise ValueError(f"{field}={kind} needs {rule}, got {values!r}")
    if step < 1 + (kind != "int"):
        raise ValueError(f"{field}={kind}: the third number must be at least {1 + (kind != 'int')}, got {step}")
    if kind == "int":
        high = low + (high - low) // step * step
    return Axis(field, kind, low, high, step)


def parsed(field: str, word: str) -> Any:
    """Return the value of a field in a word; an error names the field."""
    try:
        return value_of(word, int if field in OF_ARCH else field_types()[field])
    except ValueError as error:
        raise ValueError(f"{field}: {error}") from None


def changed(base: Recipe, words: dict[str, Word]) -> Recipe:
    """Return the recipe with fields changed, which words or numbers give.

    A network or routing that another field belongs to takes that field back to its default, as `vbcaps train` does.
    """
    values = {field: parsed(field, x) if isinstance(x, str) else x for field, x in words.items()}
    parts = {field: values.pop(field) for field in OF_ARCH if field in values}
    if parts:
        values["arch"] = tuple(parts.get(field, x) for field, x in zip(OF_ARCH, base.arch, strict=True))
    return base.with_fields(**left_behind(base, values) | values)


def check_space(base: Recipe, axes: Sequence[Axis]) -> None:
    """Raise an error of the recipe if a value can be part of no setting, whatever the other fields are."""
    for axis in axes:
        others = [one for one in axes if one is not axis]
        for value in axis.ends():
            first: ValueError | None = None
            for rest in itertools.islice(itertools.product(*(one.ends() for one in others)), TRIED):
                try:
                    changed(base, {axis.field: value} | dict(zip((one.field for one in others), rest, strict=True)))
                    break
                except ValueError as error:
                    first = first or error
            else:
                raise ValueError(f"{axis.field}={value}: {first}")


def size_of(axes: Sequence[Axis], grid: bool) -> float:
    """Return the number of settings; of a space with a continuous range, unless in a grid, infinity."""
    if not grid and any(axis.kind in ("log", "uniform") for axis in axes):
        return math.inf
    return math.prod(len(axis.grid()) for axis in axes)


def grid_of(axes: Sequence[Axis]) -> Iterator[dict[str, Word]]:
    """Return every setting of the grid."""
    for values in itertools.product(*(axis.grid() for axis in axes)):
        yield dict(zip((axis.field for axis in axes), values, strict=True))


def flags_of(words: dict[str, Word], arch: tuple[int, ...]) -> list[str]:
    """Return the flags of `vbcaps train` that set these fields; ``arch`` is that of the base."""
    kinds, flags = field_types(), []
    if any(field in words for field in OF_ARCH):
        numbers = [words.get(field, x) for field, x in zip(OF_ARCH, arch, strict=True)]
        words = {field: x for field, x in words.items() if field not in OF_ARCH} | {"arch": ",".join(map(str, numbers))}
    for field, word in words.items():
        name = field.replace("_", "-")
        if kinds[field] is bool:
            flags.append(f"--{name}" if value_of(str(word), bool) else f"--no-{name}")
        else:
            flags += [f"--{name}", word if isinstance(word, str) else words_of(word)]
    return flags

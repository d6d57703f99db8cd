"""The values in a pickle of a batch of CIFAR-10: dictionaries, lists, words, numbers, arrays of bytes.

A pickle is a program for a small machine with a stack. This machine loads no class and calls no function: where the
machine of Python makes an object, this one notes the name and the arguments (`Made`). It knows the instructions that
protocols 2 to 4 need for these values, runs at most ``STEPS`` of them, and keeps nothing larger than the pickle.
"""

import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from vbcaps.data.contents import Damaged

STEPS = 500_000  # a batch takes 50,000
ARRAYS = {(f"numpy{core}.multiarray", "_reconstruct") for core in (".core", "._core")}
NAMES = ARRAYS | {("numpy", "ndarray"), ("numpy", "dtype")}
MARK = object()


class Made:
    """An object that a pickle asks for: the name, the arguments and the state; nothing is made."""

    def __init__(self, name: tuple[str, str], args: Any = None):
        self.name, self.args, self.state = name, args, None


def unpack_pickle(data: bytes | bytearray | memoryview) -> Any:
    """Return the value that a pickle describes; arrays are `Made`, see ``bytes_of``."""
    return _Machine(memoryview(data)).run()


def bytes_of(made: Any) -> np.ndarray:
    """Return the array of bytes that NumPy would make of a ``Made``."""
    state = made.state if isinstance(made, Made) and made.name in ARRAYS else None
    if not isinstance(state, tuple) or len(state) != 5:
        raise Damaged("it has something else in the place of an array")
    _, shape, dtype, columns_first, data = state
    kind = dtype.args[0] if isinstance(dtype, Made) and isinstance(dtype.args, tuple) and dtype.args else None
    if kind not in (b"u1", "u1") or not isinstance(data, bytes | memoryview):
        raise Damaged("it has an array of another type in the place of bytes")
    if not isinstance(shape, tuple) or len(shape) != 2 or not all(type(size) is int and size >= 0 for size in shape):
        raise Damaged("it has an array of a damaged shape")
    if shape[0] * shape[1] != len(data):
        raise Damaged(f"it has an array of {shape} in {len(data):,} bytes")
    return np.frombuffer(data, np.uint8).reshape(shape, order="F" if columns_first else "C")


class _Machine:
    def __init__(self, view: memoryview):
        self.view, self.at = view, 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        instructions = INSTRUCTIONS
        for _ in range(STEPS):
            code = self.number("B")
            if code == ord("."):
                if len(self.stack) != 1:
                    raise Damaged("its pickle is damaged")
                return self.stack.pop()
            step = instructions.get(code)
            if step is None:
                raise Damaged(f"its pickle has the instruction {code:#04x}, which no batch needs")
            step(self)
        raise Damaged(f"its pickle has more than {STEPS:,} instructions")

    def take(self, count: int) -> memoryview:
        if count > len(self.view) - self.at:
            raise Damaged("it ends early")
        self.at += count
        return self.view[self.at - count : self.at]

    def number(self, kind: str) -> int:
        return struct.unpack(f"<{kind}", self.take(struct.calcsize(kind)))[0]

    def line(self) -> str:
        """Read a word that ends with a line."""
        word = bytes(self.view[self.at : self.at + 100]).partition(b"\n")[0]
        self.take(len(word) + 1)
        return word.decode("ascii")

    def pop(self) -> Any:
        if not self.stack or self.stack[-1] is MARK:
            raise Damaged("its pickle is damaged")
        return self.stack.pop()

    def top(self, kind: type) -> Any:
        if not self.stack or type(self.stack[-1]) is not kind:
            raise Damaged("its pickle is damaged")
        return self.stack[-1]

    def to_mark(self) -> list[Any]:
        """Return the values above the last mark, and remove them and the mark."""
        for at in range(len(self.stack) - 1, -1, -1):
            if self.stack[at] is MARK:
                values = self.stack[at + 1 :]
                del self.stack[at:]
                return values
        raise Damaged("its pickle is damaged")

    def text(self, length: int) -> None:
        self.stack.append(str(self.take(length), "utf-8"))

    def raw(self, length: int) -> None:
        """Push bytes: short ones, which may be keys, as ``bytes``, and others in the memory of the pickle."""
        data = self.take(length)
        self.stack.append(bytes(data) if length < 100 else data)

    def long(self) -> None:
        self.stack.append(int.from_bytes(self.take(min(self.number("B"), 16)), "little", signed=True))

    def remember(self, key: int) -> None:
        if not self.stack:
            raise Damaged("its pickle is damaged")
        self.memo[key] = self.stack[-1]

    def recall(self, key: int) -> None:
        if key not in self.memo:
            raise Damaged("its pickle is damaged")
        self.stack.append(self.memo[key])

    def name(self, module: Any, name: Any) -> None:
        if (module, name) not in NAMES:
            raise Damaged(f"its pickle asks for {module[:40]}.{name[:40]}, which no array needs")
        self.stack.append(Made((module, name)))

    def global_(self) -> None:
        module = self.line()
        self.name(module, self.line())

    def stack_global(self) -> None:
        name = self.pop()
        module = self.pop()
        if not isinstance(name, str) or not isinstance(module, str):
            raise Damaged("its pickle is damaged")
        self.name(module, name)

    def reduce(self) -> None:
        args = self.pop()
        what = self.pop()
        if not isinstance(what, Made) or what.args is not None or not isinstance(args, tuple):
            raise Damaged("its pickle is damaged")
        self.stack.append(Made(what.name, args))

    def build(self) -> None:
        state = self.pop()
        self.top(Made).state = state

    def collect(self, count: int) -> None:
        """Put the last values into a tuple."""
        values = [self.pop() for _ in range(count)]
        self.stack.append(tuple(reversed(values)))

    def append(self) -> None:
        value = self.pop()
        self.top(list).append(value)

    def appends(self) -> None:
        values = self.to_mark()
        self.top(list).extend(values)

    def set_item(self) -> None:
        value = self.pop()
        self.set_items([self.pop(), value])

    def set_items(self, values: list[Any]) -> None:
        if len(values) % 2 or not all(type(key) in (bytes, str) for key in values[::2]):
            raise Damaged("its pickle is damaged")
        self.top(dict).update(zip(values[::2], values[1::2], strict=True))


def _push(value: Any) -> Callable[[_Machine], None]:
    return lambda machine: machine.stack.append(value)


INSTRUCTIONS: dict[int, Callable[[_Machine], Any]] = {
    ord(code): step
    for code, step in {
        "\x80": lambda m: m.number("B"),  # the protocol
        "\x95": lambda m: m.number("Q"),  # the length of a frame
        "(": _push(MARK), "N": _push(None), "\x88": _push(True), "\x89": _push(False), ")": _push(()),
        "}": lambda m: m.stack.append({}), "]": lambda m: m.stack.append([]),
        "K": lambda m: m.stack.append(m.number("B")),
        "M": lambda m: m.stack.append(m.number("H")),
        "J": lambda m: m.stack.append(m.number("i")),
        "\x8a": lambda m: m.long(),
        "U": lambda m: m.raw(m.number("B")), "C": lambda m: m.raw(m.number("B")),
        "T": lambda m: m.raw(m.number("I")), "B": lambda m: m.raw(m.number("I")),
        "\x8e": lambda m: m.raw(m.number("Q")),
        "X": lambda m: m.text(m.number("I")), "\x8c": lambda m: m.text(m.number("B")),
        "q": lambda m: m.remember(m.number("B")), "r": lambda m: m.remember(m.number("I")),
        "\x94": lambda m: m.remember(len(m.memo)),
        "h": lambda m: m.recall(m.number("B")), "j": lambda m: m.recall(m.number("I")),
        "c": lambda m: m.global_(), "\x93": lambda m: m.stack_global(), "R": lambda m: m.reduce(),
        "b": lambda m: m.build(),
        "t": lambda m: m.stack.append(tuple(m.to_mark())),
        "\x85": lambda m: m.collect(1), "\x86": lambda m: m.collect(2), "\x87": lambda m: m.collect(3),
        "a": lambda m: m.append(), "e": lambda m: m.appends(),
        "s": lambda m: m.set_item(), "u": lambda m: m.set_items(m.to_mark()),
        "0": lambda m: m.pop(),
    }.items()
}  # fmt: skip

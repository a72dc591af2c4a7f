"""Read the one kind of pickle the CIFAR files are, as data: opcodes are interpreted here and nothing is ever called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, NoReturn

from sosp.errors import DataError

LONGEST = 2_000_000  # opcodes; an official file has at most some 300,000


class PickleName(Enum):
    """The names such a file may mention."""

    RECONSTRUCT = auto()
    NDARRAY = auto()
    DTYPE = auto()


NAMES = {
    "numpy.core.multiarray _reconstruct": PickleName.RECONSTRUCT,
    "numpy._core.multiarray _reconstruct": PickleName.RECONSTRUCT,
    "numpy ndarray": PickleName.NDARRAY,
    "numpy dtype": PickleName.DTYPE,
}


@dataclass
class ByteArray:
    """An array of uint8, as the file describes it; filled in by a later opcode."""

    shape: Any = None
    raw: bytes = b""


class Uint8Type:
    """The only type an array may have."""


def parse_pickle(data: bytes) -> Any:
    """The value in a pickle, of dicts, lists, tuples, numbers, texts and ``Bytes``; anything else is a DataError."""
    machine = PickleInterpreter(data)
    try:
        return machine.run()
    except (LookupError, ValueError, TypeError, AttributeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"is damaged: it cannot be decoded at byte {machine.at} ({type(error).__name__}).") from error


def refuse_content(what: str) -> NoReturn:
    raise DataError(f"contains {what}, which CIFAR files never contain. It was not executed.")


class PickleInterpreter:
    """A stack, a memo and a place in the bytes."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.marks: list[int] = []  # heights of the stack
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        for _ in range(LONGEST):
            code = self.data[self.at]
            self.at += 1
            if code == STOP:
                return self.stack.pop()
            act = OPCODES.get(code)
            if act is None:
                refuse_content(f"the pickle opcode {bytes([code])!r} at byte {self.at - 1}")
            act(self)
        return refuse_content(f"more than {LONGEST} opcodes")

    # --- reading ---

    def take(self, count: int) -> bytes:
        found = self.data[self.at : self.at + count]
        if len(found) < count:
            raise DataError(f"ends early: {count} bytes should follow byte {self.at}, but only {len(found)} do.")
        self.at += count
        return found

    def number(self, width: int, signed: bool = False) -> int:
        return int.from_bytes(self.take(width), "little", signed=signed)

    def line(self) -> str:
        end = self.data.index(b"\n", self.at, self.at + 256)
        found = self.take(end - self.at).decode()
        self.at += 1
        return found

    # --- the stack ---

    def push(self, value: Any) -> None:
        self.stack.append(value)

    def above_mark(self) -> list[Any]:
        height = self.marks.pop()
        found = self.stack[height:]
        del self.stack[height:]
        return found

    def group(self, count: int) -> None:
        found = tuple(self.stack.pop() for _ in range(count))
        self.push(found[::-1])

    def extend(self, items: list[Any]) -> None:
        target = self.stack[-1]
        target.extend(items) if type(target) is list else refuse_content("an append to something that is not a list")

    def update(self, items: list[Any]) -> None:
        target, keys = self.stack[-1], [decode_text(key) for key in items[::2]]
        target.update(zip(keys, items[1::2], strict=True)) if type(target) is dict else refuse_content(
            "a key outside a dict"
        )

    # --- names, and what is made with them ---

    def name(self, module: Any, name: Any) -> None:
        found = f"{decode_text(module)} {decode_text(name)}"
        self.push(NAMES[found] if found in NAMES else refuse_content(f"the name {found.replace(' ', '.')[:100]!r}"))

    def reduce(self) -> None:
        given, made_by = self.stack.pop(), self.stack.pop()
        if made_by is PickleName.RECONSTRUCT and given[0] is PickleName.NDARRAY:
            self.push(ByteArray())
        elif made_by is PickleName.DTYPE:
            self.push(
                Uint8Type()
                if decode_text(given[0]) == "u1"
                else refuse_content(f"an array of {decode_text(given[0])[:20]!r}")
            )
        else:
            refuse_content("a call of something that is not a function")

    def build(self) -> None:
        state = self.stack.pop()
        target = self.stack[-1]
        if isinstance(target, ByteArray):
            _, shape, kind, fortran, raw = state
            if not isinstance(kind, Uint8Type) or fortran is not False or type(raw) is not bytes:
                refuse_content("an array that is not plain bytes")
            target.shape, target.raw = shape, raw
        elif not isinstance(target, Uint8Type):
            refuse_content("the state of an object")


def decode_text(value: Any) -> str:
    """A key or a name. Python 2 wrote its texts as bytes."""
    if type(value) not in (str, bytes) or len(value) > 256:  # a long one, used often, would be costly
        refuse_content(f"a {type(value).__name__} in place of a short text")
    return value if isinstance(value, str) else value.decode("latin1")


def _put(m: PickleInterpreter, place: int) -> None:
    m.memo[place] = m.stack[-1]


STOP = ord(".")
OPCODES: dict[int, Callable[[PickleInterpreter], Any]] = {
    0x80: lambda m: m.take(1),  # protocol
    0x95: lambda m: m.take(8),  # frame
    ord("("): lambda m: m.marks.append(len(m.stack)),
    ord("N"): lambda m: m.push(None),
    0x88: lambda m: m.push(True),
    0x89: lambda m: m.push(False),
    ord("K"): lambda m: m.push(m.number(1)),
    ord("M"): lambda m: m.push(m.number(2)),
    ord("J"): lambda m: m.push(m.number(4, signed=True)),
    ord("U"): lambda m: m.push(m.take(m.number(1))),
    ord("T"): lambda m: m.push(m.take(m.number(4))),
    ord("C"): lambda m: m.push(m.take(m.number(1))),
    ord("B"): lambda m: m.push(m.take(m.number(4))),
    ord("X"): lambda m: m.push(m.take(m.number(4)).decode()),
    0x8C: lambda m: m.push(m.take(m.number(1)).decode()),
    ord("}"): lambda m: m.push({}),
    ord("]"): lambda m: m.push([]),
    ord(")"): lambda m: m.push(()),
    0x85: lambda m: m.group(1),
    0x86: lambda m: m.group(2),
    0x87: lambda m: m.group(3),
    ord("t"): lambda m: m.push(tuple(m.above_mark())),
    ord("a"): lambda m: m.extend([m.stack.pop()]),
    ord("e"): lambda m: m.extend(m.above_mark()),
    ord("s"): lambda m: m.update([m.stack.pop(), m.stack.pop()][::-1]),
    ord("u"): lambda m: m.update(m.above_mark()),
    ord("q"): lambda m: _put(m, m.number(1)),
    ord("r"): lambda m: _put(m, m.number(4)),
    0x94: lambda m: _put(m, len(m.memo)),
    ord("h"): lambda m: m.push(m.memo[m.number(1)]),
    ord("j"): lambda m: m.push(m.memo[m.number(4)]),
    ord("c"): lambda m: m.name(m.line(), m.line()),
    0x93: lambda m: m.name(*[m.stack.pop(), m.stack.pop()][::-1]),
    ord("R"): PickleInterpreter.reduce,
    ord("b"): PickleInterpreter.build,
}

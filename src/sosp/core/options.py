"""Define an option by its kind, limits and help text; it becomes a config key and a command-line flag."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from sosp.errors import ArgumentError, check_choice, suggest_name


@dataclass(frozen=True)
class OptionKind:
    """The type of value that an option takes."""

    wanted: str  # "a whole number", for messages
    plain: Any  # type that the command line parses
    read: Callable[[Any], Any]  # converts the value; ValueError for any other value


def _text(value: Any) -> str:
    return value if isinstance(value, str) and value else _refuse_value()


def _whole(value: Any) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) else _refuse_value()


def _number(value: Any) -> float:
    fine = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    return float(value) if fine else _refuse_value()


def _flag(value: Any) -> bool:
    return value if isinstance(value, bool) else _refuse_value()


def _many(read: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    return lambda value: tuple(map(read, value)) if isinstance(value, (list, tuple)) else _refuse_value()


def _split_list(read: Callable[[Any], Any]) -> Callable[[Any], tuple[Any, ...]]:
    """Return a reader of lists, which the command line separates with commas."""

    def found(value: Any) -> tuple[Any, ...]:
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",")]
        return tuple(map(read, value)) if isinstance(value, (list, tuple)) else _refuse_value()

    return found


def _as_number(value: Any) -> float:
    return float(value) if isinstance(value, str) else _number(value)


def _shape(value: Any) -> str:
    """Check a shape such as ``3x32x32`` and return it in lower case."""
    sizes = value.lower().split("x") if isinstance(value, str) else _refuse_value()
    return value.lower() if all(size.isascii() and size.isdigit() and int(size) for size in sizes) else _refuse_value()


def _widths(value: Any) -> float | dict[str, float]:
    """Return a factor, or ``{"layer1": 2.0}``, which the command line writes as ``layer1=2.0,conv1=1.5``."""
    if isinstance(value, Mapping):
        return _shares(value)
    if not isinstance(value, str):
        return _number(value)
    return _shares(value) if "=" in value else float(value)


def _shares(value: Any) -> dict[str, float]:
    """Return layer -> number, which the command line writes as ``layer1=2.0,conv1=1.5``."""
    if isinstance(value, Mapping):
        return {str(name): _number(share) for name, share in value.items()}
    parts = value.split(",") if isinstance(value, str) else _refuse_value()
    return {name.strip(): float(share) for name, _, share in (part.partition("=") for part in parts)}


def _refuse_value() -> Any:
    raise ValueError


def _auto_or_number(value: Any) -> float | str:
    return value if value == "auto" else _as_number(value)


def _auto_or_whole(value: Any) -> int | str:
    if isinstance(value, str):
        return value if value == "auto" else int(value)
    return _whole(value)


TEXT = OptionKind("a string", str, _text)
WHOLE = OptionKind("a whole number", int, _whole)
NUMBER = OptionKind("a number", float, _number)
AUTO_OR_NUMBER = OptionKind('a number or "auto"', str, _auto_or_number)
AUTO_OR_WHOLE = OptionKind('a whole number or "auto"', str, _auto_or_whole)
FLAG = OptionKind("true or false", bool, _flag)
TEXTS = OptionKind("a list of strings", list[str], _many(_text))
NUMBERS = OptionKind("a list of numbers", list[float], _many(_number))
NAMES = OptionKind("a list of names, such as a,b", str, _split_list(_text))
RATIOS = OptionKind("a list of numbers, such as 0.3,0.5", str, _split_list(_as_number))
SHAPE = OptionKind("a shape such as 3x32x32", str, _shape)
SHARES = OptionKind("a number for each layer, such as layer1=0.5", str, _shares)
WIDTHS = OptionKind("a number, or a number for each layer, such as layer1=0.5", str, _widths)


@dataclass(frozen=True)
class Option:
    """One key of a config section and its command-line flag."""

    kind: OptionKind
    help: str
    choices: tuple[str, ...] = ()
    low: float = -math.inf
    high: float = math.inf
    flag: str | None = None  # if it differs from the key; "" if there is no flag
    shown: str | None = None  # the default in words, if the default None has a meaning

    def check(self, value: Any, label: str) -> Any:
        """Return the value converted to its type; raise ArgumentError with its name ``label`` if it is invalid."""
        try:
            found = self.kind.read(value)
        except ValueError:
            raise ArgumentError(f"{label} should be {self.kind.wanted}, not {value!r}.") from None
        if self.choices:
            check_choice(label, found, self.choices)
        if isinstance(found, (int, float)) and not self.low <= found <= self.high:
            bounds = f"at least {self.low:g}" if self.high == math.inf else f"from {self.low:g} to {self.high:g}"
            raise ArgumentError(f"{label}={value!r} must be {self.kind.wanted}, {bounds}.")
        return found


def define_option(kind: OptionKind, help: str, default: Any = None, **more: Any) -> Any:
    """Return a dataclass field that holds an ``Option``."""
    return dataclasses.field(default=default, metadata={"option": Option(kind, help, **more)})


def borrow_option(section: type, key: str) -> Any:
    """Return a field with the option and the default of another section's."""
    found = next(f for f in dataclasses.fields(section) if f.name == key)
    return dataclasses.field(default=found.default, metadata=found.metadata)


def collect_options(section: type) -> dict[str, Option]:
    """Return key -> option in the order of the section."""
    return {f.name: f.metadata["option"] for f in dataclasses.fields(section) if "option" in f.metadata}


def check_options(section: type, given: Mapping[str, Any], label: Callable[[str], str]) -> dict[str, Any]:
    """Return the given values in their types; raise ArgumentError for an unknown key and suggest the nearest one."""
    known = collect_options(section)
    for key in given:
        if key not in known:
            raise ArgumentError(f"{label(key)} is not known.{suggest_name(key, known)} Known keys: {_list(known)}.")
    return {key: known[key].check(value, label(key)) for key, value in given.items()}


def _list(names: Iterable[str]) -> str:
    return ", ".join(names)

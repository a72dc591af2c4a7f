"""What a JSON document claims, checked: every function returns a value of its type, or refuses and says where."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar

from sosp.errors import CheckpointError

T = TypeVar("T")
Check = Callable[[Any, str], T]  # (a value, where it stands) -> the value in its type

LARGEST = 2**63 - 1


def parse_json(text: str) -> Any:
    """JSON without NaN and Infinity; nested too deeply is refused like any other text that is not JSON."""
    try:
        return json.loads(text, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"its description is not valid JSON ({reprlib.repr(str(error))}).") from error


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a number")


def refuse_value(value: Any, at: str, wanted: str) -> NoReturn:
    """``recipes[0].sizes should be an object, not 3``."""
    raise CheckpointError(f"its description is wrong: {at} should be {wanted}, not {reprlib.repr(value)}.")


def check_string(value: Any, at: str) -> str:
    return value if isinstance(value, str) else refuse_value(value, at, "a string")


def check_boolean(value: Any, at: str) -> bool:
    return value if isinstance(value, bool) else refuse_value(value, at, "true or false")


def check_integer(value: Any, at: str, low: int = 0, high: int = LARGEST) -> int:
    """A whole number between ``low`` and ``high``; true and false are none, though Python counts with them."""
    if type(value) is not int or not low <= value <= high:
        refuse_value(value, at, f"a whole number from {low} to {high}")
    return value


def check_float(value: Any, at: str) -> float:
    if type(value) is not float or not math.isfinite(value):
        refuse_value(value, at, "a finite decimal number")
    return value


def expect_choice(known: Iterable[str]) -> Check[str]:
    """A check that takes one of these words."""
    words = list(known)
    return lambda value, at: (
        value if isinstance(value, str) and value in words else refuse_value(value, at, f"one of {words}")
    )


def expect_list(item: Check[T]) -> Check[tuple[T, ...]]:
    """A check that takes a list of such items."""

    def check(value: Any, at: str) -> tuple[T, ...]:
        found: list[Any] = value if isinstance(value, list) else refuse_value(value, at, "a list")
        return tuple(item(x, f"{at}[{i}]") for i, x in enumerate(found))

    return check


def expect_object(item: Check[T]) -> Check[dict[str, T]]:
    """A check that takes an object whose values are such items."""

    def check(value: Any, at: str) -> dict[str, T]:
        found: dict[str, Any] = value if isinstance(value, dict) else refuse_value(value, at, "an object")
        return {key: item(x, f"{at}[{reprlib.repr(key)}]") for key, x in found.items()}

    return check


def allow_null(item: Check[T]) -> Check[T | None]:
    """A check that also takes null."""
    return lambda value, at: None if value is None else item(value, at)


def expect_fields(**checks: Check[Any]) -> Check[dict[str, Any]]:
    """A check that takes an object with exactly these keys."""

    def check(value: Any, at: str) -> dict[str, Any]:
        if not isinstance(value, dict) or value.keys() != checks.keys():
            refuse_value(value, at, f"an object with the keys {', '.join(checks)}")
        return {key: item(value[key], f"{at}.{key}" if at else key) for key, item in checks.items()}

    return check

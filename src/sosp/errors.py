"""What can go wrong, by name: every message says what was found and the way out."""

import difflib
from collections.abc import Iterable
from numbers import Integral, Real
from typing import TypeGuard


class SospError(Exception):
    """Anything this library refuses to do."""


class ArgumentError(SospError, ValueError):
    """An argument outside what the function takes."""


class BudgetError(ArgumentError):
    """A budget cannot be met, whatever is removed."""


class StructureError(SospError, ValueError):
    """The model has nothing to prune there, or what was named does not exist."""


class DataError(SospError, ValueError):
    """The data is empty, of another shape or on another device than the model."""


class LossError(SospError, ValueError):
    """The loss is not a finite number per example, or not one the method can use."""


class OutputError(SospError, TypeError):
    """The model's output holds no logits that could be found."""


class DifferentiationError(SospError, RuntimeError):
    """The model cannot be differentiated as the method needs it."""


class SurgeryError(SospError, RuntimeError):
    """A network could not be made smaller or larger without changing what it computes."""


class DisconnectedError(SospError, ValueError):
    """The mask would cut the network in two."""


class CheckpointError(SospError, ValueError):
    """A file that cannot be written, or that is not what was written, or not for this model."""


class TrainingError(SospError, RuntimeError):
    """Training cannot go on: the loss is no number any more."""


class OutOfMemoryError(SospError, RuntimeError):
    """A batch does not fit into memory."""


class RunError(SospError, ValueError):
    """A folder that holds something else than the run that was asked for."""


def suggest_name(word: str, known: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` or nothing."""
    close = difflib.get_close_matches(word, list(known), n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def check_choice(what: str, found: object, known: Iterable[str]) -> None:
    """Refuse a name that is not in the list, with the list."""
    names = list(known)
    if found not in names:
        raise ArgumentError(
            f"{what}={found!r} is not known.{suggest_name(str(found), names)} Choose one of: {', '.join(names)}."
        )


def check_whole_number(what: str, found: object, least: int = 1) -> int:
    """Refuse what is no whole number, or too small."""
    if not is_whole(found) or found < least:
        raise ArgumentError(f"{what}={found!r} must be a whole number, at least {least}.")
    return int(found)


def is_whole(found: object) -> TypeGuard[int]:
    """A whole number by its type, numpy's as well."""
    return isinstance(found, Integral) and not isinstance(found, bool)


def is_number(found: object) -> TypeGuard[float]:
    """A number, numpy's as well."""
    return isinstance(found, Real) and not isinstance(found, bool)

"""Errors in code of the user's: one line that names the file, the line and the error."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from traceback import extract_tb
from typing import Any

from sosp.errors import ArgumentError, SospError

OURS = Path(__file__).resolve().parents[1]


@contextmanager
def convert_user_errors(name: str, given: str = "without arguments") -> Iterator[None]:
    """Refuse what goes wrong in the code that ``file.py:function`` names; what goes wrong elsewhere is a bug of ours.

    ``given``: how the function is called.
    """
    try:
        yield
    except SospError:
        raise
    except Exception as error:
        text = format_error_message(error)
        if isinstance(error, SyntaxError) and error.filename is not None:
            where, text = f"{error.filename}, line {error.lineno}", error.msg
        elif _is_refused(name, error):
            where, text = _definition(name), f"{text}. It is called {given}"
        elif (where := _deepest(name, error)) == "":
            raise
        raise ArgumentError(f"{name} does not run: {where}: {type(error).__name__}: {text}.") from error


def format_error_message(error: Exception) -> str:
    """What an error says, to stand in a sentence."""
    return next(iter(str(error).splitlines()), "").removesuffix(".")


def _file(name: str) -> Path | None:
    """Where the function is."""
    place = name.rpartition(":")[0]
    if place.endswith(".py"):
        return Path(place).expanduser()
    try:
        spec = find_spec(place)
    except (ImportError, AttributeError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.has_location and spec.origin else None


def _is_refused(name: str, error: Exception) -> bool:
    """The call itself does not fit the function: not one line of it has run."""
    wanted = name.rpartition(":")[2]
    told = str(error).startswith((f"{wanted}(", f"{wanted}."))
    return isinstance(error, TypeError) and told and not _deepest(name, error)


def _definition(name: str) -> str:
    place, _, wanted = name.rpartition(":")
    module = sys.modules.get(f"sosp_user_{Path(place).stem}" if place.endswith(".py") else place)
    found: Any = inspect.unwrap(getattr(module, wanted))
    code = getattr(found.__init__ if inspect.isclass(found) else found, "__code__", None)
    return place if code is None else f"{code.co_filename}, line {code.co_firstlineno}"


def _deepest(name: str, error: Exception) -> str:
    """The last line of the user's that was at work, in the file that is named or in one that lies beside it."""
    file = _file(name)
    if file is None:
        return ""
    home = file.resolve().parent
    frames = [f for f in extract_tb(error.__traceback__) if _is_theirs(Path(f.filename).resolve(), home)]
    return f"{frames[-1].filename}, line {frames[-1].lineno}" if frames else ""


def _is_theirs(file: Path, home: Path) -> bool:
    """Not of this library, nor of a package that is installed below the user's folder."""
    if home not in file.parents or OURS in file.parents:
        return False
    return "site-packages" not in file.relative_to(home).parts

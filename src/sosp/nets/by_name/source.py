"""What a source of networks is, and what the sources share."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torch import nn

from sosp.core.user_errors import first_line
from sosp.errors import ArgumentError, SospError, nearest
from sosp.nets import Width

Shape = tuple[int, ...]  # of one input, without the batch
ROWS = 2  # of an example: a batch norm in train mode needs more than one


@dataclass(frozen=True)
class Source:
    """How to make a network of some origin, and inputs for it."""

    make: Callable[[str, int | None, Width], Any]  # name, classes, width
    example: Callable[[str, nn.Module], Any]  # name, network


def package(name: str) -> ModuleType:
    """An optional package, or which one to install."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise SospError(f"{name} cannot be imported: it needs {error.name}: pip install {error.name}") from error
        raise SospError(f"{name} is not installed: pip install {name}") from error
    except Exception as error:  # whatever a package does when it is imported
        raise SospError(
            f"{name} is installed, but cannot be imported: {type(error).__name__}: {first_line(error)}. "
            f"Does it belong to this version of torch (python -c 'import {name}')?"
        ) from error


def check_known(source: str, name: str, names: Iterable[str]) -> None:
    """Refuse what the source does not have, and name the nearest."""
    known = list(names)
    if name not in known:
        hint = nearest(name, known).replace("mean '", f"mean '{source}:")
        raise ArgumentError(f"{source} has no model {name!r}.{hint}")

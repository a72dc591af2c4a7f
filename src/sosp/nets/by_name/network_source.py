"""What a source of networks is, and what the sources share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from sosp.errors import ArgumentError, suggest_name
from sosp.nets import Width

InputShape = tuple[int, ...]  # of one input, without the batch
ROWS = 2  # of an example: a batch norm in train mode needs more than one


@dataclass(frozen=True)
class NetworkSource:
    """How to make a network of some origin, and inputs for it."""

    make: Callable[[str, int | None, Width], Any]  # name, classes, width
    example: Callable[[str, nn.Module], Any]  # name, network


def check_network_name(source: str, name: str, names: Iterable[str]) -> None:
    """Refuse what the source does not have, and name the nearest."""
    known = list(names)
    if name not in known:
        hint = suggest_name(name, known).replace("mean '", f"mean '{source}:")
        raise ArgumentError(f"{source} has no model {name!r}.{hint}")

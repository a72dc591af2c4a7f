"""What the caller gave, looked at: numbers, the first examples, the structures, the schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sosp.core.batches import first_rows, is_source
from sosp.core.borrow import home
from sosp.data.source import generator
from sosp.errors import ArgumentError, DataError
from sosp.graph.records import Structures
from sosp.graph.structures import find_structures
from sosp.scoring.method import refuse_unsuited
from sosp.scoring.score import METHODS, check_structures
from sosp.training.feed import Feed
from sosp.training.randomness import apart
from sosp.training.schedule import Schedule, schedule_of
from sosp.training.user_data import both, moved, read

ROWS = 2  # of the example


def number(what: str, found: Any, least: float = 0.0, most: float = math.inf) -> float:
    """Refuse what is no finite number in this span."""
    fine = isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found)
    if not fine or not least <= found <= most:
        span = f"{least:g} at least" if most == math.inf else f"from {least:g} to {most:g}"
        raise ArgumentError(f"{what}={found!r} must be a number, {span}.")
    return float(found)


def example_of(model: nn.Module, data: Any) -> Any:
    """A few inputs of the training data, where the network is."""
    source, _ = both(data)
    batches = source.ordered(batch=ROWS, limit=ROWS) if is_source(source) else apart(source, generator(0, 0))
    head = next(iter(batches), None)
    if head is None:
        raise DataError("the training data is empty.")
    return moved(first_rows(read(head)[0], ROWS), home(model))


def examples_in(data: Any, schedule: Schedule) -> int:
    """How many examples an epoch has."""
    return Feed(both(data)[0], schedule.batch, 0, torch.device("cpu"), False).examples


def structures_of(
    method: str, model: nn.Module, example: Any, given: Structures | None, needs: tuple[str, ...] = ()
) -> Structures:
    """Those that were given, or filters; what the method cannot learn on this network is refused by name."""
    found = find_structures(model, example) if given is None else given
    check_structures(model, found, "random")  # of this network; it takes any structures
    table = {**METHODS, method: replace(METHODS[method], needs=needs)}  # being learned is what is about to happen
    refuse_unsuited(method, table, model, found)
    return found


def schedule_for(method: str, given: Schedule | str) -> Schedule:
    """The schedule, which must not keep an average: that would be of the weights without what the method learns."""
    schedule = schedule_of(given)
    if schedule.ema:
        raise ArgumentError(
            f"ema={schedule.ema} keeps an average of the weights alone, and {method!r} learns more than weights. "
            "Use ema=0."
        )
    return schedule


def validation(model: nn.Module, data: Any, examples: int, seed: int) -> Any:
    """So many examples of the training data, not augmented, where the network is; the first ones of a loader."""
    source, _ = both(data)
    if is_source(source):
        held = source.subset(min(examples, len(source)), seed)
        return held.to(home(model)) if hasattr(held, "to") else held
    return list(_first(apart(source, generator(seed, 0)), examples))


def _first(batches: Iterable[Any], examples: int) -> Iterator[tuple[Any, Tensor]]:
    for x, y in map(read, batches):
        yield first_rows(x, examples), y[:examples]
        examples -= len(y)
        if examples <= 0:
            return

"""What the caller gave, looked at: numbers, the first examples, the structures, the schedule."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from sosp.core.batches import is_source, take_examples
from sosp.core.borrowed_model import find_device
from sosp.data.batch_source import make_generator
from sosp.errors import ArgumentError, DataError
from sosp.graph.records import Structures
from sosp.graph.structures import find_structures
from sosp.scoring.methods import METHODS
from sosp.scoring.score import check_requirements, check_structures
from sosp.training.epoch_batches import TrainingBatches
from sosp.training.randomness import iterate_with_generator
from sosp.training.schedule import Schedule, resolve_schedule
from sosp.training.user_data import move_to_device, parse_batch, split_train_test

ROWS = 2  # of the example


def check_number(what: str, found: Any, least: float = 0.0, most: float = math.inf) -> float:
    """Refuse what is no finite number in this span."""
    fine = isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found)
    if not fine or not least <= found <= most:
        span = f"at least {least:g}" if most == math.inf else f"from {least:g} to {most:g}"
        raise ArgumentError(f"{what}={found!r} must be a number, {span}.")
    return float(found)


def take_example(model: nn.Module, data: Any) -> Any:
    """A few inputs of the training data, where the network is."""
    source, _ = split_train_test(data)
    batches = (
        source.ordered(batch=ROWS, limit=ROWS)
        if is_source(source)
        else iterate_with_generator(source, make_generator(0, 0))
    )
    head = next(iter(batches), None)
    if head is None:
        raise DataError("the training data is empty.")
    return move_to_device(take_examples(parse_batch(head)[0], ROWS), find_device(model))


def count_epoch_examples(data: Any, schedule: Schedule) -> int:
    """How many examples an epoch has."""
    return TrainingBatches(split_train_test(data)[0], schedule.batch, 0, torch.device("cpu"), False).examples


def prepare_structures(
    method: str, model: nn.Module, example: Any, given: Structures | None, needs: tuple[str, ...] = ()
) -> Structures:
    """Those that were given, or filters; what the method cannot learn on this network is refused by name."""
    found = find_structures(model, example) if given is None else given
    check_structures(model, found, "random")  # of this network; it takes any structures
    table = {**METHODS, method: replace(METHODS[method], needs=needs)}  # being learned is what is about to happen
    check_requirements(method, table, model, found)
    return found


def prepare_schedule(method: str, given: Schedule | str) -> Schedule:
    """The schedule, which must not keep an average: that would be of the weights without what the method learns."""
    schedule = resolve_schedule(given)
    if schedule.ema:
        raise ArgumentError(
            f"ema={schedule.ema} keeps an average of the weights alone, and {method!r} learns more than weights. "
            "Use ema=0."
        )
    return schedule


def take_validation_set(model: nn.Module, data: Any, examples: int, seed: int) -> Any:
    """So many examples of the training data, not augmented, where the network is; the first ones of a loader."""
    source, _ = split_train_test(data)
    if is_source(source):
        held = source.subset(min(examples, len(source)), seed)
        return held.to(find_device(model)) if hasattr(held, "to") else held
    return list(_first(iterate_with_generator(source, make_generator(seed, 0)), examples))


def _first(batches: Iterable[Any], examples: int) -> Iterator[tuple[Any, Tensor]]:
    for x, y in map(parse_batch, batches):
        yield take_examples(x, examples), y[:examples]
        examples -= len(y)
        if examples <= 0:
            return

"""Solve for the constant that gives a network a number of parameters: exact counts, one step after the other."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from sosp.errors import ArgumentError, is_whole

MOST = 64.0  # as wide as ``sosp.widen`` makes a layer
STEPS = 30  # halvings, to 6e-8: two steps of layers with up to 4000 channels are further apart
DIGITS = 10

Count = Callable[[float], int]  # factor for all layers -> parameters


@dataclass(frozen=True)
class UniformFactor:
    """A factor for every width, and the parameters that it gives beside those that were wanted."""

    factor: float
    params: int
    target: int


def match_parameters(count: Count, target: int) -> UniformFactor:
    """The factor, 1 at least, whose network has the number of parameters that is nearest to ``target``.

    Widths are whole numbers, so the count is a staircase in the factor. The step on which it passes the target is found
    by halving; of the two heights there the nearer one is taken, and of the factors on it the one that is shortest to
    write.
    """
    count = cache(count)
    least, most = count(1.0), count(MOST)
    if not is_whole(target) or not least <= target <= most:
        raise ArgumentError(
            f"no constant gives the network {target!r} parameters: with every layer as it is it has {least:,}, and "
            f"{MOST:g} times as wide {most:,}."
        )
    low, high = 1.0, MOST  # count(low) <= target <= count(high), as is checked above
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if count(middle) <= target else (low, middle)
    below, above = count(low), count(high)
    if target - below <= above - target:
        return UniformFactor(_shortest(count, low, below, math.floor), below, target)
    return UniformFactor(_shortest(count, high, above, math.ceil), above, target)


def _shortest(count: Count, factor: float, params: int, rounded: Callable[[float], int]) -> float:
    """The factor with the fewest digits that gives as many parameters, away from the step."""
    for digits in range(DIGITS):
        found = rounded(factor * 10**digits) / 10**digits
        if 1 <= found <= MOST and count(found) == params:
            return found
    return factor

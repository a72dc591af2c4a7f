"""Solve for the constant width factor that gives a network a number of parameters, by exact counts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from sosp.errors import ArgumentError, is_whole

MOST = 64.0  # the largest factor of ``sosp.widen``
STEPS = 30  # halvings, to 6e-8: two steps of layers with up to 4000 channels are further apart
DIGITS = 10

Count = Callable[[float], int]  # factor for all layers -> parameters


@dataclass(frozen=True)
class UniformFactor:
    """A factor for every width, the parameters that it gives, and the parameters that were requested."""

    factor: float
    params: int
    target: int


def match_parameters(count: Count, target: int) -> UniformFactor:
    """Return the factor, at least 1, whose number of parameters is nearest to ``target``.

    Widths are whole numbers, so the count is a step function of the factor. Bisection finds the step that passes the
    target. Of the counts before and after it, the nearer one is used, with the factor of the fewest digits.
    """
    count = cache(count)
    least, most = count(1.0), count(MOST)
    if not is_whole(target) or not least <= target <= most:
        raise ArgumentError(
            f"no constant factor gives the network {target!r} parameters: unchanged it has {least:,}, and "
            f"{MOST:g} times as wide it has {most:,}."
        )
    low, high = 1.0, MOST  # count(low) <= target <= count(high), as checked above
    for _ in range(STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if count(middle) <= target else (low, middle)
    below, above = count(low), count(high)
    if target - below <= above - target:
        return UniformFactor(_shortest(count, low, below, math.floor), below, target)
    return UniformFactor(_shortest(count, high, above, math.ceil), above, target)


def _shortest(count: Count, factor: float, params: int, rounded: Callable[[float], int]) -> float:
    """Return the factor with the fewest digits that gives as many parameters, rounded away from the step."""
    for digits in range(DIGITS):
        found = rounded(factor * 10**digits) / 10**digits
        if 1 <= found <= MOST and count(found) == params:
            return found
    return factor

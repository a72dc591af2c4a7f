"""Draws without looking, by counting them all; and corrections for many tests by their definition."""

from collections.abc import Sequence
from fractions import Fraction
from itertools import combinations
from math import comb


def tails(total: int, members: int, drawn: int, seen: int) -> tuple[Fraction, Fraction]:
    """P(K <= seen) and P(K >= seen) as fractions, from binomial coefficients."""
    span = range(max(0, drawn - (total - members)), min(members, drawn) + 1)
    ways = {k: comb(members, k) * comb(total - members, drawn - k) for k in span}
    low, high = sum(n for k, n in ways.items() if k <= seen), sum(n for k, n in ways.items() if k >= seen)
    return Fraction(low, comb(total, drawn)), Fraction(high, comb(total, drawn))


def tails_by_drawing(total: int, members: int, drawn: int, seen: int) -> tuple[Fraction, Fraction]:
    """The same from every draw there is; the first ``members`` things are the members."""
    hits = [sum(thing < members for thing in draw) for draw in combinations(range(total), drawn)]
    return Fraction(sum(k <= seen for k in hits), len(hits)), Fraction(sum(k >= seen for k in hits), len(hits))


def holm_by_closure(p: Sequence[float]) -> list[float]:
    """A hypothesis falls only if every set that holds it falls by Bonferroni: the largest such p-value."""
    n = len(p)
    sets = [s for size in range(1, n + 1) for s in combinations(range(n), size)]
    return [max(min(1.0, len(s) * min(p[j] for j in s)) for s in sets if i in s) for i in range(n)]

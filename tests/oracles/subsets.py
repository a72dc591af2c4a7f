"""Choosing k structures: every objective written out, exhaustive search, and the textbook greedy loop."""

from collections.abc import Callable, Sequence
from itertools import combinations

from torch import Tensor

Subset = Sequence[int]


def individual(f: list[float], H: list[list[float]], M: Subset) -> float:
    """Eq. 2, lambda_2^I: ``sum_s |f_s| + 1/2 sum_ss' |H_ss'|``."""
    return sum(abs(f[s]) for s in M) + 0.5 * sum(abs(H[s][t]) for s in M for t in M)


def structure(f: list[float], H: list[list[float]], M: Subset) -> float:
    """``sum_s |f_s - 1/2 H_ss| + 1/2 sum_{s != s'} |H_ss'|``."""
    alone = sum(abs(f[s] - 0.5 * H[s][s]) for s in M)
    return alone + 0.5 * sum(abs(H[s][t]) for s in M for t in M if s != t)


def order(f: list[float], H: list[list[float]], M: Subset) -> float:
    """``|sum_s f_s| + 1/2 |sum_ss' H_ss'|``."""
    return abs(sum(f[s] for s in M)) + 0.5 * abs(sum(H[s][t] for s in M for t in M))


def joint(f: list[float], H: list[list[float]], M: Subset) -> float:
    """Eq. 1, lambda_2: ``|sum_s f_s - 1/2 sum_ss' H_ss'|``."""
    return abs(sum(f[s] for s in M) - 0.5 * sum(H[s][t] for s in M for t in M))


OBJECTIVES: dict[str, Callable[[list[float], list[list[float]], Subset], float]] = {
    "individual": individual,
    "structure": structure,
    "order": order,
    "joint": joint,
}


def value(objective: str, first: Tensor, pairs: Tensor, subset: Subset) -> float:
    """The objective of a subset from ``first`` (S,) and ``pairs`` (S, S)."""
    return OBJECTIVES[objective](first.tolist(), pairs.tolist(), subset)


def best_subset(k: int, objective: str, first: Tensor, pairs: Tensor) -> tuple[int, ...]:
    """The k structures of least objective, by trying all; ties: the first in lexicographic order."""
    f, H = first.tolist(), pairs.tolist()
    return min(combinations(range(len(f)), k), key=lambda M: OBJECTIVES[objective](f, H, M))


def greedy(k: int, objective: str, first: Tensor, pairs: Tensor) -> list[int]:
    """Add, k times, the structure that makes the objective least: in order of choice; ties: lowest index."""
    f, H = first.tolist(), pairs.tolist()
    chosen: list[int] = []
    for _ in range(k):
        rest = [s for s in range(len(f)) if s not in chosen]
        chosen.append(min(rest, key=lambda s: OBJECTIVES[objective](f, H, [*chosen, s])))
    return chosen

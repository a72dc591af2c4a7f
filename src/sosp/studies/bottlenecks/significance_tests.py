"""Compute hypergeometric tails, merge p-values of dependent tests, and correct them for many layers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor


@lru_cache(maxsize=10_000)  # layers of the same width often lose equal numbers
def compute_tails(total: int, members: int, drawn: int, seen: int) -> tuple[float, float]:
    """Return P(K <= seen) and P(K >= seen) for the number K of members in a random draw.

    ``P(K = k) = C(members, k) C(total - members, drawn - k) / C(total, drawn)``
    """
    k = torch.arange(max(0, drawn - (total - members)), min(members, drawn) + 1, dtype=torch.float64)
    ways = _log_choose(members, k) + _log_choose(total - members, drawn - k)
    p = (ways - _log_choose(total, torch.tensor(drawn, dtype=torch.float64))).exp()
    return min(1.0, p[k <= seen].sum().item()), min(1.0, p[k >= seen].sum().item())


def _log_choose(n: int, k: Tensor) -> Tensor:
    return torch.lgamma(torch.tensor(n + 1.0, dtype=torch.float64)) - torch.lgamma(k + 1) - torch.lgamma(n - k + 1)


def merge_p_values(p: Sequence[float]) -> float:
    """Merge p-values of one hypothesis under any dependence: the k-th smallest of R, times R / k.

    Rüger (1978). With k = R / 2, rounded up, it is small only if half of them are.
    """
    k = (len(p) + 1) // 2
    return min(1.0, sorted(p)[k - 1] * len(p) / k)


def correct_p_values(p: Sequence[float]) -> list[float]:
    """Return p-values with Holm's correction, which bounds the probability of any false rejection."""
    order = sorted(range(len(p)), key=p.__getitem__)
    found = [0.0] * len(p)
    largest = 0.0
    for place, i in enumerate(order):
        largest = max(largest, min(1.0, p[i] * (len(p) - place)))
        found[i] = largest
    return found

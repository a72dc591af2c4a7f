"""Record what a network costs and how good it is after pruning it to one budget of a trade-off curve."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class TradeoffPoint:
    """A network pruned to one budget, in numbers; shares are of the unpruned network."""

    budget: float  # share of the MACs that was allowed; 1 for the unpruned network
    macs: float  # share of the MACs left
    params: float  # share of the parameters left
    quality: float  # accuracy, or agreement with the unpruned network, from 0 to 1
    milliseconds: float | None = None  # of one call, where it was measured
    widths: Mapping[str, tuple[int, int]] = field(default_factory=dict)  # layer -> channels before and after

"""Define the result of a bottleneck search: verdicts and recommended factors for layers and blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

NARROW, WIDE, FITTING = "too narrow", "over-wide", "as needed"
VERDICTS = (NARROW, WIDE, FITTING)


@dataclass(frozen=True)
class BottleneckPart:
    """A layer or a block, and what it loses at increasing ratios."""

    name: str
    layers: tuple[str, ...]
    structures: int
    removed: tuple[float, ...]  # share that is removed, at each overall ratio
    p: float  # probability that chance alone does this to any part (corrected for their number)
    factor: float  # widening factor at which it would lose as much as the others
    verdict: str  # one of VERDICTS
    stability: float | None = None  # share of the other subsamples with the same verdict


@dataclass(frozen=True)
class NetworkSize:
    """Parameters and MACs of a network."""

    params: int
    macs: int


@dataclass(frozen=True)
class Bottlenecks:
    """Verdicts on the layers and blocks of a network: too narrow, wider than needed, or as needed."""

    method: str
    ratios: tuple[float, ...]  # overall shares that were removed
    layers: tuple[BottleneckPart, ...]
    blocks: tuple[BottleneckPart, ...]
    alpha: float
    subsamples: int  # scored additionally, for the stability
    before: NetworkSize | None = None
    after: NetworkSize | None = None  # with the recommended widths
    note: str = ""  # why ``after`` could not be counted

    @property
    def factors(self) -> dict[str, float]:
        """Return block -> recommended factor for its widths, for all blocks that are not as needed."""
        return {b.name: float(f"{b.factor:.2g}") for b in self.blocks if b.verdict != FITTING}

    def widths(self, factors: Mapping[str, float]) -> dict[str, float]:
        """Return layer -> factor, as ``sosp.widen`` and ``width=`` take it.

        Args:
            factors: Block -> factor.
        """
        layers = {b.name: b.layers for b in self.blocks}
        return {layer: factor for name, factor in factors.items() for layer in layers[name]}

    @property
    def advice(self) -> str:
        """Return the advice, largest changes first: ``widen layer3 x2, shrink layer1 x0.6``."""
        found = sorted(self.factors.items(), key=lambda item: item[1], reverse=True)
        widen = [f"widen {name} x{factor:g}" for name, factor in found if factor > 1]
        shrink = [f"shrink {name} x{factor:g}" for name, factor in reversed(found) if factor < 1]
        return ", ".join(widen + shrink) or "keep the widths as they are"

    def least(self, count: int, at: float) -> tuple[BottleneckPart, ...]:
        """Return the blocks that lose the smallest share of their structures.

        Args:
            count: How many blocks.
            at: Overall ratio; the nearest measured one is used.
        """
        place = min(range(len(self.ratios)), key=lambda i: abs(self.ratios[i] - at))
        return tuple(sorted(self.blocks, key=lambda b: b.removed[place])[:count])

    def as_dict(self) -> dict[str, Any]:
        """Return all facts as plain data, for JSON."""
        return {**asdict(self), "factors": self.factors, "advice": self.advice}

    def __str__(self) -> str:
        """Return a line per block, then the layers that are not as needed, then the advice."""
        odd = [part for part in self.layers if part.verdict != FITTING]
        parts = [*self.blocks, *(part for part in odd if (part.name,) not in [b.layers for b in self.blocks])]
        width = max(len(part.name) for part in parts)
        head = "  ".join(f"{ratio:4.0%}" for ratio in self.ratios)
        lines = [f"{'':<{width}}  {head}  factor  verdict"]
        lines += [f"{part.name:<{width}}  {_cells(part)}  {part.factor:6.2f}  {part.verdict}" for part in parts]
        return "\n".join([*lines, self.advice])


def _cells(part: BottleneckPart) -> str:
    return "  ".join(f"{share:4.0%}" for share in part.removed)

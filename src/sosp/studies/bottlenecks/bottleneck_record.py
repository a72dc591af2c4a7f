"""What a look at the widths found, layer by layer and block by block, and what it would take to even them out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

NARROW, WIDE, FITTING = "too narrow", "over-wide", "as needed"
VERDICTS = (NARROW, WIDE, FITTING)


@dataclass(frozen=True)
class BottleneckPart:
    """A layer or a block, and what it loses as the network loses more and more."""

    name: str
    layers: tuple[str, ...]
    structures: int
    removed: tuple[float, ...]  # the share it loses, at each overall ratio
    p: float  # that chance alone does this to any of the parts, corrected for their number
    factor: float  # what it would be widened by to lose as much as all others do
    verdict: str  # one of VERDICTS
    stability: float | None = None  # share of the other subsamples that say the same


@dataclass(frozen=True)
class NetworkSize:
    """What a network costs."""

    params: int
    macs: int


@dataclass(frozen=True)
class Bottlenecks:
    """Which layers and blocks of a network are too narrow, and which are wider than it needs."""

    method: str
    ratios: tuple[float, ...]  # overall shares that were removed
    layers: tuple[BottleneckPart, ...]
    blocks: tuple[BottleneckPart, ...]
    alpha: float
    subsamples: int  # that were scored besides, for the stability
    before: NetworkSize | None = None
    after: NetworkSize | None = None  # with the widths that are recommended
    note: str = ""  # why that could not be counted

    @property
    def factors(self) -> dict[str, float]:
        """Block -> the factor that is recommended for its widths, for the blocks that are not as needed."""
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
        """``widen layer3 x2, shrink layer1 x0.6``; the largest changes first."""
        found = sorted(self.factors.items(), key=lambda item: item[1], reverse=True)
        widen = [f"widen {name} x{factor:g}" for name, factor in found if factor > 1]
        shrink = [f"shrink {name} x{factor:g}" for name, factor in reversed(found) if factor < 1]
        return ", ".join(widen + shrink) or "keep the widths as they are"

    def least(self, count: int, at: float) -> tuple[BottleneckPart, ...]:
        """Return the blocks that lose the smallest share of their structures.

        Args:
            count: How many blocks.
            at: Overall ratio; the nearest of those measured is taken.
        """
        place = min(range(len(self.ratios)), key=lambda i: abs(self.ratios[i] - at))
        return tuple(sorted(self.blocks, key=lambda b: b.removed[place])[:count])

    def as_dict(self) -> dict[str, Any]:
        """Return all facts as plain data, for JSON."""
        return {**asdict(self), "factors": self.factors, "advice": self.advice}

    def __str__(self) -> str:
        """A line per block, then the layers that are not as needed, then the advice."""
        odd = [part for part in self.layers if part.verdict != FITTING]
        parts = [*self.blocks, *(part for part in odd if (part.name,) not in [b.layers for b in self.blocks])]
        width = max(len(part.name) for part in parts)
        head = "  ".join(f"{ratio:4.0%}" for ratio in self.ratios)
        lines = [f"{'':<{width}}  {head}  factor  verdict"]
        lines += [f"{part.name:<{width}}  {_cells(part)}  {part.factor:6.2f}  {part.verdict}" for part in parts]
        return "\n".join([*lines, self.advice])


def _cells(part: BottleneckPart) -> str:
    return "  ".join(f"{share:4.0%}" for share in part.removed)

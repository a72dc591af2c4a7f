"""What one call of ``prune`` returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torch import nn

from sosp.graph.mask import Mask
from sosp.graph.plan import Cost, Plan
from sosp.graph.records import Saliency
from sosp.refit import Repaired
from sosp.surgery.checkpoint import save


@dataclass(frozen=True, eq=False)
class Pruned:
    """A smaller network, and how it came about."""

    model: nn.Module
    mask: Mask
    saliency: Saliency
    cost_before: Cost
    cost_after: Cost
    plan: Plan | None = None  # how the mask was removed; None after several rounds, each of which had its own
    repaired: Repaired | None = None
    seconds: Mapping[str, float] = field(default_factory=dict)  # that scoring took, and all of it

    def __str__(self) -> str:
        before, after = self.cost_before, self.cost_after
        return "\n".join(
            [
                f"{self.saliency.method}: {self.mask.chosen:,} of {self.mask.structures:,} structures removed",
                f"parameters  {before.params:>15,} -> {after.params:>15,}  ({after.params / before.params:.1%} left)",
                f"MACs        {before.macs:>15,} -> {after.macs:>15,}  ({after.macs / max(before.macs, 1):.1%} left)",
                *([] if self.repaired is None else [self.repaired.summary]),
            ]
        )

    def save(self, path: str | Path) -> None:
        """One safetensors file with the network, the mask and how to rebuild it: ``sosp.load(path, model)``."""
        save(path, self.model, self.mask)

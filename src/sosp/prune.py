"""The pipeline in one call: from a trained network, data and a budget to a smaller network. Read this first."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sosp.cost import Cost, count
from sosp.criteria import score
from sosp.losses import LossLike
from sosp.mask import Mask
from sosp.records import Saliency
from sosp.selection import select
from sosp.structures import Exclude, find_structures
from sosp.surgery import shrink


@dataclass(frozen=True, eq=False)
class Pruned:
    """A smaller network, and how it came about."""

    model: nn.Module
    mask: Mask
    saliency: Saliency
    cost_before: Cost
    cost_after: Cost

    def __str__(self) -> str:
        before, after = self.cost_before, self.cost_after
        return "\n".join(
            [
                f"{self.saliency.method}: {self.mask.chosen:,} of {self.mask.structures:,} structures removed",
                f"parameters  {before.params:>15,} -> {after.params:>15,}  ({after.params / before.params:.1%} left)",
                f"MACs        {before.macs:>15,} -> {after.macs:>15,}  ({after.macs / max(before.macs, 1):.1%} left)",
            ]
        )

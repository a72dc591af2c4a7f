"""The pipeline in one call: from a trained network, data and a budget to a smaller network. Read this first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from sosp.batches import peek
from sosp.checkpoint import save
from sosp.cost import Cost, whole_cost
from sosp.criteria import score
from sosp.flow import trace
from sosp.flow.layout import Style
from sosp.losses import LossLike
from sosp.mask import Mask
from sosp.records import Saliency
from sosp.selection import select
from sosp.structures import Exclude, find_structures
from sosp.surgery import shrink_along


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

    def save(self, path: str | Path) -> None:
        """One safetensors file with the network, the mask and how to rebuild it: ``sosp.load(path, model)``."""
        save(path, self.model, self.mask)


def prune(
    model: nn.Module,
    data: Any,
    *,
    ratio: float | None = None,
    params: float | None = None,
    macs: float | None = None,
    method: str = "sosp-h",
    loss: LossLike = "cross_entropy",
    groups: str = "independent",
    exclude: Exclude = (),
    examples: int | None = 1000,
) -> Pruned:
    """Score, select and shrink: the network without what it needs least, ready to be fine-tuned.

    ``data`` as ``sosp.score`` takes it. How much goes: ``ratio`` of the structures (half, if nothing is said), or until
    at most ``params`` of the parameters or ``macs`` of the multiply-accumulates are left (a share, or a number).
    ``groups="coupled"`` removes channels of whole streams: fewer choices, faster to run. For everything else take the
    steps one by one: ``find_structures``, ``score``, ``select``, ``shrink``. The model itself is left as it was.
    """
    example, data = peek(data)
    structures = find_structures(model, example, groups=groups, exclude=exclude)
    saliency = score(model, data, method=method, loss=loss, structures=structures, examples=examples)
    return cut(model, saliency, example, {"ratio": ratio, "params": params, "macs": macs})


def cut(
    model: nn.Module, saliency: Saliency, example: Any, choice: Mapping[str, Any], style: Style | None = None
) -> Pruned:
    """Select by ``choice``, what ``select`` is told, and shrink; a budget is met by the network that is built."""
    flow = saliency.structures.flow or trace(model, example)
    budgeted = choice.get("params") is not None or choice.get("macs") is not None
    while True:
        mask = select(saliency, **choice)
        known = len(flow.graph.pins)
        small, after = shrink_along(model, mask, example, flow, style)
        # Building it may show that the code fixes a width nobody knew of: the budget is then met with it in view.
        if len(flow.graph.pins) == known or not budgeted:
            return Pruned(small, mask, saliency, whole_cost(flow), after)

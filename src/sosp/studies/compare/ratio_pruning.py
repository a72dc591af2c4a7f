"""Prune a network by a method at a ratio: by a mask or, for EigenDamage, in another basis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from sosp.baselines.eigendamage import eigendamage
from sosp.graph.layout import LayoutStyle
from sosp.graph.mask import Mask
from sosp.graph.plan import Cost, Plan, compute_alternative_cost, count, plan_removal
from sosp.graph.records import Saliency
from sosp.scoring.methods import METHODS
from sosp.selection.select import select
from sosp.studies.pruning_task import PruningTask
from sosp.surgery.shrink import shrink


@dataclass(frozen=True, eq=False)
class RatioPruningResult:
    """A pruned network, once for fine-tuning and once in the form that runs fastest."""

    model: nn.Module
    quick: nn.Module
    mask: Mask | None  # None if directions were removed instead of structures
    structures: int
    removed: int
    exact: Cost
    other: Cost  # counted as in App. D
    seconds: float  # of scoring


class RatioPruner(Protocol):
    """The pruning of a network by one method with one seed."""

    method: str
    seed: int

    def prune_to(self, ratio: float) -> RatioPruningResult: ...


def make_pruner(work: PruningTask, method: str, seed: int) -> RatioPruner:
    """Return the pruner of a method."""
    return (
        EigenDamagePruner(work, method, seed) if "rotation" in METHODS[method].needs else MaskPruner(work, method, seed)
    )


class MaskPruner:
    """A pruner that removes structures by their saliency, which is computed on first use."""

    def __init__(self, work: PruningTask, method: str, seed: int) -> None:
        self.work, self.method, self.seed = work, method, seed
        self.found: tuple[Saliency, float] | None = None

    def prune_to(self, ratio: float) -> RatioPruningResult:
        if self.found is None:
            self.found = self.work.saliency(self.method, self.seed)
        saliency, seconds = self.found
        mask, flow = select(saliency, ratio=ratio), self.work.structures(self.method).flow
        assert flow is not None
        other = compute_alternative_cost(flow, flow.find_removed_outputs(mask.removed, mask.own_norms))
        plan = plan_removal(flow, mask)
        small = shrink(self.work.model, plan, self.work.example, verify=False)
        return RatioPruningResult(
            small, self._quick(plan, small), mask, mask.structures, mask.chosen, plan.cost, other, seconds
        )

    def _quick(self, plan: Plan, small: nn.Module) -> nn.Module:
        """Return the network with channels last and, on a CPU, without scatters (0.8 of the time)."""
        work = self.work
        if work.device.type == "cpu":
            without = plan_removal(plan.flow, plan.mask, LayoutStyle("zeros"))
            small = shrink(work.model, without, work.example, verify=False)
        return small.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


class EigenDamagePruner:
    """A pruner that removes directions of every layer's Kronecker factors and turns layers into bottlenecks."""

    def __init__(self, work: PruningTask, method: str, seed: int) -> None:
        self.work, self.method, self.seed = work, method, seed

    def prune_to(self, ratio: float) -> RatioPruningResult:
        work, examples = self.work, self.work.examples(self.seed)
        begun = work.clock()
        found = eigendamage(
            work.model,
            examples,
            ratio=ratio,
            examples=None,
            exclude=work.plan.exclude,
            generator=torch.Generator().manual_seed(self.seed),
        )
        seconds = work.clock() - begun
        cost = found.cost_after or count(found.model, work.example)
        return RatioPruningResult(found.model, found.model, None, found.directions, found.lost, cost, cost, seconds)

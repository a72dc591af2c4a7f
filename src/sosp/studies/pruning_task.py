"""Prepare a network and its data for pruning by any method at any ratio."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from sosp.baselines.eigendamage import check_replaceable_layers
from sosp.data import Dataset
from sosp.graph.records import Saliency, Structures
from sosp.graph.structures import find_structures
from sosp.scoring.methods import METHODS
from sosp.scoring.score import check_structures, score
from sosp.studies.compare.comparison_cells import ComparisonPlan

BATCH = 250  # examples per batch for scoring; passes reduce it to what fits into memory


@dataclass(frozen=True, eq=False)
class PruningTask:
    """A network and its data, ready to be pruned by any method."""

    model: nn.Module
    data: Dataset
    plan: ComparisonPlan
    device: torch.device
    example: Any
    made: dict[str, Structures] = field(default_factory=dict)

    def structures(self, method: str) -> Structures:
        """Return the structures of a method: single channels, or coupled ones of a stream if the method needs them."""
        groups = self.plan.groups_for(method)
        if groups not in self.made:
            options: dict[str, Any] = {"gate": self.plan.gate, "groups": groups, "exclude": self.plan.exclude}
            self.made[groups] = find_structures(self.model, self.example, **options)
        return self.made[groups]

    def saliency(self, method: str, seed: int) -> tuple[Saliency, float]:
        """Return the saliency, computed on examples that the seed draws, and the seconds it took."""
        examples, structures = self.examples(seed), self.structures(method)
        random = torch.Generator().manual_seed(seed)
        begun = self.clock()
        found = score(self.model, examples, method=method, structures=structures, examples=self.count, generator=random)
        return found, self.clock() - begun

    @property
    def count(self) -> int:
        """Return the number of examples for scoring."""
        return min(self.plan.examples, len(self.data.train))

    def examples(self, seed: int) -> list[Any]:
        """Return the examples that the seed draws, in batches."""
        return list(self.data.train.subset(self.count, seed).to(self.device).ordered(batch=BATCH))

    def clock(self) -> float:
        """Return the time in seconds, after the device has finished its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()


def prepare_task(
    model: nn.Module, data: Dataset, plan: ComparisonPlan, device: torch.device | str | None
) -> PruningTask:
    """Return the task; check every method of the plan here, before hours are spent."""
    first = next(iter(model.parameters())).device if device is None else torch.device(device)

    twin = copy.deepcopy(model).to(first).eval()
    data = replace(data, train=data.train.to(first), test=data.test.to(first))
    example, _ = next(iter(data.train.ordered(batch=8, limit=8)))
    work = PruningTask(twin, data, plan, first, example.to(first))
    for method in plan.methods:
        check_method(twin, work.structures(method), method)
    return work


def check_method(model: nn.Module, structures: Structures, method: str) -> None:
    """Raise StructureError if a method cannot be compared on this network."""
    if "rotation" in METHODS[method].needs:
        check_replaceable_layers(model, structures)
    else:
        check_structures(model, structures, method)

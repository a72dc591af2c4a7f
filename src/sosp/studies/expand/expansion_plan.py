"""Define an expansion as data: how to prune, what to widen, and how to train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from sosp.errors import ArgumentError, check_choice, check_whole_number
from sosp.studies.bottlenecks.removals import check_ratios
from sosp.studies.compare.comparison_cells import ComparisonPlan
from sosp.studies.expand.expansion_points import ExpansionPoint
from sosp.studies.expand.widenable_networks import check_factor
from sosp.training import Epoch, Moment, Schedule, Speed

WHEN = ("trained", "init")


@dataclass(frozen=True)
class ExpansionPlan:
    """Options for scoring structures, the sizes to prune to, and the blocks to widen."""

    ratios: tuple[float, ...] = (0.3, 0.5, 0.7)  # shares of structures to remove
    # Instead of ratios: parameters to keep, as shares of the first network's (up to 1) or as numbers.
    sizes: tuple[float, ...] | None = None
    method: str = "sosp-h"
    examples: int = 1000
    gate: str = "features"
    groups: str = "independent"
    exclude: tuple[str, ...] = ()
    cap: float | None = None
    factor: float = 2.0  # of the blocks to widen
    blocks: int | None = None  # how many to widen; None: one, or five if every layer is a block
    probe: float = 0.5  # the overall ratio at which blocks are compared
    when: str = "trained"  # or "init": blocks are compared, and networks pruned, before any training

    def __post_init__(self) -> None:
        check_ratios(self.ratios)
        check_ratios([self.probe])
        check_factor(self.factor)
        check_choice("when", self.when, WHEN)
        if self.blocks is not None:
            check_whole_number("blocks", self.blocks)
        for size in self.sizes or ():
            number = isinstance(size, (int, float)) and not isinstance(size, bool)
            if not number or not (0 < size <= 1 or size == round(size) > 1):
                raise ArgumentError(
                    f"size={size!r} must be a share of the parameters, up to 1, or a number of parameters."
                )
        self.scoring(self.method)  # raises ArgumentError for an unknown method

    def scoring(self, method: str) -> ComparisonPlan:
        """Return the options of scoring as the plan of a comparison."""
        return ComparisonPlan(
            (method,), examples=self.examples, gate=self.gate, groups=self.groups, exclude=self.exclude
        )

    def budgets(self, params: int) -> tuple[tuple[str, float], ...]:
        """Return budgets, ``("ratio", 0.5)`` or ``("params", 426509)``; ``params`` is the first network's count."""
        if self.sizes is None:
            return tuple(("ratio", ratio) for ratio in self.ratios)
        return tuple(("params", round(size * params) if size <= 1 else int(size)) for size in self.sizes)


@dataclass(frozen=True)
class ExpansionSetup:
    """Schedules, seed, folder, device and callbacks of an expansion."""

    schedule: Schedule | str = "cifar"  # of a training cycle
    tuning: Schedule | str | None = None  # of a cycle after pruning, if different
    seed: int = 0
    folder: str | Path | None = None  # for results and checkpoints, to resume from
    device: torch.device | str | None = None
    speed: Speed | None = None
    on_point: Callable[[ExpansionPoint], None] | None = None
    on_epoch: Callable[[str, Epoch], None] | None = None
    on_step: Callable[[int, int, Moment], None] | None = None

    @property
    def options(self) -> dict[str, Any]:
        """Return the options of every training."""
        return {name: getattr(self, name) for name in ("device", "speed", "on_epoch", "on_step")}

    @property
    def place(self) -> Path | None:
        return None if self.folder is None else Path(self.folder)


@dataclass(frozen=True)
class PruningProtocol:
    """An order of steps: ``before`` cycles of training, pruning, ``after`` cycles of training."""

    name: str
    network: str  # name of the network it begins with
    before: int = 1
    after: int = 1
    method: str | None = None  # None: the plan's method
    shuffled: bool = False  # remove random structures, as many per layer as the method does

    def __post_init__(self) -> None:
        check_whole_number(f"before, of protocol {self.name!r},", self.before, least=0)
        check_whole_number(f"after, of protocol {self.name!r},", self.after, least=0)

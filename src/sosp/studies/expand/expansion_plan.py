"""What an expansion does, as data: what is pruned and how far, what is widened, and how networks are trained."""

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
    """How structures are scored, how many go, and what is widened."""

    ratios: tuple[float, ...] = (0.3, 0.5, 0.7)  # of the structures go
    sizes: tuple[float, ...] | None = (
        None  # instead: parameters that may be left, shares of the first network's or more
    )
    method: str = "sosp-h"
    examples: int = 1000
    gate: str = "features"
    groups: str = "independent"
    exclude: tuple[str, ...] = ()
    cap: float | None = None
    factor: float = 2.0  # for what is widened
    blocks: int | None = None  # how many; one, or five where every layer is a block, if nothing is said
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
                raise ArgumentError(f"size={size!r} must be a share of the parameters, up to 1, or a number of them.")
        self.scoring(self.method)  # which refuses a method that is not known

    def scoring(self, method: str) -> ComparisonPlan:
        """What a comparison is told."""
        return ComparisonPlan(
            (method,), examples=self.examples, gate=self.gate, groups=self.groups, exclude=self.exclude
        )

    def budgets(self, params: int) -> tuple[tuple[str, float], ...]:
        """``("ratio", 0.5)`` or ``("params", 426509)``, for a first network of so many parameters."""
        if self.sizes is None:
            return tuple(("ratio", ratio) for ratio in self.ratios)
        return tuple(("params", round(size * params) if size <= 1 else int(size)) for size in self.sizes)


@dataclass(frozen=True)
class ExpansionSetup:
    """How networks are trained, where, and who is told."""

    schedule: Schedule | str = "cifar"  # of a cycle
    tuning: Schedule | str | None = None  # of a cycle after the cut, where it is another
    seed: int = 0
    folder: str | Path | None = None  # where everything is kept, and gone on with
    device: torch.device | str | None = None
    speed: Speed | None = None
    on_point: Callable[[ExpansionPoint], None] | None = None
    on_epoch: Callable[[str, Epoch], None] | None = None
    on_step: Callable[[int, int, Moment], None] | None = None

    @property
    def options(self) -> dict[str, Any]:
        """What every training is told."""
        return {name: getattr(self, name) for name in ("device", "speed", "on_epoch", "on_step")}

    @property
    def place(self) -> Path | None:
        return None if self.folder is None else Path(self.folder)


@dataclass(frozen=True)
class PruningProtocol:
    """So many cycles of training, the cut, so many cycles more."""

    name: str
    network: str  # the one it begins with
    before: int = 1
    after: int = 1
    method: str | None = None  # in place of the plan's
    shuffled: bool = False  # as many of every layer, but other ones

    def __post_init__(self) -> None:
        check_whole_number(f"before, of course {self.name!r},", self.before, least=0)
        check_whole_number(f"after, of course {self.name!r},", self.after, least=0)

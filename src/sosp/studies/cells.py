"""Cells: the smallest things an experiment measures, as data; a cell's name says all of it, equal cells are one."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

from sosp.training import SCHEDULES, Schedule

PAPER = SCHEDULES["cifar"]
TINY = Schedule(epochs=1, batch=64, rate=0.05, decay=5e-4, shape="cosine")  # seconds, on digits
TINY_WIDTH = 0.25


@dataclass(frozen=True)
class WideningSpec:
    """Wider than it was: where ``of``, pruned, loses least ("expand"), or evenly to as many parameters ("widen")."""

    how: str
    of: TrainedCell
    factor: float = 2.0
    probe: float = 0.5  # the ratio at which blocks are compared
    gate: str = "weights"
    examples: int = 1000

    def seeded(self, seed: int) -> WideningSpec:
        return replace(self, of=self.of.seeded(seed))

    def in_epochs(self, epochs: int) -> WideningSpec:
        return replace(self, of=self.of.in_epochs(epochs))

    def tiny(self) -> WideningSpec:
        return replace(self, of=self.of.tiny(), examples=100)


@dataclass(frozen=True)
class TrainedCell:
    """A network as pruning finds it: trained from its first weights, or not at all (0 epochs)."""

    network: str  # of sosp.nets
    data: str  # of sosp.data.load
    schedule: Schedule = PAPER
    seed: int = 0
    width: float = 1.0
    slimming: float = 0.0  # strength of the L1 term on the scales of batch norms (NN Slimming)
    grown: WideningSpec | None = None

    @property
    def place(self) -> str:
        """``resnet56x2-cifar10``."""
        return f"{self.network}{_times(self.width)}-{self.data}"

    @property
    def name(self) -> str:
        """``resnet56-cifar10-e200-s0``; what is grown says from what it was found: ``-expand-e200``."""
        slim = f"-slimming{self.slimming:g}" if self.slimming else ""
        grown = f"-{self.grown.how}-e{self.grown.of.schedule.epochs}" if self.grown else ""
        return f"{self.place}{slim}{grown}-e{self.schedule.epochs}-s{self.seed}"

    @property
    def label(self) -> str:
        return ", ".join(["baseline-l1" if self.slimming else "baseline", *self.how])

    @property
    def how(self) -> list[str]:
        """What makes it another start than the plain trained network."""
        return [*([self.grown.how] if self.grown else []), *(["init"] if not self.schedule.epochs else [])]

    def seeded(self, seed: int) -> TrainedCell:
        """The same with another seed; cells that differ in nothing else are trials of one."""
        return replace(self, seed=seed, grown=self.grown.seeded(seed) if self.grown else None)

    def in_epochs(self, epochs: int) -> TrainedCell:
        """The same with a shorter schedule."""
        grown = self.grown.in_epochs(epochs) if self.grown else None
        return replace(self, schedule=set_schedule_epochs(self.schedule, epochs), grown=grown)

    def tiny(self) -> TrainedCell:
        width, grown = TINY_WIDTH * self.width, self.grown.tiny() if self.grown else None
        short = replace(TINY, epochs=min(TINY.epochs, self.schedule.epochs))
        return TrainedCell("digits_resnet", "digits", short, 0, width, self.slimming, grown)


@dataclass(frozen=True)
class PrunedCell:
    """A network without what a method finds least needed, fine-tuned."""

    start: TrainedCell
    method: str
    budget: tuple[str, float]  # ("ratio", 0.5) of the structures go; ("params", 0.1), ("macs", 0.1) are left
    tuning: Schedule = PAPER
    seed: int = 0  # of the examples and of the fine-tuning
    gate: str = "weights"  # as in the paper
    cap: float | None = None
    scale: str | None = None
    examples: int = 1000
    shuffled: bool = False  # as many of every layer, but other ones
    cycles: int = 1  # of the fine-tuning, one after the other
    episodes: int = 400  # of the search of "amc"

    @property
    def place(self) -> str:
        return self.start.place

    @property
    def published(self) -> str:
        """What the paper calls it: ``sosp-h*`` is scaled by kernel size."""
        name = "slimming-l1" if self.method == "slimming" and self.start.slimming else self.method
        more = [*self.start.how, *(["twice"] if self.cycles > 1 else []), *(["shuffled"] if self.shuffled else [])]
        return ", ".join([f"{name}{'*' * (self.scale == 'kernel')}", *more])

    @property
    def label(self) -> str:
        """How tables call it: with the rate of the fine-tuning, where it is not that of the training."""
        return f"{self.published}, rate {self.tuning.rate:g}" if self.other_rate else self.published

    @property
    def other_rate(self) -> bool:
        """Is it fine-tuned at another rate than it was trained at?"""
        return self.tuning.rate != self.start.schedule.rate

    @property
    def name(self) -> str:
        """``resnet56-cifar10-e200-sosp-h-ratio0.5-weights-e200-s0``."""
        kind, value = self.budget
        amount = f"{value:g}" if value <= 1 else f"{value:.0f}"
        parts = [self.start.name.removesuffix("-s0"), self.method, f"{kind}{amount}", self.gate]
        parts += [f"cap{self.cap:g}"] if self.cap is not None else []
        parts += [f"by-{self.scale}"] if self.scale else []
        parts += ["shuffled"] * self.shuffled
        parts += [f"n{self.examples}"] if self.examples != 1000 else []
        parts += [f"a{self.episodes}"] if self.episodes != 400 else []
        parts += [f"rate{self.tuning.rate:g}"] if self.other_rate else []
        again = f"x{self.cycles}" if self.cycles > 1 else ""
        return "-".join([*parts, f"e{self.tuning.epochs}{again}", f"s{self.seed}"])

    def seeded(self, seed: int) -> PrunedCell:
        return replace(self, start=self.start.seeded(seed), seed=seed)

    def in_epochs(self, epochs: int) -> PrunedCell:
        return replace(self, start=self.start.in_epochs(epochs), tuning=set_schedule_epochs(self.tuning, epochs))

    def tiny(self) -> PrunedCell:
        start, budget = self.start.tiny(), (self.budget[0], 0.5)
        tuning = replace(TINY, epochs=min(TINY.epochs, self.tuning.epochs))
        few = 4 if self.method == "amc" else self.episodes
        return replace(self, start=start, budget=budget, tuning=tuning, seed=0, cap=None, examples=100, episodes=few)


@dataclass(frozen=True)
class TimedCell:
    """How long the pruning step takes: scoring and selecting, without any training."""

    network: str
    data: str
    method: str
    width: float = 1.0
    examples: int = 1000
    ratio: float = 0.5
    gate: str = "weights"
    repeats: int = 5
    seed: int = 0

    @property
    def place(self) -> str:
        return f"{self.network}{_times(self.width)}-{self.data}"

    @property
    def label(self) -> str:
        return self.method

    @property
    def name(self) -> str:
        """``resnet56x2-cifar10-sosp-h-weights-n1000-r5-time``."""
        return f"{self.place}-{self.method}-{self.gate}-n{self.examples}-r{self.repeats}-time"

    def seeded(self, seed: int) -> TimedCell:
        return replace(self, seed=seed)

    def in_epochs(self, epochs: int) -> TimedCell:
        return self

    def tiny(self) -> TimedCell:
        width = TINY_WIDTH * self.width
        return replace(self, network="digits_resnet", data="digits", width=width, examples=50, repeats=2)


Cell = TrainedCell | PrunedCell | TimedCell
KINDS: dict[str, type[Any]] = {"trained": TrainedCell, "pruned": PrunedCell, "timed": TimedCell}


def set_schedule_epochs(schedule: Schedule, epochs: int) -> Schedule:
    """The same shape in so many epochs: milestones are shares. What is not trained stays so."""
    return replace(schedule, epochs=epochs) if schedule.epochs else schedule


def encode_cell(cell: Cell) -> dict[str, Any]:
    """The cell as JSON has it, with its kind."""
    kind = next(name for name, made in KINDS.items() if type(cell) is made)
    found: dict[str, Any] = json.loads(json.dumps({"kind": kind, **asdict(cell)}))
    return found


def _times(width: float) -> str:
    return "" if width == 1.0 else f"x{width:g}"

"""Define cells, the smallest units that an experiment measures, as data; equal cells are measured once."""

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
    """A widening of ``of``: of the blocks that lose least ("expand"), or even with as many parameters ("widen")."""

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
    """A network before pruning: trained from random weights, or untrained (0 epochs)."""

    network: str  # a name in sosp.nets
    data: str  # a name for sosp.data.load
    schedule: Schedule = PAPER
    seed: int = 0
    width: float = 1.0
    slimming: float = 0.0  # strength of the L1 penalty on batch-norm scales (NN Slimming)
    grown: WideningSpec | None = None

    @property
    def place(self) -> str:
        """Return network and dataset: ``resnet56x2-cifar10``."""
        return f"{self.network}{_times(self.width)}-{self.data}"

    @property
    def name(self) -> str:
        """Return the name: ``resnet56-cifar10-e200-s0``; a widened network adds its origin: ``-expand-e200``."""
        slim = f"-slimming{self.slimming:g}" if self.slimming else ""
        grown = f"-{self.grown.how}-e{self.grown.of.schedule.epochs}" if self.grown else ""
        return f"{self.place}{slim}{grown}-e{self.schedule.epochs}-s{self.seed}"

    @property
    def label(self) -> str:
        return ", ".join(["baseline-l1" if self.slimming else "baseline", *self.how])

    @property
    def how(self) -> list[str]:
        """Return the words that distinguish it from the plain trained network."""
        return [*([self.grown.how] if self.grown else []), *(["init"] if not self.schedule.epochs else [])]

    def seeded(self, seed: int) -> TrainedCell:
        """Return the cell with another seed; cells that differ only in the seed are trials of one."""
        return replace(self, seed=seed, grown=self.grown.seeded(seed) if self.grown else None)

    def in_epochs(self, epochs: int) -> TrainedCell:
        """Return the cell with another number of epochs."""
        grown = self.grown.in_epochs(epochs) if self.grown else None
        return replace(self, schedule=set_schedule_epochs(self.schedule, epochs), grown=grown)

    def tiny(self) -> TrainedCell:
        width, grown = TINY_WIDTH * self.width, self.grown.tiny() if self.grown else None
        short = replace(TINY, epochs=min(TINY.epochs, self.schedule.epochs))
        return TrainedCell("digits_resnet", "digits", short, 0, width, self.slimming, grown)


@dataclass(frozen=True)
class PrunedCell:
    """A network that a method prunes to a budget, then fine-tuned."""

    start: TrainedCell
    method: str
    budget: tuple[str, float]  # ("ratio", 0.5) of the structures are removed; ("params", 0.1), ("macs", 0.1) remain
    tuning: Schedule = PAPER
    seed: int = 0  # of the examples and of the fine-tuning
    gate: str = "weights"  # as in the paper
    cap: float | None = None
    scale: str | None = None
    examples: int = 1000
    shuffled: bool = False  # remove random structures, as many per layer as the method does
    cycles: int = 1  # consecutive runs of the fine-tuning schedule
    episodes: int = 400  # of the search of "amc"

    @property
    def place(self) -> str:
        return self.start.place

    @property
    def published(self) -> str:
        """Return the paper's name of the method: ``sosp-h*`` is scaled by kernel size."""
        name = "slimming-l1" if self.method == "slimming" and self.start.slimming else self.method
        more = [*self.start.how, *(["twice"] if self.cycles > 1 else []), *(["shuffled"] if self.shuffled else [])]
        return ", ".join([f"{name}{'*' * (self.scale == 'kernel')}", *more])

    @property
    def label(self) -> str:
        """Return the name in tables, with the learning rate of the fine-tuning if it differs from the training's."""
        return f"{self.published}, rate {self.tuning.rate:g}" if self.other_rate else self.published

    @property
    def other_rate(self) -> bool:
        """Return True if fine-tuning and training have different learning rates."""
        return self.tuning.rate != self.start.schedule.rate

    @property
    def name(self) -> str:
        """Return the name: ``resnet56-cifar10-e200-sosp-h-ratio0.5-weights-e200-s0``."""
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
    """A time measurement of the pruning step: scoring and selecting, without any training."""

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
        """Return the name: ``resnet56x2-cifar10-sosp-h-weights-n1000-r5-time``."""
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
    """Return the schedule with this number of epochs; milestones are shares of it. 0 epochs stay 0."""
    return replace(schedule, epochs=epochs) if schedule.epochs else schedule


def encode_cell(cell: Cell) -> dict[str, Any]:
    """Return the cell and its kind as JSON data."""
    kind = next(name for name, made in KINDS.items() if type(cell) is made)
    found: dict[str, Any] = json.loads(json.dumps({"kind": kind, **asdict(cell)}))
    return found


def _times(width: float) -> str:
    return "" if width == 1.0 else f"x{width:g}"

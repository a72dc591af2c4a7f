"""Define training schedules: optimiser, learning rate over time and loss; the paper's schedules by name."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from sosp.errors import ArgumentError, check_choice, check_whole_number

SHAPES = ("steps", "cosine", "constant")

# Name, minimum, maximum; infinity means no maximum.
LIMITS = (
    ("rate", 0, math.inf),
    ("momentum", 0, 1),
    ("decay", 0, math.inf),
    ("factor", 0, 1),
    ("warmup", 0, math.inf),
    ("smoothing", 0, 1),
    ("ema", 0, 1),
    ("distill", 0, 1),
    ("temperature", 1e-6, math.inf),
)


def _check_range(name: str, value: Any, low: float, high: float) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not low <= value <= high or value == math.inf:
        limits = f"at least {low}" if high == math.inf else f"from {low} to {high}"
        raise ArgumentError(f"{name}={value!r} must be a number, {limits}.")


@dataclass(frozen=True)
class Schedule:
    """A schedule for SGD on the cross-entropy.

    ``dataclasses.replace(schedule, epochs=20)`` makes a variant; milestones are shares of the epochs.
    """

    epochs: int = 200
    batch: int = 128
    rate: float = 0.1  # learning rate
    momentum: float = 0.9
    decay: float = 1e-4  # weight decay
    nesterov: bool = False
    shape: str = "steps"  # scheduler: "steps", "cosine" to zero, or "constant"
    milestones: tuple[float, ...] = (0.6, 0.8)  # shares of the epochs at which the rate is multiplied by ``factor``
    factor: float = 0.1
    warmup: float = 0.0  # epochs in which the learning rate rises linearly from zero
    smoothing: float = 0.0  # label smoothing
    ema: float = 0.0  # decay of the moving average of the weights; 0: no average
    distill: float = 0.0  # share of the distillation loss, instead of the loss of the labels
    temperature: float = 4.0  # of the distillation loss

    def __post_init__(self) -> None:
        check_whole_number("epochs", self.epochs, least=0)
        check_whole_number("batch", self.batch)
        check_choice("shape", self.shape, SHAPES)
        if not isinstance(self.milestones, tuple | list):
            raise ArgumentError(f"milestones={self.milestones!r} must be shares of the epochs, such as (0.6, 0.8).")
        object.__setattr__(self, "milestones", tuple(self.milestones))
        for name, low, high in LIMITS:
            _check_range(name, getattr(self, name), low, high)
        for share in self.milestones:
            _check_range("milestones", share, 0, 1)
        if not isinstance(self.nesterov, bool):
            raise ArgumentError(f"nesterov={self.nesterov!r} must be True or False.")
        if self.nesterov and not self.momentum:
            raise ArgumentError("nesterov=True needs momentum.")

    def rate_at(self, epoch: int, share: float) -> float:
        """Return the learning rate at a time.

        Args:
            epoch: Number of the epoch, from 0.
            share: Share of the epoch that has passed.

        Returns:
            The learning rate.
        """
        time = epoch + share
        if time < self.warmup:
            return self.rate * time / self.warmup
        if self.shape == "cosine":
            return self.rate * 0.5 * (1 + math.cos(math.pi * time / self.epochs))
        if self.shape == "constant":
            return self.rate
        return self.rate * self.factor ** sum(epoch >= round(m * self.epochs) for m in self.milestones)


PAPER = Schedule()
SCHEDULES = {
    "cifar": PAPER,  # Sec. 3: VGG, ResNets, PlainNet-20 on CIFAR, trained and fine-tuned alike
    "densenet": replace(PAPER, epochs=300, milestones=(0.5, 0.75)),
    "imagenet": replace(PAPER, epochs=128, batch=256, shape="cosine"),
    "digits": Schedule(epochs=12, batch=64, rate=0.05, decay=5e-4, shape="cosine"),
    "finetune-digits": Schedule(epochs=4, batch=64, rate=0.02, decay=5e-4, shape="cosine"),
}


def resolve_schedule(given: Any) -> Schedule:
    """Return a schedule as it is, or the schedule of a name."""
    if isinstance(given, Schedule):
        return given
    check_choice("schedule", given, SCHEDULES)
    return SCHEDULES[given]


def describe_schedule_change(mine: Schedule, other: dict[str, Any]) -> str | None:
    """Describe the first field in which a stored schedule differs; None if there is none."""
    for field in fields(mine):
        now, then = getattr(mine, field.name), other.get(field.name)
        then = tuple(then) if isinstance(then, list) else then
        if now != then:
            return f"{field.name} was {then!r} and is {now!r}"
    return None

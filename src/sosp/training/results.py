"""What a training leaves behind: a record of every epoch, and the network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from sosp.training.callback import Companion
from sosp.training.evaluation import Accuracy


@dataclass(frozen=True)
class Epoch:
    """What an epoch gave; accuracies are shares."""

    number: int  # from 1
    loss: float  # on the training data, while it learned
    accuracy: float
    test: Accuracy | None
    rate: float  # of its last step
    seconds: float
    images_per_second: float

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> Epoch:
        """From ``asdict``."""
        test = found["test"]
        return cls(**{**found, "test": Accuracy(**test) if test is not None else None})


@dataclass(frozen=True)
class Moment:
    """How it goes, inside an epoch."""

    epoch: int  # from 1
    loss: float | None
    accuracy: float | None
    images_per_second: float


@dataclass(frozen=True, eq=False)
class Trained:
    """A trained network, in eval mode, and how it came about."""

    model: nn.Module
    history: tuple[Epoch, ...]
    average: nn.Module | None  # with the moving average of the weights
    resumed: int  # epochs that a checkpoint had already
    companion: Companion | None = None  # this network's own

    @property
    def best(self) -> Epoch | None:
        """The epoch with the highest test accuracy."""
        tested = [e for e in self.history if e.test is not None]
        return max(tested, key=lambda e: e.test.top1, default=None)  # type: ignore[union-attr]

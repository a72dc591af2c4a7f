"""Define the results of a training: a record of every epoch, and the network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from sosp.training.callback import Companion
from sosp.training.evaluation import Accuracy


@dataclass(frozen=True)
class Epoch:
    """The results of one epoch; accuracies are shares."""

    number: int  # from 1
    loss: float  # on the training data, during training
    accuracy: float
    test: Accuracy | None
    rate: float  # learning rate of its last step
    seconds: float
    images_per_second: float

    @classmethod
    def read(cls, found: Mapping[str, Any]) -> Epoch:
        """Return the epoch from the dict that ``dataclasses.asdict`` made."""
        test = found["test"]
        return cls(**{**found, "test": Accuracy(**test) if test is not None else None})


@dataclass(frozen=True)
class Moment:
    """The progress within an epoch."""

    epoch: int  # from 1
    loss: float | None
    accuracy: float | None
    images_per_second: float


@dataclass(frozen=True, eq=False)
class Trained:
    """A trained network in eval mode, and the history of its training."""

    model: nn.Module
    history: tuple[Epoch, ...]
    average: nn.Module | None  # with the moving average of the weights
    resumed: int  # epochs that were already done in the checkpoint
    companion: Companion | None = None  # the copy for this network

    @property
    def best(self) -> Epoch | None:
        """Return the epoch with the highest test accuracy; None if there was no test."""
        tested = [e for e in self.history if e.test is not None]
        return max(tested, key=lambda e: e.test.top1, default=None)  # type: ignore[union-attr]

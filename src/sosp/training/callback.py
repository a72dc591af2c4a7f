"""Define the callback of a training: extra loss terms, extra parameters and a hook after every step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


class Companion:
    """A callback in the training of one network. Each network gets its own copy. Override the methods you need.

    All methods may run inside a CUDA graph, so they must not branch on tensor values. Tensors that are kept from step
    to step are returned by ``tensors`` and change in place, so that a checkpoint contains them.
    """

    replaces = False  # True: its loss replaces the loss of the labels, which then only count for the accuracy

    def begin(self, model: nn.Module) -> Mapping[str, nn.Parameter]:
        """Inspect the network before training. Return extra parameters to train, by name."""
        return {}

    def loss(self, model: nn.Module, inputs: Any, outputs: Any, labels: Tensor) -> Tensor | None:
        """Return a term to add to the mean loss of a batch, or to replace it with (see ``replaces``)."""
        return None

    def after(self, model: nn.Module, rate: float | Tensor) -> None:
        """Run after every step, without gradients. ``rate`` is the learning rate of the step."""

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors to keep from step to step, in addition to the parameters of ``begin``."""
        return {}

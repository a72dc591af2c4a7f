"""What may take part in a training without the loop knowing what it is: terms of the loss, parameters, a last word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn


class Companion:
    """Takes part in the training of one network; every network gets a copy of its own. Override what is needed.

    All of it may run inside a CUDA graph: no decisions by numbers. Tensors that live from step to step are named by
    ``tensors`` and change in place, so that a checkpoint has them.
    """

    replaces = False  # True: its loss takes the place of the labels', which are then only counted

    def begin(self, model: nn.Module) -> Mapping[str, nn.Parameter]:
        """Look at the network that will learn; parameters that learn along, by name."""
        return {}

    def loss(self, model: nn.Module, inputs: Any, outputs: Any, labels: Tensor) -> Tensor | None:
        """What is added to the mean loss of a batch, or takes its place."""
        return None

    def after(self, model: nn.Module, rate: float | Tensor) -> None:
        """After every step, with the rate it was made with; without gradients."""

    def tensors(self) -> dict[str, Tensor]:
        """What it remembers from step to step, besides the parameters of ``begin``."""
        return {}

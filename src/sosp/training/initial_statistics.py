"""A network that was never trained, made fit to be scored: batch norms that know what flows through them."""

from __future__ import annotations

from typing import Any

from torch import nn

from sosp.training import recalibrate


def has_initial_statistics(model: nn.Module) -> bool:
    """Its batch norms have the statistics they were made with, mean 0 and variance 1."""
    norms: list[Any] = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    norms = [m for m in norms if m.running_mean is not None]
    return bool(norms) and all(bool((m.running_mean == 0).all() and (m.running_var == 1).all()) for m in norms)


def recalibrate_untrained(model: nn.Module, data: Any, seed: int = 0) -> nn.Module:
    """A copy to score in place of a network that was never trained; any other network itself.

    Scoring runs batch norms on their statistics, and 0 and 1 are not those of the activations: nothing is normalised,
    and every block adds to the scale. A fresh ResNet-56 on CIFAR-10 then has logits of 20,000, all its probabilities
    are 0 or 1, and the loss has no curvature. With statistics from data the logits are about 3, which is the network
    that the first step of training sees.
    """
    return recalibrate(model, data, seed=seed) if has_initial_statistics(model) else model

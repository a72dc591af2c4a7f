"""Re-estimate the batch-norm statistics of a network that was never trained, so that it can be scored."""

from __future__ import annotations

from typing import Any

from torch import nn

from sosp.training import recalibrate


def has_initial_statistics(model: nn.Module) -> bool:
    """Return whether all batch norms have their initial statistics, mean 0 and variance 1."""
    norms: list[Any] = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    norms = [m for m in norms if m.running_mean is not None]
    return bool(norms) and all(bool((m.running_mean == 0).all() and (m.running_var == 1).all()) for m in norms)


def recalibrate_untrained(model: nn.Module, data: Any, seed: int = 0) -> nn.Module:
    """Return a recalibrated copy of a network that was never trained; return any other network unchanged.

    Scoring runs batch norms with their running statistics. The initial 0 and 1 are not the statistics of the
    activations: nothing is normalised, and every block adds to the scale. An untrained ResNet-56 on CIFAR-10 then has
    logits of 20,000, all its probabilities are 0 or 1, and the loss has no curvature. With statistics from data the
    logits are about 3, as in the first step of training.

    Args:
        model: The network. It is not changed.
        data: The data to take statistics from, as in ``sosp.recalibrate``.
        seed: Seed of the examples that are drawn.

    Returns:
        The copy or the network.

    Raises:
        DataError: If the data is empty or does not fit the network.
    """
    return recalibrate(model, data, seed=seed) if has_initial_statistics(model) else model

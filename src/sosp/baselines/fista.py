"""FISTA: minimise a smooth function plus an L1 norm over numbers that are not negative, a proximal step at a time."""

from __future__ import annotations

import torch
from torch import Tensor


def take_proximal_step(
    x: Tensor, before: Tensor, momentum: Tensor, slope: Tensor, rate: float | Tensor, strength: float
) -> tuple[Tensor, Tensor]:
    """The next x and momentum, from x, the x before it, and the slope of the smooth part at x.

    ``t' = (1 + sqrt(1 + 4 t^2)) / 2``, ``y = x + (t - 1) / t' (x - before)``, and the minimum over ``x >= 0`` of
    ``|x - (y - rate slope)|^2 / 2 + rate strength |x|``, which is ``max(y - rate slope - rate strength, 0)``. The first
    momentum is 0, before is x. Beck and Teboulle, A Fast Iterative Shrinkage-Thresholding Algorithm, 2009.
    """
    ahead = (1 + (1 + 4 * momentum.square()).sqrt()) / 2
    y = x + (momentum - 1) / ahead * (x - before)
    return torch.relu(y - rate * (slope + strength)), ahead


class Fista:
    """Non-negative numbers that a proximal step is made with on every so manieth call; all tensors, no decisions."""

    def __init__(self, x: Tensor, strength: float, every: int) -> None:
        self.x, self.before = x, x.detach().clone()
        self.strength, self.every = strength, every
        self.momentum, self.count = torch.zeros_like(self.before[:1]), torch.zeros_like(self.before[:1])

    def step(self, slope: Tensor, rate: float | Tensor) -> None:
        """With the slope of the smooth part at ``x``; most calls only count."""
        self.count += 1
        due = self.count % self.every == 0
        x, momentum = take_proximal_step(self.x, self.before, self.momentum, slope, rate, self.strength)
        self.before.copy_(torch.where(due, self.x, self.before))
        self.momentum.copy_(torch.where(due, momentum, self.momentum))
        self.x.copy_(torch.where(due, x, self.x))

    def tensors(self) -> dict[str, Tensor]:
        return {"x": self.x.detach(), "before": self.before, "momentum": self.momentum, "count": self.count}

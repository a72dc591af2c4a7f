"""From stored numbers to what a network sees: (x / unit - mean) / std, the same bits on every device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sosp.errors import ArgumentError

IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True, eq=False)
class Scale:
    """A number per channel to subtract and one to divide by, as tensors on the device."""

    unit: Tensor  # (1, 1, 1, 1), 255 for bytes
    mean: Tensor  # (1, C, 1, 1)
    std: Tensor  # (1, C, 1, 1)

    @classmethod
    def of(cls, mean: Sequence[float], std: Sequence[float], unit: float) -> Scale:
        if len(mean) != len(std):
            raise ArgumentError(
                f"mean={tuple(mean)} and std={tuple(std)} must have the same number of values, one per channel."
            )
        if not all(map(math.isfinite, mean)) or not all(0 < s < math.inf for s in std):
            raise ArgumentError(f"mean={tuple(mean)} must be finite and std={tuple(std)} finite and above 0.")
        return cls(_column([unit]), _column(mean), _column(std))

    def __call__(self, x: Tensor) -> Tensor:
        """(b, C, H, W) of bytes or floats to float32.

        Each step rounds correctly everywhere. Dividing by a Python number would not: on a GPU torch multiplies by
        its inverse instead.
        """
        return (x / self.unit).sub_(self.mean).div_(self.std)

    def to(self, device: torch.device | str) -> Scale:
        return Scale(self.unit.to(device), self.mean.to(device), self.std.to(device))


def _column(numbers: Sequence[float]) -> Tensor:
    return torch.tensor([float(x) for x in numbers], dtype=torch.float32).view(1, -1, 1, 1)

"""How wrong a layer's outputs are to what it feeds: an activation that clips, a softmax."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sosp.refit.activations import FULL_RANGE, Range


@dataclass(frozen=True)
class ErrorMeasure:
    """An error, and targets for the outputs as they are now: squares of what is missing to them lie above the error.

    So fitting to the targets lowers the error, and where they depend on the outputs, again and again.
    """

    error: Callable[[Tensor, Tensor], Tensor]  # (...) of (..., R, C) outputs, (R, C) targets; the best constants give 1
    towards: Callable[[Tensor, Tensor], Tensor] | None = None  # (R, C) from both; None: the targets as they are


def build_squared_error(clip: Range) -> ErrorMeasure:
    """Squares behind an activation that clips: where both lie beyond the same end there is nothing to correct."""
    low, high = clip

    def error(outputs: Tensor, target: Tensor) -> Tensor:
        y, t = outputs.clamp(low, high).double(), target.clamp(low, high).double()
        return _share((y - t).square().sum((-2, -1)), (t - t.mean(0)).square().sum())

    def towards(outputs: Tensor, target: Tensor) -> Tensor:
        found = torch.where(target <= low, outputs.clamp_max(low), target)
        return torch.where(target >= high, outputs.clamp_min(high), found)

    return ErrorMeasure(error, None if clip == FULL_RANGE else towards)


def build_divergence() -> ErrorMeasure:
    """Of Kullback and Leibler, for logits. A softmax has a slope of at most 1/2: 2 (p - q) does not go too far."""

    def error(outputs: Tensor, target: Tensor) -> Tensor:
        p, q = target.double().log_softmax(-1), outputs.double().log_softmax(-1)
        mean = p.exp().mean(0).log()
        return _share((p.exp() * (p - q)).sum((-2, -1)), (p.exp() * (p - mean)).sum())

    def towards(outputs: Tensor, target: Tensor) -> Tensor:
        return outputs + 2 * (target.softmax(1) - outputs.softmax(1))

    return ErrorMeasure(error, towards)


def _share(part: Tensor, whole: Tensor) -> Tensor:
    return part / torch.where(whole > 0, whole, 1)

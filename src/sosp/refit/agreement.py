"""What a network answers on the inputs held out, beside what the original does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sosp.core.losses import classes_axis, logits_of
from sosp.refit.inputs import Part
from sosp.refit.layer_errors import Measure


def answers(model: nn.Module, parts: Sequence[Part]) -> Tensor:
    """(R, C) the outputs for all inputs held out, one row for each answer (an input, a pixel, a token)."""
    rows = []
    for part in parts:
        if part.held:
            logits = logits_of(part.chunk.run(model))
            axis = classes_axis(logits)
            rows.append(logits.movedim(axis, -1).reshape(-1, logits.shape[axis]))
    return torch.cat(rows)


@dataclass(frozen=True)
class Likeness:
    """How like the original's answers some answers are."""

    agreement: float  # share of those with the same largest output; of numbers, share of their variance
    error: float

    @classmethod
    def of(cls, ours: Tensor, theirs: Tensor, measure: Measure, *, classes: bool) -> Likeness:
        error = float(measure.error(ours, theirs))
        return cls(float((ours.argmax(1) == theirs.argmax(1)).double().mean()) if classes else 1 - error, error)

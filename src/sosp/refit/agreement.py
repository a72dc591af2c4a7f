"""What a network answers on the inputs held out, next to what the original does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sosp.core.outputs import find_class_axis, find_logits
from sosp.refit.inputs import InputPart
from sosp.refit.layer_errors import ErrorMeasure


def collect_outputs(model: nn.Module, parts: Sequence[InputPart]) -> Tensor:
    """(R, C) the outputs for all inputs held out, one row for each answer (an input, a pixel, a token)."""
    rows = []
    for part in parts:
        if part.held:
            logits = find_logits(part.chunk.run(model))
            logits = logits if logits.dim() > 1 else logits.unsqueeze(1)  # a number for each example
            axis = find_class_axis(logits)
            rows.append(logits.movedim(axis, -1).reshape(-1, logits.shape[axis]))
    return torch.cat(rows)


@dataclass(frozen=True)
class OutputAgreement:
    """How like the original's answers some answers are."""

    agreement: float  # share of those with the same largest output; of numbers, share of their variance
    error: float
    answers: int

    @classmethod
    def of(cls, ours: Tensor, theirs: Tensor, measure: ErrorMeasure, *, classes: bool) -> OutputAgreement:
        error = float(measure.error(ours, theirs))
        share = float((ours.argmax(1) == theirs.argmax(1)).double().mean()) if classes else 1 - error
        return cls(share, error, len(ours))

    def is_better(self, other: OutputAgreement) -> bool:
        """More equal answers or, where their difference is within two standard errors, a smaller error."""
        gain = self.agreement - other.agreement
        return gain > 0 if abs(gain) > self.answers**-0.5 else self.error < other.error


def describe_change(before: OutputAgreement, after: OutputAgreement, *, classes: bool) -> str:
    """Return both numbers before and after in words."""
    error = f"error {before.error:.4g} -> {after.error:.4g}"
    return f"agreement {before.agreement:.1%} -> {after.agreement:.1%}, {error}" if classes else error

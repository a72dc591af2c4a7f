"""Compare a pruned network with the original on inputs that were used neither for scoring nor for repair."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

import torch
from torch import Tensor, nn

from sosp.core.batches import Chunk
from sosp.core.borrowed_model import borrow_model, preserve_state
from sosp.core.losses import IGNORE_INDEX, move_class_axis
from sosp.core.outputs import find_class_axis, find_logits
from sosp.errors import ArgumentError, DataError, is_number

Metric = Callable[[nn.Module], float]
BATCH = 32  # inputs at once


@dataclass(frozen=True)
class Quality:
    """How good a network is before and after pruning, and how sure the difference is."""

    name: str  # "accuracy", "agreement" or "metric"
    before: float
    after: float
    spread: float | None  # standard error of the drop over the inputs; None where nothing is known of single inputs
    inputs: int | None
    where: str = ""  # which inputs these are

    @property
    def drop(self) -> float:
        return self.before - self.after

    def __str__(self) -> str:
        if self.name == "metric":
            return f"metric {self.before:.4g} -> {self.after:.4g}"
        numbers = f"{self.after:.1%}" if self.name == "agreement" else f"{self.before:.1%} -> {self.after:.1%}"
        spread = "" if self.spread is None else f" (± {100 * self.spread:.1f})"
        return f"{self.name} {numbers}{spread} on {self.inputs:,} inputs {self.where}"


@dataclass(frozen=True)
class Comparison:
    """What two networks answer on the same inputs."""

    agreement: Quality
    accuracy: Quality | None  # None where the data has no labels of classes

    @property
    def best(self) -> Quality:
        """Return the accuracy where there are labels, else the agreement."""
        return self.accuracy or self.agreement


@dataclass(frozen=True, eq=False)
class HeldOut:
    """The original network, and inputs that no pruning of it has seen."""

    model: nn.Module
    chunks: Sequence[Chunk]
    loss: str | None  # its name; None for a function of the user's own
    where: str

    def compare(self, small: nn.Module) -> Comparison:
        """Return how much the pruned network agrees with the original, and how often both are right."""
        classes = self.loss == "cross_entropy"
        with borrow_model(self.model), borrow_model(small), torch.no_grad():
            parts = [compare_answers(self.model, small, chunk, classes=classes) for chunk in self.chunks]
        inputs = sum(len(part.error) for part in parts)
        error = torch.cat([part.error for part in parts])
        if not parts[0].classes:  # shares of the variance of the original's outputs
            count, total = sum(p.rows for p in parts), sum(p.total for p in parts)
            variance = sum(p.squares for p in parts) - (total.square() / count).sum()
            error = error * inputs / torch.where(variance > 0, variance, 1)
        agreement = Quality("agreement", 1.0, 1 - float(error.mean()), _standard_error(error), inputs, self.where)
        if any(part.right is None for part in parts):
            return Comparison(agreement, None)
        before, after = torch.cat([part.right for part in parts if part.right is not None], 1)
        spread = _standard_error(before - after)
        accuracy = Quality("accuracy", float(before.mean()), float(after.mean()), spread, inputs, self.where)
        return Comparison(agreement, accuracy)


def apply_metric(metric: Metric, model: nn.Module, small: nn.Module) -> Quality:
    """Return the quality by a function of the user's own."""
    return Quality("metric", call_metric(metric, model), call_metric(metric, small), None, None)


def call_metric(metric: Metric, network: nn.Module) -> float:
    """Return the metric of a network in eval mode; the network is left as it was."""
    with preserve_state(network):
        found = metric(network.eval())
    if not is_number(found) or not isfinite(found):
        raise ArgumentError(f"metric= returned {found!r}; it must return a finite number, where higher is better.")
    return float(found)


@dataclass(frozen=True, eq=False)
class AnswerPart:
    """Two networks' answers to some inputs, in sums."""

    classes: bool
    error: Tensor  # (N,) share of other answers; of numbers, the squared distance
    right: Tensor | None  # (2, N) share of right answers of each network
    rows: int = 0
    total: Any = 0.0  # (C,) sum of the original's numbers
    squares: Any = 0.0


def compare_answers(model: nn.Module, small: nn.Module, chunk: Chunk, *, classes: bool) -> AnswerPart:
    """Run both networks on some inputs."""
    theirs, ours = find_logits(chunk.run(model)), find_logits(chunk.run(small))
    theirs, ours = (x if x.dim() > 1 else x.unsqueeze(1) for x in (theirs, ours))
    axis = find_class_axis(theirs)
    t, y = (x.movedim(axis, -1).flatten(1, -2) if x.dim() > 2 else x.unsqueeze(1) for x in (theirs, ours))  # (N, P, C)
    if classes and t.shape[-1] > 1:
        other = (t.argmax(-1) != y.argmax(-1)).double().mean(1)
        return AnswerPart(True, other, find_right_answers(theirs, ours, chunk))
    t, y = t.double(), y.double()
    sums = {"total": t.sum((0, 1)), "squares": t.square().sum()}
    return AnswerPart(False, (t - y).square().sum((1, 2)), None, t.shape[0] * t.shape[1], **sums)


def find_right_answers(theirs: Tensor, ours: Tensor, chunk: Chunk) -> Tensor | None:
    """Return (2, N) shares of right answers; None where the targets are not classes of these outputs."""
    labels = chunk.targets
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.dtype == torch.bool:
        return None
    if chunk.keyed and labels.dim() > 1:  # a language model compares each token with the label of the next one
        return None
    try:
        classes = move_class_axis(theirs, labels).shape[1]
        answers = torch.stack([move_class_axis(x, labels).argmax(1) for x in (theirs, ours)])
    except DataError:
        return None
    counted = labels != IGNORE_INDEX
    if bool((counted & ((labels < 0) | (labels >= classes))).any()):
        return None
    right = ((answers == labels) & counted).reshape(2, len(labels), -1).double().sum(2)
    return right / counted.reshape(len(labels), -1).sum(1).clamp_min(1)


def _standard_error(x: Tensor) -> float | None:
    return float(x.std() / len(x) ** 0.5) if len(x) > 1 else None

"""Compute the training loss: the cross-entropy with the labels, and the distillation loss of a teacher."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sosp.core.losses import IGNORE_INDEX, move_class_axis, read_returned_loss
from sosp.core.outputs import find_logits
from sosp.errors import ArgumentError, DataError
from sosp.training.schedule import Schedule
from sosp.training.speed import upcast_half

AUXILIARY = 0.3  # weight of the heads that are used only in training (GoogLeNet, Szegedy et al. 2015; Inception)


def find_own_loss(inputs: Any, outputs: Any) -> Tensor | None:
    """Return the mean loss of a model that was given the labels in a dict batch, as Hugging Face's models return it."""
    return read_returned_loss(outputs) if isinstance(inputs, Mapping) and "labels" in inputs else None


def align_labels(outputs: Any, targets: Tensor, own: Tensor | None) -> Tensor:
    """Return the labels at the positions that predict them: a language model predicts the next token.

    The model's own loss decides: it is closer to the cross-entropy with the labels that the model uses.
    """
    if own is None or targets.dim() != 2 or find_logits(outputs).dim() != 3:
        return targets
    following = torch.cat([targets[:, 1:], torch.full_like(targets[:, :1], IGNORE_INDEX)], 1)
    logits = move_class_axis(upcast_half(find_logits(outputs).detach()), targets)
    here, there = (F.cross_entropy(logits, y, ignore_index=IGNORE_INDEX) for y in (targets, following))
    return torch.where((there - own).abs() < (here - own).abs(), following, targets)


def sum_loss(
    outputs: Any, targets: Tensor, schedule: Schedule, taught: Any = None, own: Tensor | None = None
) -> Tensor:
    """Return the sum of the loss over the examples; an example with several positions counts by their mean.

    ``own`` is the model's own mean loss, which replaces the cross-entropy with the labels.
    """
    logits = find_logits(outputs)
    loss = _label_loss(logits, targets, schedule) if own is None else own * len(targets)
    for head in _auxiliary(outputs, logits):
        loss = loss + AUXILIARY * _label_loss(head, targets, schedule)
    if taught is None:
        return loss
    teacher = _distillation_loss(logits, find_logits(taught), targets, schedule.temperature)
    return (1 - schedule.distill) * loss + schedule.distill * teacher


def _label_loss(logits: Tensor, targets: Tensor, schedule: Schedule) -> Tensor:
    logits = move_class_axis(upcast_half(logits), targets)
    reduction = "sum" if targets.dim() == 1 else "none"
    values = F.cross_entropy(logits, targets, reduction=reduction, label_smoothing=schedule.smoothing)
    return values if targets.dim() == 1 else _over_positions(values, targets)


def _over_positions(values: Tensor, targets: Tensor) -> Tensor:
    """Return the sum over examples of the mean over the positions that are not ignored, from (N, ...)."""
    if targets.dim() == 1:
        return values.sum()
    counts = targets != IGNORE_INDEX
    return ((values * counts).flatten(1).sum(1) / counts.flatten(1).sum(1).clamp_min(1)).sum()


def _distillation_loss(logits: Tensor, taught: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Return ``T^2 KL(teacher || student)`` of the outputs divided by T (Hinton et al. 2015)."""
    if logits.shape != taught.shape:
        raise ArgumentError(
            f"the teacher gives outputs of shape {tuple(taught.shape)} and the network {tuple(logits.shape)}; "
            "give a teacher with the same classes."
        )
    mine = F.log_softmax(move_class_axis(upcast_half(logits), targets) / temperature, 1)
    theirs = F.log_softmax(move_class_axis(upcast_half(taught.detach()), targets) / temperature, 1)
    return temperature**2 * _over_positions(F.kl_div(mine, theirs, reduction="none", log_target=True).sum(1), targets)


def _auxiliary(outputs: Any, logits: Tensor) -> list[Tensor]:
    """Return the logits of auxiliary heads: outputs of the same shape whose names begin with ``aux``."""
    if isinstance(outputs, Mapping):
        others = [x for key, x in outputs.items() if str(key).startswith("aux")]
    elif isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
        others = [x for key, x in zip(outputs._fields, outputs, strict=True) if key.startswith("aux")]
    else:
        others = []
    return [x for x in others if isinstance(x, Tensor) and x.shape == logits.shape]


def count_correct(outputs: Any, targets: Tensor, best: int = 1) -> Tensor:
    """Count the examples whose class is among the ``best`` outputs; with positions, add the share of correct ones."""
    logits = move_class_axis(find_logits(outputs).detach(), targets)
    found = logits.topk(min(best, logits.shape[1]), 1).indices == targets.unsqueeze(1)
    return _over_positions(found.any(1).double(), targets)


def count_classes(outputs: Any, targets: Tensor) -> int:
    """Return the number of classes of the network."""
    return move_class_axis(find_logits(outputs), targets).shape[1]


def refuse_labels(label_range: tuple[int, int], classes: int) -> None:
    """Raise DataError if a label has no output of the network; a GPU would only abort."""
    wrong = label_range[0] if label_range[0] < 0 else label_range[1]
    if not 0 <= wrong < classes:
        raise DataError(
            f"a label is {wrong}, but the network has {classes} outputs (labels 0 to {classes - 1}). "
            "Check the labels, or that this is the right network for the data."
        )

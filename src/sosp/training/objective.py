"""What training minimises: the cross-entropy with the labels, and with a teacher where there is one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from sosp.losses import classes_second, logits_of
from sosp.training.schedule import Schedule

AUXILIARY = 0.3  # weight of the heads that only training has (GoogLeNet, Szegedy et al. 2015; Inception)


def loss_sum(outputs: Any, targets: Tensor, schedule: Schedule, taught: Any = None) -> Tensor:
    """The sum over the examples; the mean over the positions of one, where it has several."""
    logits = logits_of(outputs)
    loss = _labels(logits, targets, schedule)
    for head in _auxiliary(outputs, logits):
        loss = loss + AUXILIARY * _labels(head, targets, schedule)
    if taught is None:
        return loss
    return (1 - schedule.distill) * loss + schedule.distill * _teacher(logits, logits_of(taught), schedule.temperature)


def _labels(logits: Tensor, targets: Tensor, schedule: Schedule) -> Tensor:
    logits = classes_second(logits.float(), targets)
    loss = F.cross_entropy(logits, targets, reduction="sum", label_smoothing=schedule.smoothing)
    return loss * (len(targets) / max(targets.numel(), 1))


def _teacher(logits: Tensor, taught: Tensor, temperature: float) -> Tensor:
    """``T^2 KL(teacher || student)`` of the outputs divided by T (Hinton et al. 2015)."""
    mine = F.log_softmax(logits.float() / temperature, -1)
    theirs = F.log_softmax(taught.detach().float() / temperature, -1)
    positions = max(mine[..., 0].numel() // max(len(mine), 1), 1)
    return temperature**2 * F.kl_div(mine, theirs, reduction="sum", log_target=True) / positions


def _auxiliary(outputs: Any, logits: Tensor) -> list[Tensor]:
    """The other heads' logits: further tensors of the same shape in a tuple or a dict of outputs."""
    if isinstance(outputs, Mapping):
        others = [x for key, x in outputs.items() if str(key).startswith("aux")]
    elif isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
        others = [x for key, x in zip(outputs._fields, outputs, strict=True) if key.startswith("aux")]
    else:
        others = []
    return [x for x in others if isinstance(x, Tensor) and x.shape == logits.shape]


def correct(outputs: Any, targets: Tensor, best: int = 1) -> Tensor:
    """How many examples (or positions) have their class among the ``best`` outputs."""
    logits = classes_second(logits_of(outputs).detach(), targets)
    best = min(best, logits.shape[1])
    return (logits.topk(best, 1).indices == targets.unsqueeze(1)).sum()

"""The loss of each example, and the curvature of the loss in the network's outputs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from sosp.core.batches import Chunk
from sosp.errors import DataError, LossError, OutputError, check_choice

LossLike = str | Callable[[Any, Any], Tensor]
LOSS_NAMES = ("cross_entropy", "mse")
IGNORE_INDEX = -100  # torch's own ignore_index


def check_loss(loss: LossLike) -> None:
    """Refuse what is neither a known name nor a function."""
    if not callable(loss):
        check_choice("loss", loss, LOSS_NAMES)


def compute_example_losses(loss: LossLike, outputs: Any, chunk: Chunk) -> Tensor:
    """One loss per example, (N,); a dict batch takes the model's own loss (a mean), once for each example."""
    own = find_own_loss(loss, outputs, chunk)
    if own is not None:
        return _finite(own.expand(chunk.size), chunk)
    if chunk.keyed and chunk.targets is None and not callable(loss):
        raise DataError(
            f"{chunk.source} is a dict without 'labels' and the model returned no loss. "
            "Add 'labels' to the batches or give (inputs, targets) pairs."
        )
    if callable(loss):
        values = loss(outputs, chunk.targets)
    else:
        values = {"cross_entropy": cross_entropy, "mse": squared_error}[loss](find_logits(outputs), chunk)
    return _finite(check_loss_values(values, chunk), chunk)


def find_own_loss(loss: LossLike, outputs: Any, chunk: Chunk) -> Tensor | None:
    """The mean loss that a model returns for a dict batch with labels, unless the user gave a function."""
    if callable(loss) or not chunk.keyed:
        return None
    return read_returned_loss(outputs)


def read_returned_loss(outputs: Any) -> Tensor | None:
    """Return the mean loss among the outputs of a model that was given labels; None where there is none."""
    own = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    return own.mean() if isinstance(own, Tensor) else None


def check_loss_values(values: Any, chunk: Chunk) -> Tensor:
    if not isinstance(values, Tensor):
        raise LossError(
            f"the loss returned a {type(values).__name__}; it must return a tensor with one loss per example."
        )
    if values.dim() == 0 or values.shape[0] != chunk.size:
        raise LossError(
            f"the loss returned shape {tuple(values.shape)} for {chunk.size} examples; it must return one loss per "
            "example (use reduction='none')."
        )
    return _summed(values)


def _summed(values: Tensor) -> Tensor:
    """(N,) from (N, ...)."""
    return values.flatten(1).sum(1) if values.dim() > 1 else values


def _finite(values: Tensor, chunk: Chunk) -> Tensor:
    bad = ~torch.isfinite(values.detach())
    if bool(bad.any()):
        row = int(torch.as_tensor(bad).nonzero()[0, 0])
        raise LossError(
            f"the loss of {chunk.where(row)} is {float(values.detach()[row])}; every saliency would be too. "
            "Check that example, the labels and the weights (diverged training?)."
        )
    return values


def check_finite(logits: Tensor, chunk: Chunk) -> None:
    """Raise LossError if an output is infinite or NaN."""
    _finite(logits.detach().flatten(1).sum(1) if logits.dim() > 1 else logits.detach(), chunk)


def find_class_axis(logits: Tensor) -> int:
    """Where the classes stand when no label tells: second, as in images, or last, as in rows of tokens."""
    return 1 if logits.dim() in (2, 4, 5) else logits.dim() - 1


def are_numbers(loss: LossLike, outputs: Tensor) -> bool:
    """Return whether outputs are numbers by themselves, and not the logits of classes."""
    return loss == "mse" or outputs.dim() < 2 or outputs.shape[find_class_axis(outputs)] == 1


def find_logits(outputs: Any) -> Tensor:
    """The tensor of network outputs: the output itself, or where the usual containers keep it."""
    if isinstance(outputs, Tensor):
        return _real(outputs)
    for key in ("logits", "out"):
        found = outputs.get(key) if isinstance(outputs, Mapping) else getattr(outputs, key, None)
        if isinstance(found, Tensor):
            return _real(found)
    if isinstance(outputs, (tuple, list)) and outputs and isinstance(outputs[0], Tensor):
        return _real(outputs[0])
    names = f" with {', '.join(map(repr, outputs))}" if isinstance(outputs, Mapping) and outputs else ""
    raise OutputError(
        f"the model returns a {type(outputs).__name__}{names} and no logits were found in it (looked for a tensor, "
        ".logits, ['logits'], ['out'], the first of a tuple). Repair, methods of pairs ('sosp-i', 'sosp-obs') and "
        "losses given by name need logits. Wrap the model to return its logits: as a tensor, or under the name "
        "'logits'. Without repair, 'sosp-h' and 'first-order' do not need logits: give loss=a function of (outputs, "
        "targets) that returns one loss per example."
    )


def _real(logits: Tensor) -> Tensor:
    if not logits.is_floating_point():
        raise OutputError(
            f"the model's output is of type {logits.dtype}; a loss cannot be differentiated through it. "
            "Return the logits instead of the predicted classes."
        )
    return logits


def cross_entropy(logits: Tensor, chunk: Chunk) -> Tensor:
    """``-log softmax(f)_y`` of each example; with several positions (pixels, tokens), their mean."""
    targets = chunk.targets
    if not isinstance(targets, Tensor):
        raise DataError(f"cross_entropy needs a tensor of labels; {chunk.source} has a {type(targets).__name__}.")
    if targets.is_floating_point():
        _check_soft(logits, targets, chunk)
        values = F.cross_entropy(logits, targets.to(logits.dtype), reduction="none")
        return _summed(values) / max(1, math.prod(values.shape[1:]))
    logits = move_class_axis(logits, targets)
    _check_labels(targets, logits.shape[1], chunk)
    values = F.cross_entropy(logits, targets.long(), reduction="none", ignore_index=IGNORE_INDEX)
    return values if values.dim() == 1 else _summed(values) / (targets != IGNORE_INDEX).flatten(1).sum(1).clamp_min(1)


def move_class_axis(logits: Tensor, targets: Tensor | None) -> Tensor:
    """(N, D, positions...) from (N, D, ...) or, as language models give it, (N, ..., D)."""
    if targets is None:
        return logits
    if logits.dim() > 1 and (logits.shape[0], *logits.shape[2:]) == tuple(targets.shape):
        return logits
    if logits.dim() > 2 and tuple(logits.shape[:-1]) == tuple(targets.shape):
        return logits.movedim(-1, 1)
    raise DataError(
        f"outputs of shape {tuple(logits.shape)} and labels of shape {tuple(targets.shape)} do not match. "
        "cross_entropy takes one output per class and one label per example, or per position: outputs (N, D, ...) or "
        "(N, ..., D) and labels (N, ...)."
    )


def _check_labels(targets: Tensor, classes: int, chunk: Chunk) -> None:
    if targets.shape[0] != chunk.size:
        raise DataError(f"{chunk.source} has {chunk.size} examples and labels of shape {tuple(targets.shape)}.")
    if classes == 1:
        raise LossError(
            "the cross-entropy of a single output is always zero. For one logit per example give your own loss: "
            "lambda f, y: F.binary_cross_entropy_with_logits(f[:, 0], y.to(f.dtype), reduction='none')."
        )
    wrong = (targets != IGNORE_INDEX) & ((targets < 0) | (targets >= classes))
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0, 0])
        raise DataError(
            f"the label of {chunk.where(row)} is {int(targets[wrong][0])}, but the model has {classes} outputs (labels "
            f"0 to {classes - 1}). Check the labels, or that this is the right model for the data."
        )


def _check_soft(logits: Tensor, targets: Tensor, chunk: Chunk) -> None:
    if targets.shape != logits.shape or targets.dim() < 2:
        raise DataError(
            f"{chunk.source} has real-valued labels of shape {tuple(targets.shape)} for outputs of shape "
            f"{tuple(logits.shape)}. Give class numbers as integers (y.long()), or probabilities of the outputs' shape."
        )
    wrong = targets < 0
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0, 0])
        raise DataError(
            f"a probability in the label of {chunk.where(row)} is {float(targets[wrong][0])}. Give probabilities, or "
            "loss='mse' for real targets."
        )


def squared_error(outputs: Tensor, chunk: Chunk) -> Tensor:
    """``1/2 |f - y|^2`` of each example."""
    targets = chunk.targets
    if not isinstance(targets, Tensor) or targets.shape != outputs.shape:
        found = tuple(targets.shape) if isinstance(targets, Tensor) else type(targets).__name__
        raise DataError(
            f"mse needs targets of the outputs' shape {tuple(outputs.shape)}; {chunk.source} has {found}. Reshape "
            "them, or give your own loss."
        )
    return 0.5 * _summed((outputs - targets).pow(2))

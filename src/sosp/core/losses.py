"""The loss of each example, and the curvature of the loss in the network's outputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sosp.core.batches import Chunk
from sosp.core.loss_names import LossLike, name_loss
from sosp.core.outputs import find_class_axis, find_logits
from sosp.core.own_losses import call_own_loss, sum_positions
from sosp.errors import DataError, LossError

IGNORE_INDEX = -100  # torch's own ignore_index
CROSS_ENTROPY, BCE = nn.CrossEntropyLoss(), nn.BCEWithLogitsLoss()  # what the names mean


def compute_example_losses(loss: LossLike, outputs: Any, chunk: Chunk) -> Tensor:
    """One loss per example, (N,); a dict batch takes the model's own loss (a mean), once for each example."""
    own = find_own_loss(loss, outputs, chunk)
    if own is not None:
        return refuse_infinite(own.expand(chunk.size), chunk)
    if chunk.keyed and chunk.targets is None and not callable(loss):
        raise DataError(
            f"{chunk.source} is a dict without 'labels' and the model returned no loss. "
            "Add 'labels' to the batches or give (inputs, targets) pairs."
        )
    return refuse_infinite(call_loss(loss, outputs, chunk), chunk)


def call_loss(loss: LossLike, outputs: Any, chunk: Chunk) -> Tensor:
    """Return one loss per example, (N,), of a known loss or of the user's own."""
    name = name_loss(loss)
    if name is None:
        assert callable(loss)
        return call_own_loss(loss, outputs, chunk)
    logits = find_logits(outputs)
    if name == "mse":
        return squared_error(logits, chunk)
    if name == "bce":
        return binary_cross_entropy(logits, chunk, loss if isinstance(loss, nn.BCEWithLogitsLoss) else BCE)
    return cross_entropy(logits, chunk, loss if isinstance(loss, nn.CrossEntropyLoss) else CROSS_ENTROPY)


def predict_targets(name: str, logits: Tensor) -> Tensor:
    """Return the targets that the network itself predicts, for a known loss."""
    if name == "cross_entropy":
        return logits.argmax(find_class_axis(logits))
    return logits.sigmoid() if name == "bce" else logits


def find_own_loss(loss: LossLike, outputs: Any, chunk: Chunk) -> Tensor | None:
    """The mean loss that a model returns for a dict batch with labels, unless the user gave a function."""
    if callable(loss) or not chunk.keyed:
        return None
    return read_returned_loss(outputs)


def read_returned_loss(outputs: Any) -> Tensor | None:
    """Return the mean loss among the outputs of a model that was given labels; None where there is none."""
    own = outputs.get("loss") if isinstance(outputs, Mapping) else getattr(outputs, "loss", None)
    return own.mean() if isinstance(own, Tensor) else None


def refuse_infinite(values: Tensor, chunk: Chunk) -> Tensor:
    """Return the losses; raise LossError if one is infinite or NaN."""
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
    refuse_infinite(logits.detach().flatten(1).sum(1) if logits.dim() > 1 else logits.detach(), chunk)


def cross_entropy(logits: Tensor, chunk: Chunk, options: nn.CrossEntropyLoss = CROSS_ENTROPY) -> Tensor:
    """``-log softmax(f)_y`` of each example; with several positions (pixels, tokens), their mean.

    A class's ``weight`` is a factor: the mean over positions divides by their number, not by their weights.
    """
    targets, ignored = chunk.targets, options.ignore_index
    if not isinstance(targets, Tensor):
        raise DataError(f"cross_entropy needs a tensor of labels; {chunk.source} has a {type(targets).__name__}.")
    given: dict[str, Any] = {"reduction": "none", "label_smoothing": options.label_smoothing}
    if targets.is_floating_point():
        _check_soft(logits, targets, chunk)
        values = F.cross_entropy(logits, targets.to(logits.dtype), _class_weight(options, logits), **given)
        return _over_positions(values, None, options.reduction)
    logits = move_class_axis(logits, targets)
    _check_labels(targets, logits.shape[1], chunk, ignored)
    weight = _class_weight(options, logits)
    values = F.cross_entropy(logits, targets.long(), weight, ignore_index=ignored, **given)
    return _over_positions(values, targets != ignored, options.reduction)


def _over_positions(values: Tensor, counted: Tensor | None, reduction: str) -> Tensor:
    """(N,) from (N, positions...): the mean over those that are counted, or the sum unless the loss is a mean."""
    if values.dim() == 1 or reduction != "mean":
        return sum_positions(values)
    if counted is None:
        return sum_positions(values) / max(1, math.prod(values.shape[1:]))
    return sum_positions(values) / counted.flatten(1).sum(1).clamp_min(1)


def _class_weight(options: nn.CrossEntropyLoss, logits: Tensor) -> Tensor | None:
    """Return the weights of the classes, in the precision and on the device of the logits."""
    weight = options.weight
    if weight is not None and weight.shape[0] != logits.shape[1]:
        raise LossError(f"the loss has weights for {weight.shape[0]} classes, and the model {logits.shape[1]}.")
    return None if weight is None else weight.to(logits.device, logits.dtype)


def binary_cross_entropy(logits: Tensor, chunk: Chunk, options: nn.BCEWithLogitsLoss = BCE) -> Tensor:
    """``-y log s(f) - (1 - y) log(1 - s(f))`` of each example with the sigmoid s, the mean over all of its outputs."""
    targets = _check_yes_or_no(logits, chunk)
    if options.weight is not None and options.weight.dim() == logits.dim() and options.weight.shape[0] > 1:
        raise LossError(
            f"the loss has a weight of shape {tuple(options.weight.shape)}, one for each place in a batch. Give "
            "weights of outputs, which are the same for all examples."
        )
    weight, positive = (None if x is None else x.to(logits) for x in (options.weight, options.pos_weight))
    y = targets.to(logits.dtype)
    values = F.binary_cross_entropy_with_logits(logits, y, weight, pos_weight=positive, reduction="none")
    return _over_positions(values, None, options.reduction)


def _check_yes_or_no(logits: Tensor, chunk: Chunk) -> Tensor:
    """Return the targets: for every output a number from 0 to 1."""
    y = chunk.targets
    if not isinstance(y, Tensor) or y.shape != logits.shape:
        found = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
        raise DataError(
            f"bce needs one target from 0 to 1 for every output, of shape {tuple(logits.shape)}; {chunk.source} has "
            f"{found}. Reshape them (for one output: y[:, None]), or give your own loss."
        )
    wrong = (y < 0) | (y > 1)
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0, 0])
        raise DataError(
            f"a target of {chunk.where(row)} is {float(y[wrong][0])}; bce needs numbers from 0 to 1. Give 0 for no and "
            "1 for yes, or loss='mse' for real targets."
        )
    return y


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


def _check_labels(targets: Tensor, classes: int, chunk: Chunk, ignored: int) -> None:
    if targets.shape[0] != chunk.size:
        raise DataError(f"{chunk.source} has {chunk.size} examples and labels of shape {tuple(targets.shape)}.")
    if classes == 1:
        raise LossError(
            "the cross-entropy of a single output is always zero. For one logit per example give loss='bce' "
            "(F.binary_cross_entropy_with_logits) and targets of the outputs' shape, y[:, None]."
        )
    wrong = (targets != ignored) & ((targets < 0) | (targets >= classes))
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
    return 0.5 * sum_positions((outputs - targets).pow(2))

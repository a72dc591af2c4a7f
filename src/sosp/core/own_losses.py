"""One loss per example from a loss function of the user's own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from sosp.core.batches import Chunk
from sosp.errors import LossError


def call_own_loss(loss: Callable[[Any, Any], Any], outputs: Any, chunk: Chunk) -> Tensor:
    """Return one loss per example, also of a function that returns the mean over the examples of a batch."""
    values = loss(outputs, chunk.targets)
    if not isinstance(values, Tensor) or values.dim():
        return check_loss_values(values, chunk)
    if chunk.size == 1:
        return values.reshape(1)
    alone = [loss(*(_take_row(x, i, chunk.size) for x in (outputs, chunk.targets))) for i in range(chunk.size)]
    return _check_mean(torch.stack([x.reshape(()) for x in alone]), values, chunk)


def _check_mean(values: Tensor, mean: Tensor, chunk: Chunk) -> Tensor:
    """Refuse losses of single examples, (N,), whose mean is not the loss of the batch."""
    found, expected = values.detach(), mean.detach()
    # Half of the digits: a loss that is not a mean over the examples differs in the first ones.
    error = torch.finfo(found.dtype).eps ** 0.5 * found.abs().mean()
    if bool(expected.isfinite()) and not bool((found.mean() - expected).abs() <= error):
        raise LossError(
            f"the loss returned one number for {chunk.size} examples, {float(expected):.6g}, which is not the "
            f"mean of the numbers that it returns for each of them alone, {float(found.mean()):.6g}. Return one loss "
            "per example (with torch's own functions: reduction='none')."
        )
    return values


def _take_row(x: Any, row: int, size: int) -> Any:
    """Return a batch of one example: row ``row`` of every tensor with ``size`` rows, also in a class of the user's."""

    def cut(t: Any) -> Any:
        return t[row : row + 1] if isinstance(t, Tensor) and t.dim() and t.shape[0] == size else t

    found = tree_map(cut, x)
    if found is x and hasattr(x, "__dict__") and not isinstance(x, Tensor):
        found = copy.copy(x)
        for key, value in vars(x).items():
            setattr(found, key, tree_map(cut, value))
    return found


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
    return sum_positions(values)


def sum_positions(values: Tensor) -> Tensor:
    """(N,) from (N, ...)."""
    return values.flatten(1).sum(1) if values.dim() > 1 else values

"""How good a network is on data it has not seen."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from sosp.batches import call
from sosp.errors import DataError
from sosp.preserve import same_random_numbers
from sosp.training import ranks
from sosp.training.objective import correct, loss_sum
from sosp.training.schedule import Schedule

BATCH = 256


@dataclass(frozen=True)
class Accuracy:
    """Shares of the examples, and the mean loss."""

    top1: float
    top5: float
    loss: float
    examples: int

    def __str__(self) -> str:
        return f"{self.top1:.2%} (top 5: {self.top5:.2%}, loss {self.loss:.4f}, {self.examples} examples)"


def home(model: nn.Module) -> torch.device:
    """Where a network is."""
    return next((x.device for x in [*model.parameters(), *model.buffers()]), torch.device("cpu"))


def moved(x: Any, device: torch.device) -> Any:
    """All tensors of a batch on the device."""
    return tree_map(lambda t: t.to(device, non_blocking=True) if isinstance(t, Tensor) else t, x)


def evaluate(
    model: nn.Module,
    data: Any,
    *,
    batch: int = BATCH,
    device: torch.device | str | None = None,
    limit: int | None = None,
) -> Accuracy:
    """Accuracy and loss of ``model`` in eval mode on a source of ``sosp.data``, or on (inputs, labels) batches.

    Runs where the model is; with ``device``, a copy of it there. Several processes share the work and all get the
    result.
    """
    where = home(model) if device is None else torch.device(device)
    twin = model if home(model) == where else copy.deepcopy(model).to(where)
    modes = {m: m.training for m in twin.modules()}
    try:
        twin.eval()
        with torch.inference_mode(), same_random_numbers():
            return _evaluate(twin, _batches(data, batch, limit), where)
    finally:
        for module, mode in modes.items():
            module.training = mode


def _batches(data: Any, batch: int, limit: int | None) -> Iterable[tuple[Any, Tensor]]:
    if hasattr(data, "ordered"):
        return data.ordered(batch=batch, limit=limit, rank=ranks.rank(), ranks=ranks.ranks())
    return _limited(data, limit) if ranks.is_main() else []  # the user's own loader is read once


def _limited(data: Any, limit: int | None) -> Iterator[tuple[Any, Tensor]]:
    left = limit
    for x, y in data:
        if left is not None and len(y) > left:
            x, y = tree_map(lambda t, n=left: t[:n] if isinstance(t, Tensor) and t.dim() else t, (x, y))
        yield x, y
        left = None if left is None else left - len(y)
        if left == 0:
            return


def _evaluate(model: nn.Module, batches: Iterable[tuple[Any, Tensor]], device: torch.device) -> Accuracy:
    sums = torch.zeros(5, dtype=torch.float64, device=device)  # right at first, in five, positions, loss, examples
    for x, y in batches:
        x, y = moved(x, device), moved(y, device)
        outputs = call(model, x)
        loss = loss_sum(outputs, y, Schedule())
        sums[0] += correct(outputs, y)
        sums[1] += correct(outputs, y, 5)
        sums[2] += y.numel()
        sums[3] += loss
        sums[4] += len(y)
    ranks.sum_(sums)
    first, five, positions, total, examples = sums.tolist()
    if not examples:
        raise DataError("there is nothing to evaluate on: the data is empty.")
    return Accuracy(first / positions, five / positions, total / examples, int(examples))

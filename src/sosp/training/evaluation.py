"""Measure the accuracy and the loss of a network on test data."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sosp.core import distributed
from sosp.core.batches import is_source, take_examples
from sosp.core.borrowed_model import find_device, preserve_random_state, preserve_state
from sosp.core.progress import track_progress
from sosp.data import Resident
from sosp.errors import DataError, check_whole_number
from sosp.training.objective import align_labels, count_classes, count_correct, find_own_loss, refuse_labels, sum_loss
from sosp.training.out_of_memory import compute_outputs
from sosp.training.schedule import Schedule
from sosp.training.user_data import (
    find_cpu_label_range,
    find_source_label_range,
    move_to_device,
    parse_batch,
    resolve_source,
)

BATCH = 256
RESIDENT_BATCHES = {"cpu": 100, "cuda": 1000}  # for images held in memory: fits the caches, fills a GPU


@dataclass(frozen=True)
class Accuracy:
    """The accuracy of a network, as shares of the examples, and its mean loss."""

    top1: float
    top5: float
    loss: float
    examples: int

    def __str__(self) -> str:
        return f"{self.top1:.2%} (top 5: {self.top5:.2%}, loss {self.loss:.4f}, {self.examples} examples)"


def evaluate(
    model: nn.Module,
    data: Any,
    *,
    batch: int | None = None,
    device: torch.device | str | None = None,
    limit: int | None = None,
) -> Accuracy:
    """Measure the accuracy and the loss of a network in eval mode. Several processes share the work and the result.

    Args:
        model: The network.
        data: A dataset of ``sosp.data`` (its test part is used), a source, a pair of tensors or arrays, a Dataset of
            torch or of Hugging Face, or a loader.
        batch: Examples per forward pass; by default a number that suits the device.
        device: The device to compute on, with a copy; by default that of the network.
        limit: Number of examples to read; None reads all.

    Returns:
        An ``Accuracy`` with top-1 and top-5 shares and the mean loss.

    Raises:
        DataError: If the data is empty or does not fit the network.
    """
    where = find_device(model) if device is None else torch.device(device)
    network = model if find_device(model) == where else copy.deepcopy(model).to(where)
    source = resolve_source(data, "test", model)
    size = _choose_batch(source, where) if batch is None else batch
    batches = _batches(source, size, limit)
    total = source.steps(size) if is_source(source) and limit is None else None  # None: not known
    # Not inference mode: tensors that a network keeps from such a forward pass could not be used in training.
    with torch.no_grad(), preserve_random_state(), preserve_state(network):
        return _evaluate(
            network.eval(), track_progress(batches, "testing", total), where, find_source_label_range(source)
        )


def _choose_batch(source: Any, where: torch.device) -> int:
    return RESIDENT_BATCHES.get(where.type, BATCH) if isinstance(source, Resident) else BATCH


def _batches(data: Any, batch: int, limit: int | None) -> Iterable[tuple[Any, Tensor]]:
    if limit is not None:
        check_whole_number("limit", limit)
    if is_source(data):
        return data.ordered(batch=batch, limit=limit, rank=distributed.get_rank(), ranks=distributed.count_ranks())
    if not isinstance(data, Iterable) or isinstance(data, Tensor | str):
        raise DataError(
            f"the data is a {type(data).__name__}; give a source of sosp.data, a pair of tensors (inputs, labels), or "
            "batches of them."
        )
    return _limit_examples(data, limit) if distributed.is_main() else []  # the user's own loader is read once


def _limit_examples(data: Iterable[Any], limit: int | None) -> Iterator[tuple[Any, Tensor]]:
    left = limit
    for x, y in map(parse_batch, data):
        if left is not None and len(y) > left:
            x, y = take_examples(x, left), y[:left]
        yield x, y
        left = None if left is None else left - len(y)
        if left == 0:
            return


def _evaluate(
    model: nn.Module, batches: Iterable[tuple[Any, Tensor]], device: torch.device, known: tuple[int, int] | None
) -> Accuracy:
    sums = torch.zeros(4, dtype=torch.float64, device=device)  # top 1, top 5, loss, examples
    for x, y in batches:
        if not len(y):  # a rank may have no rows of the last batch
            continue
        found = known or find_cpu_label_range(y)
        x, y = move_to_device(x, device), move_to_device(y, device)
        outputs = compute_outputs(model, x, len(y))
        refuse_labels(found, count_classes(outputs, y))
        own = find_own_loss(x, outputs)
        y = align_labels(outputs, y, own)
        sums[0] += count_correct(outputs, y)
        sums[1] += count_correct(outputs, y, 5)
        sums[2] += sum_loss(outputs, y, Schedule(), own=own)
        sums[3] += len(y)
    distributed.sum_tensors(sums)
    first, five, loss, examples = sums.tolist()
    if not examples:
        raise DataError("there is nothing to evaluate on: the data is empty.")
    return Accuracy(first / examples, five / examples, loss / examples, int(examples))

"""Iterate the training batches of an epoch: the part of this rank, on the device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data.distributed import DistributedSampler

from sosp.core import distributed
from sosp.core.batches import is_source
from sosp.data.batch_source import make_generator
from sosp.errors import DataError
from sosp.training.randomness import iterate_with_generator
from sosp.training.user_data import (
    find_cpu_label_range,
    find_source_label_range,
    move_to_device,
    parse_batch,
    select_rows,
)


class RankBatch(NamedTuple):
    """The part of a batch that belongs to this rank."""

    inputs: Any
    labels: Tensor
    rows: int  # examples of the batch over all ranks
    copies: int = 1  # ranks that hold the same rows: a batch with fewer rows than ranks is given to all of them
    label_range: tuple[int, int] = (0, 0)  # least and greatest label; (0, 0) if not known


class TrainingBatches:
    """The batches of one seed, epoch by epoch."""

    def __init__(self, source: Any, batch: int, seed: int, device: torch.device, channels_last: bool) -> None:
        self.source, self.batch, self.seed, self.device = source, batch, seed, device
        self.channels_last = channels_last
        self.steps, self.examples = _count_batches_and_examples(source, batch)
        if not self.steps:
            raise DataError("the training data is empty.")
        self.label_range = find_source_label_range(source)

    def epoch(self, number: int, start: int) -> Iterator[RankBatch]:
        """Yield the batches of epoch ``number`` from ``start`` on, on the device."""
        batches = self._read_source(number, start) if is_source(self.source) else self._read_loader(number, start)
        for x, y, rows, copies, _ in batches:
            found = self.label_range or find_cpu_label_range(y)
            x, y = move_to_device(x, self.device), move_to_device(y, self.device)
            if self.channels_last and isinstance(x, Tensor) and x.dim() == 4:
                x = x.contiguous(memory_format=torch.channels_last)
            yield RankBatch(x, y, rows, copies, found)

    def _read_source(self, number: int, start: int) -> Iterator[RankBatch]:
        batch, seed = self.batch, self.seed
        mine = self.source.epoch(
            number, batch=batch, seed=seed, start=start, rank=distributed.get_rank(), ranks=distributed.count_ranks()
        )
        for k, (x, y) in enumerate(mine, start):
            rows = min(batch, self.examples - k * batch)
            if rows < distributed.count_ranks():
                x, y = next(iter(self.source.epoch(number, batch=batch, seed=seed, start=k)))
            yield RankBatch(x, y, rows, distributed.count_ranks() if rows < distributed.count_ranks() else 1)

    def _read_loader(self, number: int, start: int) -> Iterator[RankBatch]:
        for batch in itertools.islice(
            iterate_with_generator(self.source, make_generator(self.seed, number)), start, None
        ):
            yield select_rank_rows(*parse_batch(batch))


def select_rank_rows(x: Any, y: Tensor) -> RankBatch:
    """Return the part of this rank of a batch that all ranks have read."""
    r, n, rows = distributed.get_rank(), distributed.count_ranks(), len(y)
    if rows < n:
        return RankBatch(x, y, rows, n)
    x, y = select_rows((x, y), slice(r, None, n), rows) if n > 1 else (x, y)
    return RankBatch(x, y, rows)


def iterate_in_order(source: Any, batch: int) -> Iterator[RankBatch]:
    """Yield all batches of a source in order, without augmentation."""
    for k, (x, y) in enumerate(
        source.ordered(batch=batch, rank=distributed.get_rank(), ranks=distributed.count_ranks())
    ):
        rows = min(batch, len(source) - k * batch)
        if rows < distributed.count_ranks():
            x, y = next(itertools.islice(source.ordered(batch=batch), k, None))
        yield RankBatch(x, y, rows, distributed.count_ranks() if rows < distributed.count_ranks() else 1)


def _count_batches_and_examples(loader: Any, batch: int) -> tuple[int, int]:
    """Return the number of batches and of examples in an epoch."""
    if is_source(loader):
        return loader.steps(batch), len(loader)
    if distributed.count_ranks() > 1 and isinstance(getattr(loader, "sampler", None), DistributedSampler):
        raise DataError("the loader has a DistributedSampler; give it a plain sampler: the ranks share every batch.")
    try:
        if isinstance(loader, Tensor | str) or not hasattr(loader, "__iter__"):
            raise TypeError
        steps = len(loader)
    except TypeError as error:
        raise DataError(
            f"the training data is a {type(loader).__name__}; give a sosp.data.Dataset, a pair of tensors "
            "(inputs, labels), or a loader with a length that can be iterated more than once."
        ) from error
    try:
        return steps, len(getattr(loader, "dataset", loader))
    except TypeError:
        return steps, steps


def zip_batches(feeds: Sequence[TrainingBatches], number: int, start: int) -> Iterator[list[RankBatch]]:
    """Yield a batch for every network; networks with the same ``TrainingBatches`` get the same batch."""
    distinct = list(dict.fromkeys(feeds))
    indices = [distinct.index(f) for f in feeds]
    for batches in zip(*(f.epoch(number, start) for f in distinct), strict=True):
        yield [batches[k] for k in indices]

"""Batches by epoch and seed, each rank's part of them, on the device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data.distributed import DistributedSampler

from sosp.core import distributed
from sosp.core.batches import is_source
from sosp.data.source import generator
from sosp.errors import DataError
from sosp.training.randomness import apart
from sosp.training.user_data import moved, read, rows_of, seen_span, whole_span


class Batch(NamedTuple):
    """This rank's part of a batch."""

    inputs: Any
    labels: Tensor
    rows: int  # examples of all of it
    copies: int = 1  # ranks that hold the very same rows: a batch too small to be shared out goes to all of them
    span: tuple[int, int] = (0, 0)  # no label lies outside; (0, 0) where nobody has looked


class Feed:
    """The batches of one seed, epoch by epoch."""

    def __init__(self, source: Any, batch: int, seed: int, device: torch.device, channels_last: bool) -> None:
        self.source, self.batch, self.seed, self.device = source, batch, seed, device
        self.channels_last = channels_last
        self.steps, self.examples = _lengths(source, batch)
        if not self.steps:
            raise DataError("the training data is empty.")
        self.span = whole_span(source)

    def epoch(self, number: int, start: int) -> Iterator[Batch]:
        """The batches from ``start`` on, on the device."""
        batches = self._prepared(number, start) if is_source(self.source) else self._own(number, start)
        for x, y, rows, copies, _ in batches:
            found = self.span or seen_span(y)
            x, y = moved(x, self.device), moved(y, self.device)
            if self.channels_last and isinstance(x, Tensor) and x.dim() == 4:
                x = x.contiguous(memory_format=torch.channels_last)
            yield Batch(x, y, rows, copies, found)

    def _prepared(self, number: int, start: int) -> Iterator[Batch]:
        batch, seed = self.batch, self.seed
        mine = self.source.epoch(
            number, batch=batch, seed=seed, start=start, rank=distributed.rank(), ranks=distributed.ranks()
        )
        for k, (x, y) in enumerate(mine, start):
            rows = min(batch, self.examples - k * batch)
            if rows < distributed.ranks():
                x, y = next(iter(self.source.epoch(number, batch=batch, seed=seed, start=k)))
            yield Batch(x, y, rows, distributed.ranks() if rows < distributed.ranks() else 1)

    def _own(self, number: int, start: int) -> Iterator[Batch]:
        for batch in itertools.islice(apart(self.source, generator(self.seed, number)), start, None):
            yield dealt(*read(batch))


def dealt(x: Any, y: Tensor) -> Batch:
    """This rank's part of a batch that all of them have read."""
    r, n, rows = distributed.rank(), distributed.ranks(), len(y)
    if rows < n:
        return Batch(x, y, rows, n)
    x, y = rows_of((x, y), slice(r, None, n), rows) if n > 1 else (x, y)
    return Batch(x, y, rows)


def in_order(source: Any, batch: int) -> Iterator[Batch]:
    """All of a source, not augmented."""
    for k, (x, y) in enumerate(source.ordered(batch=batch, rank=distributed.rank(), ranks=distributed.ranks())):
        rows = min(batch, len(source) - k * batch)
        if rows < distributed.ranks():
            x, y = next(itertools.islice(source.ordered(batch=batch), k, None))
        yield Batch(x, y, rows, distributed.ranks() if rows < distributed.ranks() else 1)


def _lengths(loader: Any, batch: int) -> tuple[int, int]:
    """Batches and examples of an epoch."""
    if is_source(loader):
        return loader.steps(batch), len(loader)
    if distributed.ranks() > 1 and isinstance(getattr(loader, "sampler", None), DistributedSampler):
        raise DataError("the loader has a DistributedSampler; give it a plain one: the ranks share every batch.")
    try:
        if isinstance(loader, Tensor | str) or not hasattr(loader, "__iter__"):
            raise TypeError
        steps = len(loader)
    except TypeError as error:
        raise DataError(
            f"the training data is a {type(loader).__name__}; give a sosp.data.Dataset, a pair of tensors "
            "(inputs, labels), or a loader with a length, that starts anew each time it is iterated."
        ) from error
    try:
        return steps, len(getattr(loader, "dataset", loader))
    except TypeError:
        return steps, steps


def shared(feeds: Sequence[Feed], number: int, start: int) -> Iterator[list[Batch]]:
    """A batch for every network; networks with one feed get the very same batch."""
    distinct = list(dict.fromkeys(feeds))
    places = [distinct.index(f) for f in feeds]
    for batches in zip(*(f.epoch(number, start) for f in distinct), strict=True):
        yield [batches[k] for k in places]

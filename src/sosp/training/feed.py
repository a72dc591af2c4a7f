"""Where batches come from: a source of sosp.data, a pair of tensors or a loader of the user's, by epoch and seed."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from sosp.data import Dataset
from sosp.data.source import Batching, as_slice, generator
from sosp.errors import DataError
from sosp.training import ranks
from sosp.training.evaluation import moved


class Batch(NamedTuple):
    """This rank's part of a batch, and how many examples all of it has."""

    inputs: Any
    labels: Tensor
    rows: int


def both(data: Any) -> tuple[Any, Any]:
    """What to train on and what to test on; None where there is nothing to test on."""
    if isinstance(data, Dataset):
        return data.train, data.test
    if hasattr(data, "epoch"):
        return data, None
    if _is_pair(data):
        return Pair(*data), None
    if isinstance(data, tuple) and len(data) == 2:
        return tuple(Pair(*part) if _is_pair(part) else part for part in data)  # type: ignore[return-value]
    return data, None


def _is_pair(data: Any) -> bool:
    return (
        isinstance(data, tuple | list)
        and len(data) == 2
        and isinstance(data[1], Tensor)
        and not data[1].is_floating_point()
    )


class Pair:
    """Inputs of any kind and their labels, held in memory: as a source of ``sosp.data``, without augmentation."""

    def __init__(self, inputs: Any, labels: Tensor) -> None:
        self.inputs, self.labels = inputs, labels

    def __len__(self) -> int:
        return len(self.labels)

    def steps(self, batch: int) -> int:
        return len(Batching(len(self), batch))

    def epoch(
        self, number: int, *, batch: int, seed: int, start: int = 0, rank: int = 0, ranks: int = 1
    ) -> Iterator[tuple[Any, Tensor]]:
        order = torch.randperm(len(self), generator=generator(seed, number))
        batching = Batching(len(self), batch, rank, ranks)
        return (self._rows(order[as_slice(batching.own(k))]) for k in batching.since(start))

    def ordered(
        self, *, batch: int, limit: int | None = None, rank: int = 0, ranks: int = 1
    ) -> Iterator[tuple[Any, Tensor]]:
        batching = Batching(min(len(self), limit or len(self)), batch, rank, ranks)
        return (self._rows(torch.arange(len(self))[as_slice(batching.own(k))]) for k in range(len(batching)))

    def subset(self, count: int, seed: int) -> Pair:
        order = torch.randperm(len(self), generator=generator(seed, 0))[:count].sort().values
        return Pair(*self._rows(order))

    def _rows(self, index: Tensor) -> tuple[Any, Tensor]:
        pick = index.to(self.labels.device)
        rows = tree_map(lambda x: x[pick] if isinstance(x, Tensor) and x.dim() else x, self.inputs)
        return rows, self.labels[pick].long()


class Feed:
    """The batches of one seed, epoch by epoch."""

    def __init__(self, source: Any, batch: int, seed: int, device: torch.device, channels_last: bool) -> None:
        self.source, self.batch, self.seed, self.device = source, batch, seed, device
        self.channels_last = channels_last
        if hasattr(source, "epoch"):
            self.steps, self.examples = source.steps(batch), len(source)
        elif hasattr(source, "__len__") and hasattr(source, "__iter__"):
            self.steps, self.examples = len(source), len(getattr(source, "dataset", source))
        else:
            raise DataError(
                f"the training data is a {type(source).__name__}; give a sosp.data.Dataset, a pair of tensors "
                "(inputs, labels), or a loader with a length, that starts anew each time it is iterated."
            )
        if not self.steps:
            raise DataError("the training data is empty.")

    def epoch(self, number: int, start: int) -> Iterator[Batch]:
        """The batches from ``start`` on, on the device."""
        batches = self._prepared(number, start) if hasattr(self.source, "epoch") else self._own(number, start)
        for x, y, rows in batches:
            x, y = moved(x, self.device), moved(y, self.device)
            if self.channels_last and isinstance(x, Tensor) and x.dim() == 4:
                x = x.contiguous(memory_format=torch.channels_last)
            yield Batch(x, y, rows)

    def _prepared(self, number: int, start: int) -> Iterator[Batch]:
        r, n = ranks.rank(), ranks.ranks()
        batches = self.source.epoch(number, batch=self.batch, seed=self.seed, start=start, rank=r, ranks=n)
        for k, (x, y) in enumerate(batches, start):
            yield Batch(x, y, min(self.batch, self.examples - k * self.batch))

    def _own(self, number: int, start: int) -> Iterator[Batch]:
        """A loader draws from torch's random numbers: from a stream of its own, the same for every epoch ``number``."""
        r, n = ranks.rank(), ranks.ranks()
        for x, y in itertools.islice(apart(self.source, generator(self.seed, number)), start, None):
            rows = len(y)
            if n > 1:
                x, y = tree_map(lambda t: t[r::n] if isinstance(t, Tensor) and t.dim() else t, (x, y))
            yield Batch(x, y, rows)


def apart(items: Iterable[Any], random: torch.Generator) -> Iterator[Any]:
    """Iterate with ``random`` in the place of torch's own random numbers, which stay as they are."""
    theirs, iterator = random.get_state(), None
    while True:
        mine = torch.get_rng_state()
        torch.set_rng_state(theirs)
        try:
            iterator = iter(items) if iterator is None else iterator
            item = next(iterator)
        except StopIteration:
            return
        finally:
            theirs = torch.get_rng_state()
            torch.set_rng_state(mine)
        yield item


def shared(feeds: Sequence[Feed], number: int, start: int) -> Iterator[list[Batch]]:
    """A batch for every network; networks with one feed get the very same batch."""
    distinct = list(dict.fromkeys(feeds))
    places = [distinct.index(f) for f in feeds]
    for batches in zip(*(f.epoch(number, start) for f in distinct), strict=True):
        yield [batches[k] for k in places]

"""Data that is opened once: a loader that several readers share, and how many examples it is expected to give."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, IterableDataset

from sosp.core.batches import Chunk, find_batch_size, is_pair, is_source, iterate_chunks, select_training_part
from sosp.core.borrowed_model import preserve_random_state
from sosp.core.data_forms import (
    DatasetBatches,
    InputForm,
    describe_inputs,
    is_dataset,
    is_indexed_dataset,
    prepare_data,
)
from sosp.errors import DataError


class CachedLoader:
    """A loader that is opened once. Every reader gets the batches that were read before, then the loader's next ones.

    The loader draws its random numbers as if it were read in one go, whatever happens between two batches. Batches are
    kept for the next reader until ``keep`` is set to False.
    """

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader, self.keep = loader, True
        self.rest: Iterator[Any] | None = None
        self.kept: list[Any] = []
        self.random = torch.get_rng_state()

    def __iter__(self) -> Iterator[Any]:
        if not self.keep:
            yield from self._read_rest()
            return
        for k in itertools.count():
            if k == len(self.kept) and not self._read_one():
                return
            yield self.kept[k]

    def _read_rest(self) -> Iterator[Any]:
        """Yield all batches without keeping them: for one more reader and no other."""
        while self.kept or self._read_one():
            yield self.kept.pop(0)

    def _read_one(self) -> bool:
        """Keep one more batch; False at the end of the loader."""
        with preserve_random_state():
            torch.set_rng_state(self.random)
            self.rest = iter(self.loader) if self.rest is None else self.rest
            found = list(itertools.islice(self.rest, 1))
            self.random = torch.get_rng_state()
        self.kept += found
        return bool(found)


def open_data_once(
    data: Any, device: torch.device, *, keep: bool, rows: int = 8, model: nn.Module | None = None
) -> tuple[Chunk, Any]:
    """Return some examples of the first batch, and the data with that batch still in it.

    A loader is not opened again by who reads the data then: once, or with ``keep`` any number of times.
    """
    form = describe_inputs(model, device)
    data = prepare_data(select_training_part(data), form)
    if is_dataset(data) and not is_source(data) and not is_indexed_dataset(data):
        data = DatasetBatches(data, form)
    opened = CachedLoader(data) if isinstance(data, Iterable) and not _is_reread(data, form) else data
    with preserve_random_state():
        first = next(iter(iterate_chunks(opened, rows, None, alone=True, device=device, model=model)), None)
    if first is None:
        raise DataError("the data is empty: it contains no examples. Is the loader's dataset empty?")
    if isinstance(opened, CachedLoader):
        opened.keep = keep
    return first, opened


def has_two_parts(data: Any, model: nn.Module) -> bool:
    """Return whether data that can be read more than once can be divided: some to fit to, others to test on."""
    first = list(itertools.islice(iterate_chunks(data, None, None, alone=True, model=model), 2))
    return len(first) == 2 or (first[0].divisible and first[0].size > 1)


def _is_reread(data: Any, form: InputForm) -> bool:
    """Return whether the data is in memory or read by number, so that it may be opened again."""
    whole = is_source(data) or is_pair(data) or is_indexed_dataset(data) or form.are_inputs(data)
    return whole or isinstance(data, (Mapping, Tensor, str, CachedLoader))


def count_expected_examples(data: Any, examples: int | None, ranks: int = 1) -> int | None:
    """Return how many examples of opened data each of ``ranks`` processes reads; None if the data has no length."""
    total = _find_length(data)
    return total if total is None else -(-min(total, examples or total) // ranks)


def _find_length(data: Any) -> int | None:
    """Return the number of examples, if it can be known without reading them."""
    if isinstance(data, CachedLoader):
        return _find_length(data.loader)
    if isinstance(data, DataLoader):
        return _find_loader_length(data)
    if is_source(data) or is_indexed_dataset(data):
        return len(data)
    if isinstance(data, (Tensor, Mapping)) or is_pair(data):
        return find_batch_size(data)
    lengths = [_find_batch_length(batch) for batch in data] if type(data) in (list, tuple) else [None]
    return None if None in lengths else sum(n for n in lengths if n is not None)


def _find_batch_length(batch: Any) -> int | None:
    """Return the number of examples of a batch: of its targets, as its inputs may be a list of images."""
    pair = isinstance(batch, (tuple, list)) and len(batch) == 2
    return next((len(x) for x in tree_leaves(batch[1] if pair else batch) if getattr(x, "ndim", 0)), None)


def _find_loader_length(loader: DataLoader[Any]) -> int | None:
    """Return the number of examples of an epoch; None if batches are made by the user's own sampler or dataset."""
    if loader.batch_size is None or isinstance(loader.dataset, IterableDataset):
        return None
    try:
        return len(loader) * loader.batch_size if loader.drop_last else len(loader.sampler)  # type: ignore[arg-type]
    except TypeError:  # a sampler without a length
        return None

"""The user's data as labelled batches, to train and to test with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from sosp.core.batches import find_batch_size, is_pair, is_source
from sosp.core.losses import IGNORE_INDEX
from sosp.data import Dataset
from sosp.data.batch_source import Batching, apply_limit, draw_rows, make_generator, make_slice
from sosp.errors import DataError


def move_to_device(x: Any, device: torch.device) -> Any:
    """All tensors of a batch on the device."""
    return tree_map(lambda t: t.to(device, non_blocking=True) if isinstance(t, Tensor) else t, x)


def select_rows(x: Any, pick: Any, total: int) -> Any:
    """Some examples of a batch of ``total``; what has no row for each of them stays whole."""

    def cut(t: Any) -> Any:
        if not isinstance(t, Tensor) or not t.dim() or len(t) != total:
            return t
        return t[pick.to(t.device) if isinstance(pick, Tensor) else pick]

    return tree_map(cut, x)


def split_batch(batch: Any) -> tuple[Any, Any]:
    """Return the inputs and the labels of a batch, whatever the labels are. A dict's inputs hold the labels as well."""
    if isinstance(batch, Mapping):
        return dict(batch), batch.get("labels")
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        size = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
        raise DataError(
            f"a batch is a {type(batch).__name__}{size}; each must be (inputs, labels), or a dict of the "
            "model's keyword arguments with 'labels'."
        )
    inputs, labels = batch
    return dict(inputs) if isinstance(inputs, Mapping) else inputs, labels


def parse_batch(batch: Any) -> tuple[Any, Tensor]:
    """The inputs of a user's batch, and class numbers."""
    inputs, labels = split_batch(batch)
    _check_labels(labels)
    return inputs, labels.long()


def count_examples(inputs: Any) -> int:
    """How many examples: the length of the first tensor."""
    return find_batch_size(inputs) or 0


def _check_labels(labels: Any) -> None:
    if labels is None:
        raise DataError("a batch is a dict without 'labels'; add a tensor of class numbers under that key.")
    if not isinstance(labels, Tensor):
        raise DataError(f"the labels are a {type(labels).__name__}; give a tensor of class numbers.")
    if labels.is_floating_point() or labels.is_complex() or not labels.dim():
        raise DataError(
            f"the labels are {labels.dtype} of shape {tuple(labels.shape)}; give class numbers, whole numbers from 0, "
            "one for each example."
        )


def find_label_range(labels: Tensor) -> tuple[int, int]:
    """The least and the greatest label of those that count; (0, 0) where none does."""
    known = labels[labels != IGNORE_INDEX]
    return (int(known.min()), int(known.max())) if known.numel() else (0, 0)


def find_source_label_range(source: Any) -> tuple[int, int] | None:
    """The span of all labels, where a source holds them."""
    labels = getattr(source, "labels", None)
    return find_label_range(labels) if is_source(source) and isinstance(labels, Tensor) else None


def find_cpu_label_range(labels: Tensor) -> tuple[int, int]:
    """The span of a batch's labels; (0, 0) on a GPU, which would have to be waited for."""
    return find_label_range(labels) if labels.device.type == "cpu" else (0, 0)


def resolve_source(data: Any, part: str) -> Any:
    """``part`` ("train" or "test") of a dataset; a pair of tensors as a source; all else as it is."""
    if isinstance(data, Dataset):
        return getattr(data, part)
    return PairSource(*split_batch(data)) if is_pair(data) or isinstance(data, Mapping) else data


def split_train_test(data: Any) -> tuple[Any, Any]:
    """What to train on and what to test on; None where there is nothing to test on."""
    if isinstance(data, Dataset):
        return data.train, data.test
    if isinstance(data, tuple) and len(data) == 2 and not is_pair(data):
        return resolve_source(data[0], "train"), resolve_source(data[1], "test")
    return resolve_source(data, "train"), None


class PairSource:
    """Inputs of any kind and their labels, held in memory: as a source of ``sosp.data``, without augmentation."""

    def __init__(self, inputs: Any, labels: Tensor) -> None:
        self.inputs, self.labels = parse_batch((inputs, labels))
        if not len(labels):
            raise DataError("the data is empty: there is not one example in it.")
        if (found := count_examples(self.inputs)) != len(labels):
            raise DataError(f"the inputs hold {found} examples and the labels {len(labels)}; give as many of each.")

    def __len__(self) -> int:
        return len(self.labels)

    def steps(self, batch: int) -> int:
        return len(Batching(len(self), batch))

    def epoch(
        self, number: int, *, batch: int, seed: int, start: int = 0, rank: int = 0, ranks: int = 1
    ) -> Iterator[tuple[Any, Tensor]]:
        order = torch.randperm(len(self), generator=make_generator(seed, number))
        batching = Batching(len(self), batch, rank, ranks)
        return (self._rows(order[make_slice(batching.own(k))]) for k in batching.since(start))

    def ordered(
        self, *, batch: int, limit: int | None = None, rank: int = 0, ranks: int = 1
    ) -> Iterator[tuple[Any, Tensor]]:
        batching = Batching(apply_limit(len(self), limit), batch, rank, ranks)
        return (self._rows(torch.tensor(batching.own(k), dtype=torch.int64)) for k in range(len(batching)))

    def subset(self, count: int, seed: int) -> PairSource:
        return PairSource(*self._rows(draw_rows(len(self), count, seed)))

    def _rows(self, index: Tensor) -> tuple[Any, Tensor]:
        return select_rows(self.inputs, index, len(self)), self.labels[index.to(self.labels.device)]

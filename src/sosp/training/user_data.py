"""Turn the user's data into labelled batches for training and testing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from sosp.core.batches import find_batch_size, is_pair, is_source
from sosp.core.data_forms import (
    DatasetBatches,
    InputForm,
    convert_arrays,
    describe_inputs,
    is_dataset,
    is_indexed_dataset,
    prepare_data,
)
from sosp.core.losses import IGNORE_INDEX
from sosp.data import Dataset
from sosp.data.batch_source import Batching, apply_limit, draw_rows, make_generator, make_slice
from sosp.errors import DataError


def move_to_device(x: Any, device: torch.device) -> Any:
    """Return a batch with all tensors on the device."""
    return tree_map(lambda t: t.to(device, non_blocking=True) if isinstance(t, Tensor) else t, x)


def select_rows(x: Any, pick: Any, total: int) -> Any:
    """Return some examples of a batch of ``total``; tensors without one row per example are returned whole."""

    def cut(t: Any) -> Any:
        if not isinstance(t, Tensor) or not t.dim() or len(t) != total:
            return t
        return t[pick.to(t.device) if isinstance(pick, Tensor) else pick]

    return tree_map(cut, x)


def split_batch(batch: Any) -> tuple[Any, Any]:
    """Return the inputs and the labels of a batch, whatever the labels are. A dict's inputs hold the labels as well."""
    batch = convert_arrays(batch, InputForm())
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
    """Return the inputs and the class numbers of a user's batch."""
    inputs, labels = split_batch(batch)
    _check_labels(labels)
    return inputs, labels.long()


def count_examples(inputs: Any) -> int:
    """Return the number of examples, the length of the first tensor."""
    return find_batch_size(inputs) or 0


def _check_labels(labels: Any) -> None:
    if labels is None:
        raise DataError("a batch is a dict without 'labels'; add a tensor of class numbers under that key.")
    if not isinstance(labels, Tensor):
        raise DataError(f"the labels are a {type(labels).__name__}; give a tensor of class numbers.")
    if labels.is_floating_point() or labels.is_complex() or not labels.dim():
        raise DataError(
            f"the labels are {labels.dtype} of shape {tuple(labels.shape)}; give class numbers, integers from 0, "
            "one for each example."
        )


def find_label_range(labels: Tensor) -> tuple[int, int]:
    """Return the least and the greatest label that is not ignored; (0, 0) if all are ignored."""
    known = labels[labels != IGNORE_INDEX]
    return (int(known.min()), int(known.max())) if known.numel() else (0, 0)


def find_source_label_range(source: Any) -> tuple[int, int] | None:
    """Return the range of all labels of a source; None if it does not hold them."""
    labels = getattr(source, "labels", None)
    return find_label_range(labels) if is_source(source) and isinstance(labels, Tensor) else None


def find_cpu_label_range(labels: Tensor) -> tuple[int, int]:
    """Return the range of a batch's labels; (0, 0) on a GPU, where reading them would wait."""
    return find_label_range(labels) if labels.device.type == "cpu" else (0, 0)


def resolve_source(data: Any, part: str, model: nn.Module | None = None) -> Any:
    """Return ``part`` ("train" or "test") of a dataset, examples in memory as a source, and other data as batches.

    ``model``: the network that the data is for, which tells the precision of numpy arrays.
    """
    if isinstance(data, Dataset):
        return getattr(data, part)
    form = describe_inputs(model, torch.device("cpu"))
    data = prepare_data(data, form)
    if is_source(data) or not is_dataset(data):
        return PairSource(*split_batch(data)) if is_pair(data) or isinstance(data, Mapping) else data
    return DatasetSource(DatasetBatches(data, form)) if is_indexed_dataset(data) else DatasetBatches(data, form)


def split_train_test(data: Any, model: nn.Module | None = None) -> tuple[Any, Any]:
    """Return the training data and the test data; None if there is no test data."""
    if isinstance(data, Dataset):
        return data.train, data.test
    data = prepare_data(data, describe_inputs(model, torch.device("cpu")))
    if isinstance(data, tuple) and len(data) == 2 and not is_pair(data):
        return resolve_source(data[0], "train", model), resolve_source(data[1], "test", model)
    return resolve_source(data, "train", model), None


class PairSource:
    """A source, as in ``sosp.data``, of inputs of any kind and their labels in memory, without augmentation."""

    def __init__(self, inputs: Any, labels: Tensor) -> None:
        self.inputs, self.labels = parse_batch((inputs, labels))
        if not len(labels):
            raise DataError("the data is empty: it has no examples.")
        if (found := count_examples(self.inputs)) != len(labels):
            raise DataError(
                f"the inputs hold {found} examples and the labels {len(labels)}; give the same number of each."
            )

    def __len__(self) -> int:
        return len(self.labels)

    def steps(self, batch: int) -> int:
        """Return the number of batches in an epoch."""
        return len(Batching(len(self), batch))

    def epoch(
        self, number: int, *, batch: int, seed: int, start: int = 0, rank: int = 0, ranks: int = 1
    ) -> Iterator[tuple[Any, Tensor]]:
        """Return the batches of an epoch in random order, from batch ``start`` on."""
        order = torch.randperm(len(self), generator=make_generator(seed, number))
        batching = Batching(len(self), batch, rank, ranks)
        return (self._rows(order[make_slice(batching.rank_rows(k))]) for k in batching.since(start))

    def ordered(
        self, *, batch: int, limit: int | None = None, rank: int = 0, ranks: int = 1
    ) -> Iterator[tuple[Any, Tensor]]:
        """Return the batches of all examples, or of the first ``limit``, in order."""
        batching = Batching(apply_limit(len(self), limit), batch, rank, ranks)
        return (self._rows(torch.tensor(batching.rank_rows(k), dtype=torch.int64)) for k in range(len(batching)))

    def subset(self, count: int, seed: int, *, start: int = 0) -> PairSource:
        """Return a source of ``count`` examples drawn at random."""
        return PairSource(*self._rows(draw_rows(len(self), count, seed, start)))

    def _rows(self, index: Tensor) -> tuple[Any, Tensor]:
        return select_rows(self.inputs, index, len(self)), self.labels[index.to(self.labels.device)]


class DatasetSource(PairSource):
    """A source of a dataset whose examples are read by number; only its own transforms augment them."""

    def __init__(self, batches: DatasetBatches, numbers: Sequence[int] | None = None) -> None:
        self.batches = batches
        self.numbers = range(len(batches.dataset)) if numbers is None else numbers
        if not len(self.numbers):
            raise DataError("the data is empty: it has no examples.")

    def __len__(self) -> int:
        return len(self.numbers)

    def subset(self, count: int, seed: int, *, start: int = 0) -> DatasetSource:
        """Return a source of ``count`` examples drawn at random."""
        return DatasetSource(self.batches, [self.numbers[i] for i in draw_rows(len(self), count, seed, start).tolist()])

    def _rows(self, index: Tensor) -> tuple[Any, Tensor]:
        numbers = [self.numbers[i] for i in index.tolist()]
        inputs, labels = parse_batch(self.batches.read(numbers or self.numbers[:1]))
        return select_rows(inputs, slice(len(numbers)), len(labels)), labels[: len(numbers)]

"""The one door for the user's data: what data is, and how it is read as chunks of examples.

Data is a source or a dataset of ``sosp.data``, a DataLoader or another iterable of batches, a pair of tensors, or a
dataset of single examples (see ``core.data_forms``). A batch is (inputs, targets), or a dict of the model's keyword
arguments with ``labels``. Numpy arrays may stand in place of tensors.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from sosp.core.data_forms import (
    DatasetBatches,
    InputForm,
    convert_arrays,
    describe_inputs,
    is_dataset,
    is_indexed_dataset,
    prepare_data,
)
from sosp.core.dict_batches import read_dict_batch
from sosp.errors import ArgumentError, DataError, is_whole

PAIR = 256  # examples per batch when the data is one pair of tensors
UNLABELLED = (
    "inputs without labels, and labels are what this method compares outputs with. Give (inputs, targets), two tensors "
    "as a tuple or a DataLoader of such batches. Or score on the network's own outputs, targets='own'."
)


# (the user's batch, the place of the first example in it, how many); no batch where the data is a pair of tensors.
ExampleRange = tuple[int | None, int, int]


@dataclass(frozen=True)
class Chunk:
    """Some examples: what the model takes, what it should say, and the user's batch each one came from."""

    inputs: Any  # a tensor, a tuple of them or a dict of keyword arguments; first dimension = example
    targets: Any  # None where the batch is a dict without labels
    origin: tuple[ExampleRange, ...]  # in order
    keyed: bool = False  # a dict batch, Hugging Face style: the model may return its own loss

    @property
    def size(self) -> int:
        return sum(count for _, _, count in self.origin)

    @property
    def source(self) -> str:
        """The user's batch that these examples, or the first of them, came from."""
        batch = self.origin[0][0]
        return "the data" if batch is None else f"batch {batch}"

    def run(self, model: Callable[..., Any]) -> Any:
        """The model's output on a copy of these inputs: some networks write into what they are given."""
        return call_model(model, copy_inputs(self.inputs))

    def where(self, row: int) -> str:
        """Name example ``row`` as the user would: its batch and its place there."""
        for batch, first, count in self.origin:
            if row < count:
                return f"example {first + row}" + ("" if batch is None else f" of batch {batch}")
            row -= count
        raise IndexError(row)

    @property
    def divisible(self) -> bool:
        """Whether rows are all that belongs to an example: patches, graphs and grids have a first axis of their own."""
        tensors = [x for x in tree_leaves((self.inputs, self.targets)) if isinstance(x, Tensor) and x.dim()]
        return all(len(x) in (1, self.size) for x in tensors)

    def rows(self, start: int, stop: int) -> Chunk:
        """The examples ``start:stop``; a tensor whose first axis is not that of the examples stays whole."""
        cut = tree_map(lambda x: x[start:stop] if _by_example(x, self.size) else x, (self.inputs, self.targets))
        origin: list[ExampleRange] = []
        at = 0
        for batch, first, count in self.origin:
            low, high = max(start - at, 0), min(stop - at, count)
            if low < high:
                origin.append((batch, first + low, high - low))
            at += count
        return Chunk(cut[0], cut[1], tuple(origin), self.keyed)

    def twice(self) -> Chunk:
        """Every example two times."""
        both = tree_map(lambda x: torch.cat([x, x]) if _by_example(x, self.size) else x, (self.inputs, self.targets))
        return Chunk(both[0], both[1], self.origin * 2, self.keyed)


def call_model(model: Callable[..., Any], inputs: Any) -> Any:
    """Run inputs given as a tensor, a tuple of arguments or a dict of keyword arguments."""
    if isinstance(inputs, Mapping):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, (tuple, list)) else model(inputs)


def copy_inputs(inputs: Any) -> Any:
    """The same inputs in memory of their own; gradients still flow through."""
    return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, inputs)


def take_examples(inputs: Any, most: int) -> Any:
    """At most so many examples; a tensor whose first axis is not that of the examples stays whole."""
    return slice_examples(inputs, 0, most)


def slice_examples(inputs: Any, start: int, most: int) -> Any:
    """The same from one of them on."""
    size = find_batch_size(inputs)
    stop = start + most
    return inputs if size is None else tree_map(lambda x: x[start:stop] if _by_example(x, size) else x, inputs)


def _by_example(x: Any, size: int) -> bool:
    return isinstance(x, Tensor) and x.dim() > 0 and x.shape[0] == size


def iterate_chunks(
    data: Any,
    examples: int | None,
    generator: torch.Generator | None,
    *,
    alone: bool = False,
    device: torch.device | None = None,
    model: nn.Module | None = None,
    skip: int = 0,
) -> Iterator[Chunk]:
    """Yield the first ``examples`` examples of ``data``, batch by batch; of a pair of tensors, a random subset.

    A loader's own order decides which examples are taken (shuffle it). A pair of tensors, a dataset or a source is
    often sorted by class, so a subset is drawn with ``generator`` (by default the same one every time). ``alone``:
    inputs may come without targets, as a tensor or as batches of them. (inputs, targets) is a tuple: a list of tensors
    of one kind is a list of batches, also when there are two. ``device``: where the batches of a source, a dataset or
    arrays are put, by default where the model is. ``model``: whose inputs these are. It tells several inputs from
    (inputs, targets), images from batches, and the precision of arrays. A batch that is not divisible comes whole,
    also where it has more examples than are left to take. ``skip``: leave out as many, those that a call with
    ``examples=skip`` and the same seed yields.
    """
    if examples is not None and (not is_whole(examples) or examples < 1):
        raise ArgumentError(f"examples={examples!r} must be a positive whole number, or None for all the data.")
    left = examples
    for chunk in _chunks(data, examples, generator, alone, describe_inputs(model, device), skip):
        if left is not None and chunk.size > left and chunk.divisible:
            chunk = chunk.rows(0, left)
        if chunk.size:
            yield chunk
        if left is not None:
            left -= chunk.size
            if left <= 0:
                return


def distribute_examples(chunks: Iterable[Chunk], rank: int, ranks: int) -> Iterator[Chunk]:
    """The examples of process ``rank`` of ``ranks``: dealt out in turn, so that all have as many.

    Dict batches are dealt out whole: their loss may be the model's own, a mean over the batch. So are batches that are
    not divisible.
    """
    if ranks == 1:
        yield from chunks
        return
    seen = 0
    for k, chunk in enumerate(chunks):
        if chunk.keyed or not chunk.divisible:
            yield from [chunk] * (k % ranks == rank)
            continue
        yield from (chunk.rows(i, i + 1) for i in range((rank - seen) % ranks, chunk.size, ranks))
        seen += chunk.size


def open_data(data: Any, model: nn.Module) -> Any:
    """Return the training part of the data, with tensors in place of arrays."""
    return prepare_data(select_training_part(data), describe_inputs(model))


def is_source(data: Any) -> bool:
    """Whether the data is a source of ``sosp.data``, which gives batches of any size."""
    return callable(getattr(data, "epoch", None)) and callable(getattr(data, "ordered", None))


def select_training_part(data: Any) -> Any:
    """Return the training part of a dataset of ``sosp.data``, and all other data as it is."""
    train = getattr(data, "train", None)
    return train if is_source(train) else data


def _chunks(
    data: Any,
    examples: int | None,
    generator: torch.Generator | None,
    alone: bool,
    form: InputForm,
    skip: int,
) -> Iterator[Chunk]:
    data = prepare_data(select_training_part(data), form)
    if is_source(data):
        count = min(len(data) if examples is None else examples, len(data) - skip)
        if count < 1:
            return iter(())
        first = {"start": skip} if skip else {}
        some = data.subset(count, 0 if generator is None else generator.initial_seed(), **first)
        skip = 0
        data = (some if form.device is None else some.to(form.device)).ordered(batch=PAIR)
    elif is_dataset(data):
        return _chunks_of_dataset(data, examples, generator, alone, form, skip)
    if alone and ((isinstance(data, Tensor) and data.dim()) or form.are_inputs(data)):
        inputs = _plain(data)
        parts = _split_pair(inputs, torch.zeros(find_batch_size(inputs) or 0), examples, generator, skip)
        return (replace(chunk, targets=None) for chunk in parts)
    if is_pair(data):
        return _split_pair(_plain(data[0]), data[1], examples, generator, skip)
    if isinstance(data, Mapping):
        return _skip_examples([_chunk(data, 0, alone, form)], skip)
    if isinstance(data, Tensor) or form.are_inputs(data):
        raise DataError(f"data is a {type(data).__name__} of {UNLABELLED}")
    if isinstance(data, str) or not isinstance(data, Iterable):
        raise DataError(
            f"data is a {type(data).__name__}; give a DataLoader, an iterable of (inputs, targets), a pair of tensors "
            "(inputs, targets), a Dataset, or dict batches with 'labels'."
        )
    return _skip_examples((_chunk(batch, index, alone, form) for index, batch in enumerate(data)), skip)


def _skip_examples(chunks: Iterable[Chunk], skip: int) -> Iterator[Chunk]:
    """Yield the chunks without the first ``skip`` examples; of a chunk that is not divisible, all or nothing."""
    for chunk in chunks:
        if skip <= 0:
            yield chunk
        elif skip < chunk.size and chunk.divisible:
            yield chunk.rows(skip, chunk.size)
        skip -= chunk.size


def _chunks_of_dataset(
    data: Any, examples: int | None, generator: torch.Generator | None, alone: bool, form: InputForm, skip: int
) -> Iterator[Chunk]:
    """Yield batches of a dataset; every example is named by its number there."""
    if not is_indexed_dataset(data):
        yield from _skip_examples(_number_examples(data, None, alone, form), skip)
        return
    order = _draw_rows(len(data), examples, generator, skip).tolist()
    yield from _number_examples(data, order, alone, form) if order else ()


def _number_examples(data: Any, order: list[int] | None, alone: bool, form: InputForm) -> Iterator[Chunk]:
    numbers = itertools.count() if order is None else iter(order)
    for index, batch in enumerate(DatasetBatches(data, form, order)):
        chunk = _chunk(batch, index, alone, form)
        yield replace(chunk, origin=tuple((None, i, 1) for i in itertools.islice(numbers, chunk.size)))


def is_pair(data: Any) -> bool:
    """One pair (inputs, targets): a tuple, or a list of two that cannot both be inputs, such as images and labels."""
    if not isinstance(data, (tuple, list)) or len(data) != 2:
        return False
    inputs, targets = data[0], data[1]
    fits = isinstance(targets, Tensor) and targets.dim() > 0 and find_batch_size(_plain(inputs)) is not None
    return fits and not (isinstance(data, list) and _alike(inputs, targets))


def _alike(a: Any, b: Any) -> bool:
    """Two tensors that may be two batches of the same kind, of however many examples and of whatever size."""
    return isinstance(a, Tensor) and isinstance(b, Tensor) and (a.dtype, a.dim()) == (b.dtype, b.dim())


def _split_pair(
    inputs: Any, targets: Tensor, examples: int | None, generator: torch.Generator | None, skip: int
) -> Iterator[Chunk]:
    total = targets.shape[0]
    if (size := _count_labelled(inputs, targets)) != total:
        raise DataError(f"the inputs hold {size} examples and the targets {total}; give the same number of each.")
    rows = _draw_rows(total, examples, generator, skip)
    for part in rows.split(PAIR) if len(rows) else ():
        x, y = tree_map(lambda x, part=part: x[part.to(x.device)] if _by_example(x, total) else x, (inputs, targets))
        yield Chunk(x, y, tuple((None, i, 1) for i in part.tolist()))


def _draw_rows(total: int, examples: int | None, generator: torch.Generator | None, skip: int) -> Tensor:
    """Return the numbers of all examples or of a random subset, in order; without the ``skip`` drawn first."""
    if not skip and (examples is None or examples >= total):
        return torch.arange(total)
    generator = generator or torch.Generator().manual_seed(0)
    return torch.randperm(total, generator=generator, device=generator.device)[skip:][:examples].cpu().sort().values


def find_batch_size(inputs: Any) -> int | None:
    """How many examples the inputs hold: the first axis that most of their tensors share, or that of the first one."""
    sizes = Counter(len(x) for x in tree_leaves(inputs) if isinstance(x, Tensor) and x.dim() > 0)
    return max(sizes, key=sizes.__getitem__, default=None)


def _count_labelled(inputs: Any, targets: Any) -> int | None:
    """How many examples the inputs hold: as many as the targets, if a tensor of theirs has as many rows."""
    labelled = find_batch_size(targets)
    rows = {len(x) for x in tree_leaves(inputs) if isinstance(x, Tensor) and x.dim() > 0}
    return labelled if labelled in rows else find_batch_size(inputs)


def _plain(inputs: Any) -> Any:
    """Arguments as a tuple, keyword arguments as a dict (Hugging Face's are a class of their own)."""
    if isinstance(inputs, Mapping):
        return dict(inputs)
    return tuple(inputs) if isinstance(inputs, list) else inputs


def _chunk(batch: Any, index: int, alone: bool, form: InputForm) -> Chunk:
    batch = form.group(convert_arrays(batch, form), alone)
    if alone and (isinstance(batch, Tensor) or (isinstance(batch, (tuple, list)) and len(batch) == 1)):
        batch = (batch if isinstance(batch, Tensor) else batch[0]), None
    if isinstance(batch, Mapping):
        inputs, targets, keyed = read_dict_batch(batch, form.names, form.more)
        return Chunk(inputs, targets, ((index, 0, _count(inputs, index, targets)),), keyed)
    if isinstance(batch, (tuple, list)) and len(batch) == 2:
        inputs, targets = _plain(form.stack_images(batch[0])), batch[1]
        return Chunk(inputs, targets, ((index, 0, _count(inputs, index, targets)),))
    if isinstance(batch, Tensor) or form.are_inputs(batch):
        raise DataError(f"batch {index} is a {type(batch).__name__} of {UNLABELLED}")
    raise DataError(
        f"batch {index} is a {type(batch).__name__}"
        + (f" of {len(batch)}" if isinstance(batch, (tuple, list)) else "")
        + "; each batch must be (inputs, targets) or a dict of the model's keyword arguments with 'labels'; several "
        "inputs are a tuple, ((x1, x2), targets)."
    )


def _count(inputs: Any, index: int, targets: Any = None) -> int:
    count = _count_labelled(inputs, targets)
    if count is None:
        raise DataError(f"batch {index} holds no tensor with examples along its first dimension.")
    return count


def resize_chunks(chunks: Iterable[Chunk], size: int) -> Iterator[Chunk]:
    """The same examples in chunks of ``size``, so that neither tiny nor huge loader batches slow a pass down.

    Dict batches stay as they are (their loss may be the model's own, a mean over the batch), unless too large. Batches
    that are not divisible stay as they are in any case.
    """
    held: list[Chunk] = []
    for chunk in chunks:
        if held and not _joinable(held[-1], chunk):
            yield from _cut(_join(held), size)
            held = []
        held.append(chunk)
        if chunk.keyed or sum(c.size for c in held) >= size:
            *full, rest = _cut(_join(held), size)
            yield from full
            held = [rest]
    if held:
        yield from _cut(_join(held), size)


def _cut(chunk: Chunk, size: int) -> list[Chunk]:
    if chunk.size <= size or not chunk.divisible:
        return [chunk]
    return [chunk.rows(i, min(i + size, chunk.size)) for i in range(0, chunk.size, size)]


def _joinable(a: Chunk, b: Chunk) -> bool:
    if a.keyed or b.keyed:
        return False
    flat_a, form_a = tree_flatten((a.inputs, a.targets))
    flat_b, form_b = tree_flatten((b.inputs, b.targets))
    return form_a == form_b and all(
        _by_example(x, a.size)
        and _by_example(y, b.size)
        and (x.shape[1:], x.dtype, x.device) == (y.shape[1:], y.dtype, y.device)
        for x, y in zip(flat_a, flat_b, strict=True)
    )


def _join(held: list[Chunk]) -> Chunk:
    if len(held) == 1:
        return held[0]
    flat = [tree_flatten((c.inputs, c.targets)) for c in held]
    joined = [torch.cat(parts) for parts in zip(*(leaves for leaves, _ in flat), strict=True)]
    inputs, targets = tree_unflatten(joined, flat[0][1])
    return Chunk(inputs, targets, tuple(o for c in held for o in c.origin))


def check_device(chunk: Chunk, device: torch.device) -> None:
    """The model and the data must be on one device: moving them is the user's choice."""
    for x in tree_leaves((chunk.inputs, chunk.targets)):
        if isinstance(x, Tensor) and x.device != device:
            raise DataError(
                f"{chunk.source} is on {x.device} and the model on {device}. "
                f"Move the data (x.to({str(device)!r})) or the model (model.to({str(x.device)!r}))."
            )

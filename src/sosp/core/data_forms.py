"""Forms that data comes in: datasets, numpy arrays and lists of images become batches of tensors."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from sosp.core.borrowed_model import find_device
from sosp.core.dict_batches import convert_column, describe_sizes, is_number_list, join_examples
from sosp.errors import DataError

BATCH = 64  # examples of a dataset in a batch


@dataclass(frozen=True)
class InputForm:
    """What a model takes. It tells several inputs from (inputs, targets), and images from batches."""

    inputs: int = 1  # arguments without a default
    channels: int | None = None  # of an image; None if the model has no 2D convolution
    dtype: torch.dtype | None = None  # of real numbers in numpy arrays; None: torch's default, not numpy's double
    device: torch.device | None = None  # for arrays and for batches of a dataset
    names: frozenset[str] = frozenset()  # of its arguments; empty where they are not known
    more: bool = True  # it takes other keyword arguments as well

    def are_inputs(self, x: Any) -> bool:
        """Return whether a tuple holds the inputs of a model that takes several, without targets."""
        return 1 < self.inputs == _count_tensors(x)

    def group(self, batch: Any, alone: bool) -> Any:
        """Return (inputs, targets) of a batch ``(x1, x2, targets)``, or of ``(x1, x2)`` if there may be no targets."""
        if alone and self.are_inputs(batch):
            return tuple(batch), None
        return (tuple(batch[:-1]), batch[-1]) if 1 < self.inputs == _count_tensors(batch) - 1 else batch

    def stack_images(self, x: Any) -> Any:
        """Return one tensor of a list of images (C, H, W), and everything that is no such list as it is."""
        if type(x) is not list or not x or not all(isinstance(t, Tensor) and t.dim() == 3 for t in x):
            return x
        shapes = {tuple(t.shape) for t in x}
        if len(shapes) > 1 and {shape[0] for shape in shapes} == {self.channels}:
            raise DataError(
                f"the images of the list have different sizes, {describe_sizes(x)}. Give all of them one size (resize, "
                "then crop), or batches of images of one size."
            )
        return torch.stack(x) if {(self.channels, *x[0].shape[1:])} == shapes else x


def _count_tensors(x: Any) -> int:
    """Return the length of a tuple or list of tensors; 0 for everything that is not one."""
    return len(x) if isinstance(x, (tuple, list)) and all(isinstance(t, Tensor) and t.dim() for t in x) else 0


def describe_inputs(model: nn.Module | None, device: torch.device | None = None) -> InputForm:
    """Return what a model takes, by the arguments of its ``forward`` and its first convolution."""
    if model is None:
        return InputForm(device=device)
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    arguments = inspect.signature(model.forward).parameters.values()
    needed = [p for p in arguments if p.kind in kinds and p.default is p.empty]
    named = frozenset(p.name for p in arguments if p.kind in (*kinds[1:], inspect.Parameter.KEYWORD_ONLY))
    more = any(p.kind == inspect.Parameter.VAR_KEYWORD for p in arguments)
    convs = (m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d))
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    return InputForm(max(1, len(needed)), next(convs, None), dtype, device or find_device(model), named, more)


def prepare_data(data: Any, form: InputForm) -> Any:
    """Return data with tensors in place of arrays and lists of images, and a pair in place of a ``TensorDataset``."""
    if isinstance(data, Mapping) and _is_hugging_face(data):
        raise DataError(f"the data is a {type(data).__name__} with the parts {list(data)}; give one: data['...'].")
    data = join_examples(data)
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        return tuple(data.tensors)
    several = isinstance(data, tuple) or type(data) is list  # a subclass may be a loader, to be read once
    if isinstance(data, (np.ndarray, Mapping)) or (several and _holds_arrays(data)):
        data = convert_arrays(data, form)
    return _arrange_parts(data, form) if several else data


def _arrange_parts(data: Any, form: InputForm) -> Any:
    """Return a list of images as a tensor, also in a pair, and (x1, x2, targets) as a pair."""
    data = form.stack_images(data)
    if isinstance(data, (tuple, list)) and len(data) == 2 and isinstance(data[0], list):
        first, second = form.stack_images(data[0]), data[1]
        return (first, second) if isinstance(data, tuple) else [first, second]
    return form.group(data, alone=False) if isinstance(data, tuple) else data


def _holds_arrays(data: tuple[Any, ...] | list[Any]) -> bool:
    """Return whether these are arrays or (arrays, targets); a list of batches is converted batch by batch."""
    return any(isinstance(x, np.ndarray) or (len(data) == 2 and _contains_array(x)) for x in data)


def _contains_array(x: Any) -> bool:
    parts = x.values() if isinstance(x, Mapping) else x if isinstance(x, (tuple, list)) else ()
    return any(isinstance(part, np.ndarray) for part in parts)


def convert_arrays(x: Any, form: InputForm) -> Any:
    """Return the same with a tensor in place of every numpy array."""
    if isinstance(x, Mapping):
        x = {name: _place(convert_column(name, part), form) if type(part) is list else part for name, part in x.items()}
    return tree_map(lambda a: _convert_array(a, form) if isinstance(a, np.ndarray) else a, x)


def _convert_array(array: Any, form: InputForm) -> Tensor:
    try:
        x = torch.from_numpy(np.require(array, requirements=["C", "W"]))
    except TypeError as error:
        raise DataError(f"an array of type {array.dtype} cannot be made a tensor; give an array of numbers.") from error
    return _place(x, form)


def _place(x: Any, form: InputForm) -> Any:
    """Return a tensor on the model's device, numbers in the model's precision."""
    if not isinstance(x, Tensor):
        return x
    return x.to(form.device, (form.dtype or torch.get_default_dtype()) if x.is_floating_point() else None)


# Datasets: examples one by one ----------------------------------------------------------------------------------------


def is_dataset(data: Any) -> bool:
    """Return whether data gives single examples: a dataset of torch, of Hugging Face, or anything indexed."""
    if isinstance(data, (Tensor, Mapping, str, bytes, tuple, list, np.ndarray)):
        return False
    return isinstance(data, Dataset) or _is_hugging_face(data) or (_is_sized(data) and not isinstance(data, Iterable))


def is_indexed_dataset(data: Any) -> bool:
    """Return whether the examples of a dataset can be read by number, any number of times."""
    return is_dataset(data) and _is_sized(data) and not isinstance(data, IterableDataset)


def _is_sized(data: Any) -> bool:
    return hasattr(data, "__getitem__") and hasattr(data, "__len__")


def _is_hugging_face(data: Any) -> bool:
    return hasattr(data, "with_format") and hasattr(data, "column_names")


class DatasetBatches:
    """A dataset as batches in its order; of an indexed one, those examples that are listed."""

    def __init__(self, dataset: Any, form: InputForm, order: Sequence[int] | None = None) -> None:
        self.dataset, self.form, self.order = dataset, form, order

    def __iter__(self) -> Iterator[Any]:
        data = _open_columns(self.dataset)
        examples = iter(data) if self.order is None else (data[i] for i in self.order)
        while some := list(itertools.islice(examples, 1)):
            if self.order is None and _is_batch(some[0]):
                yield some[0]
                continue
            some += itertools.islice(examples, BATCH - 1)
            yield self._stack(some)

    def read(self, numbers: Sequence[int]) -> Any:
        """Return the listed examples of an indexed dataset as one batch."""
        data = _open_columns(self.dataset)
        return self._stack([data[i] for i in numbers])

    def _stack(self, examples: list[Any]) -> Any:
        """Stack examples; the batch is on the device of the model."""
        if _is_hugging_face(self.dataset):
            examples = [_select_columns(x) for x in examples]
        try:
            batch = default_collate([convert_arrays(x, self.form) for x in examples])
        except (TypeError, RuntimeError) as error:
            raise DataError(
                f"the examples of the {type(self.dataset).__name__} cannot be stacked to a batch "
                f"({str(error).splitlines()[0]}). Give it transforms that return tensors of one shape, texts padded to "
                "one length, or a DataLoader with a collate_fn."
            ) from error
        return tree_map(lambda x: x.to(self.form.device) if isinstance(x, Tensor) else x, batch)


def _open_columns(dataset: Any) -> Any:
    """Return a dataset of Hugging Face with tensors in its columns, and any other one as it is."""
    return dataset.with_format("torch") if _is_hugging_face(dataset) else dataset


def _is_batch(example: Any) -> bool:
    """Return whether an iterable dataset gives (inputs, labels) of many examples, as those of webdataset can."""
    if _count_tensors(example) != 2:
        return False
    inputs, labels = example
    return inputs.dim() > 1 and labels.dim() == 1 and len(inputs) == len(labels)


def _select_columns(example: Mapping[str, Any]) -> dict[str, Any]:
    """Return the columns that are numbers; "label" is renamed to "labels", which models expect."""
    found = {k: x for k, x in example.items() if isinstance(x, (Tensor, np.ndarray, int, float)) or is_number_list(x)}
    if "label" in found and "labels" not in found:
        found["labels"] = found.pop("label")
    return found

"""Dict batches: columns become the arguments that a model takes, lists of numbers become tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from sosp.errors import DataError

LABELS = ("labels", "label", "targets", "target")


def read_dict_batch(batch: Mapping[str, Any], names: frozenset[str], more: bool) -> tuple[Any, Any, bool]:
    """Return the inputs, the targets, and whether the inputs are keyword arguments.

    Columns that the model does not take are left out. Where it takes none of them, the only other tensor is its input.

    Args:
        batch: Columns by name.
        names: The arguments of the model.
        more: Whether the model takes others as well.

    Raises:
        DataError: No column is an argument of the model, and there are several tensors.
    """
    key = next((key for key in LABELS if key in batch), None)
    labels = {} if key is None else {"labels": batch[key]}
    inputs = {name: x for name, x in batch.items() if name in names}
    others = {name: x for name, x in batch.items() if isinstance(x, Tensor) and name not in LABELS}
    if not names or inputs.keys() - labels.keys() or not others:
        kept = dict(batch) if more else inputs if inputs else dict(batch)
        return ({**kept, **labels} if "labels" in names else kept), labels.get("labels"), True
    if len(others) == 1:
        return next(iter(others.values())), labels.get("labels"), False
    raise DataError(
        f"a batch has the columns {list(batch)}, and the model takes {sorted(names)}. Rename the columns, or give "
        "batches (inputs, labels)."
    )


def join_examples(data: Any) -> Any:
    """Return one dict of columns for a list of examples that are dicts of numbers and tokens; other data as it is."""
    if type(data) is not list or not data or not all(isinstance(x, Mapping) and _is_example(x) for x in data):
        return data
    return {name: [x[name] for x in data] for name in data[0] if all(name in x for x in data)}


def _is_example(x: Mapping[str, Any]) -> bool:
    return any(isinstance(value, (int, float)) for value in x.values()) or _are_numbers(x.get("input_ids"))


def convert_column(name: str, x: Any) -> Any:
    """Return a tensor for a list of numbers, or of lists of them, and everything else as it is."""
    if not is_number_list(x):
        return x
    try:
        return torch.tensor(x)
    except ValueError as error:
        lengths = sorted({len(row) for row in x})
        raise DataError(
            f"the rows of {name!r} have different lengths ({lengths[0]} to {lengths[-1]}). Pad them to one length, as "
            "tokenizer(texts, padding=True, return_tensors='pt') does."
        ) from error


def is_number_list(x: Any) -> bool:
    """Return whether a list holds numbers, or lists of numbers."""
    return _are_numbers(x) or (type(x) is list and len(x) > 0 and all(map(_are_numbers, x)))


def _are_numbers(x: Any) -> bool:
    return type(x) is list and len(x) > 0 and all(isinstance(value, (int, float)) for value in x)


def describe_sizes(images: Sequence[Tensor]) -> str:
    """Return the sizes of images, ``12 x 12 and 14 x 12``."""
    sizes = list(dict.fromkeys(" x ".join(map(str, image.shape[1:])) for image in images))
    return f"{sizes[0]} and {sizes[1]}" + (f", and {len(sizes) - 2} more" if len(sizes) > 2 else "")

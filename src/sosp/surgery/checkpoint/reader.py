"""From the JSON and the tensors of a file to the record: every field is checked, nothing is taken on trust."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sosp.core.json_checks import (
    Check,
    allow_null,
    check_boolean,
    check_float,
    check_integer,
    check_string,
    expect_choice,
    expect_fields,
    expect_list,
    expect_object,
    parse_json,
    refuse_value,
)
from sosp.errors import CheckpointError
from sosp.graph.mask import Mask
from sosp.graph.recipe import Bypass, Recipe, ScatterIndex, Shape
from sosp.graph.records import Layer
from sosp.surgery.checkpoint.model_record import DTYPES, INDEX, LAYOUTS, Saved, StoredTensor

AXES = {str(axis): axis for axis in range(8)}  # JSON has strings for keys
AXIS: Check[int] = partial(check_integer, low=-8, high=7)
SHAPE: Check[Shape] = expect_list(check_integer)
DTYPE = expect_choice(DTYPES)
LAYER = expect_fields(
    name=check_string,
    channels=check_integer,
    axis=AXIS,
    norms=expect_list(check_string),
    kernel=check_float,
    params=check_float,
    macs=check_float,
    depthwise=check_boolean,
)


def check_stored_tensor(value: Any, at: str) -> StoredTensor:
    found = StoredTensor(**expect_fields(dtype=DTYPE, shape=SHAPE, layout=expect_choice(LAYOUTS))(value, at))
    if LAYOUTS[found.layout][1] not in (None, len(found.shape)):
        refuse_value(found.layout, f"{at}.layout", f"a layout for {len(found.shape)} dimensions")
    return found


def check_source(value: Any, at: str) -> int | str:
    return value if isinstance(value, str) else check_integer(value, at)


def check_bypass(value: Any, at: str) -> Bypass:
    fields = expect_fields(source=check_source, steps=expect_list(check_string), zero=check_boolean)
    return Bypass(**fields(value, at))


class IndexReader:
    """The index tensors of a file, looked up by number."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.used: set[str] = set()

    def any(self, value: Any, at: str) -> Tensor:
        name = f"{INDEX}{check_integer(value, at)}"
        found = self.tensors.get(name)
        if found is None or found.dtype != torch.int64:
            refuse_value(value, at, "the number of an index tensor in the file")
        self.used.add(name)
        return found.clone()  # one for every use: a model takes them for its buffers

    def below(self, value: Any, at: str, low: int = 0, high: int | None = None) -> Tensor:
        """A vector of numbers from ``low`` to below ``high``."""
        found = self.any(value, at)
        if found.dim() != 1 or (found < low).any() or (high is not None and (found >= high).any()):
            refuse_value(
                found.flatten()[:5].tolist(), at, f"an index of numbers from {low} to below {high or 'the size'}"
            )
        return found

    def axes(self, value: Any, at: str) -> dict[int, Tensor]:
        found = expect_object(self.below)(value, at)
        return {
            AXES[a] if a in AXES else refuse_value(a, at, "an axis from 0 to 7"): index for a, index in found.items()
        }

    def pair(self, value: Any, at: str) -> tuple[Tensor, Tensor]:
        """Rows (R,) and columns (R, c)."""
        if not isinstance(value, list) or len(value) != 2:
            refuse_value(value, at, "two index tensors")
        rows, columns = self.below(value[0], at), self.any(value[1], at)
        if columns.dim() != 2 or len(columns) != len(rows) or (columns < 0).any():
            refuse_value(tuple(columns.shape), at, f"columns for {len(rows)} rows")
        return rows, columns

    def placing(self, value: Any, at: str) -> ScatterIndex:
        found = expect_fields(index=self.any, axis=AXIS, given=check_integer)(value, at)
        self.below(value["index"], f"{at}.index", -1, found["given"])
        return ScatterIndex(**found)

    def recipe(self, value: Any, at: str) -> Recipe:
        value = {"bypassed": {}, **value} if isinstance(value, dict) else value  # older files have none
        found = expect_fields(
            slices=expect_object(self.axes), grouped=expect_object(self.pair),
            sizes=expect_object(expect_object(check_integer)), scatters=expect_object(allow_null(self.placing)),
            emptied=expect_list(check_string), passed=expect_list(check_string),
            bypassed=expect_object(check_bypass),
        )(value, at)  # fmt: skip
        return Recipe(**found)

    def channels(self, value: Any, at: str) -> Tensor:
        found = self.below(value, at)
        if (found.diff() <= 0).any():
            refuse_value(found[:5].tolist(), at, "a sorted list of channels")
        return found

    def mask(self, value: Any, at: str) -> Mask:
        found = expect_fields(
            kind=expect_choice(("filters", "weights")), layers=expect_list(LAYER), removed=expect_object(self.channels),
            structures=check_integer, chosen=check_integer, norms=expect_object(self.channels),
        )(value, at)  # fmt: skip
        found["layers"] = tuple(Layer(**layer) for layer in found["layers"])
        widths = {layer.name: layer.channels for layer in found["layers"]}
        for name, gone in found["removed"].items():
            if name not in widths or (gone >= widths[name]).any():
                refuse_value(gone[-5:].tolist(), f"{at}.removed[{name!r}]", f"channels of its {widths.get(name, 0)}")
        check_integer(found["chosen"], f"{at}.chosen", high=found["structures"])
        return Mask(**found)


def decode_record(document: str, tensors: Mapping[str, Tensor]) -> Saved:
    """The record, from its JSON and all tensors of the file."""
    indices = IndexReader(tensors)
    claims = expect_fields(
        sosp=check_string, torch=check_string, module=check_string, qualname=check_string,
        tensors=expect_object(check_stored_tensor), aliases=expect_object(check_string),
        original=expect_object(SHAPE), transient=expect_object(DTYPE),
        recipes=expect_list(indices.recipe), mask=allow_null(indices.mask),
    )(parse_json(document), "")  # fmt: skip
    saved = Saved(**claims)
    _check_tensors(saved, {name: x for name, x in tensors.items() if name not in indices.used})
    return saved


def _check_tensors(saved: Saved, tensors: Mapping[str, Tensor]) -> None:
    """The tensors of the file are the ones it describes, no more and no fewer."""
    described = {name: f"{stored.dtype} {stored.shape}" for name, stored in saved.tensors.items()}
    found = {name: f"{str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}" for name, x in tensors.items()}
    for name in sorted(described.keys() | found.keys()):
        says, holds = described.get(name, "nothing"), found.get(name, "nothing")
        if says != holds:
            raise CheckpointError(f"its description says that {name!r} is {says}, but the file holds {holds}.")

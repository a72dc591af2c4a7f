"""From the JSON and the tensors of a file to the record: every field is checked, nothing is taken on trust."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sosp.core.schema import Check, fields, flag, many, maybe, named, number, one_of, parse, refuse, text, whole
from sosp.errors import CheckpointError
from sosp.graph.mask import Mask
from sosp.graph.recipe import Placing, Recipe
from sosp.graph.records import Layer
from sosp.surgery.checkpoint.record import DTYPES, INDEX, LAYOUTS, Saved, Shape, Stored

AXES = {str(axis): axis for axis in range(8)}  # JSON has strings for keys
AXIS: Check[int] = partial(whole, low=-8, high=7)
SHAPE: Check[Shape] = many(whole)
DTYPE = one_of(DTYPES)
LAYER = fields(
    name=text, channels=whole, axis=AXIS, norms=many(text), kernel=number, params=number, macs=number, depthwise=flag
)


def tensor(value: Any, at: str) -> Stored:
    found = Stored(**fields(dtype=DTYPE, shape=SHAPE, layout=one_of(LAYOUTS))(value, at))
    if LAYOUTS[found.layout][1] not in (None, len(found.shape)):
        refuse(found.layout, f"{at}.layout", f"a layout for {len(found.shape)} dimensions")
    return found


class Indices:
    """The index tensors of a file, looked up by number."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.tensors = tensors
        self.used: set[str] = set()

    def any(self, value: Any, at: str) -> Tensor:
        name = f"{INDEX}{whole(value, at)}"
        found = self.tensors.get(name)
        if found is None or found.dtype != torch.int64:
            refuse(value, at, "the number of an index tensor in the file")
        self.used.add(name)
        return found.clone()  # one for every use: a model takes them for its buffers

    def below(self, value: Any, at: str, low: int = 0, high: int | None = None) -> Tensor:
        """A vector of numbers from ``low`` to below ``high``."""
        found = self.any(value, at)
        if found.dim() != 1 or (found < low).any() or (high is not None and (found >= high).any()):
            refuse(found.flatten()[:5].tolist(), at, f"an index of numbers from {low} to below {high or 'the size'}")
        return found

    def axes(self, value: Any, at: str) -> dict[int, Tensor]:
        found = named(self.below)(value, at)
        return {AXES[a] if a in AXES else refuse(a, at, "an axis from 0 to 7"): index for a, index in found.items()}

    def pair(self, value: Any, at: str) -> tuple[Tensor, Tensor]:
        """Rows (R,) and columns (R, c)."""
        if not isinstance(value, list) or len(value) != 2:
            refuse(value, at, "two index tensors")
        rows, columns = self.below(value[0], at), self.any(value[1], at)
        if columns.dim() != 2 or len(columns) != len(rows) or (columns < 0).any():
            refuse(tuple(columns.shape), at, f"columns for {len(rows)} rows")
        return rows, columns

    def placing(self, value: Any, at: str) -> Placing:
        found = fields(index=self.any, axis=AXIS, given=whole)(value, at)
        self.below(value["index"], f"{at}.index", -1, found["given"])
        return Placing(**found)

    def recipe(self, value: Any, at: str) -> Recipe:
        found = fields(
            slices=named(self.axes), grouped=named(self.pair), sizes=named(named(whole)),
            scatters=named(maybe(self.placing)), emptied=many(text), passed=many(text),
        )(value, at)  # fmt: skip
        return Recipe(**found)

    def channels(self, value: Any, at: str) -> Tensor:
        found = self.below(value, at)
        if (found.diff() <= 0).any():
            refuse(found[:5].tolist(), at, "a sorted list of channels")
        return found

    def mask(self, value: Any, at: str) -> Mask:
        found = fields(
            kind=one_of(("filters", "weights")), layers=many(LAYER), removed=named(self.channels),
            structures=whole, chosen=whole, norms=named(self.channels),
        )(value, at)  # fmt: skip
        found["layers"] = tuple(Layer(**layer) for layer in found["layers"])
        widths = {layer.name: layer.channels for layer in found["layers"]}
        for name, gone in found["removed"].items():
            if name not in widths or (gone >= widths[name]).any():
                refuse(gone[-5:].tolist(), f"{at}.removed[{name!r}]", f"channels of its {widths.get(name, 0)}")
        whole(found["chosen"], f"{at}.chosen", high=found["structures"])
        return Mask(**found)


def decode(document: str, tensors: Mapping[str, Tensor]) -> Saved:
    """The record, from its JSON and all tensors of the file."""
    indices = Indices(tensors)
    claims = fields(
        sosp=text, torch=text, module=text, qualname=text, tensors=named(tensor), aliases=named(text),
        original=named(SHAPE), transient=named(DTYPE), recipes=many(indices.recipe), mask=maybe(indices.mask),
    )(parse(document), "")  # fmt: skip
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

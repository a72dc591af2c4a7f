"""What a checkpoint says beside the weights: a record, and the JSON it becomes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from sosp.errors import CheckpointError
from sosp.graph.mask import Mask
from sosp.graph.recipe import Recipe, ScatterIndex, Shape, compute_new_shape

INDEX = "sosp.index/"  # and a number: the names of the index tensors
# How a tensor lies in memory, and the dimensions it has then. Anything else is "strided": its values count alone.
LAYOUTS = {
    "contiguous": (torch.contiguous_format, None),
    "channels_last": (torch.channels_last, 4),
    "channels_last_3d": (torch.channels_last_3d, 5),
    "strided": (torch.contiguous_format, None),
}
DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint64, torch.uint32, torch.uint16, torch.uint8),
        *(torch.bool, torch.complex64),
    )
}


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the saved model's state dict."""

    dtype: str  # "float32"
    shape: Shape
    layout: str  # how it lay in memory, one of LAYOUTS


@dataclass(frozen=True, eq=False)
class Saved:
    """What a checkpoint says about the model in it."""

    sosp: str  # the versions that wrote it
    torch: str
    module: str  # where the model's class was defined: a name, nothing is imported
    qualname: str
    tensors: Mapping[str, StoredTensor]
    aliases: Mapping[str, str]  # name -> the name in ``tensors`` of the same tensor
    original: Mapping[str, Shape]  # the state dict of the network before it was shrunk
    transient: Mapping[str, str]  # float buffers that are not in the state dict -> their dtype
    recipes: tuple[Recipe, ...]
    mask: Mask | None

    def __repr__(self) -> str:
        shrunk = f"shrunk {len(self.recipes)}x" if self.recipes else "not shrunk"
        return f"Saved({self.qualname}, {len(self.tensors)} tensors, {shrunk}, {self.mask or 'no mask'!r})"


class IndexWriter:
    """Index tensors by number; equal ones are stored once."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.numbers: dict[tuple[Shape, bytes], int] = {}

    def put(self, index: Tensor) -> int:
        index = index.detach().to("cpu", torch.int64).contiguous()
        key = (tuple(index.shape), index.numpy().tobytes())
        if key not in self.numbers:
            self.numbers[key] = len(self.tensors)
            self.tensors.append(index.clone())
        return self.numbers[key]


def encode_record(saved: Saved) -> tuple[str, dict[str, Tensor]]:
    """The JSON of a record, and the index tensors it refers to by number."""
    indices = IndexWriter()
    document = {f.name: getattr(saved, f.name) for f in dataclasses.fields(saved)}
    document["tensors"] = {name: vars(stored) for name, stored in saved.tensors.items()}
    document["recipes"] = [_recipe(recipe, indices) for recipe in saved.recipes]
    document["mask"] = None if saved.mask is None else _mask(saved.mask, indices)
    try:
        written = json.dumps(document, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the mask or a recipe contains a value that JSON cannot store ({error}).") from error
    return written, {f"{INDEX}{i}": index for i, index in enumerate(indices.tensors)}


def _recipe(recipe: Recipe, indices: IndexWriter) -> dict[str, Any]:
    def plain(placing: ScatterIndex | None) -> dict[str, int] | None:
        return None if placing is None else {**vars(placing), "index": indices.put(placing.index)}

    return {
        "slices": {n: {str(a): indices.put(i) for a, i in axes.items()} for n, axes in recipe.slices.items()},
        "grouped": {n: [indices.put(i) for i in pair] for n, pair in recipe.grouped.items()},
        "sizes": {n: dict(sizes) for n, sizes in recipe.sizes.items()},
        "scatters": {n: plain(placing) for n, placing in recipe.scatters.items()},
        "emptied": list(recipe.emptied),
        "passed": list(recipe.passed),
        "bypassed": {n: {**vars(bypass), "steps": list(bypass.steps)} for n, bypass in recipe.bypassed.items()},
    }


def _mask(mask: Mask, indices: IndexWriter) -> dict[str, Any]:
    floats = ("kernel", "params", "macs")
    return {
        "kind": mask.kind,
        "layers": [{**vars(x), **{key: float(getattr(x, key)) for key in floats}} for x in mask.layers],
        "removed": {name: indices.put(index) for name, index in mask.removed.items()},
        "norms": {name: indices.put(index) for name, index in mask.norms.items()},
        "structures": mask.structures,
        "chosen": mask.chosen,
    }


def check_shapes(saved: Saved) -> None:
    """Raise CheckpointError unless the recipes turn the original shapes into the saved ones."""
    names: dict[str, list[str]] = {name: [name] for name in saved.tensors}
    for name, first in saved.aliases.items():
        if first not in names or name in names:
            raise CheckpointError(f"it says that {name!r} is {first!r} under another name, which it is not.")
        names[first].append(name)
    for name, stored in saved.tensors.items():
        for known in names[name]:
            if known not in saved.original:
                raise CheckpointError(
                    f"the model has {known!r}, which it did not have before it was shrunk. "
                    "Add it to the original network before shrinking."
                )
        shape = saved.original[name]
        for recipe in saved.recipes:
            for known in names[name]:
                shape = compute_new_shape(shape, recipe, known)
        if shape != stored.shape:
            raise CheckpointError(
                f"{name!r} is {stored.shape}, but shrinking made it {shape}: it was changed afterwards. "
                "Make the change to the original network before shrinking, or keep the state dict yourself."
            )

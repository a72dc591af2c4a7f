"""Save a saliency to one small file: numbers per structure, and a table of layers instead of all pairs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from sosp.core.json_checks import check_integer, check_string, expect_choice, expect_fields, expect_list, parse_json
from sosp.core.safetensors_files import parse_path, prefix_errors, read_safetensors, write_safetensors
from sosp.errors import CheckpointError
from sosp.graph.mask import Mask
from sosp.graph.records import OBJECTIVES, SCOPES, Saliency, Structures
from sosp.selection.greedy_order import rank_structures

DOCUMENT = expect_fields(
    holds=expect_choice(["saliency"]),
    method=check_string,
    objective=expect_choice(OBJECTIVES),
    scope=expect_choice(SCOPES),
    examples=check_integer,
    layers=expect_list(check_string),
)
# Tensor -> its dimensions and type; the last three may be missing.
TENSORS: dict[str, tuple[int, torch.dtype]] = {
    "index": (1, torch.int64),
    "rank": (1, torch.int64),
    "removed": (1, torch.bool),
    "scores": (1, torch.float64),
    "first": (1, torch.float64),
    "second": (1, torch.float64),
    "pairs_by_layer": (2, torch.float64),
}
OPTIONAL = ("first", "second", "pairs_by_layer")


@dataclass(frozen=True, eq=False)
class SavedSaliency:
    """Saliency of S structures in L layers, and which of them were removed."""

    method: str
    objective: str
    scope: str
    examples: int
    layers: tuple[str, ...]
    index: Tensor  # (S,) the layer of each structure, the first if it spans several
    rank: Tensor  # (S,) its rank among all structures, 0 is removed first
    removed: Tensor  # (S,) true if it was removed
    scores: Tensor  # (S,) cost of removing it alone
    first: Tensor | None = None  # (S,) the first-order term
    second: Tensor | None = None  # (S,) the second-order term, with all others or by itself
    pairs_by_layer: Tensor | None = None  # (L, L) sums of |theta_s . H theta_s'| over the structures of two layers

    def without_empty_layers(self) -> SavedSaliency:
        """Return a copy without layers whose structures all count in another layer, the first they span."""
        kept, index = self.index.unique(return_inverse=True)
        pairs = None if self.pairs_by_layer is None else self.pairs_by_layer[kept][:, kept]
        return replace(self, layers=tuple(self.layers[i] for i in kept.tolist()), index=index, pairs_by_layer=pairs)


def save_saliency(path: str | Path, saliency: Saliency, mask: Mask) -> None:
    """Write the saliency of every structure to one file, which appears only when it is complete."""
    file = parse_path(path)
    document = {
        "holds": "saliency",
        "method": saliency.method,
        "objective": saliency.objective,
        "scope": saliency.scope,
        "examples": saliency.examples,
        "layers": [layer.name for layer in saliency.structures.layers],
    }
    with prefix_errors(file):
        write_safetensors(file, json.dumps(document, separators=(",", ":")), _collect_tensors(saliency, mask))


def read_saliency(path: str | Path) -> SavedSaliency:
    """Read a file of ``save_saliency`` and check every field."""
    file = parse_path(path)
    with prefix_errors(file):
        document, tensors = read_safetensors(file)
        found = parse_json(document)
        if not isinstance(found, dict) or found.get("holds") != "saliency":
            raise CheckpointError("was written by sosp but contains no saliency.")
        claims = DOCUMENT(found, "")
        del claims["holds"]
        claims |= _check_tensors(tensors)
        saved = SavedSaliency(**claims)
        _check_sizes(saved)
    return saved


def _collect_tensors(saliency: Saliency, mask: Mask) -> dict[str, Tensor]:
    """Return the tensors to write, on the CPU."""
    structures = saliency.structures
    found = {
        "index": structures.owner(),
        "rank": rank_structures(saliency),
        "removed": find_removed_structures(structures, mask),
        "scores": saliency.scores,
        "first": saliency.first,
        "second": saliency.own,
        "pairs_by_layer": None if saliency.pairs is None else pairs_by_layer(structures, saliency.pairs),
    }
    given = {name: x for name, x in found.items() if x is not None}
    return {name: x.detach().to("cpu", TENSORS[name][1], copy=True).contiguous() for name, x in given.items()}


def find_removed_structures(structures: Structures, mask: Mask) -> Tensor:
    """Return (S,) true for structures of which a channel is removed."""
    gone = torch.zeros(len(structures) + 1, dtype=torch.bool)
    for layer, ids in zip(structures.layers, structures.ids, strict=True):
        if layer.name in mask.removed:
            gone[ids[mask.removed[layer.name].cpu()]] = True
    return gone[:-1]  # without the entry that ids of -1 write to


def pairs_by_layer(structures: Structures, pairs: Tensor) -> Tensor:
    """Sum absolute values, (L, L) from (S, S), one layer at a time because a copy of all pairs may not fit."""
    owner = structures.owner().to(pairs.device)
    total = pairs.new_zeros(len(structures.layers), len(structures.layers), dtype=torch.float64)
    for i in range(len(structures.layers)):
        total[i].index_add_(0, owner, pairs[owner == i].abs().sum(0, dtype=torch.float64))
    return total


def _check_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors by name; raise CheckpointError if one is missing, unknown or of another type."""
    for name in sorted(tensors.keys() ^ TENSORS.keys()):
        if name not in OPTIONAL:
            raise CheckpointError(f"its tensors are not those of a saliency: {name!r} is missing or not expected.")
    for name, x in tensors.items():
        dims, dtype = TENSORS[name]
        if x.dim() != dims or x.dtype != dtype:
            raise CheckpointError(f"{name!r} should be {dtype} with {dims} dimensions, not {x.dtype} {tuple(x.shape)}.")
    return dict(tensors)


def _check_sizes(saved: SavedSaliency) -> None:
    """Raise CheckpointError unless all have S entries, layers exist, ranks are 0 to S - 1 and the table is L x L."""
    count, layers = len(saved.index), len(saved.layers)
    for name in ("rank", "removed", "scores", "first", "second"):
        x = getattr(saved, name)
        if x is not None and len(x) != count:
            raise CheckpointError(f"{name!r} has {len(x)} entries for {count} structures.")
    if count and not 0 <= int(saved.index.min()) <= int(saved.index.max()) < layers:
        raise CheckpointError(f"'index' names layers that are not among its {layers}.")
    if not torch.equal(saved.rank.sort().values, torch.arange(count)):
        raise CheckpointError(f"'rank' is not a permutation of {count} structures.")
    table = saved.pairs_by_layer
    if table is not None and tuple(table.shape) != (layers, layers):
        raise CheckpointError(f"'pairs_by_layer' is {tuple(table.shape)} for {layers} layers.")

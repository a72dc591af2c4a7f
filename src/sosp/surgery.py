"""From a mask to a smaller network that computes the same function, and from widths to a larger one."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from sosp.errors import StructureError
from sosp.flow import Flow, trace
from sosp.flow.flow import few, meta_copy, quiet
from sosp.flow.graph import Cut, Dense, Pin
from sosp.flow.layout import Layout
from sosp.flow.rehearsal import Lost, rehearse
from sosp.layers import is_norm, layer_type
from sosp.mask import Mask
from sosp.recipe import Placing, Recipe, apply

ROUNDS = 20


def shrink(model: nn.Module, mask: Mask, example: Any, *, verify: bool = True) -> nn.Module:
    """A smaller copy of ``model`` that computes what ``sosp.masked(model, mask)`` computes."""
    flow = trace(model, example)
    recipe = plan(model, flow, mask, example)
    small = copy.deepcopy(model)
    apply(small, recipe)
    return small


def plan(model: nn.Module, flow: Flow, mask: Mask, example: Any) -> Recipe:
    """The recipe for a mask; channels that the code does not let go are pinned on the way."""
    places = {layer.name: layer.norms for layer in mask.layers}
    removed = flow.removed(mask.removed, places)
    inputs = few(example)
    given = tree_map(lambda x: (x.clone() if flow.real else x.to("meta")) if isinstance(x, Tensor) else x, inputs)
    for attempt in range(ROUNDS):
        layout = flow.layout(removed)
        recipe = write(model, flow, layout, removed)
        pins = _try(model, flow, layout, recipe, given, attempt)
        if not pins:
            return recipe
        flow.pin(pins)
    raise StructureError("the network could not be made smaller without changing what it computes.")


def _try(model: nn.Module, flow: Flow, layout: Layout, recipe: Recipe, inputs: Any, attempt: int) -> list[Pin]:
    twin = copy.deepcopy(model) if flow.real else meta_copy(model)
    apply(twin, recipe)
    pins: list[Pin] = []
    for mode in flow.graph.records:
        if mode in flow.untraced:
            continue
        with quiet():
            try:
                run = rehearse(twin, inputs, flow.graph, mode, layout.counts, "cpu" if flow.real else "meta")
            except Exception as error:
                raise StructureError(f"rehearsal failed: {error}") from error
        for record in run.failed:
            labels = [x.numbers() for x in (*record.given, *record.out) if x is not None]
            if labels:
                pins.append(Pin(np.concatenate(labels), record.name, record.where, "the code fixes their number"))
    return pins


def write(model: nn.Module, flow: Flow, layout: Layout, removed: Mapping[str, np.ndarray]) -> Recipe:
    """All indices of the surgery."""
    counts = layout.counts
    slices: dict[str, dict[int, Tensor]] = {}
    grouped: dict[str, tuple[Tensor, Tensor]] = {}
    sizes: dict[str, dict[str, int]] = {}
    scatters: dict[str, Placing | None] = {}
    emptied: list[str] = []
    passed: list[str] = []
    for s in flow.graph.slices.values():
        if s.name not in flow.graph.dense:
            _slice(slices, s.name, s.axis, _stay(counts, s.ids))
    for d in flow.graph.dense.values():
        if d.weight in layout.emptied and d.module and isinstance(layer_type(model.get_submodule(d.module)), object):
            emptied.append(d.module)
            continue
        if d.narrow:
            _weight(model, d, counts, slices, grouped, sizes)
    for name, cuts in flow.graph.calls.items():
        _cut(model, name, cuts, layout, removed, sizes, scatters, passed)
    return Recipe(slices, grouped, sizes, scatters, {}, tuple(emptied), tuple(passed))


def _stay(counts: np.ndarray, ids: np.ndarray) -> np.ndarray:
    return np.repeat(np.arange(len(ids)), counts[ids])


def _slice(slices: dict[str, dict[int, Tensor]], name: str, axis: int, index: np.ndarray, ) -> None:
    slices.setdefault(name, {})[axis] = torch.from_numpy(index)


def _weight(model: nn.Module, d: Dense, counts: np.ndarray, slices: Any, grouped: Any, sizes: Any) -> None:
    rows, columns = _stay(counts, d.out), _stay(counts, d.into[0])
    if len(rows) == len(d.out) and len(columns) == len(d.into[0]) and (counts[d.out] == 1).all():
        return
    groups = 1
    if d.groups == 1:
        _slice(slices, d.weight, d.out_axis, rows)
        _slice(slices, d.weight, d.in_axis, columns)
    else:
        groups = _groups(d, counts, grouped)
    if d.module:
        module = model.get_submodule(d.module)
        kind = layer_type(module)
        if kind is not None:
            sizes[d.module] = dict(zip(kind.sizes, (len(rows), len(columns)), strict=True))
            if d.groups > 1:
                sizes[d.module]["groups"] = groups


def _groups(d: Dense, counts: np.ndarray, grouped: Any) -> int:
    """The weight of a grouped convolution: (out, in / groups, ...), or (in, out / groups, ...) when transposed."""
    first, second = (d.into[0], d.out) if d.transposed else (d.out, d.into[0])
    first, second = first.reshape(d.groups, -1), second.reshape(d.groups, -1)
    rows, columns = [], []
    for g in range(d.groups):
        r, c = _stay(counts, first[g]), _stay(counts, second[g])
        rows.append(g * first.shape[1] + r)
        columns.append(np.repeat(c[None], len(r), axis=0))
    grouped[d.weight] = (
        torch.from_numpy(np.concatenate(rows)),
        torch.from_numpy(np.concatenate([c for c in columns if len(c)])),
    )
    return sum(len(r) > 0 for r in rows)


def _cut(
    model: nn.Module, name: str, cuts: list[Cut], layout: Layout, removed: Mapping[str, np.ndarray], sizes: Any, scatters: Any, passed: Any
) -> None:
    cut = cuts[0]
    counts = layout.counts
    stay = _stay(counts, cut.given)
    module = model.get_submodule(name)
    if is_norm(module) and hasattr(module, "num_features") and len(stay) != len(cut.given):
        sizes.setdefault(name, {})["num_features"] = len(stay)
    if counts.max(initial=1) > 1:  # a widened network scatters nothing
        return
    place = np.full(len(cut.given) + 1, -1)
    place[:-1][stay] = np.arange(len(stay))
    zero = np.logical_and.reduce([c.forced(removed.get(name), layout.zero) for c in cuts])
    out = _stay(counts, cut.out)
    index = np.where(zero, -1, place[cut.index])[out]
    scattering = "scatter" in module._modules
    if not np.array_equal(index, np.arange(len(stay))):
        scatters[name] = Placing(torch.from_numpy(index), cut.axis, len(stay))
    elif scattering:
        scatters[name] = None

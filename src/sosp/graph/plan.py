"""From what is removed to a recipe that was tried out: what the user's code does not let go is pinned on the way."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from sosp.core.layers import is_norm, layer_type
from sosp.graph.channels import Cut, Dense, Graph, Pin, Record
from sosp.graph.control_flow import exposed, other_ways
from sosp.graph.dry_run import Rehearsal, rehearse
from sosp.graph.labels import indices
from sosp.graph.layout import Layout, Style
from sosp.graph.meta import few, meta_copy, on_device, quiet
from sosp.graph.ops import NUMBERS
from sosp.graph.recipe import Placing, Recipe, apply
from sosp.graph.width_arithmetic import Trial, computed

if TYPE_CHECKING:
    from sosp.graph.flow import Flow

Removed = Mapping[str, np.ndarray]  # module -> (n,) which of its output channels are set to zero


def plan(
    model: nn.Module, flow: Flow, removed: Removed, example: Any, style: Style | None = None
) -> tuple[Layout, Recipe]:
    """What stays and how to get there, tried out op by op; ``flow`` learns what has to be pinned."""
    inputs = few(example)
    while True:
        layout = flow.layout(removed, style)
        recipe = write(model, flow.graph, layout, removed)
        pins = _trouble(model, flow, layout, recipe, inputs)
        if not pins:
            return layout, recipe
        flow.pin(pins)


def _trouble(model: nn.Module, flow: Flow, layout: Layout, recipe: Recipe, inputs: Any) -> list[Pin]:
    """Run the smaller network without numbers; what must be pinned so that the user's code goes through."""
    pins: list[Pin] = []
    runs = list(try_out(model, flow, layout, recipe, inputs))
    for mode, run in runs:
        pins += _reasons(flow, layout, mode, run)
    if pins or not any(run.computed for _, run in runs) or any(d.op in NUMBERS for d in flow.graph.decisions):
        return pins  # numbers that were computed from values may well be others
    trial = Trial(model, flow, layout, recipe, lambda a, b: try_out(model, flow, a, b, inputs))
    for mode, run in runs:
        pins += list(islice(computed(trial, mode, run), 1))  # one after the other: what holds one number may hold more
    return pins


def try_out(
    model: nn.Module, flow: Flow, layout: Layout, recipe: Recipe, inputs: Any
) -> Iterator[tuple[str, Rehearsal]]:
    """The changed network, run without numbers beside the record of the whole one, mode by mode."""
    twin = copy.deepcopy(model) if flow.real else meta_copy(model)
    apply(twin, recipe)
    gone = {*recipe.emptied, *recipe.passed}
    records = {m: [r for r in ops if r.module not in gone] for m, ops in flow.graph.records.items()}
    for mode in flow.modes:
        twin.train(mode == "train")
        with quiet():
            given = on_device(flow.example if flow.real else inputs, flow.real)
            decides = bool(flow.graph.decisions)
            yield mode, rehearse(twin, given, records[mode], layout.counts, recipe.emptied, decides)


def _reasons(flow: Flow, layout: Layout, mode: str, run: Rehearsal) -> list[Pin]:
    """Pin the channels at each op that failed; if they all stayed, those whose sizes were read around it; or all."""
    pins = []
    if run.strayed:
        ids = exposed(flow.graph, flow.unseen)
        if (layout.counts[ids] == 0).any():
            pins.append(other_ways(flow.graph, ids, "with channels gone, the code takes another way"))
    for record in run.failed[:-1] if run.strayed else run.failed:
        if _fix_axis(flow.graph, record, layout.counts):
            pins.append(Pin(np.zeros(0, dtype=int), record.name, record.where, "the code fixes the size of an axis"))
            continue
        at_op = [x.numbers() for x in (*record.given, *record.out) if x is not None]
        around = [ids for m, module, ids in flow.graph.reads if m == mode and module == record.module]
        everything = [np.arange(flow.graph.count)]
        for labels in (at_op, around, everything):
            ids = np.concatenate([np.zeros(0, dtype=int), *labels])
            if (layout.counts[ids] == 0).any():
                pins.append(Pin(np.unique(ids), record.name, record.where, "the code fixes how many there are"))
                break
    return pins


def _fix_axis(graph: Graph, record: Record, counts: np.ndarray) -> bool:
    """Where channels were folded into several axes, the code may fix the size of one: the shortest that changed."""
    known = {(id(labels), axis) for labels, axis in graph.fixed}
    for labels in (*record.out, *record.given):
        picks = indices(labels, counts) if labels is not None and len(labels.varying) > 1 else None
        if labels is None or picks is None:
            continue
        changed = [d for d in labels.varying if len(picks[d]) < labels.shape[d] and (id(labels), d) not in known]
        free = [d for d in labels.varying if (id(labels), d) not in known]
        if changed and len(free) > 1:  # one axis at least is free; otherwise all of it is pinned
            graph.fixed.append((labels, min(changed, key=lambda d: labels.shape[d])))
            return True
    return False


def write(model: nn.Module, graph: Graph, layout: Layout, removed: Removed) -> Recipe:
    """All indices of the surgery."""
    counts = layout.counts
    slices: dict[str, dict[int, Tensor]] = {}
    grouped: dict[str, tuple[Tensor, Tensor]] = {}
    sizes: dict[str, dict[str, int]] = {}
    scatters: dict[str, Placing | None] = {}
    emptied = tuple(d.module for d in graph.dense.values() if d.weight in layout.emptied)
    passed = tuple(n for n in graph.calls if _passed(model, graph, layout, n))
    gone = tuple(f"{n}." for n in (*emptied, *passed))
    for s in graph.slices.values():
        if s.name not in graph.dense and not (gone and s.name.startswith(gone)):
            _keep(slices, s.name, s.axis, counts, s.ids)
    for d in graph.dense.values():
        if d.narrow and d.weight not in layout.emptied:
            _weight(model, d, counts, slices, grouped, sizes)
            continue
        layer: Any = model.get_submodule(d.module)
        kind = layer_type(layer)
        if kind is not None:  # emptied, or its weight is computed: the code may ask it for its width
            _size(sizes, d.module, layer, kind.sizes[0], int(counts[d.out].sum()))
    for name, cuts in graph.calls.items():
        placing = _placing(cuts, layout, removed.get(name))
        module: Any = model.get_submodule(name)
        if is_norm(module) and name not in passed and hasattr(module, "num_features"):
            _size(sizes, name, module, "num_features", int(counts[cuts[0].given].sum()))
        if placing is not None or "scatter" in module._modules:
            scatters[name] = placing
    for name in slices:
        path, _, key = name.rpartition(".")
        module = model.get_submodule(path)
        for attribute in ("num_parameters", "embedding_dim"):
            if key == "weight" and hasattr(module, attribute):
                _size(sizes, path, module, attribute, len(next(iter(slices[name].values()))))
    return Recipe({n: a for n, a in slices.items() if a}, grouped, sizes, scatters, emptied, passed)


def _passed(model: nn.Module, graph: Graph, layout: Layout, name: str) -> bool:
    """A norm that nothing needs any more."""
    return is_norm(model.get_submodule(name)) and not layout.needed[graph.calls[name][0].given].any()


def stay(counts: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Which places of ``ids`` stay, in order; some several times in a widened network.

    Neighbours with one number are pixels of one channel, flattened: a copy of the channel stands behind all of them.
    """
    times = counts[ids]
    if times.max(initial=0) <= 1:
        return np.flatnonzero(times)
    runs = np.split(np.arange(len(ids)), np.flatnonzero(ids[1:] != ids[:-1]) + 1)
    return np.concatenate([np.tile(run, times[run[0]]) for run in runs])


def _keep(slices: dict[str, dict[int, Tensor]], name: str, axis: int, counts: np.ndarray, ids: np.ndarray) -> None:
    if (counts[ids] != 1).any():
        slices.setdefault(name, {})[axis] = torch.from_numpy(stay(counts, ids))


def _size(sizes: dict[str, dict[str, int]], name: str, module: Any, attribute: str, value: int) -> None:
    if getattr(module, attribute) != value:
        sizes.setdefault(name, {})[attribute] = value


def _weight(model: nn.Module, d: Dense, counts: np.ndarray, slices: Any, grouped: Any, sizes: Any) -> None:
    """The rows and columns of a layer's weight, and the widths it states."""
    if (counts[d.out] == 1).all() and (counts[d.into[0]] == 1).all():
        return
    groups = 1
    if d.groups == 1:
        _keep(slices, d.weight, d.out_axis, counts, d.out)
        _keep(slices, d.weight, d.in_axis, counts, d.into[0])
    else:
        grouped[d.weight], groups = _in_groups(d, counts)
    module: Any = model.get_submodule(d.module) if d.module else None
    kind = layer_type(module) if module is not None else None
    if kind is not None:
        widths = (int(counts[d.out].sum()), int(counts[d.into[0]].sum()))
        for attribute, value in (
            *zip(kind.sizes, widths, strict=True),
            *([("groups", groups)] if d.groups > 1 else []),
        ):
            _size(sizes, d.module, module, attribute, value)


def _in_groups(d: Dense, counts: np.ndarray) -> tuple[tuple[Tensor, Tensor], int]:
    """The weight of a grouped convolution: (out, in / groups, ...), or (in, out / groups, ...) when transposed."""
    first, second = (d.into[0], d.out) if d.transposed else (d.out, d.into[0])
    first, second = first.reshape(d.groups, -1), second.reshape(d.groups, -1)
    rows = [g * first.shape[1] + stay(counts, ids) for g, ids in enumerate(first)]
    columns = [np.tile(stay(counts, second[g]), (len(r), 1)) for g, r in enumerate(rows) if len(r)]
    groups = len(columns)
    if d.groups == len(d.into[0]):  # one channel per group: a copy of it is a group of its own
        groups = int(counts[d.into[0]].sum())
        columns = [c[:, : second.shape[1]] for c in columns]
    return (torch.from_numpy(np.concatenate(rows)), torch.from_numpy(np.concatenate(columns))), groups


def _placing(cuts: list[Cut], layout: Layout, removed: np.ndarray | None) -> Placing | None:
    """Where the channels that a module still computes go among those that leave it; None where they are the same."""
    cut, counts = cuts[0], layout.counts
    if counts.max(initial=1) > 1:
        return _placing_wide(cut, counts)
    computed = stay(counts, cut.given)
    place = np.full(len(cut.given) + 1, -1)
    place[computed] = np.arange(len(computed))
    place[-1] = -1
    zero = np.zeros(len(cut.out), dtype=bool) if layout.zeroed(cut) else forced(cuts, layout, removed)
    index = np.where(zero, -1, place[cut.index])[stay(counts, cut.out)]
    if np.array_equal(index, np.arange(len(computed))):
        return None
    return Placing(torch.from_numpy(index), cut.axis, len(computed))


def _placing_wide(cut: Cut, counts: np.ndarray) -> Placing | None:
    """The same for a widened network: copy k of an output takes copy k of the channel it comes from."""
    times = counts[cut.given]
    starts = np.cumsum(times) - times
    pairs = zip(cut.index, counts[cut.out], strict=True)
    index = np.concatenate([np.full(m, -1) if j < 0 else starts[j] + np.arange(m) for j, m in pairs])
    if np.array_equal(index, np.arange(times.sum())):
        return None
    return Placing(torch.from_numpy(index), cut.axis, int(times.sum()))


def forced(cuts: list[Cut], layout: Layout, removed: np.ndarray | None) -> np.ndarray:
    """(m,) what a module's output is set to zero in, in all of its calls."""
    return np.logical_and.reduce([c.forced(removed, layout.zero) for c in cuts])


@torch.no_grad()
def set_zero(model: nn.Module, graph: Graph, layout: Layout, removed: Removed) -> None:
    """Weights of zero for the channels that are removed but keep their place (``join="zeros"``)."""
    for name, cuts in graph.calls.items():
        cut = cuts[0]
        if layout.zeroed(cut):
            gone = forced(cuts, layout, removed.get(name))[stay(layout.counts, cut.given)]
            module: Any = model.get_submodule(name)
            kind = layer_type(module)
            rows = torch.from_numpy(np.flatnonzero(gone))
            for key, axis in (("weight", kind.weight_axis if kind else 0), ("bias", 0)):
                if len(rows) and getattr(module, key, None) is not None:
                    getattr(module, key).index_fill_(axis, rows.to(getattr(module, key).device), 0)

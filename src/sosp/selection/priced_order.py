"""Order removals by price: the rise of the objective per unit of cost that the removal saves at that moment.

One structure at a time, always the one with the smallest

    rise / saved ** 0.75 / left ** 2

``saved``: the MACs (or parameters) that disappear with it in the layers that make its channels and in those that read
them, given what is already removed. ``left``: the share of its layer that remains, only for layers that connect input
and output; emptying one of them costs more than the sum of its parts. One structure of every layer always stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sosp.core.progress import track_progress
from sosp.graph.channels import DenseWeight, Graph, Ids, ModuleCall
from sosp.graph.flow import Flow
from sosp.graph.labels import ZERO
from sosp.graph.records import INPUT, Saliency, Structures
from sosp.selection.greedy_order import (
    OBJECTIVES,
    LayerLimits,
    check_share,
    count_layer_structures,
    find_reached,
    limit_removals,
)

SAVING_POWER = 0.75  # below 1: many cheap removals cost more together than their sum
CROWDING_POWER = 2
NOBODY, ALWAYS_ZERO = -1, -2  # labels of values that no structure makes zero, and of constants


def order_by_price(saliency: Saliency, flow: Flow, what: str, cap: float | None) -> Tensor:
    """Return all structures that may be removed, in order; ``what`` is "macs" or "params"."""
    structures, device = saliency.structures, saliency.scores.device
    if cap is not None:
        check_share("cap", cap)
    widths = count_layer_structures(structures)
    limits = LayerLimits(
        structures, cap, device, [min(n, w - 1) for n, w in zip(limit_removals(widths, cap), widths, strict=True)]
    )
    savings = Savings(structures, flow, what)
    crowding = Crowding(structures, widths, device)
    state = OBJECTIVES[saliency.objective](saliency)
    state.close(limits.full_structures())
    order = []
    for _ in track_progress(range(sum(max(n, 0) for n in limits.left)), "selecting", sum(limits.left)):
        s = torch.argmin(state.rise() / savings.per_structure(device) ** SAVING_POWER / crowding.factors)
        order.append(int(s))
        state.remove(s)
        state.close(s)
        savings.remove(int(s))
        crowding.remove(int(s))
        closed = limits.remove(s)
        if closed is not None:
            state.close(closed)
    return torch.tensor(order, dtype=torch.long, device=device)


class Crowding:
    """What the price of a structure is divided by: a power of the share of its layer that remains."""

    def __init__(self, structures: Structures, widths: list[int], device: torch.device) -> None:
        self.owner = structures.owner()
        self.device, self.widths, self.left = device, widths, list(widths)
        self.cut = find_cut_layers(structures)
        self.factors = torch.ones(len(structures), dtype=torch.float64, device=device)

    def remove(self, s: int) -> None:
        """Update the factors of the layer of ``s``."""
        layer = int(self.owner[s])
        self.left[layer] -= 1
        if layer in self.cut:
            share = max(self.left[layer], 1) / self.widths[layer]
            self.factors[(self.owner == layer).to(self.device)] = share**CROWDING_POWER


def find_cut_layers(structures: Structures) -> set[int]:
    """Return the layers without whose structures no path leads from the input to the output."""
    owner = structures.owner()
    owners = [owner[ids] if bool((ids >= 0).all()) else owner[:0] for ids in structures.ids]
    found = set()
    for i in range(len(structures.layers)):
        dead = {
            layer.name
            for layer, owned in zip(structures.layers, owners, strict=True)
            if len(owned) and bool((owned == i).all())
        }
        if dead and INPUT not in find_reached(structures.wiring, dead):
            found.add(i)
    return found


# What a removal saves -------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class LayerSavings:
    """A layer whose cost is ``unit * rows * columns``, and what each structure takes from it."""

    unit: float
    rows: float  # that remain
    columns: float
    members: Ids  # (m,) structures with rows or columns here
    row_shares: np.ndarray  # (m,) rows of each
    column_shares: np.ndarray

    def saved(self) -> np.ndarray:
        """(m,) the cost that disappears here with each structure."""
        both = self.row_shares * self.columns + self.column_shares * self.rows - self.row_shares * self.column_shares
        return self.unit * both

    def remove(self, s: int) -> None:
        """Take the rows and columns of a structure away."""
        at = np.flatnonzero(self.members == s)
        self.rows -= float(self.row_shares[at].sum())
        self.columns -= float(self.column_shares[at].sum())
        self.row_shares[at] = self.column_shares[at] = 0


class Savings:
    """The MACs or parameters that each structure would save now; updated as structures are removed."""

    def __init__(self, structures: Structures, flow: Flow, what: str) -> None:
        labels = label_values(structures, flow)
        own = {layer.name: ids.numpy() for layer, ids in zip(structures.layers, structures.ids, strict=True)}
        self.layers = [
            built
            for d in flow.graph.dense.values()
            if (built := _build_layer(d, own.get(d.module), labels, what)) is not None
        ]
        self.touched: dict[int, list[LayerSavings]] = {}
        for layer in self.layers:
            for s in layer.members.tolist():
                self.touched.setdefault(s, []).append(layer)
        self.saved = np.zeros(len(structures))
        for layer in self.layers:
            self.saved[layer.members] += layer.saved()
        self.least = max(self.saved.max(initial=0.0) * 1e-9, 1e-9)

    def per_structure(self, device: torch.device) -> Tensor:
        """(S,) what each structure saves; a structure that saves nothing has the highest price."""
        return torch.from_numpy(np.maximum(self.saved, self.least)).to(device)

    def remove(self, s: int) -> None:
        """Update the savings of all structures that share a layer with ``s``."""
        for layer in self.touched.get(s, ()):
            self.saved[layer.members] -= layer.saved()
            layer.remove(s)
            self.saved[layer.members] += layer.saved()


def _build_layer(d: DenseWeight, own: Ids | None, labels: Ids, what: str) -> LayerSavings | None:
    """Return the savings in a layer; None if no structure has a part in it."""
    rows = own if own is not None and len(own) == len(d.out) else np.full(len(d.out), NOBODY)
    grouped = d.groups > 1  # its columns belong to its rows
    columns = np.full(len(d.into[0]), NOBODY) if grouped else labels[d.into[0]]
    members = np.unique(np.concatenate([rows[rows >= 0], columns[columns >= 0]]))
    if not len(members):
        return None
    unit = d.kernel / d.groups * (d.positions.get("eval", 0.0) if what == "macs" else 1.0)
    shares = [np.array([np.count_nonzero(x == s) for s in members], dtype=float) for x in (rows, columns)]
    return LayerSavings(unit, float(len(d.out)), float(len(d.into[0])), members, *shares)


def label_values(structures: Structures, flow: Flow) -> Ids:
    """(values,) the structure whose removal alone makes a value zero, and all that share its place."""
    removers: dict[str, Ids] = {}
    for layer, ids in zip(structures.layers, structures.ids, strict=True):
        for module in layer.norms or (layer.name,):
            removers[module] = ids.numpy()
    return merge_places(propagate_labels(flow.graph, removers), flow.classes)


def propagate_labels(graph: Graph, removers: Mapping[str, Ids]) -> Ids:
    """Follow labels through the network as zeros spread: module -> (n,) labels of the channels that leave it."""
    labels = np.full(graph.count, NOBODY)
    labels[ZERO] = ALWAYS_ZERO
    for step in graph.steps:
        if isinstance(step, ModuleCall):
            labels[step.out] = _label_call(step, labels, removers.get(step.module))
            continue
        operands = [_merge_labels(labels[x].T) for x in step.operands]
        found = _merge_labels(np.stack(operands)) if step.all else np.full(len(step.out), NOBODY)
        for operand, kills in zip(operands, step.kills, strict=True):
            found = np.where((found == NOBODY) & kills, operand, found)
        labels[step.out] = found
    return labels


def merge_places(labels: Ids, classes: Ids) -> Ids:
    """(values,) the label that all values of a class share: a place is dropped as a whole."""
    order = np.argsort(classes, kind="stable")
    starts = np.flatnonzero(np.diff(classes[order], prepend=-1))
    largest = np.maximum.reduceat(labels[order], starts)
    known = np.where(labels == ALWAYS_ZERO, np.iinfo(labels.dtype).max, labels)[order]  # a zero shares every label
    smallest = np.minimum.reduceat(known, starts)
    merged = np.where(largest == smallest, largest, NOBODY)
    return merged[np.searchsorted(classes[order][starts], classes)]


def _label_call(call: ModuleCall, labels: Ids, own: Ids | None) -> Ids:
    """(m,) the labels of what leaves a layer or a norm."""
    found = labels[call.into]
    if call.through is not None:
        through = np.append(labels[call.through], ALWAYS_ZERO)[call.index]
        found = np.where(through == NOBODY, found, through)
    if own is not None and len(own) == len(call.given):
        here = np.append(own, NOBODY)[call.index]
        found = np.where(here == NOBODY, found, here)
    return found


def _merge_labels(parts: Ids) -> Ids:
    """(n,) from (m, n): the label that all share; constants of zero share every label."""
    first = parts.max(axis=0)
    same = ((parts == first) | (parts == ALWAYS_ZERO)).all(axis=0)
    return np.where(same, first, NOBODY)

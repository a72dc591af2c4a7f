"""What removing structures saves, given those that are already removed."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np

from sosp.graph.channels import DenseWeight, Graph, Ids, ModuleCall
from sosp.graph.flow import Flow
from sosp.graph.labels import ZERO
from sosp.graph.records import Structures

NOBODY, ALWAYS_ZERO = -1, -2  # labels of values that no structure makes zero, and of constants


@dataclass(eq=False)
class LayerSavings:
    """A layer whose cost is ``unit * rows * columns``, and what each structure takes from it."""

    name: str
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

    def saved_together(self, at: np.ndarray, ended: bool) -> float:
        """Return the cost that disappears with some of the members; all of it where the layer gives constants."""
        rows = 0.0 if ended else self.rows - float(self.row_shares[at].sum())
        columns = self.columns - float(self.column_shares[at].sum())
        return self.unit * (self.rows * self.columns - rows * columns)

    def remove(self, at: np.ndarray, ended: bool) -> None:
        """Take the rows and columns of some members away."""
        self.rows -= float(self.row_shares[at].sum())
        self.columns -= float(self.column_shares[at].sum())
        self.row_shares[at] = self.column_shares[at] = 0
        if ended:
            self.rows, self.row_shares[:] = 0.0, 0


class Savings:
    """The cost that each structure would save now; updated as structures are removed.

    ``shares``: what counts as cost, ``{"macs": 1.0}`` or ``{"params": 1.0}``, or both with their weights.
    """

    def __init__(self, structures: Structures, shares: Mapping[str, float]) -> None:
        assert structures.flow is not None
        labels = label_values(structures, structures.flow)
        own = {layer.name: ids.numpy() for layer, ids in zip(structures.layers, structures.ids, strict=True)}
        self.layers = [
            built
            for d in structures.flow.graph.dense.values()
            if (built := _build_layer(d, own.get(d.module), labels, shares)) is not None
        ]
        self.named = {layer.name: layer for layer in self.layers}
        self.touched: dict[int, list[LayerSavings]] = {}
        for layer in self.layers:
            for s in layer.members.tolist():
                self.touched.setdefault(s, []).append(layer)
        self.saved = np.zeros(len(structures))
        for layer in self.layers:
            self.saved[layer.members] += layer.saved()
        self.least = max(self.saved.max(initial=0.0) * 1e-9, 1e-9)
        self.picked = np.zeros(len(structures), dtype=bool)

    def per_structure(self) -> np.ndarray:
        """(S,) what each structure saves; a structure that saves nothing has the highest price."""
        return np.maximum(self.saved, self.least)

    def count_saved(self, together: Ids, ends: Collection[str] = ()) -> float:
        """Return what structures save together, and the layers that give nothing but constants without them."""
        layers = self._find_touched(together, ends)
        self.picked[together] = True
        found = sum(layer.saved_together(self.picked[layer.members], layer.name in ends) for layer in layers)
        self.picked[together] = False
        return max(found, self.least)

    def remove(self, together: Ids, ends: Collection[str] = ()) -> None:
        """Update the savings of all structures that share a layer with these."""
        self.picked[together] = True
        for layer in self._find_touched(together, ends):
            self.saved[layer.members] -= layer.saved()
            layer.remove(self.picked[layer.members], layer.name in ends)
            self.saved[layer.members] += layer.saved()
        self.picked[together] = False

    def _find_touched(self, together: Ids, ends: Collection[str]) -> list[LayerSavings]:
        found = {id(layer): layer for s in together.tolist() for layer in self.touched.get(s, ())}
        found |= {id(layer): layer for name in ends if (layer := self.named.get(name)) is not None}
        return list(found.values())


def _build_layer(d: DenseWeight, own: Ids | None, labels: Ids, shares: Mapping[str, float]) -> LayerSavings | None:
    """Return the savings in a layer; None if no structure has a part in it."""
    rows = own if own is not None and len(own) == len(d.out) else np.full(len(d.out), NOBODY)
    grouped = d.groups > 1  # its columns belong to its rows
    columns = np.full(len(d.into[0]), NOBODY) if grouped else labels[d.into[0]]
    members = np.unique(np.concatenate([rows[rows >= 0], columns[columns >= 0]]))
    if not len(members):
        return None
    each = shares.get("macs", 0.0) * d.positions.get("eval", 0.0) + shares.get("params", 0.0)
    counts = [np.array([np.count_nonzero(x == s) for s in members], dtype=float) for x in (rows, columns)]
    return LayerSavings(
        d.module, d.kernel / d.groups * each, float(len(d.out)), float(len(d.into[0])), members, *counts
    )


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
        through = np.append(_merge_labels(labels[call.through].T), ALWAYS_ZERO)[call.index]
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

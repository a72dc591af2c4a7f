"""Which channels a network keeps under a mask: the smallest layout in which everything that is needed has its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sosp.errors import check_choice, check_whole_number
from sosp.graph.channels import DenseWeight, FixedAxis, Graph, Ids, ModuleCall

JOINS = ("scatter", "zeros")


@dataclass(frozen=True)
class LayoutStyle:
    """How a network is laid out where there is a choice."""

    join: str = "scatter"  # a layer with fewer channels than its stream: "scatter" them, or fill up with "zeros"
    round_to: int = 1  # widths of the inputs of layers are multiples of this, where there are enough channels

    def __post_init__(self) -> None:
        check_choice("join", self.join, JOINS)
        check_whole_number("round_to", self.round_to)


@dataclass(frozen=True)
class Layout:
    """What stays: a class of values as a whole, in every tensor it stands in."""

    counts: np.ndarray  # (values,) how often each value occurs: 0 or 1, more in a widened network
    zero: np.ndarray  # (values,) which are identically zero
    needed: np.ndarray  # (values,) which stay because something needs them, not only so that no tensor is empty
    emptied: frozenset[str]  # weights of layers that nothing needs any more, or that give nothing but zeros
    filled: frozenset[str] = frozenset()  # modules that compute their removed channels, with weights of zero

    def zeroed(self, cut: ModuleCall) -> bool:
        """What leaves here is zero by its weights; nothing has to be put there."""
        return cut.module in self.filled


def make_full_layout(count: int) -> Layout:
    """Everything stays."""
    ones = np.ones(count, dtype=np.int64)
    return Layout(ones, ones == 0, ones == 1, frozenset())


def solve_layout(
    graph: Graph,
    classes: Ids,
    pinned: Ids,
    fixed: Sequence[FixedAxis],
    removed: Mapping[str, np.ndarray],
    style: LayoutStyle,
) -> Layout:
    """Return the layout when ``removed[module]`` (n,) of a module's output channels are set to zero."""
    zero = graph.zeros(dict(removed))
    work = LayoutSolver(graph, classes, fixed, zero, style)
    work.need(np.array([0, 1]))
    work.need(pinned)
    work.emptied = frozenset(d.weight for d in graph.dense.values() if work.gives_zeros(d))
    work.apply_rules()
    needed = work.kept[classes]
    work.emptied |= frozenset(
        d.weight for d in graph.dense.values() if d.narrow and d.module in graph.calls and not needed[d.out].any()
    )
    while work.fill() or work.fill_up():
        work.apply_rules()
    filled = frozenset(c.module for c in work.cuts if work.fillable(c)) if style.join == "zeros" else frozenset()
    return Layout(work.kept[classes].astype(np.int64), zero, needed, work.emptied, filled)


class LayoutSolver:
    """Grow the set of kept classes until every rule holds; it only grows, so the order does not matter."""

    def __init__(
        self, graph: Graph, classes: Ids, fixed: Sequence[FixedAxis], zero: np.ndarray, style: LayoutStyle
    ) -> None:
        self.graph, self.classes, self.fixed, self.zero, self.style = graph, classes, fixed, zero, style
        self.kept = np.zeros(graph.count, dtype=bool)  # at the class's smallest member
        self.emptied: frozenset[str] = frozenset()
        self.layers = {d.module: d for d in graph.dense.values()}
        self.cuts = [s for s in reversed(graph.steps) if isinstance(s, ModuleCall)]
        self.dense = list(reversed(graph.dense.values()))
        self.tensors = list(
            {id(x): x for r in graph.records.values() for op in r for x in op.out if x is not None}.values()
        )

    def need(self, ids: Ids) -> None:
        self.kept[self.classes[ids]] = True

    def has(self, ids: Ids) -> np.ndarray:
        return self.kept[self.classes[ids]]

    def apply_rules(self) -> None:
        before = -1
        while (now := int(self.kept.sum())) != before:
            before = now
            for cut in self.cuts:
                self.cut(cut)
            for d in self.dense:
                self.layer(d)
            for box in self.graph.boxes:
                self.box(box.core.numpy())
            for pieces in self.graph.even:
                self.even(pieces)
            for labels, axis in self.fixed:
                self.whole_axis(labels.core.numpy(), axis)

    def cut(self, cut: ModuleCall) -> None:
        """What is kept behind it and not zero must be computed; what is computed and not zero goes on."""
        live = ~self.zero[cut.out]
        self.need(cut.into[self.has(cut.out) & live])
        self.need(cut.out[self.has(cut.into) & live])

    def layer(self, d: DenseWeight) -> None:
        rows = self.has(d.out).reshape(d.groups, -1)
        if not rows.any() or d.weight in self.emptied or not d.into:
            return
        alive = rows.any(axis=1)
        for into in d.into:
            into = into.reshape(d.groups, -1)
            self.need(into[alive][~self.zero[into[alive]]])
        if d.groups == 1:
            if not self.has(d.into[0]).any():
                self.need(d.into[0][:1])
        else:
            self.groups(d.out.reshape(d.groups, -1), d.into[0].reshape(d.groups, -1))

    def gives_zeros(self, d: DenseWeight) -> bool:
        """It has no bias, and every channel that it reads is zero."""
        own = d.narrow and not d.biased and d.weight not in self.graph.slices
        own = own and len(d.into) == len(self.graph.calls.get(d.module, ()))  # no other layer has the same weight
        return own and len(d.into) > 0 and all(self.zero[into].all() for into in d.into)

    def groups(self, out: Ids, into: Ids) -> None:
        """Groups of a convolution have equal widths: fill up the shorter ones, also those that are only fed."""
        present = self.has(out).any(axis=1) | self.has(into).any(axis=1)
        for ids in (out, into):
            self.even(ids[present], least=1)

    def even(self, pieces: Ids, least: int = 0) -> None:
        """(pieces, n): as many stay of each; the first ones come back where there are too few."""
        kept = self.has(pieces)
        counts = kept.sum(axis=1)
        missing = max(int(counts.max(initial=0)), least) - counts
        self.need(pieces[~kept & (np.cumsum(~kept, axis=1) <= missing[:, None])])

    def box(self, core: np.ndarray) -> None:
        """What stays of an array with several labelled axes must be a choice along each axis."""
        kept = self.has(core)
        if kept.all() or not kept.any():
            return
        whole = np.ones_like(kept)
        for d in range(core.ndim):
            others = tuple(q for q in range(core.ndim) if q != d)
            whole &= kept.any(axis=others, keepdims=True)
        self.need(core[whole])

    def whole_axis(self, core: np.ndarray, axis: int) -> None:
        """Something stays at every place of this axis."""
        rows = np.moveaxis(core, axis, 0).reshape(core.shape[axis], -1)
        self.need(rows[~self.has(rows).any(axis=1), 0])

    def fill_up(self) -> bool:
        """Round widths up; where zeros are to be computed, keep a row for every channel of the stream."""
        before = int(self.kept.sum())
        for d in self.dense:
            if self.style.round_to > 1 and d.groups == 1 and d.into and self.has(d.out).any():
                ids = np.unique(self.classes[d.into[0]])
                kept = self.kept[ids]
                self.need(ids[~kept][: -int(kept.sum()) % self.style.round_to])
        if self.style.join == "zeros":
            for cut in self.cuts:
                if self.fillable(cut):
                    self.need(cut.into[self.has(cut.out)])
        return int(self.kept.sum()) != before

    def fillable(self, cut: ModuleCall) -> bool:
        """Its weights can be set to zero, and zero weights give zero: a layer, or a norm with a scale and a shift."""
        layer = self.layers.get(cut.module)
        if not self.has(cut.given).any() or not np.array_equal(cut.index, np.arange(len(cut.given))):
            return False
        if self.read_elsewhere(cut.module, layer):
            return False
        if layer is not None:
            if len(layer.into) != len(self.graph.calls[cut.module]):  # another layer has the same weight
                return False
            return layer.narrow and layer.weight not in self.emptied and not (layer.transposed and layer.groups > 1)
        return all(f"{cut.module}.{key}" in self.graph.slices for key in ("weight", "bias"))

    def read_elsewhere(self, module: str, layer: DenseWeight | None) -> bool:
        """The code takes its weights by hand as well: there they are no zeros."""
        own = {f"{module}.weight", f"{module}.bias"}
        if layer is not None:
            own |= {layer.weight, layer.bias or layer.weight}
            if layer.weight in self.graph.slices:
                return True
        return any(self.graph.used.get(name, set()) - {module} for name in own)

    def fill(self) -> bool:
        """A tensor keeps at least one channel, even if nothing needs it: many ops refuse empty ones."""
        before = int(self.kept.sum())
        for x in self.tensors:
            core = x.core.numpy()
            if core.size and not self.has(core).any():
                self.need(core.reshape(-1)[:1])
        return int(self.kept.sum()) != before

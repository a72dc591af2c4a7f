"""Record the channels of a network: which exist, which share a place, when one is zero, and which tensor has which.

Every channel that an op or a layer gives out is a *value* with a number. Values that must stand at the same place
of the same axis (the two sides of an add, a norm's input and its scale) are joined in a *class*; a class is kept or
dropped as a whole. Whether a value is zero follows from the mask, value by value, in the order of the network.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch import Tensor, nn

from sosp.core.layers import find_layer_type
from sosp.graph.dataflow import Event
from sosp.graph.labels import OPAQUE, ZERO, Labels, label_axis
from sosp.graph.ops import find_user_line

Ids = np.ndarray  # of int64
FixedAxis = tuple[Labels, int]  # an axis of a box whose size the code requires


@dataclass(frozen=True)
class Combination:
    """Values computed place by place from others: zero where a killing operand is, or where all operands are."""

    out: Ids  # (n,)
    operands: tuple[Ids, ...]  # (n, m) each; an operand is zero where all its m values are
    kills: tuple[bool, ...]
    all: bool

    def zero(self, parts: list[np.ndarray]) -> np.ndarray:
        """(n,) from (n,) per operand."""
        gone = np.logical_and.reduce(parts) if self.all else np.zeros(len(self.out), dtype=bool)
        for part, kills in zip(parts, self.kills, strict=True):
            if kills:
                gone = gone | part
        return gone


@dataclass(frozen=True)
class ModuleCall:
    """One call of a layer or a norm: its output may be zeroed, narrowed and scattered, channel by channel."""

    module: str
    mode: str
    axis: int
    given: Ids  # (n,) what it computed
    out: Ids  # (m,) what leaves it
    index: Ids  # (m,) the place in ``given`` each one comes from, -1 for a zero: 0..n-1 unless it scatters already
    through: Ids | None  # (n, m) of a norm: the input channels of the group of each; zero behind it if all are zero

    @property
    def into(self) -> Ids:
        """(m,) the value each one comes from."""
        return np.where(self.index >= 0, self.given[self.index], ZERO)

    def forced(self, removed: np.ndarray | None, zero: np.ndarray) -> np.ndarray:
        """(m,) what is set to zero here, whatever was computed."""
        gone = np.zeros(len(self.given) + 1, dtype=bool)
        gone[-1] = True  # index -1
        if removed is not None:
            gone[:-1] |= removed
        if self.through is not None:
            gone[:-1] |= zero[self.through].all(axis=1)
        return gone[self.index]


@dataclass
class Slices:
    """A parameter or buffer whose axis follows the channels."""

    name: str
    axis: int
    ids: Ids


@dataclass
class DenseWeight:
    """A weight that mixes channels: a convolution, a linear layer."""

    weight: str
    module: str  # the layer it belongs to; "" if it is used by hand
    bias: str | None
    out_axis: int  # of the weight
    in_axis: int
    groups: int
    transposed: bool
    out: Ids  # (n_out,)
    into: list[Ids] = field(default_factory=list)  # (n_in,) per call
    positions: dict[str, float] = field(default_factory=dict)  # mode -> how often a filter is applied to one example
    kernel: int = 1  # elements of the weight per pair of channels
    biased: bool = False  # a bias is added, also one that is computed
    narrow: bool = True  # the weight is a parameter of its own, not computed from others


@dataclass(frozen=True)
class Pin:
    """Channels that must all stay, and the line of code that says so."""

    ids: Ids
    op: str
    where: str
    why: str


@dataclass(frozen=True)
class Decision:
    """The code looked at numbers that depend on the network's input: what it does next may depend on them."""

    op: str
    where: str
    module: str
    shape: bool  # not at the numbers themselves: how many there are (``nonzero``)
    given: bool  # at whole numbers of the input alone, as masks of sentences are: no layer has a part in them


@dataclass(frozen=True)
class OpRecord:
    """One op of the forward pass: what it was given and what came out."""

    name: str
    given: tuple[Labels | None, ...]
    out: tuple[Labels | None, ...]
    shapes: tuple[tuple[int, ...], ...]  # of the outputs
    spec: Any  # how the outputs hang together: a tensor, a tuple of them
    dtypes: tuple[Any, ...]
    moves: bool  # it only rearranges elements
    where: str
    module: str
    numbers: tuple[float, ...] = ()  # that it computed with


@dataclass
class Graph:
    """Everything seen of a network's channels."""

    count: int = 2  # values; OPAQUE and ZERO are there from the start
    parametric: bytearray = field(default_factory=lambda: bytearray(2))  # per value: it is a parameter, never zero
    ties: list[tuple[Ids, Ids]] = field(default_factory=list)
    steps: list[Combination | ModuleCall] = field(default_factory=list)
    slices: dict[str, Slices] = field(default_factory=dict)
    dense: dict[str, DenseWeight] = field(default_factory=dict)
    pins: list[Pin] = field(default_factory=list)
    records: dict[str, list[OpRecord]] = field(default_factory=dict)  # mode -> ops in order
    boxes: list[Labels] = field(default_factory=list)  # labels along several axes: what stays must be a box
    even: list[Ids] = field(default_factory=list)  # (pieces, n) a tensor is cut into: as many stay of each
    calls: dict[str, list[ModuleCall]] = field(default_factory=dict)  # module -> its cuts
    reads: list[tuple[str, str, Ids]] = field(default_factory=list)  # (mode, module, labels) whose sizes were read
    sized: list[tuple[str, str, str]] = field(default_factory=list)  # the same of parameters: (mode, module, name)
    decisions: list[Decision] = field(default_factory=list)
    ran: set[str] = field(default_factory=set)  # modules
    used: dict[str, set[str]] = field(default_factory=dict)  # parameter -> the modules in which an op took it
    events: dict[str, list[Event]] = field(default_factory=dict)  # mode -> what ops and modules take and give, in order
    leaving: list[tuple[str, Labels]] = field(default_factory=list)  # (module, what it returned), real numbers only

    def add_values(self, n: int, parametric: bool = False) -> Ids:
        """``n`` new values."""
        self.count += n
        self.parametric.extend(bytes([parametric]) * n)
        return np.arange(self.count - n, self.count)

    def tie(self, a: Ids, b: Ids) -> None:
        """These share a place."""
        a, b = np.broadcast_arrays(a, b)
        if not np.array_equal(a, b):
            self.ties.append((a.reshape(-1), b.reshape(-1)))

    def is_parametric(self, ids: Ids) -> bool:
        """All of these are elements of parameters."""
        return bool(np.frombuffer(self.parametric, dtype=np.uint8)[ids].all())

    def classes(self, extra: list[tuple[Ids, Ids]] | None = None) -> Ids:
        """(values,) the class of each value: the smallest value tied to it."""
        pairs = [*self.ties, *(extra or [])]
        if not pairs:
            return np.arange(self.count)
        a = np.concatenate([p[0] for p in pairs])
        b = np.concatenate([p[1] for p in pairs])
        return find_components(self.count, a, b)

    def zeros(self, removed: dict[str, np.ndarray]) -> np.ndarray:
        """(values,) which are identically zero when ``removed[module]`` (n,) of its output is set to zero."""
        zero = np.zeros(self.count, dtype=bool)
        zero[ZERO] = True
        for step in self.steps:
            if isinstance(step, ModuleCall):
                zero[step.out] = zero[step.into] | step.forced(removed.get(step.module), zero)
                continue
            zero[step.out] = step.zero([zero[x].all(axis=1) for x in step.operands])
        return zero


def pair_modes(graph: Graph) -> tuple[Ids, Ids] | None:
    """Return the values of the two modes, place by place; None if the code does not do the same in both."""
    if len(graph.records) != 2 or graph.decisions:
        return None
    seen = [_list_operations(graph, mode) for mode in graph.records]
    if seen[0][0] != seen[1][0]:
        return None
    none = np.zeros(0, dtype=int)
    one, other = (np.concatenate([none, *ids]) for _, ids in seen)
    return one, other


def _list_operations(graph: Graph, mode: str) -> tuple[list[Any], list[Ids]]:
    """What the code did in a mode, without the numbers of the values; and those numbers, in order."""
    done: list[Any] = []
    ids: list[Ids] = []
    for r in graph.records[mode]:
        labels = [*r.given, *r.out]
        if not any(labels) and not any(r.shapes) and not any(d is None or d.is_floating_point for d in r.dtypes):
            continue  # a single whole number, such as a batch norm's count of batches
        shapes = [None if x is None else (x.shape, tuple(x.core.shape)) for x in labels]
        done.append((r.name, shapes, r.shapes, r.spec, r.dtypes, r.moves, r.where, r.module, r.numbers))
        ids += [x.core.numpy().reshape(-1) for x in labels if x is not None]
    done += [(module, len(read)) for m, module, read in graph.reads if m == mode]
    done += [(module, name) for m, module, name in graph.sized if m == mode]
    ids += [read for m, _, read in graph.reads if m == mode]
    return done, ids


def find_components(count: int, a: Ids, b: Ids) -> Ids:
    """(count,) the smallest member of each node's connected component: pointers jump to the smallest neighbour."""
    root = np.arange(count)
    while True:
        low = np.minimum(root[a], root[b])
        before = root.copy()
        np.minimum.at(root, root[a], low)
        np.minimum.at(root, root[b], low)
        while not np.array_equal(root[root], root):
            root = root[root]
        if np.array_equal(root, before):
            return root


# Which tensor has which labels ----------------------------------------------------------------------------------------

# What a layer's weight is computed from, where it is not a parameter itself (weight norm, spectral norm).
WEIGHTS = frozenset({"weight", "original0", "original1", "original", "weight_v", "weight_g", "weight_orig"})


class TensorRegistry:
    """What is known of the tensors seen so far."""

    def __init__(self, model: nn.Module, graph: Graph, mode: str, values: dict[str, Tensor], examples: int) -> None:
        self.graph, self.mode, self.examples = graph, mode, examples
        self.held: dict[int, tuple[Tensor, Labels | None]] = {}  # id -> the tensor, kept alive, and its labels
        self.families: dict[int, list[int]] = {}  # memory -> the tensors in it
        self.names: dict[int, str] = {}  # id of a parameter or buffer -> its first name
        for name, x in [*model.named_parameters(), *model.named_buffers()]:
            self.names.setdefault(id(x), name)
        self.values = values  # the numbers in integer buffers, by name
        self.modules = dict(model.named_modules())
        self.stack: list[str] = []  # the modules we are in
        self.turned: dict[int, Tensor] = {}  # id of a transposed weight -> the weight
        self.lost: dict[int, str] = {}  # id of a tensor -> the op that made it of channels which it mixed
        self.fed: set[int] = set()  # ids of the tensors that depend on the network's input
        self.computed: set[int] = set()  # of those that more than its whole numbers have a part in

    @property
    def module(self) -> str:
        return self.stack[-1] if self.stack else ""

    def feed(self, given: list[Tensor], outputs: list[Tensor]) -> None:
        """What is computed from a tensor that depends on the input depends on it as well."""
        if any(id(x) in self.fed for x in given):
            self.fed.update(id(x) for x in outputs)
            if any(id(x) in self.computed or (id(x) in self.names and x.is_floating_point()) for x in given):
                self.computed.update(id(x) for x in outputs)

    def begin(self, x: Tensor) -> None:
        """An input of the network."""
        self.put(x, None)
        self.fed.add(id(x))
        if x.is_floating_point() or x.is_complex():
            self.computed.add(id(x))

    def add_decision(self, op: str, tensors: list[Tensor], shape: bool = False) -> None:
        """The code looks at these, by an op that gives it numbers or as many rows as it finds."""
        if any(id(x) in self.fed for x in tensors):
            given = not any(id(x) in self.computed for x in tensors)
            self.graph.decisions.append(Decision(op, find_user_line(), self.module, shape, given))

    def find_mixing_op(self, leaves: Sequence[Any]) -> str:
        """The op that mixed the channels of which one of these was made; nothing where there is none."""
        return next((self.lost[id(x)] for x in leaves if isinstance(x, Tensor) and id(x) in self.lost), "")

    def put(self, x: Tensor, labels: Labels | None) -> Labels | None:
        """Remember the labels of a tensor."""
        if id(x) not in self.held:
            self.families.setdefault(x.untyped_storage()._cdata, []).append(id(x))
        self.held[id(x)] = (x, labels)
        return labels

    def seen(self, x: Tensor) -> Labels | None:
        """The labels of a tensor, if it has some already."""
        return self.held[id(x)][1] if id(x) in self.held else None

    def labels(self, x: Tensor) -> Labels | None:
        """The labels of a tensor; a parameter with one long axis gets its own when it is first used."""
        if id(x) in self.held:
            return self.held[id(x)][1]
        return self._parameter(x) if id(x) in self.names else None

    def _parameter(self, x: Tensor) -> Labels | None:
        name = self.names[id(x)]
        known = self.graph.slices.get(name)
        if known is None and name in self.graph.dense:  # a layer's weight, also used by hand: its rows as they are
            layer = self.graph.dense[name]
            known = self.graph.slices[name] = Slices(name, layer.out_axis, layer.out)
            for into in layer.into:
                self.pin(into, "weight", "the code also uses the weight directly, with all of its columns")
        elif known is None:
            axis = self._long_axis(name, x)
            if axis is None:
                return None
            known = self.graph.slices[name] = Slices(name, axis, self.graph.add_values(x.shape[axis], parametric=True))
        return self.put(x, label_axis(known.ids, known.axis, x.shape))

    def _long_axis(self, name: str, x: Tensor) -> int | None:
        """The one axis that can be that of channels; the rows of a weight from which a layer's is computed."""
        long = [d for d, n in enumerate(x.shape) if n > 1]
        if x.dim() == 1:
            return 0
        if len(long) == 1 and x.is_floating_point():
            return long[0]
        path, _, key = name.rpartition(".")
        while path.endswith("parametrizations") or ".parametrizations." in path:
            path = path.rpartition(".")[0]
        kind = find_layer_type(self.modules[path]) if path in self.modules else None
        return kind.weight_axis if kind is not None and key in WEIGHTS and x.dim() > kind.weight_axis else None

    def channels(self, x: Tensor, axis: int) -> Ids | None:
        """(n,) the labels along an axis; OPAQUE for a tensor without; None where other axes are labelled too."""
        labels = self.labels(x)
        return np.full(x.shape[axis], OPAQUE) if labels is None else labels.along(axis)

    def layer_of(self, weight: Tensor) -> str | None:
        """The layer that a weight belongs to."""
        path = self.names[id(weight)].rpartition(".")[0]
        return path if path in self.modules and find_layer_type(self.modules[path]) else None

    def pin(self, ids: Ids, op: str, why: str, where: str | None = None) -> None:
        """These must stay, because of the user's line that runs now or another one."""
        ids = np.unique(ids)
        ids = ids[ids > OPAQUE]
        if len(ids):
            self.graph.pins.append(Pin(ids, op, where or find_user_line(), why))

    def pin_tensor(self, x: Any, op: str, why: str, where: str | None = None) -> None:
        labels = self.labels(x) if isinstance(x, Tensor) else None
        if labels is not None:
            self.pin(labels.numbers(), op, why, where)

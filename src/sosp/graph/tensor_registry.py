"""The labels of every tensor of a forward pass, and the graph they are written into."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn

from sosp.core.layer_types import find_layer_type
from sosp.graph.channels import OPAQUE, Decision, Graph, Ids, Pin, Slices
from sosp.graph.labels import Labels, label_axis
from sosp.graph.ops import find_user_line

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
                self.pin(into, "weight", "the weight is also used by hand, all of its columns")
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

"""The ops that mix channels by a weight: convolutions, linear layers, Hugging Face's Conv1D; and embeddings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from sosp.graph.channels import OPAQUE, Combination, DenseWeight, Ids, Slices
from sosp.graph.labels import Labels, label_axis
from sosp.graph.op_probe import OpCall
from sosp.graph.ops import CONVOLUTIONS, TRANSPOSED, name_arguments
from sosp.graph.tensor_registry import TensorRegistry

DENSE = CONVOLUTIONS | TRANSPOSED | {"linear", "addmm"}


@dataclass(frozen=True)
class DenseCall:
    """One call of such an op."""

    op: str
    x: Tensor
    weight: Tensor
    bias: Tensor | None
    groups: int
    shape: tuple[int, ...]  # of the output
    axis: int  # of the channels, in input and output

    @property
    def width(self) -> int:
        return self.shape[self.axis % len(self.shape)]

    @property
    def transposed(self) -> bool:
        return self.op in TRANSPOSED

    @property
    def out_axis(self) -> int:
        """Of the weight."""
        return 1 if self.transposed or self.op == "addmm" else 0

    @property
    def kernel(self) -> int:
        """Elements of the weight per pair of channels."""
        return self.weight.numel() * self.groups // (self.width * self.x.shape[self.axis])

    def positions(self, examples: int) -> float:
        """How often a filter is applied to one example."""
        sizes = tuple(self.x.shape) if self.transposed else self.shape
        return float(np.prod(sizes) / sizes[self.axis % len(sizes)] / examples)


def label_dense_op(registry: TensorRegistry, call: OpCall, args: Any, kwargs: Any) -> Labels | None:
    """The labels of the output; None where it is no such op after all."""
    given = name_arguments(call.name, args, kwargs)
    x, weight = given["input"], given["weight"]
    axis = -1 if call.name in ("linear", "addmm") else 1 if x.dim() == weight.dim() else 0  # 0: without a batch
    use = DenseCall(call.name, x, weight, given.get("bias"), given.get("groups", 1), call.shapes[0], axis)
    if call.name == "addmm" and (
        id(weight) not in registry.names or not registry.layer_of(weight) or {"alpha", "beta"} & set(kwargs)
    ):
        return None
    into = registry.channels(x, axis)
    if into is None:
        into = _merge_axes(registry, x, axis)
    if id(weight) not in registry.names:
        return _label_computed_weight(registry, use)
    layer = _layer(registry, use, into)
    if layer is None:
        return label_axis(np.full(use.width, OPAQUE), axis, use.shape)
    layer.into.append(into)
    layer.positions[registry.mode] = layer.positions.get(registry.mode, 0.0) + use.positions(registry.examples)
    return label_axis(_output(registry, use, layer, into), axis, use.shape)


def _merge_axes(registry: TensorRegistry, x: Tensor, axis: int) -> Ids:
    """(n,) where a channel is made of several (pixel shuffle, patches): one value each, all or none of which stay."""
    labels = registry.labels(x)
    assert labels is not None
    sizes = list(labels.core.shape)
    sizes[axis] = x.shape[axis]
    rows = np.moveaxis(labels.core.expand(sizes).numpy(), axis, 0).reshape(x.shape[axis], -1)
    into = registry.graph.add_values(len(rows))
    registry.graph.tie(into[:, None], rows)
    registry.graph.steps.append(Combination(into, (rows,), (True,), False))
    return into


def _layer(registry: TensorRegistry, use: DenseCall, into: Ids) -> DenseWeight | None:
    """What is known of the weight; None where it was used in another way before."""
    graph, name = registry.graph, registry.names[id(use.weight)]
    layer = graph.dense.get(name)
    if layer is None:
        bias = registry.names.get(id(use.bias)) if use.bias is not None else None
        layer = graph.dense[name] = DenseWeight(
            name, registry.layer_of(use.weight) or "", bias, use.out_axis, 1 - use.out_axis,
            use.groups, use.transposed, graph.add_values(use.width), kernel=use.kernel,
        )  # fmt: skip
    elif (layer.out_axis, layer.groups) != (use.out_axis, use.groups) or len(layer.out) != use.width:
        for ids in (layer.out, into, *layer.into):
            registry.pin(ids, use.op, "one weight is used in two ways")
        return None
    for other in layer.into:
        graph.tie(other, into)
    raw = graph.slices.get(name)
    if raw is not None and raw.axis == layer.in_axis:  # an embedding tied to the output layer
        graph.tie(raw.ids, into)
    elif raw is not None:
        graph.tie(raw.ids, layer.out)
        registry.pin(into, use.op, "the weight is also used by hand, all of its columns")
    return layer


def _output(registry: TensorRegistry, use: DenseCall, layer: DenseWeight, into: Ids) -> Ids:
    if use.bias is not None:
        _tie_bias(registry, use, layer.out)
    elif use.groups > 1 and use.groups == len(into):  # depthwise without bias: nothing in, nothing out
        out = registry.graph.add_values(use.width)
        registry.graph.tie(out, layer.out)
        source = np.repeat(into, use.width // use.groups)
        registry.graph.steps.append(Combination(out, (source[:, None],), (True,), False))
        return out
    return layer.out


def _tie_bias(registry: TensorRegistry, use: DenseCall, out: Ids) -> None:
    assert use.bias is not None
    ids = registry.channels(use.bias, 0)
    if ids is None or len(ids) != len(out):
        registry.pin(out, use.op, "its bias is not one number per channel")
    else:
        registry.graph.tie(ids, out)


def _label_computed_weight(registry: TensorRegistry, use: DenseCall) -> Labels:
    """A weight that the code computes: its rows may follow the channels of what it is computed from."""
    registry.pin_tensor(use.x, use.op, "its weight is computed: no column of it can be dropped")
    rows = registry.channels(use.weight, use.out_axis)
    if rows is None or len(rows) != use.width or use.groups > 1:
        registry.pin_tensor(use.weight, use.op, "its weight is computed")
        rows = np.full(use.width, OPAQUE)
    if use.bias is not None:
        _tie_bias(registry, use, rows)
    key = f"{registry.module}:{use.op}"
    into = np.full(use.x.shape[use.axis], OPAQUE)
    layer = registry.graph.dense.setdefault(
        key,
        DenseWeight(
            key, registry.module, None, use.out_axis, 1 - use.out_axis, use.groups, use.transposed,
            rows, [into], kernel=use.kernel, narrow=False,
        ),
    )  # fmt: skip
    layer.positions[registry.mode] = layer.positions.get(registry.mode, 0.0) + use.positions(registry.examples)
    return label_axis(rows, use.axis, use.shape)


def label_embedding(registry: TensorRegistry, call: OpCall, args: Any, kwargs: Any) -> Labels | None:
    """Rows picked by number: the channels are the columns of the table."""
    table = args[1] if len(args) > 1 else kwargs["weight"]
    name = registry.names.get(id(table))
    if name is None:
        return None
    known = registry.graph.slices.get(name)
    if known is None:
        known = registry.graph.slices[name] = Slices(name, 1, registry.graph.add_values(table.shape[1]))
        for into in registry.graph.dense[name].into if name in registry.graph.dense else []:
            registry.graph.tie(into, known.ids)
    return label_axis(known.ids, -1, call.shapes[0])

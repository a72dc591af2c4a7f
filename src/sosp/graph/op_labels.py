"""Label the outputs of layers, which mix channels by a weight, and of ops that treat channels one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sosp.graph.channels import Combination, DenseWeight, Ids, Slices, TensorRegistry
from sosp.graph.labels import OPAQUE, Labels, label_axis
from sosp.graph.ops import CONVOLUTIONS, TRANSPOSED, OpCall, SlicedOp, name_arguments, probe_slices

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
            use.groups, use.transposed, graph.add_values(use.width), kernel=use.kernel, biased=use.bias is not None,
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
        registry.pin(into, use.op, "the code also uses the weight directly, with all of its columns")
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
    registry.pin_tensor(use.x, use.op, "its weight is computed, so no column of it can be removed")
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


def label_group_norm(registry: TensorRegistry, call: OpCall, args: Any, kwargs: Any) -> Labels | None:
    """The channels of a group stay or go together; None where they cannot be followed or form one group."""
    given = dict(zip(["input", "num_groups", "weight", "bias", "eps"], args, strict=False)) | kwargs
    x, groups = given["input"], given["num_groups"]
    ids = registry.channels(x, 1) if registry.labels(x) is not None else None
    parameters = [p for key in ("weight", "bias") if (p := given.get(key)) is not None]
    scales = [registry.channels(p, 0) for p in parameters]
    if (
        ids is None
        or groups < 2
        or any(
            s is None or len(s) != len(ids) or id(p) not in registry.names
            for p, s in zip(parameters, scales, strict=True)
        )
    ):
        return None
    together = spread_groups(ids, groups)
    out = registry.graph.add_values(len(ids))
    registry.graph.tie(together[:, :1], together)
    for other in (out, *(s for s in scales if s is not None)):
        registry.graph.tie(ids, other)
    registry.graph.steps.append(Combination(out, (together,), (given.get("bias") is None,), False))
    return label_axis(out, 1, call.shapes[0])


def spread_groups(ids: Ids, groups: int) -> Ids:
    """(n, m) the channels of the group of each of n channels."""
    return np.repeat(ids.reshape(groups, -1), len(ids) // groups, axis=0)


# Ops that treat channels one by one -----------------------------------------------------------------------------------

Pairs = tuple[tuple[int, int], ...]  # (operand, its axis)
MOST = 27  # combinations of axes that are tried


def label_channelwise_op(
    registry: TensorRegistry, call: OpCall, given: dict[int, Labels | None]
) -> list[Labels] | None:
    """The labels of the outputs, if the op can be sliced along labelled axes; None if it cannot."""
    labelled = {k: x for k, x in given.items() if x is not None and x.varying}
    if not labelled:
        return None
    for k in _find_spread_parameters(registry, labelled):
        registry.pin(labelled.pop(k).numbers(), call.name, "one of its channels meets one of every head")
    alone = len(labelled) == 1 and len(next(iter(labelled.values())).varying) > 1
    out = (
        _label_outputs(registry, call, labelled) if alone else None
    )  # its parameters may stand across: rotary embeddings
    if out is None:
        labelled |= _parameters(registry, call, given, labelled)
        out = _label_outputs(registry, call, labelled)
    if out is not None:
        for k, x in given.items():  # one channel that meets many of another tensor
            if x is not None and not x.varying and k not in labelled:
                registry.pin(x.numbers(), call.name, "one channel is spread over many")
    return out


def _find_spread_parameters(registry: TensorRegistry, labelled: dict[int, Labels]) -> list[int]:
    """Operands made of parameters, each channel of which meets many: rotary embeddings, the same for all heads.

    Tied to them, a channel of one head could only go with those of all heads, in all layers.
    """
    axes = {k: {d - len(x.shape) for d in x.varying} for k, x in labelled.items()}
    fixed = {k for k, x in labelled.items() if registry.graph.is_parametric(x.numbers())}
    heads = {k for k in axes.keys() - fixed if len(labelled[k].numbers()) == labelled[k].core.numel()}
    return [k for k in fixed if any(axes[k] < axes[other] for other in heads)]


def _label_outputs(registry: TensorRegistry, call: OpCall, labelled: dict[int, Labels]) -> list[Labels] | None:
    """The labels of the outputs, from operands that are all labelled along the axes that are sliced."""
    axes = {
        tuple(pairs.items()): found for pairs in _aligned(labelled) if (found := probe_slices(call, pairs)) is not None
    }
    covered = {pair for pairs in axes for pair in pairs}
    if axes and all((k, d) in covered for k, x in labelled.items() for d in x.varying):
        return _every_axis(registry, call, labelled, axes)
    for pairs, found in [*axes.items(), *_find_other_axes(call, labelled, axes)]:
        if {k for k, _ in pairs} == set(labelled):
            return _one_axis(registry, call, labelled, dict(pairs), found)
    return None


def _aligned(labelled: dict[int, Labels]) -> list[dict[int, int]]:
    """Candidate axes: operands laid under each other from the right, as broadcasting does."""
    found: dict[int, dict[int, int]] = {}
    for k, x in labelled.items():
        for d in x.varying:
            found.setdefault(d - len(x.shape), {})[k] = d
    return list(found.values())


def _find_other_axes(
    call: OpCall, labelled: dict[int, Labels], tried: dict[Pairs, SlicedOp]
) -> Iterator[tuple[Pairs, SlicedOp]]:
    """Axes that do not stand under each other (einsum)."""
    choices = [[(k, d) for d in x.varying] for k, x in labelled.items()]
    for pairs in list(product(*choices))[:MOST]:
        if pairs not in tried and len({call.leaves[k].shape[d] for k, d in pairs}) == 1:
            found = probe_slices(call, dict(pairs))
            if found is not None:
                yield pairs, found


def _parameters(
    registry: TensorRegistry, call: OpCall, given: dict[int, Labels | None], labelled: dict[int, Labels]
) -> dict[int, Labels]:
    """Parameters with several long axes follow the channels they meet (a scale of shape (heads, 1, d))."""
    if len(labelled) != 1 or len(call.shapes) != 1:
        return {}
    (x,) = labelled.values()
    found: dict[int, Labels] = {}
    for k in call.tensors:
        p = call.leaves[k]
        name = registry.names.get(id(p))
        if given[k] is not None or name is None or name in registry.graph.dense:
            continue
        axis = _channels(x)
        d = axis - len(x.shape) + p.dim()
        if d >= 0 and p.dim() > 1 and p.shape[d] == x.shape[axis]:
            known = registry.graph.slices.get(name) or Slices(
                name, d, registry.graph.add_values(p.shape[d], parametric=True)
            )
            if known.axis == d:
                registry.graph.slices[name] = known
                found[k] = label_axis(known.ids, d, p.shape)
                registry.put(p, found[k])
    return found


def _channels(x: Labels) -> int:
    """The axis along which there are most channels: tokens, one of which is a parameter, differ less."""

    def distinct(axis: int) -> int:
        others = tuple(d for d in range(x.core.dim()) if d != axis)
        return len(np.unique(x.core.numpy().min(axis=others)))

    return max(x.varying, key=distinct)


def _every_axis(
    registry: TensorRegistry, call: OpCall, labelled: dict[int, Labels], axes: dict[Pairs, SlicedOp]
) -> list[Labels] | None:
    """Each labelled axis of each operand can be sliced: labels go element by element."""
    kills = {k: z for pairs, found in axes.items() for (k, _), z in zip(pairs, found.kills, strict=True)}
    everything = next(iter(axes.values())).all
    results: list[Labels] = []
    ids: Ids | None = None
    for i, shape in enumerate(call.shapes):
        arrays = []
        for k, x in labelled.items():
            target = {d: found.axes[i] for pairs, found in axes.items() for kk, d in pairs if kk == k}
            arrays.append(_arrange_labels(x, target, len(shape)))
        together = np.broadcast_arrays(*arrays)
        if ids is None or ids.size != together[0].size:
            ids = _combine_values(
                registry, [a.reshape(-1, 1) for a in together], [kills[k] for k in labelled], everything
            )
        results.append(Labels(torch.from_numpy(ids.reshape(together[0].shape).copy()), shape))
    return results


def _arrange_labels(x: Labels, target: dict[int, int], dim: int) -> np.ndarray:
    """The labels of an operand laid out along the output's axes: its axis d becomes ``target[d]``."""
    core = x.core.numpy()
    order = sorted(x.varying, key=lambda d: target[d])
    sizes = [1] * dim
    for d in order:
        sizes[target[d]] = core.shape[d]
    return core.transpose([*order, *(d for d in range(core.ndim) if d not in order)]).reshape(sizes)


def _one_axis(
    registry: TensorRegistry, call: OpCall, labelled: dict[int, Labels], dims: dict[int, int], found: SlicedOp
) -> list[Labels]:
    """Only whole slices along one axis are independent (a head of attention): all in a slice stay together."""
    matrices = []
    for k, x in labelled.items():
        rows = np.moveaxis(_spread(x, dims[k]), dims[k], 0)
        matrices.append(rows.reshape(len(rows), -1))
        registry.graph.tie(matrices[-1][:, :1], matrices[-1])
    order = list(dims)
    ids = _combine_values(registry, matrices, [found.kills[order.index(k)] for k in labelled], found.all)
    return [label_axis(ids, d, shape) for d, shape in zip(found.axes, call.shapes, strict=True)]


def _spread(x: Labels, axis: int) -> np.ndarray:
    """The labels with one axis at its full size, the others as short as they are."""
    sizes = list(x.core.shape)
    sizes[axis] = x.shape[axis]
    return x.core.expand(sizes).numpy()


def _combine_values(registry: TensorRegistry, operands: list[Ids], kills: list[bool], everything: bool) -> Ids:
    """The values behind an op: the operand's own where nothing but parameters joins it and zero stays zero."""
    graph = registry.graph
    values = [k for k, x in enumerate(operands) if not graph.is_parametric(x)]
    for x in operands[1:]:
        graph.tie(operands[0][:, 0], x[:, 0])
    if len(values) == 1 and kills[values[0]] and operands[values[0]].shape[1] == 1:
        return operands[values[0]][:, 0]
    out = graph.add_values(len(operands[0]), parametric=not values)
    graph.tie(out, operands[0][:, 0])
    graph.steps.append(Combination(out, tuple(operands), tuple(kills), everything))
    return out

"""A layer as a matrix: its output at a position is its weights times a row of its input."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sosp.core.layers import find_layer_type
from sosp.graph.ops import CONVOLUTIONS, TRANSPOSED, name_arguments

Sizes = tuple[int, ...]


def is_plain(layer: Any) -> bool:
    """Its weight is a parameter of its own, which can be written."""
    return layer._parameters.get("weight") is not None


def count_groups(layer: Any) -> int:
    return int(getattr(layer, "groups", 1))


def find_bias(layer: Any) -> Tensor | None:
    """Return the bias of a layer; None if it has none, as a layer type of the user's own may."""
    return getattr(layer, "bias", None)


def get_matrix(layer: Any) -> Tensor:
    """(G, C/G, K): for each group, a row of weights for each of its outputs."""
    weight, G = layer.weight.detach(), count_groups(layer)
    if not isinstance(layer, nn.modules.conv._ConvNd):
        return (weight if _rows_first(layer) else weight.T)[None]
    if not layer.transposed:
        return weight.reshape(G, len(weight) // G, -1)
    taps = weight.reshape(G, -1, *weight.shape[1:]).transpose(1, 2)  # (G, out, in, taps ...)
    return taps.flip(tuple(range(3, taps.dim()))).reshape(G, taps.shape[1], -1)


@torch.no_grad()
def set_matrix(layer: Any, new: Tensor) -> None:
    """The inverse of ``matrix``, in place."""
    weight, G = layer.weight, count_groups(layer)
    if not isinstance(layer, nn.modules.conv._ConvNd):
        weight.copy_(new[0] if _rows_first(layer) else new[0].T)
    elif not layer.transposed:
        weight.copy_(new.reshape(weight.shape))
    else:
        taps = new.reshape(G, weight.shape[1], -1, *weight.shape[2:])
        taps = taps.flip(tuple(range(3, taps.dim()))).transpose(1, 2)
        weight.copy_(taps.reshape(weight.shape))


def _rows_first(layer: Any) -> bool:
    kind = find_layer_type(layer)
    return kind is None or kind.weight_axis == 0


def take_values(output: Tensor, axis: int, channels: Tensor, rows: Tensor) -> Tensor:
    """(R, C) some channels at some positions, which are counted over all axes but that of the channels."""
    axis %= output.dim()
    behind = prod(output.shape[axis + 1 :])
    flat = output.reshape(-1, output.shape[axis], behind)
    return flat[rows // behind, :, rows % behind].index_select(1, channels)


@dataclass(frozen=True, eq=False)
class LayerUse:
    """How a layer's weight was used: by which op, on which tensor (a layer may pad it first), with which numbers."""

    x: Tensor
    kernel: Sizes = ()  # of a convolution, and all that follows
    stride: Sizes = ()
    dilation: Sizes = ()
    padding: tuple[tuple[int, int], ...] = ()  # before and behind
    groups: int = 1
    transposed: bool = False

    def inputs(self, shape: Sequence[int], rows: Tensor) -> Tensor:
        """(G, R, K): what an output of that shape is computed from, at some of its positions."""
        if not self.kernel:
            return self.x.reshape(-1, self.x.shape[-1]).index_select(0, rows)[None]
        d = len(self.kernel)
        x, sizes = self.x.reshape(-1, *self.x.shape[-d - 1 :]), tuple(shape[-d:])
        x = F.pad(self._insert_zeros(x), [n for edges in reversed(self.padding) for n in edges])
        stride = (1,) * d if self.transposed else self.stride
        taps = torch.arange(prod(self.kernel), device=x.device)
        corners = _flatten_positions(rows % prod(sizes), sizes, stride, x.shape[-d:])
        places = corners[:, None] + _flatten_positions(taps, self.kernel, self.dilation, x.shape[-d:])
        found = x.flatten(2)[(rows // prod(sizes))[:, None], :, places]  # (R, taps, channels)
        return found.transpose(1, 2).reshape(len(rows), self.groups, -1).transpose(0, 1)

    def _insert_zeros(self, x: Tensor) -> Tensor:
        """Zeros in between, such that an ordinary convolution of stride 1 does what a transposed one does."""
        for k, stride in enumerate(self.stride if self.transposed else (), 2):
            sizes = list(x.shape)
            sizes[k] = (sizes[k] - 1) * stride + 1
            index = torch.arange(0, sizes[k], stride, device=x.device)
            x = x.new_zeros(sizes).index_copy(k, index, x)
        return x

    def read_positions(self, sizes: Sizes, out: Sizes, rows: Tensor) -> Tensor | None:
        """(R, T): the positions of its input that are read at positions of the output, -1 beyond the edge.

        ``sizes`` and ``out`` are those of an example, without channels; None for a transposed convolution.
        """
        if not self.kernel:
            return rows[:, None]
        if self.transposed:
            return None
        taps = torch.arange(prod(self.kernel), device=rows.device)
        place, inside = rows[:, None] % prod(out), torch.ones_like(rows[:, None] + taps, dtype=torch.bool)
        found, step = torch.zeros_like(inside, dtype=torch.int64), 1
        for k in reversed(range(len(sizes))):
            at = place % out[k] * self.stride[k] + taps % self.kernel[k] * self.dilation[k] - self.padding[k][0]
            inside &= (at >= 0) & (at < sizes[k])
            found += at * step
            place, taps, step = place // out[k], taps // self.kernel[k], step * sizes[k]
        return torch.where(inside, found + rows[:, None] // prod(out) * prod(sizes), -1)


def _flatten_positions(index: Tensor, sizes: Sizes, steps: Sizes, within: Sequence[int]) -> Tensor:
    """Positions in a box of ``sizes``, walked in ``steps``, as numbers in a larger box."""
    found, step = torch.zeros_like(index), 1
    for size, stride, width in zip(reversed(sizes), reversed(steps), reversed(within), strict=True):
        found += index % size * stride * step
        index, step = index // size, step * width
    return found


def find_layer_use(layer: Any, op: str, args: Any, kwargs: Mapping[str, Any]) -> LayerUse | None:
    """How an op used the layer's weight; None where it used something else."""
    given = name_arguments(op, args, kwargs)
    if given["weight"] is not getattr(layer, "weight", None):
        return None
    if op not in CONVOLUTIONS | TRANSPOSED:
        return LayerUse(given["input"])
    kernel = tuple(layer.weight.shape[2:])
    stride, dilation = (_repeat_per_axis(given.get(key, 1), kernel) for key in ("stride", "dilation"))
    transposed = op in TRANSPOSED
    padding = _compute_padding(given, kernel, dilation, transposed)
    return LayerUse(given["input"], kernel, stride, dilation, padding, int(given.get("groups", 1)), transposed)


def _repeat_per_axis(value: Any, kernel: Sizes) -> Sizes:
    """One number for all axes, or one for each."""
    return (value,) * len(kernel) if isinstance(value, int) else tuple(value) * (len(kernel) // len(value))


def _compute_padding(
    given: Mapping[str, Any], kernel: Sizes, dilation: Sizes, transposed: bool
) -> tuple[tuple[int, int], ...]:
    """Zeros before and behind, along every axis."""
    padding, extents = given.get("padding", 0), [r * (k - 1) for k, r in zip(kernel, dilation, strict=True)]
    if isinstance(padding, str):
        return tuple((extent // 2, extent - extent // 2) if padding == "same" else (0, 0) for extent in extents)
    edges = _repeat_per_axis(padding, kernel)
    if not transposed:
        return tuple((edge, edge) for edge in edges)
    more = _repeat_per_axis(given.get("output_padding", 0), kernel)
    return tuple((s - e, s - e + m) for s, e, m in zip(extents, edges, more, strict=True))

"""A layer as a matrix: its output at a position is its weights times a row of its input."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sosp.layers import layer_type


def is_plain(layer: Any) -> bool:
    """Its weight is a parameter of its own, which can be written."""
    return "weight" in layer._parameters and layer._parameters["weight"] is not None


def groups_of(layer: Any) -> int:
    return int(getattr(layer, "groups", 1))


def matrix(layer: Any) -> Tensor:
    """(G, C/G, K): for each group, a row of weights for each of its outputs."""
    weight, G = layer.weight.detach(), groups_of(layer)
    if not isinstance(layer, nn.modules.conv._ConvNd):
        return (weight if _rows_first(layer) else weight.T)[None]
    if not layer.transposed:
        return weight.reshape(G, len(weight) // G, -1)
    taps = weight.reshape(G, -1, *weight.shape[1:]).transpose(1, 2)  # (G, out, in, taps ...)
    return taps.flip(tuple(range(3, taps.dim()))).reshape(G, taps.shape[1], -1)


@torch.no_grad()
def set_matrix(layer: Any, new: Tensor) -> None:
    """The inverse of ``matrix``, in place."""
    weight, G = layer.weight, groups_of(layer)
    if not isinstance(layer, nn.modules.conv._ConvNd):
        weight.copy_(new[0] if _rows_first(layer) else new[0].T)
    elif not layer.transposed:
        weight.copy_(new.reshape(weight.shape))
    else:
        taps = new.reshape(G, weight.shape[1], -1, *weight.shape[2:])
        taps = taps.flip(tuple(range(3, taps.dim()))).transpose(1, 2)
        weight.copy_(taps.reshape(weight.shape))


def _rows_first(layer: Any) -> bool:
    kind = layer_type(layer)
    return kind is None or kind.weight_axis == 0


def take(output: Tensor, axis: int, channels: Tensor, rows: Tensor) -> Tensor:
    """(R, C) some channels at some positions, which are counted over all axes but that of the channels."""
    axis %= output.dim()
    behind = prod(output.shape[axis + 1 :])
    flat = output.reshape(-1, output.shape[axis], behind)
    return flat[rows // behind, :, rows % behind].index_select(1, channels)


def inputs_at(layer: Any, x: Tensor, shape: torch.Size, rows: Tensor) -> Tensor:
    """(R, G, K): what the layer's output of that shape is computed from, at some of its positions."""
    G = groups_of(layer)
    if not isinstance(layer, nn.modules.conv._ConvNd):
        return x.reshape(-1, x.shape[-1]).index_select(0, rows)[:, None]
    d = len(layer.kernel_size)
    x, sizes = x.reshape(-1, *x.shape[-d - 1 :]), shape[-d:]
    stride = (1,) * d if layer.transposed else layer.stride
    x = _spread(layer, x) if layer.transposed else _padded(layer, x)
    example, places = rows // prod(sizes), _corners(rows % prod(sizes), sizes, stride, x.shape[-d:])
    taps = _corners(torch.arange(prod(layer.kernel_size), device=x.device), layer.kernel_size, layer.dilation, x.shape[-d:])
    found = x.flatten(2)[example[:, None], :, places[:, None] + taps]  # (R, taps, channels)
    return found.transpose(1, 2).reshape(len(rows), G, -1)


def _corners(index: Tensor, sizes: Any, steps: Any, within: Any) -> Tensor:
    """Positions in a box of ``sizes``, walked in ``steps``, as numbers in a larger box."""
    found = torch.zeros_like(index)
    step = 1
    for size, stride, width in zip(reversed(sizes), reversed(steps), reversed(within), strict=True):
        found += index % size * stride * step
        index = index // size
        step *= width
    return found


def _padded(layer: Any, x: Tensor) -> Tensor:
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    return F.pad(x, layer._reversed_padding_repeated_twice, mode=mode)


def _spread(layer: Any, x: Tensor) -> Tensor:
    """The input of a transposed convolution such that an ordinary one of stride 1 gives its output."""
    for k, stride in enumerate(layer.stride, 2):
        sizes = list(x.shape)
        sizes[k] = (sizes[k] - 1) * stride + 1
        index = torch.arange(0, sizes[k], stride, device=x.device)
        x = x.new_zeros(sizes).index_copy(k, index, x)
    edges: list[int] = []
    for size, dilation, pad, more in zip(
        layer.kernel_size, layer.dilation, layer.padding, layer.output_padding, strict=True
    ):
        edge = dilation * (size - 1) - pad
        edges = [edge, edge + more, *edges]
    return F.pad(x, edges)

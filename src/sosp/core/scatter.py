"""The pieces a shrunk network may contain: a scatter of channels, and what is left of an empty layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Scatter(nn.Module):
    """Output channel j is input channel ``index[j]``, or zero where that is -1.

    It sits as ``scatter`` in the module whose output it rearranges, called by a forward hook. Its buffers are not
    in the state dict, whose names stay those of the original network.
    """

    index: Tensor  # (width,)
    places: Tensor  # (n,) the output channels that are not zero
    source: Tensor  # (n,) the input channels they take
    inverse: Tensor  # (width,) as index, with some valid channel where it is -1
    empty: Tensor  # (width,) bool

    def __init__(self, index: Tensor, axis: int, given: int) -> None:
        super().__init__()
        self.axis, self.given = axis, given  # given: the channels it takes
        places = (index >= 0).nonzero().flatten()
        self.dense = len(places) == len(index)  # nothing is zero: it only drops or reorders
        self.whole = torch.equal(index[places], torch.arange(given))  # it takes every channel, in order
        kept = {"index": index, "places": places, "source": index[places]}
        for name, value in {**kept, "inverse": index.clamp_min(0), "empty": index < 0}.items():
            self.register_buffer(name, value, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        axis = self.axis % x.dim()
        if axis == 1 and x.dim() == 4 and not x.is_contiguous() and x.is_contiguous(memory_format=torch.channels_last):
            # Both ways channels last: the gradient of indexing would come back contiguous, and be converted.
            return self._moved(x.permute(0, 2, 3, 1), 3).permute(0, 3, 1, 2)
        return self._moved(x, axis)

    def _moved(self, x: Tensor, axis: int) -> Tensor:
        if self.dense:
            return x.index_select(axis, self.source)
        if torch.compiler.is_compiling() or type(x) is not Tensor:  # one gather that fuses with what follows
            return x.index_select(axis, self.inverse).masked_fill(_align_values(self.empty, x.dim(), axis), 0)
        shape = list(x.shape)
        shape[axis] = len(self.index)
        taken = x if self.whole else x.index_select(axis, self.source)
        return x.new_zeros(shape).index_copy_(axis, self.places, taken)

    def extra_repr(self) -> str:
        return f"{self.given} -> {len(self.index)}, axis={self.axis}"


def _align_values(values: Tensor, dim: int, axis: int) -> Tensor:
    shape = [1] * dim
    shape[axis] = len(values)
    return values.view(shape)


def scatter_output(module: Any, args: Any, output: Tensor) -> Tensor:
    """The forward hook of a module with a ``scatter``."""
    return module.scatter(output)


class ZeroLayer(nn.Module):
    """What is left of a layer that lost every channel: zeros of the shape the layer would give."""

    def __init__(self, layer: Any, width: int = 1) -> None:
        super().__init__()
        self.width = width  # one channel, unless what follows needs more
        self.linear = not hasattr(layer, "kernel_size")
        if not self.linear:
            self.transposed = bool(layer.transposed)
            self.kernel_size, self.stride, self.dilation = layer.kernel_size, layer.stride, layer.dilation
            self.output_padding = layer.output_padding
            self.padding = layer.padding

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.linear:
            return x.new_zeros((*x.shape[:-1], self.width))
        d = len(self.kernel_size)
        return x.new_zeros((*x.shape[: -d - 1], self.width, *(self._size(n, i) for i, n in enumerate(x.shape[-d:]))))

    def _size(self, n: int, i: int) -> int:
        k, s, r = self.kernel_size[i], self.stride[i], self.dilation[i]
        if self.padding == "same":
            return n
        p = 0 if self.padding == "valid" else self.padding[i]
        if self.transposed:
            return (n - 1) * s - 2 * p + r * (k - 1) + self.output_padding[i] + 1
        return (n + 2 * p - r * (k - 1) - 1) // s + 1

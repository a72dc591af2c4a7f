"""The layers whose channels can be removed, and the normalisations that belong to them: where their channels are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from torch import Tensor, nn


@dataclass(frozen=True)
class LayerType:
    """How a type of layer lays out its channels."""

    axis: int  # of the channels in the output
    channels: Callable[[Any], int]
    kernel: Callable[[Any], float] = lambda m: 1.0
    positions: Callable[[Tensor, Tensor], float] = lambda x, y: y.numel() / y.shape[-1]  # from input and output
    depthwise: Callable[[Any], bool] = lambda m: False
    weight_axis: int = 0  # of the output channels in the weight
    sizes: tuple[str, str] = ("out_features", "in_features")  # attributes that name its widths


def _edge(m: Any) -> float:
    return prod(m.kernel_size) ** (1 / len(m.kernel_size))


def _depthwise(m: Any) -> bool:
    return m.groups == m.in_channels == m.out_channels and m.groups > 1


WIDTHS = ("out_channels", "in_channels")
# Every position of the output (of the input, for transposed convolutions) applies the filter once.
CONV = LayerType(1, lambda m: m.out_channels, _edge, lambda x, y: y.numel() / y.shape[1], _depthwise, 0, WIDTHS)
TRANSPOSED = LayerType(1, lambda m: m.out_channels, _edge, lambda x, y: x.numel() / x.shape[1], _depthwise, 1, WIDTHS)

LAYERS: dict[type[nn.Module] | str, LayerType] = {
    nn.Conv1d: CONV,
    nn.Conv2d: CONV,
    nn.Conv3d: CONV,
    nn.ConvTranspose1d: TRANSPOSED,
    nn.ConvTranspose2d: TRANSPOSED,
    nn.ConvTranspose3d: TRANSPOSED,
    nn.Linear: LayerType(-1, lambda m: m.out_features),
    "transformers.pytorch_utils.Conv1D": LayerType(-1, lambda m: m.nf, weight_axis=1, sizes=("nf", "nx")),
}

# Normalisations that treat every channel by itself, so that they belong to the layer they follow. LayerNorm and
# GroupNorm mix channels: a channel in front of them is removed in front of them.
NORMS: tuple[type[nn.Module], ...] = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
NORM_NAMES = frozenset({"FrozenBatchNorm2d"})


def find_channel_axis(module: nn.Module, output: Tensor) -> int:
    """Where the channels of a layer's or a norm's output are: a convolution also takes an example without a batch."""
    kind = find_layer_type(module)
    axis = kind.axis if kind else 1
    spatial = len(getattr(module, "kernel_size", ()))
    return 0 if kind and axis == 1 and output.dim() == spatial + 1 else axis


def find_layer_type(module: nn.Module) -> LayerType | None:
    """The entry of ``LAYERS`` for this module, also for subclasses and classes known by name only."""
    for cls in type(module).__mro__:
        found = LAYERS.get(cls) or LAYERS.get(f"{cls.__module__}.{cls.__qualname__}")
        if found:
            return found
    return None


def is_norm(module: nn.Module) -> bool:
    """A normalisation that may belong to the layer in front of it."""
    return isinstance(module, NORMS) or any(c.__name__ in NORM_NAMES for c in type(module).__mro__)


def find_width(model: nn.Module, name: str, kind: str) -> int | None:
    """The channels of the layer (for kind "weights", the elements of the parameter) of that name, if it is one."""
    if kind == "weights":
        return model.get_parameter(name).numel()
    module = model.get_submodule(name)
    found = find_layer_type(module)
    return found.channels(module) if found else None

"""Parameters and multiply-accumulates of one filter, by the hand formulas."""

from copy import deepcopy
from math import prod

import torch
from torch import Tensor, nn

TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED)


def weights_per_filter(layer: nn.Module) -> int:
    """Convolution: ``k_h k_w in/groups``; linear: ``in``."""
    if isinstance(layer, nn.Linear):
        return layer.in_features
    assert isinstance(layer, CONVOLUTIONS), layer
    return prod(layer.kernel_size) * layer.in_channels // layer.groups


def filter_parameters(layer: nn.Module) -> int:
    """The weights of one filter, and one for its bias if there is one."""
    return weights_per_filter(layer) + (layer.bias is not None)


def filter_macs(layer: nn.Module, positions: int) -> int:
    """``weights x positions`` of one example; the bias is no multiplication.

    A convolution or linear layer is applied once per *output* position (pixel, token), a transposed
    convolution once per *input* position. Padding counts as if it were data.
    """
    return weights_per_filter(layer) * positions


def output_size(size: int, kernel: int, stride: int = 1, padding: int = 0, dilation: int = 1) -> int:
    """``floor((size + 2 padding - dilation (kernel - 1) - 1) / stride) + 1`` along one axis."""
    return (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1


def positions(model: nn.Module, inputs: Tensor) -> dict[str, int]:
    """How often each layer's filters are applied to one example, over all calls of a forward pass."""
    found: dict[str, int] = {}

    def note(name: str, layer: nn.Module, x: Tensor, y: Tensor) -> None:
        found[name] = found.get(name, 0) + _applications(layer, x.shape[1:], y.shape[1:])

    copy = deepcopy(model).eval()
    for name, module in copy.named_modules():
        if isinstance(module, (nn.Linear, *CONVOLUTIONS)):
            module.register_forward_hook(lambda layer, args, y, name=name: note(name, layer, args[0], y))
    with torch.no_grad():
        copy(inputs[:1])
    return found


def _applications(layer: nn.Module, into: torch.Size, out: torch.Size) -> int:
    """Positions of one example, from its shapes without the batch axis."""
    if isinstance(layer, nn.Linear):
        return prod(out[:-1])  # (..., features)
    return prod(into[1:] if isinstance(layer, TRANSPOSED) else out[1:])  # (channels, ...)

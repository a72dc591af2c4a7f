"""What removal means: a copy of the network with the removed feature maps set to zero by hand."""

from copy import deepcopy

import torch
from torch import nn


@torch.no_grad()
def zeroed(model: nn.Module, layers: dict[str, str | None], removed: dict[str, list[int]]) -> nn.Module:
    """A copy in which every removed channel is zero after its own BatchNorm, or after its layer without one.

    With a BatchNorm, gamma = beta = 0 of that channel: its output is then zero in train and in eval mode,
    whatever the statistics. Without one, the layer's weight row and bias are zero. All else is untouched.
    """
    copy = deepcopy(model)
    for layer, channels in removed.items():
        module = copy.get_submodule(layers[layer] or layer)
        for channel in channels:
            _zero(module, channel)
    return copy


def _zero(module: nn.Module, channel: int) -> None:
    if isinstance(module, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)):
        module.weight[:, channel] = 0  # (in, out, ...)
    else:
        module.weight[channel] = 0  # (out, in, ...), or gamma (out,)
    if module.bias is not None:
        module.bias[channel] = 0

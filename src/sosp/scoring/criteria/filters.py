"""The weights of filters as rows of a matrix, and sums over the channels of a structure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sosp.core.layers import find_layer_type
from sosp.graph.records import Structures
from sosp.scoring.passes import convert_to_double


def flatten_filters(model: nn.Module, name: str) -> Tensor:
    """(channels, weights of one filter) of a layer, in double precision; biases are left out."""
    module: Any = model.get_submodule(name)
    kind = find_layer_type(module)
    assert kind is not None
    weight = convert_to_double(module.weight.detach())
    if kind.weight_axis == 0:
        return weight.flatten(1)
    groups = getattr(module, "groups", 1)
    # A transposed convolution keeps (in, out / groups, ...): the filters of group g stand in its rows of ``in``.
    return weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1).flatten(1)


def sum_channels(structures: Structures, channels: Sequence[Tensor]) -> Tensor:
    """(S,) the sum, over the channels of each structure, of one number per channel, (channels,) per layer."""
    together = torch.cat(list(channels))
    ids = torch.cat(structures.ids).to(together.device)
    return together.new_zeros(len(structures)).index_add_(0, ids[ids >= 0], together[ids >= 0])


def average_channels(structures: Structures, channels: Sequence[Tensor]) -> Tensor:
    """(S,) their mean."""
    return sum_channels(structures, channels) / sum_channels(structures, [torch.ones_like(c) for c in channels])

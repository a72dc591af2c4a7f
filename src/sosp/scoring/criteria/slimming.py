"""Network Slimming: the scale of a channel's batch norm."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sosp.graph.records import Layer
from sosp.scoring.criteria.filters import sum_channels
from sosp.scoring.passes import Options, Problem, convert_to_double


def slimming(problem: Problem, options: Options) -> Tensor:
    """``|gamma_s|``, the scale of the batch norm behind a channel, all layers ranked together.

    Liu et al., Learning Efficient Convolutional Networks through Network Slimming, ICCV 2017
    (github.com/Eric-mingjie/network-slimming). The paper trains with an L1 penalty on the scales first; without it
    they say little about a channel. A structure of several channels has the sum of its scales.
    """
    return sum_channels(problem.structures, [_scales(problem, layer) for layer in problem.structures.layers])


def _scales(problem: Problem, layer: Layer) -> Tensor:
    """(channels,) of all norms that belong to a layer; it has several where it is called several times."""
    norms: list[Any] = [problem.model.get_submodule(name) for name in layer.norms]
    return torch.stack([convert_to_double(norm.weight.detach()).abs() for norm in norms]).sum(0)

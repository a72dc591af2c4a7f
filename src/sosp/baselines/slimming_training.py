"""Network Slimming: an L1 term on the scales of the batch norms, while the network learns."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sosp.baselines.arguments import check_number
from sosp.errors import StructureError
from sosp.training import Companion

Norm = nn.modules.batchnorm._BatchNorm


class Slimming(Companion):
    """Adds ``strength * sum |gamma|`` over the scales of all batch norms, so that channels nobody needs fade out.

    Liu et al., Learning Efficient Convolutional Networks through Network Slimming, ICCV 2017, Eq. 1; the subgradient
    at zero is zero, as in github.com/Eric-mingjie/network-slimming, which takes 1e-4 on CIFAR. Afterwards
    ``method="slimming"`` ranks the channels by their scales.
    """

    def __init__(self, strength: float) -> None:
        self.strength = check_number("strength", strength)

    def begin(self, model: nn.Module) -> Mapping[str, nn.Parameter]:
        self.scales = find_norm_scales(model)
        return {}

    def loss(self, model: nn.Module, inputs: Any, outputs: Any, labels: Tensor) -> Tensor:
        return self.strength * torch.cat([*self.scales]).abs().sum()


def find_norm_scales(model: nn.Module) -> list[nn.Parameter]:
    """The scales of all batch norms that learn; there must be one."""
    norms = [m.weight for m in model.modules() if isinstance(m, Norm) and m.weight is not None]
    found = [scale for scale in norms if scale.requires_grad]
    if not found:
        raise StructureError(
            "slimming penalises the trainable scales of batch norms, but this network has none. Use a network with "
            "batch norms, or leave slimming out."
        )
    return found

"""What a method that learns leaves behind: the network, its saliencies, and what the method itself would remove."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from sosp.graph.mask import Mask
from sosp.graph.records import Saliency, Structures
from sosp.training import Epoch


@dataclass(frozen=True, eq=False)
class Learned:
    """``sosp.select(learned.saliency, ...)`` chooses by a budget; ``mask`` is what the method chose by itself."""

    model: nn.Module  # as it was trained, in eval mode
    saliency: Saliency
    mask: Mask
    history: tuple[Epoch, ...]


def find_structure_maxima(structures: Structures, channels: Sequence[Tensor]) -> Tensor:
    """(S,) the largest, over the channels of each structure, of one number per channel, (channels,) per layer."""
    together = torch.cat(list(channels))
    ids = torch.cat(structures.ids).to(together.device)
    own = ids >= 0
    return together.new_zeros(len(structures)).scatter_reduce(0, ids[own], together[own], "amax", include_self=False)
